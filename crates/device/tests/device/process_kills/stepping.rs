//! A sender that is killed between two instructions, from the publication of its completion to the end of
//! `ibv_post_send`. The receiver's events arrive nevertheless, and its queues work with the next sender.
//!
//! The test traces the sender's thread and executes single instructions. `make test` samples the instructions;
//! `make soak` tries all of them.

use std::io::ErrorKind;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::time::Duration;

use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{WC_RETRY_EXC_ERR, WC_SUCCESS, WR_SEND, Wc};
use millstream_device::{Channel, Cq, Srq};

use crate::support::{
    Adapter, Process, QpConfig, Random, connect_queue_pair, event, from_environment, next, recv_from_parent,
    send_to_parent, wait_for,
};

/// `IBV_EVENT_SRQ_LIMIT_REACHED`
const LIMIT_REACHED: u32 = 15;
/// Receives that are posted when the sender is killed.
const RECEIVES: u32 = 4;

/// ACK timers of milliseconds: the error that reports the exit comes soon.
fn attributes() -> QpConfig {
    QpConfig { timeout: 8, ..QpConfig::default() }
}

/// Entry point of the sender. Signals mark the instructions between them for the tracer.
pub(crate) fn sender() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = adapter.qp(&cq).expect("a queue pair");
    // SAFETY: plain system calls.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) };
    send_to_parent(&format!("{} {thread}", qp.qpn().get()));
    let receiver = recv_from_parent().expect("a number").parse().expect("a number");
    connect_queue_pair(&qp, receiver, &attributes());
    let send = || qp.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    // The first message finds the receiver and its completion channel.
    send();
    assert_eq!(next(&cq).status, WC_SUCCESS);
    send_to_parent("sent");
    recv_from_parent();
    // SAFETY: the tracer suppresses both signals.
    unsafe { libc::raise(libc::SIGUSR1) };
    send();
    // SAFETY: as above.
    unsafe { libc::raise(libc::SIGUSR2) };
}

/// A thread of another process that this thread traces.
pub(super) struct Traced(libc::pid_t);

impl Traced {
    fn request(&self, request: libc::c_uint, data: usize) {
        // SAFETY: the address is unused by these requests, and no memory of this process is written.
        let done = unsafe { libc::ptrace(request, self.0, 0usize, data) };
        assert_eq!(done, 0, "ptrace request {request}: {}", std::io::Error::last_os_error());
    }

    /// The signal that stopped the thread.
    pub(super) fn stop(&self) -> i32 {
        let mut status = 0;
        // SAFETY: writes the status.
        let thread = unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) };
        assert!(thread == self.0 && libc::WIFSTOPPED(status), "the sender stops: {status:#x}");
        libc::WSTOPSIG(status)
    }

    pub(super) fn attach(thread: libc::pid_t) -> Self {
        let traced = Self(thread);
        traced.request(libc::PTRACE_SEIZE, 0);
        traced
    }

    /// Executes one instruction; false at the second mark.
    pub(super) fn step(&self) -> bool {
        self.request(libc::PTRACE_SINGLESTEP, 0);
        self.stop() != libc::SIGUSR2
    }

    /// Reaps the thread of a process that was killed.
    pub(super) fn end(self) {
        let mut status = 0;
        // SAFETY: writes the status.
        while unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) } == self.0
            && libc::WIFSTOPPED(status)
        {}
    }
}

/// The receiver, in this process.
struct Receiver {
    adapter: Adapter,
    channel: Arc<Channel>,
    received: Arc<Cq>,
    sent: Arc<Cq>,
    srq: Option<Arc<Srq>>,
}

