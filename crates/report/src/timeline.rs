//! Timeline chart: one lane per worker, one bar per activity.

use crate::axis::{Ticks, si_prefix_for};
use crate::colour::{GRID, SECONDARY, TEXT};
use crate::svg::{Anchor, Font, Svg};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 936.0;
const TOP: f64 = 108.0;
/// Height of a row of bars; [`GAP`] is the space between lanes.
const ROW: f64 = 16.0;
const GAP: f64 = 12.0;
/// Resolution of the chart \[steps\]; bars with smaller gaps are merged.
const STEPS: f64 = 2000.0;

/// A type of activity and its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// Its name.
    pub name: &'static str,
    /// Its colour, as `#rrggbb`.
    pub colour: &'static str,
}

/// One period of activity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    /// Index of the lane.
    pub lane: usize,
    /// Index of the activity.
    pub activity: usize,
    /// Start \[s\].
    pub start: f64,
    /// End \[s\].
    pub end: f64,
}

/// A timeline chart.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Its title.
    pub title: String,
    /// Line below the title.
    pub subtitle: String,
    /// Names of the lanes.
    pub lanes: Vec<String>,
    /// Types of activity; each has a row in each lane.
    pub activities: Vec<Activity>,
    /// All periods of activity.
    pub bars: Vec<Bar>,
}

impl Timeline {
    /// Renders the chart as SVG, 960 pixels wide.
    #[must_use]
    pub fn draw(&self) -> String {
        let finite = |time: f64| if time.is_finite() { time.max(0.0) } else { 0.0 };
        let end = self.bars.iter().map(|bar| finite(bar.end)).fold(0.0, f64::max);
        let (scale, prefix) = si_prefix_for(end);
        let times = Ticks::between(0.0, end / scale, 8);
        let x = |time: f64| LEFT + times.position(finite(time) / scale) * (RIGHT - LEFT);
        let lane = self.activities.len().max(1) as f64 * ROW + GAP;
        let bottom = TOP + self.lanes.len().max(1) as f64 * lane;
        let mut svg = Svg::new(WIDTH, bottom + 64.0, &self.title);
        svg.text((24.0, 36.0), Anchor::Start, Font::bold(20.0), &self.title);
        svg.text((24.0, 60.0), Anchor::Start, Font::new(14.0, SECONDARY), &self.subtitle);

        let label = Font::new(13.0, TEXT);
        let mut at = LEFT;
        for activity in &self.activities {
            let (width, height) = (12.0, 12.0);
            svg.element(
                "rect",
                &[
                    ("x", &at),
                    ("y", &76.0),
                    ("width", &width),
                    ("height", &height),
                    ("fill", &activity.colour),
                ],
                None,
            );
            svg.text((at + 18.0, 87.0), Anchor::Start, label, activity.name);
            at += 36.0 + 8.0 * activity.name.chars().count() as f64;
        }
        for (time, text) in times.marks() {
            let at = x(time * scale);
            svg.line((at, TOP - 4.0), (at, bottom), &[("stroke", &GRID)]);
            svg.text((at, bottom + 20.0), Anchor::Middle, label, &text);
        }
        let axis = format!("time since the start [{prefix}s]");
        svg.text(((LEFT + RIGHT) / 2.0, bottom + 44.0), Anchor::Middle, Font::new(13.0, SECONDARY), &axis);
        for (index, name) in self.lanes.iter().enumerate() {
            let middle = TOP + (index as f64 + 0.5) * lane - GAP / 2.0;
            svg.text((LEFT - 10.0, middle + 4.5), Anchor::End, label, name);
        }
        for (lane_index, activity_index) in (0..self.lanes.len())
            .flat_map(|lane| (0..self.activities.len()).map(move |activity| (lane, activity)))
        {
            let y = TOP + lane_index as f64 * lane + activity_index as f64 * ROW;
            for (start, stop) in self.row(lane_index, activity_index, end / STEPS) {
                let (from, to) = (x(start), x(stop));
                let (width, height) = ((to - from).max(0.5), ROW - 3.0);
                let colour = self.activities[activity_index].colour;
                let rectangle = [from, y, width, height].map(crate::svg::Coordinate);
                svg.element(
                    "rect",
                    &[
                        ("x", &rectangle[0]),
                        ("y", &rectangle[1]),
                        ("width", &rectangle[2]),
                        ("height", &rectangle[3]),
                        ("fill", &colour),
                    ],
                    None,
                );
            }
        }
        svg.finish()
    }

    /// The bars of one activity in one lane, in order. Bars with gaps below `resolution` are merged.
    fn row(&self, lane: usize, activity: usize, resolution: f64) -> Vec<(f64, f64)> {
        let mine = self.bars.iter().filter(|bar| bar.lane == lane && bar.activity == activity);
        let mut bars: Vec<_> = mine.map(|bar| (bar.start, bar.end)).collect();
        bars.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut merged: Vec<(f64, f64)> = Vec::new();
        for (start, end) in bars {
            match merged.last_mut() {
                Some(last) if start - last.1 < resolution => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        merged
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ACTIVITIES: [Activity; 2] =
        [Activity { name: "compute", colour: "#0969da" }, Activity { name: "wait", colour: "#8c959f" }];

    fn timeline(bars: Vec<Bar>) -> Timeline {
        Timeline {
            title: "a job".to_owned(),
            subtitle: "of two cards".to_owned(),
            lanes: vec!["one".to_owned(), "two".to_owned()],
            activities: ACTIVITIES.to_vec(),
            bars,
        }
    }

    fn rectangles(document: &str, colour: &str) -> usize {
        let document = roxmltree::Document::parse(document).unwrap();
        document.descendants().filter(|node| node.attribute("fill") == Some(colour)).count()
    }

    #[test]
    fn only_indistinguishable_bars_are_merged() {
        let bar = |lane, activity, start, end| Bar { lane, activity, start, end };
        let bars =
            vec![bar(0, 0, 0.0, 0.5), bar(1, 0, 0.25, 1.0), bar(0, 0, 0.50001, 0.6), bar(0, 1, 0.7, 1.0)];
        let document = timeline(bars).draw();
        // One of each is in the legend.
        assert_eq!(rectangles(&document, ACTIVITIES[0].colour), 3);
        assert_eq!(rectangles(&document, ACTIVITIES[1].colour), 2);
        assert!(document.contains("[s]") && document.contains(">two</text>"));
    }

    proptest! {
        #[test]
        fn arbitrary_times_are_well_formed(
            bars in proptest::collection::vec((0usize..3, 0usize..3, any::<f64>(), any::<f64>()), 0..20),
        ) {
            let bars = bars.into_iter().map(|(lane, activity, start, end)| Bar { lane, activity, start, end }).collect();
            roxmltree::Document::parse(&timeline(bars).draw()).unwrap();
        }
    }
}
