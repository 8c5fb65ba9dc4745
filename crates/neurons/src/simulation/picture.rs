//! The picture of a run: raster, rates, the time of the nodes.

use millstream_application::picture::{Line, Panel};
use millstream_report::axis::Ticks;
use millstream_report::colour::SECONDARY;
use millstream_report::svg::{Anchor, Attribute, Font, Svg};

use super::SimulationReport;

const SIZE: (f64, f64) = (1080.0, 820.0);
/// Colours of excitatory and inhibitory neurons.
const COLOURS: [&str; 2] = ["#0072b2", "#d55e00"];

/// Draws a report as SVG.
#[must_use]
pub fn draw(report: &SimulationReport) -> String {
    let [x, y] = report.network.grid;
    let title = format!(
        "Spiking network, {x}×{y} columns, {} neurons, {:.2} million synapses",
        report.neurons,
        report.synapses as f64 / 1e6
    );
    let mut svg = Svg::new(SIZE.0, SIZE.1, &title);
    svg.text((70.0, 30.0), Anchor::Start, Font::bold(15.0), &title);
    let subtitle = format!(
        "{} ms on {} nodes, {:.1} million synaptic events/s, mean rate {:.1} Hz",
        report.steps,
        report.dimensions,
        report.events_per_s / 1e6,
        report.mean_hz
    );
    svg.text((70.0, 48.0), Anchor::Start, Font::new(11.0, SECONDARY), &subtitle);
    raster(&mut svg, report);
    let series = |rate: &dyn Fn(&super::SecondReport) -> f64| {
        report.seconds.iter().map(|s| (s.step as f64 / 1e3, rate(s))).collect::<Vec<_>>()
    };
    let lines = [
        Line { name: "excitatory", colour: COLOURS[0], points: series(&|s| s.excitatory_hz) },
        Line { name: "inhibitory", colour: COLOURS[1], points: series(&|s| s.inhibitory_hz) },
    ];
    let panel = Panel { x: 70.0, y: 480.0, width: 950.0, height: 110.0 };
    panel.lines(&mut svg, "mean rate [Hz]", "time [s]", &lines);
    Panel { x: 70.0, y: 680.0, width: 950.0, height: 90.0 }.times(&mut svg, &report.nodes);
    svg.finish()
}

fn raster(svg: &mut Svg, report: &SimulationReport) {
    let first = report.raster.first().map_or(0, |spike| spike.step);
    let across = Ticks::between(f64::from(first), report.steps as f64, 10);
    let up = Ticks::between(0.0, report.neurons as f64, 6);
    let panel = Panel { x: 70.0, y: 100.0, width: 950.0, height: 300.0 };
    let place = panel.axes(svg, "spikes of some neurons, by number", "time [ms]", &across, &up);
    for spike in &report.raster {
        let (x, y) = place(f64::from(spike.step), f64::from(spike.neuron));
        let colour = COLOURS[usize::from(!report.network.is_excitatory(spike.neuron))];
        let dot: [Attribute<'_>; 5] = [
            ("x", &(x - 0.75)),
            ("y", &(y - 0.75)),
            ("width", &"1.5"),
            ("height", &"1.5"),
            ("fill", &colour),
        ];
        svg.element("rect", &dot, None);
    }
}
