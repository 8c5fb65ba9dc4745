//! The crates of the workspace and the dependencies between them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cargo_metadata::{DependencyKind, MetadataCommand};
use millstream_report::colour::{BASELINE, GRID, TEXT};
use millstream_report::svg::{Anchor, Coordinate, Font, Svg};

/// Common prefix of all library crates, omitted in tables and pictures.
const PREFIX: &str = "millstream-";
/// The crate with the `millstream` program.
const PROGRAM: &str = "millstream";

/// A crate of the workspace.
#[derive(Debug)]
pub struct Crate {
    /// `description` of its manifest.
    pub description: String,
    /// Its dependencies in the workspace, without those of tests and build scripts.
    pub dependencies: BTreeSet<String>,
    /// Dependencies that a feature of the crate enables.
    pub optional: BTreeSet<String>,
}

/// All crates by name, without the common prefix.
#[derive(Debug)]
pub struct Graph(pub BTreeMap<String, Crate>);

impl Graph {
    /// Reads the graph with `cargo metadata`.
    pub fn read(root: &Path) -> Result<Self, cargo_metadata::Error> {
        let metadata = MetadataCommand::new().manifest_path(root.join("Cargo.toml")).no_deps().exec()?;
        let members: BTreeSet<_> = metadata.packages.iter().map(|package| package.name.to_string()).collect();
        let crates = metadata.packages.iter().map(|package| {
            let on = package.dependencies.iter().filter(|dependency| {
                dependency.kind == DependencyKind::Normal && members.contains(&dependency.name)
            });
            let optional =
                on.clone().filter(|dependency| dependency.optional).map(|dependency| short(&dependency.name));
            let each = Crate {
                description: package.description.clone().unwrap_or_default(),
                optional: optional.collect(),
                dependencies: on.map(|dependency| short(&dependency.name)).collect(),
            };
            (short(&package.name), each)
        });
        Ok(Self(crates.collect()))
    }

    /// The number of arrows.
    pub fn arrows(&self) -> usize {
        self.0.values().map(|each| each.dependencies.len()).sum()
    }

    /// The longest chain of dependencies below each crate. Cargo admits no cycles.
    pub fn depths(&self) -> BTreeMap<&str, usize> {
        let mut depths = BTreeMap::new();
        for name in self.0.keys() {
            self.depth(name, &mut depths);
        }
        depths
    }

