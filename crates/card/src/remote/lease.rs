//! The lease of a remote card: acquire, renew, transfer, release.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use millstream_rdma::Rkey;
use millstream_rdma::memory::RemoteMemory;
use millstream_rdma::queue::Signal;
use millstream_rdma::{Deadline, WrId};

use super::{Inner, REPORT_AT, REPORT_BYTES, Result, Shared};
use crate::remote::{RemoteCard, RemoteError, RemoteErrorKind};
use millstream_card_abi::codes::MessageKind;
use millstream_card_abi::command::nanos;
use millstream_card_abi::hello::IMM_CONTROL;
use millstream_card_abi::lease;
use millstream_card_abi::message::Message;
use millstream_card_abi::registers::{CONTROL_WINDOW, MAX_BANKS, MAX_REGIONS, at};

/// The lease that this process holds.
#[derive(Clone, Copy, Debug)]
pub struct HeldLease {
    /// Its epoch.
    pub epoch: u32,
    /// BAR4, card memory, with the key of this lease.
    pub memory: RemoteMemory,
    /// BAR2, the DMA window, with the key of this lease.
    pub bar2: RemoteMemory,
    pub(super) control: RemoteMemory,
    pub(super) duration: Duration,
}

/// A detached lease, with the keys that another process needs to continue it. Keep it secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseToken {
    /// `card_id`.
    pub card: u64,
    /// Epoch of the lease.
    pub epoch: u32,
    control_key: u32,
    bar2_key: u32,
    memory_key: u32,
    memory_addr: u64,
    duration_ms: u64,
}

impl RemoteCard {
    /// Acquires the lease. Waits up to `timeout` while another client holds it. The lease expires `duration` after
    /// the latest heartbeat; a thread of this process sends heartbeats.
    ///
    /// # Errors
    /// [`RemoteErrorKind::Leased`] if the lease was not free in time.
    pub fn acquire(
        &self,
        duration: Duration,
        timeout: Duration,
    ) -> std::result::Result<HeldLease, RemoteError> {
        let held = self.with(|inner| inner.acquire(duration, Deadline::after(timeout)))?;
        let shared = Arc::downgrade(&self.shared);
        // If the thread cannot be started, each operation sends heartbeats; an idle lease expires.
        let _ = std::thread::Builder::new()
            .name("card lease".to_owned())
            .spawn(move || send_heartbeats(&shared, held.epoch, held.duration));
        Ok(held)
    }

    /// Detaches the lease from this connection, which has none from then on. Another one continues it with
    /// [`RemoteCard::attach`]. The lease expires one duration after the latest heartbeat.
    pub fn detach(&self) -> std::result::Result<LeaseToken, RemoteError> {
        self.with(|inner| {
            let held = inner.lease()?;
            let wr_id = inner.write_control(at::lease_detached, &1u64.to_le_bytes(), Signal::Yes)?;
            inner.finish(wr_id)?;
            inner.report()?;
            inner.held = None;
            Ok(LeaseToken {
                card: inner.hello.card,
                epoch: held.epoch,
                control_key: held.control.rkey.get(),
                bar2_key: held.bar2.rkey.get(),
                memory_key: held.memory.rkey.get(),
                memory_addr: held.memory.addr,
                duration_ms: held.duration.as_millis() as u64,
            })
        })
    }

    /// Continues a lease that another process has detached. Messages arrive here from now on.
    ///
    /// # Errors
    /// [`RemoteErrorKind::NotLeased`] if the lease has ended.
    pub fn attach(&self, token: &LeaseToken) -> std::result::Result<HeldLease, RemoteError> {
        let held = self.with(|inner| inner.attach(token))?;
        let shared = Arc::downgrade(&self.shared);
        let _ = std::thread::Builder::new()
            .name("card lease".to_owned())
            .spawn(move || send_heartbeats(&shared, held.epoch, held.duration));
        Ok(held)
    }

    /// Releases the lease and waits until the card is free: keys invalid, memory clear.
    pub fn release(&self) -> std::result::Result<(), RemoteError> {
        self.with(Inner::release)
    }

    /// Revokes the lease of the current holder. Returns its epoch, or none if the card is free.
    pub fn revoke(&self) -> std::result::Result<Option<u32>, RemoteError> {
        self.with(Inner::revoke)
    }
}

