//! The fit of a disk's queues to fio: a known disk is found again, and unseen block sizes and queue depths predicted.

use millstream_model::Parameters;
use millstream_model::fit_site::{DeviceFile, Places, SiteFit, SiteFitReport, fit_site};
use millstream_model::measurements;
use millstream_model::sites::{SHIPPED, shipped};
use millstream_model::ssd::{Access, CommandQueue};
use std::fmt::Write as _;

const SEEN_BLOCKS: [u64; 4] = [512, 4096, 65_536, 1 << 20];
const SEEN_DEPTHS: [u32; 4] = [1, 8, 32, 256];
const UNSEEN_BLOCKS: [u64; 4] = [2048, 16_384, 131_072, 524_288];
const UNSEEN_DEPTHS: [u32; 4] = [2, 16, 64, 128];

/// A disk that differs from the library's P3700 in all values of its queues.
fn known_disk() -> Parameters {
    let values = [
        ("p3700.read.latency", 98.0),
        ("p3700.read.iops", 465.0),
        ("p3700.read.rate", 2.65),
        ("p3700.write.latency", 19.0),
        ("p3700.write.iops", 120.0),
        ("p3700.write.rate", 1.4),
        ("p3700.channels", 12.0),
        ("p3700.channel.rate", 0.45),
    ];
    values.iter().fold(Parameters::shipped(), |p, (name, value)| p.with(name, *value))
}

fn rate(p: &Parameters, access: Access, block: u64, depth: u32) -> f64 {
    CommandQueue::new(p, "p3700", access).unwrap().bandwidth(block, depth).0
}

fn direction(access: Access) -> &'static str {
    if access == Access::Read { "read" } else { "write" }
}

/// fio's text of runs with these block sizes and queue depths: sections first, then results.
fn text(truth: &Parameters, accesses: &[Access], blocks: &[u64], depths: &[u32]) -> String {
    let (mut sections, mut results) = (String::new(), String::new());
    let mut group = 0;
    for &access in accesses {
        for &block in blocks {
            for &depth in depths {
                let rate = rate(truth, access, block, depth) * 1e-6;
                let name = direction(access);
                writeln!(
                    sections,
                    "j: (g={group}): rw=rand{name}, bs=(R) {block}B-{block}B, (W) {block}B-{block}B, (T) {block}B-{block}B, \
                     ioengine=libaio, iodepth={depth}"
                )
                .unwrap();
                writeln!(results, "j: (groupid={group}, jobs=1): err= 0: pid=1: Thu Nov 26 12:27:29 2026")
                    .unwrap();
                writeln!(results, "  {name}: IOPS=1, BW=1MiB/s ({rate:.3}MB/s)(1GiB/10001msec)").unwrap();
                group += 1;
            }
        }
    }
    format!("{sections}fio-3.33\nStarting {group} processes\n\n{results}")
}

/// The same runs as fio's JSON.
fn json(truth: &Parameters, access: Access, blocks: &[u64], depths: &[u32]) -> String {
    let mut jobs = Vec::new();
    for &block in blocks {
        for &depth in depths {
            let (rate, name) = (rate(truth, access, block, depth), direction(access));
            let group = jobs.len();
            let other = if access == Access::Read { "write" } else { "read" };
            jobs.push(format!(
                "{{\n\"jobname\" : \"j\", \"groupid\" : {group}, \"error\" : 0,\n\"job options\" : {{ \"rw\" : \"rand{name}\", \
                 \"bs\" : \"{block}\", \"iodepth\" : \"{depth}\" }},\n\"{name}\" : {{ \"bw_bytes\" : {rate:.0} }},\n\
                 \"{other}\" : {{ \"bw_bytes\" : 0 }}\n}}"
            ));
        }
    }
    format!(
        "{{\n\"fio version\" : \"fio-3.33\",\n\"global options\" : {{ \"ioengine\" : \"io_uring\", \"direct\" : \"1\" }},\n\
         \"jobs\" : [\n{}\n]\n}}\n",
        jobs.join(",\n")
    )
}

