//! The model's prediction of the same torus, beside what was measured.
//!
//! The site is this host: its nodes are processes that share the host's cores. Four values are calibrated, from measurements
//! over no hop and one hop only; everything over more hops, and of all nodes, is predicted.

use std::path::Path;

use millstream_model::Parameters;
use millstream_model::benchmarks::torus::{Torus, all_to_all, small_packet_latency, stream};
use millstream_torus_core::Dimensions;

use super::{ALL_TO_ALL, ALL_TO_ALL_BYTES, Options, Outcome, TARGETS, Values, client, value};
use crate::{Figure, Table};

/// The message whose bandwidth over one hop calibrates the time of a packet (bytes).
const LONG: usize = 1 << 20;
/// Bytes of a modelled stream of puts.
const STREAM: u64 = 64 << 20;
/// Corrections of the time of a packet.
const FIT_ROUNDS: usize = 8;
/// The model and the torus differ if they are further apart than this factor.
const DIFFERENT: f64 = 1.5;

/// What one hop and no hop show.
#[derive(Clone, Copy, Debug)]
struct Calibration {
    /// Latency of 8 bytes to this node itself, and to a neighbour (µs).
    latencies: [f64; 2],
    /// Bandwidth of long puts over one hop, and of memcpy (GB/s).
    bandwidth: f64,
    copy: f64,
    /// Payload of a packet (bytes), and receive slots of a channel.
    packet: u32,
    slots: u16,
    cores: usize,
}

impl Calibration {
    /// The site file of this host whose modelled puts over one hop have the measured bandwidth, or the nearest to it: credits
    /// for a channel's slots limit it, too.
    fn fit(&self, file: &Path, torus: Dimensions) -> Outcome<(String, Torus)> {
        let mut trial = *self;
        let mut best: Option<(f64, String, Torus)> = None;
        for _ in 0..FIT_ROUNDS {
            let text = trial.site(torus);
            let model = model(file, &text)?;
            let ratio = self.bandwidth / stream(&model, 0, 1, STREAM).as_gigabytes();
            let error = (ratio - 1.0).abs();
            if best.as_ref().is_none_or(|(least, ..)| error < *least) {
                best = Some((error, text, model));
            }
            trial.bandwidth = (trial.bandwidth * ratio).min(self.copy);
        }
        let (_, text, model) = best.ok_or("no site of this host was tried")?;
        Ok((text, model))
    }

    /// A site file of this host.
    fn site(&self, torus: Dimensions) -> String {
        let [own, neighbour] = self.latencies;
        let bytes = f64::from(self.packet);
        // One hop has two steps, which two cores take at once; one core takes them one after the other.
        let step = bytes / self.bandwidth / if self.cores > 1 { 1.0 } else { 2.0 };
        let value = |name: &str, value: f64, unit: &str, source: &str| {
            let value = value.max(0.0);
            format!(
                "\"{name}\" = {{ value = {value:.3}, low = {:.3}, high = {:.3}, unit = \"{unit}\", source = \"{source}\" }}\n",
                value / 2.0,
                value * 2.0
            )
        };
        let values = [
            value("torus.end.latency", own * 1e3, "ns", "put of 8 B to the own node"),
            value(
                "torus.hop.latency",
                (neighbour - own) * 1e3,
                "ns",
                "put of 8 B to a neighbour, less the former",
            ),
            value(
                "torus.packet.time",
                step - bytes / self.copy,
                "ns",
                "packet of a put of 1 MiB to a neighbour, less memcpy",
            ),
            value("torus.copy.rate", self.copy, "GB/s", "memcpy"),
            value("torus.cores", self.cores as f64, "", "the operating system"),
        ];
        let [x, y, z] = torus.sizes();
        format!(
            "# This host, calibrated by `millstream bench torus` from measurements over one hop.\n\
             name = \"this host\"\n\
             description = \"A torus of processes that share the cores of one host.\"\n\n\
             [device.this-processor]\nkind = \"processor\"\nnames = [\"this processor\"]\n\n\
             [device.node-process]\nkind = \"adapter\"\nnames = [\"node process\"]\n\
             [device.node-process.values]\n{}\n\
             [[host]]\nname = \"node\"\ncount = {}\n\n\
             [[host.socket]]\nprocessor = \"this processor\"\ncores = {}\nclock = \"1 GHz\"\n\n\
             [[host.adapter]]\nname = \"process\"\nmodel = \"node process\"\nparent = \"socket0\"\n\
             pcie = {{ generation = 4, lanes = 16 }}\n\n\
             [[torus]]\nname = \"torus\"\nadapters = \"node*.process\"\ndimensions = [{x}, {y}, {z}]\n\
             rate = \"{:.3} Gb/s\"\nmtu = {}\nbuffer = \"{} B\"\n",
            values.concat(),
            torus.nodes(),
            self.cores,
            self.bandwidth * 8.0,
            self.packet,
            // The model shares a channel's buffer between the two virtual channels of dimension order.
            u64::from(self.packet) * u64::from(self.slots) * 2,
        )
    }
}

