//! A small SVG writer: elements, attributes, text. The output is well-formed for any input.

use std::fmt::{self, Display};

use crate::colour::TEXT;

/// Builds an SVG document. Coordinates are pixels, y downwards.
#[derive(Debug)]
pub struct Svg {
    out: String,
    open: Vec<&'static str>,
}

/// Name and value of an attribute.
pub type Attribute<'a> = (&'static str, &'a dyn Display);

/// A coordinate, written with at most two decimals.
#[derive(Clone, Copy, Debug)]
pub struct Coordinate(pub f64);

impl Display for Coordinate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = if self.0.is_finite() { (self.0.clamp(-1e6, 1e6) * 100.0).round() / 100.0 } else { 0.0 };
        // Adding zero removes the sign of −0.
        write!(f, "{}", value + 0.0)
    }
}

/// Position of a text relative to its point.
#[derive(Clone, Copy, Debug)]
pub enum Anchor {
    /// The point is at the start of the text.
    Start,
    /// The point is in the middle of the text.
    Middle,
    /// The point is at the end of the text.
    End,
}

/// Size, colour and weight of a text.
#[derive(Clone, Copy, Debug)]
pub struct Font {
    /// Height in pixels.
    pub size: f64,
    /// Colour in SVG syntax.
    pub colour: &'static str,
    /// Whether the weight is bold.
    pub bold: bool,
}

impl Font {
    /// An ordinary font.
    pub const fn new(size: f64, colour: &'static str) -> Self {
        Self { size, colour, bold: false }
    }

    /// A bold font in the default text colour.
    pub const fn bold(size: f64) -> Self {
        Self { size, colour: TEXT, bold: true }
    }
}

impl Svg {
    /// A white page. Screen readers read `title`.
    pub fn new(width: f64, height: f64, title: &str) -> Self {
        let mut svg = Self { out: String::new(), open: Vec::new() };
        let view = format!("0 0 {} {}", Coordinate(width), Coordinate(height));
        svg.begin(
            "svg",
            &[
                ("xmlns", &"http://www.w3.org/2000/svg"),
                ("width", &Coordinate(width)),
                ("height", &Coordinate(height)),
                ("viewBox", &view),
                ("role", &"img"),
                ("font-family", &"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"),
            ],
        );
        svg.element("title", &[], Some(title));
        svg.element(
            "rect",
            &[("width", &Coordinate(width)), ("height", &Coordinate(height)), ("fill", &"white")],
            None,
        );
        svg
    }

    /// Opens an element with children.
    pub fn begin(&mut self, name: &'static str, attributes: &[Attribute<'_>]) {
        self.tag(name, attributes);
        self.out.push_str(">\n");
        self.open.push(name);
    }

    /// Closes the innermost open element.
    pub fn end(&mut self) {
        if let Some(name) = self.open.pop() {
            self.out.push_str(&format!("</{name}>\n"));
        }
    }

    /// Writes an element without children.
    pub fn element(&mut self, name: &'static str, attributes: &[Attribute<'_>], text: Option<&str>) {
        self.tag(name, attributes);
        match text {
            None => self.out.push_str("/>\n"),
            Some(text) => {
                self.out.push('>');
                escape(text, &mut self.out);
                self.out.push_str(&format!("</{name}>\n"));
            }
        }
    }

    /// Writes a straight line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), attributes: &[Attribute<'_>]) {
        let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(Coordinate);
        let mut all: Vec<Attribute<'_>> = vec![("x1", &x1), ("y1", &y1), ("x2", &x2), ("y2", &y2)];
        all.extend(attributes);
        self.element("line", &all, None);
    }

    /// Writes a line of text.
    pub fn text(&mut self, at: (f64, f64), anchor: Anchor, font: Font, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let weight = if font.bold { "bold" } else { "normal" };
        let attributes: [Attribute<'_>; 6] = [
            ("x", &Coordinate(at.0)),
            ("y", &Coordinate(at.1)),
            ("text-anchor", &anchor),
            ("font-size", &Coordinate(font.size)),
            ("font-weight", &weight),
            ("fill", &font.colour),
        ];
        self.element("text", &attributes, Some(text));
    }

    /// Closes all elements and returns the document.
    pub fn finish(mut self) -> String {
        while !self.open.is_empty() {
            self.end();
        }
        self.out
    }

    fn tag(&mut self, name: &str, attributes: &[Attribute<'_>]) {
        self.out.push('<');
        self.out.push_str(name);
        for (name, value) in attributes {
            self.out.push(' ');
            self.out.push_str(name);
            self.out.push_str("=\"");
            escape(&value.to_string(), &mut self.out);
            self.out.push('"');
        }
    }
}

/// Path data through the points: `M x y L x y …`.
pub fn path(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    let mut data = String::new();
    for (k, (x, y)) in points.into_iter().enumerate() {
        data.push_str(&format!("{}{} {}", if k == 0 { "M" } else { "L" }, Coordinate(x), Coordinate(y)));
    }
    data
}

fn escape(text: &str, out: &mut String) {
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\t' | '\n' | '\r' => out.push(' '),
            // Not allowed in XML 1.0 (section 2.2).
            '\0'..='\x1f' | '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            other => out.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn coordinates_have_at_most_two_decimals() {
        let shown = |value| Coordinate(value).to_string();
        assert_eq!(shown(1.0), "1");
        assert_eq!(shown(-0.001), "0");
        assert_eq!(shown(12.345_6), "12.35");
        assert_eq!(shown(f64::NAN), "0");
        assert_eq!(shown(f64::MAX), "1000000");
        assert_eq!(path([(0.0, 1.5), (2.0, 3.0)]), "M0 1.5L2 3");
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_escaped(title: String, text: String, x: f64) {
            let mut svg = Svg::new(100.0, 50.0, &title);
            svg.begin("g", &[("id", &text)]);
            svg.text((x, 1.0), Anchor::End, Font::bold(12.0), &text);
            let document = svg.finish();
            let parsed = roxmltree::Document::parse(&document).unwrap();
            prop_assert!(parsed.descendants().any(|node| node.has_tag_name("g") || node.attribute("id").is_some()));
        }
    }
}
