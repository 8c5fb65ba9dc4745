//! Line charts of series over a linear or logarithmic axis.

use crate::axis::Ticks;
use crate::colour::{GRID, SECONDARY, TEXT};
use crate::svg::{Anchor, Attribute, Font, Svg, path};

/// A series: one line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// Its points, x and y.
    pub points: Vec<(f64, f64)>,
}

/// A line chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// Its title.
    pub title: String,
    /// Label of the horizontal axis, with the unit.
    pub x: String,
    /// Label of the vertical axis, with the unit.
    pub y: String,
    /// Whether the horizontal axis is logarithmic, with marks at powers of two.
    pub log2_x: bool,
    /// The series.
    pub series: Vec<Series>,
}

/// Minimum width, and height.
const SIZE: (f64, f64) = (760.0, 420.0);
/// Upper estimate of the width of a letter in the legend.
const LETTER: f64 = 6.6;
/// Dash pattern of every second line, so that coinciding lines are both visible.
const DASHES: &str = "7 5";
const PLOT: (f64, f64, f64, f64) = (70.0, 50.0, 520.0, 310.0);

/// Colours distinguishable without colour vision (Okabe and Ito).
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8b8b00"];

/// A power of two with a binary prefix.
fn binary_size(value: f64) -> String {
    let steps = [(1_073_741_824.0, "Gi"), (1_048_576.0, "Mi"), (1024.0, "Ki")];
    match steps.into_iter().find(|(scale, _)| value >= *scale) {
        Some((scale, prefix)) => format!("{}{prefix}", value / scale),
        None => format!("{value}"),
    }
}

impl Chart {
    /// Renders the chart as SVG.
    #[must_use]
    pub fn svg(&self) -> String {
        let longest = self.series.iter().map(|series| series.name.chars().count()).max().unwrap_or(0);
        let legend = PLOT.0 + PLOT.2 + 38.0;
        let title = PLOT.0 + self.title.chars().count() as f64 * 9.0;
        let width = SIZE.0.max(legend + longest.min(200) as f64 * LETTER + 10.0).max(title.min(2000.0));
        let mut svg = Svg::new(width, SIZE.1, &self.title);
        svg.text((PLOT.0, 28.0), Anchor::Start, Font::bold(15.0), &self.title);
        let points = || self.series.iter().flat_map(|series| series.points.iter());
        let scaled = |x: f64| if self.log2_x { x.max(f64::MIN_POSITIVE).log2() } else { x };
        let (mut left, mut right, mut top) = (f64::INFINITY, f64::NEG_INFINITY, 0.0f64);
        for &(x, y) in points().filter(|(x, y)| x.is_finite() && y.is_finite()) {
            (left, right, top) = (left.min(scaled(x)), right.max(scaled(x)), top.max(y));
        }
        let across = Ticks::between(left, right, 8);
        let up = Ticks::around(0.0, top, 6);
        let at = |x: f64, y: f64| {
            (PLOT.0 + across.position(scaled(x)) * PLOT.2, PLOT.1 + PLOT.3 - up.position(y) * PLOT.3)
        };
        let grid: Attribute<'_> = ("stroke", &GRID);
        for (value, label) in up.marks() {
            let y = at(1.0, value).1;
            svg.line((PLOT.0, y), (PLOT.0 + PLOT.2, y), &[grid]);
            svg.text((PLOT.0 - 8.0, y + 4.0), Anchor::End, Font::new(11.0, SECONDARY), &label);
        }
        for (value, label) in across.marks() {
            if self.log2_x && value.fract().abs() > 1e-9 {
                continue;
            }
            let x = PLOT.0 + across.position(value) * PLOT.2;
            svg.line((x, PLOT.1), (x, PLOT.1 + PLOT.3), &[grid]);
            let label = if self.log2_x { binary_size(value.exp2()) } else { label };
            svg.text((x, PLOT.1 + PLOT.3 + 18.0), Anchor::Middle, Font::new(11.0, SECONDARY), &label);
        }
        let middle = PLOT.0 + PLOT.2 / 2.0;
        svg.text((middle, PLOT.1 + PLOT.3 + 42.0), Anchor::Middle, Font::new(12.0, TEXT), &self.x);
        svg.text((PLOT.0, PLOT.1 - 8.0), Anchor::Start, Font::new(12.0, SECONDARY), &self.y);
        // Dashed lines are drawn last: a line below remains visible through the gaps.
        let count = self.series.len();
        for i in (0..count).step_by(2).chain((1..count).step_by(2)) {
            let series = &self.series[i];
            let colour = COLOURS[i % COLOURS.len()];
            let line = path(series.points.iter().map(|&(x, y)| at(x, y)));
            let dashes = if i % 2 == 1 { DASHES } else { "none" };
            let attributes: [Attribute<'_>; 5] = [
                ("d", &line),
                ("fill", &"none"),
                ("stroke", &colour),
                ("stroke-width", &"2"),
                ("stroke-dasharray", &dashes),
            ];
            svg.element("path", &attributes, None);
            for &(x, y) in &series.points {
                let (x, y) = at(x, y);
                let dot: [Attribute<'_>; 4] = [("cx", &x), ("cy", &y), ("r", &2.5), ("fill", &colour)];
                svg.element("circle", &dot, None);
            }
            let y = PLOT.1 + 10.0 + 20.0 * i as f64;
            let x = PLOT.0 + PLOT.2 + 14.0;
            let sample: [Attribute<'_>; 3] =
                [("stroke", &colour), ("stroke-width", &"3"), ("stroke-dasharray", &dashes)];
            svg.line((x, y - 4.0), (x + 19.0, y - 4.0), &sample);
            svg.text((x + 24.0, y), Anchor::Start, Font::new(11.0, TEXT), &series.name);
        }
        svg.finish()
    }

    /// Renders the points as CSV with the columns series, x and y.
    #[must_use]
    pub fn csv(&self) -> String {
        let mut text = format!("series,{},{}\n", self.x.replace(',', ";"), self.y.replace(',', ";"));
        for series in &self.series {
            for (x, y) in &series.points {
                text.push_str(&format!("{},{x},{y}\n", series.name.replace(',', ";")));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_chart_is_well_formed(points in prop::collection::vec((any::<f64>(), any::<f64>()), 0..9), log2_x: bool, name: String) {
            let chart = Chart {
                title: name.clone(),
                x: "x".into(),
                y: "y".into(),
                log2_x,
                series: vec![Series { name, points: points.clone() }],
            };
            let text = chart.svg();
            let document = roxmltree::Document::parse(&text).unwrap();
            let dots = document.descendants().filter(|node| node.has_tag_name("circle")).count();
            prop_assert_eq!(dots, points.len());
            prop_assert_eq!(chart.csv().lines().count(), points.len() + 1);
        }
    }
}