    fn depth<'a>(&'a self, name: &'a str, depths: &mut BTreeMap<&'a str, usize>) -> usize {
        if let Some(&depth) = depths.get(name) {
            return depth;
        }
        let below = self.0[name].dependencies.iter().map(|each| self.depth(each, depths) + 1);
        let depth = below.max().unwrap_or(0);
        depths.insert(name, depth);
        depth
    }

    /// Whether `to` can be reached from `from`.
    fn reaches(&self, from: &str, to: &str) -> bool {
        self.0[from].dependencies.iter().any(|each| each == to || self.reaches(each, to))
    }

    /// The arrows of the picture: those that no longer path implies.
    fn essential(&self) -> Vec<(&str, &str)> {
        let mut arrows = Vec::new();
        for (name, each) in &self.0 {
            for to in &each.dependencies {
                let implied = each.dependencies.iter().any(|other| other != to && self.reaches(other, to));
                if !implied {
                    arrows.push((name.as_str(), to.as_str()));
                }
            }
        }
        arrows
    }

    /// A Markdown table, lowest layer first.
    pub fn table(&self) -> String {
        let depths = self.depths();
        let mut names: Vec<_> = self.0.keys().map(String::as_str).collect();
        names.sort_by_key(|name| (depths[name], *name));
        let mut out = String::from("| crate | purpose | depends on |\n|---|---|---|\n");
        for name in names {
            let each = &self.0[name];
            let on = each.dependencies.iter().map(|name| {
                let optional = if each.optional.contains(name) { " (optional)" } else { "" };
                format!("`{name}`{optional}")
            });
            let on: Vec<_> = on.collect();
            let on = if on.is_empty() { "–".to_owned() } else { on.join(", ") };
            out += &format!("| `{name}` | {} | {on} |\n", each.description);
        }
        out
    }

    /// The crates in rows by depth, the program at the top. Implied arrows are omitted.
    pub fn picture(&self) -> String {
        const CELL: (f64, f64) = (124.0, 74.0);
        const BOX: (f64, f64) = (108.0, 28.0);
        let arrows = self.essential();
        let rows = self.rows(&arrows);
        let widest = rows.iter().map(Vec::len).max().unwrap_or(0) as f64;
        let (width, height) = (widest * CELL.0 + 16.0, rows.len() as f64 * CELL.1);
        let place = |name: &str| -> (f64, f64) {
            let (row, column) = position(&rows, name);
            let indent = (widest - rows[row].len() as f64) / 2.0;
            let x = 8.0 + (column as f64 + indent + 0.5) * CELL.0;
            (x, height - (row as f64 + 0.5) * CELL.1)
        };
        let mut svg =
            Svg::new(width, height, "The crates of Millstream; lines lead down to what a crate depends on");
        for (from, to) in &arrows {
            let (from, to) = (place(from), place(to));
            svg.line(
                (from.0, from.1 + BOX.1 / 2.0),
                (to.0, to.1 - BOX.1 / 2.0),
                &[("stroke", &BASELINE), ("stroke-width", &0.8)],
            );
        }
        for name in self.0.keys() {
            let (x, y) = place(name);
            svg.element(
                "rect",
                &[
                    ("x", &Coordinate(x - BOX.0 / 2.0)),
                    ("y", &Coordinate(y - BOX.1 / 2.0)),
                    ("width", &Coordinate(BOX.0)),
                    ("height", &Coordinate(BOX.1)),
                    ("rx", &4),
                    ("fill", &GRID),
                    ("stroke", &BASELINE),
                ],
                None,
            );
            svg.text((x, y + 4.5), Anchor::Middle, Font::new(13.0, TEXT), name);
        }
        svg.finish()
    }

    /// Crates by depth, each row ordered by the mean position of its neighbours (Sugiyama's method).
    fn rows<'a>(&'a self, arrows: &[(&'a str, &'a str)]) -> Vec<Vec<&'a str>> {
        let depths = self.depths();
        let mut rows = vec![Vec::new(); depths.values().max().map_or(0, |depth| depth + 1)];
        for (name, depth) in &depths {
            rows[*depth].push(*name);
        }
        for _ in 0..24 {
            for row in 0..rows.len() {
                let mut keyed: Vec<(f64, &str)> = rows[row]
                    .iter()
                    .enumerate()
                    .map(|(column, name)| {
                        let near: Vec<f64> = arrows
                            .iter()
                            .filter_map(|(from, to)| match (from == name, to == name) {
                                (true, _) => Some(centred(&rows, to)),
                                (_, true) => Some(centred(&rows, from)),
                                _ => None,
                            })
                            .collect();
                        let own = column as f64 - rows[row].len() as f64 / 2.0;
                        let mean = near.iter().sum::<f64>() / near.len().max(1) as f64;
                        (if near.is_empty() { own } else { mean }, *name)
                    })
                    .collect();
                keyed.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(b.1)));
                rows[row] = keyed.into_iter().map(|(_, name)| name).collect();
            }
        }
        rows
    }
}

/// The row and column of a crate.
fn position(rows: &[Vec<&str>], name: &str) -> (usize, usize) {
    rows.iter()
        .enumerate()
        .find_map(|(row, names)| Some((row, names.iter().position(|each| *each == name)?)))
        .expect("each crate has a row")
}

/// The horizontal position of a crate, zero in the middle.
fn centred(rows: &[Vec<&str>], name: &str) -> f64 {
    let (row, column) = position(rows, name);
    column as f64 - rows[row].len() as f64 / 2.0
}

/// A crate's name without the common prefix; the program is `cli`, after its folder.
fn short(name: &str) -> String {
    if name == PROGRAM { "cli".to_owned() } else { name.strip_prefix(PREFIX).unwrap_or(name).to_owned() }
}
