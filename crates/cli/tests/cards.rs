//! `millstream card` from the command line, on cards in separate processes.

#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/running.rs"]
mod running;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use running::Running;
use serde_json::Value;

struct Card {
    process: Running,
    address: String,
}

impl Card {
    fn serve(name: &str) -> Card {
        Card::serve_with(name, &["--memory", "32MiB", "--banks", "8"])
    }

    fn serve_with(name: &str, words: &[&str]) -> Card {
        Card::start(Command::new(env!("CARGO_BIN_EXE_millstream")), name, words)
    }

    fn start(mut program: Command, name: &str, words: &[&str]) -> Card {
        let process = program
            .args(["card", "--json", "serve", &format!("{name}-{}", std::process::id())])
            .args(["--listen", "127.0.0.1:0"])
            .args(words)
            .stdout(Stdio::piped())
            .spawn();
        let mut process = Running(process.unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let output: Value = serde_json::from_str(&line).unwrap();
        Card { process, address: output["address"].as_str().unwrap().to_owned() }
    }
}

/// Commands of one user, with a site file of two cards.
struct User<'a> {
    home: &'a Path,
}

impl User<'_> {
    fn card(&self, words: &[&str]) -> (bool, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_millstream"))
            .arg("card")
            .args(words)
            .current_dir(self.home)
            .env("XDG_STATE_HOME", self.home)
            .env_remove("MILLSTREAM_SITE")
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    }

    #[track_caller]
    fn does(&self, words: &[&str]) -> String {
        let (success, out, err) = self.card(words);
        assert!(success, "{words:?}: {out}{err}");
        out
    }

    #[track_caller]
    fn json(&self, words: &[&str]) -> Value {
        let words: Vec<_> = words.iter().copied().chain(["--json"]).collect();
        serde_json::from_str(&self.does(&words)).unwrap()
    }

    #[track_caller]
    fn fails(&self, words: &[&str]) -> String {
        let (success, out, err) = self.card(words);
        assert!(!success, "{words:?} must fail: {out}");
        err + &out
    }
}

/// Loads kernels that trap, loop or access memory outside their banks into one region of a leased card. The
/// other region and memory stay in use; each run ends with its cause, and the next one runs.
#[track_caller]
fn kernels_that_fail(user: &User<'_>) {
    user.does(&["load", "one", "0", "mix"]);
    user.does(&["start", "one", "0", "4MiB", "4096", "0xffffffff", "--banks", "2"]);
    let module = |body: &str| {
        format!(
            r#"(module
            (import "millstream_1" "address" (func $address (param i64 i64) (result i32)))
            (import "millstream_1" "result" (func $result (param i32 i64)))
            (memory (export "memory") 1)
            (func (export "run") {body}))"#
        )
    };
    let progress = || user.json(&["info", "one"])["regions"][0]["progress"].as_u64().unwrap();
    for (name, body, words, expected) in [
        ("trap", "unreachable", &[][..], "kernel trapped (0x1)"),
        ("zero", "(drop (i32.div_u (i32.const 1) (i32.const 0)))", &[], "kernel trapped (0x3)"),
        ("loop", "(loop $again (br $again))", &["--timeout", "0.05"], "longer than its timeout"),
        ("fuel", "(loop $again (br $again))", &["--fuel", "100000"], "used up its fuel (0x186a0)"),
        ("wild", "(i32.store (i32.const -8) (i32.const 1))", &[], "outside its banks"),
        // The other region's bank.
        (
            "foreign",
            "(drop (call $address (i64.const 4194304) (i64.const 8)))",
            &[],
            "outside its banks (0x400000)",
        ),
        ("fine", "(call $result (i32.const 0) (i64.const 9))", &[], ""),
    ] {
        let file = format!("{name}.wat");
        std::fs::write(user.home.join(&file), module(body)).unwrap();
        let before = progress();
        user.does(&["load", "one", "1", &file]);
        let start: Vec<_> =
            ["start", "one", "1", "--banks", "1", "--wait", "20"].iter().chain(words).copied().collect();
        if expected.is_empty() {
            let words: Vec<_> = start.iter().copied().chain(["--json"]).collect();
            let done: Value = serde_json::from_str(&user.does(&words)).unwrap();
            assert_eq!(done["results"][0], 9);
        } else {
            let refused = user.fails(&start);
            assert!(refused.contains(expected), "{name}: {refused}");
            let region = &user.json(&["info", "one"])["regions"][1];
            assert_eq!((&region["state"], region["cause"].is_null()), (&"Faulted".into(), false), "{region}");
        }
        // Memory stays usable, and the other region keeps running.
        user.does(&["put", "one", "8MiB", &file]);
        let len = std::fs::metadata(user.home.join(&file)).unwrap().len();
        user.does(&["get", "one", "8MiB", &len.to_string(), "back"]);
        assert_eq!(
            std::fs::read(user.home.join("back")).unwrap(),
            std::fs::read(user.home.join(&file)).unwrap()
        );
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while progress() <= before {
            assert!(std::time::Instant::now() < until, "the other region has stopped");
        }
    }
    // Images that are too large, or no kernels.
    std::fs::write(user.home.join("large.wasm"), vec![0; (1 << 20) + 1]).unwrap();
    assert!(
        user.fails(&["load", "one", "1", "large.wasm"])
            .contains("no loader of this card recognises the image")
    );
    let mut large = b"\0asm\x01\0\0\0".to_vec();
    large.resize((1 << 20) + 1, 0);
    std::fs::write(user.home.join("large.wasm"), large).unwrap();
    assert!(user.fails(&["load", "one", "1", "large.wasm"]).contains("too large (0x100001)"));
    user.does(&["stop", "one", "0"]);
}

