//! Regions and copies of a remote card: commands by RDMA writes, answers by messages and registers.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use millstream_rdma::Deadline;
use millstream_rdma::queue::Signal;

use super::remote::{Inner, RemoteCard, RemoteError, RemoteErrorKind};
use super::{IMM_CONTROL, IMM_COPIES};
use crate::card::NoSuchKernel;
use crate::command::{Cause, nanos};
use crate::memory::Span;
use crate::region::codes::{CardCommand, MessageKind, RegionCommand, RegionState};
use crate::region::copy::{Copy, RawCopy};
use crate::region::image_hash;
use crate::region::kernel::Words;
use crate::region::message::Message;
use crate::registers::{
    COPY_RING, COPY_SLOTS, KERNEL_DIRECTORY, KERNEL_ENTRY_BYTES, MAX_KERNELS, MAX_REGIONS, PEER_BYTES,
    PEER_TABLE, REGION_CONTROL, REGION_STRIDE, WORDS, at, region_at,
};

type Outcome<T> = std::result::Result<T, RemoteError>;

/// Most bytes of copies that go into a card's ring together, unless it is one copy.
const PART: u64 = 64 << 20;

/// What to load into a region.
#[derive(Clone, Copy, Debug)]
pub enum KernelSource<'a> {
    /// A kernel of the card's directory.
    Named(&'a str),
    /// An image, which is written to this place in card memory and stays there: a checkpoint needs it.
    Image {
        /// The bytes.
        image: &'a [u8],
        /// Where they go.
        at: u64,
    },
    /// An image that is in card memory.
    InPlace {
        /// Where.
        span: Span,
        /// Its hash; zero: whatever it is.
        hash: u64,
    },
}

/// What a run gets.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// Argument words; what the kernel makes of them is its own.
    pub arguments: Words,
    /// Banks that it may use, a bit each.
    pub banks: u64,
    /// Units of work, for kernels that count.
    pub fuel: Option<u64>,
    /// Longest time.
    pub deadline: Option<Duration>,
    /// State words of another run to go on from.
    pub resume: Option<Words>,
}

impl Start {
    /// A run with these arguments, all banks and no bounds.
    pub fn new(arguments: &[u64]) -> Start {
        let mut words = [0; WORDS];
        let len = arguments.len().min(WORDS);
        words[..len].copy_from_slice(&arguments[..len]);
        Start { arguments: words, banks: 0, fuel: None, deadline: None, resume: None }
    }
}

impl RemoteCard {
    /// Loads a kernel into a region, in place of the one that is there. Returns its hash.
    pub fn load(&self, region: u32, source: KernelSource<'_>) -> Outcome<u64> {
        if let KernelSource::Image { image, at } = source {
            self.write(at, image)?;
        }
        self.with(|inner| {
            inner.turn_to(region)?;
            let (number, span, hash) = match source {
                KernelSource::Named(name) => (inner.kernel_number(name)?, Span::default(), 0),
                KernelSource::Image { image, at } => {
                    (0, Span::new(at, image.len() as u64), image_hash(image))
                }
                KernelSource::InPlace { span, hash } => (0, span, hash),
            };
            let words = [number, span.offset, span.len, hash];
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            inner.control(control_of(region, region_at::kernel), &bytes, Signal::No)?;
            let rung = inner.command(region, RegionCommand::Load, false)?;
            let answer = inner.answer(rung)?;
            Ok(answer.values[0])
        })
    }

    /// Starts the kernel of a region; returns the number that the message of its end will have as
    /// `sequence`.
    pub fn start(&self, region: u32, start: &Start) -> Outcome<u64> {
        self.with(|inner| inner.start(region, start))
    }

    /// Starts the kernel and waits for its end, for as long as `patience`. Returns its first four result
    /// words.
    pub fn run(&self, region: u32, start: &Start, patience: Duration) -> Outcome<[u64; 4]> {
        self.with(|inner| {
            let rung = inner.start(region, start)?;
            inner.answer_within(rung, patience).map(|message| message.values)
        })
    }

    /// Waits for the end of a run that [`RemoteCard::start`] has started. Returns its first four result
    /// words.
    pub fn wait(&self, rung: u64, patience: Duration) -> Outcome<[u64; 4]> {
        self.with(|inner| inner.answer_within(rung, patience).map(|message| message.values))
    }

