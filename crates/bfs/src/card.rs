//! The steps of a search on the card of a node: the kernel `bfs` searches, and messages go from card to card.

use std::time::Duration;

use millstream_application::{CardMessages, HEADER_BYTES, Place, TimeSplit, allocate_on_card, attach};
use millstream_fabric::{AllToAll, ExchangeStatistics, Fabric, FabricError, KernelWords, RegionId};
use millstream_torus_core::NodeNumber;

use crate::column::Column;
use crate::distribution::Distribution;
use crate::graph::Graph;
use crate::job::BfsError;
use crate::kernel::{self, ARRAYS, Description, MORE, Operation, PeerMessages, array_counts, least_room};
use crate::network::{FIRST_COUNTER, Network};
use crate::search::SearchSteps;
use crate::traversal::Found;
use crate::validate::Claim;

/// Most bytes of a message top-down; a level whose children take more goes in rounds.
const MESSAGE: u64 = 1 << 20;
/// Bytes that are copied between host and card at once.
const CHUNK: usize = 1 << 20;

/// A search in the memory of the node's card.
#[derive(Debug)]
pub struct CardSearch<C> {
    distribution: Distribution,
    parents: RegionId,
    levels: RegionId,
    messages: CardMessages,
    times: TimeSplit,
    columns: std::marker::PhantomData<C>,
}

impl<C: Column> CardSearch<C> {
    /// Moves a graph to the card of this node. All nodes do so together.
    ///
    /// # Errors
    /// [`BfsError`] of the card or the network.
    pub fn new<F: Fabric>(
        network: &mut Network<'_, F>,
        graph: &Graph<C>,
        timeout: Duration,
    ) -> Result<CardSearch<C>, BfsError> {
        let distribution = graph.distribution;
        let (here, torus) = (network.fabric.here(), network.fabric.dimensions());
        let peers: Vec<NodeNumber> = torus.all().filter(|&node| node != here).collect();
        // Each child is sent to its owner once.
        let all_children = 2 * C::BYTES as u64 * distribution.count(0);
        let children = HEADER_BYTES as u64 + all_children.min(MESSAGE);
        let longest = least_room(&distribution, C::BYTES).max(children) as usize;
        let first_counter = FIRST_COUNTER + AllToAll::counters(&torus);
        let fabric = &mut *network.fabric;
        let messages = CardMessages::new(fabric, &peers, longest, first_counter, timeout)?;
        let rest = array_counts(&distribution);
        let [starts, columns] = [graph.rows.starts.len(), graph.rows.columns.len()];
        let mut counts = vec![starts as u64, columns as u64];
        counts.extend(rest);
        let sizes = [8, C::BYTES, 8, 8, 8, 8, 8, C::BYTES, 4];
        let mut regions = [RegionId(0); ARRAYS];
        let mut arrays = [Place::default(); ARRAYS];
        for (i, (count, size)) in counts.into_iter().zip(sizes).enumerate() {
            let (region, at) = allocate_on_card(fabric, count as usize * size, "the graph")?;
            (regions[i], arrays[i]) = (region, Place { at, count });
        }
        store(fabric, regions[0], &graph.rows.starts, |start, bytes| bytes.extend(start.to_le_bytes()))?;
        store(fabric, regions[1], &graph.rows.columns, Column::append)?;
        let of_peer = |(i, node): (usize, &NodeNumber)| PeerMessages {
            node: node.0,
            outgoing: messages.outgoing_at(i),
            incoming: [0, 1].map(|parity| messages.incoming_at(i, parity)),
        };
        let description = Description {
            vertices: distribution.vertices(),
            // A torus numbers its nodes with 16 bits.
            nodes: distribution.nodes() as u16,
            here: here.0,
            column_bytes: C::BYTES,
            arrays,
            room: messages.room(),
            peers: peers.iter().enumerate().map(of_peer).collect(),
        };
        attach(fabric, kernel::NAME, &description, "the description of the graph", |at, bytes| {
            Operation::Attach { at, bytes }.to_words()
        })?;
        Ok(CardSearch {
            distribution,
            parents: regions[ARRAYS - 2],
            levels: regions[ARRAYS - 1],
            messages,
            times: TimeSplit::default(),
            columns: std::marker::PhantomData,
        })
    }

