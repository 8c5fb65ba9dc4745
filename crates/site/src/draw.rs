//! Draws a site: one column per host group with its PCIe tree, and the networks below.
//!
//! Identical hosts are drawn once, with their count.

use crate::validate::{DeviceKind, Host, LinkEnd, Parent, Site};
use millstream_report::svg::{Anchor, Font, Svg};
use std::collections::BTreeMap;

const BOX: (f64, f64) = (190.0, 46.0);
const GAP: f64 = 26.0;
const INDENT: f64 = 28.0;
const COLUMN: f64 = BOX.0 + 4.0 * INDENT;
const MARGIN: f64 = 24.0;
const TOP: f64 = 84.0;

/// Position of a box.
#[derive(Clone, Copy)]
struct Position {
    x: f64,
    y: f64,
}

/// The site as an SVG document.
#[must_use]
pub fn draw(site: &Site) -> String {
    // The first host of a group represents it.
    let mut groups: Vec<(&Host, usize, usize)> = Vec::new();
    for (i, host) in site.hosts.iter().enumerate() {
        match groups.iter_mut().find(|(first, _, _)| first.group == host.group) {
            Some((_, _, count)) => *count += 1,
            None => groups.push((host, i, 1)),
        }
    }
    let rows = groups.iter().map(|(h, _, _)| h.sockets.len() + h.devices.len()).max().unwrap_or(1);
    let networks = networks(site).len();
    let bottom = TOP + rows as f64 * (BOX.1 + GAP) + 40.0;
    // Labels of the last column extend to its right.
    let width = (groups.len().max(networks).max(1) as f64 * (COLUMN + MARGIN) + MARGIN + 190.0).max(620.0);
    let ports: Vec<(usize, usize)> = (groups.iter())
        .flat_map(|(host, first, _)| {
            let adapters = (0..host.devices.len()).filter(|&d| host.devices[d].kind == DeviceKind::Adapter);
            adapters.map(move |d| (*first, d))
        })
        .collect();
    let cables = cables(site, &ports);
    let height = bottom + network_height(site, cables.len());
    let mut svg = Svg::new(width, height, &site.name);
    svg.text((MARGIN, 30.0), Anchor::Start, Font::bold(18.0), &site.name);
    svg.text((MARGIN, 52.0), Anchor::Start, Font::new(12.0, "#59636e"), &site.description);

    let mut adapters: BTreeMap<(usize, usize), Position> = BTreeMap::new();
    for (column, (host, first, count)) in groups.iter().enumerate() {
        let left = MARGIN + column as f64 * (COLUMN + MARGIN);
        draw_frame(&mut svg, left - 8.0, TOP - 22.0, COLUMN, bottom - TOP, host, *count);
        let mut row = 0.0;
        // Standalone devices of a host without sockets have the parent socket 0, and nothing above them.
        for s in 0..host.sockets.len().max(1) {
            let socket = host.sockets.get(s).map(|socket| {
                let at = Position { x: left, y: TOP + row * (BOX.1 + GAP) };
                let memory = socket.memory.map_or(String::new(), |m| format!(", {}", m.binary()));
                let note = format!("socket{s}, {} cores{memory}", socket.cores);
                draw_box(&mut svg, &at, "#ddf4ff", &socket.processor, &note);
                row += 1.0;
                at
            });
            // Children are below their parents, indented by level.
            let depth = if socket.is_some() { 1.0 } else { 0.0 };
            let mut stack: Vec<(usize, Option<Position>, f64)> =
                children(host, Parent::Socket(crate::SocketId(s)))
                    .into_iter()
                    .rev()
                    .map(|d| (d, socket, depth))
                    .collect();
            while let Some((d, above, depth)) = stack.pop() {
                let device = &host.devices[d];
                let here = Position { x: left + depth * INDENT, y: TOP + row * (BOX.1 + GAP) };
                row += 1.0;
                if let Some(above) = above {
                    let x = above.x + INDENT / 2.0;
                    let stroke = ("stroke", &"#57606a" as &dyn std::fmt::Display);
                    svg.line((x, above.y + BOX.1), (x, here.y + BOX.1 / 2.0), &[stroke]);
                    svg.line((x, here.y + BOX.1 / 2.0), (here.x, here.y + BOX.1 / 2.0), &[stroke]);
                }
                let pcie = format!("gen{} x{}", device.pcie.generation.0, device.pcie.lanes.0);
                svg.text((here.x + BOX.0, here.y - 4.0), Anchor::End, Font::new(10.0, "#59636e"), &pcie);
                let (colour, note) = match &device.kind {
                    DeviceKind::Switch(_) => ("#fff8c5", device.name.clone()),
                    DeviceKind::Adapter => ("#dafbe1", device.name.clone()),
                    DeviceKind::Ssd => ("#f6f8fa", device.name.clone()),
                    DeviceKind::CxlSwitch(switch) => {
                        ("#fff8c5", format!("{}, CXL {}", device.name, switch.link.version))
                    }
                    DeviceKind::CxlMemory(memory) => (
                        "#fbefff",
                        format!("{}, {} CXL {}", device.name, memory.size.binary(), memory.link.version),
                    ),
                    DeviceKind::Card(memory) => (
                        "#fbefff",
                        memory.as_ref().map_or(device.name.clone(), |m| {
                            format!("{}, {} {}", device.name, m.size.binary(), m.kind)
                        }),
                    ),
                };
                draw_box(&mut svg, &here, colour, &device.model, &note);
                for child in children(host, Parent::Switch(crate::DeviceId(d))).into_iter().rev() {
                    stack.push((child, Some(here), depth + 1.0));
                }
                if device.kind == DeviceKind::Adapter {
                    adapters.insert((*first, d), here);
                }
            }
        }
    }
    // Every adapter is below a socket, or alone: each port has a position, at its own index.
    let positions: Vec<Position> = ports.iter().map(|port| adapters[port]).collect();
    draw_networks(&mut svg, site, &cables, &positions, bottom);
    svg.finish()
}

