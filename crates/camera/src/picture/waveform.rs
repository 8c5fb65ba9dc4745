//! Inset with the waveform of the brightest pixel and the integration window.

use std::ops::Range;

use millstream_report::axis::Ticks;
use millstream_report::colour::{GRID, MEASURED, SECONDARY, TEXT};
use millstream_report::svg::{Anchor, Attribute, Coordinate, Font, Svg, path};

const LEFT: f64 = 600.0;
const RIGHT: f64 = 776.0;
const TOP: f64 = 682.0;
const BOTTOM: f64 = 752.0;
const FONT: Font = Font::new(11.0, SECONDARY);

/// Draws the waveform with `window` shaded.
pub(super) fn draw(svg: &mut Svg, title: &str, waveform: &[i16], window: Range<usize>) {
    let (Some(&lowest), Some(&highest)) = (waveform.iter().min(), waveform.iter().max()) else { return };
    let counts = Ticks::around(f64::from(lowest), f64::from(highest), 2);
    let samples = Ticks::between(0.0, waveform.len() as f64, 3);
    let x = |sample: f64| LEFT + samples.position(sample) * (RIGHT - LEFT);
    let y = |count: f64| BOTTOM - counts.position(count) * (BOTTOM - TOP);

    svg.begin("g", &[("id", &"waveform")]);
    svg.text((LEFT, TOP - 10.0), Anchor::Start, FONT, title);
    // A sample is drawn in the middle of its interval.
    let (from, to) = (x(window.start as f64), x(window.end as f64));
    let shade: [Attribute<'_>; 6] = [
        ("x", &Coordinate(from)),
        ("y", &Coordinate(TOP)),
        ("width", &Coordinate(to - from)),
        ("height", &Coordinate(BOTTOM - TOP)),
        ("fill", &MEASURED),
        ("fill-opacity", &"0.16"),
    ];
    svg.element("rect", &shade, None);
    for (count, label) in counts.marks() {
        svg.line((LEFT, y(count)), (RIGHT, y(count)), &[("stroke", &GRID)]);
        svg.text((LEFT - 5.0, y(count) + 4.0), Anchor::End, FONT, &label);
    }
    for (sample, label) in samples.marks() {
        svg.text((x(sample), BOTTOM + 14.0), Anchor::Middle, FONT, &label);
    }
    svg.text((RIGHT, BOTTOM + 28.0), Anchor::End, FONT, "sample");
    let curve = (0..).zip(waveform).map(|(k, &count)| (x(f64::from(k) + 0.5), y(f64::from(count))));
    let line: [Attribute<'_>; 5] = [
        ("d", &path(curve)),
        ("fill", &"none"),
        ("stroke", &TEXT),
        ("stroke-width", &1.5),
        ("stroke-linejoin", &"round"),
    ];
    svg.element("path", &line, None);
    svg.end();
}
