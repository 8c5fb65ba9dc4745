//! The progress thread: it works for an application that does not poll. It retries pending requests, executes tasks
//! that peers report, expires timers, and notices the exit of peers. While packets arrive at short intervals, it polls for
//! them: the wake-up of a responder that sleeps takes longer than a READ.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use millstream_quantity::Qpn;
use millstream_shm::number_from_environment;
use millstream_shm::polling::{DEFAULT_POLLING, Polling};

use crate::adapter::LocalAdapter;
use crate::ipc::{Message, Op};
use crate::move_queue::Job;
use crate::peer::Peer;
use crate::qp_table::QpOps;
use crate::region_mover;
use crate::roce_port::BusyPoll;
use crate::tasks::Task;

/// Timer slack of the thread's waits. The kernel's default of 50 µs is as long as a round trip on the network.
const TIMER_SLACK: Duration = Duration::from_micros(1);

/// How long the thread polls before it sleeps (`MILLSTREAM_SPIN`).
fn spin() -> Duration {
    let default = DEFAULT_POLLING.as_micros() as u64;
    Duration::from_micros(number_from_environment("MILLSTREAM_SPIN", "microseconds", default))
}

/// Runs the progress thread.
pub(crate) fn run(adapter: &'static LocalAdapter) {
    let tasks = adapter.tasks;
    let mut polling = Polling::new(spin());
    // SAFETY: no memory is involved.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK.as_nanos() as libc::c_ulong) };
    loop {
        let watched = adapter.peers.watched();
        let (port, timeout) = adapter.port.poll_set();
        let [wake, timer] = tasks.descriptors().map(|fd| fd.as_raw_fd());
        let [port, relay, release] = port.map(|fd| fd.unwrap_or(-1));
        let addresses = adapter.multicast.address_changes().map_or(-1, |fd| fd.as_raw_fd());
        let mut fds: Vec<_> = [wake, timer, port, relay, release, addresses]
            .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
            .into();
        fds.extend(watched.iter().flat_map(|peer| peer.exit_events()));
        let polled = adapter.port.busy_poll(&mut polling);
        let timeout = if polled == BusyPoll::Over { timeout } else { Some(Duration::ZERO) };
        let timeout = timeout.map(|time| libc::timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: an array of pollfd of the given length, and a time on the stack or none.
        unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout, std::ptr::null()) };
        if fds[0].revents != 0 {
            tasks.take_wake();
        }
        if fds[1].revents != 0 {
            tasks.take_expiry();
        }
        if fds[5].revents != 0 {
            adapter.multicast.addresses_changed(adapter.port.port());
        }
        let received = adapter.port.service(fds[2..5].iter().any(|fd| fd.revents != 0));
        if received || polled == BusyPoll::Received {
            polling.begin_if_frequent();
        }
        for (peer, events) in watched.iter().zip(fds[6..].chunks(2)) {
            if events.iter().any(|event| event.revents & !libc::POLLOUT != 0) {
                peer_lost(adapter, peer);
            } else if events[0].revents != 0 {
                peer.send_unsent();
            }
        }
        tasks.retry_pending();
        tasks.end_moderation();
        // A thread that adds a task may hold the send queue that another task needs, so the list is not locked meanwhile.
        for task in tasks.take() {
            execute(adapter, task);
        }
    }
}

fn execute(adapter: &'static LocalAdapter, task: Task) {
    let with_qp = |qpn: Qpn, work: &dyn Fn(&dyn QpOps)| {
        if let Some(qp) = adapter.qps.get(qpn) {
            work(&*qp);
        }
    };
    match task {
        Task::QpError { qpn, from, event, revision } => {
            with_qp(qpn, &|qp| qp.qp_error(from, event, revision))
        }
        Task::QpFatal { qpn } => with_qp(qpn, &|qp| qp.qp_fatal()),
        Task::SrqLimit { qpn } => with_qp(qpn, &|qp| qp.srq_limit()),
        Task::CommEst { qpn, from, revision } => with_qp(qpn, &|qp| qp.comm_est(from, revision)),
        Task::CqOverrun { qpn } => with_qp(qpn, &|qp| qp.cq_overrun()),
        Task::RecvAbandoned { qpn } => with_qp(qpn, &|qp| qp.recv_abandoned()),
        Task::Retry { qpn } => with_qp(qpn, &|qp| qp.retry_now()),
        Task::ReportRecvPosted { qpn } => {
            if let Ok(peer) = adapter.peer_of(qpn) {
                peer.send(Message::new(Op::RecvPosted, [qpn.get()]));
            }
        }
        Task::RestoreEvents => restore(adapter),
        Task::ShareRegion { key } => region_mover::add(adapter, Job::Share { key }),
        Task::XrcSrqEvent { number, event } => {
            if let Some(srq) = adapter.xrc_srqs.get(number) {
                srq.srq_event(event);
            }
        }
    }
}

/// Completes what a process began that has exited or executes another program: signals its events, frees its locks.
fn restore(adapter: &'static LocalAdapter) {
    adapter.event_sources.restore_all();
    for qp in adapter.qps.all() {
        qp.recover_locks();
    }
    adapter.xrc_srqs.recover_locks();
    adapter.recover_locks();
}

/// A peer's process has exited or executes another program: pending requests to it fail.
fn peer_lost(adapter: &'static LocalAdapter, peer: &Arc<Peer>) {
    restore(adapter);
    adapter.peers.remove(peer);
    for qp in adapter.qps.all() {
        qp.peer_lost(peer);
    }
}