fn children(host: &Host, parent: Parent) -> Vec<usize> {
    (0..host.devices.len()).filter(|&d| host.devices[d].parent == parent).collect()
}

fn draw_frame(svg: &mut Svg, x: f64, y: f64, width: f64, height: f64, host: &Host, count: usize) {
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
    let title = if count > 1 { format!("{} × {count}", host.group) } else { host.name.clone() };
    svg.text((x + 8.0, y + 15.0), Anchor::Start, Font::bold(12.0), &title);
}

fn draw_box(svg: &mut Svg, at: &Position, fill: &str, title: &str, note: &str) {
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

/// A box below the hosts.
#[derive(Clone, Copy, PartialEq)]
enum Network {
    /// A switch that belongs to no fabric.
    Switch(usize),
    Torus(usize),
    Fabric(usize),
}

/// All boxes below the hosts.
fn networks(site: &Site) -> Vec<Network> {
    let alone = (0..site.switches.len()).filter(|&i| site.switches[i].fabric.is_none());
    (alone.map(Network::Switch))
        .chain((0..site.tori.len()).map(Network::Torus))
        .chain((0..site.fabrics.len()).map(Network::Fabric))
        .collect()
}

/// One or more identical links between drawn devices.
struct Cable {
    /// Indices of drawn adapters.
    adapters: Vec<usize>,
    /// The network box, if the link leads to one.
    network: Option<Network>,
    /// Label.
    label: String,
}

/// Links of a site, once per host group.
fn cables(site: &Site, ports: &[(usize, usize)]) -> Vec<Cable> {
    let group = |host: usize| &site.hosts[host].group;
    // The drawn adapter that represents this one.
    let drawn =
        |h: usize, d: usize| ports.iter().position(|&(host, device)| group(host) == group(h) && device == d);
    let mut cables: Vec<Cable> = Vec::new();
    let mut add = |cable: Cable| {
        if !cables.iter().any(|known| known.adapters == cable.adapters && known.network == cable.network) {
            cables.push(cable);
        }
    };
    for link in site.links.iter().filter(|link| link.dimension.is_none()) {
        let length = link.length.map_or(String::new(), |length| format!(", {} m", length.0));
        let rate = format!("{}{length}", link.rate.in_bits());
        match (link.from, link.to) {
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
                let network = match site.switches[switch].fabric {
                    Some(fabric) => Network::Fabric(fabric),
                    None => Network::Switch(switch),
                };
                add(Cable { adapters: vec![from], network: Some(network), label: rate });
            }
            (LinkEnd::Switch(_), LinkEnd::Switch(_)) => {}
        }
    }
    for (i, torus) in site.tori.iter().enumerate() {
        let mut ends: Vec<usize> = torus.nodes.iter().filter_map(|(h, d)| drawn(h.0, d.0)).collect();
        ends.sort_unstable();
        ends.dedup();
        let label = format!("{} links a node, {} each", 2 * torus.dimensions.len(), torus.rate.in_bits());
        add(Cable { adapters: ends, network: Some(Network::Torus(i)), label });
    }
    cables
}

