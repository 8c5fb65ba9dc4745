//! The exchange of bytes among all applications, over mailboxes that exist before any application does.
//!
//! A mailbox has two slots for each node, used in turn: nobody is two rounds ahead, because a round needs a block of every
//! node. A round carries one block of each; the first one tells how many more follow.

use std::time::{Duration, Instant};

use millstream_fabric::{COUNTERS, Fabric, FabricError, FirstError, Notification, RegionId};
use millstream_torus_core::NodeNumber;

use crate::application::TorusNode;
use crate::initiator::Initiator as _;
use crate::memory::Memory;

/// Bytes of a block.
const BLOCK: usize = 1016;
const SLOT: usize = 8 + BLOCK;

/// Size of a mailbox.
#[must_use]
pub(crate) fn mailbox_bytes(nodes: usize) -> usize {
    2 * nodes * SLOT
}

/// State of an application's exchanges.
#[derive(Debug)]
pub(crate) struct Exchange {
    region: RegionId,
    mailbox: Memory,
    nodes: usize,
    round: u64,
    /// Expected values of the two counters.
    expected: [u64; 2],
    failure: FirstError,
}

impl Exchange {
    pub(crate) fn new(region: RegionId, mailbox: Memory, nodes: usize) -> Exchange {
        Exchange { region, mailbox, nodes, round: 0, expected: [0; 2], failure: FirstError::default() }
    }

    fn slot(&self, node: NodeNumber) -> u64 {
        (((self.round % 2) as usize * self.nodes + node.index()) * SLOT) as u64
    }

    /// Round and total length of the newest block of a node in this round's slot.
    fn block_head(&self, node: NodeNumber) -> (u32, u32) {
        let mut head = [0; 8];
        // A mailbox has a slot for each node.
        let _ = self.mailbox.load(self.slot(node), &mut head);
        let word = u64::from_le_bytes(head);
        ((word >> 32) as u32, word as u32)
    }

    fn read_block(&self, node: NodeNumber, into: &mut [u8]) {
        let _ = self.mailbox.load(self.slot(node) + 8, into);
    }
}

/// Gives every node the bytes of all nodes.
pub(crate) fn run(
    node: &mut TorusNode,
    bytes: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>, FabricError> {
    node.exchange_ref().failure.check()?;
    let all = exchange(node, bytes, timeout);
    node.exchange_state().failure.keep(all)
}

fn exchange(node: &mut TorusNode, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
    let start = Instant::now();
    let torus = node.dimensions();
    let mut all = vec![Vec::new(); torus.nodes()];
    let mut rounds = 1;
    let mut done = 0;
    while done < rounds {
        let left = timeout.saturating_sub(start.elapsed());
        let from = (done * BLOCK).min(bytes.len());
        let part = &bytes[from..bytes.len().min(from + BLOCK)];
        send_block(node, bytes.len(), part)?;
        await_blocks(node, left, timeout)?;
        for from in torus.all() {
            let length = node.exchange_state().block_head(from).1 as usize;
            rounds = rounds.max(length.div_ceil(BLOCK));
            let have = all[from.index()].len();
            let mut block = vec![0; (length - have.min(length)).min(BLOCK)];
            node.exchange_state().read_block(from, &mut block);
            all[from.index()].extend(block);
        }
        node.exchange_state().round += 1;
        done += 1;
    }
    Ok(all)
}

fn send_block(node: &mut TorusNode, total: usize, part: &[u8]) -> Result<(), FabricError> {
    let (here, torus) = (node.here(), node.dimensions());
    let state = node.exchange_state();
    let (region, at, parity) = (state.region, state.slot(here), (state.round % 2) as u16);
    // Rounds count from 1, so that an empty slot has none.
    let mut block = ((state.round + 1) << 32 | total as u64).to_le_bytes().to_vec();
    block.extend(part);
    let one = Notification::Counter { index: COUNTERS + parity, add: 1 };
    for to in torus.all() {
        node.put_bytes(to, region, at, &block, one)?;
    }
    Ok(())
}

fn await_blocks(node: &mut TorusNode, left: Duration, timeout: Duration) -> Result<(), FabricError> {
    let torus = node.dimensions();
    let state = node.exchange_state();
    let (parity, round) = ((state.round % 2) as usize, state.round as u32 + 1);
    state.expected[parity] += torus.nodes() as u64;
    let value = state.expected[parity];
    let missing = |node: &TorusNode| {
        torus.all().find(|&other| node.control().is_lost(other) && node.newest_round(other) != round)
    };
    let waited = node.wait_for_counter(COUNTERS + parity as u16, value, left, missing);
    waited.map_err(|error| match error {
        FabricError::TimedOut { .. } => FabricError::TimedOut { waited: timeout },
        other => other,
    })
}

impl TorusNode {
    fn newest_round(&self, node: NodeNumber) -> u32 {
        self.exchange_ref().block_head(node).0
    }
}
