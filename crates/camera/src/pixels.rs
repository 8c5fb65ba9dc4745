//! The pixel geometry: hexagonal pixels on a regular lattice.

use std::collections::BTreeSet;
use std::path::Path;

use crate::table::{Row, Table, TableError};

/// One pixel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pixel {
    /// The camera's number of the pixel.
    pub id: u16,
    /// The trigger patch of the pixel.
    pub patch: u16,
    /// Horizontal position of the centre \[mm\], to the right.
    pub x: f64,
    /// Vertical position of the centre \[mm\], upwards.
    pub y: f64,
}

/// The pixels in stored order, on a lattice with equal distances between neighbours.
#[derive(Clone, Debug, PartialEq)]
pub struct PixelGeometry {
    pixels: Vec<Pixel>,
    pitch: f64,
    /// Direction from a pixel to one neighbour \[rad\]; the other five are at multiples of 60° to it.
    direction: f64,
}

/// Largest accepted distance of a pixel from its lattice position, as a fraction of the pitch.
const TOLERANCE: f64 = 0.02;

impl PixelGeometry {
    /// Loads a `pixels.csv`.
    ///
    /// Each line is one pixel, in stored order, with the columns `pixel`, `patch`, `x_mm` and `y_mm`. Other
    /// columns are ignored.
    pub fn load(path: &Path) -> Result<Self, TableError> {
        Self::parse(&Table::load(path)?)
    }

    fn parse(table: &Table) -> Result<Self, TableError> {
        let [id, patch, x, y] =
            [table.column("pixel")?, table.column("patch")?, table.column("x_mm")?, table.column("y_mm")?];
        let mut pixels = Vec::new();
        for row in table.rows() {
            let number = |column| row.parse(column, "a number from 0 to 65535", |_: &u16| true);
            let length = |column| row.parse(column, "a length in mm", |length: &f64| length.abs() < 1e6);
            pixels.push(Pixel { id: number(id)?, patch: number(patch)?, x: length(x)?, y: length(y)? });
        }
        Self::fit(table, pixels)
    }

    /// Finds the lattice from the two closest pixels, and checks all others against it.
    fn fit(table: &Table, pixels: Vec<Pixel>) -> Result<Self, TableError> {
        let mut nearest = (f64::INFINITY, 0, 0);
        for (a, one) in pixels.iter().enumerate() {
            for (b, other) in pixels.iter().enumerate().skip(a + 1) {
                let distance = (one.x - other.x).hypot(one.y - other.y);
                if distance < nearest.0 {
                    nearest = (distance, a, b);
                }
            }
        }
        let rows: Vec<Row<'_>> = table.rows().collect();
        let (pitch, a, b) = nearest;
        if !pitch.is_finite() {
            return Err(table.whole(format!("{} pixels, expected at least 2", pixels.len())));
        }
        if pitch < 1e-3 {
            return Err(rows[b].error(format!("same position as the pixel on line {}", rows[a].line())));
        }
        let direction = (pixels[b].y - pixels[a].y).atan2(pixels[b].x - pixels[a].x);
        let geometry = Self { pixels, pitch, direction };
        match geometry.first_off_lattice() {
            Some(pixel) => Err(rows[pixel].error("not on the hexagonal lattice of the other pixels".into())),
            None => Ok(geometry),
        }
    }

    /// Index of the first pixel that is not a whole number of lattice steps from pixel 0.
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
            // The pitch is that of two pixels, so its rounding error grows with the distance.
            let tolerance = TOLERANCE + 1e-3 * x.hypot(y) / self.pitch;
            steps.iter().any(|steps| (steps - steps.round()).abs() > tolerance)
        })
    }

    /// The pixels, in stored order.
    pub fn pixels(&self) -> &[Pixel] {
        &self.pixels
    }

    /// Distance between the centres of neighbours \[mm\].
    pub fn pitch(&self) -> f64 {
        self.pitch
    }

    /// Corners of a pixel relative to its centre \[mm\], counter-clockwise. The side from corner k to
    /// corner k + 1 faces neighbour k.
    pub fn corners(&self) -> [(f64, f64); 6] {
        let radius = self.pitch / 3f64.sqrt();
        std::array::from_fn(|k| {
            let angle = self.direction + (k as f64 - 0.5) * std::f64::consts::FRAC_PI_3;
            (radius * angle.cos(), radius * angle.sin())
        })
    }

    /// Centres of the six neighbouring lattice positions \[mm\].
    fn neighbours(&self, pixel: &Pixel) -> [(f64, f64); 6] {
        std::array::from_fn(|k| {
            let angle = self.direction + k as f64 * std::f64::consts::FRAC_PI_3;
            (pixel.x + self.pitch * angle.cos(), pixel.y + self.pitch * angle.sin())
        })
    }

    /// The borders of the region of these patches, as closed polygons \[mm\].
    pub fn outline(&self, patches: &BTreeSet<u16>) -> Vec<Vec<(f64, f64)>> {
        let inside: Vec<&Pixel> = self.pixels.iter().filter(|pixel| patches.contains(&pixel.patch)).collect();
        let close = |a: (f64, f64), b: (f64, f64)| (a.0 - b.0).hypot(a.1 - b.1) < 0.25 * self.pitch;
        let corners = self.corners();
        let mut sides = Vec::new();
        for pixel in &inside {
            for (k, centre) in self.neighbours(pixel).into_iter().enumerate() {
                if !inside.iter().any(|other| close((other.x, other.y), centre)) {
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
    use std::path::PathBuf;

    fn data(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m").join(name)
    }

    fn camera() -> PixelGeometry {
        PixelGeometry::load(&data("pixels.csv")).unwrap()
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
        // Most pixels have six neighbours, and each has at least two.
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
    fn invalid_tables_are_refused_with_their_line() {
        let refused = |text: &str| {
            let table = Table::read(Path::new("pixels.csv"), text.as_bytes()).unwrap();
            PixelGeometry::parse(&table).unwrap_err().to_string()
        };
        assert_eq!(refused(""), "pixels.csv:1: the header has no column pixel");
        assert_eq!(refused("pixel,patch,x_mm\n"), "pixels.csv:1: the header has no column y_mm");
        let one = refused("pixel,patch,x_mm,y_mm\n0,0,0,0\n");
        assert_eq!(one, "pixels.csv: 1 pixels, expected at least 2");
        let head = "y_mm,patch,x_mm,pixel\n0,0,0,0\n";
        let line = |line: &str| refused(&format!("{head}{line}"));
        assert_eq!(line("1,-1,0,1\n"), "pixels.csv:3: patch is \"-1\", expected a number from 0 to 65535");
        assert_eq!(line("NaN,1,0,1\n"), "pixels.csv:3: y_mm is \"NaN\", expected a length in mm");
        assert_eq!(line("1,1\n"), "pixels.csv:3: pixel is \"\", expected a number from 0 to 65535");
        assert_eq!(line("0,5,0,1\n"), "pixels.csv:3: same position as the pixel on line 2");
        assert_eq!(
            line("0,1,10,1\n3,2,25,2\n"),
            "pixels.csv:4: not on the hexagonal lattice of the other pixels"
        );
        let error = PixelGeometry::load(Path::new("/none/pixels.csv")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "/none/pixels.csv: cannot read: No such file or directory (os error 2)"
        );
    }
}