/// Vertical distance of cables.
const CABLE_SPACING: f64 = 22.0;

/// Height of the area below the hosts.
fn network_height(site: &Site, cables: usize) -> f64 {
    let boxes = if networks(site).is_empty() { 0.0 } else { BOX.1 + 24.0 };
    if cables == 0 { boxes } else { boxes + cables as f64 * CABLE_SPACING + 24.0 }
}

/// Draws each cable down beside its host's column, then across below all hosts.
fn draw_networks(svg: &mut Svg, site: &Site, cables: &[Cable], positions: &[Position], bottom: f64) {
    let boxes = bottom + 10.0 + cables.len() as f64 * CABLE_SPACING;
    let place = |i: usize| Position { x: MARGIN + i as f64 * (COLUMN + MARGIN), y: boxes };
    let networks = networks(site);
    for (i, network) in networks.iter().enumerate() {
        let (name, note) = match *network {
            Network::Switch(i) => {
                let switch = &site.switches[i];
                (&switch.name, format!("{} ports, {}", switch.ports, switch.latency))
            }
            Network::Torus(i) => {
                let torus = &site.tori[i];
                let size = torus.dimensions.iter().map(u32::to_string).collect::<Vec<_>>().join(" × ");
                (&torus.name, format!("torus {size}"))
            }
            Network::Fabric(i) => (&site.fabrics[i].name, site.fabrics[i].shape.clone()),
        };
        draw_box(svg, &place(i), "#ffebe9", name, &note);
    }
    let stroke: [(&'static str, &dyn std::fmt::Display); 2] =
        [("stroke", &"#0969da"), ("stroke-width", &"1.5")];
    for (lane, cable) in cables.iter().enumerate() {
        let across = bottom + 10.0 + lane as f64 * CABLE_SPACING;
        let mut ends: Vec<f64> = Vec::new();
        for &adapter in &cable.adapters {
            let at = positions[adapter];
            // Cables run down inside the right edge of the frame, independent of the depth of the
            // tree.
            let column = ((at.x - MARGIN) / (COLUMN + MARGIN)).floor();
            let down = MARGIN + column * (COLUMN + MARGIN) + COLUMN - 16.0 - 7.0 * lane as f64;
            svg.line((at.x + BOX.0, at.y + BOX.1 / 2.0), (down, at.y + BOX.1 / 2.0), &stroke);
            svg.line((down, at.y + BOX.1 / 2.0), (down, across), &stroke);
            ends.push(down);
        }
        let network = networks.iter().position(|network| Some(*network) == cable.network);
        if let Some(network) = network {
            let to = place(network);
            let x = to.x + BOX.0 / 2.0;
            svg.line((x, across), (x, to.y), &stroke);
            ends.push(x);
        }
        let left = ends.iter().copied().fold(f64::INFINITY, f64::min);
        let right = ends.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // A cable between hosts of one group has one end in the picture.
        let left = if right - left < 1.0 { left - 60.0 } else { left };
        svg.line((left, across), (right, across), &stroke);
        svg.text((right + 6.0, across + 4.0), Anchor::Start, Font::new(10.0, "#0969da"), &cable.label);
    }
}
