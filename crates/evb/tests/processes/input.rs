//! Inputs and configurations for runs.

use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::process::Launcher;
use millstream_fragment::stream::StreamWriter;
use millstream_fragment::unpack::unpack;
use millstream_fragment::{Alignment, SourceId, SourceKind};
use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;
use tempfile::TempDir;

/// Directory of one test: inputs, configuration, output.
pub(crate) struct TestInputs {
    pub(crate) folder: TempDir,
}

/// The launcher that starts this program again.
pub(crate) fn launcher() -> Launcher {
    let program = std::env::current_exe().expect("a running program has a file");
    Launcher { program, arguments: vec!["child".into()] }
}

impl TestInputs {
    /// With the camera's data.
    pub(crate) fn camera() -> TestInputs {
        let folder = TempDir::new().expect("temporary folders can be made");
        let packed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m");
        unpack(&packed, folder.path()).unwrap_or_else(|error| panic!("{error}"));
        std::fs::copy(packed.join("patches.csv"), folder.path().join("patches.csv")).expect("it is there");
        TestInputs { folder }
    }

    /// With stream files of small fragments, `sources` per readout unit; `is_there` selects existing fragments.
    pub(crate) fn made(
        readouts: usize,
        sources: u32,
        events: Range<u64>,
        is_there: impl Fn(u32, u64) -> bool,
    ) -> TestInputs {
        let folder = TempDir::new().expect("temporary folders can be made");
        for readout in 0..readouts {
            let path = folder.path().join(format!("crate{}.mfs", readout + 1));
            let mut writer = StreamWriter::create(path, events.clone(), Alignment::CACHE_LINE).unwrap();
            for source in 0..sources {
                let id = readout as u32 * 100 + source;
                let mut source = writer.source(SourceId(id), SourceKind(1), "").unwrap();
                for event in events.clone().filter(|event| is_there(id, *event)) {
                    source.push(event, &payload(id, event)).unwrap();
                }
            }
            writer.finish().unwrap();
        }
        TestInputs { folder }
    }

    /// Corrupts the payload of one fragment in its file.
    pub(crate) fn damage(&self, readout: usize, id: u32, event: u64) {
        let path = self.folder.path().join(format!("crate{readout}.mfs"));
        let mut bytes = std::fs::read(&path).unwrap();
        let payload = payload(id, event);
        let at = bytes.windows(payload.len()).position(|window| window == payload).expect("it is there");
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }

    /// Writes and checks a configuration. `run` and `card` are lines for these tables; `builders` is `card` or `host` for each
    /// builder unit.
    pub(crate) fn config(
        &self,
        readouts: usize,
        builders: &[&str],
        run: &str,
        card: &str,
        rest: &str,
    ) -> RunConfig {
        // Other processes may leave a unit without a processor for seconds.
        let patience = [("timeout_ms", 10_000), ("drain_timeout_ms", 1500)];
        let patience = patience.into_iter().filter(|(key, _)| !run.lines().any(|line| line.starts_with(key)));
        let patience: String = patience.map(|(key, value)| format!("{key} = {value}\n")).collect();
        let mut text = format!("[run]\nname = \"test\"\n{patience}{run}\n");
        for readout in 1..=readouts {
            write!(text, "[[readout]]\nname = \"ru{readout}\"\ninput = \"crate{readout}.mfs\"\n").unwrap();
        }
        for (index, landing) in builders.iter().enumerate() {
            write!(text, "[[builder]]\nname = \"bu{index}\"\nslots = 4\n").unwrap();
            match *landing {
                "card" => write!(
                    text,
                    "card = \"card{index}\"\n[[card]]\nname = \"card{index}\"\nmemory = \"64MiB\"\n{card}\n"
                )
                .unwrap(),
                _ => text.push_str("landing = \"host\"\n"),
            }
        }
        text.push_str(rest);
        let path = self.folder.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        ConfigFile::load(&path).and_then(|config| config.check()).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Payload of a generated fragment, unique for source and event.
fn payload(id: u32, event: u64) -> Vec<u8> {
    let mut bytes = format!("source {id} event {event};").into_bytes();
    let len = 30 + (event % 7) as usize * 40 + id as usize % 5;
    bytes.resize(bytes.len() + len, id as u8);
    bytes
}
