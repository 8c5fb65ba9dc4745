//! What the modelled event builder costs by its size: one second of data taking, a process for each size.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{Figure, Table};

/// Seconds and bytes that the full size may take.
const GOALS: (f64, f64) = (60.0, 2e9);

pub(super) fn cost(table: &mut Table, program: &Path) -> Result<(), Box<dyn Error>> {
    for nodes in [8u32, 32, 128, 500] {
        let arguments =
            ["model", "event-builder", "--json", "--nodes", &nodes.to_string()].map(str::to_owned);
        let output = Command::new(program).args(&arguments).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(
                format!("{} {}: {}: {said}", program.display(), arguments.join(" "), output.status).into()
            );
        }
        let run: Value = serde_json::from_slice(&output.stdout)?;
        let number =
            |field: &str| run[field].as_f64().ok_or_else(|| format!("model event-builder: no {field}"));
        let name = format!("event builder, {nodes} nodes");
        let (wall, peak) = (number("wall_s")?, number("peak_bytes")?);
        // What was asked for of the full size stands beside it.
        let beside = |name: String, value: f64, unit: &str, goal: f64| match nodes {
            500 => Figure::against(format!("{name}, goal"), value, unit, goal),
            _ => Figure::alone(name, value, unit),
        };
        table.push(beside(name.clone(), wall, "s", GOALS.0));
        table.push(beside(format!("{name}: memory"), peak * 1e-6, "MB", GOALS.1 * 1e-6));
        table.push(Figure::alone(format!("{name}: simulated"), number("simulated_s")?, "s"));
        table.push(Figure::alone(format!("{name}: transfers"), number("transfers")? / wall * 1e-6, "M/s"));
        table.push(Figure::alone(format!("{name}: built"), number("events_per_s")? * 1e-6, "MHz"));
    }
    Ok(())
}
