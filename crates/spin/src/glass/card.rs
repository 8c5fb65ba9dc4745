//! A block in the memory of the node's card: the kernel `spin` of the card computes, packs and unpacks, and messages go
//! from card to card. Tables in card memory say which boxes travel, and where they are in the messages.

use std::marker::PhantomData;

use millstream_application::{ApplicationError, CardMessages, NodeGroup, TimeSplit, allocate_on_card};
use millstream_fabric::{Fabric, FabricError, KernelWords, RegionId};

use super::halo::{self, HaloPeer};
use crate::geometry::{Box3, Geometry};
use crate::kernel::{self, BOX_BYTES, MessageBox, Operation, SpinArguments};
use crate::measure::Sums;
use crate::real::Real;

/// Tables of boxes in card memory.
#[derive(Clone, Copy, Debug)]
struct Table {
    /// Offset in card memory (bytes).
    at: u64,
    boxes: u64,
}

/// A block on the card of this node.
#[derive(Debug)]
pub(super) struct CardBlock<E> {
    arguments: SpinArguments,
    geometry: Geometry,
    messages: CardMessages,
    /// Length of the message to each peer (bytes).
    lengths: Vec<usize>,
    pack: Table,
    unpack: [Table; 2],
    /// A table of one box, and its spins, for messages to and from host memory.
    scratch: RegionId,
    element: PhantomData<E>,
}

/// Spins that travel between host and card at once (bytes), behind the table of one box.
const SCRATCH: usize = 1 << 20;

impl<E: Real> CardBlock<E> {
    /// Allocates a block with its messages and fills it; all nodes call this. The fabric registers memory of the card.
    pub(super) fn new<F: Fabric>(
        group: &mut NodeGroup<F>,
        geometry: Geometry,
        depth: usize,
        threads: usize,
    ) -> Result<CardBlock<E>, ApplicationError> {
        let peers = halo::peers(&geometry, group.dimensions(), group.here());
        let length = |peer: &HaloPeer| -> usize {
            let bytes = |&offset| Geometry::box_bytes(&halo::sent(&geometry, offset), E::BYTES);
            peer.offsets.iter().map(bytes).sum()
        };
        let lengths: Vec<usize> = peers.iter().map(length).collect();
        let nodes: Vec<_> = peers.iter().map(|peer| peer.node).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let timeout = group.timeout();
        let fabric = &mut group.fabric;
        let messages = CardMessages::new(fabric, &nodes, longest, 0, timeout)?;
        let values = geometry.values().and_then(|values| values.checked_mul(E::BYTES)).unwrap_or(usize::MAX);
        let (_, block) = allocate_on_card(fabric, values, "spins and couplings")?;
        let boxes: usize = peers.iter().map(|peer| peer.offsets.len()).sum();
        let (tables, tables_at) = allocate_on_card(fabric, 3 * boxes * BOX_BYTES, "tables")?;
        let (scratch, _) = allocate_on_card(fabric, BOX_BYTES + SCRATCH, "spins")?;
        let arguments = SpinArguments {
            operation: Operation::Fill,
            double: E::BYTES == 8,
            // A kernel has as many threads as an argument can say.
            threads: threads.min(kernel::MAX_THREADS as usize) as u16,
            lattice: *geometry.lattice(),
            extent: *geometry.extent(),
            depth: depth as u64,
            block,
        };
        // The boxes to send, and those of even and odd exchanges to receive.
        let mut lists: [Vec<u8>; 3] = Default::default();
        for (i, peer) in peers.iter().enumerate() {
            let mut add = |list: usize, part: Box3, at: &mut u64| {
                let bytes = Geometry::box_bytes(&part, E::BYTES) as u64;
                lists[list].extend(MessageBox { part, at: *at }.to_bytes());
                *at += bytes;
            };
            let mut at = messages.outgoing_at(i);
            peer.offsets.iter().for_each(|&offset| add(0, halo::sent(&geometry, offset), &mut at));
            for parity in 0..2 {
                let mut at = messages.incoming_at(i, parity);
                // The sender's order of offsets: the reverse of this node's, as they point the other way.
                let parts = peer.offsets.iter().rev().map(|&offset| halo::received(&geometry, offset));
                parts.for_each(|part| add(1 + parity, part, &mut at));
            }
        }
        let mut places = [Table { at: tables_at, boxes: boxes as u64 }; 3];
        for (i, (list, table)) in lists.iter().zip(&mut places).enumerate() {
            let offset = (i * boxes * BOX_BYTES) as u64;
            table.at += offset;
            fabric.store(tables, offset, list)?;
        }
        let [pack, even, odd] = places;
        let (unpack, element) = ([even, odd], PhantomData);
        let block = CardBlock { arguments, geometry, messages, lengths, pack, unpack, scratch, element };
        block.run(fabric, Operation::Fill)?;
        Ok(block)
    }

