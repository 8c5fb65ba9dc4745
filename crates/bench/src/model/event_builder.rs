//! Time and memory of the modelled event builder by number of nodes: one second of data taking, one process
//! per case.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{Figure, Table};

/// Target values of 500 nodes: time (s) and memory (bytes).
const TARGETS: (f64, f64) = (60.0, 2e9);

pub(super) fn cost(table: &mut Table, program: &Path) -> Result<(), Box<dyn Error>> {
    for nodes in [8u32, 32, 128, 500] {
        let arguments =
            ["model", "event-builder", "--json", "--nodes", &nodes.to_string()].map(str::to_owned);
        let output = Command::new(program).args(&arguments).output()?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(format!(
                "{} {}: {}: {errors}",
                program.display(),
                arguments.join(" "),
                output.status
            )
            .into());
        }
        let run: Value = serde_json::from_slice(&output.stdout)?;
        let number =
            |field: &str| run[field].as_f64().ok_or_else(|| format!("model event-builder: no {field}"));
        let name = format!("modelled event builder, {nodes} nodes");
        let (wall, peak) = (number("wall_s")?, number("peak_bytes")?);
        let with_target = |name: String, value: f64, unit: &str, target: f64| match nodes {
            500 => Figure::with_baseline(format!("{name}, vs target"), value, unit, target),
            _ => Figure::without_baseline(name, value, unit),
        };
        table.push(with_target(name.clone(), wall, "s", TARGETS.0));
        table.push(with_target(format!("{name}: memory"), peak * 1e-6, "MB", TARGETS.1 * 1e-6));
        table.push(Figure::without_baseline(format!("{name}: simulated"), number("simulated_s")?, "s"));
        table.push(Figure::without_baseline(
            format!("{name}: transfers"),
            number("transfers")? / wall * 1e-6,
            "M/s",
        ));
        table.push(Figure::without_baseline(
            format!("{name}: event rate"),
            number("events_per_s")? * 1e-6,
            "MHz",
        ));
    }
    Ok(())
}
