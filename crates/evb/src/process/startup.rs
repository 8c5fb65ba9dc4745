//! Startup: the manager and the units find each other.
//!
//! ```text
//! unit                                manager
//!  │ ── Join: unit, address ───────────► │  waits for all
//!  │ ◄── Welcome: config, addresses ───── │
//!  │ ── Prepared, or Failed ───────────► │  waits for all
//!  │ ═══ control connection ════════════ │
//!  │ ═══ readout to builder: data ═══    │
//!  │ ── Ready ─────────────────────────► │  waits for all
//!  │ ◄── Start ───────────────────────── │
//!  │              the run                │
//!  │ ── report ────────────────────────► │
//! ```
//!
//! The standby manager joins before the units are welcome. Each unit then connects to it as well (`manager_link.rs`). A later
//! standby manager joins the run in progress (`joining.rs`).
//!
//! Frames are JSON with a length prefix (32 bits, big-endian) over one TCP stream per unit. The control connection is
//! set up over the same stream. The stream stays open during the run; its end means that the peer died.

use super::ProcessError;
use super::builder::BuilderEnd;
use super::error::IoContext;
use super::manager_link;
use super::own::OwnConfig;
use crate::config::RunConfig;
use crate::core::plan::Plan;
use crate::core::recovery::Membership;
use crate::core::report::ReadoutReport;
use crate::core::takeover::{BuilderState, DoneBatch, ManagerReplica, ReadoutState};
use crate::core::{BuIndex, RuIndex, StopCause, Unit};
use millstream_rdma::Deadline;
use millstream_rdma::connect::{ConnectError, ConnectErrorKind, ControlStream as _, is_tls};
use millstream_tls::{Security, Stream};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Timeout of the startup, without the time for landing memory.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(30);
/// Landing memory that gets its pages in one second on a slow virtual machine, in bytes, over all units.
const PAGES_PER_SECOND: u64 = 200_000_000;
/// Interval at which a unit that was refused comes again.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Units of one run must have the same version.
const VERSION: &str = concat!("millstream-evb ", env!("CARGO_PKG_VERSION"));
/// Length of the prefix of each frame.
const LENGTH_BYTES: usize = 4;
/// Limit of a frame's length.
const MAX_FRAME: usize = 256 << 20;
/// Limit of the length of a first frame, whose sender may be anybody.
const MAX_FIRST_FRAME: usize = 4 << 10;

/// Frames from a unit.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToManager {
    /// The first frame.
    Join {
        version: String,
        unit: Unit,
        /// Where a builder unit accepts data connections.
        data: Option<String>,
    },
    /// The unit's local resources are ready.
    Prepared,
    /// The unit cannot start; the error.
    Failed(String),
    /// All connections are made.
    Ready,
    /// Events that a readout unit has, counted from the run's first. Repeated without news: a silent unit counts as lost.
    Available {
        /// Their number.
        events: u64,
    },
    /// State of a readout unit, for the standby manager that takes over.
    ReadoutState(ReadoutState),
    /// State of a builder unit, for the standby manager that takes over.
    BuilderState(Box<BuilderState>),
    /// Final report of a readout unit.
    Readout(ReadoutReport),
    /// Final report of a builder unit.
    Builder(Box<BuilderEnd>),
}

/// Frames from the manager.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromManager {
    /// All units have joined, or the unit may join the run in progress.
    Welcome {
        config: Box<RunConfig>,
        /// The unit's index: that of a restart if it joins the run in progress.
        unit: Unit,
        /// Where the builder units accept data connections, by index; `None` for those that are not there.
        builders: Vec<Option<String>>,
        /// The readout units that connect to a builder unit.
        readouts: Vec<RuIndex>,
        /// Where the standby manager listens.
        standby: Option<String>,
    },
    /// To a unit in the run: a standby manager has joined and waits for its connection.
    Standby { address: String },
    /// To the standby manager.
    Copy(Box<ManagerCopy>),
    /// To the standby manager: batches that are done since the copy.
    Done(Vec<DoneBatch>),
    /// From the standby manager, which takes over: the units of the run, with its term.
    NewTerm { membership: Membership },
    /// The unit cannot join the run in progress.
    Refused {
        why: String,
        /// Whether it may come again soon.
        try_again: bool,
    },
    /// To a readout unit in the run: a builder unit joins and waits for its connection.
    Connect { builder: BuIndex, address: String },
    /// All units are ready.
    Start {
        /// The units of the run in progress; `None` at the start of the run.
        membership: Option<Membership>,
    },
}