    /// The layout.
    pub(super) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn run<F: Fabric>(&self, fabric: &mut F, operation: Operation) -> Result<KernelWords, FabricError> {
        fabric.run_kernel(kernel::NAME, &SpinArguments { operation, ..self.arguments }.to_words())
    }

    /// Makes half-sweeps.
    pub(super) fn sweep<F: Fabric>(&self, fabric: &mut F, half_sweeps: usize) -> Result<(), FabricError> {
        self.run(fabric, Operation::Sweep { half_sweeps: half_sweeps as u64 }).map(drop)
    }

    /// Measures the block, whose halos are valid.
    pub(super) fn sums<F: Fabric>(&self, fabric: &mut F) -> Result<Sums, FabricError> {
        Ok(kernel::sums_from_words(&self.run(fabric, Operation::Measure)?))
    }

    /// Fills the halos from the cards of the neighbours.
    pub(super) fn exchange<F: Fabric>(
        &mut self,
        fabric: &mut F,
        times: &mut TimeSplit,
    ) -> Result<(), ApplicationError> {
        times.communicating(|| {
            self.messages.begin(fabric)?;
            self.run(fabric, Operation::Pack { table: self.pack.at, boxes: self.pack.boxes })
        })?;
        let parity = self.messages.exchange(fabric, &self.lengths, times)?;
        let table = self.unpack[parity];
        let unpack = Operation::Unpack { table: table.at, boxes: table.boxes };
        times.communicating(|| self.run(fabric, unpack))?;
        Ok(())
    }

    /// The spins in a box, as of [`Block::pack`](crate::Block::pack).
    pub(super) fn pack<F: Fabric>(&self, fabric: &mut F, part: &Box3) -> Result<Vec<u8>, ApplicationError> {
        let mut bytes = Vec::with_capacity(Geometry::box_bytes(part, E::BYTES));
        for slab in slabs::<E>(part)? {
            let length = Geometry::box_bytes(&slab, E::BYTES);
            let table = self.describe(fabric, slab)?;
            self.run(fabric, Operation::Pack { table, boxes: 1 })?;
            let start = bytes.len();
            bytes.resize(start + length, 0);
            fabric.load(self.scratch, BOX_BYTES as u64, &mut bytes[start..])?;
        }
        Ok(bytes)
    }

    /// Sets the spins in a box from the bytes of [`CardBlock::pack`].
    pub(super) fn unpack<F: Fabric>(
        &self,
        fabric: &mut F,
        part: &Box3,
        bytes: &[u8],
    ) -> Result<(), ApplicationError> {
        let mut rest = bytes;
        for slab in slabs::<E>(part)? {
            let length = Geometry::box_bytes(&slab, E::BYTES);
            let (own, more) =
                rest.split_at_checked(length).ok_or(ApplicationError::Message { bytes: bytes.len() })?;
            fabric.store(self.scratch, BOX_BYTES as u64, own)?;
            let table = self.describe(fabric, slab)?;
            self.run(fabric, Operation::Unpack { table, boxes: 1 })?;
            rest = more;
        }
        Ok(())
    }

    /// Writes the table of one box in the scratch memory. Returns its offset in card memory.
    fn describe<F: Fabric>(&self, fabric: &mut F, part: Box3) -> Result<u64, FabricError> {
        let none = FabricError::CardLost { node: fabric.here() };
        let table = fabric.card_offset(self.scratch).ok_or(none)?;
        let place = MessageBox { part, at: table + BOX_BYTES as u64 };
        fabric.store(self.scratch, 0, &place.to_bytes())?;
        Ok(table)
    }
}

/// A box in pieces whose spins fit into the scratch memory, in the order of their bytes.
fn slabs<E: Real>(part: &Box3) -> Result<Vec<Box3>, ApplicationError> {
    let [x, y, z] = part.clone();
    let row = Geometry::box_bytes(&[x.clone(), 0..1, 0..1], E::BYTES);
    if row > SCRATCH {
        let reason = format!("rows of {} sites are too long for a block on a card", x.len());
        return Err(ApplicationError::Parameters(reason));
    }
    let rows = (SCRATCH / row.max(1)).min(y.len().max(1));
    let mut slabs = Vec::new();
    for z in z {
        for start in y.clone().step_by(rows) {
            slabs.push([x.clone(), start..(start + rows as isize).min(y.end), z..z + 1]);
        }
    }
    Ok(slabs)
}
