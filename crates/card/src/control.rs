//! Commands to a remote card: regions, pause, and the DMA engine. A command is an RDMA write; the card answers by
//! a message or in a register.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use millstream_card_abi::MemoryRange;
use millstream_card_abi::codes::{CardCommand, MessageKind, RegionCommand, RegionState};
use millstream_card_abi::command::{Cause, nanos};
use millstream_card_abi::dma::{DmaDescriptor, RawDmaDescriptor};
use millstream_card_abi::hello::{IMM_CONTROL, IMM_DMA};
use millstream_card_abi::image::image_hash;
use millstream_card_abi::message::Message;
use millstream_card_abi::registers::{
    DMA_RING, DMA_RING_SLOTS, KERNEL_DIRECTORY, KERNEL_ENTRY_BYTES, KERNEL_WORDS, KernelWords, MAX_KERNELS,
    MAX_REGIONS, PEER_BYTES, PEER_TABLE, REGION_CONTROL, REGION_STRIDE, at, region_at,
};
use millstream_rdma::Deadline;
use millstream_rdma::queue::Signal;

use crate::card::NoSuchKernel;
use crate::remote::{ANSWER, Inner, RemoteCard, RemoteError, RemoteErrorKind, accepted};

type Result<T, E = RemoteErrorKind> = std::result::Result<T, E>;

/// Most bytes of DMA transfers that are queued at once, unless it is one transfer.
const MAX_BATCH_BYTES: u64 = 64 << 20;

/// What is missing when a command times out that the card answers in a register.
const EXECUTION: &str = "execution of a command";

/// Least time for a card to load an image: its compiler may take 20 s of processor time.
const COMPILATION: Duration = Duration::from_secs(60);

/// The kernel to load into a region.
#[derive(Clone, Copy, Debug)]
pub enum KernelSource<'a> {
    /// A kernel of the card's directory.
    Builtin(&'a str),
    /// An image, which is first written to card memory. It must stay there: a checkpoint needs it.
    Image {
        /// The image.
        image: &'a [u8],
        /// Its offset in card memory.
        at: u64,
    },
    /// An image in card memory.
    InMemory {
        /// Range of the image.
        span: MemoryRange,
        /// Its hash; zero: not checked.
        hash: u64,
    },
}

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunRequest {
    /// Argument words, whose meaning the kernel defines.
    pub arguments: KernelWords,
    /// Banks that the kernel may use, one bit each; zero: all.
    pub banks: u64,
    /// Limit of the work, in units of the kernel.
    pub fuel: Option<u64>,
    /// Longest time.
    pub timeout: Option<Duration>,
    /// State words of another run to resume from.
    pub resume: Option<KernelWords>,
}

impl RunRequest {
    /// A run with these arguments, all banks and no limits.
    pub fn new(arguments: &[u64]) -> RunRequest {
        let mut words = [0; KERNEL_WORDS];
        let len = arguments.len().min(KERNEL_WORDS);
        words[..len].copy_from_slice(&arguments[..len]);
        RunRequest { arguments: words, banks: 0, fuel: None, timeout: None, resume: None }
    }

    /// Banks that the kernel may use, one bit each, on a card with `count` banks.
    pub(crate) fn bank_mask(&self, count: u32) -> u64 {
        match (self.banks, count) {
            (0, 64..) => u64::MAX,
            (0, count) => (1 << count) - 1,
            (banks, _) => banks,
        }
    }
}

impl RemoteCard {
    /// Loads a kernel into a region, in place of the loaded one. Returns its hash. Operations of other threads go on meanwhile.
    pub fn load(&self, region: u32, source: KernelSource<'_>) -> Result<u64, RemoteError> {
        if let KernelSource::Image { image, at } = source {
            self.write(at, image)?;
        }
        let (word, timeout) = self.when_free(region, |inner| {
            let (number, span, hash) = match source {
                KernelSource::Builtin(name) => (inner.kernel_number(name)?, MemoryRange::default(), 0),
                KernelSource::Image { image, at } => {
                    (0, MemoryRange::new(at, image.len() as u64), image_hash(image))
                }
                KernelSource::InMemory { span, hash } => (0, span, hash),
            };
            let words = [number, span.offset, span.len, hash];
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            inner.write_control(region_register(region, region_at::kernel), &bytes, Signal::No)?;
            let word = inner.ring_region(region, RegionCommand::Load, false)?;
            inner.waiters.reserve(word);
            let timeout = inner.options.timeout;
            Ok((word, if number == 0 { timeout.max(COMPILATION) } else { timeout }))
        })?;
        self.answer(word, timeout).map(|message| message.values[0])
    }

