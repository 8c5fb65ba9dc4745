//! The data in `data/sst1m` matches its README, and the converter reproduces it.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use millstream_fragment::stream::Stream;
use millstream_fragment::unpack::unpack;
use millstream_fragment::{SourceId, SourceKind};

const CRATES: u32 = 3;
const BOARDS: u32 = 9;
const CHANNELS: usize = 48;
const SAMPLES: usize = 50;
const PATCHES: usize = 144;
const EVENTS: std::ops::Range<u64> = 1_027_888..1_027_920;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn data() -> PathBuf {
    repository().join("data/sst1m")
}

/// The files of the three crates and the reference decisions.
fn streams() -> Vec<Stream> {
    let unpacked = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sst1m");
    let files = unpack(&data(), &unpacked).unwrap();
    assert_eq!(files.len(), 4);
    files.iter().map(|file| Stream::open(file).unwrap()).collect()
}

/// A table of numbers with a header.
struct Table {
    columns: Vec<String>,
    rows: Vec<Vec<f64>>,
}

impl Table {
    fn read(name: &str) -> Self {
        let text = std::fs::read_to_string(data().join(name)).unwrap();
        let mut lines = text.lines();
        let columns = lines.next().unwrap().split(',').map(str::to_owned).collect();
        let rows = lines.map(|line| line.split(',').map(|cell| cell.parse().unwrap()).collect()).collect();
        Self { columns, rows }
    }

    fn column(&self, name: &str) -> Vec<f64> {
        let at = self.columns.iter().position(|column| column == name).unwrap();
        self.rows.iter().map(|row| row[at]).collect()
    }

    fn integers(&self, name: &str) -> Vec<i64> {
        self.column(name).into_iter().map(|value| value as i64).collect()
    }
}

#[test]
fn sources_are_as_documented() {
    let streams = streams();
    let (reference, crates) = streams.split_last().unwrap();
    for (number, stream) in (1..=CRATES).zip(crates) {
        stream.verify_payload().unwrap();
        assert_eq!(stream.events(), EVENTS);
        let ids: Vec<u32> = stream.sources().map(|source| source.id().0).collect();
        let expected: Vec<u32> = (0..BOARDS).chain([0xF]).map(|place| number << 8 | place).collect();
        assert_eq!(ids, expected);
        for source in stream.sources() {
            let traces = source.id().0 & 0xFF == 0xF;
            assert_eq!(source.kind(), SourceKind(if traces { 2 } else { 1 }));
            assert!(source.fragments().map(|fragment| fragment.event).eq(EVENTS));
            assert!(
                source.fragments().all(|fragment| fragment.payload.len() == if traces { 9600 } else { 4800 })
            );
        }
    }
    let payload = crates.iter().flat_map(|stream| stream.sources()).flat_map(|source| source.fragments());
    assert_eq!(payload.map(|fragment| fragment.payload.len()).sum::<usize>(), 32 * 158_400);

    reference.verify_payload().unwrap();
    assert_eq!(reference.sources().len(), 1);
    let source = reference.source(SourceId(0xF00)).unwrap();
    assert_eq!((source.kind(), source.len(), source.max_len()), (SourceKind(3), 32, 2700));
}

/// Trace of each patch, in the order of `trace_position`: one number for each sample of each event.
fn traces(crates: &[Stream]) -> Vec<Vec<u32>> {
    let mut traces = vec![Vec::new(); 3 * PATCHES];
    for (index, stream) in crates.iter().enumerate() {
        let source = stream.sources().last().unwrap();
        for fragment in source.fragments() {
            for sample in fragment.payload.chunks_exact(192) {
                for (patch, &value) in sample[..PATCHES].iter().enumerate() {
                    traces[index * PATCHES + patch].push(value.into());
                }
            }
        }
    }
    traces
}

#[test]
fn the_trigger_rule_reproduces_every_recorded_decision() {
    let streams = streams();
    let (reference, crates) = streams.split_last().unwrap();
    let traces = traces(crates);
    let patches = Table::read("patches.csv");
    let trace_position = patches.integers("trace_position");
    let clusters: Vec<Vec<i64>> = (0..7).map(|k| patches.integers(&format!("cluster7_{k}"))).collect();

    let reference = reference.sources().next().unwrap();
    let (mut agree, mut set) = (0, 0);
    for (patch, &position) in patches.integers("decision_position").iter().enumerate() {
        let cluster: Vec<&[u32]> = clusters
            .iter()
            .filter_map(|members| usize::try_from(members[patch]).ok())
            .map(|member| &*traces[trace_position[member] as usize])
            .collect();
        let (byte, bit) = (position as usize / 8, position % 8);
        let samples = reference.fragments().flat_map(|fragment| fragment.payload.chunks_exact(54));
        for (sample, decisions) in samples.enumerate() {
            let recorded = decisions[byte] >> bit & 1 == 1;
            let sum: u32 = cluster.iter().map(|trace| trace[sample]).sum();
            agree += u32::from((sum > 336) == recorded);
            set += u32::from(recorded);
        }
    }
    assert_eq!((agree, set), (691_200, 56));
}