    /// Ends a run at its next safe point. Returns true if something ran.
    pub fn stop(&self, region: u32) -> Outcome<bool> {
        self.with(|inner| {
            inner.check_region(region)?;
            // A start that the region has not seen yet would be lost under the word of the stop. Anything else waits for
            // the end of the run, and is.
            let latest = inner.register(control_of(region, region_at::doorbell))?;
            let starts = [RegionCommand::Start, RegionCommand::Continue].map(|command| command as u64);
            if starts.contains(&(latest & 0xff)) {
                inner.taken(control_of(region, region_at::taken), latest)?;
            }
            let rung = inner.command(region, RegionCommand::Stop, true)?;
            inner.taken(control_of(region, region_at::taken), rung)?;
            let bar0 = inner.snapshot()?;
            let cause = bar0.half(control_of(region, region_at::cause));
            if bar0.half(control_of(region, region_at::status)) == RegionState::Lost as u32 {
                let detail = bar0.word(control_of(region, region_at::detail));
                return Err(RemoteErrorKind::Refused { region, cause: Cause::from_code(cause), detail });
            }
            Ok(cause == Cause::Interrupted.code())
        })
    }

    /// Forgets the kernel of a region.
    pub fn unload(&self, region: u32) -> Outcome<()> {
        self.with(|inner| {
            inner.turn_to(region)?;
            let rung = inner.command(region, RegionCommand::Unload, false)?;
            inner.taken(control_of(region, region_at::taken), rung)
        })
    }

    /// Brings all regions to a safe point and keeps them there. Returns how much memory was ever written
    /// [bytes].
    pub fn pause(&self) -> Outcome<u64> {
        self.with(|inner| {
            inner.card_command(CardCommand::Pause)?;
            inner.register(at::memory_written_bytes)
        })
    }

    /// Lets the regions go on.
    pub fn resume(&self) -> Outcome<()> {
        self.with(|inner| inner.card_command(CardCommand::Resume))
    }

    /// Zeros card memory.
    pub fn clear(&self) -> Outcome<()> {
        self.with(|inner| inner.card_command(CardCommand::Clear))
    }

    /// Has the card connect another one, which listens at `address`, as its peer number `index`.
    pub fn connect_peer(&self, index: u32, address: &str) -> Outcome<()> {
        self.with(|inner| {
            let mut text = [0; PEER_BYTES];
            let fits = address.len() < PEER_BYTES;
            if fits {
                text[..address.len()].copy_from_slice(address.as_bytes());
            }
            let entry = PEER_TABLE + (index as usize).min(7) * PEER_BYTES;
            inner.control(entry, &text, Signal::No)?;
            let word = inner.numbered(index & 0xff);
            let ticket = inner.doorbell(at::peer_command, word, IMM_COPIES, true)?;
            inner.finish(ticket)?;
            inner.answer(word).map(drop)
        })
    }

    /// Gives the card copies to make and waits for the last of them. The card moves the bytes by itself; it has to move
    /// 64 MiB, or a single copy that is longer, within `patience`.
    pub fn copy(&self, copies: &[Copy], patience: Duration) -> Outcome<()> {
        self.with(|inner| inner.copy(copies, patience))
    }
}

/// Where a register of a region is in BAR0.
pub(super) fn control_of(region: u32, register: usize) -> usize {
    REGION_CONTROL + region as usize * REGION_STRIDE + register
}

impl Inner {
    pub(super) fn check_region(&self, region: u32) -> Result<(), RemoteErrorKind> {
        let regions = self.greeting.region_count.min(MAX_REGIONS as u32);
        if region >= regions {
            return Err(RemoteErrorKind::NoSuchRegion { region, regions });
        }
        Ok(())
    }

    /// A word that was not used before, with `low` in its low 8 bits.
    fn numbered(&mut self, low: u32) -> u64 {
        self.sequence += 1;
        self.sequence << 8 | u64::from(low)
    }

    pub(super) fn kernel_number(&mut self, name: &str) -> Result<u64, RemoteErrorKind> {
        let bar0 = self.snapshot()?;
        let count = (bar0.half(at::kernel_count) as usize).min(MAX_KERNELS);
        let entry = |index: usize| {
            let bytes = bar0.bytes(KERNEL_DIRECTORY + index * KERNEL_ENTRY_BYTES, KERNEL_ENTRY_BYTES);
            let text = &bytes[4..];
            let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
            let number = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            (number, String::from_utf8_lossy(&text[..end]).into_owned())
        };
        let known: Vec<_> = (0..count).map(entry).collect();
        match known.iter().find(|(_, known)| known == name) {
            Some((number, _)) => Ok((*number).into()),
            None => Err(NoSuchKernel {
                name: name.to_owned(),
                available: known.into_iter().map(|(_, name)| name).collect(),
            }
            .into()),
        }
    }

