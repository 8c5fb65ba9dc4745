//! A channel: a serialiser that transmits one packet at a time, in order.

use super::{Packet, Random};
use millstream_quantity::{BytesPerSecond, Picos};
use std::collections::VecDeque;

/// Configuration of a channel.
#[derive(Clone, Debug)]
pub struct Channel {
    /// Name in reports.
    pub name: String,
    /// Serialisation rate of payload and overhead.
    pub rate: BytesPerSecond,
    /// Overhead bytes of a packet, indexed by the low two bits of its kind.
    pub overhead: [u32; 4],
    /// Fixed time per packet, in addition to serialisation.
    pub gap: Picos,
    /// Fixed time of a packet, in addition to `gap`, indexed by the low two bits of its kind.
    pub gap_by_kind: [Picos; 4],
    /// Mean of an exponentially distributed time per packet, in addition to `gap`.
    pub jitter: Picos,
    /// Propagation delay: last bit sent to last bit received.
    pub latency: Picos,
    /// Payload bytes that the input buffer holds.
    pub capacity: u64,
    /// Whether a packet enters the next channel before its tail has arrived.
    pub cut_through: bool,
}

impl Channel {
    /// A channel without overhead, delay or buffer limit.
    #[must_use]
    pub fn new(name: impl Into<String>, rate: BytesPerSecond) -> Channel {
        Channel {
            name: name.into(),
            rate,
            overhead: [0; 4],
            gap: Picos::ZERO,
            gap_by_kind: [Picos::ZERO; 4],
            jitter: Picos::ZERO,
            latency: Picos::ZERO,
            capacity: u64::MAX,
            cut_through: false,
        }
    }

    /// A pipeline stage: a fixed time per packet, independent of its size.
    #[must_use]
    pub fn stage(name: impl Into<String>, gap: Picos) -> Channel {
        Channel { gap, ..Channel::new(name, BytesPerSecond(f64::INFINITY)) }
    }

    /// A pipeline stage: a fixed time per packet kind (its low two bits). A byte of payload takes a picosecond.
    #[must_use]
    pub fn stage_by_kind(name: impl Into<String>, times: [Picos; 4]) -> Channel {
        Channel { gap_by_kind: times, ..Channel::new(name, BytesPerSecond(1e12)) }
    }

    /// Sets the overhead bytes of every packet kind.
    #[must_use]
    pub fn overhead(self, bytes: u32) -> Channel {
        Channel { overhead: [bytes; 4], ..self }
    }

    /// Sets the propagation delay.
    #[must_use]
    pub fn latency(self, latency: Picos) -> Channel {
        Channel { latency, ..self }
    }

    /// Sets the size of the input buffer.
    #[must_use]
    pub fn capacity(self, bytes: u64) -> Channel {
        Channel { capacity: bytes, ..self }
    }

    /// Sets the fixed time per packet.
    #[must_use]
    pub fn gap(self, gap: Picos) -> Channel {
        Channel { gap, ..self }
    }

    /// Sets the mean random time per packet.
    #[must_use]
    pub fn jitter(self, mean: Picos) -> Channel {
        Channel { jitter: mean, ..self }
    }

    /// Service time of a packet, without its random part.
    #[must_use]
    pub fn time(&self, kind: u16, payload: u64) -> Picos {
        let kind = usize::from(kind & 3);
        self.gap + self.gap_by_kind[kind] + self.rate.time(payload + u64::from(self.overhead[kind]))
    }
}

/// Counters of a channel.
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelReport {
    /// Name of the channel.
    pub name: String,
    /// Packets transmitted.
    pub packets: u64,
    /// Payload bytes transmitted.
    pub payload: u64,
    /// Time spent transmitting.
    pub busy: Picos,
    /// Time in which the first packet waited for credits.
    pub blocked: Picos,
    /// Simulated time of the report.
    pub elapsed: Picos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    Idle,
    Busy(Picos),
    Blocked(Picos),
}

#[derive(Debug)]
pub(super) struct ChannelState {
    pub(super) channel: Channel,
    pub(super) buffer: u32,
    pub(super) queue: VecDeque<Packet>,
    activity: Activity,
    packets: u64,
    payload: u64,
    busy: Picos,
    blocked: Picos,
    /// Size, kind and service time of the last packet: most packets are alike.
    last_time: (u32, u16, Picos),
}

impl ChannelState {
    pub(super) fn new(channel: Channel, buffer: u32) -> ChannelState {
        let last_time = (0, 0, channel.time(0, 0));
        ChannelState {
            channel,
            buffer,
            queue: VecDeque::new(),
            activity: Activity::Idle,
            packets: 0,
            payload: 0,
            busy: Picos::ZERO,
            blocked: Picos::ZERO,
            last_time,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.activity == Activity::Idle
    }

    pub(super) fn is_blocked(&self) -> bool {
        matches!(self.activity, Activity::Blocked(_))
    }

    pub(super) fn backlog(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn block(&mut self, now: Picos) {
        self.activity = Activity::Blocked(now);
    }

    pub(super) fn unblock(&mut self, now: Picos) {
        if let Activity::Blocked(since) = self.activity {
            self.blocked += now - since;
            self.activity = Activity::Idle;
        }
    }

    /// Starts the front packet; returns its service time. The packet stays queued until [`ChannelState::finish`].
    #[inline]
    pub(super) fn start(&mut self, now: Picos, packet: Packet, random: &mut Random) -> Picos {
        self.activity = Activity::Busy(now);
        if (self.last_time.0, self.last_time.1) != (packet.size, packet.kind) {
            let span = self.channel.time(packet.kind, u64::from(packet.size));
            self.last_time = (packet.size, packet.kind, span);
        }
        let span = self.last_time.2;
        if self.channel.jitter == Picos::ZERO {
            span
        } else {
            span + Picos((self.channel.jitter.0 as f64 * random.exponential()) as u64)
        }
    }

    #[inline]
    pub(super) fn finish(&mut self, now: Picos) -> Packet {
        if let Activity::Busy(since) = self.activity {
            self.busy += now - since;
        }
        self.activity = Activity::Idle;
        let packet = self.queue.pop_front().expect("a busy channel has its packet in front");
        self.packets += 1;
        self.payload += u64::from(packet.size);
        packet
    }

    pub(super) fn report(&self, now: Picos) -> ChannelReport {
        let since = |at: Picos| now - at;
        let (busy, blocked) = match self.activity {
            Activity::Idle => (self.busy, self.blocked),
            Activity::Busy(at) => (self.busy + since(at), self.blocked),
            Activity::Blocked(at) => (self.busy, self.blocked + since(at)),
        };
        ChannelReport {
            name: self.channel.name.clone(),
            packets: self.packets,
            payload: self.payload,
            busy,
            blocked,
            elapsed: now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_takes_the_time_of_a_kind_however_long_it_is() {
        // 4.29 ms are 2³² ps.
        let times = [Picos(1), Picos::from_seconds(0.01), Picos::from_seconds(2.0), Picos::ZERO];
        let stage = Channel::stage_by_kind("stage", times);
        for (kind, time) in (0..).zip(times) {
            assert_eq!([stage.time(kind, 0), stage.time(kind + 4, 64)], [time, time + Picos(64)]);
        }
    }
}
