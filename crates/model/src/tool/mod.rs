//! Measuring programs, as on the real thing.

pub mod apenet;
pub mod dma;
pub mod event_builder;
pub mod hbm;
pub mod mic;
mod nic;
pub mod osu;
pub mod perftest;
pub mod torus;
pub mod verbs;