impl Receiver {
    fn new(shared: bool) -> Self {
        let adapter = Adapter::open();
        let channel = Channel::new(&adapter.context).expect("a channel");
        // SAFETY: a plain system call.
        assert_eq!(unsafe { libc::fcntl(channel.as_fd().as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        let received = Cq::new(&adapter.context, 64, Some(channel.clone())).expect("a queue");
        let srq = shared.then(|| Srq::new(&adapter.pd, RECEIVES, 1).expect("a shared queue"));
        Self { sent: adapter.cq(), channel, received, srq, adapter }
    }

    fn post_receives(&self, qp: &Qp) {
        match &self.srq {
            Some(srq) => while srq.post(1, &[]).is_ok() {},
            None => (0..RECEIVES).for_each(|_| qp.post_recv(1, &[]).expect("room")),
        }
    }

    /// Whether there was an event. A producer between two steps may be slower than the restoration of its events, because it
    /// executes single instructions: then the channel is signalled without an event.
    fn take_event(&self) -> bool {
        match self.channel.next_event() {
            Ok(cq) => {
                assert!(Arc::ptr_eq(&cq, &self.received));
                cq.acknowledge(1);
                true
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => panic!("the channel: {error}"),
        }
    }

    /// Connects a new sender and checks that a message of it causes an event.
    fn connect(&self) -> (Process, libc::pid_t, Arc<Qp>) {
        let mut process = Process::start("stepped_sender");
        let line = process.recv_line();
        let (qpn, thread) = line.split_once(' ').expect("two numbers");
        let capacity = QpCap { max_send_wr: 4, max_recv_wr: 8, max_recv_sge: 1, ..QpCap::default() };
        let source = self.srq.clone().map_or(RecvSource::Own, RecvSource::Shared);
        let qp = Qp::new(&self.adapter.pd, &self.sent, &self.received, capacity, true, QpType::Rc, source)
            .expect("a queue pair");
        connect_queue_pair(&qp, qpn.parse().expect("a number"), &attributes());
        self.post_receives(&qp);
        self.received.arm(false);
        process.send_line(&qp.qpn().get().to_string());
        assert_eq!(process.recv_line(), "sent");
        wait_for("the event of a new sender", || self.take_event());
        assert_eq!(next(&self.received).status, WC_SUCCESS);
        self.post_receives(&qp);
        (process, thread.parse().expect("a number"), qp)
    }

    fn set_limit(&self) {
        if let Some(srq) = &self.srq {
            srq.set_limit(RECEIVES).expect("within the size");
        }
    }

    /// Instructions from the first mark to the first effect that the receiver sees, and to the second mark.
    fn count_instructions(&self) -> (u64, u64) {
        let (mut process, thread, qp) = self.connect();
        self.set_limit();
        let sender = Traced::attach(thread);
        process.send_line("go");
        assert_eq!(sender.stop(), libc::SIGUSR1);
        let (mut steps, mut published) = (0, 0);
        while sender.step() {
            steps += 1;
            let claimed = self.srq.as_ref().is_some_and(|srq| srq.limit() == 0);
            if published == 0
                && (claimed || self.received.poll(&mut [Wc::default()]).expect("no overflow") == 1)
            {
                published = steps;
            }
        }
        process.signal(libc::SIGKILL);
        sender.end();
        qp.destroy();
        while event(&self.adapter.context, Duration::ZERO).is_some() {}
        assert!(0 < published && published < steps, "first effect at {published} of {steps}");
        (published, steps)
    }

    /// Kills a sender after `steps` instructions. Whether its completion was published or the limit reached.
    fn kill_after(&self, steps: u64) -> bool {
        let (mut process, thread, qp) = self.connect();
        // Waits for a receive of the sender, and fails when the device has handled the exit.
        qp.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
        self.set_limit();
        self.received.arm(false);
        let sender = Traced::attach(thread);
        process.send_line("go");
        assert_eq!(sender.stop(), libc::SIGUSR1);
        for _ in 0..steps {
            if !sender.step() {
                break;
            }
        }
        process.signal(libc::SIGKILL);
        sender.end();
        let failed = next(&self.sent);
        assert_eq!(failed.status, WC_RETRY_EXC_ERR, "after {steps} instructions");

        let signalled = self.take_event();
        let mut found = [Wc::default()];
        // A receive that the sender took from the shared queue and did not complete is flushed, with an event, at any moment.
        let published =
            self.received.poll(&mut found).expect("no overflow") == 1 && found[0].status == WC_SUCCESS;
        assert!(signalled || !published, "no event after {steps} instructions");
        let mut effective = published;
        if let Some(srq) = &self.srq {
            let events = std::iter::from_fn(|| event(&self.adapter.context, Duration::ZERO));
            let reached = events.filter(|kind| *kind == LIMIT_REACHED).count();
            assert!(reached <= 1, "{reached} limit events after {steps} instructions");
            effective |= srq.limit() == 0;
            assert!(!effective || reached == 1, "no limit event after {steps} instructions");
            srq.set_limit(0).expect("no limit");
        }
        qp.destroy();
        // The completion that the failed queue pair flushed, and completions of its receives, with their event.
        while self.received.poll(&mut [Wc::default()]).expect("no overflow") == 1 {}
        while self.take_event() {}
        effective
    }
}

/// Kills senders at these instructions: the first is the one before the first effect.
fn kill_at(shared: bool, mut instructions: impl FnMut(u64) -> Vec<u64>) {
    let receiver = Receiver::new(shared);
    let (published, steps) = receiver.count_instructions();
    let first = published - 1;
    let chosen = instructions(steps - first + 1);
    let after = chosen.iter().filter(|at| receiver.kill_after(first + **at)).count();
    println!("{steps} instructions, first effect at {published}; {} kills, {after} after it", chosen.len());
    assert!(after * 2 > chosen.len(), "most kills are after the first effect");
    // The device accepts a last sender.
    let (mut process, ..) = receiver.connect();
    process.kill();
    wait_for("the sender's end", || !std::fs::exists(format!("/proc/{}", process.id())).expect("Linux"));
}

fn sample(shared: bool) {
    let mut random = Random::new(from_environment("MILLSTREAM_SEED", 1));
    let kills = from_environment("MILLSTREAM_KILLS", 40);
    kill_at(shared, |count| (0..kills).map(|_| random.below(count)).collect());
}

#[test]
fn no_completion_event_is_lost_with_its_sender() {
    sample(false);
}

#[test]
fn no_srq_limit_event_is_lost_with_its_sender() {
    sample(true);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn no_event_is_lost_between_any_two_instructions() {
    kill_at(false, |count| (0..count).collect());
    kill_at(true, |count| (0..count).collect());
}
