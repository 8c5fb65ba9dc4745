//! The time split as a table for a terminal.

use std::fmt::Write as _;

use crate::NodeTimes;

/// Most nodes with a line of their own.
const MOST_LINES: usize = 16;

/// A line for each node, or the extremes of many, and their means.
#[must_use]
pub fn time_table(nodes: &[NodeTimes]) -> String {
    let mut out = String::new();
    let header = ["node", "compute", "communicate", "wait", "messages", "MB"];
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "  {:>6}{:>12}{:>14}{:>12}{:>12}{:>12}   [ms]",
        header[0], header[1], header[2], header[3], header[4], header[5]
    );
    let mut line = |name: &str, node: &NodeTimes, scale: f64| {
        let ms = |seconds: f64| seconds * 1e3 / scale;
        let _ = writeln!(
            out,
            "  {name:>6}{:>12.1}{:>14.1}{:>12.1}{:>12.0}{:>12.2}",
            ms(node.compute_s),
            ms(node.communicate_s),
            ms(node.wait_s),
            node.messages as f64 / scale,
            node.bytes as f64 / 1e6 / scale
        );
    };
    for (i, node) in nodes.iter().enumerate().take(MOST_LINES) {
        line(&i.to_string(), node, 1.0);
    }
    let mut sum = NodeTimes::default();
    for node in nodes {
        sum.compute_s += node.compute_s;
        sum.communicate_s += node.communicate_s;
        sum.wait_s += node.wait_s;
        sum.messages += node.messages;
        sum.bytes += node.bytes;
    }
    if nodes.len() > 1 {
        line("mean", &sum, nodes.len() as f64);
    }
    out
}
