//! This process's memory and receive queues, as packets from elsewhere reach them.
//!
//! Packets are carried out here as an initiator of the same host would carry its requests out: this process is
//! the initiator and the target at once, so keys, receive queues and completion queues have one set of rules
//! (`transfer`, `target`, `keys`). Everything happens under the send queue's lock, which is what whoever takes
//! memory away waits for; the entry is announced as busy as well, for those who may not wait for that lock.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use millstream_proto::{DeliveryFault, Refusal};
use millstream_shm::barrier;

use crate::cqe::Cqe;
use crate::greeting::{Message, Op};
use crate::host::Host;
use crate::peer::Peer;
use crate::qp::Qp;
use crate::qp::datagram::{Elements, Piece};
use crate::qp::keys::{RemoteKeys, Window};
use crate::qp::target::{Left, Readiness, Receive, Target};
use crate::qp::transfer::{Stop, admit, change_word, load, scatter, set_word, store};
use crate::ring::NotAdded;
use crate::types::{ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SendWr, Sge, total_len};

/// See the module's description.
#[derive(Debug)]
pub(super) struct Landing {
    // Order matters: what points into the arena goes before the peer.
    target: Target,
    keys: RemoteKeys,
    /// This process.
    peer: Arc<Peer>,
    host: &'static Host,
    /// The receive request that the message under way fills.
    receive: Option<(Receive, Elements)>,
}

impl Landing {
    /// Of one of our own queue pairs.
    pub(super) fn new(qp: &Qp) -> Option<Self> {
        let peer = qp.host.peer_of(qp.qpn).ok()?;
        let target = Target::bind(&peer, qp.qpn)?;
        Some(Self { target, keys: RemoteKeys::default(), peer, host: qp.host, receive: None })
    }

    #[inline]
    fn offers(&self, access: u32) -> Result<(), Refusal> {
        let offered = self.target.entry.access.load(Ordering::Relaxed) & access == access;
        if offered { Ok(()) } else { Err(Refusal::Invalid) }
    }

    /// Runs `work` on a part of a region or window that the peer may use.
    #[inline]
    fn with_window<R>(
        &mut self,
        access: u32,
        key: u32,
        at: u64,
        len: u64,
        work: impl FnOnce(&Window, &Peer) -> Result<R, Stop>,
    ) -> Result<R, Refusal> {
        self.offers(access)?;
        let Self { target, keys, peer, .. } = self;
        let _announced = Announced::new(target, peer);
        let window = keys.find(peer, key).map_err(|_| Refusal::Access)?;
        admit(window, target, at, len, access).map_err(|_| Refusal::Access)?;
        work(window, peer).map_err(|_| Refusal::Operational)
    }

    /// Whether the peer may use `len` bytes from `at` for `access`.
    pub(super) fn check(&mut self, access: u32, key: u32, at: u64, len: u64) -> Result<(), Refusal> {
        self.with_window(access, key, at, len, |_, _| Ok(()))
    }

    /// Stores a packet's data.
    pub(super) fn write(&mut self, key: u32, at: u64, data: &[u8]) -> Result<(), Refusal> {
        self.with_window(ACCESS_REMOTE_WRITE, key, at, data.len() as u64, |window, peer| {
            store(window, peer, at, data.as_ptr(), data.len())
        })
    }

    /// Loads what a READ asks for.
    pub(super) fn read(&mut self, key: u32, at: u64, out: &mut [u8]) -> Result<(), Refusal> {
        self.with_window(ACCESS_REMOTE_READ, key, at, out.len() as u64, |window, peer| {
            load(window, peer, at, out.as_mut_ptr(), out.len())
        })
    }

    /// Carries out the atomic operation that `wr` describes; what was there before.
    pub(super) fn change(&mut self, wr: &SendWr<'_>) -> Result<u64, Refusal> {
        let me = self.host.pid;
        self.with_window(ACCESS_REMOTE_ATOMIC, wr.rkey, wr.remote_addr, 8, |window, peer| {
            change_word(window, peer, me, wr)
        })
    }

    /// Stores eight bytes at once (annex A19).
    pub(super) fn write_word(&mut self, key: u32, at: u64, value: [u8; 8]) -> Result<(), Refusal> {
        let me = self.host.pid;
        self.with_window(ACCESS_REMOTE_WRITE, key, at, 8, |window, peer| {
            set_word(window, peer, me, at, value)
        })
    }

