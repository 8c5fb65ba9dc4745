//! Run control over HTTP, with runs of a simulated backend: commands, access, hostile clients, log book, metrics, page.

mod access;
mod backend;
mod browser;
mod commands;
mod hostile;
mod logbook;
mod metrics;
mod page;
mod power;
mod security;
