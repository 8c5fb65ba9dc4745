//! Benchmarks as simulations: perftest, OSU micro-benchmarks, pcie-bench, HBM, torus and event builder.

pub mod apenet;
pub mod disks;
pub mod dma;
pub mod event_builder;
pub mod exchange;
pub mod extoll;
pub mod hbm;
pub mod mlc;
pub mod nvmf;
pub mod osu;
pub mod pcie_bench;
pub mod peer;
pub mod perftest;
pub mod torus;
