//! A discrete-event model of data paths into accelerator memory.
#![forbid(unsafe_code)]

pub mod engine;
