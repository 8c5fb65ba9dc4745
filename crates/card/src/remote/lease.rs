//! The lease of a remote card: taking it, keeping it by heartbeats, moving it, giving it back.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_rdma::Rkey;
use millstream_rdma::memory::RemoteMemory;
use millstream_rdma::queue::Signal;
use millstream_rdma::{Deadline, WrId};

use super::{Inner, REPORT_AT, REPORT_BYTES, RemoteCard, RemoteError, RemoteErrorKind, Result};
use crate::command::nanos;
use crate::lease;
use crate::net::IMM_CONTROL;
use crate::region::codes::MessageKind;
use crate::region::message::Message;
use crate::registers::{CONTROL_WINDOW, MAX_BANKS, MAX_REGIONS, at};

/// The lease that this node holds.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Its epoch.
    pub epoch: u32,
    /// Card memory, BAR4, with the key of this lease.
    pub memory: RemoteMemory,
    /// The DMA window, BAR2, with the key of this lease.
    pub dma: RemoteMemory,
    pub(super) control: RemoteMemory,
    pub(super) duration: Duration,
}

/// A lease in a form that another process can go on with; who has it has the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseToken {
    /// `card_id`.
    pub card: u64,
    /// Epoch of the lease.
    pub epoch: u32,
    control_key: u32,
    dma_key: u32,
    memory_key: u32,
    memory_addr: u64,
    duration_ms: u64,
}

impl RemoteCard {
    /// Takes the lease, waiting up to `patience` while another node holds it. It lasts `duration` beyond each
    /// heartbeat, which a thread of this process sends from now on.
    ///
    /// # Errors
    /// [`RemoteErrorKind::Held`] if the card was not free in time.
    pub fn acquire(&self, duration: Duration, patience: Duration) -> std::result::Result<Held, RemoteError> {
        let held = self.with(|inner| inner.acquire(duration, Deadline::after(patience)))?;
        let inner = Arc::downgrade(&self.inner);
        // Without it the lease ends when nobody uses the connection for so long.
        let _ = std::thread::Builder::new()
            .name("card lease".to_owned())
            .spawn(move || keep(&inner, held.epoch, held.duration));
        Ok(held)
    }

    /// Makes the lease outlive this connection and says what another process needs to go on with it, by
    /// [`RemoteCard::attach`]. Without heartbeats it lasts for its duration.
    pub fn detach(&self) -> std::result::Result<LeaseToken, RemoteError> {
        self.with(|inner| {
            let held = inner.lease()?;
            let ticket = inner.control(at::lease_detached, &1u64.to_le_bytes(), Signal::Yes)?;
            inner.finish(ticket)?;
            inner.report()?;
            Ok(LeaseToken {
                card: inner.greeting.card,
                epoch: held.epoch,
                control_key: held.control.rkey.get(),
                dma_key: held.dma.rkey.get(),
                memory_key: held.memory.rkey.get(),
                memory_addr: held.memory.addr,
                duration_ms: held.duration.as_millis() as u64,
            })
        })
    }

    /// Goes on with a lease that another process has detached: messages come here from now on.
    ///
    /// # Errors
    /// [`RemoteErrorKind::NotHeld`] if it has ended.
    pub fn attach(&self, token: &LeaseToken) -> std::result::Result<Held, RemoteError> {
        let held = self.with(|inner| inner.attach(token))?;
        let inner = Arc::downgrade(&self.inner);
        let _ = std::thread::Builder::new()
            .name("card lease".to_owned())
            .spawn(move || keep(&inner, held.epoch, held.duration));
        Ok(held)
    }

    /// Gives the lease back and waits until the card is free for others: keys invalid, memory clear.
    pub fn release(&self) -> std::result::Result<(), RemoteError> {
        self.with(Inner::release)
    }

    /// Ends the lease of whoever holds the card. Returns its epoch, or nothing if nobody did.
    pub fn revoke(&self) -> std::result::Result<Option<u32>, RemoteError> {
        self.with(Inner::revoke)
    }
}

