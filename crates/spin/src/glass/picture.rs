//! The picture of a run: order over sweeps, energy over sweeps, the spins of a plane, the time of the nodes.

use millstream_application::picture::{Line, Panel};
use millstream_report::colour::SECONDARY;
use millstream_report::svg::{Anchor, Attribute, Font, Svg};

use super::{GlassReport, PlaneSite};

const SIZE: (f64, f64) = (1080.0, 760.0);

/// Draws a report as SVG.
#[must_use]
pub fn draw(report: &GlassReport) -> String {
    let [x, y, z] = report.lattice;
    let title = format!("Heisenberg spin glass, {x}×{y}×{z} {}, {} sweeps", report.element, report.sweeps);
    let mut svg = Svg::new(SIZE.0, SIZE.1, &title);
    svg.text((60.0, 30.0), Anchor::Start, Font::bold(15.0), &title);
    let subtitle = format!(
        "over-relaxation on {} nodes, {:.0} ps per spin update, |E(t) − E(0)| / N = {:.1e}",
        report.dimensions, report.ps_per_update, report.energy_drift
    );
    svg.text((60.0, 48.0), Anchor::Start, Font::new(11.0, SECONDARY), &subtitle);
    let series = |value: &dyn Fn(&crate::Measurement) -> f64| {
        report.measurements.iter().map(|m| (m.sweep as f64, value(m))).collect::<Vec<_>>()
    };
    let start = report.measurements.first().map_or(0.0, |m| m.energy);
    let order = [
        Line { name: "overlap with the start", colour: "#0072b2", points: series(&|m| m.overlap) },
        Line { name: "magnetisation", colour: "#d55e00", points: series(&|m| m.magnetisation) },
    ];
    Panel { x: 60.0, y: 100.0, width: 440.0, height: 200.0 }.lines(&mut svg, "order", "sweep", &order);
    let drift = series(&|m| (m.energy - start) * 1e9);
    let drift = [Line { name: "", colour: "#009e73", points: drift }];
    let panel = Panel { x: 60.0, y: 390.0, width: 440.0, height: 120.0 };
    panel.lines(&mut svg, "energy of a spin, change since the start [10⁻⁹]", "sweep", &drift);
    Panel { x: 60.0, y: 610.0, width: 960.0, height: 100.0 }.times(&mut svg, &report.nodes);
    plane(&mut svg, report);
    svg.finish()
}

/// Hue shows the direction in the x-y plane, lightness the z component.
fn plane(svg: &mut Svg, report: &GlassReport) {
    let (left, top, side) = (560.0, 100.0, 460.0);
    let title = "spins of the plane z = 0: hue by angle in x-y, lightness by z component";
    svg.text((left, top - 12.0), Anchor::Start, Font::bold(12.0), title);
    let [width, height, _] = report.lattice;
    let mut columns: Vec<u32> = report.plane.iter().map(|site| site.x).collect();
    columns.sort_unstable();
    columns.dedup();
    let step = columns.get(1).map_or(1, |&x| x).max(1);
    let cell = side / width.max(height).max(1) as f64 * f64::from(step);
    for site in &report.plane {
        let scale = cell / f64::from(step);
        let (x, y) = (left + f64::from(site.x) * scale, top + f64::from(site.y) * scale);
        let colour = colour(site);
        let square: [Attribute<'_>; 5] =
            [("x", &x), ("y", &y), ("width", &cell), ("height", &cell), ("fill", &colour)];
        svg.element("rect", &square, None);
    }
}

fn colour(site: &PlaneSite) -> String {
    let [x, y, z] = site.spin.map(f64::from);
    let hue = y.atan2(x).to_degrees().rem_euclid(360.0);
    format!("hsl({hue:.0},70%,{:.0}%)", 50.0 + 35.0 * z.clamp(-1.0, 1.0))
}
