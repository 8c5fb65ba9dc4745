//! One event of a camera as an image of its pixels.
//!
//! [`Geometry`] says where the pixels are, [`charges`] makes a number of each pixel's waveform, [`draw()`]
//! shows them.

mod charge;
mod draw;
mod geometry;
mod inset;

pub use charge::{WINDOW, WrongShape, charges, window};
pub use draw::{Decision, Event, draw};
pub use geometry::{Geometry, GeometryError, Pixel};
