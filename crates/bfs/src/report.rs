//! The result of a run: JSON, a table, a picture.

use std::fmt::Write as _;

use millstream_report::axis::{Ticks, si_prefix_for};
use millstream_report::colour::{GRID, SECONDARY};
use millstream_report::svg::{Anchor, Attribute, Coordinate, Font, Svg};
use serde::{Deserialize, Serialize};

use crate::search::{Direction, Thresholds};
use crate::statistics::Teps;

/// The search of one root. Its result passed all rules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RootRecord {
    /// The root.
    pub root: u64,
    /// Time of the slowest node.
    pub seconds: f64,
    /// The rest of that time after communication and waits of the average node.
    pub compute_seconds: f64,
    /// Time in puts and copies of the average node.
    pub communicate_seconds: f64,
    /// Time in waits of the average node.
    pub wait_seconds: f64,
    /// Vertices in the tree.
    pub reached: u64,
    /// Input edges within the component, duplicates and self-loops included.
    pub edges: u64,
    /// Of these, without self-loops, as the reference code counts.
    pub edges_without_loops: u64,
    /// Vertices of each level.
    pub levels: Vec<u64>,
    /// Direction in which each level after the first was found.
    pub directions: Vec<Direction>,
    /// Hash of the levels of all vertices; the same for every number of nodes.
    pub levels_hash: String,
    /// Hash of the parents of all vertices; the same for every number of nodes, on hosts and on cards.
    pub parents_hash: String,
    /// Dimensions of the nodes that searched.
    pub nodes: String,
}

impl RootRecord {
    /// Traversed edges per second.
    #[must_use]
    pub fn teps(&self) -> f64 {
        self.edges as f64 / self.seconds
    }
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BfsReport {
    /// Logarithm of the number of vertices.
    pub scale: u32,
    /// Edges per vertex.
    pub edge_factor: u64,
    /// Seeds of the generator.
    pub seeds: (u64, u64),
    /// Bits of a stored vertex number.
    pub width_bits: u32,
    /// Dimensions of the torus.
    pub dimensions: String,
    /// Number of nodes.
    pub nodes: usize,
    /// Edges without duplicates and self-loops.
    pub distinct_edges: u64,
    /// Time to generate the edge list; not part of the benchmark.
    pub generation_seconds: f64,
    /// Kernel 1: time from the edge list to the rows.
    pub construction_seconds: f64,
    /// When a search changes its direction.
    pub thresholds: Thresholds,
    /// Searches of earlier runs, from the checkpoint.
    pub kept: usize,
    /// All searches.
    pub roots: Vec<RootRecord>,
}

impl BfsReport {
    /// Statistics of traversed edges per second.
    #[must_use]
    pub fn teps(&self) -> Option<Teps> {
        Teps::of(&self.roots.iter().map(RootRecord::teps).collect::<Vec<_>>())
    }

    /// The report as JSON, with statistics.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        // Numbers and strings only, so the conversion succeeds.
        let mut value = serde_json::to_value(self).unwrap_or_default();
        value["teps"] = serde_json::to_value(self.teps()).unwrap_or_default();
        value
    }