impl FromManager {
    /// To a standby manager.
    pub(super) fn welcome_standby(config: &RunConfig) -> FromManager {
        FromManager::Welcome {
            config: Box::new(config.clone()),
            unit: Unit::Manager,
            builders: Vec::new(),
            readouts: Vec::new(),
            standby: None,
        }
    }
}

/// What the standby manager needs of the manager.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ManagerCopy {
    pub(super) replica: ManagerReplica,
    /// Time since the start of the run.
    pub(super) elapsed: Duration,
    /// When the first batch was assigned, from the start of the run.
    pub(super) first_assigned: Option<Duration>,
}

impl ToManager {
    /// The first frame of a unit; that of the standby manager names the manager.
    pub(super) fn join(unit: Unit, data: Option<String>) -> ToManager {
        ToManager::Join { version: VERSION.to_owned(), unit, data }
    }
}

/// Whether the peer has this program's version.
pub(super) fn is_our_version(version: &str) -> bool {
    version == VERSION
}

/// Frames over a control stream.
#[derive(Debug)]
pub(super) struct Channel {
    stream: Stream,
    /// Bytes of an incomplete frame.
    buffer: Vec<u8>,
    /// Limit of a frame's length.
    limit: usize,
    /// The stream has ended because the peer was not reached, and not because it has ended.
    is_cut_off: bool,
}

/// Result of [`Channel::try_receive`].
#[derive(Debug)]
pub(super) enum TryReceive<T> {
    /// A frame.
    Frame(T),
    /// No complete frame yet.
    Pending,
    /// The stream ended or failed.
    Closed,
}

impl Channel {
    pub(super) fn new(stream: Stream) -> Channel {
        Channel { stream, buffer: Vec::new(), limit: MAX_FRAME, is_cut_off: false }
    }

    /// A stream of a peer that has not said which unit it is: its first frame is short.
    pub(super) fn of_unidentified(stream: Stream) -> Channel {
        Channel { limit: MAX_FIRST_FRAME, ..Channel::new(stream) }
    }

    /// The peer is a unit of the run.
    pub(super) fn identified(self) -> Channel {
        Channel { limit: MAX_FRAME, ..self }
    }

    /// Bounds the time of each [`send`](Self::send).
    pub(super) fn set_send_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.stream.set_write_timeout(Some(timeout.max(Duration::from_millis(1))))
    }

    /// Sets how long the peer may be cut off until the stream ends: longer than a short cut, which costs only time, and shorter than
    /// an excluded unit has to report or end.
    pub(super) fn set_peer_timeout(&self, plan: &Plan) -> io::Result<()> {
        millstream_rdma::connect::set_peer_timeout(self.stream.tcp(), 2 * plan.timeout)
    }

    /// Continues the TLS handshake without waiting. Returns whether it is complete.
    pub(super) fn handshake(&mut self) -> io::Result<bool> {
        self.stream.set_nonblocking(true)?;
        match self.stream.handshake() {
            Ok(()) => Ok(true),
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(cause) => Err(cause),
        }
    }

    /// The stream in blocking mode, for setting up connections. No frame may be incomplete.
    pub(super) fn stream(&mut self) -> io::Result<&mut Stream> {
        self.stream.set_nonblocking(false)?;
        Ok(&mut self.stream)
    }

    /// Sends a frame; blocks until the kernel has taken it.
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

    /// Receives a frame without waiting.
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
        // A stream that fails or sends an invalid frame counts as closed.
        received.unwrap_or_else(|cause| {
            self.is_cut_off = cause.kind() == io::ErrorKind::TimedOut;
            TryReceive::Closed
        })
    }

    /// Whether [`TryReceive::Closed`] says that the peer's host did not answer: the peer may go on.
    pub(super) fn is_cut_off(&self) -> bool {
        self.is_cut_off
    }

    /// Reads bytes of the current frame, and nothing behind it: that may belong to a connection that is being set up
    /// over the stream. Returns 0 at the end of the stream.
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

    /// Length of the current frame, in bytes; of the prefix while that is incomplete.
    fn frame_len(&self) -> io::Result<usize> {
        let Some(length) = self.buffer.first_chunk::<LENGTH_BYTES>() else { return Ok(LENGTH_BYTES) };
        if is_tls(length) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer uses TLS: give this process keys of the site (MILLSTREAM_KEYS, or [security] in the configuration)",
            ));
        }
        let length = u32::from_be_bytes(*length) as usize;
        if length > self.limit {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "frame is too long; the peer is not an event builder unit",
            ));
        }
        Ok(LENGTH_BYTES + length)
    }

    /// Takes the frame from the buffer if it is complete.
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

