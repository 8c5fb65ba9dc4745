//! Threads that share a connection. Each operation has the connection for itself. Of the threads that wait for messages
//! one sleeps with the connection, gives it to operations of other threads, and hands their messages to the others.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

use millstream_card_abi::codes::MessageKind;
use millstream_card_abi::command::Cause;
use millstream_card_abi::message::Message;
use millstream_rdma::Deadline;
use millstream_shm::EventFd;

use super::{Inner, Result};

/// A connection and the threads that want it.
pub(super) struct Shared {
    inner: Mutex<Inner>,
    /// Threads with an operation that wait for the connection.
    arriving: AtomicUsize,
    /// Ends the sleep of the thread that has the connection.
    interrupt: Arc<EventFd>,
    /// An operation has ended.
    ended: Condvar,
}

/// Messages that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The answer to a doorbell word.
    Answer {
        /// The word.
        word: u64,
        /// An answer after the wait is kept for a later one.
        or_later: bool,
    },
    /// The next message that is no answer for which a thread waits, or will wait.
    Any,
}

/// What ends a wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum Delivery {
    /// The message.
    Message(Message),
    /// The lease has ended in which an answer was expected, for this reason if the card told it.
    LeaseEnded(Option<Cause>),
}

/// A thread that waits for a message.
struct Waiter {
    wanted: Wanted,
    /// Epoch of the lease when it began to wait.
    epoch: Option<u32>,
    state: Mutex<State>,
    changed: Condvar,
}

enum State {
    Waiting,
    /// This thread has to sleep with the connection from now on.
    Leads,
    Delivered(Delivery),
}

/// An operation: it has the connection until it is dropped.
pub(super) struct Operation<'shared> {
    shared: &'shared Shared,
    inner: Option<MutexGuard<'shared, Inner>>,
}

impl std::ops::Deref for Operation<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        self.inner.as_ref().expect("there until the drop")
    }
}

impl std::ops::DerefMut for Operation<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        self.inner.as_mut().expect("there until the drop")
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let is_awaited = self.waiters.leader.is_some();
        self.inner = None;
        if is_awaited {
            self.shared.ended.notify_all();
        }
    }
}

impl Shared {
    pub(super) fn new(inner: Inner) -> Shared {
        let interrupt = inner.waiters.interrupt.clone();
        Shared { inner: Mutex::new(inner), arriving: AtomicUsize::new(0), interrupt, ended: Condvar::new() }
    }

    /// Begins an operation.
    pub(super) fn lock(&self) -> Operation<'_> {
        let inner = match self.inner.try_lock() {
            Ok(inner) => inner,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.arriving.fetch_add(1, Ordering::SeqCst);
                self.interrupt.signal();
                let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                self.arriving.fetch_sub(1, Ordering::SeqCst);
                inner
            }
        };
        Operation { shared: self, inner: Some(inner) }
    }

    /// Waits for a message, while operations of other threads go on. None if `deadline` passed first.
    ///
    /// # Errors
    /// The connection has failed.
    pub(super) fn wait(&self, wanted: Wanted, deadline: Deadline) -> Result<Option<Delivery>> {
        let mut operation = self.lock();
        let waiter = operation.enter(wanted);
        operation.deliver();
        let mut leads = operation.waiters.leads(&waiter);
        if !leads {
            drop(operation);
            leads = waiter.leads_before(deadline);
            operation = self.lock();
        }
        // One that does not lead has its message, or the deadline passed. In the latter case it may lead since.
        let outcome =
            if leads { self.lead(&mut operation, &waiter, deadline) } else { Ok(waiter.delivery()) };
        operation.waiters.leave(&waiter);
        if let (Wanted::Answer { word, or_later: true }, Ok(None)) = (wanted, &outcome) {
            operation.waiters.reserve(word);
        }
        outcome
    }

    /// Sleeps with the connection until the message of this thread is there.
    fn lead<'shared>(
        &'shared self,
        operation: &mut Operation<'shared>,
        waiter: &Waiter,
        deadline: Deadline,
    ) -> Result<Option<Delivery>> {
        loop {
            let waited = operation.wait_until(deadline, |inner| {
                inner.deliver();
                waiter.delivery().is_some() || self.arriving.load(Ordering::SeqCst) > 0
            });
            let delivery = waiter.delivery();
            if delivery.is_some() || !waited? {
                return Ok(delivery);
            }
            // Other threads want the connection. Its lock is not fair, so this thread waits until they have had it.
            let inner = operation.inner.take().expect("there until the drop");
            let inner = self.ended.wait_while(inner, |_| self.arriving.load(Ordering::SeqCst) > 0);
            operation.inner = Some(inner.unwrap_or_else(PoisonError::into_inner));
        }
    }
}

