//! Benchmarks as simulations: perftest, OSU micro-benchmarks, pcie-bench, HBM, torus and event builder.

pub mod apenet;
pub mod dma;
pub mod event_builder;
pub mod extoll;
pub mod hbm;
pub mod osu;
pub mod pcie_bench;
pub mod perftest;
pub mod torus;