#[test]
fn a_card_of_a_kind_that_is_not_here_says_so() {
    let home = tempfile::tempdir().unwrap();
    let user = User { home: home.path() };
    for (kind, expected) in [
        ("fpga", "is not a kind of card memory: expected emulated, pci:DDDD:BB:DD.F"),
        ("pci:ffff:ff:1f.7", "no PCI device ffff:ff:1f.7"),
        ("cuda:4000000000", "cuda:4000000000: "),
    ] {
        let output = user.fails(&["serve", "not-here", "--listen", "127.0.0.1:0", "--memory-kind", kind]);
        assert!(output.contains(expected), "{kind}: {output}");
    }
}

/// The kernel does not copy between processes in memory of a GPU, though it does in that of the drivers of tests. So the card
/// selects packets by itself, and clients of this host follow.
#[test]
fn clients_on_the_host_of_a_gpu_reach_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    gpu::link_drivers(folder.path());
    let mut program = Command::new(env!("CARGO_BIN_EXE_millstream"));
    program.env("LD_LIBRARY_PATH", folder.path());
    let card = Card::start(program, "gpu", &["--memory-kind", "cuda:0", "--memory", "32MiB", "--banks", "8"]);
    let environment = std::fs::read(format!("/proc/{}/environ", card.process.0.id())).unwrap();
    let packets = b"MILLSTREAM_PATH=wire";
    assert!(environment.split(|byte| *byte == 0).any(|variable| variable == packets));
    let user = User { home: folder.path() };
    let passed = user.does(&["selftest", &card.address]);
    assert!(passed.contains("ok       write and read of every bank"), "{passed}");
}

#[test]
fn a_session_from_lease_to_restore() {
    let (first, second) = (Card::serve("first"), Card::serve("second"));
    let home = tempfile::tempdir().unwrap();
    let user = User { home: home.path() };
    assert!(user.fails(&["list"]).contains("no site file"));
    let site = format!(
        "[[card]]\nname = \"one\"\naddress = \"{}\"\n[[card]]\nname = \"two\"\naddress = \"{}\"\n",
        first.address, second.address
    );
    std::fs::write(home.path().join("site.toml"), site).unwrap();
    let list = user.json(&["list"]);
    assert_eq!(list[1]["info"]["bank_count"], 8);
    assert!(user.does(&["list"]).contains("32 MiB"));
    assert!(user.fails(&["info", "three"]).contains("known cards: one, two"));
    assert!(user.fails(&["load", "one", "0", "mix"]).contains("acquire its lease first"));

    user.does(&["lease", "one", "--for", "60"]);
    assert!(user.fails(&["lease", "one"]).contains("you already hold lease"));
    std::fs::write(home.path().join("input"), [5; 4096]).unwrap();
    user.does(&["put", "one", "4MiB", "input"]);
    let refused = user.fails(&["put", "one", "32767KiB", "input"]);
    assert!(
        refused.contains("input: 4096 bytes at 0x1fffc00 do not fit in the card's 33554432 bytes"),
        "{refused}"
    );
    user.does(&["load", "one", "0", "mix"]);
    let done = user.json(&["start", "one", "0", "4MiB", "4096", "3", "--wait", "20"]);
    assert_eq!(done["results"][0], 3);
    user.does(&["get", "one", "4MiB", "4KiB", "output"]);
    let output = std::fs::read(home.path().join("output")).unwrap();
    let last = u64::from_le_bytes(*output.last_chunk().unwrap());
    assert_eq!(done["results"][1], last);
    let refused = user.fails(&["start", "one", "0", "4MiB", "4096", "3", "--banks", "1", "--wait", "20"]);
    assert!(refused.contains("outside its banks"), "{refused}");
    assert!(user.fails(&["load", "one", "0", "nonsense"]).contains("it has: "));
    assert!(user.fails(&["load", "one", "5", "mix"]).contains("no region 5"));

    // A running kernel continues after a checkpoint, and also on the other card.
    user.does(&["start", "one", "0", "4MiB", "4096", "0xffffffff"]);
    let watched = user.does(&["watch", "one", "--once"]);
    assert!(watched.contains("mix: running"), "{watched}");
    let saved = user.json(&["checkpoint", "one", "state"]);
    assert_eq!(saved["saved"]["running"][0][1], "mix");
    user.does(&["stop", "one", "0"]);
    user.does(&["lease", "two"]);
    user.does(&["restore", "two", "state"]);
    let info = user.json(&["info", "two"]);
    assert_eq!(info["regions"][0]["state"], "Running");
    assert!(user.fails(&["selftest", "two"]).contains("is leased to client"));
    user.does(&["stop", "two", "0"]);
    assert!(user.fails(&["restore", "two", "input"]).contains("magic"));

    for card in ["one", "two"] {
        user.does(&["lease", card, "--release"]);
    }
    assert!(user.fails(&["lease", "one", "--release"]).contains("acquire its lease first"));
    // A WebAssembly module as text.
    user.does(&["lease", "one"]);
    let module = r#"(module $seven
        (import "millstream_1" "result" (func $result (param i32 i64)))
        (memory (export "memory") 1)
        (func (export "run") (call $result (i32.const 0) (i64.const 7))))"#;
    std::fs::write(home.path().join("seven.wat"), module).unwrap();
    user.does(&["load", "one", "1", "seven.wat"]);
    assert_eq!(user.json(&["start", "one", "1", "--wait", "20"])["results"][0], 7);
    kernels_that_fail(&user);
    // Revokes another client's lease; then the card passes its selftest.
    user.does(&["lease", "one", "--revoke"]);
    let tested = user.json(&["selftest", "one"]);
    assert_eq!(tested["passed"], true, "{tested}");
    drop(first);
    assert!(user.fails(&["list"]).contains("one"));
}