    /// The report for a terminal.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        let edges = self.edge_factor << self.scale;
        let vertices = 1_u64 << self.scale;
        let _ = writeln!(
            text,
            "SCALE {}: {vertices} vertices, {edges} edges ({} distinct), {} bits a vertex, nodes {}",
            self.scale, self.distinct_edges, self.width_bits, self.dimensions
        );
        let _ = writeln!(
            text,
            "generation {:.3} s, kernel 1 {:.3} s",
            self.generation_seconds, self.construction_seconds
        );
        let Some(teps) = self.teps() else { return text };
        let _ = write!(text, "{} searches, all results valid by the five rules", self.roots.len());
        let _ = match self.kept {
            0 => writeln!(text),
            kept => writeln!(text, "; {kept} of them by earlier runs, from the checkpoint"),
        };
        for (name, value) in [
            ("min", teps.min),
            ("first quartile", teps.first_quartile),
            ("median", teps.median),
            ("third quartile", teps.third_quartile),
            ("max", teps.max),
            ("harmonic mean", teps.harmonic_mean),
            ("harmonic deviation", teps.harmonic_deviation),
        ] {
            let _ = writeln!(text, "  {name:18} {:10.2} MTEPS", value / 1e6);
        }
        let sum = |part: fn(&RootRecord) -> f64| self.roots.iter().map(part).sum::<f64>();
        let whole = sum(|root| root.seconds);
        let share = |part| 100.0 * sum(part) / whole;
        let _ = writeln!(
            text,
            "kernel 2: {:.2} ms a search: compute {:.0} %, communicate {:.0} %, wait {:.0} %",
            1e3 * whole / self.roots.len() as f64,
            share(|root| root.compute_seconds),
            share(|root| root.communicate_seconds),
            share(|root| root.wait_seconds),
        );
        text
    }

    /// A picture: TEPS of each root, and vertices of each level.
    #[must_use]
    pub fn svg(&self) -> String {
        let title = format!("Graph500 BFS, SCALE {}, {} nodes ({})", self.scale, self.nodes, self.dimensions);
        let mut svg = Svg::new(WIDTH, 2.0 * PANEL + 20.0, &title);
        svg.text((LEFT, 26.0), Anchor::Start, Font::bold(15.0), &title);
        let rates: Vec<_> = (self.roots.iter())
            .map(|root| {
                let parts = [root.compute_seconds, root.communicate_seconds, root.wait_seconds];
                let title = format!("root {}: {:.2} ms", root.root, 1e3 * root.seconds);
                let rate = root.teps();
                let shares = parts.map(|part| rate * part / root.seconds);
                Bar { parts: shares.to_vec(), title }
            })
            .collect();
        let mean = self.teps().map(|teps| teps.harmonic_mean);
        panel(
            &mut svg,
            0.0,
            "TEPS of each root, split by time: compute, communicate, wait",
            "root",
            &rates,
            mean,
        );
        panel(
            &mut svg,
            PANEL,
            "Vertices of each level, mean of all roots",
            "level",
            &self.mean_levels(),
            None,
        );
        svg.finish()
    }

    /// The mean number of vertices of each level, by the direction that found them.
    fn mean_levels(&self) -> Vec<Bar> {
        let depth = self.roots.iter().map(|root| root.levels.len()).max().unwrap_or(0);
        let count = self.roots.len().max(1) as f64;
        (0..depth)
            .map(|level| {
                let mut parts = vec![0.0; 2];
                for root in &self.roots {
                    let vertices = root.levels.get(level).copied().unwrap_or(0) as f64 / count;
                    let direction = level.checked_sub(1).and_then(|place| root.directions.get(place));
                    parts[usize::from(direction == Some(&Direction::BottomUp))] += vertices;
                }
                let title = format!("level {level}: {:.0} top-down, {:.0} bottom-up", parts[0], parts[1]);
                Bar { parts, title }
            })
            .collect()
    }
}

const WIDTH: f64 = 760.0;
const PANEL: f64 = 250.0;
const LEFT: f64 = 70.0;
const PLOT: (f64, f64) = (660.0, 150.0);
const COLOURS: [&str; 3] = ["#0072b2", "#e69f00", "#d55e00"];

struct Bar {
    /// Parts from bottom to top.
    parts: Vec<f64>,
    title: String,
}

/// Draws stacked bars, with a line at `mean`.
fn panel(svg: &mut Svg, top: f64, title: &str, x: &str, bars: &[Bar], mean: Option<f64>) {
    let base = top + 60.0 + PLOT.1;
    let highest = bars.iter().map(|bar| bar.parts.iter().sum::<f64>()).fold(0.0, f64::max);
    let ticks = Ticks::around(0.0, highest, 5);
    let (scale, prefix) = si_prefix_for(highest);
    svg.text((LEFT, top + 50.0), Anchor::Start, Font::new(12.0, SECONDARY), title);
    let grid: Attribute<'_> = ("stroke", &GRID);
    for (value, _) in ticks.marks() {
        let y = base - ticks.position(value) * PLOT.1;
        svg.line((LEFT, y), (LEFT + PLOT.0, y), &[grid]);
        let label = format!("{}{prefix}", value / scale);
        svg.text((LEFT - 8.0, y + 4.0), Anchor::End, Font::new(11.0, SECONDARY), &label);
    }
    let step = PLOT.0 / bars.len().max(1) as f64;
    for (i, bar) in bars.iter().enumerate() {
        svg.begin("g", &[]);
        svg.element("title", &[], Some(&bar.title));
        let mut below = 0.0;
        for (part, colour) in bar.parts.iter().zip(COLOURS) {
            let (low, high) = (ticks.position(below), ticks.position(below + part));
            below += part;
            let attributes: [Attribute<'_>; 5] = [
                ("x", &Coordinate(LEFT + i as f64 * step + step * 0.1)),
                ("y", &Coordinate(base - high * PLOT.1)),
                ("width", &Coordinate(step * 0.8)),
                ("height", &Coordinate((high - low) * PLOT.1)),
                ("fill", &colour),
            ];
            svg.element("rect", &attributes, None);
        }
        svg.end();
        if bars.len() <= 20 {
            let at = (LEFT + (i as f64 + 0.5) * step, base + 16.0);
            svg.text(at, Anchor::Middle, Font::new(11.0, SECONDARY), &i.to_string());
        }
    }
    svg.text((LEFT + PLOT.0 / 2.0, base + 32.0), Anchor::Middle, Font::new(11.0, SECONDARY), x);
    if let Some(mean) = mean {
        let y = base - ticks.position(mean) * PLOT.1;
        svg.line((LEFT, y), (LEFT + PLOT.0, y), &[("stroke", &"#000000"), ("stroke-dasharray", &"6 4")]);
        let label = format!("harmonic mean {:.1} MTEPS", mean / 1e6);
        svg.text((LEFT + PLOT.0, top + 50.0), Anchor::End, Font::new(11.0, SECONDARY), &label);
    }
}
