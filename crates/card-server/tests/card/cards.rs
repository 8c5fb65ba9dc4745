//! Cards on the network for tests: processes with their own verbs devices.

use std::io::Write as _;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_card::{RemoteCard, RemoteOptions};
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_server::backing::DevicePaths;
use millstream_card_server::kernel::{BuiltinKernel, Kernel, KernelLoader, KernelRun, LoadedKernel};
use millstream_card_server::{CardConfig, Lifetime, NetworkConfig, serve_with};
use millstream_rdma::{Device, DeviceSelector, device};
use millstream_tls::{ENV_KEYS, KeyFiles, Security};

use crate::host::{GRACE, TIMEOUT, again};

/// Environment variable that makes a test binary run a card on the network: the file for the card's address.
const NETWORK_CARD_ENV: &str = "MILLSTREAM_TEST_NETWORK_CARD";

/// Environment variables with the kind of card memory and the paths of its devices.
const KIND: &str = "MILLSTREAM_TEST_CARD_KIND";
const SYSFS: &str = "MILLSTREAM_TEST_CARD_SYSFS";
const CUDA: &str = "MILLSTREAM_TEST_CARD_CUDA";
const VULKAN: &str = "MILLSTREAM_TEST_CARD_VULKAN";

/// Banks of a test card.
pub(crate) const BANK: u64 = 4 << 20;
pub(crate) const BANKS: u32 = 4;

pub(crate) fn device() -> Device {
    device::open(&DeviceSelector::from_environment())
        .unwrap_or_else(|error| panic!("run `make lib` first: {error}"))
}

/// Serves a card if this process was started for that.
pub(crate) fn card_main() {
    let Ok(file) = std::env::var(NETWORK_CARD_ENV) else { return };
    let name = format!("net-{}", std::process::id()).parse().unwrap();
    let mut config = CardConfig::new(name, BANK);
    config.bank_count = BANKS;
    config.lease_duration = Duration::from_secs(3);
    config.kernels = vec![
        BuiltinKernel { name: "spin", make: || Box::new(Spin) },
        BuiltinKernel { name: "uninterruptible", make: || Box::new(UninterruptibleKernel) },
    ];
    config.loaders = vec![Arc::new(SlowLoader)];
    config.grace = GRACE;
    if let Ok(kind) = std::env::var(KIND) {
        config.memory_kind = kind.parse().unwrap();
    }
    if let Ok(sysfs) = std::env::var(SYSFS) {
        config.device_paths.sysfs = sysfs.into();
    }
    if let Ok(cuda) = std::env::var(CUDA) {
        config.device_paths.cuda = cuda;
    }
    if let Ok(vulkan) = std::env::var(VULKAN) {
        config.device_paths.vulkan = vulkan;
    }
    config.security = Security::from_environment().unwrap();
    config.network = Some(NetworkConfig { device: device(), address: "127.0.0.1:0".to_owned() });
    let stdin = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned().unwrap();
    config.lifetime = Lifetime::Launcher(stdin);
    serve_with(config, |address| {
        let address = address.unwrap().to_string();
        let partial = format!("{file}.partial");
        std::fs::File::create(&partial).unwrap().write_all(address.as_bytes()).unwrap();
        std::fs::rename(partial, &file).unwrap();
    })
    .expect("card");
    std::process::exit(0);
}

/// The image of a kernel that takes two seconds to load.
pub(crate) const SLOW_IMAGE: &[u8] = b"slow";

struct SlowLoader;

impl KernelLoader for SlowLoader {
    fn format(&self) -> &'static str {
        "the image of the tests"
    }

    fn recognises(&self, image: &[u8]) -> bool {
        image == SLOW_IMAGE
    }

    fn load(&self, _: &[u8]) -> Result<LoadedKernel, Fault> {
        std::thread::sleep(Duration::from_secs(6));
        Ok(LoadedKernel { name: "slow".to_owned(), kernel: Box::new(Spin) })
    }
}

/// Runs until it is stopped, with a safe point every 100 µs. First argument 13: panics; 14: ends with a
/// fault.
struct Spin;

impl Kernel for Spin {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        assert_ne!(run.arguments()[0], 13, "the argument that requests a panic");
        if run.arguments()[0] == 14 {
            return Err(Fault::new(Cause::KernelTrapped, 14));
        }
        let mut rounds = 0;
        loop {
            rounds += 1;
            run.set_progress(rounds);
            std::thread::sleep(Duration::from_micros(100));
            let mut state = [0; 16];
            state[0] = rounds;
            run.safe_point(&state)?;
        }
    }
}

/// Runs without a safe point for the milliseconds in its first argument. Keeps writing its second argument to
/// the start of its banks. Then it runs until it is interrupted, if the third argument is not zero.
struct UninterruptibleKernel;

impl Kernel for UninterruptibleKernel {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let [time, word, endless, ..] = *run.arguments();
        let until = Instant::now() + Duration::from_millis(time);
        while Instant::now() < until {
            run.banks().write(0, &word.to_le_bytes())?;
            std::thread::sleep(Duration::from_micros(200));
        }
        while endless != 0 && !run.interrupt_requested().load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(200));
        }
        run.safe_point(&[0; 16])
    }
}

/// A card on the network, in a separate process that ends when this value is dropped.
pub(crate) struct NetworkCard {
    pub(crate) process: Child,
    pub(crate) address: String,
}

impl NetworkCard {
    pub(crate) fn start() -> NetworkCard {
        NetworkCard::of("emulated", &DevicePaths::default())
    }

    /// Starts a card with this kind of memory.
    pub(crate) fn of(kind: &str, paths: &DevicePaths) -> NetworkCard {
        NetworkCard::with(kind, paths, None)
    }

    /// Starts a card with keys.
    pub(crate) fn with_keys(keys: &KeyFiles) -> NetworkCard {
        NetworkCard::with("emulated", &DevicePaths::default(), Some(keys))
    }

    fn with(kind: &str, paths: &DevicePaths, keys: Option<&KeyFiles>) -> NetworkCard {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("address");
        let mut command = again("network_card_main");
        if let Some(keys) = keys {
            command.env(ENV_KEYS, keys.to_variable());
        }
        command.env(KIND, kind).env(SYSFS, &paths.sysfs).env(CUDA, &paths.cuda).env(VULKAN, &paths.vulkan);
        let process =
            command.env(NETWORK_CARD_ENV, &file).stdin(Stdio::piped()).spawn().expect("start a card");
        let until = Instant::now() + TIMEOUT;
        while !file.exists() {
            assert!(Instant::now() < until, "card does not come up");
            std::thread::sleep(Duration::from_millis(2));
        }
        NetworkCard { process, address: std::fs::read_to_string(&file).unwrap() }
    }

    pub(crate) fn connect(&self) -> RemoteCard {
        self.connect_with(RemoteOptions::default())
    }

    pub(crate) fn connect_with(&self, options: RemoteOptions) -> RemoteCard {
        RemoteCard::connect(&device(), &self.address, options).unwrap()
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for NetworkCard {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let until = Instant::now() + TIMEOUT;
        while self.process.try_wait().unwrap().is_none() {
            if Instant::now() > until {
                let _ = self.process.kill();
                let _ = self.process.wait();
                if !std::thread::panicking() {
                    panic!("card does not end with its launcher");
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
