//! A link with faults, for tests and for any program (see [`config`](crate::config)).
//!
//! Faults happen to packets, not to batches: a batch that a fault hits is taken apart, and its parts are sealed
//! anew, since they leave with other identifications. Packets that are held back leave at the next call after
//! their time.

use std::collections::VecDeque;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::config::{self, Chosen, Side};
use crate::counters::Counters;
use crate::datagram::{CONGESTION_EXPERIENCED, Inbox, Origin, Outgoing};
use crate::{Counts, Link, icrc};

/// A packet that is overtaken leaves after this time even if none follows.
const OVERTAKEN: Duration = Duration::from_millis(1);

/// Datagrams of one receive call.
const SLOTS: usize = 8;

/// Wraps a link.
#[derive(Debug)]
pub(crate) struct Faulty<L> {
    inner: L,
    counters: Counters,
    sending: Option<Mutex<Sending>>,
    receiving: Option<Mutex<Receiving>>,
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fate {
    dropped: bool,
    twice: bool,
    /// Which bit is wrong, modulo the packet's.
    wrong_bit: Option<u64>,
    /// As a congested switch does.
    marked: bool,
    hold: Option<Hold>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// Until the next one has passed.
    Overtaken,
    /// For a time.
    Delayed,
}

/// Decides about packet after packet.
#[derive(Clone, Debug)]
struct Dice {
    faults: config::Faults,
    random: u64,
    /// Packets so far.
    count: u64,
}

impl Dice {
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

    fn hits(&mut self, chosen: impl Fn(&config::Faults) -> &Chosen) -> bool {
        // Drawn in any case, so that one fault's numbers do not depend on another's.
        let drawn = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        match chosen(&self.faults) {
            Chosen::Never => false,
            Chosen::Probability(p) => drawn < *p,
            Chosen::Numbered(numbers) => numbers.contains(&self.count),
        }
    }

