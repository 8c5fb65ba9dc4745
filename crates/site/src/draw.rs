//! A site as a picture: one column per kind of host with its PCIe tree, networks below.
//!
//! Hosts that a count made are drawn once, with their number: five hundred boxes say less than one.

use crate::validate::{DeviceKind, Host, LinkEnd, Parent, Site};
use millstream_report::svg::{Anchor, Font, Svg};

const BOX: (f64, f64) = (190.0, 46.0);
const GAP: f64 = 26.0;
const INDENT: f64 = 28.0;
const COLUMN: f64 = BOX.0 + 4.0 * INDENT;
const MARGIN: f64 = 24.0;
const TOP: f64 = 84.0;

/// One box of the picture.
struct Placed {
    x: f64,
    y: f64,
}

/// The site as an SVG document.
#[must_use]
pub fn draw(site: &Site) -> String {
    // The first host of each kind stands for all of it.
    let mut kinds: Vec<(&Host, usize, usize)> = Vec::new();
    for (i, host) in site.hosts.iter().enumerate() {
        match kinds.iter_mut().find(|(first, _, _)| first.kind == host.kind) {
            Some((_, _, count)) => *count += 1,
            None => kinds.push((host, i, 1)),
        }
    }
    let rows = kinds.iter().map(|(h, _, _)| h.sockets.len() + h.devices.len()).max().unwrap_or(1);
    let networks = site.switches.len() + site.tori.len();
    let bottom = TOP + rows as f64 * (BOX.1 + GAP) + 40.0;
    // The last column's labels go on to its right.
    let width = (kinds.len().max(networks).max(1) as f64 * (COLUMN + MARGIN) + MARGIN + 190.0).max(620.0);
    let ports: Vec<(usize, usize)> = (kinds.iter())
        .flat_map(|(host, first, _)| {
            let adapters = (0..host.devices.len()).filter(|&d| host.devices[d].kind == DeviceKind::Adapter);
            adapters.map(move |d| (*first, d))
        })
        .collect();
    let cables = cables(site, &ports);
    let height = bottom + height_below(site, cables.len());
    let mut svg = Svg::new(width, height, &site.name);
    svg.text((MARGIN, 30.0), Anchor::Start, Font::bold(18.0), &site.name);
    svg.text((MARGIN, 52.0), Anchor::Start, Font::new(12.0, "#59636e"), &site.description);

    let mut adapters: Vec<(usize, usize, Placed)> = Vec::new();
    for (column, (host, first, count)) in kinds.iter().enumerate() {
        let left = MARGIN + column as f64 * (COLUMN + MARGIN);
        frame(&mut svg, left - 8.0, TOP - 22.0, COLUMN, bottom - TOP, host, *count);
        let mut row = 0.0;
        for (s, socket) in host.sockets.iter().enumerate() {
            let at = Placed { x: left, y: TOP + row * (BOX.1 + GAP) };
            let memory = socket.memory.map_or(String::new(), |m| format!(", {m}"));
            block(
                &mut svg,
                &at,
                "#ddf4ff",
                &socket.processor,
                &format!("socket{s}, {} cores{memory}", socket.cores),
            );
            row += 1.0;
            // Children below their parents, indented once for each level.
            let mut stack: Vec<(usize, Placed, f64)> = children(host, Parent::Socket(crate::SocketId(s)))
                .into_iter()
                .rev()
                .map(|d| (d, Placed { x: at.x, y: at.y }, 1.0))
                .collect();
            while let Some((d, above, depth)) = stack.pop() {
                let device = &host.devices[d];
                let here = Placed { x: left + depth * INDENT, y: TOP + row * (BOX.1 + GAP) };
                row += 1.0;
                let x = above.x + INDENT / 2.0;
                let stroke = ("stroke", &"#57606a" as &dyn std::fmt::Display);
                svg.line((x, above.y + BOX.1), (x, here.y + BOX.1 / 2.0), &[stroke]);
                svg.line((x, here.y + BOX.1 / 2.0), (here.x, here.y + BOX.1 / 2.0), &[stroke]);
                let pcie = format!("gen{} x{}", device.pcie.generation.0, device.pcie.lanes.0);
                svg.text((here.x + BOX.0, here.y - 4.0), Anchor::End, Font::new(10.0, "#59636e"), &pcie);
                let (colour, note) = match &device.kind {
                    DeviceKind::Switch(_) => ("#fff8c5", device.name.clone()),
                    DeviceKind::Adapter => ("#dafbe1", device.name.clone()),
                    DeviceKind::Card(memory) => (
                        "#fbefff",
                        memory.as_ref().map_or(device.name.clone(), |m| {
                            format!("{}, {} {}", device.name, m.size, m.kind)
                        }),
                    ),
                };
                block(&mut svg, &here, colour, &device.model, &note);
                for child in children(host, Parent::Switch(crate::DeviceId(d))).into_iter().rev() {
                    stack.push((child, Placed { x: here.x, y: here.y }, depth + 1.0));
                }
                if device.kind == DeviceKind::Adapter {
                    adapters.push((*first, d, Placed { x: here.x, y: here.y }));
                }
            }
        }
    }
    let places: Vec<&Placed> = (ports.iter())
        .filter_map(|port| adapters.iter().find(|(host, device, _)| (*host, *device) == *port))
        .map(|(_, _, place)| place)
        .collect();
    networks_below(&mut svg, site, &cables, &places, bottom);
    svg.finish()
}

