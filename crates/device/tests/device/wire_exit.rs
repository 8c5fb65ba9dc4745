//! A process that exits without destroying its queue pairs has acknowledged what its program has received.

use std::time::Instant;

use millstream_device::send_wr::SendWr;
use millstream_device::types::{SEND_SIGNALED, Sge, WC_SUCCESS, WR_SEND, Wc};

use crate::abandoned::ready;
use crate::support::{Adapter, Process, TEST_TIMEOUT, element, next, recv_from_parent, send_to_parent};
use crate::wire::on_the_wire;

/// Receivers that exit.
const RECEIVERS: u64 = 50;

#[test]
fn a_receiver_that_exits_has_acknowledged() {
    on_the_wire("wire_sender_to_exiting");
}

/// In another process, the sender.
pub(crate) fn sender() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let mut message = vec![1; 64];
    let mr = adapter.register(&mut message);
    let sges = [element(&message, &mr)];
    for wr_id in 0..RECEIVERS {
        let qp = adapter.qp(&cq).expect("room");
        let mut receiver = Process::start("wire_exiting_receiver");
        let peer = receiver.recv_line().parse().expect("a number");
        receiver.send_line(&qp.qpn().get().to_string());
        ready(&qp, peer);
        assert_eq!(receiver.recv_line(), "ready");
        let wr = SendWr { wr_id, opcode: WR_SEND, flags: SEND_SIGNALED, sges: &sges, ..SendWr::default() };
        qp.post_send(&wr).expect("room");
        let sent = next(&cq);
        assert_eq!((sent.wr_id, sent.status), (wr_id, WC_SUCCESS));
        assert!(receiver.finish().success());
        qp.destroy();
    }
}

/// In a third process: it polls until a message is there, and exits at once.
pub(crate) fn receiver() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = adapter.qp(&cq).expect("room");
    let mut memory = vec![0; 64];
    let mr = adapter.register(&mut memory);
    send_to_parent(&qp.qpn().get().to_string());
    ready(&qp, recv_from_parent().expect("a line").parse().expect("a number"));
    qp.post_recv(0, &[Sge { length: 64, ..element(&memory, &mr) }]).expect("room");
    send_to_parent("ready");
    let deadline = Instant::now() + TEST_TIMEOUT;
    while cq.poll(&mut [Wc::default()]).expect("a queue") == 0 {
        assert!(Instant::now() < deadline, "no message comes");
    }
    // SAFETY: runs the exit handlers. No other thread of this process waits for anything of it.
    unsafe { libc::exit(0) };
}
