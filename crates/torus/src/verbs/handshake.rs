//! What two neighbours tell each other before they connect. Both have proved that they know the run's key.

use millstream_rdma::RemoteMemory;
use millstream_torus_core::{Dimensions, Direction, NodeNumber};
use serde::{Deserialize, Serialize};

use crate::engine::EngineOptions;

const VERSION: u32 = 3;

/// A node, and the torus that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    version: u32,
    dimensions: String,
    node: u16,
    /// Direction of the link, as this node sees it.
    direction: u8,
    packet: u32,
    slots: u16,
    slot_memory: Vec<u8>,
    credit_memory: Vec<u8>,
}

/// Why a neighbour is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the neighbour has {field} = {found}, but this node expects {expected}")]
pub struct Mismatch {
    /// The field.
    pub field: &'static str,
    /// The neighbour's value.
    pub found: String,
    /// The expected value.
    pub expected: String,
}

/// A torus and a node of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalEnd {
    pub(super) torus: Dimensions,
    pub(super) here: NodeNumber,
    pub(super) options: EngineOptions,
}

impl Identity {
    pub(super) fn new(
        local: &LocalEnd,
        direction: Direction,
        slots: RemoteMemory,
        credits: RemoteMemory,
    ) -> Identity {
        Identity {
            version: VERSION,
            dimensions: local.torus.to_string(),
            node: local.here.0,
            direction: direction.index() as u8,
            packet: local.options.packet,
            slots: local.options.slots,
            slot_memory: slots.encode().to_vec(),
            credit_memory: credits.encode().to_vec(),
        }
    }

    /// Checks the neighbour in a direction. Returns its slots and credits.
    pub(super) fn check(
        &self,
        local: &LocalEnd,
        direction: Direction,
    ) -> Result<(RemoteMemory, RemoteMemory), Mismatch> {
        let neighbour = local.torus.neighbour(local.here, direction).unwrap_or_default();
        let fields: [(&'static str, String, String); 6] = [
            ("version", self.version.to_string(), VERSION.to_string()),
            ("dimensions", self.dimensions.clone(), local.torus.to_string()),
            ("node", self.node.to_string(), neighbour.0.to_string()),
            ("direction", self.direction.to_string(), direction.reversed().index().to_string()),
            ("packet", self.packet.to_string(), local.options.packet.to_string()),
            ("slots", self.slots.to_string(), local.options.slots.to_string()),
        ];
        for (field, found, expected) in fields {
            if found != expected {
                return Err(Mismatch { field, found, expected });
            }
        }
        let memory = |field, bytes: &[u8]| {
            let whole: Result<[u8; RemoteMemory::ENCODED_LEN], _> = bytes.try_into();
            whole.map(|bytes| RemoteMemory::decode(&bytes)).map_err(|_| Mismatch {
                field,
                found: format!("{} bytes", bytes.len()),
                expected: format!("{} bytes", RemoteMemory::ENCODED_LEN),
            })
        };
        Ok((memory("slot memory", &self.slot_memory)?, memory("credit memory", &self.credit_memory)?))
    }
}
