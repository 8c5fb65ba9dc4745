//! Invalid configurations: errors name line, field and value.

use millstream_evb::config::{CardField, ConfigFile, KernelConfig, LandingTarget, RefusedCard, RunConfig};
use millstream_evb::core::{BuIndex, EventNumber, RuIndex, Unit};
use millstream_fragment::stream::StreamWriter;
use millstream_fragment::{Alignment, SourceId, SourceKind};
use std::fmt::Write as _;
use std::net::TcpListener;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

const WHOLE: &str = r#"[run]
name = "camera"
replay = 3
batch = 8
timeout_ms = 700
[[readout]]
name = "ru1"
input = "crate1.mfs"
[[readout]]
name = "ru2"
input = "crate2.mfs"
[[builder]]
name = "bu1"
card = "card0"
slots = 4
[[builder]]
name = "bu2"
landing = "host"
slots = 6
[[card]]
name = "card0"
memory = "8MiB"
kernel = "cluster7"
patches = "patches.csv"
[output]
directory = "out"
max_events = 5
format = "hdf5"
"#;

fn stream(path: &Path, events: Range<u64>, sources: &[(u32, u32, usize)]) {
    let mut writer = StreamWriter::create(path, events.clone(), Alignment::CACHE_LINE).unwrap();
    for &(id, kind, len) in sources {
        let mut source = writer.source(SourceId(id), SourceKind(kind), "").unwrap();
        for event in events.clone() {
            source.push(event, &vec![7; len]).unwrap();
        }
    }
    writer.finish().unwrap();
}

/// A patch geometry without neighbours.
fn patches() -> String {
    let mut text = "patch,trace_position,decision_position,cluster7_0,cluster7_1,cluster7_2,cluster7_3,\
                    cluster7_4,cluster7_5,cluster7_6\n"
        .to_owned();
    for patch in 0..432 {
        writeln!(text, "{patch},{patch},{patch},{patch},-1,-1,-1,-1,-1,-1").unwrap();
    }
    text
}

/// A directory with all files that [`WHOLE`] names.
fn folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    stream(&at("crate1.mfs"), 100..132, &[(0x100, 1, 4800), (0x10f, 2, 9600)]);
    stream(&at("crate2.mfs"), 100..132, &[(0x20f, 2, 9600), (0x30f, 2, 9600)]);
    stream(&at("decisions.mfs"), 100..132, &[(0xf00, 3, 2700)]);
    std::fs::write(at("patches.csv"), patches()).unwrap();
    folder
}

fn check(folder: &TempDir, text: &str) -> Result<RunConfig, String> {
    let path = folder.path().join("run.toml");
    std::fs::write(&path, text).unwrap();
    let shown = |error: &dyn std::fmt::Display| {
        error.to_string().replace(&format!("{}/", folder.path().display()), "")
    };
    ConfigFile::load(&path).and_then(|config| config.check()).map_err(|error| shown(&error))
}

/// The error after replacing `from` by `to` in the whole configuration.
fn refused(from: &str, to: &str) -> String {
    assert!(WHOLE.contains(from), "{from}");
    check(&folder(), &WHOLE.replacen(from, to, 1)).unwrap_err()
}

#[test]
fn a_whole_file_becomes_a_run_configuration() {
    let folder = folder();
    let config = check(&folder, WHOLE).unwrap();
    let plan = &config.plan;
    assert_eq!((plan.first_event, plan.events.get(), plan.batch.get()), (EventNumber(100), 96, 8));
    assert_eq!(plan.timeout, Duration::from_millis(700));
    assert_eq!(plan.sources.iter().map(|n| n.get()).collect::<Vec<_>>(), [2, 2]);
    assert_eq!(plan.slots.iter().map(|n| n.get()).collect::<Vec<_>>(), [4, 6]);
    assert_eq!((config.file_first, config.file_events), (EventNumber(100), 32));
    assert_eq!(config.layout.of_readout(RuIndex(1)).len(), 2);
    assert_eq!(config.readouts[1].input.file(), Some(&*folder.path().join("crate2.mfs")));
    let LandingTarget::Card(card) = &config.builders[0].landing else { panic!("bu1 lands on a card") };
    let KernelConfig::Cluster7 { threshold, verify, traces, .. } = &card.kernel else { panic!("cluster7") };
    assert_eq!((*threshold, *verify, *traces), (336, true, [0x10f, 0x20f, 0x30f]));
    assert_eq!(config.builders[1].landing, LandingTarget::Host);
    assert_eq!(config.output.as_ref().map(|output| output.max_events), Some(5));
    // Slots on the host, and slots with kernel areas on the card.
    assert_eq!(config.landing_bytes(1).0, 6 * config.layout.slot_bytes.0);
    assert!(config.landing_bytes(0).0 > 4 * config.layout.slot_bytes.0 + 4 * 8 * 2700);

    let mut file = ConfigFile::load(&folder.path().join("run.toml")).unwrap();
    file.set_replay(7).unwrap();
    assert_eq!(file.check().unwrap().plan.events.get(), 7 * 32);

    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<RunConfig>(&json).unwrap(), config);
}

