//! Card processes for tests: the test binary starts itself again as a card.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use millstream_card::command::{Cause, Fault};
use millstream_card::kernel::{Job, Kernel, Registry};
use millstream_card::{Card, CardName, Config, End, Lifetime, serve};

/// Environment of a test binary that is to be a card: `NAME LIFETIME`.
const BE_A_CARD: &str = "MILLSTREAM_TEST_CARD";

/// Memory of a test card [bytes].
pub(crate) const MEMORY: u64 = 16 << 20;

/// Longest that anything in these tests should take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Time for a kernel of a test card to reach a safe point.
pub(crate) const GRACE: Duration = Duration::from_millis(300);

/// Exit status of a card that ended as its lifetime says.
pub(crate) const ENDED: i32 = 7;

/// Serves a card if this process was started for that.
pub(crate) fn be_a_card() {
    let Ok(order) = std::env::var(BE_A_CARD) else {
        return;
    };
    let (name, lifetime) = order.split_once(' ').expect("name and lifetime");
    let mut kernels = Registry::builtin();
    kernels.add("sum", Sum).unwrap();
    kernels.add("slow", Slow).unwrap();
    kernels.add("broken", Broken).unwrap();
    kernels.add("deaf", Deaf).unwrap();
    let mut config = Config::new(name.parse().unwrap(), MEMORY, kernels);
    config.grace = GRACE;
    config.lifetime = match lifetime {
        "unbound" => Lifetime::Unbound,
        "launcher" => Lifetime::Launcher(stdin()),
        "owner" => Lifetime::Owner { claim_within: Duration::from_millis(500) },
        other => panic!("lifetime {other:?}"),
    };
    let end = serve(config).expect("card");
    assert!(matches!(
        (lifetime, end),
        ("launcher", End::LauncherGone) | ("owner", End::OwnerGone | End::NeverOwned)
    ));
    std::process::exit(ENDED);
}

fn stdin() -> OwnedFd {
    std::io::stdin().as_fd().try_clone_to_owned().unwrap()
}

/// Adds the 64-bit words of its arguments.
struct Sum;

impl Kernel for Sum {
    fn run(&mut self, job: &mut Job<'_>) -> Result<(), Fault> {
        let mut sum = 0u64;
        for at in (0..job.args.len).step_by(8) {
            let word = job
                .memory
                .read_array(job.args.offset + at)
                .map_err(|error| error.fault(Cause::ArgsOutsideMemory))?;
            sum = sum.wrapping_add(u64::from_le_bytes(word));
        }
        job.tally.events += 1;
        job.memory
            .write(job.result.offset, &sum.to_le_bytes())
            .map_err(|error| error.fault(Cause::ResultOutsideMemory))
    }
}

/// Runs for as many milliseconds as its arguments are long.
struct Slow;

impl Kernel for Slow {
    fn run(&mut self, job: &mut Job<'_>) -> Result<(), Fault> {
        let end = Instant::now() + Duration::from_millis(job.args.len);
        while Instant::now() < end {
            job.beat()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// As [`Slow`], but hears nothing, and writes to the place of its result all the time.
struct Deaf;

impl Kernel for Deaf {
    fn run(&mut self, job: &mut Job<'_>) -> Result<(), Fault> {
        let end = Instant::now() + Duration::from_millis(job.args.len);
        while Instant::now() < end {
            let written = job.memory.write(job.result.offset, &[0xff; 8]);
            written.map_err(|error| error.fault(Cause::ResultOutsideMemory))?;
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

/// Panics.
struct Broken;

impl Kernel for Broken {
    fn run(&mut self, _: &mut Job<'_>) -> Result<(), Fault> {
        panic!("a kernel with a fault of its own");
    }
}

/// A card process, killed when dropped.
pub(crate) struct Process {
    pub(crate) name: CardName,
    pub(crate) child: Child,
}

impl Process {
    /// Starts a card under a name that no other test uses.
    pub(crate) fn start(test: &str, lifetime: &str) -> Process {
        let name: CardName = format!("test-{}-{test}", std::process::id()).parse().unwrap();
        let child = again("be_a_card")
            .env(BE_A_CARD, format!("{name} {lifetime}"))
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Process { name, child }
    }

    pub(crate) fn open(&self) -> Card {
        Card::open(&self.name, PATIENCE).unwrap()
    }

    /// Waits for the card to end by itself.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < PATIENCE, "card did not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Processor time that the card has used.
    pub(crate) fn cpu_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        let ticks: u64 =
            after_name.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
        Duration::from_millis(10 * ticks)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This test binary, to run only `test`.
pub(crate) fn again(test: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("card-test").args([test, "--exact", "--nocapture"]).stdout(Stdio::null());
    command
}
