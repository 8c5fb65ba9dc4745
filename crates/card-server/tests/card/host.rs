//! Card processes for tests: the test binary starts a copy of itself as a card.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use millstream_card::Card;
use millstream_card_abi::CardName;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_server::kernel::events::run_on_events;
use millstream_card_server::kernel::{BuiltinKernel, Kernel, KernelRun};
use millstream_card_server::{CardConfig, ExitReason, Lifetime, serve};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// Environment variable that makes a test binary run a card: `NAME LIFETIME`.
const CARD_ENV: &str = "MILLSTREAM_TEST_CARD";

/// Memory of a test card (bytes).
pub(crate) const MEMORY: u64 = 16 << 20;

/// Longest time of any step of these tests.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Time for a kernel of a test card to reach a safe point.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// Exit status of a card that ended as its lifetime says.
pub(crate) const ENDED: i32 = 7;

/// Time for an owner to claim a card that will have one.
pub(crate) const CLAIM: Duration = Duration::from_secs(8);

/// Kernels of a test card; kernel `i` is loaded into region `i`.
const KERNELS: [&str; 4] = ["sum", "slow", "broken", "uninterruptible"];

/// The region of a kernel of the test card.
pub(crate) fn region_of(kernel: &str) -> u32 {
    KERNELS.iter().position(|name| *name == kernel).expect("a kernel of the test card") as u32
}

/// Loads the kernels of the test card.
pub(crate) fn load_kernels(card: &Card) {
    for (region, kernel) in KERNELS.iter().enumerate() {
        card.load(region, kernel).unwrap();
    }
}

/// Serves a card if this process was started for that.
pub(crate) fn card_main() {
    let Ok(order) = std::env::var(CARD_ENV) else {
        return;
    };
    let (name, lifetime) = order.split_once(' ').expect("name and lifetime");
    let mut config = CardConfig::new(name.parse().unwrap(), MEMORY);
    config.kernels = vec![
        BuiltinKernel { name: "sum", make: || Box::new(Sum) },
        BuiltinKernel { name: "slow", make: || Box::new(Slow) },
        BuiltinKernel { name: "broken", make: || Box::new(Broken) },
        BuiltinKernel { name: "uninterruptible", make: || Box::new(UninterruptibleKernel) },
    ];
    config.regions = KERNELS.len();
    config.grace = GRACE;
    config.lifetime = match lifetime {
        "unbound" => Lifetime::Unbounded,
        "launcher" => Lifetime::Launcher(stdin()),
        "owner" => Lifetime::Owner { claim_timeout: CLAIM },
        "nobody" => Lifetime::Owner { claim_timeout: Duration::from_secs(3) },
        other => panic!("lifetime {other:?}"),
    };
    let end = serve(config).expect("card");
    assert!(matches!(
        (lifetime, end),
        ("launcher", ExitReason::LauncherExited)
            | ("owner", ExitReason::OwnerDisconnected)
            | ("nobody", ExitReason::OwnerTimeout)
    ));
    std::process::exit(ENDED);
}

fn stdin() -> OwnedFd {
    std::io::stdin().as_fd().try_clone_to_owned().unwrap()
}

/// Adds the 64-bit words of its arguments.
struct Sum;

impl Kernel for Sum {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        run_on_events(run, 0, |run| {
            let mut sum = 0u64;
            for at in (0..run.args.len).step_by(8) {
                let word = run.memory.read_array(run.args.offset + at);
                let word = word.map_err(|error| error.fault(Cause::ArgsOutsideMemory))?;
                sum = sum.wrapping_add(u64::from_le_bytes(word));
            }
            run.counters.events += 1;
            let written = run.memory.write(run.result.offset, &sum.to_le_bytes());
            written.map_err(|error| error.fault(Cause::ResultOutsideMemory))
        })
    }
}

/// Runs one millisecond per byte of its arguments.
struct Slow;

impl Kernel for Slow {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        run_on_events(run, 0, |run| {
            let end = Instant::now() + Duration::from_millis(run.args.len);
            while Instant::now() < end {
                run.beat()?;
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        })
    }
}

/// Runs as [`Slow`] does, but ignores interrupts and keeps writing its result.
struct UninterruptibleKernel;

impl Kernel for UninterruptibleKernel {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        run_on_events(run, 0, |run| {
            let end = Instant::now() + Duration::from_millis(run.args.len);
            while Instant::now() < end {
                let written = run.memory.write(run.result.offset, &[0xff; 8]);
                written.map_err(|error| error.fault(Cause::ResultOutsideMemory))?;
                std::thread::sleep(Duration::from_micros(200));
            }
            Ok(())
        })
    }
}

/// Panics.
struct Broken;

impl Kernel for Broken {
    fn run(&mut self, _: &mut KernelRun<'_>) -> Result<(), Fault> {
        panic!("a kernel that panics");
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
        let child = again("card_main")
            .env(CARD_ENV, format!("{name} {lifetime}"))
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Process { name, child }
    }

    pub(crate) fn open(&self) -> Card {
        Card::open(&self.name, TIMEOUT).unwrap()
    }

    /// Waits for the card to exit.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < TIMEOUT, "card did not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops the process; returns when it is stopped.
    pub(crate) fn stop(&self) {
        kill_process(self.id(), Signal::STOP).unwrap();
        let (_, status) = waitpid(Some(self.id()), WaitOptions::UNTRACED).unwrap().expect("it waits");
        assert!(status.stopped(), "{status:?}");
    }

    /// Lets a stopped process continue.
    pub(crate) fn resume(&self) {
        kill_process(self.id(), Signal::CONT).unwrap();
    }

    pub(crate) fn id(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).expect("a process")
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

/// A command that runs only `test` of this test binary.
pub(crate) fn again(test: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("card-test").args([test, "--exact", "--nocapture"]).stdout(Stdio::null());
    command
}
