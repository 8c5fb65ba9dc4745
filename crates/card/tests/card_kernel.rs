//! Runs example 4 on an emulated card of this process, and compares its output with the README.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, mpsc};

use millstream_card_server::{CardConfig, ExitReason, Lifetime, NetworkConfig, serve_with};
use millstream_rdma::{DeviceSelector, device};
use millstream_wasm::Wasm;

const MEMORY: u64 = 64 << 20;
/// The kernel's image in the commands of the README.
const IMAGE: &str = "target/template.wasm";

/// The example's program, which `cargo test` builds into the directory beside this test's.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples/card-kernel");
    assert!(program.is_file(), "{} is missing: run cargo build --examples", program.display());
    program
}

/// Contents of the fenced block of a language that contains `text`.
fn block<'a>(readme: &'a str, language: &str, text: &str) -> &'a str {
    let fence = format!("```{language}\n");
    let mut blocks = readme.split(&fence).skip(1).filter_map(|rest| Some(rest.split_once("```")?.0));
    blocks.find(|block| block.contains(text)).unwrap_or_else(|| panic!("no {language} block with {text:?}"))
}

#[track_caller]
fn stdout(what: &str, output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_example_prints_what_the_readme_says() {
    let device = device::open(&DeviceSelector::from_environment())
        .unwrap_or_else(|error| panic!("run `make lib` first: {error}"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("examples/4-card-kernel/README.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("template.wasm");
    let rustc = block(&readme, "sh", "rustc").replace(IMAGE, image.to_str().unwrap());
    stdout(&rustc, Command::new("sh").args(["-c", &rustc]).current_dir(&root).output().unwrap());

    let name = format!("example-{}", std::process::id()).parse().unwrap();
    let mut config = CardConfig::new(name, MEMORY);
    config.loaders = vec![Arc::new(Wasm::default())];
    config.network = Some(NetworkConfig { device, address: "127.0.0.1:0".to_owned() });
    let (lifetime, launcher) = std::io::pipe().unwrap();
    config.lifetime = Lifetime::Launcher(lifetime.into());
    let (sender, address) = mpsc::channel();
    let card = std::thread::spawn(move || serve_with(config, |address| sender.send(address).unwrap()));
    let address = address.recv().expect("the card listens").expect("on the network");

    let run = Command::new(program()).arg(address.to_string()).arg(&image).output().unwrap();
    assert_eq!(stdout("card-kernel", run), block(&readme, "text", ""));
    drop(launcher);
    assert_eq!(card.join().unwrap().unwrap(), ExitReason::LauncherExited);
}
