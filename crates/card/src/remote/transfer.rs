//! Moving bytes to and from a card's memory.

use millstream_rdma::Region;
use millstream_rdma::queue::{Segment, SendList, Signal};

use super::{Inner, RemoteCard, RemoteError, Result};
use crate::memory::Span;
use crate::net::copies::add_by_bank;

/// Which way a transfer goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::net) enum Direction {
    Write,
    Read,
}

/// Largest request of a transfer, and how many are under way.
const PIECE: u64 = 16 << 20;
const PIECES: u64 = 16;

impl RemoteCard {
    /// Copies bytes into card memory.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let most = inner.staging.len();
            for (index, piece) in bytes.chunks(most).enumerate() {
                inner.staging.copy_from_slice(0, piece)?;
                let span = Span::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
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
                let span = Span::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer(Direction::Read, None, 0, span)?;
                inner.staging.copy_to_slice(0, piece)?;
            }
            Ok(())
        })
    }

    /// Copies bytes into the card's DMA window, BAR2: where its copies take them from.
    pub fn write_dma(&self, offset: u64, bytes: &[u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let most = inner.staging.len();
            for (index, piece) in bytes.chunks(most).enumerate() {
                inner.staging.copy_from_slice(0, piece)?;
                let span = Span::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer_dma(Direction::Write, span)?;
            }
            Ok(())
        })
    }

    /// Copies bytes out of the card's DMA window.
    pub fn read_dma(&self, offset: u64, out: &mut [u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let most = inner.staging.len();
            for (index, piece) in out.chunks_mut(most).enumerate() {
                let span = Span::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer_dma(Direction::Read, span)?;
                inner.staging.copy_to_slice(0, piece)?;
            }
            Ok(())
        })
    }

    /// Copies from registered memory of this process into card memory, without another copy.
    pub fn write_from(&self, region: &Region, at: u64, to: Span) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer(Direction::Write, Some(region), at, to))
    }

    /// Copies from card memory into registered memory of this process, without another copy.
    pub fn read_into(&self, region: &Region, at: u64, from: Span) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer(Direction::Read, Some(region), at, from))
    }

    /// As [`RemoteCard::write_from`] for many ranges, given with their places in `region`: requests follow each
    /// other without waiting.
    pub fn write_many(&self, region: &Region, parts: &[(u64, Span)]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer_many(Direction::Write, region, parts))
    }

    /// As [`RemoteCard::read_into`] for many ranges.
    pub fn read_many(&self, region: &Region, parts: &[(u64, Span)]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer_many(Direction::Read, region, parts))
    }
}

impl Inner {
    /// Moves bytes between registered memory (or the staging buffer) and card memory.
    pub(in crate::net) fn transfer(
        &mut self,
        direction: Direction,
        region: Option<&Region>,
        at: u64,
        span: Span,
    ) -> Result<()> {
        let memory = self.lease()?.memory;
        memory.at(span.offset, span.len)?;
        let mut posted = 0;
        while posted < span.len {
            self.finish_but(PIECES - 1)?;
            let len = (span.len - posted).min(PIECE);
            let remote = memory.at(span.offset + posted, len)?;
            let local = region.unwrap_or(&self.staging).sge(at + posted, len as u32)?;
            let ticket = self.ticket();
            match direction {
                Direction::Write => self.pair.post_write(&[local], remote, Signal::Yes, ticket)?,
                Direction::Read => self.pair.post_read(&[local], remote, Signal::Yes, ticket)?,
            }
            posted += len;
        }
        self.finish_but(0)?;
        self.count(direction, std::iter::once(span));
        Ok(())
    }

    /// Moves bytes between the staging buffer and the DMA window.
    fn transfer_dma(&mut self, direction: Direction, span: Span) -> Result<()> {
        let remote = self.lease()?.dma.at(span.offset, span.len)?;
        let local = [self.staging.sge(0, span.len as u32)?];
        let ticket = self.ticket();
        match direction {
            Direction::Write => self.pair.post_write(&local, remote, Signal::Yes, ticket)?,
            Direction::Read => self.pair.post_read(&local, remote, Signal::Yes, ticket)?,
        }
        self.finish(ticket)?;
        self.dma_traffic[usize::from(direction == Direction::Read)] += span.len;
        Ok(())
    }

    fn transfer_many(&mut self, direction: Direction, region: &Region, parts: &[(u64, Span)]) -> Result<()> {
        /// Requests of one call, the last of which is signaled, and calls under way: together less than the send queue
        /// holds.
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
            list.signal_last(self.ticket());
            self.pair.post_list(&mut list)?;
            self.finish_but(LISTS - 1)?;
            self.count(direction, parts[..posted].iter().map(|(_, span)| *span));
            parts = &parts[posted..];
        }
        self.finish_but(0)
    }

    /// Counts bytes by bank.
    fn count(&mut self, direction: Direction, spans: impl Iterator<Item = Span>) {
        let table = &mut self.traffic[usize::from(direction == Direction::Read)];
        add_by_bank(spans, self.greeting.bank_bytes, |bank, bytes| table[bank] += bytes);
    }
}
