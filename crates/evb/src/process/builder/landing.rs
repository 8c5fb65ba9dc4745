//! Landing memory of a builder unit: slots on the host or on a card.

use crate::config::{LandingCard, LandingTarget, RunConfig};
use crate::core::{BuIndex, SlotIndex};
use crate::process::ProcessError;
use crate::process::card;
use millstream_card::Card;
use millstream_card_abi::MemoryRange;
use millstream_rdma::{Access, Device, Region, RemoteMemory};
use millstream_shm::Mapping;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How long to wait for a card. Less than the time within which a run without a launcher has to end.
const CARD_TIMEOUT: Duration = Duration::from_secs(3);

/// Landing memory, registered for the readout units.
pub(super) struct LandingMemory {
    memory: Memory,
    /// The slots. Readout units can write only these.
    slots: Region,
}

enum Memory {
    Host,
    /// A card, and the epoch of its lease.
    Card(Card, u32),
}

/// An access outside of landing memory: a bug.
#[derive(Debug, thiserror::Error)]
#[error("{len} bytes at offset {offset} are outside of landing memory")]
pub(super) struct OutsideLandingMemory {
    offset: u64,
    len: usize,
}

impl LandingMemory {
    /// Opens the card if there is one, registers the slots, and allocates all pages.
    pub(super) fn open(
        config: &RunConfig,
        bu: BuIndex,
        device: &Device,
    ) -> Result<LandingMemory, ProcessError> {
        let slots = config.plan.slots[bu.index()].get();
        let len = config.layout.slot_offset(SlotIndex(slots));
        match &config.builders[bu.index()].landing {
            LandingTarget::Host => {
                let slots = Region::landing(device, c"millstream-slots", len as usize, Access::REMOTE_WRITE)?;
                slots.populate().map_err(|cause| ProcessError::Io {
                    operation: "allocate the pages of the slots",
                    cause,
                })?;
                Ok(LandingMemory { memory: Memory::Host, slots })
            }
            LandingTarget::Card(wanted) => {
                let card = Card::open(&card::name(config, wanted)?, CARD_TIMEOUT)?;
                // The card is leased to this process until it ends.
                let epoch = card
                    .acquire(CARD_TIMEOUT)
                    .map_err(|error| card::unfit(&wanted.name, error.to_string()))?;
                let needed = config.landing_bytes(bu.index()).0;
                check_memory(wanted, &card, needed)?;
                card.memory()
                    .prefault(MemoryRange::new(0, needed))
                    .map_err(|error| card::unfit(&wanted.name, error.to_string()))?;
                let slots = register(device, &card, len as usize)?;
                Ok(LandingMemory { memory: Memory::Card(card, epoch), slots })
            }
        }
    }

    /// The card, if landing memory is on one.
    pub(super) fn card(&self) -> Option<&Card> {
        match &self.memory {
            Memory::Host => None,
            Memory::Card(card, _) => Some(card),
        }
    }

    /// Whether the memory is still this unit's: the lease of its card has not ended.
    pub(super) fn is_leased(&self) -> bool {
        match &self.memory {
            Memory::Host => true,
            Memory::Card(card, epoch) => card.holds(*epoch),
        }
    }

    /// Address and key for the readout units.
    pub(super) fn remote(&self) -> RemoteMemory {
        self.slots.remote()
    }

    /// Copies bytes into landing memory.
    pub(super) fn write(&self, offset: u64, from: &[u8]) -> Result<(), OutsideLandingMemory> {
        let len = from.len();
        let written = match &self.memory {
            Memory::Host => self.slots.copy_from_slice(offset, from).is_ok(),
            Memory::Card(card, _) => card.memory().write(offset, from).is_ok(),
        };
        if written { Ok(()) } else { Err(OutsideLandingMemory { offset, len }) }
    }

    /// The file behind landing memory, which starts with the slots, for processes of this host.
    pub(super) fn descriptor(&self) -> Result<BorrowedFd<'_>, ProcessError> {
        match &self.memory {
            Memory::Card(card, _) => Ok(card.memory_fd()),
            Memory::Host => self.slots.landing_fd().ok_or(ProcessError::Io {
                operation: "share the slots with the software trigger",
                cause: std::io::ErrorKind::Unsupported.into(),
            }),
        }
    }

    /// Landing memory in this process; it starts with the slots.
    pub(super) fn mapping(&self) -> Result<&Mapping, OutsideLandingMemory> {
        match &self.memory {
            Memory::Card(card, _) => Ok(card.memory().mapping()),
            Memory::Host => self.slots.mapping().ok_or(OutsideLandingMemory { offset: 0, len: 0 }),
        }
    }

    /// Copies bytes out of landing memory.
    pub(super) fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), OutsideLandingMemory> {
        let len = to.len();
        let read = match &self.memory {
            Memory::Host => self.slots.copy_to_slice(offset, to).is_ok(),
            Memory::Card(card, _) => card.memory().read(offset, to).is_ok(),
        };
        if read { Ok(()) } else { Err(OutsideLandingMemory { offset, len }) }
    }
}

/// Registers the first bytes of a card's memory for the readout units.
///
/// The memory of an emulated card is no dma-buf: only the soft device takes its descriptor. An adapter gets the mapping,
/// whose pages it pins. The descriptor of a GPU's memory is for its drivers, so the soft device gets the mapping as well.
fn register(device: &Device, card: &Card, len: usize) -> Result<Region, ProcessError> {
    if !device.is_soft() || card.is_gpu() {
        let mapping = card.memory().mapping().clone();
        return Ok(Region::mapped(device, mapping, 0, len, Access::REMOTE_WRITE)?);
    }
    let descriptor = card.memory_fd().try_clone_to_owned().map_err(|cause| ProcessError::Io {
        operation: "duplicate the descriptor of the card's memory",
        cause,
    })?;
    Ok(Region::dmabuf(device, descriptor, 0, len, Access::REMOTE_WRITE)?)
}

fn check_memory(wanted: &LandingCard, card: &Card, needed: u64) -> Result<(), ProcessError> {
    let size = card.memory().size();
    if size < needed {
        return Err(card::unfit(&wanted.name, format!("has {size} B of memory, needs {needed} B")));
    }
    Ok(())
}
