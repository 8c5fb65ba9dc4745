//! Waits for completions: poll for a short time, then block.
//!
//! A completion queue reports once per notification request, and only completions that arrive after the request (IBTA
//! volume 1, 11.4.2.2). Therefore the queue must be polled once more after the request, before blocking.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_mummy_sys::{ibv_ack_cq_events, ibv_get_cq_event, ibv_req_notify_cq};
use sideway::ibverbs::completion::{CompletionChannel, CreateCompletionChannelErrorKind};

use crate::deadline::Deadline;
use crate::device::Device;
use crate::error::os_error;
use crate::queue::{CompletionQueue, QueueError};

/// Options of a [`CompletionWaiter`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitOptions {
    /// How long to poll before blocking. About the cost of a wake-up (10 µs) if each thread has a core, else zero.
    pub spin: Duration,
    /// Interval of checks of other descriptors while there are completions.
    pub descriptors_every: Duration,
}

impl Default for WaitOptions {
    fn default() -> WaitOptions {
        WaitOptions { spin: Duration::from_micros(20), descriptors_every: Duration::from_millis(10) }
    }
}

/// A descriptor that also ends a wait: a TCP connection, a card's socket, an eventfd.
#[derive(Debug)]
pub struct WaitFd<'fd> {
    descriptor: BorrowedFd<'fd>,
    events: libc::c_short,
    ready: libc::c_short,
}

impl<'fd> WaitFd<'fd> {
    /// Waits until the descriptor is readable or its peer closed it.
    pub fn readable(descriptor: &'fd impl AsFd) -> WaitFd<'fd> {
        WaitFd { descriptor: descriptor.as_fd(), events: libc::POLLIN | libc::POLLRDHUP, ready: 0 }
    }

    /// Waits until the descriptor is writable.
    pub fn writable(descriptor: &'fd impl AsFd) -> WaitFd<'fd> {
        WaitFd { descriptor: descriptor.as_fd(), events: libc::POLLOUT, ready: 0 }
    }

    /// Whether it was ready, closed or failed at the last wait.
    pub fn is_ready(&self) -> bool {
        self.ready != 0
    }

    /// Whether it was closed or failed at the last wait.
    pub fn is_closed(&self) -> bool {
        self.ready & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR | libc::POLLNVAL) != 0
    }
}

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitOutcome {
    /// `progress` returned true.
    Progress,
    /// A descriptor is ready; see [`WaitFd::is_ready`].
    Descriptor,
    /// The deadline passed.
    Deadline,
    /// A signal handler ran.
    Interrupted,
}

/// Waiting failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot wait for completions: cannot {what}: {cause}")]
pub struct WaitError {
    /// The operation.
    pub what: &'static str,
    /// The cause.
    pub cause: io::Error,
}

/// Waits for completions of its queues and for other descriptors.
#[derive(Debug)]
pub struct CompletionWaiter {
    channel: Arc<CompletionChannel>,
    device: Device,
    options: WaitOptions,
    descriptors: Vec<libc::pollfd>,
    looked_at_descriptors: Instant,
}

/// Polls between two reads of the clock.
const ROUNDS: u32 = 32;

impl CompletionWaiter {
    /// Creates a waiter with its own completion channel.
    ///
    /// # Errors
    /// [`QueueError`] if the device refuses.
    pub fn new(device: &Device, options: WaitOptions) -> Result<CompletionWaiter, QueueError> {
        let refused = |what: &str, cause| QueueError::Call {
            device: device.name().to_owned(),
            what: what.to_owned(),
            cause,
        };
        let channel = device.context().create_comp_channel().map_err(|error| {
            refused(
                "create a completion channel",
                os_error!(error.0, CreateCompletionChannelErrorKind::Ibverbs),
            )
        })?;
        channel
            .set_nonblocking(true)
            .map_err(|cause| refused("make a completion channel non-blocking", cause))?;
        Ok(CompletionWaiter {
            channel,
            device: device.clone(),
            options,
            descriptors: Vec::new(),
            looked_at_descriptors: Instant::now(),
        })
    }

    /// Creates a completion queue for this waiter.
    ///
    /// # Errors
    /// [`QueueError`] if `depth` is 0 or beyond the device's limit, or the device refuses.
    pub fn completion_queue(&self, depth: u32) -> Result<CompletionQueue, QueueError> {
        CompletionQueue::create(&self.device, depth, Some(&self.channel))
    }