    /// Acts as soon as a region has read its latest doorbell. Operations of other threads go on meanwhile.
    fn when_free<T>(&self, region: u32, act: impl FnOnce(&mut Inner) -> Result<T>) -> Result<T, RemoteError> {
        let mut act = Some(act);
        let mut waited: Option<(Deadline, Duration)> = None;
        loop {
            let done = self.with(|inner| {
                if inner.is_free(region)? {
                    return act.take().map(|act| act(inner)).transpose();
                }
                let (deadline, _) =
                    *waited.get_or_insert_with(|| (inner.deadline(), Duration::from_micros(20)));
                match deadline.passed() {
                    true => Err(RemoteErrorKind::TimedOut(inner.options.timeout, EXECUTION)),
                    false => Ok(None),
                }
            })?;
            if let Some(done) = done {
                return Ok(done);
            }
            if let Some((_, pause)) = &mut waited {
                std::thread::sleep(*pause);
                *pause = (*pause * 2).min(Duration::from_millis(5));
            }
        }
    }

    /// Starts the kernel of a region. Returns the doorbell word, which is the `sequence` of the message at the end of
    /// the run. One further start waits in the region until a run has ended; those after it wait here, up to the
    /// connection's timeout.
    pub fn start(&self, region: u32, request: &RunRequest) -> Result<u64, RemoteError> {
        self.when_free(region, |inner| inner.start(region, request))
    }

    /// As [`RemoteCard::start`], for a thread that will call [`RemoteCard::wait`]: [`RemoteCard::message`] keeps the
    /// message at the end of the run for it.
    pub fn submit(&self, region: u32, request: &RunRequest) -> Result<u64, RemoteError> {
        self.when_free(region, |inner| {
            let word = inner.start(region, request)?;
            inner.waiters.reserve(word);
            Ok(word)
        })
    }

    /// Starts the kernel and waits up to `timeout` for its end. Returns its first four result words.
    pub fn run(&self, region: u32, request: &RunRequest, timeout: Duration) -> Result<[u64; 4], RemoteError> {
        self.wait(self.submit(region, request)?, timeout)
    }

    /// Waits up to `timeout` for the end of a run that [`RemoteCard::start`] or [`RemoteCard::submit`] has started.
    /// Returns its first four result words. Operations of other threads go on meanwhile.
    pub fn wait(&self, word: u64, timeout: Duration) -> Result<[u64; 4], RemoteError> {
        self.answer(word, timeout).map(|message| message.values)
    }

    /// As [`RemoteCard::wait`]; none if `timeout` passed first. The message at the end of the run is kept for the next call:
    /// for callers that look at signals between calls.
    pub fn wait_again(&self, word: u64, timeout: Duration) -> Result<Option<[u64; 4]>, RemoteError> {
        Ok(self.answer_or_keep(word, timeout)?.map(|message| message.values))
    }

    /// Stops a run at its next safe point, and a start that waits for its end: that is answered as an interrupted run.
    /// Returns whether there was one of them.
    pub fn stop(&self, region: u32) -> Result<bool, RemoteError> {
        self.with(|inner| {
            inner.check_region(region)?;
            let latest = inner.register(region_register(region, region_at::doorbell))?;
            let is_start = [RegionCommand::Start, RegionCommand::Resume]
                .map(|command| command as u64)
                .contains(&(latest & 0xff));
            // The stop overwrites the word of a start that the region has not read yet. An idle region is about to read it;
            // other commands wait for the end of the run and may be overwritten.
            let status = inner.snapshot()?.region_state(region);
            let is_running = matches!(status, Some(RegionState::Running | RegionState::Paused));
            if is_start && !is_running {
                inner.wait_ack(region_register(region, region_at::doorbell_ack), latest)?;
            }
            let word = inner.ring_region(region, RegionCommand::Stop, true)?;
            inner.wait_ack(region_register(region, region_at::doorbell_ack), word)?;
            let bar0 = inner.snapshot()?;
            let started = bar0.u64_at(region_register(region, region_at::started));
            let is_discarded = is_start && is_running && started != latest;
            if is_discarded {
                inner.discard_start(region, latest)?;
            }
            let cause = bar0.u32_at(region_register(region, region_at::cause));
            if bar0.region_state(region) == Some(RegionState::Hung) {
                let detail = bar0.u64_at(region_register(region, region_at::detail));
                return Err(RemoteErrorKind::Rejected { region, cause: Cause::from_code(cause), detail });
            }
            Ok(is_discarded || cause == Cause::Interrupted.code())
        })
    }

