//! All nodes of a torus as machines on one thread.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use millstream_quantity::Instant;
use millstream_torus_core::header::HEADER_BYTES;
use millstream_torus_core::route::VirtualChannel;
use millstream_torus_core::router::SlotRef;
use millstream_torus_core::{Dimensions, Direction, Header, NodeNumber};

use crate::engine::{Engine, EngineOptions, Links, Payload};
use crate::layout::{slot_offset, slots_bytes};
use crate::memory::Memory;

enum Frame {
    Packet { slot: u16, header: Header },
    Credits([u32; VirtualChannel::COUNT]),
}

/// Links by copies between the nodes' slots.
struct LocalLinks<'w> {
    torus: Dimensions,
    here: NodeNumber,
    options: EngineOptions,
    slots: &'w [Arc<Memory>],
    frames: &'w mut VecDeque<(NodeNumber, Direction, Frame)>,
}

impl Links for LocalLinks<'_> {
    fn is_ready(&self, _: Direction) -> bool {
        true
    }

    fn send(&mut self, direction: Direction, slot: u16, header: &Header, payload: Payload<'_>) -> bool {
        // A router transmits over live links only.
        let Some(to) = self.torus.neighbour(self.here, direction) else { return true };
        let side = direction.reversed();
        let place = SlotRef { side, vc: header.vc, index: slot };
        let at = slot_offset(&self.options, place) + HEADER_BYTES as u64;
        let there = &self.slots[to.index()];
        let copied = match payload {
            Payload::Bytes(bytes) => there.store(at, bytes),
            Payload::Memory { memory, offset, length } => there.copy_from(at, memory, offset, length.into()),
            Payload::Slot { slot, length } => {
                let from = slot_offset(&self.options, slot) + HEADER_BYTES as u64;
                there.copy_from(at, &self.slots[self.here.index()], from, length.into())
            }
        };
        if let Err(error) = copied {
            tracing::error!("{}: {error}", self.here);
        }
        self.frames.push_back((to, side, Frame::Packet { slot, header: *header }));
        true
    }

    fn send_credits(&mut self, direction: Direction, freed: [u32; VirtualChannel::COUNT]) {
        if let Some(to) = self.torus.neighbour(self.here, direction) {
            self.frames.push_back((to, direction.reversed(), Frame::Credits(freed)));
        }
    }

    fn slot(&self, slot: SlotRef) -> (&Memory, u64) {
        (&self.slots[self.here.index()], slot_offset(&self.options, slot) + HEADER_BYTES as u64)
    }
}

/// A whole torus on one thread.
pub struct InProcessTorus {
    torus: Dimensions,
    options: EngineOptions,
    /// The nodes, by number.
    pub nodes: Vec<Engine>,
    slots: Vec<Arc<Memory>>,
    frames: VecDeque<(NodeNumber, Direction, Frame)>,
}

impl InProcessTorus {
    /// A torus whose links are all up.
    ///
    /// # Errors
    /// The system has no memory for the receive slots.
    pub fn new(torus: Dimensions, options: EngineOptions) -> io::Result<InProcessTorus> {
        let slots = (torus.all())
            .map(|_| Ok(Arc::new(Memory::allocate("millstream-torus-slots", slots_bytes(&options), None)?.0)))
            .collect::<io::Result<_>>()?;
        let mut nodes: Vec<_> = torus.all().map(|node| Engine::new(torus, node, options)).collect();
        for (engine, node) in nodes.iter_mut().zip(torus.all()) {
            for direction in Direction::ALL {
                engine.set_link(direction, torus.neighbour(node, direction).is_some());
            }
        }
        Ok(InProcessTorus { torus, options, nodes, slots, frames: VecDeque::new() })
    }

    /// Lets every node move what it can, and carries the frames. Returns whether anything moved.
    pub fn step(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for node in self.torus.all() {
            self.nodes[node.index()].handle_time(now);
            moved |= self.run_node(node);
        }
        while let Some((to, side, frame)) = self.frames.pop_front() {
            let engine = &mut self.nodes[to.index()];
            let done = match frame {
                Frame::Packet { slot, header } => {
                    engine.handle_packet(side, slot, header).map_err(|error| error.to_string())
                }
                Frame::Credits(freed) => {
                    engine.handle_credits(side, freed).map_err(|error| error.to_string())
                }
            };
            if let Err(error) = done {
                tracing::error!("{to}: {error}");
            }
            moved = true;
        }
        moved
    }

    fn run_node(&mut self, here: NodeNumber) -> bool {
        let mut links = LocalLinks {
            torus: self.torus,
            here,
            options: self.options,
            slots: &self.slots,
            frames: &mut self.frames,
        };
        self.nodes[here.index()].run(&mut links)
    }
}
