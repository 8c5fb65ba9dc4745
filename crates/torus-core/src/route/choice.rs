//! The source's choice of a route for a pair. All nodes make the same choice.

use super::dimension_order::{self, Signs};
use super::up_down::TargetTable;
use crate::faults::DeadSet;
use crate::topology::{Dimensions, NodeNumber};

/// A route of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Layer A with these directions.
    DimensionOrder {
        /// The directions.
        signs: Signs,
        /// Number of hops.
        hops: u32,
    },
    /// Layer B.
    UpDown {
        /// Number of hops.
        hops: u32,
    },
}

impl Route {
    /// Number of hops.
    #[must_use]
    pub fn hops(self) -> u32 {
        match self {
            Route::DimensionOrder { hops, .. } | Route::UpDown { hops } => hops,
        }
    }
}

/// The route of a pair: the shortest directions, else a live combination of directions with the fewest hops, else
/// layer B. `None` if no live path exists.
#[must_use]
pub fn choose(
    torus: &Dimensions,
    dead: &DeadSet,
    from: NodeNumber,
    to: NodeNumber,
    up_down: impl FnOnce() -> Option<u32>,
) -> Option<Route> {
    dimension_order_route(torus, dead, from, to).or_else(|| up_down().map(|hops| Route::UpDown { hops }))
}

/// As [`choose`], with the target's table of layer B.
#[must_use]
pub fn choose_with_table(
    torus: &Dimensions,
    dead: &DeadSet,
    from: NodeNumber,
    to: NodeNumber,
    table: &TargetTable,
) -> Option<Route> {
    choose(torus, dead, from, to, || table.hops(from))
}

fn dimension_order_route(
    torus: &Dimensions,
    dead: &DeadSet,
    from: NodeNumber,
    to: NodeNumber,
) -> Option<Route> {
    if !dead.node_lives(from) || !dead.node_lives(to) {
        return None;
    }
    let live = |signs: Signs| {
        let hops = dimension_order::hops(torus, from, to, signs)?;
        dimension_order::is_live(torus, dead, from, to, signs)
            .then_some(Route::DimensionOrder { signs, hops })
    };
    if let Some(route) = live(dimension_order::shortest(torus, from, to)) {
        return Some(route);
    }
    // `min_by_key` keeps the first of equal ones, so ties go to the lowest sign bits at every node.
    Signs::ALL.into_iter().filter_map(live).min_by_key(|route| route.hops())
}