#[test]
fn the_configuration_in_the_documentation_is_consistent() {
    let page = include_str!("../../../docs/event-builder.md");
    let text = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block");
    ConfigFile::parse(Path::new("documented.toml"), text).unwrap();
}

#[test]
fn a_number_of_passes_is_checked() {
    let path = Path::new("run.toml");
    let mut file = ConfigFile::parse(path, WHOLE).unwrap();
    assert!(file.set_replay(0).unwrap_err().to_string().contains("run.replay: 0 is out of range"));
    let mut file = ConfigFile::parse(path, &WHOLE.replace("replay = 3", "events = 5")).unwrap();
    assert!(file.set_replay(2).unwrap_err().to_string().contains("set either replay or events"));
}

#[test]
fn invalid_toml_and_unknown_keys_are_refused() {
    assert_eq!(
        refused("batch = 8", "batches = 8"),
        "run.toml:4: run.batches: unknown field `batches`, expected one of `name`, `replay`, `events`, `batch`, `batch_timeout_ms`, `window`, \
         `max_in_flight`, `traffic_shaping`, `timeout_ms`, `drain_timeout_ms`, `spin_us`, `listen`, `device`"
    );
    assert!(refused("[output]", "[outputs]").starts_with("run.toml:25: outputs: unknown field `outputs`"));
    assert!(
        refused("batch = 8", "batch = \"x\"")
            .starts_with("run.toml:4: run.batch: invalid type: string \"x\"")
    );
    assert!(refused("batch = 8\n", "").contains(" run: missing field `batch`"));
    assert!(refused("batch = 8", "batch = = 8").starts_with("run.toml:4: "));
    assert!(refused("\"8MiB\"", "\"8MB\"").starts_with("run.toml:22: card.memory: \"8MB\" is not a size"));
    let missing = ConfigFile::load(Path::new("/nonexistent/run.toml")).unwrap_err().to_string();
    assert!(missing.starts_with("/nonexistent/run.toml: cannot read: "), "{missing}");
}

#[test]
fn numbers_out_of_range_are_refused() {
    assert_eq!(
        refused("batch = 8", "batch = 0"),
        "run.toml:4: run.batch: 0 is out of range: must be 1 to 4096"
    );
    assert_eq!(
        refused("batch = 8", "batch = 5000"),
        "run.toml:4: run.batch: 5000 is out of range: must be 1 to 4096"
    );
    assert_eq!(
        refused("slots = 6", "slots = 0"),
        "run.toml:19: builder.slots: 0 is out of range: must be 1 to 16384"
    );
    assert!(refused("replay = 3", "replay = 0").starts_with("run.toml:3: run.replay: 0 is out of range"));
    assert!(
        refused("replay = 3", "replay = 9223372036854775807").starts_with("run.toml:3: run.replay: 1844674")
    );
    assert!(refused("= 700", "= 0").starts_with("run.toml:5: run.timeout_ms: 0 is out of range"));
}

#[test]
fn a_run_without_units_is_refused() {
    let folder = folder();
    let without = |table: &str| {
        let start = WHOLE.find(table).unwrap();
        let end = WHOLE[start + 2..].rfind(table).map_or(start, |at| start + 2 + at);
        let rest = WHOLE[end + 2..].find("\n[").map_or(WHOLE.len(), |at| end + 3 + at);
        check(&folder, &format!("{}{}", &WHOLE[..start], &WHOLE[rest..])).unwrap_err()
    };
    assert_eq!(without("[[readout]]"), "run.toml: readout: missing: at least one is required");
    assert_eq!(without("[[builder]]"), "run.toml: builder: missing: at least one is required");
}

