//! C programs on the built library: every function of both headers, and the MPI example.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use millstream_card::Card;
use millstream_card_server::{CardConfig, ExitReason, Lifetime, NetworkConfig, ServeError, serve_with};
use millstream_rdma::{DeviceSelector, device};
use millstream_tls::authority::{Authority, Validity};
use millstream_tls::{Keys, Security};
use millstream_wasm::Wasm;

const MEMORY: u64 = 16 << 20;

/// The folder of the libraries that `make lib` has built.
fn library_dir() -> PathBuf {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("lib");
    let dir = std::env::var_os("MILLSTREAM_LIB").map_or(built, PathBuf::from);
    let library = dir.join("libmillstream_memory.so");
    assert!(library.is_file(), "{} is missing: run `make lib`", library.display());
    dir
}

/// An emulated card of this process.
struct TestCard {
    name: String,
    address: String,
    launcher: Option<std::io::PipeWriter>,
    server: Option<JoinHandle<Result<ExitReason, ServeError>>>,
}

impl TestCard {
    fn start(name: &str) -> TestCard {
        TestCard::start_with(name, Security::NONE)
    }

    fn start_with(name: &str, security: Security) -> TestCard {
        let device = device::open(&DeviceSelector::from_environment())
            .unwrap_or_else(|error| panic!("run `make lib` first: {error}"));
        let name = format!("{name}-{}", std::process::id());
        let mut config = CardConfig::new(name.parse().unwrap(), MEMORY);
        config.loaders = vec![Arc::new(Wasm::default())];
        config.security = security;
        config.network = Some(NetworkConfig { device, address: "127.0.0.1:0".to_owned() });
        let (lifetime, launcher) = std::io::pipe().unwrap();
        config.lifetime = Lifetime::Launcher(lifetime.into());
        let (sender, address) = mpsc::channel();
        let server = std::thread::spawn(move || serve_with(config, |address| sender.send(address).unwrap()));
        let address = address.recv().expect("the card listens").expect("on the network").to_string();
        TestCard { name, address, launcher: Some(launcher), server: Some(server) }
    }
}

impl Drop for TestCard {
    fn drop(&mut self) {
        self.launcher.take();
        let ended = self.server.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert_eq!(ended.unwrap().unwrap().unwrap(), ExitReason::LauncherExited);
        }
    }
}

/// Runs a command and returns its standard output. Panics with all output if it fails.
#[track_caller]
fn output(command: &mut Command) -> String {
    let done = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {}\n{text}{errors}", done.status);
    text
}

/// Compiles a C program, given by its path from the crate, with the compiler `cc`.
#[track_caller]
fn compile(cc: &str, source: &str, folder: &Path) -> PathBuf {
    let krate = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = folder.join("program");
    let mut command = Command::new(cc);
    command
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(krate.join(source));
    for include in ["include", "../card-abi/include"] {
        command.arg("-I").arg(krate.join(include));
    }
    output(command.arg("-L").arg(library_dir()).args(["-lmillstream_memory", "-libverbs"]));
    program
}

/// A command that is killed if it hangs.
fn limited(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=1", "100"]).arg(program).env("LD_LIBRARY_PATH", library_dir());
    command
}

#[test]
fn memory_of_a_card_of_this_host() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("cc", "tests/c/memory.c", folder.path());
    let card = TestCard::start("capi-memory");
    let mut program = limited(&program);
    let mut running = program.arg(&card.name).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(running.stdout.take().expect("piped")).lines().map(Result::unwrap);
    // Its last lease is revoked by another client.
    let is_leased = lines.next().as_deref() == Some("leased");
    if is_leased {
        let client = Card::open(&card.name.parse().unwrap(), Duration::from_secs(10)).unwrap();
        let registers = client.registers();
        let epoch = registers.lease_epoch().load(Ordering::Acquire);
        registers.lease_revoke().store(epoch, Ordering::Release);
    }
    let rest: Vec<_> = lines.collect();
    assert!(running.wait().unwrap().success());
    assert_eq!((is_leased, rest), (true, vec!["memory: all calls agree".to_owned()]));
}

#[test]
fn a_card_on_the_network() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("cc", "tests/c/card.c", folder.path());
    let card = TestCard::start("capi-card");
    let mut client = limited(&program);
    client.env_remove("MILLSTREAM_KEYS").arg(&card.address).arg(KERNEL);
    assert_eq!(output(&mut client), "card: all calls agree\n");
}

/// A kernel with the result 42.
const KERNEL: &str = r#"(module (import "millstream_1" "result" (func $result (param i32 i64))) (memory (export "memory") 1)
    (func (export "run") (call $result (i32.const 0) (i64.const 42))))"#;

#[test]
fn a_card_with_keys() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("cc", "tests/c/card.c", folder.path());
    let authority = Authority::new("site", Validity::starting_now(Duration::from_secs(24 * 3600))).unwrap();
    let issue = |authority: &Authority, node: &str| {
        let validity = Validity::starting_now(Duration::from_secs(3600));
        authority.issue(node, &[], validity).unwrap().create(&folder.path().join(node)).unwrap()
    };
    let server = Keys::load(&issue(&authority, "node0")).unwrap();
    let card = TestCard::start_with("capi-keys", Security::new(server));
    issue(&authority, "node1");
    let client = |keys: Option<&str>| {
        let mut client = limited(&program);
        client.env_remove("MILLSTREAM_KEYS").arg(&card.address).arg(KERNEL);
        client.envs(keys.map(|node| ("MILLSTREAM_KEYS", folder.path().join(node))));
        client
    };
    assert_eq!(output(&mut client(Some("node1"))), "card: all calls agree\n");
    // Without keys, with those of another site, and with a folder that has none.
    let other = Authority::new("another", Validity::starting_now(Duration::from_secs(3600))).unwrap();
    let stranger = issue(&other, "stranger");
    std::fs::copy(folder.path().join("node1/authority.pem"), &stranger.authority).unwrap();
    for (keys, reason) in [
        (None, "MILLSTREAM_KEYS"),
        (Some("stranger"), "refused this program's certificate of \"stranger\""),
        (Some("nowhere"), "nowhere/certificate.pem"),
    ] {
        let refused = client(keys).output().unwrap();
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && text.contains(reason), "{keys:?}: {text}");
    }
}

#[test]
fn a_null_handle_and_a_missing_card_are_errors() {
    // SAFETY: null handles and C strings are valid arguments.
    unsafe {
        assert!(millstream_memory::msm_alloc(std::ptr::null_mut(), 8, 0).is_null());
        assert_eq!(millstream_memory::msm_check(std::ptr::null()), -1);
        assert!(millstream_memory::msm_open(c"no-such-card".as_ptr(), 0).is_null());
        let text = std::ffi::CStr::from_ptr(millstream_memory::millstream_error());
        assert_eq!(text, c"no card no-such-card on this host");
    }
}
