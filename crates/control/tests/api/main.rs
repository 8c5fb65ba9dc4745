//! Run control over HTTP, with runs of a simulated backend: commands, access, hostile clients, log book, metrics.

mod access;
mod backend;
mod commands;
mod hostile;
mod metrics;
mod power;
