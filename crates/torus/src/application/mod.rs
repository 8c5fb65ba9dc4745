//! The torus for an application process: [`Fabric`](millstream_fabric::Fabric) over the rings of its node process.

mod environment;
mod fabric;
mod kernels;

pub use environment::environment_names_a_node;

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use millstream_fabric::{FabricError, Notification, RegionId, check};
use millstream_shm::EventFd;
use millstream_shm::polling::{DEFAULT_POLLING, Polling};
use millstream_shm::socket::Connection;
use millstream_torus_core::{Dimensions, NodeNumber};

use crate::attach::{AttachReply, AttachRequest, receive, send};
use crate::control::{Command, Control, ControlError, MAX_COMMANDS};
use crate::engine::OutsideAccess;
use crate::exchange::Exchange;
use crate::initiator::{Initiator, NEVER};
use crate::memory::Memory;
use crate::outstanding::{Outstanding, Pending};
use kernels::NodeCard;

/// Environment variable with the address of the node process.
pub const ENV_SOCKET: &str = "MILLSTREAM_TORUS_SOCKET";
/// Environment variable with the addresses of all node processes, where `{rank}` stands for the rank that a launcher such as
/// `mpirun` gives to a process.
pub const ENV_SOCKETS: &str = "MILLSTREAM_TORUS_SOCKETS";
/// Environment variable with the node's number.
pub const ENV_RANK: &str = "MILLSTREAM_TORUS_RANK";
/// Environment variable with the number of nodes.
pub const ENV_SIZE: &str = "MILLSTREAM_TORUS_SIZE";
/// Environment variable with the dimensions, as `2x2x2`.
pub const ENV_DIMENSIONS: &str = "MILLSTREAM_TORUS_DIMENSIONS";

/// Most bytes of one command with data in a region.
const REGION_CHUNK: usize = 1 << 30;
/// Interval in which an application that waits or polls checks that its node process lives.
const CHECK_EVERY: Duration = Duration::from_millis(50);
/// Calls of an application that polls, after which it looks at the time.
const CALLS: u32 = 64;

/// Why an application cannot attach.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The environment has no address.
    #[error("{ENV_SOCKET} is not set: start this program with `millstream torus run -- PROGRAM`")]
    NoEnvironment,
    /// The environment has the addresses of all nodes, but no launcher gave this process a rank.
    #[error(
        "{ENV_SOCKETS} is set, but no rank (OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID): start this program with mpirun or srun"
    )]
    NoRank,
    /// The node process cannot be reached, or has another version.
    #[error("cannot attach to the node process at {socket:?}: {cause}")]
    Node {
        /// Its address.
        socket: String,
        /// The cause.
        cause: io::Error,
    },
    /// The node process refused.
    #[error("the node process at {socket:?} refused: {reason}")]
    Refused {
        /// Its address.
        socket: String,
        /// Its reason.
        reason: String,
    },
}

/// Completions without which a waiting application need not be woken.
#[derive(Clone, Copy)]
enum Awaited {
    One,
    /// Half of all that may be under way.
    Half,
    /// Those of all operations to a node.
    AllTo(NodeNumber),
}

/// This application's node in the torus.
#[derive(Debug)]
pub struct TorusNode {
    torus: Dimensions,
    here: NodeNumber,
    control: Control,
    connection: Connection,
    wake: EventFd,
    regions: BTreeMap<RegionId, Memory>,
    /// Those that are memory of the node's card, and where they begin in it.
    card_regions: BTreeMap<RegionId, u64>,
    /// The node's card, once a kernel ran on it.
    card: Option<NodeCard>,
    outstanding: Outstanding,
    exchange: Exchange,
    polling: Polling,
    broken: bool,
    /// Calls since the connection to the node process was looked at last.
    calls: u32,
    looked: Instant,
}