#[test]
fn pixels_are_on_the_boards_of_their_patches() {
    let pixels = Table::read("pixels.csv");
    let patches = Table::read("patches.csv");
    let [crates, boards, channels, ids, patch_of] =
        ["crate", "board", "channel", "pixel", "patch"].map(|name| pixels.integers(name));
    let stored: Vec<usize> = (0..ids.len())
        .map(|row| ((crates[row] - 1) * 9 + boards[row]) as usize * CHANNELS + channels[row] as usize)
        .collect();
    assert!(stored.into_iter().eq(0..1296), "rows are in stored order");
    assert_eq!(ids.iter().copied().collect::<HashSet<_>>(), (0..1296).collect());

    let crate_of_patch = patches.integers("crate");
    let members = ["pixel_a", "pixel_b", "pixel_c"].map(|name| patches.integers(name));
    let mut patches_of_board: BTreeMap<(i64, i64), HashSet<i64>> = BTreeMap::new();
    for row in 0..ids.len() {
        let patch = patch_of[row] as usize;
        assert!(members.iter().any(|column| column[patch] == ids[row]));
        assert_eq!(crate_of_patch[patch], crates[row]);
        patches_of_board.entry((crates[row], boards[row])).or_default().insert(patch_of[row]);
    }
    assert_eq!(patches_of_board.len(), 27);
    assert!(patches_of_board.values().all(|patches| patches.len() == 16));
}

#[test]
fn pixels_are_numbered_row_by_row() {
    let pixels = Table::read("pixels.csv");
    let (x, y) = (pixels.column("x_mm"), pixels.column("y_mm"));
    let row_pitch = 24.3 * 3_f64.sqrt() / 2.0;
    let lowest = y.iter().copied().fold(f64::INFINITY, f64::min);
    let row = |at: usize| {
        let row = (y[at] - lowest) / row_pitch;
        assert!((row - row.round()).abs() < 0.01, "between rows: {row}");
        row.round() as i64
    };
    let mut by_place: Vec<usize> = (0..x.len()).collect();
    by_place.sort_by(|&a, &b| row(a).cmp(&row(b)).then(x[a].total_cmp(&x[b])));
    let ids = pixels.integers("pixel");
    assert!(by_place.into_iter().map(|at| ids[at]).eq(0..1296));
}

#[test]
fn traces_follow_the_pixels_of_their_patch() {
    let streams = streams();
    let crates = &streams[..3];
    let traces = traces(crates);
    let pixels = Table::read("pixels.csv");
    let mut waveforms = vec![Vec::new(); 1296];
    let ids = pixels.integers("pixel");
    let boards = crates.iter().flat_map(|stream| stream.sources().take(BOARDS as usize));
    for (board, stored) in boards.zip(ids.chunks_exact(CHANNELS)) {
        for fragment in board.fragments() {
            let channels = fragment.payload.chunks_exact(2 * SAMPLES);
            for (&pixel, samples) in stored.iter().zip(channels) {
                let samples = samples.chunks_exact(2).map(|bytes| i16::from_le_bytes([bytes[0], bytes[1]]));
                waveforms[pixel as usize].extend(samples.map(f64::from));
            }
        }
    }

    let patches = Table::read("patches.csv");
    let members = ["pixel_a", "pixel_b", "pixel_c"].map(|name| patches.integers(name));
    let sums: Vec<Vec<f64>> = (0..patches.rows.len())
        .map(|patch| {
            let [a, b, c] = [0, 1, 2].map(|member| &waveforms[members[member][patch] as usize]);
            (0..a.len()).map(|sample| a[sample] + b[sample] + c[sample]).collect()
        })
        .collect();
    let positions = patches.integers("trace_position");
    for (patch, &position) in positions.iter().enumerate() {
        let trace: Vec<f64> = traces[position as usize].iter().map(|&value| value.into()).collect();
        let own = correlation(&trace, &sums[patch]);
        let other = correlation(&trace, &sums[(patch + 100) % sums.len()]);
        assert!(own > 0.87 && other < 0.3, "patch {patch}: {own} with its own pixels, {other} with others");
    }
}

