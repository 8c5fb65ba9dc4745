//! Moving bytes to and from a card's memory.

use std::collections::VecDeque;

use millstream_rdma::queue::Signal;
use millstream_rdma::{Region, WrId};

use super::{Inner, RemoteCard, RemoteError, Result};
use crate::memory::Span;
use crate::net::copies::by_bank;

/// Which way a transfer goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::net) enum Direction {
    Write,
    Read,
}

/// Largest request of a transfer, and how many are under way.
const PIECE: u64 = 16 << 20;
const PIECES: usize = 16;

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
        let mut under_way = VecDeque::new();
        let mut posted = 0;
        while posted < span.len {
            if under_way.len() == PIECES {
                let oldest = under_way.pop_front().expect("full");
                self.finish(oldest)?;
            }
            let len = (span.len - posted).min(PIECE);
            let remote = memory.at(span.offset + posted, len)?;
            let local = region.unwrap_or(&self.staging).sge(at + posted, len as u32)?;
            let ticket = self.ticket();
            match direction {
                Direction::Write => self.pair.post_write(&[local], remote, Signal::Yes, ticket)?,
                Direction::Read => self.pair.post_read(&[local], remote, Signal::Yes, ticket)?,
            }
            under_way.push_back(ticket);
            posted += len;
        }
        for ticket in under_way {
            self.finish(ticket)?;
        }
        let table = &mut self.traffic[usize::from(direction == Direction::Read)];
        for (bank, part) in by_bank(span, self.greeting.bank_bytes) {
            table[bank] += part;
        }
        Ok(())
    }

    fn transfer_many(&mut self, direction: Direction, region: &Region, parts: &[(u64, Span)]) -> Result<()> {
        /// Requests from one that is signaled to the next, and signaled ones under way.
        const EVERY: usize = 16;
        const TICKETS: usize = 8;
        let memory = self.lease()?.memory;
        let mut under_way = VecDeque::new();
        for (index, (at, span)) in parts.iter().enumerate() {
            if span.len > PIECE {
                self.transfer(direction, Some(region), *at, *span)?;
                continue;
            }
            let signaled = index % EVERY == EVERY - 1 || index + 1 == parts.len();
            let ticket = if signaled { self.ticket() } else { WrId(0) };
            let signal = if signaled { Signal::Yes } else { Signal::No };
            let remote = memory.at(span.offset, span.len)?;
            let local = [region.sge(*at, span.len as u32)?];
            match direction {
                Direction::Write => self.pair.post_write(&local, remote, signal, ticket)?,
                Direction::Read => self.pair.post_read(&local, remote, signal, ticket)?,
            }
            if signaled {
                under_way.push_back(ticket);
            }
            if under_way.len() == TICKETS {
                let oldest = under_way.pop_front().expect("full");
                self.finish(oldest)?;
            }
            let table = &mut self.traffic[usize::from(direction == Direction::Read)];
            for (bank, part) in by_bank(*span, self.greeting.bank_bytes) {
                table[bank] += part;
            }
        }
        for ticket in under_way {
            self.finish(ticket)?;
        }
        Ok(())
    }
}
