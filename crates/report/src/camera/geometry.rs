//! Where the pixels of a camera are: hexagons on a regular lattice.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// One pixel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pixel {
    /// The trigger patch that it belongs to.
    pub patch: u16,
    /// Its centre, in mm, to the right and up.
    pub x: f64,
    /// See `x`.
    pub y: f64,
}

/// The pixels in stored order, on a lattice in which each has its neighbours at the same distance.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    pixels: Vec<Pixel>,
    pitch: f64,
    /// Direction from a pixel to a neighbour, in radians; the other five are at multiples of 60° to it.
    direction: f64,
}

/// A list of pixels that is no camera.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}:{line}: {problem}", path.display())]
pub struct GeometryError {
    /// The file.
    pub path: PathBuf,
    /// The line, counted from 1; 0 if the file could not be read.
    pub line: usize,
    /// What is wrong with it.
    pub problem: String,
}

/// Neighbours may be off their places by this fraction of the pitch.
const TOLERANCE: f64 = 0.02;

impl Geometry {
    /// Reads a `pixels.csv`: a line per pixel in stored order, with the columns `patch`, `x_mm` and `y_mm`
    /// among others.
    pub fn load(path: &Path) -> Result<Self, GeometryError> {
        let error = |(line, problem)| GeometryError { path: path.to_owned(), line, problem };
        let text =
            std::fs::read_to_string(path).map_err(|cause| error((0, format!("cannot read: {cause}"))))?;
        Self::parse(&text).map_err(error)
    }

    fn parse(text: &str) -> Result<Self, (usize, String)> {
        let mut lines = (1..).zip(text.lines());
        let header: Vec<&str> = lines.next().map_or(Vec::new(), |(_, line)| line.split(',').collect());
        let column = |name: &str| {
            let found = header.iter().position(|column| column.trim() == name);
            found.ok_or_else(|| (1, format!("no column {name}")))
        };
        let [patch, x, y] = [column("patch")?, column("x_mm")?, column("y_mm")?];
        let mut pixels = Vec::new();
        for (line, text) in lines {
            let cells: Vec<&str> = text.split(',').collect();
            let cell = |at: usize| cells.get(at).map_or("", |cell| cell.trim());
            let wrong = |at: usize, expected| {
                (line, format!("{} is {:?}, expected {expected}", header[at], cell(at)))
            };
            let length = |at: usize| {
                let length = cell(at).parse().ok().filter(|length: &f64| length.abs() < 1e6);
                length.ok_or_else(|| wrong(at, "a length in mm"))
            };
            let patch = cell(patch).parse().map_err(|_| wrong(patch, "a number from 0 to 65535"))?;
            pixels.push(Pixel { patch, x: length(x)?, y: length(y)? });
        }
        // Pixel k is on line k + 2.
        Self::new(pixels).map_err(|(pixel, problem)| (pixel + 2, problem))
    }

    /// Finds the lattice. The error has the position of the pixel that does not fit.
    fn new(pixels: Vec<Pixel>) -> Result<Self, (usize, String)> {
        let mut nearest = (f64::INFINITY, 0, 0);
        for (a, one) in pixels.iter().enumerate() {
            for (b, other) in pixels.iter().enumerate().skip(a + 1) {
                let distance = (one.x - other.x).hypot(one.y - other.y);
                if distance < nearest.0 {
                    nearest = (distance, a, b);
                }
            }
        }
        let (pitch, a, b) = nearest;
        if !pitch.is_finite() {
            return Err((0, format!("{} pixels, expected at least 2", pixels.len())));
        }
        if pitch < 1e-3 {
            return Err((b, format!("in the same place as the pixel on line {}", a + 2)));
        }
        let direction = (pixels[b].y - pixels[a].y).atan2(pixels[b].x - pixels[a].x);
        let geometry = Self { pixels, pitch, direction };
        match geometry.first_off_lattice() {
            Some(pixel) => Err((pixel, "not on the hexagonal lattice of the others".into())),
            None => Ok(geometry),
        }
    }