impl Waiter {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.state() = state;
        self.changed.notify_one();
    }

    fn delivery(&self) -> Option<Delivery> {
        match *self.state() {
            State::Delivered(delivery) => Some(delivery),
            State::Waiting | State::Leads => None,
        }
    }

    /// Sleeps until this thread has to lead; false if something was delivered, or the deadline passed.
    fn leads_before(&self, deadline: Deadline) -> bool {
        let mut state = self.state();
        while matches!(*state, State::Waiting) && !deadline.passed() {
            state = match deadline.remaining() {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        matches!(*state, State::Leads)
    }
}

/// The threads that wait for messages of a connection.
pub(crate) struct Waiters {
    /// In the order of their arrival; without those that have their message.
    waiting: Vec<Arc<Waiter>>,
    /// The one that sleeps with the connection.
    leader: Option<Arc<Waiter>>,
    /// Doorbell words whose answers are kept for a thread that will wait for them.
    reserved: Vec<u64>,
    pub(super) interrupt: Arc<EventFd>,
}

impl Waiters {
    pub(super) fn new() -> std::io::Result<Waiters> {
        let interrupt = Arc::new(EventFd::latch()?);
        Ok(Waiters { waiting: Vec::new(), leader: None, reserved: Vec::new(), interrupt })
    }

    /// Keeps the answer to this doorbell word for a thread that will wait for it.
    pub(crate) fn reserve(&mut self, word: u64) {
        self.reserved.push(word);
    }

    /// A new lease has begun, whose doorbell words are other ones.
    pub(super) fn forget_reserved(&mut self) {
        self.reserved.clear();
    }

    fn leads(&self, waiter: &Arc<Waiter>) -> bool {
        self.leader.as_ref().is_some_and(|leader| Arc::ptr_eq(leader, waiter))
    }

    /// Removes a thread. If it leads, the next one does from now on.
    fn leave(&mut self, waiter: &Arc<Waiter>) {
        self.waiting.retain(|other| !Arc::ptr_eq(other, waiter));
        if self.leads(waiter) {
            self.leader = self.waiting.first().cloned();
            if let Some(leader) = &self.leader {
                leader.set(State::Leads);
            }
        }
    }
}

impl Inner {
    /// Adds this thread to those that wait. It leads if it is the only one.
    fn enter(&mut self, wanted: Wanted) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter {
            wanted,
            epoch: self.held.map(|held| held.epoch),
            state: Mutex::new(State::Waiting),
            changed: Condvar::new(),
        });
        if let Wanted::Answer { word, .. } = wanted {
            self.waiters.reserved.retain(|reserved| *reserved != word);
        }
        self.waiters.leader.get_or_insert_with(|| waiter.clone());
        self.waiters.waiting.push(waiter.clone());
        waiter
    }

    /// Hands the messages that have arrived to the threads that wait for them.
    fn deliver(&mut self) {
        // Answers first, so that what remains is for anyone.
        let mut waiting = std::mem::take(&mut self.waiters.waiting);
        waiting.retain(|waiter| {
            let Wanted::Answer { word, .. } = waiter.wanted else { return true };
            let delivery = match self.take_answer(word) {
                Some(message) => Delivery::Message(message),
                None if self.held.is_none_or(|held| Some(held.epoch) != waiter.epoch) => {
                    Delivery::LeaseEnded(self.ended)
                }
                None => return true,
            };
            waiter.set(State::Delivered(delivery));
            false
        });
        waiting.retain(|waiter| {
            let is_kept = |message: &Message| self.waiters.reserved.contains(&message.sequence);
            let free = |message: &Message| !is_answer(message) || !is_kept(message);
            if waiter.wanted != Wanted::Any {
                return true;
            }
            let Some(position) = self.messages.iter().position(free) else { return true };
            let message = self.messages.remove(position).expect("just found");
            waiter.set(State::Delivered(Delivery::Message(message)));
            false
        });
        self.waiters.waiting = waiting;
    }

    /// The message that answers this doorbell word, if it has arrived.
    pub(crate) fn take_answer(&mut self, word: u64) -> Option<Message> {
        let answers = |message: &Message| message.sequence == word && is_answer(message);
        let position = self.messages.iter().position(answers)?;
        self.clear_pending(word);
        self.messages.remove(position)
    }
}

/// Whether the `sequence` of a message is a doorbell word.
pub(crate) fn is_answer(message: &Message) -> bool {
    !matches!(message.kind, MessageKind::LeaseGranted | MessageKind::LeaseEnded | MessageKind::DmaDone)
}
