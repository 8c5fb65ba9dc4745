//! Shape of a torus: dimensions, node numbers, coordinates, directions, links.
//!
//! ```text
//!   number = x + X·(y + Y·z)          a ring of k > 2 places has k links
//!   Plus:  place p ─► (p + 1) mod k   a ring of 2 has one link, a ring of 1 has none
//! ```

use std::fmt;

/// Number of axes.
pub const AXES: usize = 3;
/// Number of directions: links of a node.
pub const DIRECTIONS: usize = 2 * AXES;
/// Largest number of nodes: a node number has 16 bits.
pub const MAX_NODES: u32 = 1 << 16;

/// A node's number: x + X·(y + Y·z).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct NodeNumber(pub u16);

impl NodeNumber {
    /// As an array index.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for NodeNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// A dimension of the torus. Routes in dimension order go through X first, then Y, then Z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Axis {
    /// The first dimension.
    X,
    /// The second dimension.
    Y,
    /// The third dimension.
    Z,
}

impl Axis {
    /// All axes in dimension order.
    pub const ALL: [Axis; AXES] = [Axis::X, Axis::Y, Axis::Z];

    /// As an array index.
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The sense in which a link is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Sign {
    /// To the next higher place, from the last one to place 0.
    Plus,
    /// To the next lower place, from place 0 to the last one.
    Minus,
}

impl Sign {
    /// The opposite sense.
    #[must_use]
    pub fn reversed(self) -> Sign {
        match self {
            Sign::Plus => Sign::Minus,
            Sign::Minus => Sign::Plus,
        }
    }
}

/// One of the six directions of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Direction {
    /// The dimension.
    pub axis: Axis,
    /// The sense.
    pub sign: Sign,
}

impl Direction {
    /// All directions: +x, −x, +y, −y, +z, −z.
    pub const ALL: [Direction; DIRECTIONS] = [
        Direction { axis: Axis::X, sign: Sign::Plus },
        Direction { axis: Axis::X, sign: Sign::Minus },
        Direction { axis: Axis::Y, sign: Sign::Plus },
        Direction { axis: Axis::Y, sign: Sign::Minus },
        Direction { axis: Axis::Z, sign: Sign::Plus },
        Direction { axis: Axis::Z, sign: Sign::Minus },
    ];

    /// A direction.
    #[must_use]
    pub fn new(axis: Axis, sign: Sign) -> Direction {
        Direction { axis, sign }
    }

    /// As an array index, the position in [`Direction::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        2 * self.axis.index() + usize::from(self.sign == Sign::Minus)
    }

    /// The direction with this index.
    #[must_use]
    pub fn from_index(index: usize) -> Option<Direction> {
        Direction::ALL.get(index).copied()
    }

    /// The direction as the node at the link's other end names it.
    #[must_use]
    pub fn reversed(self) -> Direction {
        Direction { axis: self.axis, sign: self.sign.reversed() }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["+x", "-x", "+y", "-y", "+z", "-z"][self.index()])
    }
}

/// A node's place on each axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Coordinates(pub [u16; AXES]);

impl Coordinates {
    /// The place on one axis.
    #[must_use]
    pub fn on(self, axis: Axis) -> u16 {
        self.0[axis.index()]
    }
}

/// A link, named by the end from which it leads in [`Sign::Plus`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Link {
    /// The end from which the link leads in positive direction.
    pub from: NodeNumber,
    /// The dimension.
    pub axis: Axis,
}

/// Why dimensions are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DimensionsError {
    /// A dimension is zero.
    #[error("dimensions {text}: a dimension is 0, but each must be at least 1")]
    Zero {
        /// The dimensions as given.
        text: String,
    },
    /// Too many nodes.
    #[error("dimensions {text}: {nodes} nodes, but a torus has at most {MAX_NODES}")]
    TooManyNodes {
        /// The dimensions as given.
        text: String,
        /// The number of nodes.
        nodes: u64,
    },
    /// Not of the form `4x4x4`.
    #[error("dimensions {text:?}: write one to three numbers with x between them, as in 4x4x2")]
    Form {
        /// The text as given.
        text: String,
    },
}

/// Places per axis. Their product is at most [`MAX_NODES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dimensions {
    sizes: [u16; AXES],
}

impl Dimensions {
    /// Dimensions of a torus.
    ///
    /// # Errors
    /// [`DimensionsError`] if a size is 0 or the product exceeds [`MAX_NODES`].
    pub fn new(sizes: [u16; AXES]) -> Result<Dimensions, DimensionsError> {
        let text = || format!("{}x{}x{}", sizes[0], sizes[1], sizes[2]);
        if sizes.contains(&0) {
            return Err(DimensionsError::Zero { text: text() });
        }
        let nodes = sizes.iter().map(|&size| u64::from(size)).product::<u64>();
        if nodes > u64::from(MAX_NODES) {
            return Err(DimensionsError::TooManyNodes { text: text(), nodes });
        }
        Ok(Dimensions { sizes })
    }

    /// Places per axis.
    #[must_use]
    pub fn sizes(&self) -> [u16; AXES] {
        self.sizes
    }

    /// Places on one axis.
    #[must_use]
    pub fn size(&self, axis: Axis) -> u16 {
        self.sizes[axis.index()]
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.sizes.iter().map(|&size| usize::from(size)).product()
    }