#[test]
fn names_and_cards_have_to_fit() {
    assert_eq!(refused("\"ru2\"", "\"ru1\""), "run.toml:10: readout.name: \"ru1\" is already used in line 7");
    assert_eq!(
        refused("\"bu2\"", "\"bu1\""),
        "run.toml:17: builder.name: \"bu1\" is already used in line 13"
    );
    assert_eq!(
        refused("\"bu2\"", "\"bu1.0001\""),
        "run.toml:17: builder.name: \"bu1.0001\" is the name of a file of \"bu1\": choose another name"
    );
    assert!(
        refused("\"camera\"", "\"../x\"").starts_with("run.toml:2: run.name: \"../x\" is not a valid name")
    );
    assert_eq!(
        refused("card = \"card0\"", "card = \"card1\""),
        "run.toml:14: builder.card: no card \"card1\"; defined cards: card0"
    );
    assert_eq!(
        refused("landing = \"host\"", "card = \"card0\""),
        "run.toml:18: builder.card: card \"card0\" is already used by builder unit \"bu1\"; each card \
         serves one builder unit"
    );
    assert_eq!(
        refused("card = \"card0\"", "landing = \"host\""),
        "run.toml:21: card: no builder unit uses this card; remove it or set builder.card"
    );
    assert_eq!(
        refused("\"host\"", "\"gpu\""),
        "run.toml:18: builder.landing: unknown value \"gpu\"; valid values: host"
    );
    assert!(refused("landing = \"host\"\n", "").starts_with("run.toml:17: builder: set card = "));
    assert!(refused("landing =", "card = \"card0\"\nlanding =").contains("set either card or landing"));
}

#[test]
fn kernels_have_to_fit_their_inputs() {
    let kernel = "kernel = \"cluster7\"\npatches = \"patches.csv\"";
    assert_eq!(
        refused("\"cluster7\"", "\"cluster9\""),
        "run.toml:23: card.kernel: unknown value \"cluster9\"; valid values: none, verify, cluster7, wasm, ptx"
    );
    assert!(refused("patches = \"patches.csv\"\n", "").contains("needs patches = \"FILE.csv\""));
    assert_eq!(
        refused(kernel, "kernel = \"verify\"\nthreshold = 3"),
        "run.toml:24: card.threshold: kernel \"verify\" has no such setting"
    );
    assert!(refused("\"patches.csv\"", "\"none.csv\"").contains("none.csv: cannot read"));

    let folder = folder();
    stream(&folder.path().join("crate2.mfs"), 100..132, &[(0x20f, 2, 9600), (0x300, 1, 4800)]);
    let error = check(&folder, WHOLE).unwrap_err();
    assert!(error.ends_with("needs 3 sources of kind 2, the inputs have 2"), "{error}");
    stream(&folder.path().join("crate2.mfs"), 100..132, &[(0x20f, 2, 9600), (0x30f, 2, 9601)]);
    let error = check(&folder, WHOLE).unwrap_err();
    assert!(error.ends_with("needs traces of 9600 B, those of source 0x30f have 9601 B"), "{error}");
}

#[test]
fn memory_that_does_not_hold_the_slots_is_refused() {
    let folder = folder();
    let config = check(&folder, WHOLE).unwrap();
    let (slot, needed) = (config.layout.slot_bytes.0, config.landing_bytes(0).0);
    assert_eq!(
        check(&folder, &WHOLE.replace("8MiB", "1MiB")).unwrap_err(),
        format!(
            "run.toml:22: card.memory: 1 MiB is too small: 4 slots of {slot} B and the kernel areas need \
             {needed} B"
        )
    );
    let exact = WHOLE.replace("\"8MiB\"", &needed.to_string());
    check(&folder, &exact).unwrap();
    let less = WHOLE.replace("\"8MiB\"", &(needed - 1).to_string());
    assert!(check(&folder, &less).unwrap_err().contains("is too small"));
}

