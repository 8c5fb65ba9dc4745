//! The device's objects, for tests that need more than two ends of a connection.

use std::sync::Arc;
use std::time::Duration;

use millstream_device::qp::{QpCap, QpType, RecvSource};
use millstream_device::types::{Sge, Wc};
use millstream_device::{Context, Cq, Errno, Mr, Pd, Qp};

use super::actor::readable;
use super::process::Process;
use super::wait_for;

/// Runs a role in another process, and waits until it succeeds.
pub(crate) fn run_role(role: &str) {
    let mut process = Process::start(role);
    assert!(process.finish().success(), "{role}");
}

/// The device in this process, used directly.
pub(crate) struct Adapter {
    pub(crate) context: Arc<Context>,
    pub(crate) pd: Arc<Pd>,
}

impl Adapter {
    pub(crate) fn open() -> Self {
        let context = Context::open().expect("the device opens");
        Self { pd: Pd::new(&context), context }
    }

    pub(crate) fn cq(&self) -> Arc<Cq> {
        Cq::new(&self.context, 64, None).expect("a queue")
    }

    /// A reliable connected queue pair with its own receive queue.
    pub(crate) fn qp(&self, cq: &Arc<Cq>) -> Result<Arc<Qp>, Errno> {
        self.qp_with(cq, QpType::Rc, RecvSource::Own)
    }

    pub(crate) fn qp_with(&self, cq: &Arc<Cq>, kind: QpType, receives: RecvSource) -> Result<Arc<Qp>, Errno> {
        self.qp_sized(cq, 8, kind, receives)
    }

    pub(crate) fn qp_sized(
        &self,
        cq: &Arc<Cq>,
        max_recv_wr: u32,
        kind: QpType,
        receives: RecvSource,
    ) -> Result<Arc<Qp>, Errno> {
        let capacity =
            QpCap { max_send_wr: 8, max_recv_wr, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        Qp::new(&self.pd, cq, cq, capacity, true, kind, receives)
    }

    pub(crate) fn register(&self, memory: &mut [u8]) -> Mr {
        let start = memory.as_mut_ptr() as u64;
        Mr::register(&self.pd, start, memory.len() as u64, start, 7).expect("registered")
    }
}

pub(crate) fn element(memory: &[u8], mr: &Mr) -> Sge {
    Sge { addr: memory.as_ptr() as u64, length: memory.len() as u32, lkey: mr.key() }
}

/// The type of the next asynchronous event, if one arrives within the time.
pub(crate) fn event(context: &Context, within: Duration) -> Option<u32> {
    readable(context, within).then(|| context.next_event().expect("it is readable").kind())
}

/// Whether the queue has no completion.
pub(crate) fn is_empty(cq: &Cq) -> bool {
    cq.poll(&mut [Wc::default()]).expect("no overflow") == 0
}

/// The next completion.
pub(crate) fn next(cq: &Cq) -> Wc {
    let mut out = [Wc::default()];
    wait_for("a completion", || cq.poll(&mut out).expect("no overflow") == 1);
    out[0]
}

/// Reads a byte that peers may be writing.
pub(crate) fn peek(memory: &[u8], at: usize) -> u8 {
    // SAFETY: inside the slice.
    unsafe { memory.as_ptr().add(at).read_volatile() }
}

/// The fill byte of memory that peers may no longer access.
pub(crate) const POISON: u8 = 0xee;

/// Fills memory with [`POISON`], both ends first, because a copy in flight writes one of the ends last.
pub(crate) fn poison(memory: &mut [u8]) {
    let page = memory.len().min(4096);
    memory[..page].fill(POISON);
    memory.rchunks_mut(4096).for_each(|page| page.fill(POISON));
}

/// Whether a copy of bytes of this value has begun, in any order.
pub(crate) fn has_begun(memory: &[u8], value: u8) -> bool {
    (0..64).any(|i| peek(memory, memory.len() / 64 * i + 2048) == value)
}