    fn throw(&mut self) -> Fate {
        self.count += 1;
        let dropped = self.hits(|f| &f.drop);
        let twice = self.hits(|f| &f.duplicate);
        let corrupt = self.hits(|f| &f.corrupt);
        let reorder = self.hits(|f| &f.reorder);
        let delay = self.hits(|f| &f.delay);
        let bit = self.next();
        let marked = self.hits(|f| &f.mark);
        if dropped {
            return Fate { dropped, ..Fate::default() };
        }
        let hold = match (delay, reorder) {
            (true, _) => Some(Hold::Delayed),
            (_, true) => Some(Hold::Overtaken),
            _ => None,
        };
        Fate { dropped, twice, wrong_bit: corrupt.then_some(bit), marked, hold }
    }
}

/// What can be delivered together: packets that nothing happens to, except one that overtakes, which goes by
/// itself.
fn runs(fates: &[Fate]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let untouched = |i: usize| fates[i] == Fate::default();
    let overtakes = move |i: usize| i > 0 && fates[i - 1].hold == Some(Hold::Overtaken);
    let mut start = 0;
    (1..=fates.len()).filter_map(move |end| {
        let together = end < fates.len() && untouched(end - 1) && untouched(end) && !overtakes(end - 1);
        (!together).then(|| std::mem::replace(&mut start, end)..end)
    })
}

fn count(counters: &Counters, fate: Fate) {
    counters.fault_dropped.add(fate.dropped.into());
    counters.fault_duplicated.add(fate.twice.into());
    counters.fault_corrupted.add(fate.wrong_bit.is_some().into());
    counters.fault_marked.add(fate.marked.into());
    counters.fault_reordered.add((fate.hold == Some(Hold::Overtaken)).into());
    counters.fault_delayed.add((fate.hold == Some(Hold::Delayed)).into());
}

fn damage(packet: &mut [u8], bit: u64) {
    if !packet.is_empty() {
        let bit = (bit % (packet.len() as u64 * 8)) as usize;
        packet[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Packets that are held back, each with when
/// it may go: at a time, or after a packet.
#[derive(Debug)]
struct Held<T>(Vec<(Instant, u64, T)>);

impl<T> Held<T> {
    fn put(&mut self, dice: &Dice, hold: Hold, number: u64, packet: T) {
        let (time, after) = match hold {
            Hold::Delayed => (dice.faults.delay_by, u64::MAX),
            Hold::Overtaken => (OVERTAKEN, number + 1),
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
}

#[derive(Debug)]
struct Sending {
    dice: Dice,
    held: Held<Owned>,
}

/// A packet to be sent by itself.
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
        // If there is no room it is lost: that is what this link is for.
        link.send(&mut [batch]).map(drop)
    }
}

#[derive(Debug)]
struct Receiving {
    dice: Dice,
    held: Held<(Origin, Vec<u8>)>,
    inbox: Inbox,
    /// Ready to be delivered: origin, bytes of each packet, packets.
    ready: VecDeque<(Origin, usize, Vec<u8>)>,
}

impl<L: Link> Faulty<L> {
    pub(crate) fn new(inner: L, faults: &config::Faults) -> Self {
        let sending = (faults.side != Side::Receive)
            .then(|| Mutex::new(Sending { dice: Dice::new(faults, 0), held: Held(Vec::new()) }));
        let receiving = (faults.side != Side::Send).then(|| {
            Mutex::new(Receiving {
                dice: Dice::new(faults, 1 << 63),
                held: Held(Vec::new()),
                inbox: Inbox::new(SLOTS),
                ready: VecDeque::new(),
            })
        });
        Self { inner, counters: Counters::default(), sending, receiving }
    }

    /// Sends what may go after packet `count`.
    fn release(&self, held: &mut Held<Owned>, count: u64) -> io::Result<()> {
        held.due(count).iter_mut().try_for_each(|packet| packet.send(&self.inner))
    }

    /// Sends a batch of which some packet is hit. The first packet has number `number`.
    fn send_apart(
        &self,
        sending: &mut Sending,
        batch: &mut Outgoing<'_>,
        fates: &[Fate],
        mut number: u64,
    ) -> io::Result<()> {
        let Outgoing { source, destination, interface, tos, segment, .. } = *batch;
        let flow = icrc::flow(source, self.inner.source_port(), destination);
        let mut rest = &mut *batch.bytes;
        for run in runs(fates).map(|range| &fates[range]) {
            let (bytes, behind) = rest.split_at_mut((run.len() * segment).min(rest.len()));
            rest = behind;
            for (i, packet) in bytes.chunks_mut(segment.max(1)).enumerate() {
                let identification = if run.len() > 1 { self.inner.identification(i) } else { 0 };
                if let Some(flow) = flow.as_ref().filter(|_| packet.len() >= icrc::MIN_PACKET) {
                    icrc::seal(flow, identification, packet);
                }
            }
            let fate = run[0];
            if fate == Fate::default() {
                self.inner.send(&mut [Outgoing { source, destination, interface, tos, segment, bytes }])?;
            } else if !fate.dropped {
                if let Some(bit) = fate.wrong_bit {
                    damage(bytes, bit);
                }
                let tos = if fate.marked { tos | CONGESTION_EXPERIENCED } else { tos };
                let mut packet = Owned { source, destination, interface, tos, bytes: bytes.to_vec() };
                if fate.twice || fate.hold.is_none() {
                    packet.send(&self.inner)?;
                }
                match fate.hold {
                    Some(hold) => sending.held.put(&sending.dice, hold, number, packet),
                    None if fate.twice => packet.send(&self.inner)?,
                    None => {}
                }
            }
            count(&self.counters, fate);
            number += run.len() as u64;
            self.release(&mut sending.held, number - 1)?;
        }
        Ok(())
    }
}

impl<L: Link> Link for Faulty<L> {
    fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        let Some(sending) = &self.sending else { return self.inner.send(batches) };
        let mut sending = sending.lock().expect("no panic under this lock");
        let sending = &mut *sending;
        for (i, batch) in batches.iter_mut().enumerate() {
            let before = (sending.dice.random, sending.dice.count);
            let fates: Vec<_> = (0..batch.count()).map(|_| sending.dice.throw()).collect();
            if fates.iter().any(|fate| *fate != Fate::default()) {
                self.send_apart(sending, batch, &fates, before.1 + 1)?;
            } else if self.inner.send(std::slice::from_mut(batch))? == 0 {
                // It will come again.
                (sending.dice.random, sending.dice.count) = before;
                return Ok(i);
            }
            self.release(&mut sending.held, sending.dice.count)?;
        }
        Ok(batches.len())
    }

    fn receive(&self, inbox: &mut Inbox) -> io::Result<usize> {
        if let Some(sending) = &self.sending {
            let mut sending = sending.lock().expect("no panic under this lock");
            let count = sending.dice.count;
            self.release(&mut sending.held, count)?;
        }
        let Some(receiving) = &self.receiving else { return self.inner.receive(inbox) };
        let mut receiving = receiving.lock().expect("no panic under this lock");
        if receiving.ready.is_empty() {
            receiving.receive(&self.inner, &self.counters)?;
        }
        inbox.filled.clear();
        while inbox.vacant() != 0
            && let Some((origin, segment, bytes)) = receiving.ready.pop_front()
        {
            inbox.push(origin, segment, &bytes);
        }
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
}

impl Receiving {
    /// Receives, and decides what of it will be delivered.
    fn receive(&mut self, link: &impl Link, counters: &Counters) -> io::Result<()> {
        link.receive(&mut self.inbox)?;
        let Self { dice, held, inbox, ready } = self;
        for received in inbox.received() {
            let origin = received.origin;
            let packets: Vec<_> = received.packets().map(|(_, packet)| packet).collect();
            let mut number = dice.count;
            let fates: Vec<_> = packets.iter().map(|_| dice.throw()).collect();
            for range in runs(&fates) {
                number += range.len() as u64;
                let (first, fate, run) = (packets[range.start], fates[range.start], &packets[range]);
                count(counters, fate);
                if fate == Fate::default() {
                    let bytes = run.concat();
                    ready.push_back((origin, first.len(), bytes));
                } else if !fate.dropped {
                    let tos = if fate.marked { origin.tos | CONGESTION_EXPERIENCED } else { origin.tos };
                    let origin = Origin { tos, ..origin };
                    let mut packet = first.to_vec();
                    if let Some(bit) = fate.wrong_bit {
                        damage(&mut packet, bit);
                    }
                    if fate.twice || fate.hold.is_none() {
                        ready.push_back((origin, packet.len(), packet.clone()));
                    }
                    match fate.hold {
                        Some(hold) => held.put(dice, hold, number, (origin, packet)),
                        None if fate.twice => ready.push_back((origin, packet.len(), packet)),
                        None => {}
                    }
                }
                ready.extend(
                    held.due(number).into_iter().map(|(origin, packet)| (origin, packet.len(), packet)),
                );
            }
        }
        ready.extend(held.due(dice.count).into_iter().map(|(origin, packet)| (origin, packet.len(), packet)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Memory, batch, is_sealed, number, send};
    use std::sync::Arc;

    fn link(faults: &str) -> (Arc<Memory>, Faulty<Arc<Memory>>) {
        let memory = Arc::new(Memory::default());
        (memory.clone(), Faulty::new(memory, &faults.parse().unwrap()))
    }

    /// Numbers of what was sent, and whether each packet's ICRC is right as it left.
    fn sent(memory: &Memory) -> Vec<(u32, bool)> {
        let sent = std::mem::take(&mut *memory.sent.lock().unwrap());
        sent.iter().map(|(id, packet)| (number(packet), is_sealed(*id, packet))).collect()
    }

    fn received(link: &impl Link) -> Vec<u32> {
        let mut inbox = Inbox::new(3);
        let mut numbers = Vec::new();
        while link.receive(&mut inbox).unwrap() != 0 {
            for received in inbox.received() {
                numbers.extend(received.packets().map(|(_, packet)| number(packet)));
            }
        }
        numbers
    }

    #[test]
    fn what_is_left_of_a_batch_is_sealed_anew() {
        let (memory, link) = link("drop=#2+5");
        send(&link, &mut batch(0, 6));
        assert_eq!(sent(&memory), [(0, true), (2, true), (3, true), (5, true)]);
        send(&link, &mut batch(6, 3));
        assert_eq!(sent(&memory), [(6, true), (7, true), (8, true)]);
        assert_eq!(link.counts().fault_dropped, 2);
    }

    #[test]
    fn untouched_batches_stay_whole() {
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
    fn the_last_packet_is_overtaken_by_the_next_batch_or_by_time() {
        let (memory, link) = link("reorder=#2+4");
        send(&link, &mut batch(0, 2));
        send(&link, &mut batch(2, 2));
        assert_eq!(sent(&memory), [(0, true), (2, true), (1, true)]);
        std::thread::sleep(2 * OVERTAKEN);
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

    #[test]
    fn the_same_happens_to_what_is_received() {
        let (memory, link) = link("drop=#2,duplicate=#3,reorder=#4,side=receive");
        send(&link, &mut batch(0, 4));
        assert_eq!(sent(&memory).len(), 4, "nothing happens to what is sent");
        let coming = [batch(0, 6), batch(6, 2), batch(8, 1), batch(9, 1)];
        memory.coming.lock().unwrap().extend(coming.map(|bytes| (40, bytes)));
        assert_eq!(received(&link), [0, 2, 2, 4, 3, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn a_seed_fixes_what_happens() {
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