/// Correlation of two records without the mean of each event.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (a, b) in a.chunks_exact(SAMPLES).zip(b.chunks_exact(SAMPLES)) {
        let mean = |record: &[f64]| record.iter().sum::<f64>() / SAMPLES as f64;
        let (mean_a, mean_b) = (mean(a), mean(b));
        for (a, b) in a.iter().zip(b) {
            let (a, b) = (a - mean_a, b - mean_b);
            ab += a * b;
            aa += a * a;
            bb += b * b;
        }
    }
    ab / (aa * bb).sqrt()
}

/// A Python with the converter's requirements, in a virtual environment that later runs reuse; or why there is none.
fn python() -> Result<PathBuf, String> {
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sst1m-to-stream.venv");
    let python = environment.join("bin/python");
    let installed = environment.join("installed");
    if !installed.exists() {
        let run = |command: &mut Command| match command.output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
            Err(error) => Err(format!("{command:?}: {error}")),
        };
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"];
        run(Command::new(&python).args(pip).arg(repository().join("tools/requirements.txt")))?;
        std::fs::write(installed, "").map_err(|error| error.to_string())?;
    }
    Ok(python)
}

/// The converter shares no code with this crate, so this compares two implementations.
#[test]
fn the_converter_reproduces_the_files() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => {
            eprintln!("skipped: protozfits cannot be installed: {reason}");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let (converted, unpacked) = (folder.path().join("converted"), folder.path().join("unpacked"));
    let output = Command::new(python)
        .arg(repository().join("tools/sst1m-to-stream.py"))
        .arg("--output")
        .arg(&converted)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["MANIFEST", "pixels.csv"] {
        let [made, kept] = [converted.join(name), data().join(name)].map(|path| std::fs::read(path).unwrap());
        assert!(made == kept, "{name} differs");
    }
    // Compressed files may differ between versions of zlib.
    for (made, kept) in unpack(&converted, &unpacked).unwrap().iter().zip(streams()) {
        assert!(std::fs::read(made).unwrap() == kept.mapping(), "{} differs", made.display());
    }
}

/// A module in place of protozfits: three events of the camera, out of order, without number 11.
const STUB: &str = r#"
import csv
from types import SimpleNamespace
import numpy as np

class File:
    def __init__(self, path):
        with open(path, newline="") as file:
            self.pixels = np.array([int(row["pixel"]) for row in csv.DictReader(file)])
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    @property
    def Events(self):
        for number in (12, 10, 13):
            stored = SimpleNamespace(pixelsIndices=self.pixels, samples=np.full(1296 * 50, number))
            yield SimpleNamespace(
                eventNumber=number,
                hiGain=SimpleNamespace(waveforms=stored),
                trigger_input_traces=np.full(50 * 3 * 192, number),
                trigger_output_patch7=np.zeros(50 * 3 * 18),
            )
"#;

#[test]
fn the_converter_takes_any_file_of_the_camera() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => {
            eprintln!("skipped: protozfits cannot be installed: {reason}");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("protozfits.py"), STUB).unwrap();
    let convert = |more: &[&str]| {
        let converted = folder.path().join(format!("converted{}", more.len()));
        let output = Command::new(&python)
            .env("PYTHONPATH", folder.path())
            .arg(repository().join("tools/sst1m-to-stream.py"))
            .arg("--input")
            .arg(data().join("pixels.csv"))
            .arg("--output")
            .arg(&converted)
            .args(more)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), errors, converted)
    };
    let (good, errors, converted) = convert(&[]);
    assert!(good && errors.contains("1 of 4 events are not in the file"), "{errors}");
    let unpacked = folder.path().join("unpacked");
    for file in unpack(&converted, &unpacked).unwrap() {
        let stream = Stream::open(file).unwrap();
        stream.verify_payload().unwrap();
        assert_eq!(stream.events(), 10..14);
        for source in stream.sources() {
            assert_eq!(source.fragments().map(|fragment| fragment.event).collect::<Vec<_>>(), [10, 12, 13]);
        }
    }
    assert!(convert(&["--renumber"]).0);
    let (good, errors, _) = convert(&["--sha256", "00"]);
    assert!(!good && errors.contains("expected 00"), "{errors}");
}
