//! Parts of the applications' pictures: lines over an axis, and the time split of the nodes.

use millstream_report::axis::Ticks;
use millstream_report::colour::{GRID, SECONDARY, TEXT};
use millstream_report::svg::{Anchor, Attribute, Font, Svg, path};

use crate::NodeTimes;

/// Colours of computing, communicating and waiting.
const ACTIVITIES: [(&str, &str); 3] =
    [("compute", "#0969da"), ("communicate", "#bf3989"), ("wait", "#afb8c1")];
/// Most nodes that have a bar of their own.
const MOST_BARS: usize = 64;

/// A rectangle of a picture, for a chart with its labels.
#[derive(Clone, Copy, Debug)]
pub struct Panel {
    /// Left end of the plot.
    pub x: f64,
    /// Upper end of the plot.
    pub y: f64,
    /// Width of the plot.
    pub width: f64,
    /// Height of the plot.
    pub height: f64,
}

/// A line of a chart.
#[derive(Clone, Debug)]
pub struct Line<'l> {
    /// Its name.
    pub name: &'l str,
    /// Its colour.
    pub colour: &'l str,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

impl Panel {
    /// Draws the axes around `ticks` with labels. Returns the place of a point.
    pub fn axes(
        &self,
        svg: &mut Svg,
        title: &str,
        x_label: &str,
        across: &Ticks,
        up: &Ticks,
    ) -> impl Fn(f64, f64) -> (f64, f64) + use<> {
        let Panel { x, y, width, height } = *self;
        svg.text((x, y - 12.0), Anchor::Start, Font::bold(12.0), title);
        let (across_copy, up_copy) = (across.clone(), up.clone());
        let place = move |at: f64, value: f64| {
            (x + across_copy.position(at) * width, y + height - up_copy.position(value) * height)
        };
        let grid: Attribute<'_> = ("stroke", &GRID);
        for (value, label) in up.marks() {
            let line = place(across.low, value).1;
            svg.line((x, line), (x + width, line), &[grid]);
            svg.text((x - 6.0, line + 4.0), Anchor::End, Font::new(10.0, SECONDARY), &label);
        }
        for (value, label) in across.marks() {
            let column = place(value, up.low).0;
            svg.line((column, y), (column, y + height), &[grid]);
            svg.text((column, y + height + 15.0), Anchor::Middle, Font::new(10.0, SECONDARY), &label);
        }
        let below = (x + width / 2.0, y + height + 32.0);
        svg.text(below, Anchor::Middle, Font::new(11.0, TEXT), x_label);
        place
    }

    /// Draws lines over a common axis.
    pub fn lines(&self, svg: &mut Svg, title: &str, x_label: &str, lines: &[Line<'_>]) {
        let points = || lines.iter().flat_map(|line| &line.points);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values
                .filter(|value| value.is_finite())
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
        };
        let (left, right) = range(&mut points().map(|point| point.0));
        let (low, high) = range(&mut points().map(|point| point.1));
        let (across, up) = (Ticks::between(left, right, 6), Ticks::around(low.min(0.0), high.max(0.0), 5));
        let place = self.axes(svg, title, x_label, &across, &up);
        for (i, line) in lines.iter().enumerate() {
            let data = path(line.points.iter().map(|&(x, y)| place(x, y)));
            let stroke: [Attribute<'_>; 4] =
                [("d", &data), ("fill", &"none"), ("stroke", &line.colour), ("stroke-width", &"1.5")];
            svg.element("path", &stroke, None);
            if !line.name.is_empty() {
                let at = (self.x + self.width - 4.0, self.y + 14.0 + 14.0 * i as f64);
                let fill: [Attribute<'_>; 5] = [
                    ("x", &at.0),
                    ("y", &at.1),
                    ("text-anchor", &"end"),
                    ("font-size", &"11"),
                    ("fill", &line.colour),
                ];
                svg.element("text", &fill, Some(line.name));
            }
        }
    }

    /// Draws a bar for each node: computing, communicating, waiting.
    pub fn times(&self, svg: &mut Svg, nodes: &[NodeTimes]) {
        let shown = &nodes[..nodes.len().min(MOST_BARS)];
        let longest = nodes.iter().map(NodeTimes::total_s).fold(0.0, f64::max);
        let (across, up) = (Ticks::around(0.0, longest, 5), Ticks::between(0.0, shown.len() as f64, 1));
        let title = if shown.len() < nodes.len() {
            format!("time of the first {} of {} nodes", shown.len(), nodes.len())
        } else {
            "time of the nodes".to_owned()
        };
        let Panel { x, y, width, height } = *self;
        svg.text((x, y - 12.0), Anchor::Start, Font::bold(12.0), &title);
        for (value, label) in across.marks() {
            let column = x + across.position(value) * width;
            svg.line((column, y), (column, y + height), &[("stroke", &GRID)]);
            svg.text((column, y + height + 15.0), Anchor::Middle, Font::new(10.0, SECONDARY), &label);
        }
        svg.text((x + width / 2.0, y + height + 32.0), Anchor::Middle, Font::new(11.0, TEXT), "time [s]");
        let thickness = height / up.high.max(1.0);
        for (i, node) in shown.iter().enumerate() {
            let top = y + i as f64 * thickness;
            if shown.len() <= 16 {
                let at = (x - 6.0, top + thickness / 2.0 + 4.0);
                svg.text(at, Anchor::End, Font::new(10.0, SECONDARY), &i.to_string());
            }
            let mut from = 0.0;
            for (seconds, (_, colour)) in
                [node.compute_s, node.communicate_s, node.wait_s].into_iter().zip(ACTIVITIES)
            {
                let (left, right) = (across.position(from), across.position(from + seconds));
                let bar: [Attribute<'_>; 5] = [
                    ("x", &(x + left * width)),
                    ("y", &(top + 0.1 * thickness)),
                    ("width", &((right - left) * width)),
                    ("height", &(0.8 * thickness)),
                    ("fill", &colour),
                ];
                svg.element("rect", &bar, None);
                from += seconds;
            }
        }
        for (i, (name, colour)) in ACTIVITIES.into_iter().enumerate() {
            let at = x + width - 60.0 - 90.0 * (2 - i) as f64;
            let sample: [Attribute<'_>; 5] =
                [("x", &at), ("y", &(y - 21.0)), ("width", &"10"), ("height", &"10"), ("fill", &colour)];
            svg.element("rect", &sample, None);
            svg.text((at + 14.0, y - 12.0), Anchor::Start, Font::new(11.0, TEXT), name);
        }
    }
}
