//! Access to the registers of a remote card: reads, lease words, control window, doorbells.

use millstream_rdma::Rkey;
use millstream_rdma::memory::RemoteMemory;
use millstream_rdma::queue::Signal;
use millstream_rdma::{RemoteAddress, WrId};

use super::{BAR0_AT, Inner, Result, WORD_AT};
use crate::control::region_register;
use crate::remote::{RemoteCard, RemoteError};
use millstream_card_abi::codes::RegionState;
use millstream_card_abi::command::CAPABILITY_POLLING;
use millstream_card_abi::hello::ServerHello;
use millstream_card_abi::registers::{BAR0_BYTES, CONTROL_WINDOW, LEASE_PAGE, region_at};

impl RemoteCard {
    /// Reads all of BAR0.
    pub fn snapshot(&self) -> std::result::Result<Snapshot, RemoteError> {
        self.with(|inner| inner.snapshot())
    }

    /// Reads the 8 bytes at `offset` of BAR0: one register word of 64 bits, or two of 32 bits.
    pub fn register(&self, offset: usize) -> std::result::Result<u64, RemoteError> {
        self.with(|inner| inner.register(offset))
    }

    /// Writes words of the control window; `offset` counts from the start of BAR0.
    pub fn write_control(&self, offset: usize, bytes: &[u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let written = inner.write_control(offset, bytes, Signal::Yes)?;
            inner.finish(written)
        })
    }
}

impl Inner {
    pub(super) fn bar0(&self) -> RemoteMemory {
        let ServerHello { bar0_addr, bar0_key, .. } = self.hello;
        RemoteMemory { addr: bar0_addr, rkey: Rkey::new(bar0_key), len: BAR0_BYTES as u64 }
    }

    pub(super) fn lease_words(&self) -> RemoteMemory {
        let addr = self.hello.bar0_addr + LEASE_PAGE.start as u64;
        RemoteMemory { addr, rkey: Rkey::new(self.hello.lease_key), len: LEASE_PAGE.len() as u64 }
    }

    pub(super) fn read_bar0(&mut self, offset: usize, len: usize) -> Result<()> {
        let from = self.bar0().at(offset as u64, len as u64)?;
        let sge = self.scratch.sge(BAR0_AT + offset as u64, len as u32)?;
        let wr_id = self.next_wr_id();
        self.queue_pair.post_read(&[sge], from, Signal::Yes, wr_id)?;
        self.finish(wr_id)
    }

    pub(crate) fn register(&mut self, offset: usize) -> Result<u64> {
        self.read_bar0(offset, 8)?;
        let mut word = [0; 8];
        self.scratch.copy_to_slice(BAR0_AT + offset as u64, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    pub(crate) fn snapshot(&mut self) -> Result<Snapshot> {
        self.read_bar0(0, BAR0_BYTES)?;
        let mut bytes = vec![0; BAR0_BYTES].into_boxed_slice();
        self.scratch.copy_to_slice(BAR0_AT, &mut bytes)?;
        Ok(Snapshot { bytes })
    }

    /// Executes compare-and-swap on a lease word and returns its previous value.
    pub(super) fn compare_swap(&mut self, offset: usize, compare: u64, swap: u64) -> Result<u64> {
        let word = self.lease_words().at((offset - LEASE_PAGE.start) as u64, 8)?;
        let sge = self.scratch.sge(WORD_AT, 8)?;
        let wr_id = self.next_wr_id();
        self.queue_pair.post_compare_swap(sge, word, (compare, swap), wr_id)?;
        self.finish(wr_id)?;
        let mut was = [0; 8];
        self.scratch.copy_to_slice(WORD_AT, &mut was)?;
        Ok(u64::from_ne_bytes(was))
    }

    /// Rings a doorbell by immediate data, without writing a register.
    pub(crate) fn notify(&mut self, imm: u32) -> Result<()> {
        // The responder does not check the key of an empty write (IBTA volume 1, 9.7.4.1.5).
        let nowhere = RemoteAddress { addr: 0, rkey: Rkey::new(0) };
        let wr_id = self.next_wr_id();
        self.queue_pair.post_write_imm(&[], nowhere, imm, Signal::Yes, wr_id)?;
        self.finish(wr_id)
    }

    /// Writes to the control window. Wait for a signaled request with [`Inner::finish`].
    pub(crate) fn write_control(&mut self, offset: usize, bytes: &[u8], signal: Signal) -> Result<WrId> {
        let control = self.lease()?.control;
        let inside = offset.wrapping_sub(CONTROL_WINDOW.start) as u64;
        let to = control.at(inside, bytes.len() as u64)?;
        let wr_id = if signal == Signal::Yes { self.next_wr_id() } else { WrId(0) };
        if bytes.len() <= self.queue_pair.max_inline() as usize {
            self.queue_pair.post_write_inline(bytes, to, signal, wr_id)?;
            return Ok(wr_id);
        }
        // The buffer for snapshots of BAR0 is free.
        self.scratch.copy_from_slice(BAR0_AT, bytes)?;
        let sge = self.scratch.sge(BAR0_AT, bytes.len() as u32)?;
        self.queue_pair.post_write(&[sge], to, signal, wr_id)?;
        Ok(wr_id)
    }

    /// Writes a doorbell register. A card that does not poll, or `always`, also gets `imm` as immediate data.
    pub(crate) fn doorbell(&mut self, offset: usize, word: u64, imm: u32, always: bool) -> Result<WrId> {
        if self.hello.capabilities & CAPABILITY_POLLING != 0 && !always {
            return self.write_control(offset, &word.to_le_bytes(), Signal::Yes);
        }
        let control = self.lease()?.control;
        let to = control.at((offset - CONTROL_WINDOW.start) as u64, 8)?;
        self.scratch.copy_from_slice(WORD_AT + 8, &word.to_le_bytes())?;
        let sge = self.scratch.sge(WORD_AT + 8, 8)?;
        let wr_id = self.next_wr_id();
        self.queue_pair.post_write_imm(&[sge], to, imm, Signal::Yes, wr_id)?;
        Ok(wr_id)
    }
}

/// A copy of BAR0. Each word is consistent; words of different registers may be of different moments.
#[derive(Clone)]
pub struct Snapshot {
    bytes: Box<[u8]>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Snapshot({} bytes)", self.bytes.len())
    }
}

impl Snapshot {
    /// The 64-bit word at `offset`.
    ///
    /// # Panics
    /// If the word is not in BAR0.
    pub fn u64_at(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.bytes[offset..offset + 8].try_into().expect("8 bytes"))
    }

    /// The 32-bit word at `offset`.
    ///
    /// # Panics
    /// If the word is not in BAR0.
    pub fn u32_at(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.bytes[offset..offset + 4].try_into().expect("4 bytes"))
    }

    /// State of a region; `None` for one of a later version.
    ///
    /// # Panics
    /// If there is no such region in BAR0.
    pub fn region_state(&self, region: u32) -> Option<RegionState> {
        RegionState::from_code(self.u32_at(region_register(region, region_at::status)))
    }

    /// Bytes of BAR0.
    ///
    /// # Panics
    /// If the range is not in BAR0.
    pub fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        &self.bytes[offset..offset + len]
    }
}