#[test]
fn inputs_that_do_not_fit_together_are_refused() {
    let error = refused("crate2.mfs", "crate1.mfs");
    assert_eq!(
        error,
        "run.toml:11: readout.input: source 0x100 is in both crate1.mfs and crate1.mfs; a source must be in one input only"
    );
    assert!(refused("crate2.mfs", "none.mfs").starts_with("run.toml:11: readout.input: none.mfs: cannot"));
    assert!(refused("crate2.mfs", "patches.csv").contains("readout.input: patches.csv: "));

    let folder = folder();
    stream(&folder.path().join("crate2.mfs"), 100..133, &[(0x20f, 2, 9600), (0x30f, 2, 9600)]);
    let error = check(&folder, WHOLE).unwrap_err();
    let expected = "run.toml:11: readout.input: events differ: crate1.mfs has events 100 to 131, crate2.mfs has 100 to 132";
    assert_eq!(error, expected);

    std::fs::write(folder.path().join("crate2.mfs"), b"MSTREAM\0\x01").unwrap();
    let error = check(&folder, WHOLE).unwrap_err();
    assert!(error.starts_with("run.toml:11: readout.input: crate2.mfs: "), "{error}");
}

#[test]
fn reference_decisions_must_match_the_inputs_and_the_kernels() {
    let folder = folder();
    let with_check = format!("{WHOLE}[check]\nreference_decisions = \"decisions.mfs\"\n");
    let error = check(&folder, &with_check).unwrap_err();
    assert!(
        error.starts_with("run.toml:30: check.reference_decisions: every builder unit needs a card"),
        "{error}"
    );

    let one_builder = with_check.replace("[[builder]]\nname = \"bu2\"\nlanding = \"host\"\nslots = 6\n", "");
    let config = check(&folder, &one_builder).unwrap();
    assert_eq!(config.reference_decisions, Some(folder.path().join("decisions.mfs")));
    let error = check(&folder, &one_builder.replace("decisions.mfs", "crate1.mfs")).unwrap_err();
    assert!(error.ends_with("the file must have exactly one source, the trigger decisions"), "{error}");
    stream(&folder.path().join("decisions.mfs"), 100..132, &[(0xf00, 3, 2699)]);
    let error = check(&folder, &one_builder).unwrap_err();
    assert!(error.ends_with("source 0xf00 of kind 3 has 32 of 32 events, up to 2699 B"), "{error}");
    stream(&folder.path().join("decisions.mfs"), 0..32, &[(0xf00, 3, 2700)]);
    assert!(check(&folder, &one_builder).unwrap_err().ends_with("decisions.mfs has 0 to 31"));
}

#[test]
fn a_port_in_use_and_a_file_as_directory_are_refused() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = refused("batch = 8", &format!("batch = 8\nlisten = \"{address}\""));
    let expected = format!("run.toml:5: run.listen: cannot listen on \"{address}\": ");
    assert!(error.starts_with(&expected), "{error}");
    let error = refused("batch = 8", "batch = 8\nlisten = \"nowhere\"");
    assert!(error.contains("run.listen: cannot listen on \"nowhere\""), "{error}");

    // An address of another host (documentation, RFC 5737).
    for several in [false, true] {
        let folder = folder();
        let text = WHOLE.replace("batch = 8", "batch = 8\nlisten = \"192.0.2.1:0\"");
        let file = ConfigFile::parse(&folder.path().join("run.toml"), &text).unwrap();
        let checked = if several { file.check_on_one_of_several_hosts() } else { file.check() };
        assert_eq!(checked.is_ok(), several);
    }

    let error = refused("directory = \"out\"", "directory = \"patches.csv\"");
    assert!(error.starts_with("run.toml:26: output.directory: patches.csv: "), "{error}");
    assert!(
        refused("\"hdf5\"", "\"root\"")
            .starts_with("run.toml:28: output.format: unknown value \"root\"; valid values: hdf5")
    );
}