/// Sends heartbeats until the lease ends or the card is dropped.
fn send_heartbeats(shared: &Weak<Shared>, epoch: u32, duration: Duration) {
    let pause = (duration / 4).max(Duration::from_millis(5));
    loop {
        std::thread::sleep(pause);
        let Some(shared) = shared.upgrade() else { return };
        let mut inner = shared.lock();
        if inner.held.is_none_or(|held| held.epoch != epoch) || inner.is_disconnected {
            return;
        }
        // The next operation returns the error.
        let _ = inner.poll_all();
        let _ = inner.renew_if_due();
    }
}

impl Inner {
    pub(super) fn acquire(&mut self, duration: Duration, deadline: Deadline) -> Result<HeldLease> {
        // As the card takes it, so that heartbeats come in time.
        let duration = duration.clamp(lease::MIN_DURATION, lease::MAX_DURATION);
        let mut guess = self.register(at::lease_word)?;
        let mut pause = Duration::from_micros(20);
        let epoch = loop {
            let (epoch, holder) = lease::unpack(guess);
            if holder == 0 {
                let mine = lease::pack(epoch, self.hello.client);
                let was = self.compare_swap(at::lease_word, guess, mine)?;
                if was == guess {
                    break epoch;
                }
                guess = was;
                continue;
            }
            if deadline.passed() {
                return Err(RemoteErrorKind::Leased { holder, epoch });
            }
            self.wait_until(Deadline::after(pause), |_| false)?;
            pause = (pause * 2).min(Duration::from_millis(20));
            guess = self.register(at::lease_word)?;
        };
        self.notify(IMM_CONTROL)?;
        let deadline = self.deadline();
        let is_answer = |message: &Message| {
            message.epoch == epoch
                && matches!(message.kind, MessageKind::LeaseGranted | MessageKind::LeaseEnded)
        };
        if !self.wait_until(deadline, |inner| inner.messages.iter().any(is_answer))? {
            return Err(RemoteErrorKind::TimedOut(self.options.timeout, "grant of the lease"));
        }
        // Messages of earlier leases are discarded.
        let answer = loop {
            let message = self.messages.pop_front().expect("one is the answer");
            if is_answer(&message) {
                break message;
            }
        };
        if answer.kind == MessageKind::LeaseEnded {
            return Err(RemoteErrorKind::NotLeased(answer.cause));
        }
        let [left, keys, memory_key, memory_addr] = answer.values;
        let window = |addr, key: u64, len| RemoteMemory { addr, rkey: Rkey::new(key as u32), len };
        let held = HeldLease {
            epoch,
            memory: window(memory_addr, memory_key, self.hello.memory_bytes),
            bar2: window(0, keys >> 32, self.hello.bar2_bytes),
            control: window(CONTROL_WINDOW.start as u64, keys, CONTROL_WINDOW.len() as u64),
            duration: Duration::from_nanos(left),
        };
        self.traffic = [[0; MAX_BANKS as usize]; 2];
        self.bar2_traffic = [0; 2];
        self.pending = [0; MAX_REGIONS];
        self.waiters.forget_reserved();
        self.ended = None;
        self.releasing = false;
        self.held = Some(held);
        self.last_heartbeat = Instant::now();
        if duration != held.duration {
            let wr_id =
                self.write_control(at::lease_duration_ns, &nanos(duration).to_le_bytes(), Signal::Yes)?;
            self.finish(wr_id)?;
            self.notify(IMM_CONTROL)?;
        }
        let held = HeldLease { duration, ..held };
        self.held = Some(held);
        Ok(held)
    }