/// A measured value and the model's.
#[derive(Clone, Debug, PartialEq)]
struct Compared {
    name: String,
    measured: f64,
    predicted: f64,
    unit: &'static str,
}

impl Compared {
    fn differs(&self) -> bool {
        let ratio = self.measured / self.predicted;
        !(1.0 / DIFFERENT..=DIFFERENT).contains(&ratio)
    }
}

/// Adds the comparison to the table. Returns notes that say where the model and the torus differ.
pub(super) fn compare(
    table: &mut Table,
    options: &Options,
    torus: Dimensions,
    routed: &Values,
    copy: f64,
) -> Outcome<Vec<String>> {
    let engine = millstream_torus::engine::EngineOptions::of_processes();
    let measured = |operation: &str, size, hops| value(routed, &client::name(operation, size, hops));
    let calibration = Calibration {
        latencies: [measured("put", 8, 0)?, measured("put", 8, 1)?],
        bandwidth: measured("put", LONG, 1)?,
        copy,
        packet: engine.packet,
        slots: engine.slots,
        cores: std::thread::available_parallelism().map_or(1, usize::from),
    };
    let file = options.folder.join("this-host.toml");
    let (text, model) = calibration.fit(&file, torus)?;
    std::fs::write(&file, &text)?;
    let mut all = Vec::new();
    for (node, hops) in TARGETS {
        let small =
            small_packet_latency(&model, 0, usize::from(node)).ok_or("a torus without failed links")?.nanos()
                * 1e-3;
        let rate = stream(&model, 0, usize::from(node), STREAM).as_gigabytes();
        for (size, predicted, unit) in [(8, small, "µs"), (LONG, rate, "GB/s")] {
            let name = format!("put {}, {hops} hops", super::size_name(size));
            all.push(Compared { name, measured: measured("put", size, hops)?, predicted, unit });
        }
    }
    let predicted = all_to_all(&model, ALL_TO_ALL_BYTES as u64).time.nanos() * 1e-3;
    all.push(Compared {
        name: ALL_TO_ALL.to_owned(),
        measured: value(routed, ALL_TO_ALL)?,
        predicted,
        unit: "µs",
    });
    for compared in &all {
        let label = format!("{}, torus; baseline the model", compared.name);
        table.push(Figure::with_baseline(label, compared.measured, compared.unit, compared.predicted));
    }
    Ok(notes(&all, &file))
}

fn model(file: &Path, text: &str) -> Outcome<Torus> {
    let site = millstream_site::parse(&file.display().to_string(), text)?;
    Ok(Torus::of_processes(&site, &Parameters::shipped())?)
}

fn notes(all: &[Compared], file: &Path) -> Vec<String> {
    let mut notes = vec![format!("the model's site is {}, calibrated over one hop", file.display())];
    for compared in all.iter().filter(|compared| compared.differs()) {
        let Compared { name, measured, predicted, unit } = compared;
        notes.push(format!("{name}: measured {measured:.3} {unit}, the model says {predicted:.3} {unit}"));
    }
    if notes.len() == 1 {
        notes.push(format!("model and torus agree within a factor of {DIFFERENT}"));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALIBRATION: Calibration =
        Calibration { latencies: [5.0, 7.0], bandwidth: 8.0, copy: 20.0, packet: 32768, slots: 8, cores: 2 };

    #[test]
    fn the_site_of_this_host_gives_back_what_calibrated_it() {
        let (_, model) = CALIBRATION.fit(Path::new("this-host.toml"), "2x2x2".parse().unwrap()).unwrap();
        assert_eq!(model.nodes(), 8);
        assert!((small_packet_latency(&model, 0, 1).unwrap().nanos() - 7_000.0).abs() < 50.0);
        let rate = stream(&model, 0, 1, STREAM).as_gigabytes();
        assert!((rate - 8.0).abs() < 0.8, "{rate}");
        // Three hops take four steps of the two cores.
        let rate = stream(&model, 0, 7, STREAM).as_gigabytes();
        assert!((3.0..=4.1).contains(&rate), "{rate}");
    }

    #[test]
    fn a_note_says_where_model_and_torus_differ() {
        let near = Compared { name: "near".into(), measured: 10.0, predicted: 12.0, unit: "µs" };
        let far = Compared { name: "far".into(), measured: 10.0, predicted: 20.0, unit: "µs" };
        let file = Path::new("site.toml");
        let both = notes(&[near.clone(), far], file);
        assert_eq!(both.len(), 2);
        assert!(both[1].starts_with("far: measured 10.000 µs, the model says 20.000 µs"), "{both:?}");
        assert!(notes(&[near], file)[1].contains("agree"));
    }
}