    /// Unloads the kernel of a region.
    pub fn unload(&self, region: u32) -> Result<(), RemoteError> {
        self.when_free(region, |inner| {
            let word = inner.ring_region(region, RegionCommand::Unload, false)?;
            inner.wait_ack(region_register(region, region_at::doorbell_ack), word)
        })
    }

    /// Pauses all regions at a safe point. Returns the amount of dirty memory (bytes).
    pub fn pause(&self) -> Result<u64, RemoteError> {
        self.with(|inner| {
            inner.card_command(CardCommand::Pause)?;
            inner.register(at::dirty_bytes)
        })
    }

    /// Resumes all regions.
    pub fn resume(&self) -> Result<(), RemoteError> {
        self.with(|inner| inner.card_command(CardCommand::Resume))
    }

    /// Zeros card memory.
    pub fn clear(&self) -> Result<(), RemoteError> {
        self.with(|inner| inner.card_command(CardCommand::Clear))
    }

    /// Connects the card's DMA engine to another card, which listens at `address`, as peer number `index`.
    pub fn connect_peer(&self, index: u32, address: &str) -> Result<(), RemoteError> {
        self.with(|inner| {
            let mut text = [0; PEER_BYTES];
            let fits = address.len() < PEER_BYTES;
            if fits {
                text[..address.len()].copy_from_slice(address.as_bytes());
            }
            let entry = PEER_TABLE + (index as usize).min(7) * PEER_BYTES;
            inner.write_control(entry, &text, Signal::No)?;
            let word = inner.sequenced(index & 0xff);
            let written = inner.doorbell(at::peer_command, word, IMM_DMA, true)?;
            inner.finish(written)?;
            inner.answer(word).map(drop)
        })
    }

    /// Executes DMA transfers on the card and waits for the last one. The card has to transfer 64 MiB, or a
    /// single longer transfer, within `timeout`.
    pub fn run_dma(&self, transfers: &[DmaDescriptor], timeout: Duration) -> Result<(), RemoteError> {
        self.with(|inner| inner.run_dma(transfers, timeout))
    }
}

/// Offset in BAR0 of a register of a region.
pub(crate) fn region_register(region: u32, register: usize) -> usize {
    REGION_CONTROL + region as usize * REGION_STRIDE + register
}

impl Inner {
    fn check_region(&self, region: u32) -> Result<()> {
        let regions = self.hello.region_count.min(MAX_REGIONS as u32);
        if region >= regions {
            return Err(RemoteErrorKind::NoSuchRegion { region, regions });
        }
        Ok(())
    }

    /// A command word with an unused sequence number and `low` in its low 8 bits.
    fn sequenced(&mut self, low: u32) -> u64 {
        self.sequence += 1;
        self.sequence << 8 | u64::from(low)
    }

