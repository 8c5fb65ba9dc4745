//! How the processes find each other.
//!
//! ```text
//! unit                                manager
//!  │ ── Join: who I am ────────────────► │  waits for all
//!  │ ◄── Welcome: the setup, addresses ─ │
//!  │ ── Prepared, or Failed ───────────► │  waits for all
//!  │ ═══ control connection ════════════ │
//!  │ ═══ readout to builder: data ═══    │
//!  │ ── Ready ─────────────────────────► │  waits for all
//!  │ ◄── Start ───────────────────────── │
//!  │              the run                │
//!  │ ── report ────────────────────────► │
//! ```
//!
//! All of it goes over one TCP stream per unit, as frames of JSON behind their length (32 bits, big-endian),
//! except that the control connection is made over the same stream by crate `rdma`. The stream stays open
//! during the run; its end tells of a death.

use super::ProcessError;
use super::builder::BuilderEnd;
use super::error::IoContext;
use crate::config::Setup;
use crate::core::report::ReadoutReport;
use crate::core::{StopCause, Unit};
use millstream_rdma::Deadline;
use millstream_rdma::connect::{ConnectError, ConnectErrorKind};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// For the whole wire-up, but for the landing memory.
const WIRE_UP_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of landing memory that get their pages in a second on a slow virtual machine, all of them together.
const PAGES_PER_SECOND: u64 = 200_000_000;
/// Both ends must be of one version; they are one program.
const VERSION: &str = concat!("millstream-evb ", env!("CARGO_PKG_VERSION"));
/// In front of each frame.
const LENGTH_BYTES: usize = 4;
/// Longer frames are not ours.
const MAX_FRAME: usize = 256 << 20;

/// What units say.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToManager {
    /// First of all.
    Join {
        version: String,
        unit: Unit,
        /// Where a builder unit takes the readout units' connections.
        data: Option<String>,
    },
    /// What the unit needs on its host is there.
    Prepared,
    /// It is not.
    Failed(String),
    /// Everything is connected.
    Ready,
    /// The end of a readout unit.
    Readout(ReadoutReport),
    /// The end of a builder unit.
    Builder(BuilderEnd),
}

/// What the manager says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromManager {
    /// All are there.
    Welcome {
        setup: Box<Setup>,
        /// Where the builder units take connections, by index.
        builders: Vec<String>,
    },
    /// All are ready.
    Start,
}

impl ToManager {
    /// The first frame.
    pub(super) fn join(unit: Unit, data: Option<String>) -> ToManager {
        ToManager::Join { version: VERSION.to_owned(), unit, data }
    }
}

/// Whether the other end is of our version.
pub(super) fn is_our_version(version: &str) -> bool {
    version == VERSION
}

/// Frames over a TCP stream.
#[derive(Debug)]
pub(super) struct Channel {
    stream: TcpStream,
    /// Received and not yet understood.
    buffer: Vec<u8>,
}

/// What a look at a channel found.
#[derive(Debug)]
pub(super) enum TryReceive<T> {
    /// A frame.
    Frame(T),
    /// No whole frame yet.
    Pending,
    /// The other end is gone.
    Closed,
}

impl Channel {
    pub(super) fn new(stream: TcpStream) -> Channel {
        Channel { stream, buffer: Vec::new() }
    }

    /// The stream, blocking, for making connections over it. No frame may be under way.
    pub(super) fn stream(&mut self) -> io::Result<&mut TcpStream> {
        self.stream.set_nonblocking(false)?;
        Ok(&mut self.stream)
    }

    /// Sends a frame and waits until the system has taken it.
    pub(super) fn send(&mut self, frame: &impl Serialize) -> io::Result<()> {
        let json = serde_json::to_vec(frame)?;
        let length = u32::try_from(json.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend(json);
        self.stream.set_nonblocking(false)?;
        self.stream.write_all(&bytes)
    }

    /// Waits for a frame.
    pub(super) fn receive<T: DeserializeOwned>(&mut self, deadline: Deadline) -> io::Result<T> {
        self.stream.set_nonblocking(false)?;
        loop {
            if let Some(frame) = self.take()? {
                return Ok(frame);
            }
            let left = deadline.remaining();
            if left == Some(Duration::ZERO) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(left)?;
            match self.fill() {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                Err(cause) => return Err(cause),
            }
        }
    }

    /// Looks for a frame without waiting.
    pub(super) fn try_receive<T: DeserializeOwned>(&mut self) -> TryReceive<T> {
        let received = self.stream.set_nonblocking(true).and_then(|()| {
            loop {
                if let Some(frame) = self.take()? {
                    return Ok(TryReceive::Frame(frame));
                }
                match self.fill() {
                    Ok(0) => return Ok(TryReceive::Closed),
                    Ok(_) => {}
                    Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                        return Ok(TryReceive::Pending);
                    }
                    Err(cause) => return Err(cause),
                }
            }
        });
        // A stream that fails, or says what is no frame, is as good as closed.
        received.unwrap_or(TryReceive::Closed)
    }