/// Sends heartbeats until the lease ends or the card is dropped.
fn keep(inner: &Weak<Mutex<Inner>>, epoch: u32, duration: Duration) {
    let pause = (duration / 4).max(Duration::from_millis(5));
    loop {
        std::thread::sleep(pause);
        let Some(inner) = inner.upgrade() else { return };
        let mut inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.held.is_none_or(|held| held.epoch != epoch) || inner.lost {
            return;
        }
        // What is wrong shows at the next use.
        let _ = inner.drain();
        let _ = inner.beat_if_due();
    }
}

impl Inner {
    pub(super) fn acquire(&mut self, duration: Duration, deadline: Deadline) -> Result<Held> {
        let mut guess = self.register(at::lease_word)?;
        let mut pause = Duration::from_micros(20);
        let epoch = loop {
            let (epoch, holder) = lease::unpack(guess);
            if holder == 0 {
                let mine = lease::word(epoch, self.greeting.node);
                let was = self.swap(at::lease_word, guess, mine)?;
                if was == guess {
                    break epoch;
                }
                guess = was;
                continue;
            }
            if deadline.passed() {
                return Err(RemoteErrorKind::Held { holder, epoch });
            }
            self.wait_until(Deadline::after(pause), |_| false)?;
            pause = (pause * 2).min(Duration::from_millis(20));
            guess = self.register(at::lease_word)?;
        };
        self.kick(IMM_CONTROL)?;
        let patience = self.patience();
        let is_answer = |message: &Message| {
            message.epoch == epoch
                && matches!(message.kind, MessageKind::LeaseGranted | MessageKind::LeaseEnded)
        };
        if !self.wait_until(patience, |inner| inner.messages.iter().any(is_answer))? {
            return Err(RemoteErrorKind::TimedOut(self.options.patience, "granting a lease"));
        }
        // What earlier leases had to say is of no use any more.
        let answer = loop {
            let message = self.messages.pop_front().expect("one is the answer");
            if is_answer(&message) {
                break message;
            }
        };
        if answer.kind == MessageKind::LeaseEnded {
            return Err(RemoteErrorKind::NotHeld(answer.cause));
        }
        let [left, keys, memory_key, memory_addr] = answer.values;
        let window = |addr, key: u64, len| RemoteMemory { addr, rkey: Rkey::new(key as u32), len };
        let held = Held {
            epoch,
            memory: window(memory_addr, memory_key, self.greeting.memory_bytes),
            dma: window(0, keys >> 32, self.greeting.dma_bytes),
            control: window(CONTROL_WINDOW.start as u64, keys, CONTROL_WINDOW.len() as u64),
            duration: Duration::from_nanos(left),
        };
        self.traffic = [[0; MAX_BANKS as usize]; 2];
        self.dma_traffic = [0; 2];
        self.rung = [0; MAX_REGIONS];
        self.ended = None;
        self.releasing = false;
        self.held = Some(held);
        self.beaten = Instant::now();
        if duration != held.duration {
            let ticket = self.control(at::lease_duration_ns, &nanos(duration).to_le_bytes(), Signal::Yes)?;
            self.finish(ticket)?;
            self.kick(IMM_CONTROL)?;
        }
        let held = Held { duration, ..held };
        self.held = Some(held);
        Ok(held)
    }