    /// The first pixel that is not a whole number of steps from the first one.
    fn first_off_lattice(&self) -> Option<usize> {
        let origin = self.pixels.first()?;
        let step = |k: usize| {
            let angle = self.direction + k as f64 * std::f64::consts::FRAC_PI_3;
            (self.pitch * angle.cos(), self.pitch * angle.sin())
        };
        let ((ax, ay), (bx, by)) = (step(0), step(1));
        let area = ax * by - ay * bx;
        self.pixels.iter().position(|pixel| {
            let (x, y) = (pixel.x - origin.x, pixel.y - origin.y);
            let steps = [(x * by - y * bx) / area, (y * ax - x * ay) / area];
            // The pitch comes from two pixels, so rounding adds up with the distance.
            let tolerance = TOLERANCE + 1e-3 * x.hypot(y) / self.pitch;
            steps.iter().any(|steps| (steps - steps.round()).abs() > tolerance)
        })
    }

    /// The pixels, in stored order.
    pub fn pixels(&self) -> &[Pixel] {
        &self.pixels
    }

    /// Distance between the centres of neighbours, in mm.
    pub fn pitch(&self) -> f64 {
        self.pitch
    }

    /// Corners of a pixel relative to its centre, in mm, counter-clockwise; the side from corner k to
    /// corner k + 1 faces neighbour k.
    pub(super) fn corners(&self) -> [(f64, f64); 6] {
        let radius = self.pitch / 3f64.sqrt();
        std::array::from_fn(|k| {
            let angle = self.direction + (k as f64 - 0.5) * std::f64::consts::FRAC_PI_3;
            (radius * angle.cos(), radius * angle.sin())
        })
    }

    /// Positions of the six neighbours' centres.
    fn neighbours(&self, pixel: &Pixel) -> [(f64, f64); 6] {
        std::array::from_fn(|k| {
            let angle = self.direction + k as f64 * std::f64::consts::FRAC_PI_3;
            (pixel.x + self.pitch * angle.cos(), pixel.y + self.pitch * angle.sin())
        })
    }

