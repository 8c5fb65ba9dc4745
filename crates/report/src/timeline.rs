//! What was done when: one lane for each party, one bar for each piece of work.

use crate::axis::{Ticks, unit_for};
use crate::colour::{FAINT, GRID, TEXT};
use crate::svg::{Anchor, Font, Svg};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 936.0;
const TOP: f64 = 108.0;
/// Height of a row of bars, and of the gap between two lanes.
const ROW: f64 = 16.0;
const GAP: f64 = 12.0;
/// Bars that a picture has room for; shorter ones than it can show are put together.
const STEPS: f64 = 2000.0;

/// A kind of work, and its colour from the list of those that differ well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// Its colour, as `#rrggbb`.
    pub colour: &'static str,
}

/// A piece of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    /// Which lane, from 0.
    pub lane: usize,
    /// Which kind, from 0.
    pub kind: usize,
    /// Start [s].
    pub start: f64,
    /// End [s].
    pub end: f64,
}

/// A picture in the making.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Its title.
    pub title: String,
    /// What to say below it.
    pub subtitle: String,
    /// Names of the lanes.
    pub lanes: Vec<String>,
    /// Kinds of work; each has a row in each lane.
    pub kinds: Vec<Kind>,
    /// All work.
    pub bars: Vec<Bar>,
}

impl Timeline {
    /// Draws it as SVG, 960 pixels wide.
    #[must_use]
    pub fn draw(&self) -> String {
        let sound = |time: f64| if time.is_finite() { time.max(0.0) } else { 0.0 };
        let end = self.bars.iter().map(|bar| sound(bar.end)).fold(0.0, f64::max);
        let (scale, prefix) = unit_for(end);
        let times = Ticks::between(0.0, end / scale, 8);
        let x = |time: f64| LEFT + times.position(sound(time) / scale) * (RIGHT - LEFT);
        let lane = self.kinds.len().max(1) as f64 * ROW + GAP;
        let bottom = TOP + self.lanes.len().max(1) as f64 * lane;
        let mut svg = Svg::new(WIDTH, bottom + 64.0, &self.title);
        svg.text((24.0, 36.0), Anchor::Start, Font::bold(20.0), &self.title);
        svg.text((24.0, 60.0), Anchor::Start, Font::new(14.0, FAINT), &self.subtitle);

        let label = Font::new(13.0, TEXT);
        let mut at = LEFT;
        for kind in &self.kinds {
            let (width, height) = (12.0, 12.0);
            svg.element(
                "rect",
                &[("x", &at), ("y", &76.0), ("width", &width), ("height", &height), ("fill", &kind.colour)],
                None,
            );
            svg.text((at + 18.0, 87.0), Anchor::Start, label, kind.name);
            at += 36.0 + 8.0 * kind.name.chars().count() as f64;
        }
        for (time, text) in times.marks() {
            let at = x(time * scale);
            svg.line((at, TOP - 4.0), (at, bottom), &[("stroke", &GRID)]);
            svg.text((at, bottom + 20.0), Anchor::Middle, label, &text);
        }
        let axis = format!("time since the start [{prefix}s]");
        svg.text(((LEFT + RIGHT) / 2.0, bottom + 44.0), Anchor::Middle, Font::new(13.0, FAINT), &axis);
        for (index, name) in self.lanes.iter().enumerate() {
            let middle = TOP + (index as f64 + 0.5) * lane - GAP / 2.0;
            svg.text((LEFT - 10.0, middle + 4.5), Anchor::End, label, name);
        }
        for (lane_index, kind_index) in
            (0..self.lanes.len()).flat_map(|lane| (0..self.kinds.len()).map(move |kind| (lane, kind)))
        {
            let y = TOP + lane_index as f64 * lane + kind_index as f64 * ROW;
            for (start, stop) in self.row(lane_index, kind_index, end / STEPS) {
                let (from, to) = (x(start), x(stop));
                let (width, height) = ((to - from).max(0.5), ROW - 3.0);
                let colour = self.kinds[kind_index].colour;
                let place = [from, y, width, height].map(crate::svg::At);
                svg.element(
                    "rect",
                    &[
                        ("x", &place[0]),
                        ("y", &place[1]),
                        ("width", &place[2]),
                        ("height", &place[3]),
                        ("fill", &colour),
                    ],
                    None,
                );
            }
        }
        svg.finish()
    }

    /// The bars of one kind in one lane, in order, those put together that nobody could tell apart.
    fn row(&self, lane: usize, kind: usize, resolution: f64) -> Vec<(f64, f64)> {
        let mine = self.bars.iter().filter(|bar| bar.lane == lane && bar.kind == kind);
        let mut bars: Vec<_> = mine.map(|bar| (bar.start, bar.end)).collect();
        bars.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut together: Vec<(f64, f64)> = Vec::new();
        for (start, end) in bars {
            match together.last_mut() {
                Some(last) if start - last.1 < resolution => last.1 = last.1.max(end),
                _ => together.push((start, end)),
            }
        }
        together
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [Kind; 2] =
        [Kind { name: "compute", colour: "#0969da" }, Kind { name: "wait", colour: "#8c959f" }];

    fn timeline(bars: Vec<Bar>) -> Timeline {
        Timeline {
            title: "a job".to_owned(),
            subtitle: "of two cards".to_owned(),
            lanes: vec!["one".to_owned(), "two".to_owned()],
            kinds: KINDS.to_vec(),
            bars,
        }
    }

    fn rectangles(document: &str, colour: &str) -> usize {
        let document = roxmltree::Document::parse(document).unwrap();
        document.descendants().filter(|node| node.attribute("fill") == Some(colour)).count()
    }

    #[test]
    fn every_bar_that_can_be_told_apart_is_there() {
        let bar = |lane, kind, start, end| Bar { lane, kind, start, end };
        let bars =
            vec![bar(0, 0, 0.0, 0.5), bar(1, 0, 0.25, 1.0), bar(0, 0, 0.50001, 0.6), bar(0, 1, 0.7, 1.0)];
        let document = timeline(bars).draw();
        // And one of each in the legend.
        assert_eq!(rectangles(&document, KINDS[0].colour), 3);
        assert_eq!(rectangles(&document, KINDS[1].colour), 2);
        assert!(document.contains("[s]") && document.contains(">two</text>"));
    }

    proptest! {
        #[test]
        fn any_times_make_a_document(
            bars in proptest::collection::vec((0usize..3, 0usize..3, any::<f64>(), any::<f64>()), 0..20),
        ) {
            let bars = bars.into_iter().map(|(lane, kind, start, end)| Bar { lane, kind, start, end }).collect();
            roxmltree::Document::parse(&timeline(bars).draw()).unwrap();
        }
    }
}
