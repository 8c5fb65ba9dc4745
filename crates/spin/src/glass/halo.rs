//! Halos: the spins of neighbouring blocks.
//!
//! One exchange fills the halos on all sides, edges and corners included: each of the up to 26 neighbours sends the box that
//! its receiver needs. Boxes for the same node travel in one message.

use millstream_application::{ApplicationError, NodeGroup, TimeSplit};
use millstream_fabric::{Fabric, Neighbourhood};
use millstream_torus_core::{Axis, Coordinates, Dimensions, NodeNumber};

use crate::block::Block;
use crate::geometry::{Box3, Geometry};
use crate::real::Real;

/// Largest message that travels at once (bytes).
const CAPACITY: usize = 4 << 20;

/// One step along each axis, not all zero.
pub(super) type Offset = [isize; 3];

/// The steps to all neighbours whose spins a block needs.
fn offsets(block: &Geometry) -> Vec<Offset> {
    let [x, y, z] = [0, 1, 2].map(|axis| if block.has_whole(axis) { 0..=0 } else { -1..=1 });
    let all = x.flat_map(|x| {
        let z = z.clone();
        y.clone().flat_map(move |y| z.clone().map(move |z| [x, y, z]))
    });
    all.filter(|offset| *offset != [0; 3]).collect()
}

fn neighbour(torus: Dimensions, here: NodeNumber, offset: Offset) -> NodeNumber {
    let mut at: Coordinates = torus.coordinates(here);
    for axis in Axis::ALL {
        let size = torus.size(axis) as isize;
        at.0[axis.index()] = (at.on(axis) as isize + offset[axis.index()]).rem_euclid(size) as u16;
    }
    // Each coordinate is within its ring.
    torus.node(at).unwrap_or(here)
}

/// The sites of a block that its neighbour at an offset needs.
pub(super) fn sent(block: &Geometry, offset: Offset) -> Box3 {
    let (inside, halo) = (block.inside(), block.halo().map(|halo| halo as isize));
    std::array::from_fn(|a| match offset[a] {
        1 => inside[a].end - halo[a]..inside[a].end,
        -1 => 0..halo[a],
        _ => inside[a].clone(),
    })
}

/// The halo sites that the neighbour at an offset has.
pub(super) fn received(block: &Geometry, offset: Offset) -> Box3 {
    let (inside, halo) = (block.inside(), block.halo().map(|halo| halo as isize));
    std::array::from_fn(|a| match offset[a] {
        1 => inside[a].end..inside[a].end + halo[a],
        -1 => -halo[a]..0,
        _ => inside[a].clone(),
    })
}

/// A node, and the offsets at which it is.
#[derive(Clone, Debug)]
pub(super) struct HaloPeer {
    /// The node.
    pub(super) node: NodeNumber,
    /// The offsets, in the order in which their boxes are sent.
    pub(super) offsets: Vec<Offset>,
}

/// The nodes whose spins a block needs.
pub(super) fn peers(block: &Geometry, torus: Dimensions, here: NodeNumber) -> Vec<HaloPeer> {
    let mut peers = Vec::<HaloPeer>::new();
    for offset in offsets(block) {
        let node = neighbour(torus, here, offset);
        match peers.iter_mut().find(|peer| peer.node == node) {
            Some(peer) => peer.offsets.push(offset),
            None => peers.push(HaloPeer { node, offsets: vec![offset] }),
        }
    }
    peers
}

/// The exchange of halos of one node.
#[derive(Debug)]
pub struct HaloExchange {
    neighbourhood: Neighbourhood,
    peers: Vec<HaloPeer>,
}

impl HaloExchange {
    /// Prepares the exchange for spins of values of `element` bytes; all nodes call this.
    ///
    /// # Errors
    /// [`ApplicationError::Fabric`].
    pub fn new<F: Fabric>(
        group: &mut NodeGroup<F>,
        block: &Geometry,
        element: usize,
    ) -> Result<HaloExchange, ApplicationError> {
        let peers = peers(block, group.dimensions(), group.here());
        let nodes: Vec<NodeNumber> = peers.iter().map(|peer| peer.node).collect();
        let bytes = |&offset: &Offset| Geometry::box_bytes(&sent(block, offset), element);
        let message = |peer: &HaloPeer| peer.offsets.iter().map(bytes).sum::<usize>();
        let longest = peers.iter().map(message).max().unwrap_or(0).min(CAPACITY);
        // All nodes give the same capacity.
        let longest = group.all_blocks(&(longest as u64).to_le_bytes())?;
        let longest = longest.into_iter().map(u64::from_le_bytes).max().unwrap_or(0) as usize;
        let timeout = group.timeout();
        let neighbourhood = Neighbourhood::new(&mut group.fabric, &nodes, longest, timeout)?;
        Ok(HaloExchange { neighbourhood, peers })
    }

    /// Sends this block's boxes.
    ///
    /// # Errors
    /// [`ApplicationError::Fabric`].
    pub fn start<E: Real, F: Fabric>(
        &mut self,
        group: &mut NodeGroup<F>,
        block: &Block<E>,
        times: &mut TimeSplit,
    ) -> Result<(), ApplicationError> {
        let pack = |peer: &HaloPeer| {
            let mut bytes = Vec::new();
            peer.offsets.iter().for_each(|&offset| block.pack(&sent(block.geometry(), offset), &mut bytes));
            bytes
        };
        let messages = times.communicating(|| self.peers.iter().map(pack).collect());
        let before = self.neighbourhood.statistics();
        self.neighbourhood.start(&mut group.fabric, messages)?;
        times.add_exchange(before, self.neighbourhood.statistics());
        Ok(())
    }

    /// Fills the halos from the neighbours' boxes.
    ///
    /// # Errors
    /// [`ApplicationError::Fabric`]; [`ApplicationError::Message`] if a message has another length than its boxes.
    pub fn finish<E: Real, F: Fabric>(
        &mut self,
        group: &mut NodeGroup<F>,
        block: &mut Block<E>,
        times: &mut TimeSplit,
    ) -> Result<(), ApplicationError> {
        let before = self.neighbourhood.statistics();
        let messages = self.neighbourhood.finish(&mut group.fabric)?;
        times.add_exchange(before, self.neighbourhood.statistics());
        times.communicating(|| {
            for (peer, message) in self.peers.iter().zip(&messages) {
                let malformed = || ApplicationError::Message { bytes: message.len() };
                let mut rest: &[u8] = message;
                // The sender's order of offsets: the reverse of this node's, as they point the other way.
                for &offset in peer.offsets.iter().rev() {
                    rest = block.unpack(&received(block.geometry(), offset), rest).ok_or_else(malformed)?;
                }
                if !rest.is_empty() {
                    return Err(malformed());
                }
            }
            Ok(())
        })
    }
}
