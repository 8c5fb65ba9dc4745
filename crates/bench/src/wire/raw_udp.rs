//! Raw UDP packets over the link, without a transport protocol: the upper bound of any transport over UDP.
//!
//! The server receives packets and reports the payload received. The client keeps a window of bytes in flight, so that
//! neither side waits and no buffer overflows.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use millstream_link::{
    Link, MAX_BATCH, MAX_SEGMENTS, Outgoing, PacketInfo, RxBuffers, Udp, destination_qpn, icrc,
};

/// Queue pair number prefixes of the two sides.
const SERVER: u16 = 0x5e1;
const CLIENT: u16 = 0xc11;

/// Base transport header, packet kind, and a number.
const HEADER: usize = 12 + 4 + 8;
/// Bytes that a transport adds to each packet's payload: base transport header and ICRC.
const OVERHEAD: usize = 12 + 4;

const DATA: u32 = 1;
const RECEIVED: u32 = 2;
const PING: u32 = 3;
const END: u32 = 4;

/// The most bytes in flight; far below the receive buffer that a privileged process gets.
const WINDOW: u64 = 2 << 20;
/// Bytes in flight count as lost after this time without an acknowledgement.
const LOSS_TIMEOUT: Duration = Duration::from_millis(20);
/// The server gives up after this time without a packet.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// How packets are sent.
#[derive(Clone, Copy, Debug)]
pub struct SendMode {
    /// Payload of each packet (bytes).
    pub payload: usize,
    /// Whether the kernel splits large buffers into packets (UDP segmentation offload).
    pub segmentation_offload: bool,
    /// Whether the sender computes the ICRC of each packet and the receiver checks it.
    pub icrc: bool,
}

struct Endpoint {
    udp: Udp,
    inbox: RxBuffers,
    peer: u16,
    source: IpAddr,
    destination: IpAddr,
    mode: SendMode,
}

impl Endpoint {
    fn send(&self, packets: &mut [u8], len: usize) -> io::Result<usize> {
        if self.mode.icrc {
            let flow = icrc::flow(self.source, self.udp.source_port(), self.destination)
                .ok_or(io::ErrorKind::InvalidInput)?;
            for (i, packet) in packets.chunks_mut(len).enumerate() {
                let index = if self.mode.segmentation_offload { self.udp.identification(i) } else { 0 };
                icrc::seal(&flow, index, packet);
            }
        }
        let (source, destination) = (self.source, self.destination);
        let batch = |bytes| Outgoing { source, destination, interface: 0, tos: 2, segment: len, bytes };
        if self.mode.segmentation_offload {
            return self.udp.send(&mut [batch(packets)]);
        }
        let mut batches: Vec<_> = packets.chunks_mut(len).map(batch).collect();
        let sent = self.udp.send(&mut batches)?;
        Ok(usize::from(sent != 0))
    }

    fn send_control(&self, kind: u32, number: u64) -> io::Result<usize> {
        let mut packet = packet(self.peer, kind, number, HEADER + icrc::MIN_PACKET - 12);
        let len = packet.len();
        self.send(&mut packet, len)
    }

    /// Receives the packets that have arrived: calls `each` with kind, number and length. Returns whether any arrived.
    fn receive(&mut self, mut each: impl FnMut(&PacketInfo, u32, u64, usize)) -> io::Result<bool> {
        let any = self.udp.receive(&mut self.inbox)? != 0;
        for received in self.inbox.received() {
            let info = received.info;
            let flow = icrc::flow(info.source, info.source_port, info.destination);
            for (i, packet) in received.packets() {
                let right = !self.mode.icrc
                    || flow.is_some_and(|flow| icrc::identification(&flow, i as u16, packet).is_some());
                if right && packet.len() >= HEADER && destination_qpn(packet).is_some() {
                    let kind = u32::from_be_bytes(packet[12..16].try_into().expect("four bytes"));
                    let number = u64::from_be_bytes(packet[16..24].try_into().expect("eight bytes"));
                    each(&info, kind, number, packet.len());
                }
            }
        }
        Ok(any)
    }
}

/// A packet with a manufacturer-specific opcode (IBTA volume 1, table 38).
fn packet(qpn_prefix: u16, kind: u32, number: u64, len: usize) -> Vec<u8> {
    let mut packet = vec![0; len];
    packet[0] = 0xc0;
    packet[5..8].copy_from_slice(&(u32::from(qpn_prefix) << 12).to_be_bytes()[1..]);
    packet[12..16].copy_from_slice(&kind.to_be_bytes());
    packet[16..24].copy_from_slice(&number.to_be_bytes());
    packet
}