    /// Lets the kernel write messages, and exchanges them. Returns the parity.
    fn exchange<F: Fabric>(&mut self, fabric: &mut F, write: Operation) -> Result<u64, BfsError> {
        self.times.communicating(|| self.messages.begin(fabric))?;
        run(fabric, write)?;
        let room = self.messages.room();
        let length = |header: u64| (HEADER_BYTES as u64 + (header & !MORE)).min(room) as usize;
        Ok(self.messages.exchange_with_headers(fabric, length, &mut self.times)? as u64)
    }
}

impl<F: Fabric, C: Column> SearchSteps<F> for CardSearch<C> {
    fn start(&mut self, network: &mut Network<'_, F>, root: u64) -> Result<u64, BfsError> {
        Ok(run(network.fabric, Operation::Start { root })?[0])
    }

    fn top_down(&mut self, network: &mut Network<'_, F>, level: u32) -> Result<Found, BfsError> {
        loop {
            let parity = self.exchange(network.fabric, Operation::Scan { level })?;
            let results = run(network.fabric, Operation::Receive { parity, level })?;
            let [more, vertices, entries, ..] = results;
            if more == 0 {
                return Ok(Found { vertices, entries });
            }
        }
    }

    fn bottom_up(&mut self, network: &mut Network<'_, F>, level: u32) -> Result<Found, BfsError> {
        let parity = self.exchange(network.fabric, Operation::Frontier)?;
        let [_, vertices, entries, ..] = run(network.fabric, Operation::BottomUp { parity, level })?;
        Ok(Found { vertices, entries })
    }

    fn claim(&mut self, network: &mut Network<'_, F>) -> Result<Claim, BfsError> {
        let own = self.distribution.own_count() as usize;
        let parents: Vec<C> = load(network.fabric, self.parents, own, C::BYTES, C::read)?;
        let read = |bytes: &[u8]| u32::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        Ok(Claim::of(&parents, &load(network.fabric, self.levels, own, 4, read)?))
    }

    fn statistics(&self) -> ExchangeStatistics {
        let TimeSplit { communicate, wait, messages, bytes, .. } = self.times;
        ExchangeStatistics { communicate, wait, messages, bytes }
    }
}

fn run<F: Fabric>(fabric: &mut F, operation: Operation) -> Result<KernelWords, FabricError> {
    fabric.run_kernel(kernel::NAME, &operation.to_words())
}

/// Copies values to a region.
fn store<F: Fabric, T: Copy>(
    fabric: &F,
    region: RegionId,
    values: &[T],
    append: impl Fn(T, &mut Vec<u8>),
) -> Result<(), FabricError> {
    let (mut bytes, mut at) = (Vec::with_capacity(CHUNK), 0);
    for part in values.chunks(CHUNK / 8) {
        bytes.clear();
        part.iter().for_each(|&value| append(value, &mut bytes));
        fabric.store(region, at, &bytes)?;
        at += bytes.len() as u64;
    }
    Ok(())
}

/// Copies values of `size` bytes from a region.
fn load<F: Fabric, T>(
    fabric: &F,
    region: RegionId,
    count: usize,
    size: usize,
    read: impl Fn(&[u8]) -> T,
) -> Result<Vec<T>, FabricError> {
    let mut values = Vec::with_capacity(count);
    let mut bytes = vec![0; CHUNK / size * size];
    while values.len() < count {
        let part = (count - values.len()).min(bytes.len() / size);
        let bytes = &mut bytes[..part * size];
        fabric.load(region, (values.len() * size) as u64, bytes)?;
        values.extend(bytes.chunks_exact(size).map(&read));
    }
    Ok(values)
}
