//! Event display: one event as an image of its pixels, coloured by charge.
//!
//! [`charges`] computes the charge of each pixel from its waveform; [`draw`] makes the SVG image.

mod charge;
mod waveform;

use std::collections::BTreeSet;
use std::fmt::Display;

use millstream_report::axis::Ticks;
use millstream_report::colour::{HIGHLIGHT, SECONDARY, TEXT, viridis};
use millstream_report::count;
use millstream_report::svg::{Anchor, Coordinate, Font, Svg, path};

use crate::pixels::{Pixel, PixelGeometry};

pub use charge::{WINDOW, WrongShape, charges, window};

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 800.0;
/// Area of the camera in the image: left, top, width, height.
const CAMERA_AREA: (f64, f64, f64, f64) = (24.0, 84.0, 664.0, 660.0);
/// Drawn fraction of a pixel's size; the gap separates neighbouring pixels.
const FILLED: f64 = 0.95;

/// An event to draw.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// Name of the run.
    pub run: &'a str,
    /// Number of the event.
    pub number: u64,
    /// Waveforms, pixel after pixel in stored order \[ADC count\].
    pub waveforms: &'a [i16],
    /// Samples per pixel.
    pub samples: usize,
    /// The trigger's positive decisions, in ascending order.
    pub triggered: &'a [Decision],
}

/// A positive trigger decision: the sum of the patch exceeded the threshold in the sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Decision {
    /// The sample.
    pub sample: usize,
    /// The patch.
    pub patch: u16,
}

/// Draws the charge of each pixel as SVG, 800 × 800, with the triggered patches outlined.
pub fn draw(geometry: &PixelGeometry, event: &Event<'_>) -> Result<String, WrongShape> {
    let pixels = geometry.pixels().len();
    if pixels.checked_mul(event.samples) != Some(event.waveforms.len()) || event.samples == 0 {
        return Err(WrongShape { found: event.waveforms.len(), pixels, samples: event.samples });
    }
    let window = window(event.waveforms, event.samples, event.triggered.first().map(|first| first.sample));
    let charges = charges(event.waveforms, event.samples, window.clone());

    let title = format!("{}: event {}", event.run, event.number);
    let mut svg = Svg::new(WIDTH, HEIGHT, &title);
    svg.text((24.0, 36.0), Anchor::Start, Font::bold(20.0), &title);
    svg.text((24.0, 60.0), Anchor::Start, Font::new(14.0, SECONDARY), &trigger_line(event));

    let brightest = (0..pixels).max_by(|&a, &b| charges[a].total_cmp(&charges[b])).unwrap_or(0);
    // Charges below zero are noise: they share the lowest colour.
    let axis = Ticks::between(0.0, charges[brightest], 6);
    let projection = Projection::fit(geometry);
    draw_pixels(&mut svg, geometry, projection, &charges, &axis);
    draw_outline(&mut svg, geometry, projection, event);
    draw_colour_bar(&mut svg, &axis);
    draw_length_scale(&mut svg, projection);
    let waveform = &event.waveforms[brightest * event.samples..][..event.samples];
    waveform::draw(&mut svg, "brightest pixel [ADC count]", waveform, window.clone());
    let note = format!(
        "charge: samples {}–{} summed, less {} × the pixel's median; below 0 shown as 0",
        window.start,
        window.end - 1,
        window.len()
    );
    svg.text((24.0, HEIGHT - 20.0), Anchor::Start, Font::new(13.0, SECONDARY), &note);
    Ok(svg.finish())
}

/// The trigger's decisions as a line of text.
fn trigger_line(event: &Event<'_>) -> String {
    let patches = patches(event);
    match (event.triggered.first(), patches.len()) {
        (None, _) => "no patch above the trigger's threshold".into(),
        (Some(first), 1) => format!("triggered by patch {}, sample {}", first.patch, first.sample),
        (Some(first), patches) => format!(
            "{} patches above the trigger's threshold, first patch {} in sample {}",
            count(patches as u64),
            first.patch,
            first.sample
        ),
    }
}

fn patches(event: &Event<'_>) -> BTreeSet<u16> {
    event.triggered.iter().map(|decision| decision.patch).collect()
}

/// Transformation from camera coordinates \[mm\] to image coordinates.
#[derive(Clone, Copy, Debug)]
struct Projection {
    /// Image coordinates of `origin`.
    centre: (f64, f64),
    /// Centre of the camera \[mm\].
    origin: (f64, f64),
    /// Image units per millimetre.
    scale: f64,
}

