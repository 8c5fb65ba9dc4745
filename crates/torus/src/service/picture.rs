//! The state of a torus as text and as SVG.

use std::fmt::Write as _;

use millstream_health::NodeState;
use millstream_torus_core::{Axis, Coordinates, Dimensions};

use super::{NodeRow, TorusState};

/// Size of a node in the drawing (pixels).
const CELL: usize = 56;

/// Name and one letter of a node's state.
#[must_use]
pub fn name(row: &NodeRow) -> (&'static str, char) {
    match row.state {
        NodeState::Ok if row.application == Some(false) => ("application gone", 'g'),
        NodeState::Ok => ("ok", 'o'),
        NodeState::Unknown => ("unknown", '?'),
        NodeState::Sick => ("sick", 's'),
        NodeState::HostFailed => ("host failed", 'H'),
        NodeState::AdapterFailed => ("adapter failed", 'A'),
        NodeState::ServiceLost => ("service network lost", 'S'),
        NodeState::NodeFailed => ("node failed", 'X'),
        NodeState::LinkFailed(_) => ("link failed", 'L'),
        NodeState::Enclosed => ("enclosed", 'E'),
        NodeState::Left => ("left", '-'),
    }
}

fn colour(row: &NodeRow) -> &'static str {
    match row.state {
        NodeState::Ok if row.application == Some(false) => "#b3c6e6",
        NodeState::Ok => "#8fce8f",
        NodeState::Unknown | NodeState::Left => "#d0d0d0",
        NodeState::Sick | NodeState::LinkFailed(_) | NodeState::ServiceLost => "#f2d16b",
        NodeState::HostFailed | NodeState::Enclosed => "#f0a35e",
        NodeState::AdapterFailed | NodeState::NodeFailed => "#e06666",
    }
}

/// The planes of the torus side by side, one letter a node, and a line for each node that is not well.
#[must_use]
pub fn text(state: &TorusState) -> String {
    let Ok(torus) = state.dimensions.parse::<Dimensions>() else { return String::new() };
    let settled = if state.settled { "" } else { ", routes are changing" };
    let acting = if state.acting { "acts" } else { "watches" };
    let mut out =
        format!("{torus}: epoch {}{settled}; supervisor {} {acting}\n", state.epoch, state.supervisor);
    for y in (0..torus.size(Axis::Y)).rev() {
        for z in 0..torus.size(Axis::Z) {
            out.push_str("  ");
            for x in 0..torus.size(Axis::X) {
                let row = torus.node(Coordinates([x, y, z])).and_then(|node| state.nodes.get(node.index()));
                let _ = write!(out, " {}", row.map_or(' ', |row| name(row).1));
            }
        }
        out.push('\n');
    }
    for row in state.nodes.iter().filter(|row| name(row).1 != 'o') {
        let avoided = if row.avoided { ", routes avoid it" } else { "" };
        let _ = writeln!(out, "{}: {}{avoided}", row.node, name(row).0);
    }
    out
}

/// A drawing: the planes of the torus side by side.
#[must_use]
pub fn svg(state: &TorusState) -> String {
    let Ok(torus) = state.dimensions.parse::<Dimensions>() else { return String::new() };
    let [columns, rows, planes] = torus.sizes().map(usize::from);
    let (width, height) = ((planes * (columns + 1) + 1) * CELL, (rows + 2) * CELL);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\" text-anchor=\"middle\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for row in &state.nodes {
        let [x, y, z] = torus.coordinates(row.node).0.map(usize::from);
        let cx = (z * (columns + 1) + x + 1) * CELL;
        let cy = (rows - y) * CELL;
        let border =
            if row.avoided { "stroke=\"black\" stroke-dasharray=\"4 3\"" } else { "stroke=\"#555\"" };
        let _ = writeln!(
            out,
            "<g><title>{}: {}</title><circle cx=\"{cx}\" cy=\"{cy}\" r=\"{}\" fill=\"{}\" {border}/>\
             <text x=\"{cx}\" y=\"{}\">{}</text></g>",
            row.node,
            name(row).0,
            CELL / 3,
            colour(row),
            cy + 4,
            row.node.0
        );
    }
    for z in 0..planes {
        let cx = z * (columns + 1) * CELL + (columns + 1) * CELL / 2;
        let _ = writeln!(out, "<text x=\"{cx}\" y=\"{}\">z = {z}</text>", (rows + 1) * CELL);
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_torus_core::NodeNumber;

    #[test]
    fn every_node_has_a_place_and_the_sick_have_a_line() {
        let row = |number: u16| NodeRow {
            node: NodeNumber(number),
            state: if number == 3 { NodeState::AdapterFailed } else { NodeState::Ok },
            avoided: number == 3,
            application: Some(number != 2),
        };
        let state = TorusState {
            dimensions: "2x2x2".to_owned(),
            acting: true,
            settled: true,
            epoch: 1,
            nodes: (0..8).map(row).collect(),
            ..TorusState::default()
        };
        let shown = text(&state);
        let expected = "2x2x2: epoch 1; supervisor 0 acts\n   g A   o o\n   o o   o o\n\
                        node 2: application gone\nnode 3: adapter failed, routes avoid it\n";
        assert_eq!(shown, expected);
        let drawn = svg(&state);
        assert_eq!(drawn.matches("<circle").count(), 8);
        assert_eq!(drawn.matches("#e06666").count(), 1);
    }
}