fn fit(file: &str, text: &str) -> SiteFit {
    let site = shipped("p3700-disks");
    let rows = measurements::parse(file, text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    fit_site(&site, &Parameters::shipped(), &rows, Places::default()).unwrap()
}

fn worst_unseen(fitted: &Parameters, truth: &Parameters, access: Access) -> f64 {
    let cases = UNSEEN_BLOCKS.iter().flat_map(|&block| UNSEEN_DEPTHS.map(|depth| (block, depth)));
    let off =
        |(block, depth)| (rate(fitted, access, block, depth) / rate(truth, access, block, depth) - 1.0).abs();
    cases.map(off).fold(0.0, f64::max)
}

#[test]
fn a_known_disk_is_found_again_and_unseen_blocks_and_depths_predicted() {
    let (truth, shipped_values) = (known_disk(), Parameters::shipped());
    let both = [Access::Read, Access::Write];
    let fit = fit("fio.txt", &text(&truth, &both, &SEEN_BLOCKS, &SEEN_DEPTHS));
    let report = SiteFitReport(&fit).to_string();
    for access in both {
        let (before, after) =
            (worst_unseen(&shipped_values, &truth, access), worst_unseen(&fit.fitted, &truth, access));
        assert!(before > 0.15 && after < 0.03, "{access:?}: {before} before, {after} after\n{report}");
    }
    for q in &fit.parameters {
        let off = (q.after / truth.get(&q.name) - 1.0).abs();
        assert!(q.is_determined && !q.is_at_end && off < 0.05, "{}: off by {off}\n{report}", q.name);
        assert!(q.range[0] <= truth.get(&q.name) && truth.get(&q.name) <= q.range[1], "{}\n{report}", q.name);
    }
    assert_eq!(fit.parameters.len(), 8, "{report}");
    assert!(report.contains("disk_read") && report.contains("disk_write"), "{report}");
}

#[test]
fn what_the_runs_do_not_determine_is_said() {
    let truth = known_disk();
    // One short command at a time says nothing about limits of many.
    let short = fit("fio.txt", &text(&truth, &[Access::Read], &[512, 4096], &[1]));
    let report = SiteFitReport(&short).to_string();
    let of = |name: &str| short.parameters.iter().find(|q| q.name == name);
    assert!(of("p3700.read.latency").unwrap().is_determined, "{report}");
    for name in ["p3700.read.rate", "p3700.channels", "p3700.write.rate", "p3700.write.latency"] {
        let is_free = of(name).is_none_or(|q| !q.is_determined);
        let is_named = of(name).is_some() || short.without_effect.iter().any(|other| other == name);
        assert!(is_free && is_named, "{name}: {report}");
    }
    assert!(
        report.contains("no measurement depends on: ") && report.contains("p3700.write.rate"),
        "{report}"
    );
    // Nothing of processors and power in a fit of disks.
    assert!(!report.contains("broadwell") && !report.contains("power"), "{report}");
    // A disk that is faster than the library knows.
    let fast = truth.with("p3700.read.rate", 3.4);
    let fast = fit("fio.txt", &text(&fast, &[Access::Read], &SEEN_BLOCKS, &SEEN_DEPTHS));
    let report = SiteFitReport(&fast).to_string();
    assert!(report.contains("at the end of its range"), "{report}");
    assert!(report.contains("4 of 16 rows are off by more than 10 %"), "{report}");
}

/// A disk of which nothing is known but the ranges of `NVMe disk, to be calibrated`.
#[test]
fn a_disk_without_a_data_sheet_is_found_from_wide_ranges() {
    let site = SHIPPED.iter().find(|(name, _)| *name == "p3700-disks").unwrap().1;
    let site = site.replace("Intel P3700", "NVMe disk, to be calibrated");
    let site = millstream_site::parse("own.toml", &site).unwrap();
    let truth = known_disk();
    let fit = |text: &str| {
        let rows = measurements::parse("fio.txt", text).unwrap();
        fit_site(&site, &Parameters::shipped(), &rows, Places::default()).unwrap()
    };
    let off = |fit: &SiteFit, block, depth| {
        let queue = CommandQueue::new(&fit.fitted, "nvme-disk", Access::Read).unwrap();
        (queue.bandwidth(block, depth).0 / rate(&truth, Access::Read, block, depth) - 1.0).abs()
    };
    let whole = fit(&text(&truth, &[Access::Read], &SEEN_BLOCKS, &SEEN_DEPTHS));
    for block in UNSEEN_BLOCKS {
        for depth in UNSEEN_DEPTHS {
            let (off, report) = (off(&whole, block, depth), SiteFitReport(&whole));
            assert!(off < 0.05, "{block} {depth}: off by {off}\n{report}");
        }
    }
    // Many long commands determine the rate alone, and predict other long commands.
    let long = fit(&text(&truth, &[Access::Read], &[1 << 20], &[64]));
    let determined: Vec<&str> =
        long.parameters.iter().filter(|q| q.is_determined).map(|q| q.name.as_str()).collect();
    assert_eq!(determined, ["nvme-disk.read.rate"], "{}", SiteFitReport(&long));
    assert!(off(&long, 1 << 20, 128) < 0.05, "{}", SiteFitReport(&long));
}

#[test]
fn json_and_the_device_file_say_the_same_as_text() {
    let truth = known_disk();
    let from_text = fit("fio.txt", &text(&truth, &[Access::Read], &SEEN_BLOCKS, &SEEN_DEPTHS));
    let from_json = fit("fio.json", &json(&truth, Access::Read, &SEEN_BLOCKS, &SEEN_DEPTHS));
    for (a, b) in from_text.parameters.iter().zip(&from_json.parameters) {
        assert!(a.name == b.name && (a.after / b.after - 1.0).abs() < 1e-3, "{a:?} {b:?}");
    }
    let site = shipped("p3700-disks");
    let file = DeviceFile { fit: &from_json, site: &site, source: "fio.json" }.to_string();
    let text = SHIPPED.iter().find(|(name, _)| *name == "p3700-disks").unwrap().1;
    let own = millstream_site::parse("own.toml", &format!("{text}\n{file}"))
        .unwrap_or_else(|error| panic!("{error}\n{file}"));
    let filed = Parameters::shipped().with_devices(&own.devices).into_owned();
    assert!(worst_unseen(&filed, &truth, Access::Read) < 0.03, "{file}");
    assert!(file.contains("fitted to fio.json"), "{file}");
}

#[test]
fn a_measured_disk_must_be_one_of_the_site() {
    let text = text(&known_disk(), &[Access::Read], &[4096], &[1]);
    let rows = measurements::parse("fio.txt", &text).unwrap();
    let refused = |site: &str, places: Places<'_>| {
        fit_site(&shipped(site), &Parameters::shipped(), &rows, places).unwrap_err().to_string()
    };
    let error = refused("edr-pair", Places::default());
    assert!(error.contains("line 6") && error.contains("no [[host.ssd]]"), "{error}");
    let error = refused("p3700-disks", Places { disk: Some("node.disk9"), ..Places::default() });
    assert!(error.contains("node.disk9"), "{error}");
    let named = Places { disk: Some("node.disk0"), ..Places::default() };
    assert!(fit_site(&shipped("p3700-disks"), &Parameters::shipped(), &rows, named).is_ok());

    let two = SHIPPED.iter().find(|(name, _)| *name == "p3700-disks").unwrap().1.to_owned()
        + "\n[[host.ssd]]\nname = \"fast\"\nmodel = \"PM1753\"\nparent = \"socket0\"\n\
           pcie = { generation = 5, lanes = 4 }\n";
    let two = millstream_site::parse("two.toml", &two).unwrap();
    let error = fit_site(&two, &Parameters::shipped(), &rows, Places::default()).unwrap_err().to_string();
    assert!(error.contains("node.disk0") && error.contains("node.fast"), "{error}");

    let flat = SHIPPED.iter().find(|(name, _)| *name == "p3700-disks").unwrap().1;
    let flat = flat.replace("Intel P3700", "a rate only")
        + "\n[device.flat]\nkind = \"ssd\"\nnames = [\"a rate only\"]\n\n[device.flat.values]\n\
           \"read.rate\" = { value = 3.0, low = 2.5, high = 3.5, unit = \"GB/s\", source = \"data sheet\" }\n";
    let flat = millstream_site::parse("flat.toml", &flat).unwrap();
    let error = fit_site(&flat, &Parameters::shipped(), &rows, Places::default()).unwrap_err().to_string();
    assert!(error.contains("node.disk0") && error.contains("read.latency"), "{error}");
    // A benchmark needs two places.
    let rows = measurements::parse("m.csv", "benchmark,bytes,value,unit\nib_write_lat,2,1,us\n").unwrap();
    let error = fit_site(&shipped("p3700-disks"), &Parameters::shipped(), &rows, Places::default());
    assert!(error.unwrap_err().to_string().contains("line 2"));
}
