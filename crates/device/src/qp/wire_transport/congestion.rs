//! Congestion control: DCQCN around the transport machine.
//!
//! Packets are sent as ECN-capable. The receiver answers packets that a switch has marked with congestion
//! notification packets (CNP, annex A17.9.3). The sender lowers its rate at each CNP and recovers later
//! ([`millstream_link::dcqcn`]). One rate limits requests and READ responses, because a CNP names a queue
//! pair and no direction. Acknowledgements and atomic responses are sent at once, unless they are queued
//! behind a READ response. A CNP is not authenticated: a sender that forges addresses and queue pair number
//! can reduce a queue pair to the minimum rate.

use std::time::Duration;

use millstream_link::dcqcn::{NotificationPoint, Parameters, ReactionPoint};
use millstream_quantity::{BytesPerSecond, Instant};
use millstream_wire::{CNP_PADDING, ICRC_LEN, Opcode, Psn, Qpn, Repr, bth};

/// Bytes of a CNP.
pub(super) const CNP_LEN: usize = bth::LEN + CNP_PADDING + ICRC_LEN;

/// The initial rate: the DCQCN paper's line rate, 40 Gb/s. Only the first reaction depends on it.
const LINE_RATE: BytesPerSecond = BytesPerSecond(5e9);
/// Bytes are sent in bursts of this time at the current rate, which bounds the number of wake-ups.
const QUANTUM: Duration = Duration::from_micros(50);

/// Congestion control of one flow: reaction point and notification point.
#[derive(Debug, Default)]
pub(super) struct CongestionControl {
    /// None before the first CNP.
    reaction: Option<Box<ReactionPoint>>,
    notification: NotificationPoint,
    /// A CNP is to be sent.
    pub(super) owes_cnp: bool,
}

impl CongestionControl {
    /// Handles a packet of this flow.
    pub(super) fn handle_packet(&mut self, congestion_experienced: bool, now: Instant) {
        self.owes_cnp |= self.notification.handle_packet(congestion_experienced, time(now));
    }

    /// Handles a CNP.
    pub(super) fn handle_cnp(&mut self, now: Instant) {
        let new = || Box::new(ReactionPoint::new(Parameters::from_paper(LINE_RATE)));
        self.reaction.get_or_insert_with(new).handle_cnp(time(now));
    }

    /// Bytes of requests and READ responses that may be sent now.
    pub(super) fn byte_budget(&mut self, now: Instant) -> u64 {
        let Some(reaction) = &mut self.reaction else { return u64::MAX };
        reaction.handle_timeout(time(now));
        if reaction.poll_timeout().is_none() {
            // The rate has recovered.
            return u64::MAX;
        }
        if reaction.poll_send() > time(now) {
            return 0;
        }
        (reaction.rate().0 * QUANTUM.as_secs_f64()).max(1.0) as u64
    }

    /// Counts `bytes` of requests and READ responses that were sent.
    pub(super) fn sent(&mut self, bytes: u64, now: Instant) {
        // A flow that has recovered is not counted.
        if let Some(reaction) = self.reaction.as_mut().filter(|reaction| reaction.poll_timeout().is_some()) {
            reaction.handle_sent(bytes as usize, time(now));
        }
    }

    /// The time at which more may be sent; None if nothing is held back.
    pub(super) fn free(&self, now: Instant) -> Option<Instant> {
        let reaction = self.reaction.as_ref().filter(|reaction| reaction.poll_timeout().is_some())?;
        let free = reaction.poll_send();
        (free > time(now)).then(|| Instant::from_nanos(free.as_nanos() as u64))
    }
}

/// An instant as a duration, for DCQCN.
fn time(now: Instant) -> Duration {
    Duration::from_nanos(now.as_nanos())
}

/// A congestion notification packet for the peer's queue pair, without its ICRC (annex A17.9.3).
pub(super) fn cnp(to: Qpn) -> [u8; CNP_LEN] {
    let header = bth::Repr { becn: true, ..bth::Repr::new(Opcode::CNP, to, Psn::new(0)) };
    let mut packet = [0; CNP_LEN];
    Repr::new(header, &[0; CNP_PADDING]).emit(&mut packet);
    packet
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_wire::{Packet, Service};

    fn micros(n: u64) -> Instant {
        Instant::from_nanos(n * 1000)
    }

    #[test]
    fn nothing_is_held_back_before_a_notification_and_after_recovery() {
        let mut pace = CongestionControl::default();
        assert_eq!((pace.byte_budget(micros(1)), pace.free(micros(1))), (u64::MAX, None));
        pace.handle_cnp(micros(2));
        assert!(pace.byte_budget(micros(2)) < u64::MAX);
        assert_eq!(pace.byte_budget(micros(1_000_000)), u64::MAX, "a second without congestion");
    }

    #[test]
    fn what_leaves_keeps_to_the_rate() {
        let mut pace = CongestionControl::default();
        for n in 0..4 {
            pace.handle_cnp(micros(50 * n));
        }
        // Four notifications at full estimate: a sixteenth of the line rate, and what it recovers in 5 ms.
        let (mut sent, mut now) = (0, micros(200));
        let rate = pace.reaction.as_ref().unwrap().rate();
        assert!(rate.0 < LINE_RATE.0 / 10.0);
        let end = micros(700);
        while now < end {
            let allowed = pace.byte_budget(now);
            assert!(allowed > 0 && allowed < 1 << 20, "{allowed} bytes at once");
            pace.sent(allowed, now);
            sent += allowed;
            assert_eq!(pace.byte_budget(now), 0, "not before its time");
            now = pace.free(now).expect("what was sent takes time");
        }
        assert!((sent as f64) < LINE_RATE.0 * 0.5e-3, "{sent} bytes in half a millisecond");
        assert!((sent as f64) > rate.0 * 0.4e-3, "{sent} bytes in half a millisecond");
    }

    #[test]
    fn marked_packets_are_answered_once_in_a_while() {
        let mut pace = CongestionControl::default();
        pace.handle_packet(false, micros(0));
        assert!(!pace.owes_cnp);
        pace.handle_packet(true, micros(1));
        assert!(std::mem::take(&mut pace.owes_cnp));
        pace.handle_packet(true, micros(49));
        assert!(!pace.owes_cnp);
        pace.handle_packet(true, micros(52));
        assert!(pace.owes_cnp);
    }

    #[test]
    fn a_notification_is_one() {
        let bytes = cnp(Qpn::new(0x1234));
        let packet = Packet::new_checked(&bytes[..]).unwrap();
        assert_eq!((packet.opcode().service(), packet.bth().dest_qp()), (Service::Cnp, Qpn::new(0x1234)));
        assert!(packet.bth().becn());
    }
}
