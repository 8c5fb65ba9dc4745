//! RDMA transfers between this process and card memory.

use millstream_rdma::Region;
use millstream_rdma::queue::{Segment, SendList, Signal};

use super::{Inner, Result};
use crate::remote::{RemoteCard, RemoteError};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::banks::add_by_bank;

/// Direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Write,
    Read,
}

/// Largest work request of a transfer, and most of them in flight.
const PIECE: u64 = 16 << 20;
const PIECES: u64 = 16;

impl RemoteCard {
    /// Copies bytes into card memory.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            // Nothing is written of what does not fit.
            inner.lease()?.memory.at(offset, bytes.len() as u64)?;
            let most = inner.staging.len();
            for (index, piece) in bytes.chunks(most).enumerate() {
                inner.staging.copy_from_slice(0, piece)?;
                let span = MemoryRange::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer(Direction::Write, None, 0, span)?;
            }
            Ok(())
        })
    }

    /// Copies bytes out of card memory.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let most = inner.staging.len();
            for (index, piece) in out.chunks_mut(most).enumerate() {
                let span = MemoryRange::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer(Direction::Read, None, 0, span)?;
                inner.staging.copy_to_slice(0, piece)?;
            }
            Ok(())
        })
    }

    /// Copies bytes into BAR2, the DMA window.
    pub fn write_bar2(&self, offset: u64, bytes: &[u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            inner.lease()?.bar2.at(offset, bytes.len() as u64)?;
            let most = inner.staging.len();
            for (index, piece) in bytes.chunks(most).enumerate() {
                inner.staging.copy_from_slice(0, piece)?;
                let span = MemoryRange::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer_bar2(Direction::Write, span)?;
            }
            Ok(())
        })
    }

    /// Copies bytes out of BAR2.
    pub fn read_bar2(&self, offset: u64, out: &mut [u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let most = inner.staging.len();
            for (index, piece) in out.chunks_mut(most).enumerate() {
                let span = MemoryRange::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer_bar2(Direction::Read, span)?;
                inner.staging.copy_to_slice(0, piece)?;
            }
            Ok(())
        })
    }

    /// Copies from registered memory of this process into card memory, without an intermediate buffer.
    pub fn write_from(
        &self,
        region: &Region,
        at: u64,
        to: MemoryRange,
    ) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer(Direction::Write, Some(region), at, to))
    }

    /// Copies from card memory into registered memory of this process, without an intermediate buffer.
    pub fn read_into(
        &self,
        region: &Region,
        at: u64,
        from: MemoryRange,
    ) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer(Direction::Read, Some(region), at, from))
    }

    /// Copies many ranges as [`RemoteCard::write_from`] does, in lists of work requests. Each part has an offset in
    /// `region` and a range of card memory.
    pub fn write_many(
        &self,
        region: &Region,
        parts: &[(u64, MemoryRange)],
    ) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer_many(Direction::Write, region, parts))
    }

    /// Copies many ranges as [`RemoteCard::read_into`] does, in lists of work requests.
    pub fn read_many(
        &self,
        region: &Region,
        parts: &[(u64, MemoryRange)],
    ) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer_many(Direction::Read, region, parts))
    }
}

impl Inner {
    /// Transfers between registered memory, or the staging buffer, and card memory.
    pub(crate) fn transfer(
        &mut self,
        direction: Direction,
        region: Option<&Region>,
        at: u64,
        span: MemoryRange,
    ) -> Result<()> {
        let memory = self.lease()?.memory;
        memory.at(span.offset, span.len)?;
        let mut posted = 0;
        while posted < span.len {
            self.finish_but(PIECES - 1)?;
            let len = (span.len - posted).min(PIECE);
            let remote = memory.at(span.offset + posted, len)?;
            let local = region.unwrap_or(&self.staging).sge(at + posted, len as u32)?;
            let wr_id = self.next_wr_id();
            match direction {
                Direction::Write => self.queue_pair.post_write(&[local], remote, Signal::Yes, wr_id)?,
                Direction::Read => self.queue_pair.post_read(&[local], remote, Signal::Yes, wr_id)?,
            }
            posted += len;
        }
        self.finish_but(0)?;
        self.count(direction, std::iter::once(span));
        Ok(())
    }

    /// Transfers between the staging buffer and BAR2.
    fn transfer_bar2(&mut self, direction: Direction, span: MemoryRange) -> Result<()> {
        let remote = self.lease()?.bar2.at(span.offset, span.len)?;
        let local = [self.staging.sge(0, span.len as u32)?];
        let wr_id = self.next_wr_id();
        match direction {
            Direction::Write => self.queue_pair.post_write(&local, remote, Signal::Yes, wr_id)?,
            Direction::Read => self.queue_pair.post_read(&local, remote, Signal::Yes, wr_id)?,
        }
        self.finish(wr_id)?;
        self.bar2_traffic[usize::from(direction == Direction::Read)] += span.len;
        Ok(())
    }

    fn transfer_many(
        &mut self,
        direction: Direction,
        region: &Region,
        parts: &[(u64, MemoryRange)],
    ) -> Result<()> {
        /// Work requests per list, with the last one signaled, and lists in flight: together less than the
        /// depth of the send queue.
        const LIST: usize = 32;
        const LISTS: u64 = 6;
        let memory = self.lease()?.memory;
        let mut list = SendList::new(LIST, LIST);
        let mut parts = parts;
        while let Some((at, span)) = parts.first() {
            if span.len > PIECE {
                self.transfer(direction, Some(region), *at, *span)?;
                parts = &parts[1..];
                continue;
            }
            let next = parts.iter().take(LIST).take_while(|(_, span)| span.len <= PIECE);
            let next =
                next.map(|(at, span)| Segment { local: *at, remote: span.offset, length: span.len as u32 });
            let posted = match direction {
                Direction::Write => list.write_segments(region, &memory, next)?,
                Direction::Read => list.read_segments(region, &memory, next)?,
            };
            list.signal_last(self.next_wr_id());
            self.queue_pair.post_list(&mut list)?;
            self.finish_but(LISTS - 1)?;
            self.count(direction, parts[..posted].iter().map(|(_, span)| *span));
            parts = &parts[posted..];
        }
        self.finish_but(0)
    }

    /// Counts bytes by bank.
    fn count(&mut self, direction: Direction, spans: impl Iterator<Item = MemoryRange>) {
        let table = &mut self.traffic[usize::from(direction == Direction::Read)];
        add_by_bank(spans, self.hello.bank_bytes, |bank, bytes| table[bank] += bytes);
    }
}
