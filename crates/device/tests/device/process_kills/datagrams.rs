//! A sender of datagrams that is killed between two instructions, around the publication of its completion. The receive that it
//! completed belongs to the application: no later datagram is written there, and all later receives are completed in order.

use std::net::Ipv4Addr;
use std::sync::Arc;

use millstream_device::qp::{Qp, QpType};
use millstream_device::send_wr::{SendWr, UdDestination};
use millstream_device::types::{Sge, WC_SUCCESS, Wc};
use millstream_device::{Cq, Mr};

use super::stepping::Traced;
use crate::abandoned;
use crate::support::{Adapter, Process, element, next, recv_from_parent, send_to_parent, wait_for};

/// Bytes of a message, and of a receive: the message behind the header.
const MESSAGE: usize = 64;
const ROOM: usize = 40 + MESSAGE;
const RECEIVES: usize = 8;
/// The contents of messages: of the sender that is killed, and of the one that survives.
const KILLED: u8 = 0x11;
const SURVIVOR: u8 = 0x22;

/// A datagram that goes to this host as to another one: by a packet.
fn packet(qpn: u32) -> SendWr<'static> {
    let wr = abandoned::datagram(qpn);
    let mut grh = [0; 40];
    // The IPv4 header lies at the end, source and destination at its end (annex A17.4.5.2).
    grh[20] = 0x45;
    grh[32..36].copy_from_slice(&Ipv4Addr::LOCALHOST.octets());
    grh[36..].copy_from_slice(&Ipv4Addr::LOCALHOST.octets());
    SendWr { to: wr.to.map(|to| UdDestination { on_this_host: false, grh, ..to }), ..wr }
}

/// Sends one message of these bytes; the send must succeed.
fn send(qp: &Qp, cq: &Cq, message: &[u8], mr: &Mr, datagram: &SendWr<'_>) {
    let sges = [element(message, mr)];
    qp.post_send(&SendWr { sges: &sges, ..*datagram }).expect("room");
    assert_eq!(next(cq).status, WC_SUCCESS);
}

/// Entry point of the sender. Signals mark the instructions between them for the tracer.
pub(crate) fn sender() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = abandoned::sender(&adapter, &cq, QpType::Ud);
    abandoned::ready(&qp, 0);
    let mut message = vec![KILLED; MESSAGE];
    let mr = adapter.register(&mut message);
    // SAFETY: plain system calls.
    send_to_parent(&unsafe { libc::syscall(libc::SYS_gettid) }.to_string());
    let to = recv_from_parent().expect("a number").parse().expect("a number");
    // The first message finds the receiver.
    send(&qp, &cq, &message, &mr, &abandoned::datagram(to));
    send_to_parent("sent");
    recv_from_parent();
    let sges = [element(&message, &mr)];
    // SAFETY: the tracer suppresses both signals.
    unsafe { libc::raise(libc::SIGUSR1) };
    qp.post_send(&SendWr { sges: &sges, ..abandoned::datagram(to) }).expect("room");
    // SAFETY: as above.
    unsafe { libc::raise(libc::SIGUSR2) };
}

/// The receiver, with a sender in its own process that survives.
struct Receiver {
    adapter: Adapter,
    received: Arc<Cq>,
    qp: Arc<Qp>,
    sent: Arc<Cq>,
    survivor: Arc<Qp>,
    /// Makes the survivor's datagrams, to this queue pair.
    datagram: fn(u32) -> SendWr<'static>,
    message: Vec<u8>,
    message_mr: Mr,
    mr: Mr,
    // Dropped last: it is registered until then.
    memory: Vec<u8>,
}

impl Receiver {
    fn new(datagram: fn(u32) -> SendWr<'static>) -> Self {
        let adapter = Adapter::open();
        let (received, sent) = (adapter.cq(), adapter.cq());
        let qp = adapter
            .qp_with(&received, QpType::Ud, millstream_device::qp::RecvSource::Own)
            .expect("a queue pair");
        abandoned::ready(&qp, 0);
        let survivor = abandoned::sender(&adapter, &sent, QpType::Ud);
        abandoned::ready(&survivor, 0);
        let mut memory = vec![0; RECEIVES * ROOM];
        let mut message = vec![SURVIVOR; MESSAGE];
        let (mr, message_mr) = (adapter.register(&mut memory), adapter.register(&mut message));
        Self { adapter, received, qp, sent, survivor, datagram, message, message_mr, mr, memory }
    }

    fn post(&self, i: usize) {
        let addr = self.memory.as_ptr() as u64 + (i * ROOM) as u64;
        self.qp.post_recv(i as u64, &[Sge { addr, length: ROOM as u32, lkey: self.mr.key() }]).expect("room");
    }