    /// The borders of the region that these patches make up: closed lines, in mm.
    pub(super) fn outline(&self, patches: &BTreeSet<u16>) -> Vec<Vec<(f64, f64)>> {
        let inside: Vec<&Pixel> = self.pixels.iter().filter(|pixel| patches.contains(&pixel.patch)).collect();
        let close = |a: (f64, f64), b: (f64, f64)| (a.0 - b.0).hypot(a.1 - b.1) < 0.25 * self.pitch;
        let corners = self.corners();
        let mut sides = Vec::new();
        for pixel in &inside {
            for (k, place) in self.neighbours(pixel).into_iter().enumerate() {
                if !inside.iter().any(|other| close((other.x, other.y), place)) {
                    let corner = |k: usize| (pixel.x + corners[k % 6].0, pixel.y + corners[k % 6].1);
                    sides.push((corner(k), corner(k + 1)));
                }
            }
        }
        let mut borders = Vec::new();
        while let Some((start, mut end)) = sides.pop() {
            let mut border = vec![start];
            while let Some(next) = sides.iter().position(|side| close(side.0, end)) {
                let side = sides.swap_remove(next);
                border.push(side.0);
                end = side.1;
            }
            borders.push(border);
        }
        borders
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn data(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m").join(name)
    }

    fn camera() -> Geometry {
        Geometry::load(&data("pixels.csv")).unwrap()
    }

    fn distance(a: &Pixel, b: &Pixel) -> f64 {
        (a.x - b.x).hypot(a.y - b.y)
    }

    #[test]
    fn the_camera_is_a_regular_hexagonal_lattice() {
        let camera = camera();
        assert_eq!(camera.pixels().len(), 1296);
        assert!((camera.pitch() - 24.3).abs() < 0.02, "{}", camera.pitch());
        let mut with_neighbours = BTreeMap::new();
        for pixel in camera.pixels() {
            let near: Vec<f64> =
                camera.pixels().iter().map(|other| distance(pixel, other)).filter(|&d| d < 40.0).collect();
            let neighbours = near.iter().filter(|&&distance| (distance - 24.3).abs() < 0.05).count();
            // Itself and its neighbours: nothing overlaps, nothing is in between.
            assert_eq!(near.len(), neighbours + 1, "{pixel:?}");
            *with_neighbours.entry(neighbours).or_insert(0) += 1;
        }
        // Most pixels are inside, and none stands alone.
        assert!(with_neighbours[&6] > 1150, "{with_neighbours:?}");
        assert!(with_neighbours.keys().all(|&neighbours| neighbours >= 2), "{with_neighbours:?}");
    }

    #[test]
    fn the_three_pixels_of_a_patch_touch_around_its_centre() {
        let camera = camera();
        let patches = std::fs::read_to_string(data("patches.csv")).unwrap();
        let mut lines = patches.lines();
        let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
        let at = |name: &str| columns.iter().position(|column| *column == name).unwrap();
        for line in lines {
            let cells: Vec<f64> = line.split(',').map(|cell| cell.parse().unwrap()).collect();
            let pixels: Vec<&Pixel> =
                camera.pixels().iter().filter(|pixel| f64::from(pixel.patch) == cells[at("patch")]).collect();
            let [a, b, c] = pixels[..] else { panic!("{line}: {pixels:?}") };
            for (one, other) in [(a, b), (b, c), (c, a)] {
                assert!((distance(one, other) - camera.pitch()).abs() < 0.05, "{line}");
            }
            let centre = ((a.x + b.x + c.x) / 3.0, (a.y + b.y + c.y) / 3.0);
            assert!((centre.0 - cells[at("x_mm")]).hypot(centre.1 - cells[at("y_mm")]) < 0.02, "{line}");
        }
    }

    #[test]
    fn outlines_are_closed_and_enclose_their_pixels() {
        let camera = camera();
        let side = camera.pitch() / 3f64.sqrt();
        let hexagon = 1.5 * 3f64.sqrt() * side * side;
        let area = |border: &[(f64, f64)]| {
            let next = border.iter().cycle().skip(1);
            border.iter().zip(next).map(|(a, b)| a.0 * b.1 - b.0 * a.1).sum::<f64>() / 2.0
        };
        // One patch; two apart; all of the camera.
        let cases =
            [(BTreeSet::from([213]), 1, 3), (BTreeSet::from([0, 431]), 2, 6), ((0..432).collect(), 1, 1296)];
        for (patches, borders, pixels) in cases {
            let found = camera.outline(&patches);
            assert_eq!(found.len(), borders);
            for border in &found {
                for (a, b) in border.iter().zip(border.iter().cycle().skip(1)) {
                    assert!(((a.0 - b.0).hypot(a.1 - b.1) - side).abs() < 0.1);
                }
            }
            let sum: f64 = found.iter().map(|border| area(border)).sum();
            assert!((sum / hexagon - f64::from(pixels)).abs() < 0.01 * f64::from(pixels), "{sum}");
        }
        assert!(camera.outline(&BTreeSet::new()).is_empty());
    }

    #[test]
    fn a_list_that_is_no_camera_is_refused_with_its_line() {
        let refused = |text: &str| Geometry::parse(text).unwrap_err();
        assert_eq!(refused(""), (1, "no column patch".into()));
        assert_eq!(refused("patch,x_mm\n"), (1, "no column y_mm".into()));
        assert_eq!(refused("patch,x_mm,y_mm\n0,0,0\n"), (2, "1 pixels, expected at least 2".into()));
        let head = "y_mm,patch,x_mm\n0,0,0\n";
        let line = |line: &str| refused(&format!("{head}{line}"));
        assert_eq!(line("1,-1,0\n"), (3, "patch is \"-1\", expected a number from 0 to 65535".into()));
        assert_eq!(line("NaN,1,0\n"), (3, "y_mm is \"NaN\", expected a length in mm".into()));
        assert_eq!(line("1,1\n"), (3, "x_mm is \"\", expected a length in mm".into()));
        assert_eq!(line("0,5,0\n"), (3, "in the same place as the pixel on line 2".into()));
        assert_eq!(line("0,1,10\n3,2,25\n"), (4, "not on the hexagonal lattice of the others".into()));
        let error = Geometry::load(Path::new("/none/pixels.csv")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "/none/pixels.csv:0: cannot read: No such file or directory (os error 2)"
        );
    }
}
