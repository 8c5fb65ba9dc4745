//! `millstream site` and `millstream model` as programs.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Output};

fn millstream(arguments: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = env!("CARGO_BIN_EXE_millstream");
    Command::new(program).current_dir(root).args(arguments).output().expect("the program starts")
}

fn succeeds(arguments: &[&str]) -> String {
    let output = millstream(arguments);
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{err}", output.status);
    out
}

/// Standard error of a command that must fail.
fn fails(arguments: &[&str]) -> String {
    let output = millstream(arguments);
    assert!(!output.status.success(), "{arguments:?} must fail");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_closed_pipe_ends_the_program_by_sigpipe() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let events = tempfile::tempdir().unwrap();
    let entry =
        r#"{"file":"run.bu0.h5","events":0,"first_event":null,"last_event":null,"bytes":0,"checksum":""}"#;
    std::fs::write(events.path().join("run.bu0.index.jsonl"), format!("{entry}\n")).unwrap();
    let events = events.path().to_str().unwrap();
    for arguments in [
        &["site", "check", "sites/apenet-torus.toml"][..],
        &["stream", "formats"],
        &["evb", "files", events],
        &["torus", "simulate", "--dimensions", "2x1x1"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        command.current_dir(&root).args(arguments).stdout(writer);
        drop(reader);
        let output =
            command.stderr(std::process::Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(13), "{arguments:?}: SIGPIPE, not {}", output.status);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    }
}

#[test]
fn explain_analyses_a_flow_and_a_sweep() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let torus = ["model", "explain", "sites/apenet-torus.toml", "write node0 node42 65536"];
    let one = succeeds(&[&torus[..], &["--samples", "20"]].concat());
    assert!(one.contains("90 % interval"), "{one}");
    assert!(one.contains("bottleneck: ") && one.contains("next: ") && one.contains("link +z"), "{one}");

    let (json, csv, svg) = (file("a.json"), file("a.csv"), file("a.svg"));
    let site = "sites/recipe-backplane.toml";
    let card = "host.server.card.u280.memory.clock=350 MHz..450 MHz+100";
    let flow = "read client server.u280 65536";
    let words = ["--set", "u280.reads=4,8", "--set", card, "--json", &json, "--csv", &csv, "--svg", &svg];
    let swept = succeeds(&[&["model", "explain", site, flow], words.as_slice()].concat());
    assert!(
        swept.contains("u280.reads") && swept.contains("450 MHz") && swept.contains("bottleneck"),
        "{swept}"
    );
    let document: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    let rate = |row: usize| rows[row]["bandwidth [GB/s]"].as_f64().unwrap();
    assert!(rate(2) > 1.5 * rate(0), "twice the reads under way: {rows:?}");
    assert_eq!(std::fs::read_to_string(csv).unwrap().lines().count(), 5);
    assert!(std::fs::read_to_string(svg).unwrap().contains("<svg"));

    for (words, why) in [
        (["--set", "u280.reads=8..4"], "descending"),
        (["--set", "u280.nothing=8"], "no parameter"),
        (["--set", "host.server.card.u250.pcie.lanes=8"], "no \"u250\"; known names: u280"),
        (["--set", "host.server.card.u280.pcie.lanes=7"], "7 lanes"),
        (["--svg", "x.svg"], "several values"),
    ] {
        let output = fails(&[&["model", "explain", site, flow], words.as_slice()].concat());
        assert!(output.contains(why), "{words:?}: {output}");
    }
    assert!(fails(&["model", "explain", site, "push client server"]).contains("one of write, read, send"));
}

