//! A remote card's registers: reading them, swapping lease words, writing the control window, doorbells.

use millstream_rdma::Rkey;
use millstream_rdma::memory::RemoteMemory;
use millstream_rdma::queue::Signal;
use millstream_rdma::{RemoteAddress, WrId};

use super::{BAR0_AT, Inner, RemoteCard, RemoteError, Result, WORD_AT};
use crate::command::CAPABILITY_SPINS;
use crate::net::Greeting;
use crate::registers::{BAR0_BYTES, CONTROL_WINDOW, LEASE_PAGE};

impl RemoteCard {
    /// Copies all of BAR0, as a [`Snapshot`].
    pub fn snapshot(&self) -> std::result::Result<Snapshot, RemoteError> {
        self.with(|inner| inner.snapshot())
    }

    /// Reads a register word of 64 bits (or the two of 32 bits that stand there).
    pub fn register(&self, offset: usize) -> std::result::Result<u64, RemoteError> {
        self.with(|inner| inner.register(offset))
    }

    /// Writes words of the control window, whose registers have `offset` in BAR0.
    pub fn control(&self, offset: usize, bytes: &[u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let written = inner.control(offset, bytes, Signal::Yes)?;
            inner.finish(written)
        })
    }
}

impl Inner {
    pub(super) fn bar0(&self) -> RemoteMemory {
        let Greeting { bar0_addr, bar0_key, .. } = self.greeting;
        RemoteMemory { addr: bar0_addr, rkey: Rkey::new(bar0_key), len: BAR0_BYTES as u64 }
    }

    pub(super) fn lease_words(&self) -> RemoteMemory {
        let addr = self.greeting.bar0_addr + LEASE_PAGE.start as u64;
        RemoteMemory { addr, rkey: Rkey::new(self.greeting.lease_key), len: LEASE_PAGE.len() as u64 }
    }

    pub(super) fn read_bar0(&mut self, offset: usize, len: usize) -> Result<()> {
        let from = self.bar0().at(offset as u64, len as u64)?;
        let sge = self.scratch.sge(BAR0_AT + offset as u64, len as u32)?;
        let ticket = self.ticket();
        self.pair.post_read(&[sge], from, Signal::Yes, ticket)?;
        self.finish(ticket)
    }

    pub(in crate::net) fn register(&mut self, offset: usize) -> Result<u64> {
        self.read_bar0(offset, 8)?;
        let mut word = [0; 8];
        self.scratch.copy_to_slice(BAR0_AT + offset as u64, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    pub(in crate::net) fn snapshot(&mut self) -> Result<Snapshot> {
        self.read_bar0(0, BAR0_BYTES)?;
        let mut bytes = vec![0; BAR0_BYTES].into_boxed_slice();
        self.scratch.copy_to_slice(BAR0_AT, &mut bytes)?;
        Ok(Snapshot { bytes })
    }

    /// Swaps a lease word and returns what it was.
    pub(super) fn swap(&mut self, offset: usize, compare: u64, swap: u64) -> Result<u64> {
        let word = self.lease_words().at((offset - LEASE_PAGE.start) as u64, 8)?;
        let sge = self.scratch.sge(WORD_AT, 8)?;
        let ticket = self.ticket();
        self.pair.post_compare_swap(sge, word, (compare, swap), ticket)?;
        self.finish(ticket)?;
        let mut was = [0; 8];
        self.scratch.copy_to_slice(WORD_AT, &mut was)?;
        Ok(u64::from_ne_bytes(was))
    }

    /// Makes the card look at its lease words and control registers, or at what else `imm` names.
    pub(in crate::net) fn kick(&mut self, imm: u32) -> Result<()> {
        // Without bytes no key is looked at (IBTA volume 1, 9.7.4.1.5).
        let nowhere = RemoteAddress { addr: 0, rkey: Rkey::new(0) };
        let ticket = self.ticket();
        self.pair.post_write_imm(&[], nowhere, imm, Signal::Yes, ticket)?;
        self.finish(ticket)
    }

    /// Writes to the control window. The request that does it is waited for with [`Inner::finish`] if it is
    /// signaled.
    pub(in crate::net) fn control(&mut self, offset: usize, bytes: &[u8], signal: Signal) -> Result<WrId> {
        let control = self.lease()?.control;
        let inside = offset.wrapping_sub(CONTROL_WINDOW.start) as u64;
        let to = control.at(inside, bytes.len() as u64)?;
        let ticket = if signal == Signal::Yes { self.ticket() } else { WrId(0) };
        if bytes.len() <= self.pair.max_inline() as usize {
            self.pair.post_write_inline(bytes, to, signal, ticket)?;
            return Ok(ticket);
        }
        // The image of BAR0 is free while no snapshot is taken.
        self.scratch.copy_from_slice(BAR0_AT, bytes)?;
        let sge = self.scratch.sge(BAR0_AT, bytes.len() as u32)?;
        self.pair.post_write(&[sge], to, signal, ticket)?;
        Ok(ticket)
    }

    /// Writes a doorbell: a word of the control window that the card looks at, or is told of by `imm`.
    pub(in crate::net) fn doorbell(
        &mut self,
        offset: usize,
        word: u64,
        imm: u32,
        always: bool,
    ) -> Result<WrId> {
        if self.greeting.capabilities & CAPABILITY_SPINS != 0 && !always {
            return self.control(offset, &word.to_le_bytes(), Signal::Yes);
        }
        let control = self.lease()?.control;
        let to = control.at((offset - CONTROL_WINDOW.start) as u64, 8)?;
        self.scratch.copy_from_slice(WORD_AT + 8, &word.to_le_bytes())?;
        let sge = self.scratch.sge(WORD_AT + 8, 8)?;
        let ticket = self.ticket();
        self.pair.post_write_imm(&[sge], to, imm, Signal::Yes, ticket)?;
        Ok(ticket)
    }
}

/// A copy of BAR0 at one moment. Words are whole; words of different registers may be of different moments.
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
    /// The word of 64 bits at `offset`.
    ///
    /// # Panics
    /// If it is not in BAR0.
    pub fn word(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.bytes[offset..offset + 8].try_into().expect("8 bytes"))
    }

    /// The word of 32 bits at `offset`.
    ///
    /// # Panics
    /// If it is not in BAR0.
    pub fn half(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.bytes[offset..offset + 4].try_into().expect("4 bytes"))
    }

    /// Bytes of BAR0.
    ///
    /// # Panics
    /// If they are not in BAR0.
    pub fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        &self.bytes[offset..offset + len]
    }
}