impl Projection {
    fn fit(geometry: &PixelGeometry) -> Self {
        let range = |coordinate: fn(&Pixel) -> f64| {
            let all = geometry.pixels().iter().map(coordinate);
            let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            });
            ((low + high) / 2.0, high - low + 1.2 * geometry.pitch())
        };
        let ((x, width), (y, height)) = (range(|pixel| pixel.x), range(|pixel| pixel.y));
        let (left, top, room, tall) = CAMERA_AREA;
        Self {
            centre: (left + room / 2.0, top + tall / 2.0),
            origin: (x, y),
            scale: (room / width).min(tall / height),
        }
    }

    fn at(self, (x, y): (f64, f64)) -> (f64, f64) {
        let (dx, dy) = (self.scale * (x - self.origin.0), self.scale * (y - self.origin.1));
        (self.centre.0 + dx, self.centre.1 - dy)
    }
}

fn draw_pixels(
    svg: &mut Svg,
    geometry: &PixelGeometry,
    projection: Projection,
    charges: &[f64],
    axis: &Ticks,
) {
    let corners = geometry.corners();
    svg.begin("g", &[("id", &"pixels")]);
    for (pixel, &charge) in geometry.pixels().iter().zip(charges) {
        let corner = |(dx, dy)| projection.at((pixel.x + FILLED * dx, pixel.y + FILLED * dy));
        let hexagon = path(corners.map(corner)) + "Z";
        svg.element("path", &[("d", &hexagon), ("fill", &viridis(axis.position(charge)))], None);
    }
    svg.end();
}

fn draw_outline(svg: &mut Svg, geometry: &PixelGeometry, projection: Projection, event: &Event<'_>) {
    let borders = geometry.outline(&patches(event));
    let data: String =
        borders.iter().map(|border| path(border.iter().map(|&corner| projection.at(corner))) + "Z").collect();
    if data.is_empty() {
        return;
    }
    svg.begin("g", &[("id", &"triggered"), ("fill", &"none"), ("stroke-linejoin", &"round")]);
    for (colour, width) in [("white", 6.0), (HIGHLIGHT, 3.0)] {
        svg.element("path", &[("d", &data), ("stroke", &colour), ("stroke-width", &Coordinate(width))], None);
    }
    svg.end();
}

fn draw_colour_bar(svg: &mut Svg, axis: &Ticks) {
    const LEFT: f64 = 708.0;
    const WIDE: f64 = 18.0;
    const TOP: f64 = 144.0;
    const TALL: f64 = 460.0;
    svg.begin("linearGradient", &[("id", &"scale"), ("x1", &0), ("x2", &0), ("y1", &1), ("y2", &0)]);
    for k in 0..=16 {
        let position = f64::from(k) / 16.0;
        svg.element("stop", &[("offset", &position), ("stop-color", &viridis(position))], None);
    }
    svg.end();
    let bar: [(&str, &dyn Display); 5] = [
        ("x", &Coordinate(LEFT)),
        ("y", &Coordinate(TOP)),
        ("width", &Coordinate(WIDE)),
        ("height", &Coordinate(TALL)),
        ("fill", &"url(#scale)"),
    ];
    svg.element("rect", &bar, None);
    for (value, label) in axis.marks() {
        let at = TOP + TALL * (1.0 - axis.position(value));
        svg.line((LEFT + WIDE, at), (LEFT + WIDE + 5.0, at), &[("stroke", &SECONDARY)]);
        svg.text((LEFT + WIDE + 9.0, at + 4.5), Anchor::Start, Font::new(13.0, TEXT), &label);
    }
    svg.text((LEFT, TOP - 28.0), Anchor::Start, Font::new(13.0, TEXT), "charge");
    svg.text((LEFT, TOP - 12.0), Anchor::Start, Font::new(13.0, SECONDARY), "[ADC count]");
}

fn draw_length_scale(svg: &mut Svg, projection: Projection) {
    const LENGTH: f64 = 200.0;
    let (left, top, _, tall) = CAMERA_AREA;
    let (from, to, y) = (left, left + projection.scale * LENGTH, top + tall);
    svg.line((from, y), (to, y), &[("stroke", &TEXT), ("stroke-width", &2)]);
    svg.text(((from + to) / 2.0, y - 8.0), Anchor::Middle, Font::new(13.0, TEXT), &format!("{LENGTH} mm"));
}