    /// Reads what is there of the frame under way, and nothing behind it: that may belong to a connection
    /// that is being made over the stream. Returns 0 at the end of the stream.
    fn fill(&mut self) -> io::Result<usize> {
        let mut chunk = [0; 16 << 10];
        let wanted = (self.frame_len()? - self.buffer.len()).min(chunk.len());
        loop {
            match self.stream.read(&mut chunk[..wanted]) {
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Ok(read) => {
                    self.buffer.extend_from_slice(&chunk[..read]);
                    return Ok(read);
                }
                Err(cause) => return Err(cause),
            }
        }
    }

    /// Length of the frame under way, as far as it is known, in bytes.
    fn frame_len(&self) -> io::Result<usize> {
        let Some(length) = self.buffer.first_chunk::<LENGTH_BYTES>() else { return Ok(LENGTH_BYTES) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX_FRAME {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a unit of an event builder"));
        }
        Ok(LENGTH_BYTES + length)
    }

    /// Takes the frame out of the buffer if it is whole.
    fn take<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let len = self.frame_len()?;
        if len == LENGTH_BYTES || self.buffer.len() < len {
            return Ok(None);
        }
        let frame = serde_json::from_slice(&self.buffer[LENGTH_BYTES..len])?;
        self.buffer.clear();
        Ok(Some(frame))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A unit's side of the wire-up, up to its own connections.
pub(super) struct JoinedRun {
    pub(super) channel: Channel,
    pub(super) setup: Setup,
    /// Where the builder units take connections.
    pub(super) builders: Vec<String>,
    pub(super) deadline: Deadline,
}

/// For the whole wire-up of a run.
pub(super) fn timeout(setup: &Setup) -> Duration {
    let landing: u64 = (0..setup.plan.builders()).map(|builder| setup.landing_bytes(builder).0).sum();
    WIRE_UP_TIMEOUT + Duration::from_secs(landing / PAGES_PER_SECOND)
}

/// Finds the manager and waits for the setup. The manager may come later than the unit; if `parent_pipe` is
/// readable or closed meanwhile, whoever started the unit is gone.
pub(super) fn join(
    manager: &str,
    unit: Unit,
    data: Option<String>,
    parent_pipe: Option<BorrowedFd<'_>>,
) -> Result<JoinedRun, ProcessError> {
    let deadline = Deadline::after(WIRE_UP_TIMEOUT);
    let mut channel = Channel::new(dial_manager(manager, deadline, parent_pipe)?);
    channel.send(&ToManager::join(unit, data)).context("join the manager")?;
    match channel.receive(deadline).map_err(manager_gone)? {
        FromManager::Welcome { setup, builders } => {
            setup.plan.check()?;
            let deadline = Deadline::after(timeout(&setup));
            Ok(JoinedRun { channel, setup: *setup, builders, deadline })
        }
        FromManager::Start => Err(unexpected_frame(Unit::Manager)),
    }
}

fn dial_manager(
    manager: &str,
    deadline: Deadline,
    parent_pipe: Option<BorrowedFd<'_>>,
) -> Result<TcpStream, ProcessError> {
    loop {
        let turn = deadline.earlier(Deadline::after(Duration::from_millis(200)));
        match millstream_rdma::connect::dial(manager, turn) {
            Err(error) if deadline.passed() || !is_timeout(&error) => return Err(error.into()),
            Err(_) if parent_pipe.is_some_and(has_ended) => {
                return Err(ProcessError::Stopped(StopCause::Requested));
            }
            Err(_) => {}
            Ok(stream) => return Ok(stream),
        }
    }
}

fn is_timeout(error: &ConnectError) -> bool {
    matches!(error.kind, ConnectErrorKind::TimedOut { .. })
}

/// Whether there is something to read, or nothing ever will be.
fn has_ended(descriptor: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Connects to a unit that listens already: if it does not, it is gone.
pub(super) fn connect_to_unit(
    unit: Unit,
    address: &str,
    deadline: Deadline,
) -> Result<TcpStream, ProcessError> {
    let failed = |what: String| ProcessError::WireUp { unit, what };
    let socket: SocketAddr = address.parse().map_err(|_| failed(format!("has the address {address:?}")))?;
    let left = deadline.remaining().unwrap_or(WIRE_UP_TIMEOUT).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&socket, left);
    let stream = stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream));
    stream.map_err(|cause| failed(format!("does not answer at {address}: {cause}")))
}