    /// Waits until `progress` returns true, one of `others` is ready, or `deadline` passes.
    ///
    /// `progress` empties `queues`, which this waiter created, handles completions, and returns whether there was work. It is
    /// called at least once, repeatedly during [`WaitOptions::spin`], and once after notifications were requested. While it
    /// returns true, `others` are checked every [`WaitOptions::descriptors_every`].
    ///
    /// # Errors
    /// [`WaitError`] if a system call or the device fails; errors of `progress` are returned unchanged.
    pub fn wait<E: From<WaitError>>(
        &mut self,
        queues: &[&CompletionQueue],
        others: &mut [WaitFd<'_>],
        deadline: Deadline,
        mut progress: impl FnMut() -> Result<bool, E>,
    ) -> Result<WaitOutcome, E> {
        others.iter_mut().for_each(|other| other.ready = 0);
        if progress()? {
            self.glance(others)?;
            return Ok(WaitOutcome::Progress);
        }
        if !self.options.spin.is_zero() && spin(self.options.spin, deadline, &mut progress)? {
            self.glance(others)?;
            return Ok(WaitOutcome::Progress);
        }
        loop {
            self.request_notifications(queues)?;
            if progress()? {
                return Ok(WaitOutcome::Progress);
            }
            let wake = self.block(others, deadline)?;
            // `progress` handles the completion of the event, if there was one.
            if progress()? {
                return Ok(WaitOutcome::Progress);
            }
            match wake {
                WaitOutcome::Progress if deadline.remaining() == Some(Duration::ZERO) => {
                    return Ok(WaitOutcome::Deadline);
                }
                // The completion of the event was already handled.
                WaitOutcome::Progress => {}
                other => return Ok(other),
            }
        }
    }

    fn request_notifications(&self, queues: &[&CompletionQueue]) -> Result<(), WaitError> {
        for queue in queues {
            // SAFETY: the reference keeps the queue alive.
            let code = unsafe { ibv_req_notify_cq(queue.raw().as_ptr(), 0) };
            if code != 0 {
                let cause = io::Error::from_raw_os_error(code.saturating_abs());
                return Err(WaitError { what: "request a notification from a completion queue", cause });
            }
        }
        Ok(())
    }

    /// Blocks until the channel has an event ([`WaitOutcome::Progress`]) or another outcome occurs.
    fn block(&mut self, others: &mut [WaitFd<'_>], deadline: Deadline) -> Result<WaitOutcome, WaitError> {
        let ready = self.poll(others, deadline.remaining())?;
        match ready {
            None => Ok(WaitOutcome::Interrupted),
            Some(0) => Ok(WaitOutcome::Deadline),
            Some(_) => {
                self.take_events()?;
                match others.iter().any(WaitFd::is_ready) {
                    true => Ok(WaitOutcome::Descriptor),
                    false => Ok(WaitOutcome::Progress),
                }
            }
        }
    }

    /// Checks the descriptors without blocking, if the last check is old enough.
    fn glance(&mut self, others: &mut [WaitFd<'_>]) -> Result<(), WaitError> {
        if others.is_empty() || self.looked_at_descriptors.elapsed() < self.options.descriptors_every {
            return Ok(());
        }
        self.poll(others, Some(Duration::ZERO)).map(drop)
    }

    /// Polls the channel and the other descriptors. Returns how many are ready; `None` after a signal.
    fn poll(
        &mut self,
        others: &mut [WaitFd<'_>],
        timeout: Option<Duration>,
    ) -> Result<Option<usize>, WaitError> {
        let channel = libc::pollfd { fd: self.channel.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        self.descriptors.clear();
        self.descriptors.push(channel);
        self.descriptors.extend(others.iter().map(|other| libc::pollfd {
            fd: other.descriptor.as_raw_fd(),
            events: other.events,
            revents: 0,
        }));
        let polled = millstream_shm::poll(&mut self.descriptors, timeout);
        self.looked_at_descriptors = Instant::now();
        let ready = match polled {
            Ok(ready) => ready,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => return Ok(None),
            Err(cause) => return Err(WaitError { what: "poll descriptors", cause }),
        };
        for (other, polled) in others.iter_mut().zip(&self.descriptors[1..]) {
            other.ready = polled.revents;
        }
        Ok(Some(ready))
    }

    /// Takes and acknowledges all events of the channel. A queue with an unacknowledged event cannot be destroyed.
    fn take_events(&self) -> Result<(), WaitError> {
        loop {
            let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the channel is alive and does not block; on success `queue` is the queue that the event
            // belongs to, which is not destroyed before the event is acknowledged.
            unsafe {
                let channel = self.channel.comp_channel();
                if ibv_get_cq_event(channel.as_ptr(), &mut queue, &mut context) == 0 {
                    ibv_ack_cq_events(queue, 1);
                    continue;
                }
            }
            let cause = io::Error::last_os_error();
            return match cause.kind() {
                io::ErrorKind::WouldBlock => Ok(()),
                io::ErrorKind::Interrupted => continue,
                _ => Err(WaitError { what: "take an event of the completion channel", cause }),
            };
        }
    }
}

fn spin<E>(
    time: Duration,
    deadline: Deadline,
    progress: &mut impl FnMut() -> Result<bool, E>,
) -> Result<bool, E> {
    // A time beyond the clock's range has no end.
    let end = Instant::now().checked_add(time);
    let end = end.into_iter().chain(deadline.instant()).min();
    loop {
        for _ in 0..ROUNDS {
            std::hint::spin_loop();
            if progress()? {
                return Ok(true);
            }
        }
        if end.is_some_and(|end| Instant::now() >= end) {
            return Ok(false);
        }
        // The peer may need this core.
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_ends_with_progress_or_at_its_end() {
        let mut calls = 0;
        let mut third = || {
            calls += 1;
            Ok::<_, WaitError>(calls == 3)
        };
        assert!(spin(Duration::from_secs(60), Deadline::NEVER, &mut third).unwrap());
        assert_eq!(calls, 3);
        let start = Instant::now();
        assert!(!spin(Duration::from_millis(2), Deadline::NEVER, &mut || Ok::<_, WaitError>(false)).unwrap());
        assert!(start.elapsed() >= Duration::from_millis(2));
        assert!(
            !spin(Duration::from_secs(60), Deadline::after(Duration::ZERO), &mut || Ok::<_, WaitError>(
                false
            ))
            .unwrap()
        );
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
