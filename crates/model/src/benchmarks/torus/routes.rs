//! Routes of `torus-core` around failed links: dimension order where it works, else up and down.

use millstream_site::Site;
use millstream_site::validate::{LinkEnd, Torus as SiteTorus};
use millstream_torus_core::header::Kind;
use millstream_torus_core::route::{ChannelName, UpDown, VirtualChannel, choose, dimension_order};
use millstream_torus_core::topology::{Axis, Link};
use millstream_torus_core::{DeadSet, Dimensions, Epoch, Header, NodeNumber, Route, Sign};

use super::TorusHop;

/// Epoch of the routes: the model has one.
pub(super) const EPOCH: Epoch = Epoch(0);

/// Routes of all pairs.
#[derive(Debug)]
pub(super) struct Routes<'t> {
    torus: Dimensions,
    dead: &'t DeadSet,
    pub(super) graph: UpDown,
}

impl<'t> Routes<'t> {
    pub(super) fn new(torus: Dimensions, dead: &'t DeadSet) -> Routes<'t> {
        Routes { torus, dead, graph: UpDown::new(&torus, dead) }
    }

    /// The route of a pair; none if the failed links separate it.
    pub(super) fn route(&self, from: NodeNumber, to: NodeNumber) -> Option<Route> {
        choose(&self.torus, self.dead, from, to, || self.graph.toward(to).hops(from))
    }

    fn channels(&self, from: NodeNumber, to: NodeNumber) -> Option<Vec<ChannelName>> {
        match self.route(from, to)? {
            Route::DimensionOrder { signs, .. } => {
                dimension_order::channels(&self.torus, self.dead, from, to, signs)
            }
            Route::UpDown { .. } => self.graph.toward(to).channels(&self.graph, from, EPOCH),
        }
    }

    /// Hops of a pair; none if the failed links separate it.
    pub(super) fn hops(&self, from: NodeNumber, to: NodeNumber) -> Option<Vec<TorusHop>> {
        let mut hops: Vec<TorusHop> = Vec::new();
        for channel in self.channels(from, to)? {
            let dimension = channel.direction.axis.index();
            hops.push(TorusHop {
                node: channel.node.index(),
                dimension,
                positive: channel.direction.sign == Sign::Plus,
                enters_ring: hops.last().is_none_or(|last| last.dimension != dimension),
            });
        }
        Some(hops)
    }

    /// Header of a pair's packets.
    pub(super) fn header(&self, from: NodeNumber, to: NodeNumber) -> Option<Header> {
        let mut header = Header::new(Kind::Put, from, to);
        header.epoch = EPOCH;
        match self.route(from, to)? {
            Route::DimensionOrder { signs, .. } => header.signs = signs,
            Route::UpDown { .. } => header.vc = VirtualChannel::up_down(EPOCH),
        }
        Some(header)
    }
}

/// The failed links of a site's torus.
pub(crate) fn dead_links(site: &Site, torus: &SiteTorus) -> DeadSet {
    let mut dead = DeadSet::new();
    let node = |end: LinkEnd| {
        let place = torus.nodes.iter().position(|&(host, device)| LinkEnd::Adapter(host, device) == end)?;
        u16::try_from(place).ok().map(NodeNumber)
    };
    for link in site.links.iter().filter(|link| link.failed) {
        let axis = link.dimension.and_then(|dimension| Axis::ALL.get(usize::from(dimension)));
        if let (Some(&axis), Some(from), Some(_)) = (axis, node(link.from), node(link.to)) {
            dead.kill_link(Link { from, axis });
        }
    }
    dead
}
