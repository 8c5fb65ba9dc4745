//! A link with fault injection (see [`config`](crate::config)).
//!
//! Faults affect packets, not batches: an affected batch is split, and its parts are sealed again, because
//! they leave with other IPv4 identifications. Packets that are held back leave with the first call after
//! their time. A timer wakes a thread that sleeps until then.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::config::{self, PacketSelector, Side};
use crate::counters::Counters;
use crate::datagram::{CONGESTION_EXPERIENCED, Outgoing, PacketInfo, RxBuffers};
use crate::release_timer::{Direction, ReleaseTimer};
use crate::{Counts, Link, icrc};

/// Longest time for which a reordered packet waits for a successor.
const REORDER_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 1 });

/// Datagrams per receive call.
const SLOTS: usize = 8;

/// Injects faults into the packets of another link.
#[derive(Debug)]
pub(crate) struct FaultInjector<L> {
    inner: L,
    counters: Counters,
    sending: Option<Mutex<Sending>>,
    receiving: Option<Mutex<Receiving>>,
    timer: ReleaseTimer,
}

/// The faults of one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PacketFaults {
    dropped: bool,
    twice: bool,
    /// Index of the inverted bit, modulo the packet length.
    wrong_bit: Option<u64>,
    /// Marked as congestion experienced.
    marked: bool,
    hold: Option<Hold>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// Until the next packet has passed.
    Overtaken,
    /// For the configured delay.
    Delayed,
}

/// Chooses the faults of each packet.
#[derive(Clone, Debug)]
struct FaultRng {
    faults: config::Faults,
    random: u64,
    /// Packets so far.
    count: u64,
}

impl FaultRng {
    fn new(faults: &config::Faults, salt: u64) -> Self {
        Self { faults: faults.clone(), random: faults.seed ^ salt, count: 0 }
    }

    /// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn hits(&mut self, selector: impl Fn(&config::Faults) -> &PacketSelector) -> bool {
        // Drawn unconditionally, so that the faults are independent of each other's settings.
        let drawn = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        match selector(&self.faults) {
            PacketSelector::Never => false,
            PacketSelector::Probability(p) => drawn < *p,
            PacketSelector::Numbered(numbers) => numbers.contains(&self.count),
        }
    }

    fn throw(&mut self) -> PacketFaults {
        self.count += 1;
        let dropped = self.hits(|f| &f.drop);
        let twice = self.hits(|f| &f.duplicate);
        let corrupt = self.hits(|f| &f.corrupt);
        let reorder = self.hits(|f| &f.reorder);
        let delay = self.hits(|f| &f.delay);
        let bit = self.next();
        let marked = self.hits(|f| &f.mark);
        if dropped {
            return PacketFaults { dropped, ..PacketFaults::default() };
        }
        let hold = match (delay, reorder) {
            (true, _) => Some(Hold::Delayed),
            (_, true) => Some(Hold::Overtaken),
            _ => None,
        };
        PacketFaults { dropped, twice, wrong_bit: corrupt.then_some(bit), marked, hold }
    }
}

/// Ranges of packets that can be sent together. A packet that is affected or overtakes another is sent alone.
fn runs(faults_by_packet: &[PacketFaults]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let untouched = |i: usize| faults_by_packet[i] == PacketFaults::default();
    let overtakes = move |i: usize| i > 0 && faults_by_packet[i - 1].hold == Some(Hold::Overtaken);
    let mut start = 0;
    (1..=faults_by_packet.len()).filter_map(move |end| {
        let together =
            end < faults_by_packet.len() && untouched(end - 1) && untouched(end) && !overtakes(end - 1);
        (!together).then(|| std::mem::replace(&mut start, end)..end)
    })
}

fn count(counters: &Counters, packet_faults: PacketFaults) {
    counters.fault_dropped.add(packet_faults.dropped.into());
    counters.fault_duplicated.add(packet_faults.twice.into());
    counters.fault_corrupted.add(packet_faults.wrong_bit.is_some().into());
    counters.fault_marked.add(packet_faults.marked.into());
    counters.fault_reordered.add((packet_faults.hold == Some(Hold::Overtaken)).into());
    counters.fault_delayed.add((packet_faults.hold == Some(Hold::Delayed)).into());
}

