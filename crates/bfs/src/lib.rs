//! Graph500 breadth-first search on the nodes of a torus.
//!
//! The rules are those of the Graph500 specification 2.0. [`kronecker`] generates the edge list, [`roots`] draws the search
//! keys, both with the numbers of [`mrg`]. [`graph`] is kernel 1, [`search`] kernel 2, [`validate`] the check of each result,
//! written apart from the search. [`job`] runs all of them over a [`Fabric`](millstream_fabric::Fabric), [`checkpoint`] keeps
//! what is done, [`statistics`] and [`report`] tell the result. A search works on a [`traversal`]: [`host`] has it in
//! host memory, [`card`] in that of the nodes' cards, where the kernel of [`kernel`] searches.
#![forbid(unsafe_code)]

pub mod bitmap;
pub mod card;
pub mod checkpoint;
pub mod column;
pub mod distribution;
pub mod graph;
pub mod host;
pub mod job;
pub mod kernel;
pub mod kronecker;
pub mod mrg;
pub mod network;
pub mod report;
pub mod roots;
pub mod search;
pub mod statistics;
pub mod traversal;
pub mod validate;

pub use job::{BfsError, BfsOptions, run};
pub use report::{BfsReport, RootRecord};
