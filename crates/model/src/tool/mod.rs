//! Measuring programs, as on the real thing.

pub mod apenet;
pub mod dma;
pub mod event_builder;
pub mod hbm;
pub mod mic;
pub mod torus;
pub mod verbs;
