//! Blocking for completions and other descriptors.

mod common;

use std::io::Write;
use std::time::{Duration, Instant};

use common::{both, device, soon};
use millstream_rdma::queue::{QueuePair, Signal};
use millstream_rdma::wait::{WaitError, WaitOptions};
use millstream_rdma::{
    Completion, CompletionQueue, CompletionWaiter, Deadline, PreparedQueuePair, RcOptions, WaitFd,
    WaitOutcome, WrId,
};

const BLOCK_AT_ONCE: WaitOptions =
    WaitOptions { spin: Duration::ZERO, descriptors_every: Duration::from_millis(10) };

/// A waiting end; its completion queue gets only receives.
struct End {
    waiter: CompletionWaiter,
    received: CompletionQueue,
    sent: CompletionQueue,
    pair: QueuePair,
}

fn connect(mut stream: std::net::TcpStream, options: WaitOptions) -> End {
    let device = device();
    let waiter = CompletionWaiter::new(&device, options).unwrap();
    let received = waiter.completion_queue(64).unwrap();
    let sent = waiter.completion_queue(64).unwrap();
    let options = RcOptions { send_depth: 64, recv_depth: 64, ..RcOptions::default() };
    let prepared = PreparedQueuePair::new(&device, &sent, &received, &options).unwrap();
    for id in 0..16 {
        prepared.post_recv(&[], WrId(id)).unwrap();
    }
    let pair = prepared.connect(&mut stream, &[], soon()).unwrap().pair;
    End { waiter, received, sent, pair }
}

impl End {
    /// Waits for one received message; also returns the outcome of the wait.
    fn receive(&mut self, others: &mut [WaitFd<'_>], deadline: Deadline) -> (WaitOutcome, Option<u32>) {
        let mut imm = None;
        let (received, pair) = (&self.received, &self.pair);
        let wake = self.waiter.wait::<WaitError>(&[received], others, deadline, || {
            let mut buffer = [Completion::EMPTY];
            let [completion] = received.poll(&mut buffer).unwrap() else { return Ok(false) };
            completion.check().unwrap();
            imm = completion.imm();
            pair.post_recv(&[], WrId(0)).unwrap();
            Ok(true)
        });
        (wake.unwrap(), imm)
    }

    fn send(&self, imm: u32) {
        self.pair.post_send_imm(&[], imm, Signal::Yes, WrId(1)).unwrap();
    }

    /// Polls the completions of sends, so that their queue does not overrun.
    fn reap(&self) {
        let mut buffer = [Completion::EMPTY; 64];
        for completion in self.sent.poll(&mut buffer).unwrap() {
            completion.check().unwrap();
        }
    }
}

fn pair(options: WaitOptions) -> (End, End) {
    both(|stream| connect(stream, options), |stream| connect(stream, options))
}

/// CPU time of this thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and the structure is valid.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_blocked_wait_uses_no_processor_and_wakes_for_a_completion() {
    let (mut a, b) = pair(WaitOptions::default());
    let (start, used) = (Instant::now(), thread_time());
    let sender = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        b.send(7);
        b
    });
    assert_eq!(a.receive(&mut [], soon()), (WaitOutcome::Progress, Some(7)));
    assert!(start.elapsed() >= Duration::from_millis(250));
    assert!(thread_time() - used < Duration::from_millis(50), "it was spinning");
    sender.join().unwrap();
}

#[test]
fn no_notification_is_lost_when_every_wait_blocks() {
    const ROUNDS: u32 = 2000;
    let (mut a, mut b) = pair(BLOCK_AT_ONCE);
    let echo = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            assert_eq!(b.receive(&mut [], soon()), (WaitOutcome::Progress, Some(round)));
            b.send(round);
            b.reap();
        }
        b
    });
    for round in 0..ROUNDS {
        a.send(round);
        assert_eq!(a.receive(&mut [], soon()), (WaitOutcome::Progress, Some(round)), "round {round}");
        a.reap();
    }
    echo.join().unwrap();
}

#[test]
fn many_messages_at_once_are_all_found() {
    let (mut a, mut b) = pair(BLOCK_AT_ONCE);
    for burst in 0..50 {
        for k in 0..10 {
            b.send(burst * 10 + k);
        }
        for k in 0..10 {
            assert_eq!(a.receive(&mut [], soon()), (WaitOutcome::Progress, Some(burst * 10 + k)));
        }
        b.reap();
    }
    // Events of completions that were already polled cause no false wake-up.
    let wake = b.receive(&mut [], Deadline::after(Duration::from_millis(20)));
    assert_eq!(wake, (WaitOutcome::Deadline, None));
}

#[test]
fn two_queues_of_one_waiter_both_wake_it() {
    let (mut a, mut b) = pair(BLOCK_AT_ONCE);
    for _ in 0..20 {
        b.send(1);
        let mut done = (false, false);
        while done != (true, true) {
            let (received, sent) = (&b.received, &b.sent);
            let wake = b.waiter.wait::<WaitError>(&[received, sent], &mut [], soon(), || {
                let mut buffer = [Completion::EMPTY];
                let before = done;
                done.0 |= !received.poll(&mut buffer).unwrap().is_empty();
                done.1 |= !sent.poll(&mut buffer).unwrap().is_empty();
                Ok(done != before)
            });
            assert_eq!(wake.unwrap(), WaitOutcome::Progress);
            if !done.0 {
                assert_eq!(a.receive(&mut [], soon()).1, Some(1));
                a.send(2);
                a.reap();
            }
        }
        b.pair.post_recv(&[], WrId(0)).unwrap();
    }
}

#[test]
fn a_deadline_ends_a_wait_in_time() {
    let (mut a, _b) = pair(WaitOptions::default());
    for milliseconds in [0, 1, 50] {
        let (start, time) = (Instant::now(), Duration::from_millis(milliseconds));
        assert_eq!(a.receive(&mut [], Deadline::after(time)), (WaitOutcome::Deadline, None));
        assert!(start.elapsed() >= time && start.elapsed() < time + Duration::from_secs(2));
    }
}

#[test]
fn other_descriptors_end_a_wait() {
    let (mut a, b) = pair(WaitOptions::default());
    let (quiet, _quiet_end) = common::streams();
    let (talking, mut talker) = common::streams();
    talker.write_all(b"x").unwrap();
    let mut others = [WaitFd::readable(&quiet), WaitFd::readable(&talking), WaitFd::writable(&quiet)];
    assert_eq!(a.receive(&mut others[..2], soon()).0, WaitOutcome::Descriptor);
    assert_eq!(others.each_ref().map(WaitFd::is_ready), [false, true, false]);
    assert!(!others[1].is_closed());
    drop(talker);
    assert_eq!(a.receive(&mut others[..2], soon()).0, WaitOutcome::Descriptor);
    assert!(others[1].is_closed() && !others[0].is_closed());
    assert_eq!(a.receive(&mut others[2..], soon()).0, WaitOutcome::Descriptor);

    // During a stream of completions, the descriptors are still checked.
    b.send(1);
    assert_eq!(a.receive(&mut others[..1], soon()), (WaitOutcome::Progress, Some(1)));
    std::thread::sleep(BLOCK_AT_ONCE.descriptors_every * 2);
    b.send(2);
    assert_eq!(a.receive(&mut others[..2], soon()), (WaitOutcome::Progress, Some(2)));
    assert!(others[1].is_ready());
}