#[test]
fn live_sources_are_checked() {
    let refused = |run: &str, readout: &str| {
        let text = format!(
            "[run]\nname = \"live\"\nbatch = 8\n{run}\n[[readout]]\nname = \"ru1\"\n{readout}\n\
             [[builder]]\nname = \"bu1\"\nlanding = \"host\"\nslots = 4\n"
        );
        let path = Path::new("live.toml");
        let checked = ConfigFile::parse(path, &text).and_then(|config| config.check());
        checked.map(drop).unwrap_err().to_string()
    };
    let generator =
        |keys: &str| format!("[readout.generator]\nfirst_source = 1\nsources = 2\nsize = 100\n{keys}");
    let udp = |keys: &str| {
        format!(
            "[readout.udp]\nlisten = \"127.0.0.1:0\"\nfirst_source = 1\nsources = 2\nmax_len = 100\n{keys}"
        )
    };
    assert!(refused("", &generator("")).contains("run.events: set events = NUMBER"));
    let both = refused("events = 5\nreplay = 2", &generator(""));
    assert!(both.contains("live.toml:4: run.events: set either replay or events"), "{both}");
    assert!(refused("events = 5", "").contains("readout: set exactly one of input"));
    for (keys, error) in [
        ("rate_hz = 0.0", "readout.generator.rate_hz: 0 is out of range: must be 0.001 to 1e9"),
        ("missing = 1.5", "readout.generator.missing: 1.5 is out of range: must be 0 to 1"),
        ("arrival = \"sometimes\"", "readout.generator.arrival: unknown value \"sometimes\""),
        ("colour = 1", "readout.generator.colour: unknown field `colour`"),
    ] {
        let found = refused("events = 5", &generator(keys));
        assert!(found.contains(error), "{found}");
    }
    for (keys, error) in [
        (
            "buffer_events = 8",
            "readout.udp.buffer_events: 8 events are too few: at least two batches of 8 are needed",
        ),
        ("give_up_ms = 0", "readout.udp.give_up_ms: 0 is out of range"),
    ] {
        let found = refused("events = 5", &udp(keys));
        assert!(found.contains(error), "{found}");
    }
    let nowhere = refused("events = 5", &udp("").replace("127.0.0.1:0", "nowhere"));
    assert!(nowhere.contains("readout.udp.listen: cannot listen on \"nowhere\""), "{nowhere}");
}

#[test]
fn functions_for_events_need_a_module_and_at_most_eight_arguments() {
    let folder = folder();
    let with = |card: &str| {
        let kernel = "kernel = \"cluster7\"\npatches = \"patches.csv\"";
        check(&folder, &WHOLE.replacen(kernel, card, 1))
    };
    let wasm = "kernel = \"wasm\"\nmodule = \"filter.wat\"";
    assert!(with("kernel = \"wasm\"").unwrap_err().contains("card.kernel: kernel \"wasm\" needs module"));
    let absent = with(wasm).unwrap_err();
    assert!(absent.starts_with("run.toml:24: card.module: cannot read filter.wat"), "{absent}");
    std::fs::write(folder.path().join("filter.wat"), "(module)").unwrap();
    let config = with(&format!("{wasm}\narguments = [-1, 7]\nverify = false")).unwrap();
    let LandingTarget::Card(card) = &config.builders[0].landing else { panic!("bu1 lands on a card") };
    let KernelConfig::Function { image, verify, arguments, .. } = &card.kernel else { panic!("a function") };
    assert_eq!((image.0, *verify, arguments.as_slice()), (8, false, &[u64::MAX, 7][..]));
    let many = with(&format!("{wasm}\narguments = [1, 2, 3, 4, 5, 6, 7, 8, 9]")).unwrap_err();
    assert!(many.contains("card.arguments: 9 argument words: must be at most 8"), "{many}");
    let foreign = with(&format!("{wasm}\nthreshold = 3")).unwrap_err();
    assert!(foreign.contains("card.threshold: kernel \"wasm\" has no such setting"), "{foreign}");
}

#[test]
fn the_program_can_refuse_a_card() {
    let folder = folder();
    let path = folder.path().join("run.toml");
    std::fs::write(&path, WHOLE.replacen("memory =", "kind = \"pci:0000:99:00.0\"\nmemory =", 1)).unwrap();
    let config = ConfigFile::load(&path).unwrap();
    let error = config.check_with(&|card| {
        assert_eq!(card.kind, "pci:0000:99:00.0");
        Err(RefusedCard { field: CardField::Kind, problem: "no PCI device 0000:99:00.0".to_owned() })
    });
    let error = error.unwrap_err().to_string();
    assert!(error.ends_with("run.toml:22: card.kind: no PCI device 0000:99:00.0"), "{error}");
}

#[test]
fn an_output_directory_without_write_access_is_refused() {
    let error = refused("directory = \"out\"", "directory = \"/proc/nowhere/out\"");
    assert!(error.starts_with("run.toml:26: output.directory: /proc/nowhere/out: "), "{error}");
}