impl TorusNode {
    /// Attaches to the node process that the environment names.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn from_environment() -> Result<TorusNode, AttachError> {
        TorusNode::attach(&environment::socket()?)
    }

    /// Attaches to a node process of the same user on this host.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach(socket: &str) -> Result<TorusNode, AttachError> {
        let failed = |cause| AttachError::Node { socket: socket.to_owned(), cause };
        let connection = Connection::open(socket, Duration::from_secs(30)).map_err(failed)?;
        send(&connection, &AttachRequest::attach(), &[]).map_err(failed)?;
        let (reply, descriptors) = receive::<AttachReply>(&connection).map_err(failed)?;
        let (torus, here, mailbox_region) = match reply {
            AttachReply::Attached { dimensions, node, mailbox } => (dimensions, node, mailbox),
            AttachReply::Failed { reason } => {
                return Err(AttachError::Refused { socket: socket.to_owned(), reason });
            }
            AttachReply::Region { .. }
            | AttachReply::Card { .. }
            | AttachReply::NoCard
            | AttachReply::Health => {
                return Err(failed(io::ErrorKind::InvalidData.into()));
            }
        };
        let torus: Dimensions =
            torus.parse().map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(|| failed(io::ErrorKind::InvalidData.into()));
        let control = Control::open(next()?).map_err(failed)?;
        let mailbox = Memory::from_peer(next()?, None).map_err(failed)?;
        let wake = EventFd::from_peer(next()?).map_err(failed)?;
        Ok(TorusNode {
            torus,
            here: NodeNumber(node_number(here, &torus).map_err(failed)?),
            control,
            connection,
            wake,
            regions: BTreeMap::new(),
            card_regions: BTreeMap::new(),
            card: None,
            outstanding: Outstanding::new(),
            exchange: Exchange::new(RegionId(mailbox_region), mailbox, torus.nodes()),
            polling: Polling::new(DEFAULT_POLLING),
            broken: false,
            calls: 0,
            looked: Instant::now(),
        })
    }

    /// Looks now and then whether the node process is there: a program that only polls gets no other sign of its end.
    fn look(&mut self) {
        self.calls += 1;
        if self.calls >= CALLS {
            self.calls = 0;
            self.look_if_due();
        }
    }

    fn look_if_due(&mut self) {
        if self.looked.elapsed() >= CHECK_EVERY {
            self.looked = Instant::now();
            self.broken |= self.connection.is_hung_up();
        }
    }

    fn own(&self, region: RegionId) -> Result<&Memory, FabricError> {
        if self.card_regions.contains_key(&region) && self.control.card_is_gone() {
            return Err(FabricError::Gone { node: self.here, region: region.0 });
        }
        check::region(self.regions.get(&region), self.here, region)
    }

    fn own_range(&self, region: RegionId, offset: u64, length: usize) -> Result<&Memory, FabricError> {
        let memory = self.own(region)?;
        check::range(offset, length as u64, memory.size())?;
        Ok(memory)
    }

    /// Takes completions. False if the node process is gone.
    fn drain(&mut self) -> bool {
        loop {
            match self.control.take_completion() {
                Ok(Some(done)) => self.outstanding.finish(done),
                Ok(None) => return !self.broken,
                Err(error) => {
                    self.give_up(error);
                    return false;
                }
            }
        }
    }

    /// Waits until `check` has a result.
    fn wait_for<R>(
        &mut self,
        awaited: Awaited,
        timeout: Duration,
        mut check: impl FnMut(&mut TorusNode) -> Option<Result<R, FabricError>>,
    ) -> Result<R, FabricError> {
        let start = Instant::now();
        self.polling.begin();
        loop {
            let seen = self.control.signals();
            let lives = self.drain();
            if let Some(result) = check(self) {
                return result;
            }
            if !lives {
                return Err(FabricError::NodeLost { node: self.here });
            }
            if self.polling.pause() {
                continue;
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(FabricError::TimedOut { waited: timeout });
            }
            self.look_if_due();
            let completions = match awaited {
                Awaited::One => 1,
                Awaited::Half => MAX_COMMANDS / 2,
                Awaited::AllTo(node) => self.outstanding.under_way(node) as u64,
            };
            if !self.control.await_completions(completions) {
                self.control.wait(seen, left.min(CHECK_EVERY));
            }
        }
    }

    fn give_up(&mut self, error: ControlError) {
        tracing::error!("{}: {error}", self.here);
        self.broken = true;
    }

    fn check_put(&self, to: NodeNumber, notification: Notification) -> Result<(), FabricError> {
        check::notification(notification)?;
        let lives = self.torus.contains(to) && !self.control.is_lost(to);
        if lives { Ok(()) } else { Err(FabricError::NodeLost { node: to }) }
    }

    pub(crate) fn exchange_state(&mut self) -> &mut Exchange {
        &mut self.exchange
    }

    pub(crate) fn exchange_ref(&self) -> &Exchange {
        &self.exchange
    }

    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    /// Waits until a counter, one of the exchange included, has a value; `lost` names a node that ends the wait.
    pub(crate) fn wait_for_counter(
        &mut self,
        index: u16,
        value: u64,
        timeout: Duration,
        lost: impl Fn(&TorusNode) -> Option<NodeNumber>,
    ) -> Result<(), FabricError> {
        self.wait(timeout, |node| {
            // In this order: a node that is lost raised its counters before.
            let lost = lost(node);
            if node.control.counter(index) >= value {
                return Some(Ok(()));
            }
            lost.map(|node| Err(FabricError::NodeLost { node }))
        })
    }
}