fn join(qpn_prefix: u16) -> io::Result<Udp> {
    Udp::join(qpn_prefix).map_err(io::Error::other)
}

/// Serves one client until it ends.
///
/// # Errors
/// An error of the link; `TimedOut` if no packet arrives.
pub fn serve(mode: SendMode) -> io::Result<()> {
    let unknown = IpAddr::from([0, 0, 0, 0]);
    let mut side = Endpoint {
        udp: join(SERVER)?,
        inbox: RxBuffers::new(16),
        peer: CLIENT,
        source: unknown,
        destination: unknown,
        mode,
    };
    let (mut bytes, mut last_packet) = (0u64, Instant::now());
    loop {
        let (mut from, mut ping, mut end) = (None, None, false);
        let any = side.receive(|info, kind, number, len| {
            from = Some((info.destination, info.source));
            match kind {
                DATA => bytes += (len - OVERHEAD) as u64,
                PING => ping = Some(number),
                END => end = true,
                _ => {}
            }
        })?;
        if end {
            return Ok(());
        }
        if let Some((source, destination)) = from {
            (side.source, side.destination) = (source, destination);
            match ping {
                Some(number) => side.send_control(PING, number)?,
                None => side.send_control(RECEIVED, bytes)?,
            };
        }
        if any {
            last_packet = Instant::now();
        } else if last_packet.elapsed() > IDLE_TIMEOUT {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

fn client(source: IpAddr, destination: IpAddr, mode: SendMode) -> io::Result<Endpoint> {
    let mut side =
        Endpoint { udp: join(CLIENT)?, inbox: RxBuffers::new(16), peer: SERVER, source, destination, mode };
    // The server may not have started yet.
    let deadline = Instant::now() + IDLE_TIMEOUT;
    loop {
        side.send_control(PING, u64::MAX)?;
        std::thread::sleep(Duration::from_millis(5));
        let mut there = false;
        side.receive(|_, kind, _, _| there |= kind == PING)?;
        if there {
            return Ok(side);
        }
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

fn end(side: &Endpoint) -> io::Result<()> {
    (0..3).try_for_each(|_| side.send_control(END, 0).map(drop))
}

/// Sends for `time`. Returns the payload that arrived (bytes/s).
///
/// # Errors
/// An error of the link; `TimedOut` if no server answers.
pub fn bandwidth(source: IpAddr, destination: IpAddr, mode: SendMode, time: Duration) -> io::Result<f64> {
    let mut side = client(source, destination, mode)?;
    let len = mode.payload + OVERHEAD;
    let count = (MAX_BATCH / len).clamp(1, MAX_SEGMENTS);
    let mut batch: Vec<u8> = (0..count as u64).flat_map(|i| packet(SERVER, DATA, i, len)).collect();
    let payload = (count * mode.payload) as u64;
    let (mut sent, mut arrived, mut lost) = (0u64, 0u64, 0u64);
    // The warm-up is not counted.
    let (warm, mut start) = (Instant::now() + time / 4, None);
    let mut last_progress = Instant::now();
    loop {
        if sent - lost - arrived <= WINDOW {
            sent += payload * side.send(&mut batch, len)? as u64;
        }
        let before = arrived;
        side.receive(|_, kind, number, _| {
            if kind == RECEIVED {
                arrived = arrived.max(number);
            }
        })?;
        let now = Instant::now();
        if arrived != before {
            last_progress = now;
        } else if now - last_progress > LOSS_TIMEOUT {
            (lost, last_progress) = (sent - arrived, now);
        }
        match start {
            None if now >= warm => start = Some((now, arrived)),
            Some((began, first)) if now - began >= time => {
                end(&side)?;
                return Ok((arrived - first) as f64 / (now - began).as_secs_f64());
            }
            _ => {}
        }
    }
}

/// Half the median round-trip time (s).
///
/// # Errors
/// An error of the link; `TimedOut` if no server answers.
pub fn latency(source: IpAddr, destination: IpAddr, mode: SendMode, rounds: usize) -> io::Result<f64> {
    let mut side = client(source, destination, mode)?;
    let mut times = Vec::with_capacity(rounds);
    for number in 0..(rounds + rounds / 10) as u64 {
        let began = Instant::now();
        side.send_control(PING, number)?;
        loop {
            let mut back = false;
            side.receive(|_, kind, came, _| back |= kind == PING && came == number)?;
            let took = began.elapsed();
            if back {
                if number >= rounds as u64 / 10 {
                    times.push(took.as_secs_f64() / 2.0);
                }
                break;
            }
            if took > LOSS_TIMEOUT {
                break;
            }
        }
    }
    end(&side)?;
    crate::median(&times).ok_or_else(|| io::ErrorKind::TimedOut.into())
}