#[test]
fn measure_runs_benchmarks_on_a_site() {
    let pair = ["sites/lhcb-pair-fdr-e5.toml", "node0", "node1", "--sizes", "64,65536"];
    for tool in ["ib_write_bw", "ib_read_bw", "ib_send_lat", "osu_latency", "osu_bw", "osu_bibw"] {
        let out = succeeds(&[&["model", "measure", tool], pair.as_slice()].concat());
        assert!(out.starts_with(tool) && out.lines().count() == 4, "{out}");
    }
    let bench = ["sites/pcie-bench.toml", "haswell.nfp", "haswell", "--sizes", "64"];
    for tool in ["dma_read_bw", "dma_write_bw", "dma_rw_bw", "dma_read_lat"] {
        let out = succeeds(&[&["model", "measure", tool], bench.as_slice()].concat());
        assert!(out.contains("pcie-bench") && out.lines().count() == 3, "{out}");
    }
    let stencil =
        succeeds(&["model", "measure", "stencil", "sites/recipe-baseline.toml", "client", "server.u280"]);
    assert!(stencil.contains("sweep [s]"), "{stencil}");
    let wrong = fails(&["model", "measure", "ib_fast_bw", "sites/edr-pair.toml", "node0", "node1"]);
    assert!(wrong.contains("no benchmark \"ib_fast_bw\""), "{wrong}");
    let nowhere = fails(&["model", "measure", "osu_bw", "sites/edr-pair.toml", "node0", "node9"]);
    assert!(nowhere.contains("\"node9\": the site has no host"), "{nowhere}");
}

#[test]
fn calibrate_and_figures_refuse_sweeps() {
    let output = fails(&["model", "calibrate", "--set", "u280.reads=1..4"]);
    assert!(output.contains("several values"), "{output}");
    let output = fails(&["model", "figures", "--set", "link.0.rate=EDR"]);
    assert!(output.contains("takes parameters only"), "{output}");
}

#[test]
fn devices_of_a_site_file_are_set_in_every_command_with_a_site() {
    let (site, other) = ("sites/roce100-cx5.toml", "sites/edr-pair.toml");
    let own = ["--set", "connectx-5-function.link.efficiency=0.5"];
    for command in [
        &["event-builder", site, "--seconds", "0.001", "--saturated"][..],
        &["compare", site, other, "--samples", "5"],
        &["explain", site, "write node0 node1", "--samples", "0"],
    ] {
        let [before, after] = [&[][..], &own].map(|set| succeeds(&[&["model"][..], command, set].concat()));
        // The event builder prints how long the simulation took.
        let result = |text: &str| text.split("\nsimulated in").next().map(str::to_owned);
        assert_ne!(result(&before), result(&after), "{command:?}");
    }
    let unknown = fails(&["model", "compare", site, other, "--set", "connectx-5-function.nothing=1"]);
    assert!(unknown.contains("no parameter"), "{unknown}");
}

#[test]
fn site_check_names_the_line_and_site_show_draws() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.toml");
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sites/recipe-backplane.toml"),
    );
    std::fs::write(&bad, text.unwrap().replacen("generation = 4", "generation = 9", 1)).unwrap();
    let output = fails(&["site", "check", &bad.display().to_string()]);
    assert!(output.contains("bad.toml:") && output.contains("generation 9"), "{output}");
    let picture = folder.path().join("p.svg");
    succeeds(&["site", "show", "sites/apenet-torus.toml", "--out", &picture.display().to_string()]);
    assert!(std::fs::read_to_string(picture).unwrap().contains("4 × 4 × 4"));
}