/// A unit that has joined the run.
pub(super) struct JoinedRun {
    pub(super) channel: Channel,
    pub(super) config: RunConfig,
    /// Its index.
    pub(super) unit: Unit,
    /// Where it accepts data connections, if it is a builder unit.
    pub(super) data: Option<String>,
    /// Where the builder units accept data connections, by index; `None` for those that are not there.
    pub(super) builders: Vec<Option<String>>,
    /// The readout units that connect to a builder unit.
    pub(super) readouts: Vec<RuIndex>,
    /// The stream to the standby manager.
    pub(super) standby: Option<Channel>,
    /// For connections between units.
    pub(super) security: Security,
    pub(super) deadline: Deadline,
}

/// Timeout of the startup of a run; also the time for the manager to listen.
pub(super) fn timeout(config: &RunConfig) -> Duration {
    let landing: u64 =
        (0..config.plan.initial_builders()).map(|builder| config.landing_bytes(builder).0).sum();
    STARTUP_TIMEOUT + Duration::from_secs(landing / PAGES_PER_SECOND)
}

/// Joins the manager and waits for the configuration. The manager may start after the unit, and may not know yet that the unit's
/// predecessor is lost. Gives up if `parent_pipe`
/// becomes readable or is closed, because the launcher ended.
pub(super) fn join(
    manager: &str,
    unit: Unit,
    data: Option<String>,
    own: Option<&OwnConfig>,
    security: &Security,
    parent_pipe: Option<BorrowedFd<'_>>,
) -> Result<JoinedRun, ProcessError> {
    let deadline = Deadline::after(STARTUP_TIMEOUT);
    loop {
        let mut channel = Channel::new(security.connect(
            dial_manager(manager, deadline, parent_pipe)?,
            manager,
            deadline,
        )?);
        channel.send(&ToManager::join(unit, data.clone())).context("join the manager")?;
        match channel.receive(deadline).map_err(manager_gone)? {
            FromManager::Welcome { config, unit, builders, readouts, standby } => {
                if let Some(Err(error)) = own.map(|own| own.check(&config)) {
                    // The manager is told, as by any unit that cannot start.
                    return report_prepared(&mut channel, Err(error));
                }
                config.plan.check()?;
                channel.set_peer_timeout(&config.plan).context("use the manager's TCP stream")?;
                let deadline = Deadline::after(timeout(&config));
                let standby = standby.and_then(|address| {
                    manager_link::connect_to_standby(&address, unit, data.clone(), security, deadline)
                });
                let config = *config;
                let security = config.security.apply(security.clone())?;
                return Ok(JoinedRun {
                    channel,
                    config,
                    unit,
                    data,
                    builders,
                    readouts,
                    standby,
                    security,
                    deadline,
                });
            }
            FromManager::Refused { try_again: true, .. } if !deadline.passed() => {
                if parent_pipe.is_some_and(has_ended) {
                    return Err(ProcessError::Stopped(StopCause::Requested));
                }
                std::thread::sleep(RETRY_INTERVAL);
            }
            FromManager::Refused { why, .. } => return Err(refused(why)),
            _ => return Err(unexpected_frame(Unit::Manager)),
        }
    }
}

