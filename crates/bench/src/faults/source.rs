//! A front end that sends datagrams to a readout unit, and what can happen to it.

use std::collections::VecDeque;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millstream_evb::source::datagram::{Datagram, HEADER_LEN};
use millstream_fragment::{Fragment, SourceId};

use super::process::Fault;

/// Time by which late datagrams are late: more than the readout unit waits for a source (`give_up_ms`).
const LATE: Duration = Duration::from_millis(300);
/// Interval of sending.
const TICK: Duration = Duration::from_millis(2);

/// A front end with two sources, on a thread of this process.
pub(super) struct FrontEnd {
    faulty: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What a front end sends.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrontEndLoad {
    pub(super) to: SocketAddr,
    pub(super) first_source: u32,
    pub(super) events: u64,
    pub(super) rate: u32,
    pub(super) len: usize,
    pub(super) fault: Fault,
}

impl FrontEnd {
    /// Sends from now on; with the fault after [`inject`](Self::inject).
    pub(super) fn start(load: FrontEndLoad) -> std::io::Result<FrontEnd> {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        let (faulty, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (is_faulty, is_stopped) = (Arc::clone(&faulty), Arc::clone(&stop));
        let thread = std::thread::spawn(move || send_all(&socket, load, &is_faulty, &is_stopped));
        Ok(FrontEnd { faulty, stop, thread: Some(thread) })
    }

    /// Starts the fault.
    pub(super) fn inject(&self) {
        self.faulty.store(true, Ordering::Relaxed);
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn send_all(socket: &UdpSocket, load: FrontEndLoad, is_faulty: &AtomicBool, is_stopped: &AtomicBool) {
    let begin = Instant::now();
    let mut sent = 0;
    let mut has_paused = false;
    let mut late: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    // A datagram that is not received counts as lost at the readout unit.
    let send = |datagram: &[u8]| _ = socket.send_to(datagram, load.to);
    while (sent < load.events || !late.is_empty()) && !is_stopped.load(Ordering::Relaxed) {
        let is_faulty = is_faulty.load(Ordering::Relaxed);
        if is_faulty && load.fault == Fault::StopOneSecond && !std::mem::replace(&mut has_paused, true) {
            std::thread::sleep(Duration::from_secs(1));
        }
        while late.front().is_some_and(|(at, _)| *at <= Instant::now()) {
            late.pop_front().iter().for_each(|(_, datagram)| send(datagram));
        }
        let due = (begin.elapsed().as_secs_f64() * f64::from(load.rate)) as u64;
        while sent < due.min(load.events) {
            for source in 0..2 {
                let is_tenth = is_faulty && sent % 10 == 0;
                let is_corrupt = is_tenth && load.fault == Fault::Corrupt;
                let datagram = datagram(load.first_source + source, sent, load.len, is_corrupt);
                if is_tenth && load.fault == Fault::Late {
                    late.push_back((Instant::now() + LATE, datagram));
                    continue;
                }
                send(&datagram);
                if is_faulty && load.fault == Fault::Duplicate {
                    send(&datagram);
                }
            }
            sent += 1;
        }
        std::thread::sleep(TICK);
    }
}

/// A datagram (docs/event-builder.md).
fn datagram(source: u32, event: u64, len: usize, is_corrupt: bool) -> Vec<u8> {
    let payload = vec![event as u8; len];
    let mut fragment = Fragment::new(event, &payload);
    let mut bytes = Vec::with_capacity(HEADER_LEN + len);
    fragment.crc ^= u32::from(is_corrupt);
    Datagram { source: SourceId(source), sequence: event, fragment }.write(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_have_the_documented_format() {
        let good = datagram(7, 12, 100, false);
        assert_eq!((&good[..4], good.len()), (&b"MSFD"[..], HEADER_LEN + 100));
        let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!([4, 8, 16, 24].map(|at| word(&good, at)), [7, 12, 12, 100]);
        let fragment = Fragment { event: 12, payload: &good[HEADER_LEN..], crc: word(&good, 28) };
        assert!(fragment.is_intact());
        let corrupt = datagram(7, 12, 100, true);
        assert_eq!(word(&corrupt, 28), fragment.crc ^ 1);
    }
}