impl Initiator for TorusNode {
    fn outstanding(&mut self) -> &mut Outstanding {
        &mut self.outstanding
    }

    fn store_staged(&self, at: u64, data: &[u8]) {
        let place = Control::staging(at, data.len() as u32).unwrap_or_default();
        // The place is inside the staging memory.
        let _ = self.control.memory().store(place, data);
    }

    fn load_staged(&self, at: u64, into: &mut [u8]) {
        let place = Control::staging(at, into.len() as u32).unwrap_or_default();
        let _ = self.control.memory().load(place, into);
    }

    fn post(&mut self, command: Command, pending: Pending) -> Result<u32, FabricError> {
        self.look();
        if self.outstanding.count() as u64 >= MAX_COMMANDS {
            // Not for each single place.
            self.wait_for(Awaited::Half, NEVER, |node| {
                ((node.outstanding.count() as u64) < MAX_COMMANDS).then_some(Ok(()))
            })?;
        }
        if self.broken {
            return Err(FabricError::NodeLost { node: self.here });
        }
        let cookie = self.outstanding.begin(pending);
        match self.control.post(&Command { cookie, ..command }) {
            Ok(true) => self.wake.signal(),
            Ok(false) => {}
            Err(error) => {
                self.give_up(error);
                return Err(FabricError::NodeLost { node: self.here });
            }
        }
        Ok(cookie)
    }

    fn wait<R>(
        &mut self,
        timeout: Duration,
        check: impl FnMut(&mut TorusNode) -> Option<Result<R, FabricError>>,
    ) -> Result<R, FabricError> {
        self.wait_for(Awaited::One, timeout, check)
    }
}

fn node_number(number: u32, torus: &Dimensions) -> io::Result<u16> {
    (u16::try_from(number).ok().filter(|&number| torus.contains(NodeNumber(number))))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("node {number} of {torus}")))
}

impl TorusNode {
    /// Registers zero bytes of this application with its node.
    ///
    /// # Errors
    /// The system has no memory, or the node process refuses.
    pub fn register_memory(&mut self, size: usize) -> io::Result<RegionId> {
        let (memory, descriptor) = Memory::allocate("millstream-torus-region", size.max(1), None)?;
        let length = size as u64;
        send(
            &self.connection,
            &AttachRequest::Register { length },
            &[std::os::fd::AsFd::as_fd(&descriptor)],
        )?;
        match receive::<AttachReply>(&self.connection)?.0 {
            AttachReply::Region { region } => {
                self.regions.insert(RegionId(region), memory);
                Ok(RegionId(region))
            }
            AttachReply::Failed { reason } => Err(io::Error::other(reason)),
            AttachReply::Attached { .. }
            | AttachReply::Card { .. }
            | AttachReply::NoCard
            | AttachReply::Health => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Lets hosts outside of the torus use a region of this application: they find it by its name at this node. A region
    /// that is deregistered, or whose application ends, is withdrawn.
    ///
    /// # Errors
    /// The name is not valid or another region's, the region does not exist, or the node process is lost.
    pub fn publish(&mut self, region: RegionId, name: &str, access: OutsideAccess) -> io::Result<()> {
        let writable = access == OutsideAccess::ReadWrite;
        let request = AttachRequest::Publish { region: region.0, name: name.to_owned(), writable };
        send(&self.connection, &request, &[])?;
        match receive::<AttachReply>(&self.connection)?.0 {
            AttachReply::Region { .. } => Ok(()),
            AttachReply::Failed { reason } => Err(io::Error::new(io::ErrorKind::InvalidInput, reason)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Registers a part of the node's card. `None` if the node has no such memory.
    fn register_card_memory(&mut self, offset: u64, size: usize) -> io::Result<Option<RegionId>> {
        send(&self.connection, &AttachRequest::RegisterCard { offset, length: size as u64 }, &[])?;
        let (reply, descriptors) = receive::<AttachReply>(&self.connection)?;
        let (AttachReply::Region { region }, Some(descriptor)) = (reply, descriptors.first()) else {
            return Ok(None);
        };
        let region = RegionId(region);
        self.regions.insert(region, Memory::part_of(descriptor, offset, size)?);
        self.card_regions.insert(region, offset);
        Ok(Some(region))
    }

    /// Memory of a region of this application.
    #[must_use]
    pub fn region_memory(&self, region: RegionId) -> Option<&Memory> {
        self.regions.get(&region)
    }
}
