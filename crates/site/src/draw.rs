//! A site as a picture: one column per kind of host with its PCIe tree, networks below.
//!
//! Hosts that a count made are drawn once, with their number: five hundred boxes say less than one.

use crate::check::{DeviceKind, End, Host, Parent, Site};
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
    let width = (kinds.len().max(networks).max(1) as f64 * (COLUMN + MARGIN) + MARGIN).max(560.0);
    let height = bottom + if networks > 0 || !site.wires.is_empty() { BOX.1 + 60.0 } else { 0.0 };
    let mut svg = Svg::new(width, height, &site.name);
    svg.text((MARGIN, 30.0), Anchor::Start, Font::bold(18.0), &site.name);
    svg.text((MARGIN, 52.0), Anchor::Start, Font::new(12.0, "#59636e"), &site.description);

    let mut adapters: Vec<(usize, usize, Placed)> = Vec::new();
    for (column, (host, first, count)) in kinds.iter().enumerate() {
        let left = MARGIN + column as f64 * (COLUMN + MARGIN);
        frame(&mut svg, left - 8.0, TOP - 22.0, COLUMN, bottom - TOP, host, *count);
        let mut row = 0.0;
        let mut places: Vec<Option<Placed>> = host.devices.iter().map(|_| None).collect();
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
                places[d] = Some(here);
            }
        }
    }
    networks_below(&mut svg, site, &adapters, bottom);
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

fn networks_below(svg: &mut Svg, site: &Site, adapters: &[(usize, usize, Placed)], bottom: f64) {
    let place = |i: usize| Placed { x: MARGIN + i as f64 * (COLUMN + MARGIN), y: bottom + 20.0 };
    for (i, switch) in site.switches.iter().enumerate() {
        block(
            svg,
            &place(i),
            "#ffebe9",
            &switch.name,
            &format!("{} ports, {}", switch.ports, switch.latency),
        );
    }
    for (i, torus) in site.tori.iter().enumerate() {
        let size = torus.dimensions.iter().map(u32::to_string).collect::<Vec<_>>().join(" × ");
        block(
            svg,
            &place(site.switches.len() + i),
            "#ffebe9",
            &torus.name,
            &format!("torus {size}, {} a link", torus.rate),
        );
    }
    let stroke: (&'static str, &dyn std::fmt::Display) = ("stroke", &"#0969da");
    for (host, device, at) in adapters {
        let edge = (at.x + BOX.0, at.y + BOX.1 / 2.0);
        let torus =
            site.tori.iter().position(|t| t.nodes.iter().any(|(h, d)| h.0 == *host && d.0 == *device));
        if let Some(torus) = torus {
            let to = place(site.switches.len() + torus);
            svg.line(edge, (to.x + BOX.0 / 2.0, to.y), &[stroke]);
        }
        let mine = site.wires.iter().filter(|w| w.dimension.is_none());
        for wire in mine {
            let other = match (wire.from, wire.to) {
                (End::Adapter(h, d), other) | (other, End::Adapter(h, d))
                    if h.0 == *host && d.0 == *device =>
                {
                    other
                }
                _ => continue,
            };
            match other {
                End::Switch(switch) => {
                    let to = place(switch);
                    svg.line(edge, (to.x + BOX.0 / 2.0, to.y), &[stroke]);
                }
                End::Adapter(h, d) => {
                    // Both ends are drawn if they are of different kinds; else it is a cable within the kind.
                    let low = (edge.0 + 6.0, bottom + 10.0);
                    let to = adapters.iter().find(|(host, device, _)| (*host, *device) == (h.0, d.0));
                    let end = to.map_or((low.0 + 60.0, low.1), |(_, _, p)| (p.x + BOX.0, p.y + BOX.1 / 2.0));
                    svg.line(edge, low, &[stroke]);
                    svg.line(low, end, &[stroke]);
                    svg.text(
                        (low.0 + 4.0, low.1 + 14.0),
                        Anchor::Start,
                        Font::new(10.0, "#0969da"),
                        &format!("{}", wire.rate),
                    );
                }
            }
        }
    }
}