fn children(host: &Host, parent: Parent) -> Vec<usize> {
    (0..host.devices.len()).filter(|&d| host.devices[d].parent == parent).collect()
}

fn frame(svg: &mut Svg, x: f64, y: f64, width: f64, height: f64, host: &Host, count: usize) {
    svg.element(
        "rect",
        &[
            ("x", &x),
            ("y", &y),
            ("width", &width),
            ("height", &height),
            ("rx", &6),
            ("fill", &"none"),
            ("stroke", &"#d0d7de"),
        ],
        None,
    );
    let title = if count > 1 { format!("{} × {count}", host.kind) } else { host.name.clone() };
    svg.text((x + 8.0, y + 15.0), Anchor::Start, Font::bold(12.0), &title);
}

fn block(svg: &mut Svg, at: &Placed, fill: &str, title: &str, note: &str) {
    svg.element(
        "rect",
        &[
            ("x", &at.x),
            ("y", &at.y),
            ("width", &BOX.0),
            ("height", &BOX.1),
            ("rx", &4),
            ("fill", &fill),
            ("stroke", &"#57606a"),
        ],
        None,
    );
    svg.text((at.x + 8.0, at.y + 19.0), Anchor::Start, Font::bold(12.0), title);
    svg.text((at.x + 8.0, at.y + 35.0), Anchor::Start, Font::new(11.0, "#1f2328"), note);
}

/// A cable, or several alike, between what is drawn.
struct Cable {
    /// Adapters, as places in the list of those that are drawn.
    adapters: Vec<usize>,
    /// The box below that it leads to.
    network: Option<usize>,
    /// What is written along it.
    label: String,
}