    fn kernel_number(&mut self, name: &str) -> Result<u64> {
        let bar0 = self.snapshot()?;
        let count = (bar0.u32_at(at::kernel_count) as usize).min(MAX_KERNELS);
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

    /// Rings the doorbell of a region. Returns the doorbell word.
    fn ring_region(&mut self, region: u32, command: RegionCommand, always: bool) -> Result<u64> {
        let word = self.sequenced(command as u32);
        let written = self.doorbell(region_register(region, region_at::doorbell), word, region, always)?;
        self.finish(written)?;
        self.pending[region as usize] = word;
        Ok(word)
    }

    /// Whether a region has acknowledged the latest doorbell. Otherwise the next one would overwrite it, and its arguments.
    fn is_free(&mut self, region: u32) -> Result<bool> {
        self.check_region(region)?;
        let pending = self.pending[region as usize];
        if pending == 0 {
            return Ok(true);
        }
        let is_acknowledged = self.register(region_register(region, region_at::doorbell_ack))? == pending;
        if is_acknowledged {
            self.clear_pending(pending);
        } else {
            self.lease()?;
        }
        Ok(is_acknowledged)
    }

    /// Answers a start that a stop has overwritten before the region had read it.
    fn discard_start(&mut self, region: u32, word: u64) -> Result<()> {
        let epoch = self.lease()?.epoch;
        let cause = Some(Cause::Interrupted);
        let kind = MessageKind::RegionFault;
        let card = self.hello.card;
        self.messages.push_back(Message { card, kind, region, cause, epoch, sequence: word, values: [0; 4] });
        Ok(())
    }

    fn start(&mut self, region: u32, request: &RunRequest) -> Result<u64> {
        let banks = request.bank_mask(self.hello.bank_count);
        let fuel = request.fuel.unwrap_or(0);
        let timeout = request.timeout.map_or(0, nanos);
        let mut bytes = [0; 24 + 8 + 8 * KERNEL_WORDS];
        let words = [banks, fuel, timeout, 0].into_iter().chain(request.arguments);
        for (slot, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *slot = word.to_le_bytes();
        }
        self.write_control(region_register(region, region_at::banks), &bytes, Signal::No)?;
        let command = match &request.resume {
            None => RegionCommand::Start,
            Some(state) => {
                let bytes: Vec<u8> = state.iter().flat_map(|word| word.to_le_bytes()).collect();
                self.write_control(region_register(region, region_at::resume_state), &bytes, Signal::No)?;
                RegionCommand::Resume
            }
        };
        self.ring_region(region, command, false)
    }

    /// Waits for the message that answers a command; its error if it carries one.
    fn answer(&mut self, word: u64) -> Result<Message> {
        let timeout = self.options.timeout;
        let mut answer = None;
        self.wait_until(Deadline::after(timeout), |inner| {
            answer = inner.take_answer(word);
            answer.is_some() || inner.held.is_none()
        })?;
        match answer {
            Some(message) => accepted(message),
            None => Err(self.lease().err().unwrap_or(RemoteErrorKind::TimedOut(timeout, ANSWER))),
        }
    }

    /// Waits until an acknowledgement register of the card holds `word`.
    fn wait_ack(&mut self, register: usize, word: u64) -> Result<()> {
        let deadline = self.deadline();
        let mut pause = Duration::from_micros(20);
        while self.register(register)? != word {
            self.lease()?;
            if deadline.passed() {
                return Err(RemoteErrorKind::TimedOut(self.options.timeout, EXECUTION));
            }
            self.wait_until(Deadline::after(pause), |_| false)?;
            pause = (pause * 2).min(Duration::from_millis(5));
        }
        self.clear_pending(word);
        Ok(())
    }

    /// A region has acknowledged this word.
    pub(crate) fn clear_pending(&mut self, word: u64) {
        self.pending.iter_mut().filter(|pending| **pending == word).for_each(|pending| *pending = 0);
    }

    fn card_command(&mut self, command: CardCommand) -> Result<()> {
        let word = self.sequenced(command as u32);
        let written = self.write_control(at::card_command, &word.to_le_bytes(), Signal::Yes)?;
        self.finish(written)?;
        self.notify(IMM_CONTROL)?;
        self.wait_ack(at::card_command_ack, word)?;
        match self.register(at::card_command_cause)? as u32 {
            0 => Ok(()),
            code => Err(RemoteErrorKind::CardRejected(Cause::from_code(code))),
        }
    }

    /// Fills one half of the ring while the card works on the other one. The first batch is smaller, so that the card
    /// begins early.
    fn run_dma(&mut self, mut transfers: &[DmaDescriptor], timeout: Duration) -> Result<()> {
        let mut end = self.register(at::dma_consumer)?;
        let mut in_flight = None;
        let mut room = DMA_RING_SLOTS / 8;
        while !transfers.is_empty() {
            let (batch, rest) = transfers.split_at(batch_len(transfers, room));
            let before = end;
            end = self.post_descriptors(before, batch)?;
            if in_flight.replace(end).is_some() {
                self.wait_transfers(before, timeout)?;
            }
            (transfers, room) = (rest, DMA_RING_SLOTS / 2);
        }
        match in_flight {
            Some(end) => self.wait_transfers(end, timeout),
            None => Ok(()),
        }
    }

    /// Writes descriptors into the ring from entry `first` on; the last one requests a message. Returns the next entry.
    fn post_descriptors(&mut self, first: u64, transfers: &[DmaDescriptor]) -> Result<u64> {
        let mut bytes = Vec::with_capacity(RawDmaDescriptor::BYTES * transfers.len());
        for (index, transfer) in transfers.iter().enumerate() {
            let transfer = DmaDescriptor { notify: index + 1 == transfers.len(), ..*transfer };
            bytes.extend_from_slice(&transfer.to_bytes());
        }
        // They may wrap around the end of the ring.
        let slot = (first % DMA_RING_SLOTS as u64) as usize;
        let (before, after) =
            bytes.split_at(bytes.len().min(RawDmaDescriptor::BYTES * (DMA_RING_SLOTS - slot)));
        for (slot, bytes) in [(slot, before), (0, after)] {
            if !bytes.is_empty() {
                let written =
                    self.write_control(DMA_RING + RawDmaDescriptor::BYTES * slot, bytes, Signal::Yes)?;
                self.finish(written)?;
            }
        }
        let end = first + transfers.len() as u64;
        let written = self.write_control(at::dma_producer, &end.to_le_bytes(), Signal::Yes)?;
        // If this processor executes both requests itself, the read must still follow the write.
        fence(Ordering::SeqCst);
        // A polling engine sees the register; a doorbell would interrupt its transfers.
        if self.register(at::dma_polling)? as u32 == 0 {
            self.notify(IMM_DMA)?;
        }
        self.finish(written)?;
        Ok(end)
    }

    /// Waits until the transfers before entry `end` have completed; returns the first fault.
    fn wait_transfers(&mut self, end: u64, timeout: Duration) -> Result<()> {
        let is_dma = |message: &Message| matches!(message.kind, MessageKind::DmaDone | MessageKind::DmaFault);
        let is_end = |message: &Message| is_dma(message) && message.sequence >= end;
        let arrived = self.wait_until(Deadline::after(timeout), |inner| {
            inner.held.is_none() || inner.messages.iter().any(is_end)
        })?;
        self.lease()?;
        if !arrived {
            return Err(RemoteErrorKind::TimedOut(timeout, "message that DMA transfers are complete"));
        }
        let fault = self.messages.iter().filter(|message| is_dma(message)).find_map(|message| {
            let (slot, detail) = (message.region, message.values[1]);
            message.cause.map(|cause| RemoteErrorKind::TransferFailed { slot, cause, detail })
        });
        let Some(fault) = fault else {
            self.messages.retain(|message| !is_dma(message) || message.sequence > end);
            return Ok(());
        };
        // The other entries of the ring have to complete before it is used again.
        let producer = self.register(at::dma_producer)?;
        let is_last = |message: &Message| is_dma(message) && message.sequence >= producer;
        self.wait_until(Deadline::after(timeout), |inner| {
            inner.held.is_none() || inner.messages.iter().any(is_last)
        })?;
        self.messages.retain(|message| !is_dma(message));
        Err(fault)
    }
}

/// Number of transfers for the next batch: at most `room`, and at most [`MAX_BATCH_BYTES`], but at least one.
fn batch_len(transfers: &[DmaDescriptor], room: usize) -> usize {
    let mut bytes = 0;
    let fit = transfers.iter().take(room).take_while(|transfer| {
        bytes = transfer.local.len.saturating_add(bytes);
        bytes <= MAX_BATCH_BYTES
    });
    fit.count().max(1)
}

#[cfg(test)]
mod tests {
    use millstream_card_abi::dma::DmaOperation;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn batches_fit_unless_they_are_one_transfer(
            lengths in prop::collection::vec(
                prop_oneof![0..MAX_BATCH_BYTES / 2, 0..2 * MAX_BATCH_BYTES, Just(u64::MAX)], 1..40,
            ),
            room in 1usize..20,
        ) {
            let transfer = |len: &u64| DmaDescriptor {
                operation: DmaOperation::Write,
                peer: 0,
                local: MemoryRange::new(0, *len),
                remote: 0,
                key: 0,
                notify: false,
            };
            let transfers: Vec<_> = lengths.iter().map(transfer).collect();
            let len = batch_len(&transfers, room);
            prop_assert!((1..=room.min(transfers.len())).contains(&len));
            let bytes = |count: usize| lengths[..count].iter().fold(0u64, |sum, len| sum.saturating_add(*len));
            prop_assert!(len == 1 || bytes(len) <= MAX_BATCH_BYTES);
            // The batch is as long as possible.
            prop_assert!(len == room || len == transfers.len() || bytes(len + 1) > MAX_BATCH_BYTES);
        }
    }
}