#[test]
fn flows_of_a_fat_tree_share_its_links() {
    let site = "sites/ndr-fat-tree.toml";
    let two = succeeds(&["model", "flows", site, "write node1 node0", "write node40 node0"]);
    assert!(two.contains("fabric-leaf0 to node0.hca") && two.contains("all flows"), "{two}");
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("flows.csv").display().to_string();
    let all = succeeds(&[
        "model",
        "flows",
        site,
        "--pattern",
        "all-to-all",
        "--routing",
        "adaptive",
        "--csv",
        &csv,
    ]);
    // 64 × 63 flows are summed up, and listed in the file.
    assert!(all.contains("4032") && all.lines().count() < 40, "{all}");
    assert_eq!(std::fs::read_to_string(csv).unwrap().lines().count(), 4033);
    for (arguments, words) in [
        (&["--pattern", "ring"][..], "one of all-to-all, shift:N"),
        (&["--pattern", "incast:nobody"][..], "hosts: node0, node1"),
        (&["write node0 node99"][..], "node99"),
        (&["write node0 node1", "--routing", "valiant"][..], "one of deterministic, adaptive"),
        (&[][..], "required"),
    ] {
        let error = fails(&[&["model", "flows", site][..], arguments].concat());
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
    let hops = succeeds(&["model", "explain", site, "write node0 node63", "--samples", "0"]);
    assert!(hops.contains("fabric-leaf0 to fabric-spine"), "{hops}");
}

#[test]
fn an_incast_is_simulated_with_and_without_dcqcn() {
    let site = "sites/roce100-cx5.toml";
    let folder = tempfile::tempdir().unwrap();
    let three = folder.path().join("three.toml");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join(site)).unwrap().replace("count = 2", "count = 3");
    std::fs::write(&three, text).unwrap();
    let three = three.display().to_string();
    let both = ["--from", "node1", "--from", "node2"];
    let table = succeeds(&[&["model", "congestion", &three, "--to", "node0"][..], &both].concat());
    assert!(table.contains("PFC and DCQCN") && table.contains("senders paused"), "{table}");
    for (file, senders, words) in [
        (three.as_str(), &["--from", "node1"][..], "needs two senders"),
        (three.as_str(), &["--from", "node1", "--from", "node9"][..], "node9"),
        (three.as_str(), &["--from", "node1", "--from", "node1"][..], "named twice"),
        ("sites/ndr-fat-tree.toml", &both[..], "credits instead of PFC"),
    ] {
        let error = fails(&[&["model", "congestion", file, "--to", "node0"][..], senders].concat());
        assert!(error.contains(words), "{senders:?}: {error}");
    }
}

#[test]
fn a_hyphen_writes_one_document_to_standard_output_and_no_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root.join("sites"), folder.path().join("sites")).unwrap();
    let run = |words: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_millstream"))
            .current_dir(folder.path())
            .args(["model"])
            .args(words)
            .output()
            .expect("the program starts");
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned(), err)
    };
    let explain = ["explain", "sites/edr-pair.toml", "write node0 node1", "--samples", "0"];
    let measure = [
        "measure",
        "ib_write_bw",
        "sites/edr-pair.toml",
        "node0",
        "node1",
        "--sizes",
        "64",
        "--samples",
        "0",
    ];
    let flows = ["flows", "sites/edr-fat-tree.toml", "--pattern", "shift:1", "--samples", "0"];
    for words in [&explain[..], &measure[..], &flows[..]] {
        let (good, out, err) = run(&[words, &["--json", "-"]].concat());
        assert!(good, "{words:?}: {err}");
        let document: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert!(!document["rows"].as_array().unwrap().is_empty(), "{out}");
        let (good, out, err) = run(&[words, &["--csv", "-"]].concat());
        assert!(good, "{words:?}: {err}");
        let columns = out.lines().next().unwrap().matches(',').count();
        assert!(columns > 0 && out.lines().count() > 1, "{out}");
    }
    let (good, out, err) = run(&[&measure[..], &["--svg", "-"]].concat());
    assert!(good && out.starts_with("<svg") && out.trim_end().ends_with("</svg>"), "{out}{err}");
    let (good, out, err) = run(&[&measure[..], &["--json", "-", "--csv", "-"]].concat());
    assert!(!good && out.is_empty() && err.contains("--json and --csv are both -"), "{out}{err}");

    std::fs::write(folder.path().join("mine.csv"), "benchmark,bytes,value,unit\nib_write_lat,8,1.1,us\n")
        .unwrap();
    let (good, out, err) =
        run(&["calibrate", "--measurements", "mine.csv", "--site", "sites/edr-pair.toml", "--out", "-"]);
    assert!(
        good && out.starts_with("# Devices fitted to mine.csv") && !out.contains("fitted devices"),
        "{out}{err}"
    );
    std::fs::write(
        folder.path().join("q.csv"),
        "id,system,quantity,unit,conditions\nZ99,none,anything,GB/s,\n",
    )
    .unwrap();
    let (good, out, err) = run(&["predict", "--questions", "q.csv", "--out", "-"]);
    assert!(good && out.starts_with("id,value,unit,low,high,how\nZ99,silent,"), "{out}{err}");
    assert!(!folder.path().join("-").exists());
}