    pub(super) fn attach(&mut self, token: &LeaseToken) -> Result<Held> {
        let (epoch, holder) = lease::unpack(self.register(at::lease_word)?);
        if token.card != self.greeting.card || epoch != token.epoch || holder == 0 {
            return Err(RemoteErrorKind::NotHeld(None));
        }
        let window = |addr, key, len| RemoteMemory { addr, rkey: Rkey::new(key), len };
        let held = Held {
            epoch,
            memory: window(token.memory_addr, token.memory_key, self.greeting.memory_bytes),
            dma: window(0, token.dma_key, self.greeting.dma_bytes),
            control: window(CONTROL_WINDOW.start as u64, token.control_key, CONTROL_WINDOW.len() as u64),
            duration: Duration::from_millis(token.duration_ms),
        };
        self.held = Some(held);
        self.beaten = Instant::now();
        // Any value that differs from the latest one is a heartbeat.
        self.beats = u64::from(self.greeting.node) << 32;
        let node = u64::from(self.greeting.node);
        // What the former holder reported stays counted: go on from it.
        let bar0 = self.snapshot()?;
        for (table, offset) in self.traffic.iter_mut().zip([at::report_written, at::report_read]) {
            for (bank, count) in table.iter_mut().enumerate() {
                *count = bar0.word(offset + 8 * bank);
            }
        }
        self.dma_traffic = [at::report_dma_written, at::report_dma_read].map(|offset| bar0.word(offset));
        let ticket = self.control(at::lease_hand_over, &node.to_le_bytes(), Signal::Yes)?;
        self.finish(ticket)?;
        self.kick(IMM_CONTROL)?;
        let deadline = self.patience();
        while self.register(at::lease_word)? != lease::word(epoch, self.greeting.node) {
            if deadline.passed() {
                return Err(RemoteErrorKind::TimedOut(self.options.patience, "handing over a lease"));
            }
            self.wait_until(Deadline::after(Duration::from_micros(50)), |_| false)?;
        }
        Ok(held)
    }

    pub(in crate::net) fn lease(&self) -> Result<Held> {
        self.held.ok_or(RemoteErrorKind::NotHeld(self.ended))
    }

    pub(super) fn release(&mut self) -> Result<()> {
        let held = self.lease()?;
        self.report()?;
        self.releasing = true;
        let ticket = self.control(at::lease_release, &u64::from(held.epoch).to_le_bytes(), Signal::Yes)?;
        self.finish(ticket)?;
        self.kick(IMM_CONTROL)?;
        let patience = self.patience();
        if !self.wait_until(patience, |inner| inner.held.is_none())? {
            return Err(RemoteErrorKind::TimedOut(self.options.patience, "ending a lease"));
        }
        Ok(())
    }

    pub(super) fn revoke(&mut self) -> Result<Option<u32>> {
        let (epoch, holder) = lease::unpack(self.register(at::lease_word)?);
        if holder == 0 {
            return Ok(None);
        }
        let mut guess = 0;
        loop {
            let was = self.swap(at::lease_revoke, guess, epoch.into())?;
            if was == guess {
                break;
            }
            guess = was;
        }
        self.kick(IMM_CONTROL)?;
        Ok(Some(epoch))
    }

    /// Heartbeat, with the report of what this node moved, if a quarter of the lease is over.
    pub(super) fn beat_if_due(&mut self) -> Result<()> {
        match self.held {
            Some(held) if !self.releasing && self.beaten.elapsed() >= held.duration / 4 => self.report(),
            _ => Ok(()),
        }
    }

    pub(super) fn report(&mut self) -> Result<()> {
        self.beaten = Instant::now();
        self.beats += 1;
        let banks = (self.greeting.bank_count.min(MAX_BANKS)) as usize;
        let control = self.lease()?.control;
        for (index, (table, offset)) in
            self.traffic.iter().zip([at::report_written, at::report_read]).enumerate()
        {
            let bytes: Vec<u8> = table[..banks].iter().flat_map(|count| count.to_le_bytes()).collect();
            let at = REPORT_AT + index as u64 * REPORT_BYTES / 2;
            self.scratch.copy_from_slice(at, &bytes)?;
            let sge = self.scratch.sge(at, bytes.len() as u32)?;
            let to = control.at((offset - CONTROL_WINDOW.start) as u64, bytes.len() as u64)?;
            self.pair.post_write(&[sge], to, Signal::No, WrId(0))?;
        }
        let [written, read] = self.dma_traffic.map(u64::to_le_bytes);
        let to = control.at((at::report_dma_written - CONTROL_WINDOW.start) as u64, 16)?;
        self.pair.post_write_inline(&[written, read].concat(), to, Signal::No, WrId(0))?;
        // Signaled, so that the send queue has room again; nobody waits for it.
        let to = control.at((at::lease_heartbeat - CONTROL_WINDOW.start) as u64, 8)?;
        self.pair.post_write_inline(&self.beats.to_le_bytes(), to, Signal::Yes, WrId(0))?;
        Ok(())
    }
}