#[test]
fn restarts_are_checked_and_have_names_of_their_own() {
    for (lines, error) in [
        ("restarts = 101", "recovery.restarts: 101 is out of range: must be 0 to 100"),
        ("join_timeout_ms = 0", "recovery.join_timeout_ms: 0 is out of range: must be 1 to 600000"),
        (
            "builder_loss = \"stop\"\nrestarts = 1",
            "recovery.restarts: no unit joins again, because a run stops",
        ),
    ] {
        let found = refused("[output]", &format!("[recovery]\n{lines}\n[output]"));
        assert!(found.contains(error), "{found}");
    }
    let config =
        check(&folder(), &WHOLE.replacen("[output]", "[recovery]\nrestarts = 2\n[output]", 1)).unwrap();
    assert_eq!((config.initial_builders().len(), config.builders.len()), (2, 6));
    assert_eq!(config.unit_name(Unit::Builder(BuIndex(4))), format!("{}+2", config.builders[0].name));
    assert_eq!(config.unit_name(Unit::Readout(RuIndex(3))), format!("{}+1", config.readouts[1].name));
    let batch = refused("[run]", "[run]\nbatch_timeout_ms = 0");
    assert!(batch.contains("run.batch_timeout_ms: 0 is out of range: must be 1 to 600000"), "{batch}");
    let sources = refused("[output]", "[recovery]\nsource_timeout_ms = 0\n[output]");
    assert!(
        sources.contains("recovery.source_timeout_ms: 0 is out of range: must be 1 to 600000"),
        "{sources}"
    );
    let text = WHOLE.replacen("[output]", "[recovery]\nsource_timeout_ms = 70\n[output]", 1);
    let source_timeout = |text: &str| check(&folder(), text).unwrap().source_timeout;
    assert_eq!(source_timeout(&text), Some(std::time::Duration::from_millis(70)));
    assert_eq!(source_timeout(WHOLE), None);
}

#[test]
fn a_standby_manager_is_configured_with_its_timeout() {
    for (lines, error) in [
        (
            "standby = true\ntakeover_timeout_ms = 0",
            "recovery.takeover_timeout_ms: 0 is out of range: must be 1 to 600000",
        ),
        (
            "takeover_timeout_ms = 100",
            "recovery.takeover_timeout_ms: there is no standby manager to wait for",
        ),
        ("standby = \"yes\"", "recovery.standby: invalid type: string"),
    ] {
        let found = refused("[output]", &format!("[recovery]\n{lines}\n[output]"));
        assert!(found.contains(error), "{found}");
    }
    let takeover_timeout = |lines: &str| {
        let text = WHOLE.replacen("[output]", &format!("[recovery]\n{lines}\n[output]"), 1);
        check(&folder(), &text).unwrap().plan.recovery.takeover_timeout.as_millis()
    };
    assert_eq!([takeover_timeout(""), takeover_timeout("standby = false")], [0, 0]);
    assert_eq!(takeover_timeout("standby = true"), 5000);
    assert_eq!(takeover_timeout("standby = true\ntakeover_timeout_ms = 700"), 700);
}

#[test]
fn software_triggers_and_limits_of_corruption_are_checked() {
    let trigger = |lines: &str| {
        let slots = "landing = \"host\"\nslots = 6";
        refused(slots, &format!("{slots}\n[builder.trigger]\nprogram = \"sh\"\n{lines}"))
    };
    for (lines, error) in [
        ("workers = 0", "builder.trigger.workers: 0 is out of range: must be 1 to 1024"),
        ("credits = 65", "builder.trigger.credits: 65 is out of range"),
        ("cpus = [0, 1024]", "builder.trigger.cpus: 1024 is out of range: must be 0 to 1023"),
        ("events = \"some\"", "builder.trigger.events: unknown value \"some\""),
    ] {
        let found = trigger(lines);
        assert!(found.contains(error), "{found}");
    }
    let absent = refused("slots = 6", "slots = 6\n[builder.trigger]\nprogram = \"./filter\"");
    assert!(
        absent.contains("builder.trigger.program: ") && absent.contains("filter is not a file"),
        "{absent}"
    );
    let absent = refused("slots = 6", "slots = 6\n[builder.trigger]\nprogram = \"no-such-filter\"");
    assert!(
        absent.contains("builder.trigger.program: no-such-filter is in no directory of PATH"),
        "{absent}"
    );
    let most = refused("[output]", "[check]\nmax_corrupt = 1.5\n[output]");
    assert!(most.contains("check.max_corrupt: 1.5 is out of range: must be 0 to 1"), "{most}");
    let policy = refused("[output]", "[check]\nchecksums = \"some\"\n[output]");
    assert!(
        policy.contains("check.checksums: unknown value \"some\"; valid values: none, sample, all"),
        "{policy}"
    );
}