#[test]
fn compare_adds_the_power_at_a_load() {
    let sites = ["model", "compare", "sites/edr-pair.toml", "sites/hdr-fat-tree.toml", "--samples", "5"];
    let plain = succeeds(&sites);
    assert!(!plain.contains("power at this load"), "{plain}");
    let load = ["--cores", "0.5", "--frequency", "0.8", "--idle-states", "shallow", "--transfers", "0.5"];
    let loaded = succeeds(&[&sites[..], &load].concat());
    assert!(loaded.contains("power at this load [W]"), "{loaded}");
    for (option, value, words) in [
        ("--cores", "2", "must be 0 to 1"),
        ("--frequency", "9", "must be 0.1 to 2"),
        ("--idle-states", "c6", "one of deep, shallow"),
    ] {
        let error = fails(&[&sites[..], &[option, value]].concat());
        assert!(error.contains(words), "{option} {value}: {error}");
    }
}

#[test]
fn a_sweep_over_the_queue_depth_of_a_disk_is_limited_by_its_latency() {
    let rate = |depth: &str| {
        let setting = format!("host.node.ssd.disk0.queue-depth={depth}");
        let words =
            ["model", "flows", "sites/h100-disks.toml", "write node.disk0 node 4096", "--samples", "0"];
        let output = succeeds(&[&words[..], &["--set", &setting, "--csv", "-"]].concat());
        let line = output.lines().nth(1).unwrap().to_owned();
        line.split(',').nth(2).unwrap().parse::<f64>().unwrap_or_else(|_| panic!("{output}"))
    };
    let (one, two) = (rate("1"), rate("2"));
    assert!(one > 0.0 && (two / one - 2.0).abs() < 0.05, "{one} {two}");
    let words = ["model", "flows", "sites/h100-disks.toml", "write node.disk0 node 4096"];
    let error = fails(&[&words[..], &["--set", "host.node.ssd.disk0.queue-depth=0"]].concat());
    assert!(error.contains("must be 1 to 65536"), "{error}");
}

#[test]
fn numbers_beyond_virtual_time_are_refused_with_option_and_value() {
    let most = u64::MAX.to_string();
    for (arguments, words) in [
        (
            &["model", "event-builder", "--nodes", "2", "--seconds", "1e8", "--rate", "1e-8"][..],
            &["--seconds 100000000", "0 to 10^6"][..],
        ),
        (
            &["model", "explain", "sites/edr-pair.toml", "write node0 node1", "--samples", &most],
            &["--samples", &most, "1000000"],
        ),
        (
            &[
                "model",
                "explain",
                "sites/edr-pair.toml",
                "write node0 node1",
                "--set",
                "connectx-4.link.efficiency=1e-300",
            ],
            &["connectx-4.link.efficiency", "1e-300", "from 0.001"],
        ),
        (
            &[
                "model",
                "explain",
                "sites/edr-pair.toml",
                "write node0 node1",
                "--set",
                "link.0.rate=EDR",
                "--set",
                "link.0.rate=FDR",
            ],
            &["link.0.rate is set twice"],
        ),
    ] {
        let error = fails(arguments);
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}