/// Says whether the unit has what it needs on its host.
pub(super) fn report_prepared<T>(
    channel: &mut Channel,
    prepared: Result<T, ProcessError>,
) -> Result<T, ProcessError> {
    match prepared {
        Ok(prepared) => {
            channel.send(&ToManager::Prepared).context("tell the manager that all is prepared")?;
            Ok(prepared)
        }
        Err(error) => {
            // If the manager does not get it, it sees the end of the stream.
            let _ = channel.send(&ToManager::Failed(error.to_string()));
            Err(error)
        }
    }
}

/// Says that this unit is ready, and waits for the start.
pub(super) fn await_start(channel: &mut Channel, deadline: Deadline) -> Result<(), ProcessError> {
    channel.send(&ToManager::Ready).context("tell the manager that all is ready")?;
    match channel.receive(deadline).map_err(manager_gone)? {
        FromManager::Start => Ok(()),
        FromManager::Welcome { .. } => Err(unexpected_frame(Unit::Manager)),
    }
}

/// The manager does not lead the unit to the start.
fn manager_gone(cause: io::Error) -> ProcessError {
    ProcessError::WireUp { unit: Unit::Manager, what: format!("does not start the run: {cause}") }
}

/// A frame that does not belong there.
pub(super) fn unexpected_frame(unit: Unit) -> ProcessError {
    ProcessError::WireUp { unit, what: "says something out of turn".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::RuIndex;
    use millstream_rdma::connect::{dial, listen};

    fn channels() -> (Channel, TcpStream) {
        let soon = Deadline::after(WIRE_UP_TIMEOUT);
        let listener = listen("127.0.0.1:0").unwrap();
        let other = dial(&listener.address().to_string(), soon).unwrap();
        (Channel::new(listener.accept(soon).unwrap().0), other)
    }

    #[test]
    fn frames_arrive_in_pieces_and_in_order() {
        let (mut channel, mut other) = channels();
        assert!(matches!(channel.try_receive::<ToManager>(), TryReceive::Pending));
        let mut sender = Channel::new(other.try_clone().unwrap());
        sender.send(&ToManager::join(Unit::Readout(RuIndex(3)), None)).unwrap();
        let soon = Deadline::after(WIRE_UP_TIMEOUT);
        let join = channel.receive(soon).unwrap();
        let ToManager::Join { version, unit: Unit::Readout(RuIndex(3)), data: None } = join else {
            panic!("{join:?}")
        };
        assert!(is_our_version(&version));

        let mut bytes = 7u32.to_be_bytes().to_vec();
        bytes.extend(b"\"Ready\"");
        other.write_all(&bytes[..6]).unwrap();
        assert!(matches!(channel.try_receive::<ToManager>(), TryReceive::Pending));
        other.write_all(&bytes[6..]).unwrap();
        assert!(matches!(channel.receive(soon).unwrap(), ToManager::Ready));

        // What follows a frame stays in the stream: a connection may be made over it.
        sender.send(&ToManager::Ready).unwrap();
        other.write_all(b"hello").unwrap();
        assert!(matches!(channel.receive(soon).unwrap(), ToManager::Ready));
        let mut rest = [0; 5];
        channel.stream().unwrap().read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"hello");
        drop((sender, other));
        assert!(matches!(channel.try_receive::<ToManager>(), TryReceive::Closed));
    }

    #[test]
    fn a_stranger_and_a_silent_party_do_not_hold_us() {
        let (mut channel, mut other) = channels();
        let error = channel.receive::<ToManager>(Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        other.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let error = channel.receive::<ToManager>(Deadline::after(WIRE_UP_TIMEOUT)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(matches!(channel.try_receive::<ToManager>(), TryReceive::Closed));
    }
}