    fn command(&mut self, region: u32, command: RegionCommand, always: bool) -> Result<u64, RemoteErrorKind> {
        let word = self.numbered(command as u32);
        let ticket = self.doorbell(control_of(region, region_at::doorbell), word, region, always)?;
        self.finish(ticket)?;
        self.rung[region as usize] = word;
        Ok(word)
    }

    /// Waits until a region has taken up what this node rang last, or it would be lost under the next word, and its
    /// arguments under the next ones.
    fn turn_to(&mut self, region: u32) -> Result<(), RemoteErrorKind> {
        self.check_region(region)?;
        match self.rung[region as usize] {
            0 => Ok(()),
            rung => self.taken(control_of(region, region_at::taken), rung),
        }
    }

    fn start(&mut self, region: u32, start: &Start) -> Result<u64, RemoteErrorKind> {
        self.turn_to(region)?;
        let banks = match start.banks {
            0 if self.greeting.bank_count >= 64 => u64::MAX,
            0 => (1 << self.greeting.bank_count) - 1,
            banks => banks,
        };
        let fuel = start.fuel.unwrap_or(0);
        let deadline = start.deadline.map_or(0, nanos);
        let mut bytes = [0; 24 + 8 + 8 * WORDS];
        let words = [banks, fuel, deadline, 0].into_iter().chain(start.arguments);
        for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        self.control(control_of(region, region_at::banks), &bytes, Signal::No)?;
        let command = match &start.resume {
            None => RegionCommand::Start,
            Some(state) => {
                let bytes: Vec<u8> = state.iter().flat_map(|word| word.to_le_bytes()).collect();
                self.control(control_of(region, region_at::resume), &bytes, Signal::No)?;
                RegionCommand::Continue
            }
        };
        self.command(region, command, false)
    }

    /// The message that answers a command, or the error that it tells of.
    fn answer(&mut self, rung: u64) -> Result<Message, RemoteErrorKind> {
        self.answer_within(rung, self.options.patience)
    }

    fn answer_within(&mut self, rung: u64, patience: Duration) -> Result<Message, RemoteErrorKind> {
        let is_it = |message: &Message| {
            message.sequence == rung
                && !matches!(
                    message.kind,
                    MessageKind::LeaseGranted | MessageKind::LeaseEnded | MessageKind::CopyDone
                )
        };
        let there = self.wait_until(Deadline::after(patience), |inner| {
            inner.held.is_none() || inner.messages.iter().any(is_it)
        })?;
        let Some(place) = self.messages.iter().position(is_it) else {
            self.lease()?;
            debug_assert!(!there);
            return Err(RemoteErrorKind::TimedOut(patience, "a message that answers a command"));
        };
        let message = self.messages.remove(place).expect("just found");
        self.forget_rung(rung);
        match message.cause {
            None => Ok(message),
            Some(cause) => {
                Err(RemoteErrorKind::Refused { region: message.region, cause, detail: message.values[0] })
            }
        }
    }

    /// Waits until a register of the card shows a command as carried out.
    fn taken(&mut self, register: usize, word: u64) -> Result<(), RemoteErrorKind> {
        let deadline = self.patience();
        let mut pause = Duration::from_micros(20);
        while self.register(register)? != word {
            self.lease()?;
            if deadline.passed() {
                return Err(RemoteErrorKind::TimedOut(self.options.patience, "carrying out a command"));
            }
            self.wait_until(Deadline::after(pause), |_| false)?;
            pause = (pause * 2).min(Duration::from_millis(5));
        }
        self.forget_rung(word);
        Ok(())
    }

    /// A region has taken this word up.
    fn forget_rung(&mut self, word: u64) {
        self.rung.iter_mut().filter(|rung| **rung == word).for_each(|rung| *rung = 0);
    }

    fn card_command(&mut self, command: CardCommand) -> Result<(), RemoteErrorKind> {
        let word = self.numbered(command as u32);
        let ticket = self.control(at::card_command, &word.to_le_bytes(), Signal::Yes)?;
        self.finish(ticket)?;
        self.kick(IMM_CONTROL)?;
        self.taken(at::card_taken, word)?;
        match self.register(at::card_cause)? as u32 {
            0 => Ok(()),
            code => Err(RemoteErrorKind::RefusedByCard(Cause::from_code(code))),
        }
    }

    /// Half of the ring is filled while the card works on the other half. What comes first is less, so that it soon begins.
    fn copy(&mut self, mut copies: &[Copy], patience: Duration) -> Result<(), RemoteErrorKind> {
        let mut end = self.register(at::copy_consumer)?;
        let mut under_way = None;
        let mut room = COPY_SLOTS / 8;
        while !copies.is_empty() {
            let (part, behind) = copies.split_at(part_of(copies, room));
            let before = end;
            end = self.post_copies(before, part)?;
            if under_way.replace(end).is_some() {
                self.copies_done(before, patience)?;
            }
            (copies, room) = (behind, COPY_SLOTS / 2);
        }
        match under_way {
            Some(end) => self.copies_done(end, patience),
            None => Ok(()),
        }
    }

