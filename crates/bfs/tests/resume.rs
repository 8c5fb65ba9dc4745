//! A node is lost in the middle; a further run on fewer nodes goes on with the same answer.

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::time::Duration;

use common::on_all_nodes;
use millstream_bfs::job::Width;
use millstream_bfs::search::Thresholds;
use millstream_bfs::{BfsError, BfsOptions, BfsReport, RootRecord, run};
use millstream_fabric::{Fabric, FabricError};

fn answers(report: &BfsReport) -> Vec<(u64, u64, String, String)> {
    let of = |record: &RootRecord| {
        (record.root, record.edges, record.levels_hash.clone(), record.parents_hash.clone())
    };
    report.roots.iter().map(of).collect()
}

#[test]
fn a_run_goes_on_after_a_node_is_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("bfs.checkpoint");
    let options = BfsOptions { roots: 8, timeout: Duration::from_secs(60), ..BfsOptions::new(9) };
    let whole = on_all_nodes("1x1x1", |node| run(node, &options, |_| ControlFlow::Continue(())));
    let whole = whole[0].as_ref().expect("valid");

    let kept = BfsOptions { checkpoint: Some(file.clone()), ..options };
    let ends = on_all_nodes("2x2x1", |node| {
        let mut done = 0;
        let here = node.here().0;
        run(node, &kept, |_| {
            done += 1;
            // Node 3 is lost after the third root.
            if here == 3 && done == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    });
    assert!(matches!(ends[3], Err(BfsError::Interrupted { done: 3 })), "{:?}", ends[3]);
    for end in &ends[..3] {
        assert!(matches!(end, Err(BfsError::Fabric(FabricError::NodeLost { .. }))), "{end:?}");
    }
    // A line that was being written when the program died does not count.
    let mut text = fs::read_to_string(&file).expect("written");
    assert!((3..=5).contains(&text.lines().count()), "parameters and three roots or so: {text}");
    text.push_str("{\"root\": 1");
    fs::write(&file, text).expect("writable");

    let mut searched = 0;
    let again = on_all_nodes("3x1x1", |node| run(node, &kept, |_| ControlFlow::Continue(())));
    for report in &again {
        let report = report.as_ref().expect("valid");
        assert_eq!(answers(report), answers(whole));
        searched = report.roots.iter().filter(|record| record.nodes == "3x1x1").count();
        assert_eq!(report.kept, 8 - searched);
        assert!(report.table().contains(&format!("; {} of them by earlier runs", report.kept)));
    }
    assert!((4..=6).contains(&searched), "{searched} roots on the second nodes");
}

#[test]
fn a_checkpoint_of_other_parameters_is_refused_at_all_nodes() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("bfs.checkpoint");
    let options = BfsOptions { roots: 1, checkpoint: Some(file.clone()), ..BfsOptions::new(6) };
    let on = |options: &BfsOptions| {
        on_all_nodes("2x1x1", |node| run(node, options, |_| ControlFlow::Continue(())).map(drop))
    };
    assert!(on(&options).iter().all(Result::is_ok));
    for other in [
        BfsOptions { scale: 7, ..options.clone() },
        BfsOptions { width: Width::Bits48, ..options.clone() },
        BfsOptions { thresholds: Thresholds { alpha: 1, beta: 18 }, ..options.clone() },
    ] {
        let refused = on(&other);
        let texts: Vec<_> = refused.into_iter().map(|end| end.expect_err("refused").to_string()).collect();
        assert!(texts.iter().all(|text| text.contains("belongs to another run")), "{texts:?}");
    }
    fs::write(&file, "no checkpoint\n").expect("writable");
    let refused = on(&options);
    let text = refused[1].as_ref().expect_err("refused").to_string();
    assert!(text.contains("line 1: not a checkpoint"), "{text}");
}
