//! Residuals of published rows, and reproducibility of predictions.

use millstream_model::calibrate::residuals;
use millstream_model::predict::{predict, to_csv};
use millstream_model::{Parameters, rows};

/// Rows with residuals above 5 %; docs/model.md explains them.
const EXCEPTIONS: [&str; 8] = ["P21", "P24", "P28", "P32", "P33", "P34", "P35", "P37"];

#[test]
fn every_calibration_row_is_within_five_percent_or_an_exception() {
    let p = Parameters::shipped();
    let all = residuals(&rows::calibration(), &p);
    for r in &all {
        let Some(off) = r.relative else { continue };
        let exception = EXCEPTIONS.contains(&r.row.id.as_str());
        assert_eq!(off.abs() > 0.05, exception, "{}: off by {:.1} %", r.row.id, off * 100.0);
    }
    assert_eq!(all.iter().filter(|r| r.relative.is_some()).count(), 37);
    assert!(all.iter().all(|r| !r.row.is_input() || r.relative.is_none()), "inputs have no residual");
}

#[test]
fn predictions_are_deterministic_and_inside_their_intervals() {
    let questions = "id,system,quantity,unit,conditions\n\
        C07,Cilardo2021,read,GB/s,\n\
        H29,U280-HBM,\"read throughput, one master, Random 2PC, 128 B transactions\",GB/s,\n\
        P63,pcie-bench NFP6000 IB-E5-2620v2-local,LAT_CMD_RD 64 B median,ns,\n\
        Z99,unheard of,anything,GB/s,\n";
    let questions = rows::parse("questions.csv", questions).unwrap();
    let p = Parameters::shipped();
    let answers = predict(&questions, &p, 8);
    assert_eq!(answers, predict(&questions, &p, 8));
    assert_eq!(answers.len(), 4);
    for answer in &answers[..3] {
        let interval = answer.values[0];
        assert!(interval.low <= interval.value && interval.value <= interval.high, "{answer:?}");
        assert!(interval.low < interval.high, "{answer:?}");
    }
    assert!(answers[3].values.is_empty() && answers[3].method.contains("not modelled"));
    let text = to_csv(&answers);
    assert_eq!(text.lines().count(), 5);
    assert!(text.lines().last().unwrap().starts_with("Z99,,GB/s,,,not modelled"), "{text}");
}

/// Output of the command in docs/model.md.
const PREDICTIONS: &str = include_str!("../../../docs/predictions.csv");

#[test]
fn shipped_questions_are_the_published_ones() {
    let ours = include_str!("../data/questions.csv");
    let published = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/published/questions.csv");
    match std::fs::read_to_string(published) {
        Ok(text) => assert_eq!(text, ours),
        Err(error) => println!("not compared with {published}: {error}"),
    }
}

/// docs/predictions.csv has the values that the model predicts. For cheap rows of each kind the intervals match, too.
#[test]
fn predictions_csv_is_reproducible() {
    let questions = rows::questions();
    let p = Parameters::shipped();
    let lines: Vec<&str> = PREDICTIONS.lines().collect();
    assert_eq!(lines.len(), questions.len() + 1, "a line for each question");
    let begin = |line: &str| line.splitn(4, ',').take(3).collect::<Vec<_>>().join(",");
    // Values do not depend on the samples: one is enough.
    let quick = to_csv(&predict(&questions, &p, 1));
    for (now, filed) in quick.lines().zip(&lines) {
        assert_eq!(begin(now), begin(filed), "run the command of docs/model.md again");
    }
    let whole = ["A09", "A13", "P44", "P63", "H24", "I31"];
    let some: Vec<_> = questions.into_iter().filter(|row| whole.contains(&row.id.as_str())).collect();
    assert_eq!(some.len(), whole.len());
    for line in to_csv(&predict(&some, &p, 48)).lines().skip(1) {
        assert!(lines.contains(&line), "{line}: run the command of docs/model.md again");
    }
}