    /// Puts copies into the ring from entry `first`, of which the last one sends a message. Returns the entry after it.
    fn post_copies(&mut self, first: u64, copies: &[Copy]) -> Result<u64, RemoteErrorKind> {
        let mut descriptors = Vec::with_capacity(RawCopy::BYTES * copies.len());
        for (index, copy) in copies.iter().enumerate() {
            let copy = Copy { notify: index + 1 == copies.len(), ..*copy };
            descriptors.extend_from_slice(&copy.to_bytes());
        }
        // The ring's end may be between them.
        let slot = (first % COPY_SLOTS as u64) as usize;
        let (before, behind) =
            descriptors.split_at(descriptors.len().min(RawCopy::BYTES * (COPY_SLOTS - slot)));
        for (slot, descriptors) in [(slot, before), (0, behind)] {
            if !descriptors.is_empty() {
                let written = self.control(COPY_RING + RawCopy::BYTES * slot, descriptors, Signal::Yes)?;
                self.finish(written)?;
            }
        }
        let end = first + copies.len() as u64;
        let ticket = self.control(at::copy_producer, &end.to_le_bytes(), Signal::Yes)?;
        // The read comes after the write also where this processor makes both itself.
        fence(Ordering::SeqCst);
        // A card that works on copies already sees the word; waking it would take its processor from the copies.
        if self.register(at::copy_watching)? as u32 == 0 {
            self.kick(IMM_COPIES)?;
        }
        self.finish(ticket)?;
        Ok(end)
    }

    /// Waits until the copies before entry `end` have ended; the first fault of those that have.
    fn copies_done(&mut self, end: u64, patience: Duration) -> Result<(), RemoteErrorKind> {
        let of_copies =
            |message: &Message| matches!(message.kind, MessageKind::CopyDone | MessageKind::CopyFault);
        let ends = |message: &Message| of_copies(message) && message.sequence >= end;
        let there = self.wait_until(Deadline::after(patience), |inner| {
            inner.held.is_none() || inner.messages.iter().any(ends)
        })?;
        self.lease()?;
        if !there {
            return Err(RemoteErrorKind::TimedOut(patience, "a message that copies are complete"));
        }
        let fault = self.messages.iter().filter(|message| of_copies(message)).find_map(|message| {
            let (region, detail) = (message.region, message.values[1]);
            message.cause.map(|cause| RemoteErrorKind::Refused { region, cause, detail })
        });
        let Some(fault) = fault else {
            self.messages.retain(|message| !of_copies(message) || message.sequence > end);
            return Ok(());
        };
        // What is in the ring behind it ends, too, before anybody uses the ring again.
        let producer = self.register(at::copy_producer)?;
        let all = |message: &Message| of_copies(message) && message.sequence >= producer;
        self.wait_until(Deadline::after(patience), |inner| {
            inner.held.is_none() || inner.messages.iter().any(all)
        })?;
        self.messages.retain(|message| !of_copies(message));
        Err(fault)
    }
}

/// How many of some copies go into the ring together: as many as there is room for, and no more bytes than a part has.
fn part_of(copies: &[Copy], room: usize) -> usize {
    let mut bytes = 0;
    let fit = copies.iter().take(room).take_while(|copy| {
        bytes = copy.local.len.saturating_add(bytes);
        bytes <= PART
    });
    fit.count().max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::region::copy::CopyOperation;

    proptest! {
        #[test]
        fn parts_of_copies_fit_unless_they_are_one(
            lengths in prop::collection::vec(prop_oneof![0..PART / 2, 0..2 * PART, Just(u64::MAX)], 1..40), room in 1usize..20,
        ) {
            let copy = |len: &u64| Copy {
                operation: CopyOperation::Write,
                peer: 0,
                local: Span::new(0, *len),
                remote: 0,
                key: 0,
                notify: false,
            };
            let copies: Vec<_> = lengths.iter().map(copy).collect();
            let part = part_of(&copies, room);
            prop_assert!((1..=room.min(copies.len())).contains(&part));
            let bytes = |count: usize| lengths[..count].iter().fold(0u64, |sum, len| sum.saturating_add(*len));
            prop_assert!(part == 1 || bytes(part) <= PART);
            // And no fewer.
            prop_assert!(part == room || part == copies.len() || bytes(part + 1) > PART);
        }
    }
}