/// Cables of a site, each kind of host's once.
fn cables(site: &Site, ports: &[(usize, usize)]) -> Vec<Cable> {
    let kind = |host: usize| &site.hosts[host].kind;
    // The adapter that is drawn for this one: the same of the first host of its kind.
    let drawn =
        |h: usize, d: usize| ports.iter().position(|&(host, device)| kind(host) == kind(h) && device == d);
    let mut cables: Vec<Cable> = Vec::new();
    let mut add = |cable: Cable| {
        if !cables.iter().any(|known| known.adapters == cable.adapters && known.network == cable.network) {
            cables.push(cable);
        }
    };
    for wire in site.links.iter().filter(|wire| wire.dimension.is_none()) {
        let length = wire.length.map_or(String::new(), |length| format!(", {} m", length.0));
        let rate = format!("{}{length}", wire.rate);
        match (wire.from, wire.to) {
            (LinkEnd::Adapter(a, x), LinkEnd::Adapter(b, y)) => {
                let (Some(from), Some(to)) = (drawn(a.0, x.0), drawn(b.0, y.0)) else { continue };
                let label = if from == to {
                    format!("{} to {}: {rate}", site.hosts[a.0].name, site.hosts[b.0].name)
                } else {
                    rate
                };
                let mut ends = vec![from, to];
                ends.sort_unstable();
                ends.dedup();
                add(Cable { adapters: ends, network: None, label });
            }
            (LinkEnd::Adapter(host, device), LinkEnd::Switch(switch))
            | (LinkEnd::Switch(switch), LinkEnd::Adapter(host, device)) => {
                let Some(from) = drawn(host.0, device.0) else { continue };
                add(Cable { adapters: vec![from], network: Some(switch), label: rate });
            }
            (LinkEnd::Switch(_), LinkEnd::Switch(_)) => {}
        }
    }
    for (i, torus) in site.tori.iter().enumerate() {
        let mut ends: Vec<usize> = torus.nodes.iter().filter_map(|(h, d)| drawn(h.0, d.0)).collect();
        ends.sort_unstable();
        ends.dedup();
        let label = format!("{} links a node, {} each", 2 * torus.dimensions.len(), torus.rate);
        add(Cable { adapters: ends, network: Some(site.switches.len() + i), label });
    }
    cables
}

/// Room for one cable.
const LANE: f64 = 22.0;

/// Height of all that is below the hosts.
fn height_below(site: &Site, cables: usize) -> f64 {
    let boxes = if site.switches.is_empty() && site.tori.is_empty() { 0.0 } else { BOX.1 + 24.0 };
    if cables == 0 { boxes } else { boxes + cables as f64 * LANE + 24.0 }
}

/// Cables go down beside their host's column, each on a lane of its own, then across below all hosts.
fn networks_below(svg: &mut Svg, site: &Site, cables: &[Cable], places: &[&Placed], bottom: f64) {
    let boxes = bottom + 10.0 + cables.len() as f64 * LANE;
    let place = |i: usize| Placed { x: MARGIN + i as f64 * (COLUMN + MARGIN), y: boxes };
    for (i, switch) in site.switches.iter().enumerate() {
        let note = format!("{} ports, {}", switch.ports, switch.latency);
        block(svg, &place(i), "#ffebe9", &switch.name, &note);
    }
    for (i, torus) in site.tori.iter().enumerate() {
        let size = torus.dimensions.iter().map(u32::to_string).collect::<Vec<_>>().join(" × ");
        block(svg, &place(site.switches.len() + i), "#ffebe9", &torus.name, &format!("torus {size}"));
    }
    let stroke: [(&'static str, &dyn std::fmt::Display); 2] =
        [("stroke", &"#0969da"), ("stroke-width", &"1.5")];
    for (lane, cable) in cables.iter().enumerate() {
        let across = bottom + 10.0 + lane as f64 * LANE;
        let mut ends: Vec<f64> = Vec::new();
        for &adapter in &cable.adapters {
            let Some(at) = places.get(adapter) else { continue };
            // The frame's right edge is where the column ends, whatever the depth of the tree.
            let column = ((at.x - MARGIN) / (COLUMN + MARGIN)).floor();
            let down = MARGIN + column * (COLUMN + MARGIN) + COLUMN - 16.0 - 7.0 * lane as f64;
            svg.line((at.x + BOX.0, at.y + BOX.1 / 2.0), (down, at.y + BOX.1 / 2.0), &stroke);
            svg.line((down, at.y + BOX.1 / 2.0), (down, across), &stroke);
            ends.push(down);
        }
        if let Some(network) = cable.network {
            let to = place(network);
            let x = to.x + BOX.0 / 2.0;
            svg.line((x, across), (x, to.y), &stroke);
            ends.push(x);
        }
        let left = ends.iter().copied().fold(f64::INFINITY, f64::min);
        let right = ends.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // A cable from a host to another of its kind has one end in the picture.
        let left = if right - left < 1.0 { left - 60.0 } else { left };
        svg.line((left, across), (right, across), &stroke);
        svg.text((right + 6.0, across + 4.0), Anchor::Start, Font::new(10.0, "#0969da"), &cable.label);
    }
}