    /// All node numbers, in order.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = NodeNumber> + ExactSizeIterator + use<> {
        // `new` admits at most 65,536 nodes, so every index is a 16-bit number.
        (0..self.nodes()).map(|index| NodeNumber(index as u16))
    }

    /// Whether a node of this number exists.
    #[must_use]
    pub fn contains(&self, node: NodeNumber) -> bool {
        node.index() < self.nodes()
    }

    /// Coordinates of a node.
    #[must_use]
    pub fn coordinates(&self, node: NodeNumber) -> Coordinates {
        let mut rest = node.index();
        Coordinates(self.sizes.map(|size| {
            let place = rest % usize::from(size);
            rest /= usize::from(size);
            place as u16
        }))
    }

    /// Number of the node at these coordinates, if each is below its dimension.
    #[must_use]
    pub fn node(&self, at: Coordinates) -> Option<NodeNumber> {
        if at.0.iter().zip(self.sizes).any(|(&place, size)| place >= size) {
            return None;
        }
        let [x, y, z] = at.0.map(usize::from);
        let [sx, sy, _] = self.sizes.map(usize::from);
        Some(NodeNumber((x + sx * (y + sy * z)) as u16))
    }

    /// The place behind `place` on an axis, whether or not a link leads there.
    #[must_use]
    pub fn step(&self, place: u16, direction: Direction) -> u16 {
        let size = self.size(direction.axis);
        match direction.sign {
            Sign::Plus if place + 1 >= size => 0,
            Sign::Plus => place + 1,
            Sign::Minus if place == 0 => size - 1,
            Sign::Minus => place - 1,
        }
    }

    /// Whether the link from `place` in this direction is the dateline: the one between the last place and place 0.
    #[must_use]
    pub fn crosses_dateline(&self, place: u16, direction: Direction) -> bool {
        let size = self.size(direction.axis);
        size > 2
            && match direction.sign {
                Sign::Plus => place + 1 == size,
                Sign::Minus => place == 0,
            }
    }

    /// The node at the other end of a link, if the link exists. A ring of two has one link: + at place 0, − at place 1.
    #[must_use]
    pub fn neighbour(&self, node: NodeNumber, direction: Direction) -> Option<NodeNumber> {
        let mut at = self.coordinates(node);
        let place = at.on(direction.axis);
        match self.size(direction.axis) {
            1 => return None,
            2 if (place == 0) != (direction.sign == Sign::Plus) => return None,
            _ => {}
        }
        at.0[direction.axis.index()] = self.step(place, direction);
        self.node(at)
    }

    /// The link of a node in a direction, if it exists.
    #[must_use]
    pub fn link(&self, node: NodeNumber, direction: Direction) -> Option<Link> {
        let other = self.neighbour(node, direction)?;
        let from = if direction.sign == Sign::Plus { node } else { other };
        Some(Link { from, axis: direction.axis })
    }

    /// All links.
    pub fn links(&self) -> impl Iterator<Item = Link> + '_ {
        self.all().flat_map(move |node| {
            (Axis::ALL.into_iter()).filter_map(move |axis| self.link(node, Direction::new(axis, Sign::Plus)))
        })
    }

    /// Longest shortest route: the sum of half of each dimension.
    #[must_use]
    pub fn diameter(&self) -> u32 {
        self.sizes.iter().map(|&size| u32::from(size / 2)).sum()
    }

    /// Hops that a route of layer A never exceeds: the sum of each dimension less one.
    #[must_use]
    pub fn max_hops(&self) -> u32 {
        self.sizes.iter().map(|&size| u32::from(size) - 1).sum()
    }
}

impl fmt::Display for Dimensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.sizes[0], self.sizes[1], self.sizes[2])
    }
}

impl std::str::FromStr for Dimensions {
    type Err = DimensionsError;

    fn from_str(text: &str) -> Result<Dimensions, DimensionsError> {
        let form = || DimensionsError::Form { text: text.to_owned() };
        let mut sizes = [1; AXES];
        for (i, word) in text.split('x').enumerate() {
            *sizes.get_mut(i).ok_or_else(form)? = word.parse().map_err(|_| form())?;
        }
        Dimensions::new(sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_coordinates_are_inverse() {
        let torus: Dimensions = "4x3x2".parse().unwrap();
        for node in torus.all() {
            assert_eq!(torus.node(torus.coordinates(node)), Some(node));
        }
        assert_eq!(torus.coordinates(NodeNumber(4 + 12)), Coordinates([0, 1, 1]));
        assert_eq!(torus.node(Coordinates([4, 0, 0])), None);
    }

    #[test]
    fn rings_of_one_two_and_three_have_no_one_and_three_links() {
        for (text, links) in [("1x1x1", 0), ("2x1x1", 1), ("3x1x1", 3), ("2x2x2", 12), ("4x4x4", 192)] {
            let torus: Dimensions = text.parse().unwrap();
            assert_eq!(torus.links().count(), links, "{text}");
        }
    }

    #[test]
    fn a_link_has_one_name_at_both_ends() {
        for text in ["2x3x4", "5x1x2"] {
            let torus: Dimensions = text.parse().unwrap();
            for node in torus.all() {
                for direction in Direction::ALL {
                    let Some(other) = torus.neighbour(node, direction) else { continue };
                    assert_eq!(torus.neighbour(other, direction.reversed()), Some(node));
                    assert_eq!(torus.link(node, direction), torus.link(other, direction.reversed()));
                }
            }
        }
    }

    #[test]
    fn wrong_dimensions_are_named() {
        assert_eq!(
            "4x0".parse::<Dimensions>().unwrap_err().to_string(),
            "dimensions 4x0x1: a dimension is 0, but each must be at least 1"
        );
        assert!("64x64x64".parse::<Dimensions>().unwrap_err().to_string().contains("262144 nodes"));
        for text in ["", "x", "2x2x2x2", "-1", "two", "99999"] {
            assert!(matches!(text.parse::<Dimensions>(), Err(DimensionsError::Form { .. })), "{text}");
        }
        assert_eq!("64x32x32".parse::<Dimensions>().unwrap().nodes(), 65536);
    }
}