fn damage(packet: &mut [u8], bit: u64) {
    if !packet.is_empty() {
        let bit = (bit % (packet.len() as u64 * 8)) as usize;
        packet[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Packets held back, each with a time or a packet number after which it may leave.
#[derive(Debug)]
struct Held<T>(Vec<(Instant, u64, T)>);

impl<T> Held<T> {
    fn put(&mut self, rng: &FaultRng, hold: Hold, number: u64, packet: T) {
        let (time, after) = match hold {
            Hold::Delayed => (rng.faults.delay_by, u64::MAX),
            Hold::Overtaken => (REORDER_TIMEOUT, number + 1),
        };
        self.0.push((Instant::now() + time, after, packet));
    }

    fn due(&mut self, count: u64) -> Vec<T> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let now = Instant::now();
        let due = self.0.extract_if(.., |(time, after, _)| *time <= now || *after <= count);
        due.map(|(_, _, packet)| packet).collect()
    }

    /// When the next packet is due, if no other packet passes before.
    fn next(&self) -> Option<Instant> {
        self.0.iter().map(|(time, _, _)| *time).min()
    }
}

#[derive(Debug)]
struct Sending {
    rng: FaultRng,
    held: Held<Owned>,
}

/// A packet to send alone.
#[derive(Clone, Debug)]
struct Owned {
    source: std::net::IpAddr,
    destination: std::net::IpAddr,
    interface: u32,
    tos: u8,
    bytes: Vec<u8>,
}

impl Owned {
    fn send(&mut self, link: &impl Link) -> io::Result<()> {
        let Self { source, destination, interface, tos, .. } = *self;
        let segment = self.bytes.len();
        let batch = Outgoing { source, destination, interface, tos, segment, bytes: &mut self.bytes };
        // A packet without room is lost, as this link may lose packets.
        link.send(&mut [batch]).map(drop)
    }
}

#[derive(Debug)]
struct Receiving {
    rng: FaultRng,
    held: Held<(PacketInfo, Vec<u8>)>,
    inbox: RxBuffers,
    /// Ready to be delivered: headers, bytes of each packet, packets.
    ready: VecDeque<(PacketInfo, usize, Vec<u8>)>,
}

impl<L: Link> FaultInjector<L> {
    pub(crate) fn new(inner: L, faults: &config::Faults) -> io::Result<Self> {
        let sending = (faults.side != Side::Receive)
            .then(|| Mutex::new(Sending { rng: FaultRng::new(faults, 0), held: Held(Vec::new()) }));
        let receiving = (faults.side != Side::Send).then(|| {
            Mutex::new(Receiving {
                rng: FaultRng::new(faults, 1 << 63),
                held: Held(Vec::new()),
                inbox: RxBuffers::new(SLOTS),
                ready: VecDeque::new(),
            })
        });
        Ok(Self { inner, counters: Counters::default(), sending, receiving, timer: ReleaseTimer::new()? })
    }

    /// Sends held packets that may leave after packet `count`.
    fn release(&self, held: &mut Held<Owned>, count: u64) -> io::Result<()> {
        held.due(count).iter_mut().try_for_each(|packet| packet.send(&self.inner))
    }

    /// Sends a batch with affected packets. The first packet has number `number`.
    fn send_apart(
        &self,
        sending: &mut Sending,
        batch: &mut Outgoing<'_>,
        faults_by_packet: &[PacketFaults],
        mut number: u64,
    ) -> io::Result<()> {
        let Outgoing { source, destination, interface, tos, segment, .. } = *batch;
        let flow = icrc::flow(source, self.inner.source_port(), destination);
        let identification = |index, count| if count > 1 { self.inner.identification(index) } else { 0 };
        let (packets, mut index) = (faults_by_packet.len(), 0);
        let mut rest = &mut *batch.bytes;
        for run in runs(faults_by_packet).map(|range| &faults_by_packet[range]) {
            let (bytes, behind) = rest.split_at_mut((run.len() * segment).min(rest.len()));
            rest = behind;
            for (i, packet) in bytes.chunks_mut(segment.max(1)).enumerate() {
                let [former, new] = [identification(index + i, packets), identification(i, run.len())];
                let is_sealed = former == new || packet.len() < icrc::MIN_PACKET;
                if let Some(flow) = flow.as_ref().filter(|_| !is_sealed) {
                    icrc::seal(flow, new, packet);
                }
            }
            index += run.len();
            let packet_faults = run[0];
            if packet_faults == PacketFaults::default() {
                self.inner.send(&mut [Outgoing { source, destination, interface, tos, segment, bytes }])?;
            } else if !packet_faults.dropped {
                if let Some(bit) = packet_faults.wrong_bit {
                    damage(bytes, bit);
                }
                let tos = if packet_faults.marked { tos | CONGESTION_EXPERIENCED } else { tos };
                let mut packet = Owned { source, destination, interface, tos, bytes: bytes.to_vec() };
                if packet_faults.twice || packet_faults.hold.is_none() {
                    packet.send(&self.inner)?;
                }
                match packet_faults.hold {
                    Some(hold) => sending.held.put(&sending.rng, hold, number, packet),
                    None if packet_faults.twice => packet.send(&self.inner)?,
                    None => {}
                }
            }
            count(&self.counters, packet_faults);
            number += run.len() as u64;
            self.release(&mut sending.held, number - 1)?;
        }
        Ok(())
    }

    /// Sends batches and chooses their faults.
    fn send_affected(&self, sending: &mut Sending, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        for (i, batch) in batches.iter_mut().enumerate() {
            let before = (sending.rng.random, sending.rng.count);
            let faults_by_packet: Vec<_> = (0..batch.count()).map(|_| sending.rng.throw()).collect();
            if faults_by_packet.iter().any(|packet_faults| *packet_faults != PacketFaults::default()) {
                self.send_apart(sending, batch, &faults_by_packet, before.1 + 1)?;
            } else if self.inner.send(std::slice::from_mut(batch))? == 0 {
                // The caller retries this packet.
                (sending.rng.random, sending.rng.count) = before;
                return Ok(i);
            }
            self.release(&mut sending.held, sending.rng.count)?;
        }
        Ok(batches.len())
    }
}

impl<L: Link> Link for FaultInjector<L> {
    fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        let Some(sending) = &self.sending else { return self.inner.send(batches) };
        let mut sending = sending.lock().expect("no panic under this lock");
        let taken = self.send_affected(&mut sending, batches);
        self.timer.set(Direction::Sent, sending.held.next());
        taken
    }

    fn receive(&self, inbox: &mut RxBuffers) -> io::Result<usize> {
        if let Some(sending) = &self.sending {
            let mut sending = sending.lock().expect("no panic under this lock");
            let count = sending.rng.count;
            let released = self.release(&mut sending.held, count);
            self.timer.set(Direction::Sent, sending.held.next());
            released?;
        }
        let Some(receiving) = &self.receiving else { return self.inner.receive(inbox) };
        let mut receiving = receiving.lock().expect("no panic under this lock");
        if receiving.ready.is_empty() {
            receiving.receive(&self.inner, &self.counters)?;
        }
        inbox.filled.clear();
        while inbox.empty_slots() != 0
            && let Some((info, segment, bytes)) = receiving.ready.pop_front()
        {
            inbox.push(info, segment, &bytes);
        }
        // The socket need not be readable when the rest is delivered.
        let rest = (!receiving.ready.is_empty()).then(Instant::now);
        self.timer.set(Direction::Received, rest.or_else(|| receiving.held.next()));
        Ok(inbox.filled.len())
    }

    fn source_port(&self) -> u16 {
        self.inner.source_port()
    }

    fn identification(&self, index: usize) -> u16 {
        self.inner.identification(index)
    }

    fn counts(&self) -> Counts {
        self.inner.counts().plus(&self.counters.snapshot())
    }

    fn release_timer(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }
}

impl Receiving {
    /// Receives packets and chooses their faults.
    fn receive(&mut self, link: &impl Link, counters: &Counters) -> io::Result<()> {
        link.receive(&mut self.inbox)?;
        let Self { rng, held, inbox, ready } = self;
        for received in inbox.received() {
            let info = received.info;
            let packets: Vec<_> = received.packets().map(|(_, packet)| packet).collect();
            let mut number = rng.count;
            let faults_by_packet: Vec<_> = packets.iter().map(|_| rng.throw()).collect();
            for range in runs(&faults_by_packet) {
                number += range.len() as u64;
                let (first, packet_faults, run) =
                    (packets[range.start], faults_by_packet[range.start], &packets[range]);
                count(counters, packet_faults);
                if packet_faults == PacketFaults::default() {
                    let bytes = run.concat();
                    ready.push_back((info, first.len(), bytes));
                } else if !packet_faults.dropped {
                    let tos = if packet_faults.marked { info.tos | CONGESTION_EXPERIENCED } else { info.tos };
                    let info = PacketInfo { tos, ..info };
                    let mut packet = first.to_vec();
                    if let Some(bit) = packet_faults.wrong_bit {
                        damage(&mut packet, bit);
                    }
                    if packet_faults.twice || packet_faults.hold.is_none() {
                        ready.push_back((info, packet.len(), packet.clone()));
                    }
                    match packet_faults.hold {
                        Some(hold) => held.put(rng, hold, number, (info, packet)),
                        None if packet_faults.twice => ready.push_back((info, packet.len(), packet)),
                        None => {}
                    }
                }
                ready.extend(held.due(number).into_iter().map(|(info, packet)| (info, packet.len(), packet)));
            }
        }
        ready.extend(held.due(rng.count).into_iter().map(|(info, packet)| (info, packet.len(), packet)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Memory, batch, is_sealed, number, send};
    use std::sync::Arc;

    fn link(faults: &str) -> (Arc<Memory>, FaultInjector<Arc<Memory>>) {
        let memory = Arc::new(Memory::default());
        (memory.clone(), FaultInjector::new(memory, &faults.parse().unwrap()).unwrap())
    }

    /// Packet numbers that were sent, and whether the ICRC of each was correct.
    fn sent(memory: &Memory) -> Vec<(u32, bool)> {
        let sent = std::mem::take(&mut *memory.sent.lock().unwrap());
        sent.iter().map(|(id, packet)| (number(packet), is_sealed(*id, packet))).collect()
    }

    fn received(link: &impl Link) -> Vec<u32> {
        let mut inbox = RxBuffers::new(3);
        let mut numbers = Vec::new();
        while link.receive(&mut inbox).unwrap() != 0 {
            for received in inbox.received() {
                numbers.extend(received.packets().map(|(_, packet)| number(packet)));
            }
        }
        numbers
    }

    #[test]
    fn rest_of_a_batch_is_sealed_again() {
        let (memory, link) = link("drop=#2+5");
        send(&link, &mut batch(0, 6));
        assert_eq!(sent(&memory), [(0, true), (2, true), (3, true), (5, true)]);
        send(&link, &mut batch(6, 3));
        assert_eq!(sent(&memory), [(6, true), (7, true), (8, true)]);
        assert_eq!(link.counts().fault_dropped, 2);
    }

    #[test]
    fn unaffected_batches_are_not_split() {
        let (memory, link) = link("drop=#100");
        send(&link, &mut batch(0, 50));
        assert_eq!(*memory.calls.lock().unwrap(), 1);
    }

    #[test]
    fn duplicates_reorders_and_corrupts() {
        let (memory, link) = link("duplicate=#1,reorder=#3,corrupt=#5");
        send(&link, &mut batch(0, 5));
        let expected = [(0, true), (0, true), (1, true), (3, true), (2, true)];
        let sent = sent(&memory);
        assert_eq!(sent[..5], expected);
        assert_eq!((sent.len(), sent[5].1), (6, false), "the last one is damaged");
        let counts = link.counts();
        assert_eq!((counts.fault_duplicated, counts.fault_reordered, counts.fault_corrupted), (1, 1, 1));
    }

    #[test]
    fn last_packet_is_reordered_with_the_next_batch_or_times_out() {
        let (memory, link) = link("reorder=#2+4");
        send(&link, &mut batch(0, 2));
        send(&link, &mut batch(2, 2));
        assert_eq!(sent(&memory), [(0, true), (2, true), (1, true)]);
        std::thread::sleep(2 * REORDER_TIMEOUT);
        assert_eq!(received(&link), []);
        assert_eq!(sent(&memory), [(3, true)]);
    }

    #[test]
    fn delays() {
        let (memory, link) = link("delay=#1:20ms");
        let start = Instant::now();
        send(&link, &mut batch(0, 2));
        assert_eq!(sent(&memory), [(1, true)]);
        while memory.sent.lock().unwrap().is_empty() {
            received(&link);
        }
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert_eq!(sent(&memory), [(0, true)]);
    }

    /// Sleeps on the timer of a link until it is readable.
    fn sleep_until_release(link: &impl Link) {
        let timer = link.release_timer().unwrap();
        millstream_shm::poll_readable(&[timer], None).unwrap();
    }

    fn is_release_due(link: &impl Link) -> bool {
        let timer = link.release_timer().unwrap();
        millstream_shm::poll_readable(&[timer], Some(Duration::ZERO)).unwrap() == [true]
    }

    #[test]
    fn a_packet_held_back_wakes_a_thread_that_sleeps() {
        for faults in ["delay=#1:20ms", "reorder=#1"] {
            let (memory, link) = link(faults);
            send(&link, &mut batch(0, 1));
            assert_eq!(sent(&memory), []);
            sleep_until_release(&link);
            assert_eq!(received(&link), []);
            assert_eq!(sent(&memory), [(0, true)]);
            assert!(!is_release_due(&link));

            let (memory, link) = self::link(&format!("{faults},side=receive"));
            memory.coming.lock().unwrap().push_back((40, batch(0, 1)));
            assert_eq!(received(&link), []);
            sleep_until_release(&link);
            assert_eq!(received(&link), [0]);
            assert!(!is_release_due(&link));
        }
    }

    #[test]
    fn packets_without_room_in_the_inbox_wake_a_thread_that_sleeps() {
        let (memory, link) = link("duplicate=1,side=receive");
        memory.coming.lock().unwrap().push_back((40, batch(0, 2)));
        let mut inbox = RxBuffers::new(3);
        assert_eq!(link.receive(&mut inbox).unwrap(), 3);
        sleep_until_release(&link);
        assert_eq!(received(&link), [1]);
        assert!(!is_release_due(&link));
    }

    #[test]
    fn faults_affect_received_packets() {
        let (memory, link) = link("drop=#2,duplicate=#3,reorder=#4,side=receive");
        send(&link, &mut batch(0, 4));
        assert_eq!(sent(&memory).len(), 4, "nothing happens to what is sent");
        let coming = [batch(0, 6), batch(6, 2), batch(8, 1), batch(9, 1)];
        memory.coming.lock().unwrap().extend(coming.map(|bytes| (40, bytes)));
        assert_eq!(received(&link), [0, 2, 2, 4, 3, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn same_seed_affects_the_same_packets() {
        let run = |faults: &str| {
            let (memory, link) = link(faults);
            (0..100).for_each(|i| send(&link, &mut batch(i * 100, 100)));
            sent(&memory)
        };
        let some = run("drop=0.01,seed=3");
        assert!((9_800..9_960).contains(&some.len()), "{} of 10,000 passed", some.len());
        assert!(some.iter().all(|(_, sealed)| *sealed));
        assert_eq!(some, run("drop=0.01,seed=3"));
        assert_ne!(some, run("drop=0.01,seed=4"));
    }
}