    /// The message in the memory of a receive.
    fn contents(&self, i: u64) -> Vec<u8> {
        let start = self.memory.as_ptr() as usize + i as usize * ROOM + 40;
        // SAFETY: inside the memory; senders write it only while their receive is posted.
        unsafe { std::slice::from_raw_parts(start as *const u8, MESSAGE) }.to_vec()
    }

    fn poll(&self) -> Option<u64> {
        let mut found = [Wc::default()];
        let count = self.received.poll(&mut found).expect("no overflow");
        (count == 1).then(|| {
            assert_eq!(found[0].status, WC_SUCCESS);
            found[0].wr_id
        })
    }

    /// A sender that has sent one datagram, to receive 0.
    fn start_sender(&self) -> (Process, Traced) {
        let mut process = Process::start("stepped_datagrams");
        let thread = process.recv_line().parse().expect("a number");
        // Packets that were on their way find no receive.
        assert!((0..100).all(|_| self.poll().is_none()), "all receives were completed before");
        (0..RECEIVES).for_each(|i| self.post(i));
        process.send_line(&self.qp.qpn().get().to_string());
        assert_eq!(process.recv_line(), "sent");
        wait_for("the first datagram", || self.poll() == Some(0));
        let sender = Traced::attach(thread);
        process.send_line("go");
        assert_eq!(sender.stop(), libc::SIGUSR1);
        (process, sender)
    }

    fn send(&self) {
        send(
            &self.survivor,
            &self.sent,
            &self.message,
            &self.message_mr,
            &(self.datagram)(self.qp.qpn().get()),
        );
    }

    /// The instruction after which the completion is visible, and the last one.
    fn count_instructions(&self) -> (u64, u64) {
        let (process, sender) = self.start_sender();
        let (mut steps, mut published) = (0, 0);
        while sender.step() {
            steps += 1;
            if published == 0 && self.poll().is_some() {
                published = steps;
            }
        }
        process.signal(libc::SIGKILL);
        sender.end();
        self.drain(2);
        assert!(0 < published && published < steps, "published at {published} of {steps}");
        (published, steps)
    }

    /// Completes the receives from `first` on with datagrams of the survivor. Some may be dropped, none is written elsewhere.
    fn drain(&self, first: u64) {
        for i in first..RECEIVES as u64 {
            wait_for("a datagram that is not dropped", || {
                self.send();
                self.poll() == Some(i)
            });
            assert_eq!(self.contents(i), [SURVIVOR; MESSAGE]);
        }
    }

    /// Kills a sender after `steps` instructions. The application polls the completion, if there is one, before or after
    /// the survivor's next datagram. True if there was one.
    fn kill_after(&self, steps: u64, polls_first: bool) -> bool {
        let (process, sender) = self.start_sender();
        for _ in 0..steps {
            if !sender.step() {
                break;
            }
        }
        process.signal(libc::SIGKILL);
        sender.end();
        if !polls_first {
            self.send();
        }
        let first = self.poll();
        let when = format!("after {steps} instructions, polls first: {polls_first}");
        let is_killed = first.is_some() && self.contents(1) == [KILLED; MESSAGE];
        if let Some(first) = first {
            assert_eq!(first, 1, "{when}");
            assert!(is_killed || (!polls_first && self.contents(1) == [SURVIVOR; MESSAGE]), "{when}");
        }
        let before = self.contents(1);
        self.drain(if first.is_some() { 2 } else { 1 });
        if first.is_some() {
            assert_eq!(self.contents(1), before, "a receive that was polled is the application's, {when}");
        }
        is_killed
    }
}

#[test]
fn a_completed_receive_of_a_killed_datagram_sender_is_not_used_again() {
    is_not_used_again(&Receiver::new(abandoned::datagram));
}

#[test]
fn a_completed_receive_of_a_killed_datagram_sender_is_not_used_by_packets() {
    is_not_used_again(&Receiver::new(packet));
}

fn is_not_used_again(receiver: &Receiver) {
    let mut completed = 0;
    // A sender that waits for a processor takes more instructions than the one that was counted: then they are counted again.
    for _ in 0..5 {
        let (published, steps) = receiver.count_instructions();
        let last = steps.min(published + 24);
        for (n, at) in (published - 1..=last).enumerate() {
            completed += u32::from(receiver.kill_after(at, n % 2 == 0));
            completed += u32::from(receiver.kill_after(at, n % 2 != 0));
        }
        println!(
            "published at {published} of {steps} instructions; {completed} completions of killed senders"
        );
        if completed > 10 {
            break;
        }
    }
    assert!(completed > 10, "{completed} completions");
    assert!(receiver.adapter.cq().poll(&mut [Wc::default()]).is_ok());
}