/// Error: the manager does not let the unit join the run.
fn refused(why: String) -> ProcessError {
    ProcessError::Startup { unit: Unit::Manager, what: format!("refused this unit: {why}") }
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

/// Whether the descriptor is readable or closed.
fn has_ended(descriptor: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Address for connections of other units: the interface that leads to the manager, any port.
pub(super) fn own_address(manager: &str) -> String {
    let loopback = manager.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback());
    if loopback { "127.0.0.1:0".to_owned() } else { own_interface(manager) }
}

/// The local address of the route to the manager.
fn own_interface(manager: &str) -> String {
    let probe = std::net::UdpSocket::bind("0.0.0.0:0");
    let local = probe.and_then(|probe| {
        // Connecting a datagram socket sends nothing; it selects the route.
        probe.connect(manager)?;
        probe.local_addr()
    });
    local.map_or_else(|_| "127.0.0.1:0".to_owned(), |address| SocketAddr::new(address.ip(), 0).to_string())
}

/// Connects to a unit that is listening.
pub(super) fn connect_to_unit(
    unit: Unit,
    address: &str,
    security: &Security,
    deadline: Deadline,
) -> Result<Stream, ProcessError> {
    let failed = |what: String| ProcessError::Startup { unit, what };
    let socket: SocketAddr =
        address.parse().map_err(|_| failed(format!("has the invalid address {address:?}")))?;
    let resolved = deadline.earlier(Deadline::after(millstream_rdma::connect::ADDRESS_RESOLUTION));
    let stream = loop {
        let left = deadline.remaining().unwrap_or(STARTUP_TIMEOUT).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&socket, left) {
            // The kernel also says so of a host whose link has just returned.
            Err(cause) if cause.kind() == io::ErrorKind::HostUnreachable && !resolved.passed() => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            connected => break connected,
        }
    };
    let stream = stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream));
    let stream = stream.map_err(|cause| failed(format!("cannot be reached at {address}: {cause}")))?;
    Ok(security.connect(stream, address, deadline)?)
}

/// Reports whether the unit's local resources are ready.
pub(super) fn report_prepared<T>(
    channel: &mut Channel,
    prepared: Result<T, ProcessError>,
) -> Result<T, ProcessError> {
    match prepared {
        Ok(prepared) => {
            channel.send(&ToManager::Prepared).context("send Prepared to the manager")?;
            Ok(prepared)
        }
        Err(error) => {
            // Errors are ignored: the manager sees the end of the stream.
            let _ = channel.send(&ToManager::Failed(error.to_string()));
            Err(error)
        }
    }
}

/// Reports that this unit is ready, and waits for the start. Returns the units of a run in progress.
pub(super) fn await_start(
    channel: &mut Channel,
    deadline: Deadline,
) -> Result<Option<Membership>, ProcessError> {
    channel.send(&ToManager::Ready).context("send Ready to the manager")?;
    match channel.receive(deadline).map_err(manager_gone)? {
        FromManager::Start { membership } => Ok(membership),
        FromManager::Refused { why, .. } => Err(refused(why)),
        _ => Err(unexpected_frame(Unit::Manager)),
    }
}

/// Error: the manager ended or did not start the run in time.
fn manager_gone(cause: io::Error) -> ProcessError {
    ProcessError::Startup { unit: Unit::Manager, what: format!("did not start the run: {cause}") }
}

/// Error: a frame that is not expected at this step.
pub(super) fn unexpected_frame(unit: Unit) -> ProcessError {
    ProcessError::Startup { unit, what: "sent an unexpected frame".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::RuIndex;
    use millstream_rdma::connect::{dial, listen};

    fn channels() -> (Channel, TcpStream) {
        let soon = Deadline::after(STARTUP_TIMEOUT);
        let listener = listen("127.0.0.1:0").unwrap();
        let other = dial(&listener.address().to_string(), soon).unwrap();
        (Channel::new(Stream::plain(listener.accept(soon).unwrap().0)), other)
    }

    #[test]
    fn frames_arrive_in_pieces_and_in_order() {
        let (mut channel, mut other) = channels();
        assert!(matches!(channel.try_receive::<ToManager>(), TryReceive::Pending));
        let mut sender = Channel::new(Stream::plain(other.try_clone().unwrap()));
        sender.send(&ToManager::join(Unit::Readout(RuIndex(3)), None)).unwrap();
        let soon = Deadline::after(STARTUP_TIMEOUT);
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

        // Bytes behind a frame stay in the stream: a connection may be set up over it.
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
    fn invalid_frames_and_silent_peers_are_errors() {
        let (mut channel, mut other) = channels();
        let error = channel.receive::<ToManager>(Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        other.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let error = channel.receive::<ToManager>(Deadline::after(STARTUP_TIMEOUT)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(matches!(channel.try_receive::<ToManager>(), TryReceive::Closed));
    }
}