    /// Takes a receive request for a message that begins; false if there is none.
    pub(super) fn take_receive(&mut self) -> bool {
        let Ok((receive, left)) = self.target.take_receive(self.host.pid) else { return false };
        if left == Left::BelowLimit {
            self.peer.tell(self.host, self.target.below_limit());
        }
        let mut elements = Elements::new();
        self.target.read_receive(receive, &mut elements);
        self.receive = Some((receive, elements));
        true
    }

    /// Stores a part of the message, which lies `offset` bytes from its beginning, where the receive request says.
    pub(super) fn fill(&mut self, offset: u64, data: &[u8]) -> Result<(), DeliveryFault> {
        let Self { target, keys, peer, receive, .. } = self;
        let Some((_, elements)) = receive else { return Err(DeliveryFault::Protection) };
        if offset + data.len() as u64 > total_len(elements) {
            return Err(DeliveryFault::TooLong);
        }
        let rest = skip(elements, offset);
        let message: Piece = (data.as_ptr(), data.len() as u32);
        let _announced = Announced::new(target, peer);
        // SAFETY: the piece is a slice.
        let placed = unsafe { scatter(keys, peer, target.pd, std::iter::once(message), &rest) };
        placed.map_err(|_| DeliveryFault::Protection)
    }

    /// Completes the receive request of the message that ends.
    pub(super) fn complete(&mut self, cqe: Cqe, solicited: bool) -> Result<(), NotAdded> {
        let Some((receive, _)) = self.receive.take() else { return Ok(()) };
        if self.target.complete_receive(self.host.party(), receive, cqe, solicited)? {
            self.peer.signal(self.target.cq.channel());
        }
        Ok(())
    }

    /// Whether the queue pair is in a state to take datagrams.
    pub(super) fn takes_datagrams(&self) -> bool {
        self.target.readiness(0) == Readiness::Ready
    }

    /// The same for a datagram, whose sender is not told if the completion is lost.
    pub(super) fn complete_or_overrun(&mut self, cqe: Cqe, solicited: bool) {
        if self.complete(cqe, solicited) == Err(NotAdded::Full) {
            self.peer.tell(self.host, Message::new(Op::Overrun, [self.target.qpn()]));
        }
    }

    /// Ends the life of a memory window of this queue pair, as the message under way asks.
    pub(super) fn invalidate(&mut self, key: u32) -> Result<(), Refusal> {
        let found = self.keys.find(&self.peer, key);
        let done = found.is_ok_and(|window| window.belongs_to(self.target.qpn()) && window.invalidate());
        if done { Ok(()) } else { Err(Refusal::Access) }
    }
}

/// From the announcement that memory will be touched to its withdrawal.
struct Announced<'a>(&'a Target, u32);

impl<'a> Announced<'a> {
    #[inline]
    fn new(target: &'a Target, peer: &Peer) -> Self {
        let busy = &target.entry.busy;
        let before = busy.load(Ordering::Relaxed) & !1;
        busy.store(before.wrapping_add(1), Ordering::Relaxed);
        barrier::light(peer.asymmetric);
        Self(target, before.wrapping_add(2))
    }
}

impl Drop for Announced<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.entry.busy.store(self.1, Ordering::Release);
    }
}

/// What is left of a list of elements behind its first `offset` bytes.
pub(super) fn skip(elements: &[Sge], mut offset: u64) -> Elements {
    let mut rest = Elements::new();
    for element in elements {
        let skipped = offset.min(u64::from(element.length));
        offset -= skipped;
        if skipped != u64::from(element.length) {
            rest.push(Sge {
                addr: element.addr.wrapping_add(skipped),
                length: element.length - skipped as u32,
                ..*element
            });
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_skipped_is_not_there() {
        let elements = [(10, 4), (100, 0), (20, 6)].map(|(addr, length)| Sge { addr, length, lkey: 1 });
        let left = |offset| skip(&elements, offset).iter().map(|e| (e.addr, e.length)).collect::<Vec<_>>();
        assert_eq!(left(0), [(10, 4), (20, 6)]);
        assert_eq!(left(3), [(13, 1), (20, 6)]);
        assert_eq!(left(4), [(20, 6)]);
        assert_eq!(left(9), [(25, 1)]);
        assert_eq!(left(10), []);
    }
}
