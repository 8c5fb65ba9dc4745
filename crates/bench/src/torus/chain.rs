//! A chain of copies between threads, without connections, packets or processes: how fast the bytes of a put can pass from
//! core to core.
//!
//! ```text
//!   source ─► thread 0 ─► slots ─► thread 1 ─► slots ─► … ─► target
//! ```

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_shm::{Mapping, thread};

use crate::memcpy::{Pages, allocate};

/// Looks for a packet or a free slot between two yields, where several threads share a core.
const LOOKS: u32 = 4;

/// How many packets a thread has copied, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Copied(AtomicU64);

/// Sizes of a chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    /// Threads, each of which copies every packet once. Neighbours run on different cores, if there are two.
    pub(super) copies: usize,
    /// Bytes of a packet.
    pub(super) packet: usize,
    /// Slots between two threads.
    pub(super) slots: usize,
    /// Bytes of source and target, which are written again and again.
    pub(super) size: usize,
}

impl Chain {
    /// GB/s that arrive at the end, measured for about `time`.
    ///
    /// # Errors
    /// The error of allocating the buffers, or of choosing cores.
    pub(super) fn throughput(self, time: Duration) -> io::Result<f64> {
        let cores = thread::affinity()?;
        let ends = [self.size, self.size].map(|size| allocate(Pages::Huge, size));
        let [source, target] = ends;
        let mut buffers = vec![source?];
        for _ in 1..self.copies {
            buffers.push(allocate(Pages::Huge, self.packet * self.slots)?);
        }
        buffers.push(target?);
        let copied: Vec<Copied> = (0..self.copies).map(|_| Copied::default()).collect();
        let over = AtomicBool::new(false);
        let start = Instant::now();
        let (copied, over, buffers) = (&copied[..], &over, &buffers[..]);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.copies)
                .map(|at| {
                    let core = cores[at % cores.len().min(2)];
                    scope.spawn(move || {
                        thread::with_affinity(&[core], || self.copy(at, buffers, copied, over))
                    })
                })
                .collect();
            std::thread::sleep(time);
            over.store(true, Ordering::Relaxed);
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
        })?;
        let packets = copied[self.copies - 1].0.load(Ordering::Relaxed);
        Ok(packets as f64 * self.packet as f64 / start.elapsed().as_secs_f64() * 1e-9)
    }

    /// What one thread does.
    fn copy(self, at: usize, buffers: &[Mapping], copied: &[Copied], over: &AtomicBool) {
        let place = |buffer: usize, packet: u64| {
            let is_end = buffer == 0 || buffer == self.copies;
            let places = if is_end { self.size / self.packet } else { self.slots };
            (packet % places.max(1) as u64) as usize * self.packet
        };
        let done = |thread: usize| copied[thread].0.load(Ordering::Acquire);
        let (mut packets, mut looks) = (0_u64, 0_u32);
        while !over.load(Ordering::Relaxed) {
            let has_packet = at == 0 || done(at - 1) > packets;
            let has_place = at + 1 == self.copies || packets - done(at + 1) < self.slots as u64;
            if !(has_packet && has_place) {
                looks += 1;
                if self.copies > 2 && looks.is_multiple_of(LOOKS) {
                    std::thread::yield_now();
                }
                continue;
            }
            // SAFETY: whole packets inside both buffers. The neighbours' counts keep them off these places.
            unsafe {
                let from = buffers[at].base().add(place(at, packets));
                let to = buffers[at + 1].base().add(place(at + 1, packets));
                black_box(to).copy_from_nonoverlapping(black_box(from), self.packet);
            }
            packets += 1;
            copied[at].0.store(packets, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_of_copies_moves_bytes() {
        for copies in [1, 2, 4] {
            let chain = Chain { copies, packet: 4096, slots: 8, size: 65_536 };
            // A thread may wait for its core for longer than the first measurements take.
            let mut rates = (0..9).map(|n| chain.throughput(Duration::from_millis(20 << n)).unwrap());
            let moves = rates.any(|rate| {
                assert!(rate < 10_000.0, "{copies} copies: {rate}");
                rate > 0.001
            });
            assert!(moves, "{copies} copies");
        }
    }
}