#[test]
fn a_card_has_the_banks_of_a_u280_by_default() {
    let card = Card::serve_with("u280", &[]);
    let home = tempfile::tempdir().unwrap();
    let user = User { home: home.path() };
    let info = user.json(&["info", &card.address]);
    assert_eq!((&info["bank_count"], &info["memory_bytes"]), (&Value::from(32), &Value::from(8u64 << 30)));
    user.does(&["lease", &card.address]);
    let (sent, back) = (home.path().join("sent"), home.path().join("back"));
    std::fs::write(&sent, [0x5a; 100_000]).unwrap();
    let last = ((8u64 << 30) - 100_000).to_string();
    user.does(&["put", &card.address, &last, sent.to_str().unwrap()]);
    user.does(&["get", &card.address, &last, "100000", back.to_str().unwrap()]);
    assert!(std::fs::read(back).unwrap() == [0x5a; 100_000]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", card.process.0.id())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = resident.split_whitespace().next().unwrap().parse().unwrap();
    assert!(kib < 300 << 10, "{kib} KiB for 100 kB");
}

#[test]
fn watch_is_a_live_view_of_the_terminals_size() {
    let card = Card::serve("watched");
    let home = tempfile::tempdir().unwrap();
    let user = User { home: home.path() };
    user.does(&["lease", &card.address]);
    user.does(&["load", &card.address, "0", "mix"]);
    user.does(&["start", &card.address, "0", "4MiB", "4096", "0xffffffff"]);
    // Sends the keys after five pictures, however long these take.
    let watch = |rows: u32, keys: &[u8]| {
        let program = env!("CARGO_BIN_EXE_millstream");
        let command =
            format!("stty rows {rows} cols 100; exec {program} card watch {} --every 0.1", card.address);
        let mut terminal = Command::new("timeout")
            .args(["60", "script", "-qec", &command, "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut keyboard, mut shown) = (terminal.stdin.take(), terminal.stdout.take().unwrap());
        let (mut seen, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            let len = shown.read(&mut piece).unwrap();
            if len == 0 {
                break;
            }
            seen.extend_from_slice(&piece[..len]);
            if seen.windows(3).filter(|home| home == b"\x1b[H").count() >= 5
                && let Some(mut keyboard) = keyboard.take()
            {
                keyboard.write_all(keys).unwrap();
            }
        }
        let seen = String::from_utf8_lossy(&seen).into_owned();
        assert!(seen.contains("\x1b[?1049h") && seen.trim_end().ends_with("\x1b[?1049l"), "{seen:?}");
        (seen, terminal.wait().unwrap())
    };
    let (seen, status) = watch(60, b"\x03");
    assert!(status.success(), "{status}: {seen:?}");
    let pictures: Vec<_> = seen.split("\x1b[H").skip(1).collect();
    // The run progresses from picture to picture.
    assert!(
        pictures[1].contains("mix: running")
            && pictures[2..pictures.len() - 1].iter().any(|other| *other != pictures[1]),
        "{seen:?}"
    );
    // Two interrupts at once: the terminal is restored even if the second one ends the program first.
    let (small, _) = watch(5, b"\x03\x03");
    let picture = small.split("\x1b[H").nth(2).unwrap();
    assert!(picture.lines().count() == 5 && picture.contains("more lines"), "{picture:?}");
}