    pub(super) fn attach(&mut self, token: &LeaseToken) -> Result<HeldLease> {
        let (epoch, holder) = lease::unpack(self.register(at::lease_word)?);
        if token.card != self.hello.card || epoch != token.epoch || holder == 0 {
            return Err(RemoteErrorKind::NotLeased(None));
        }
        let window = |addr, key, len| RemoteMemory { addr, rkey: Rkey::new(key), len };
        let held = HeldLease {
            epoch,
            memory: window(token.memory_addr, token.memory_key, self.hello.memory_bytes),
            bar2: window(0, token.bar2_key, self.hello.bar2_bytes),
            control: window(CONTROL_WINDOW.start as u64, token.control_key, CONTROL_WINDOW.len() as u64),
            duration: Duration::from_millis(token.duration_ms),
        };
        self.held = Some(held);
        self.last_heartbeat = Instant::now();
        // Any value that differs from the previous one is a heartbeat.
        self.heartbeat = u64::from(self.hello.client) << 32;
        let client = u64::from(self.hello.client);
        // The traffic reports continue from those of the former holder.
        let bar0 = self.snapshot()?;
        for (table, offset) in self.traffic.iter_mut().zip([at::report_written, at::report_read]) {
            for (bank, count) in table.iter_mut().enumerate() {
                *count = bar0.u64_at(offset + 8 * bank);
            }
        }
        self.bar2_traffic = [at::report_bar2_written, at::report_bar2_read].map(|offset| bar0.u64_at(offset));
        let wr_id = self.write_control(at::lease_transfer, &client.to_le_bytes(), Signal::Yes)?;
        self.finish(wr_id)?;
        self.notify(IMM_CONTROL)?;
        let deadline = self.deadline();
        while self.register(at::lease_word)? != lease::pack(epoch, self.hello.client) {
            if deadline.passed() {
                return Err(RemoteErrorKind::TimedOut(self.options.timeout, "transfer of the lease"));
            }
            self.wait_until(Deadline::after(Duration::from_micros(50)), |_| false)?;
        }
        Ok(held)
    }

    pub(crate) fn lease(&self) -> Result<HeldLease> {
        self.held.ok_or(RemoteErrorKind::NotLeased(self.ended))
    }

    pub(super) fn release(&mut self) -> Result<()> {
        let held = self.lease()?;
        self.report()?;
        self.releasing = true;
        let wr_id =
            self.write_control(at::lease_release, &u64::from(held.epoch).to_le_bytes(), Signal::Yes)?;
        self.finish(wr_id)?;
        self.notify(IMM_CONTROL)?;
        let deadline = self.deadline();
        if !self.wait_until(deadline, |inner| inner.held.is_none())? {
            return Err(RemoteErrorKind::TimedOut(self.options.timeout, "end of the lease"));
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
            let was = self.compare_swap(at::lease_revoke, guess, epoch.into())?;
            if was == guess {
                break;
            }
            guess = was;
        }
        self.notify(IMM_CONTROL)?;
        Ok(Some(epoch))
    }

    /// Sends a heartbeat with the traffic report if a quarter of the lease duration has passed.
    pub(super) fn renew_if_due(&mut self) -> Result<()> {
        match self.held {
            Some(held) if !self.releasing && self.last_heartbeat.elapsed() >= held.duration / 4 => {
                self.report()
            }
            _ => Ok(()),
        }
    }

    pub(super) fn report(&mut self) -> Result<()> {
        self.last_heartbeat = Instant::now();
        self.heartbeat += 1;
        let banks = (self.hello.bank_count.min(MAX_BANKS)) as usize;
        let control = self.lease()?.control;
        for (index, (table, offset)) in
            self.traffic.iter().zip([at::report_written, at::report_read]).enumerate()
        {
            let bytes: Vec<u8> = table[..banks].iter().flat_map(|count| count.to_le_bytes()).collect();
            let at = REPORT_AT + index as u64 * REPORT_BYTES / 2;
            self.scratch.copy_from_slice(at, &bytes)?;
            let sge = self.scratch.sge(at, bytes.len() as u32)?;
            let to = control.at((offset - CONTROL_WINDOW.start) as u64, bytes.len() as u64)?;
            self.queue_pair.post_write(&[sge], to, Signal::No, WrId(0))?;
        }
        let [written, read] = self.bar2_traffic.map(u64::to_le_bytes);
        let to = control.at((at::report_bar2_written - CONTROL_WINDOW.start) as u64, 16)?;
        self.queue_pair.post_write_inline(&[written, read].concat(), to, Signal::No, WrId(0))?;
        // Signaled to free the send queue; no caller waits for it.
        let to = control.at((at::lease_heartbeat - CONTROL_WINDOW.start) as u64, 8)?;
        self.queue_pair.post_write_inline(&self.heartbeat.to_le_bytes(), to, Signal::Yes, WrId(0))?;
        Ok(())
    }
}
