//! Another process of this host, as an initiator sees it: its arena and the files that it exports.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use millstream_lockfree::mr_entry::MrEntry;
use millstream_lockfree::process::{has_exited, pidfd_has_exited, pidfd_open};
use millstream_lockfree::{RobustLock, Shared};
use millstream_shm::socket::Connection;
use millstream_shm::{EventFd, MappedRef, Mapping, Memfd};

use crate::caps::{MAX_MR, MAX_XRC_SRQ};
use crate::channel_table::ChannelTable;
use crate::exported_files::FileId;
use crate::ipc::{self, MESSAGE_LEN, Message, Op, VERSION};
use crate::layout::{
    ARENA_LEN, FILE_TABLE, FileEntry, Header, MAGIC, MR_TABLE, QP_TABLE, QpEntry, XRC_TABLE, XrcEntry,
};
use crate::mr_table::MrTable;
use crate::tasks::{Task, TaskQueue};

/// The identity of this process, as its hello tells peers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalId {
    /// The process id, which owns locks in shared memory.
    pub(crate) pid: u32,
    /// High bits of every queue pair number of the process.
    pub(crate) qpn_prefix: u32,
    /// Whether the process registered for asymmetric fences.
    pub(crate) asymmetric: bool,
}

/// A process with queue pairs that ours are connected to; possibly this one.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) pid: u32,
    /// Both sides registered for asymmetric fences.
    pub(crate) asymmetric: bool,
    arena: Arc<Mapping>,
    alive: AtomicBool,
    link: PeerLink,
    files: Mutex<HashMap<u32, MappedFile>>,
    channels: Mutex<HashMap<u32, Arc<EventFd>>>,
}

/// The path of messages to a peer.
#[derive(Debug)]
enum PeerLink {
    /// The peer is this process.
    Local { channels: &'static ChannelTable, tasks: &'static TaskQueue, mrs: &'static MrTable },
    /// The peer is another process.
    Remote {
        connection: Mutex<Connection>,
        /// Readable once the process has exited. Its sockets may outlive it in a forked child.
        pidfd: Option<OwnedFd>,
    },
}

/// A file's generation, and its mapping if it can be mapped.
type MappedFile = (u32, Option<Arc<Mapping>>);

/// Mappings up to this size are filled at once, so that the first transfer takes no page faults.
const POPULATE: usize = 256 << 20;

impl Peer {
    /// This process as its own peer.
    pub(crate) fn local(
        id: LocalId,
        arena: Arc<Mapping>,
        channels: &'static ChannelTable,
        tasks: &'static TaskQueue,
        mrs: &'static MrTable,
    ) -> Self {
        Self {
            pid: id.pid,
            asymmetric: id.asymmetric,
            arena,
            alive: AtomicBool::new(true),
            link: PeerLink::Local { channels, tasks, mrs },
            files: Mutex::default(),
            channels: Mutex::default(),
        }
    }

    /// Connects to the process that owns the queue pair numbers with this prefix.
    ///
    /// # Errors
    /// What the socket reports; ConnectionRefused if the process has exited; InvalidData for another version.
    pub(crate) fn connect(me: LocalId, qpn_prefix: u32) -> io::Result<Self> {
        let connection = Connection::open(&ipc::socket_name(qpn_prefix), ipc::TIMEOUT)?;
        let pid = connection.peer().pid;
        if has_exited(pid) {
            // A child of the process holds the socket name.
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let pidfd = pidfd_open(pid).ok();
        let hello = Message::new(Op::Hello, [VERSION, me.pid, u32::from(me.asymmetric)]);
        connection.send(&hello.encode(), &[])?;
        let (answer, fd) = receive(&connection)?;
        let [version, _, asymmetric, ..] = answer.words;
        let invalid = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
        let fd = fd.ok_or_else(|| invalid("the peer sent no arena"))?;
        if answer.op != Op::Hello || version != VERSION {
            return Err(invalid("the peer runs another version of the device"));
        }
        let memory = Memfd::from_peer(fd)?;
        if memory.len() != ARENA_LEN {
            return Err(invalid("the peer's arena has another size"));
        }
        let arena = Arc::new(memory.map()?);
        let magic = arena.get::<Header>(0).map(|header| header.magic.load(Ordering::Acquire));
        if magic != Some(MAGIC) {
            return Err(invalid("the peer's arena has another layout"));
        }
        Ok(Self {
            pid,
            asymmetric: me.asymmetric && asymmetric == 1,
            arena,
            alive: AtomicBool::new(true),
            link: PeerLink::Remote { connection: Mutex::new(connection), pidfd },
            files: Mutex::default(),
            channels: Mutex::default(),
        })
    }

    #[inline]
    pub(crate) fn alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    /// The memory keys of the peer, if it is this process.
    pub(crate) fn local_mrs(&self) -> Option<&'static MrTable> {
        match self.link {
            PeerLink::Local { mrs, .. } => Some(mrs),
            PeerLink::Remote { .. } => None,
        }
    }

    /// Whether the process has exited, also if this was not detected before.
    pub(crate) fn has_exited(&self) -> bool {
        !self.alive()
            || match &self.link {
                PeerLink::Remote { pidfd: Some(pidfd), .. } => pidfd_has_exited(pidfd.as_fd()),
                _ => false,
            }
    }

    /// Notes that the process has exited.
    pub(crate) fn mark_lost(&self) {
        self.alive.store(false, Ordering::Release);
        // Transfers in flight hold their own reference to a mapping.
        self.files.lock().expect("no panic under this lock").clear();
    }

    /// The descriptors that report the exit of the process: the connection hangs up, the process descriptor becomes
    /// readable. Negative where there is none.
    pub(crate) fn exit_events(&self) -> [libc::pollfd; 2] {
        let (connection, pidfd) = match &self.link {
            PeerLink::Local { .. } => (-1, -1),
            PeerLink::Remote { connection, pidfd } => (
                connection.lock().expect("no panic under this lock").as_fd().as_raw_fd(),
                pidfd.as_ref().map_or(-1, AsRawFd::as_raw_fd),
            ),
        };
        [(connection, libc::POLLRDHUP), (pidfd, libc::POLLIN)].map(|(fd, events)| libc::pollfd {
            fd,
            events,
            revents: 0,
        })
    }

    /// The peer's arena.
    pub(crate) fn arena(&self) -> &Arc<Mapping> {
        &self.arena
    }

    /// Address of the byte at `offset` of the arena, if `len` bytes from there are inside.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = self.arena.len().checked_sub(offset).is_some_and(|room| room >= len);
        inside.then(|| self.arena.base().wrapping_add(offset))
    }

    /// The value at `offset` of the arena, with a share of the arena's mapping.
    pub(crate) fn mapped<T: Shared>(&self, offset: usize) -> Option<MappedRef<T>> {
        MappedRef::new(&self.arena, offset)
    }

    pub(crate) fn header(&self) -> Option<&Header> {
        self.arena.get(0)
    }

    /// Serialises atomic operations on memory that some initiators cannot map.
    pub(crate) fn atomics_lock(&self) -> Option<&RobustLock> {
        self.header().map(|header| &header.atomics)
    }

    pub(crate) fn qp_entry(&self, index: usize) -> Option<MappedRef<QpEntry>> {
        self.mapped(QP_TABLE + index * size_of::<QpEntry>())
    }

    pub(crate) fn xrc_entry(&self, number: u32) -> Option<MappedRef<XrcEntry>> {
        let index = number as usize % MAX_XRC_SRQ;
        self.mapped(XRC_TABLE + index * size_of::<XrcEntry>())
    }

    #[inline]
    pub(crate) fn mr_entry(&self, key: u32) -> Option<&MrEntry> {
        self.arena.get(MR_TABLE + (key >> 16) as usize * size_of::<MrEntry>())
    }

    fn file_generation(&self, slot: u32) -> u32 {
        let entry = self.arena.get::<FileEntry>(FILE_TABLE + slot as usize * size_of::<FileEntry>());
        entry.map_or(0, |entry| entry.generation.load(Ordering::Acquire))
    }

    /// Maps one of the peer's files whole, once. None where that is not possible.
    pub(crate) fn map(&self, id: FileId) -> Option<Arc<Mapping>> {
        if id.slot as usize >= MAX_MR {
            return None;
        }
        let mut files = self.files.lock().expect("no panic under this lock");
        if let Some((generation, mapping)) = files.get(&id.slot)
            && *generation == id.generation
        {
            return mapping.clone();
        }
        // Unmap the files that the peer has withdrawn.
        files.retain(|slot, (generation, _)| self.file_generation(*slot) == *generation);
        let PeerLink::Remote { connection, .. } = &self.link else { return None };
        let connection = connection.lock().expect("no panic under this lock");
        let mapping = match request(&connection, Message::new(Op::File, [id.slot, id.generation])) {
            Ok((answer, fd)) if answer.op == Op::File => fd.and_then(map_whole).map(Arc::new),
            // Withdrawn meanwhile, so the key is no longer valid either.
            Ok(_) => return None,
            Err(_) => return None,
        };
        files.insert(id.slot, (id.generation, mapping.clone()));
        mapping
    }

    /// Signals one of the peer's completion channels.
    pub(crate) fn signal(&self, channel: u32) {
        let connection = match &self.link {
            PeerLink::Local { channels, .. } => return channels.signal(channel),
            PeerLink::Remote { connection, .. } => connection,
        };
        let mut channels = self.channels.lock().expect("no panic under this lock");
        if let Some(event) = channels.get(&channel) {
            return event.signal();
        }
        let connection = connection.lock().expect("no panic under this lock");
        match request(&connection, Message::new(Op::Channel, [channel])) {
            Ok((answer, Some(fd))) if answer.op == Op::Channel => {
                if let Ok(event) = EventFd::from_peer(fd) {
                    event.signal();
                    channels.insert(channel, Arc::new(event));
                }
            }
            // The channel is closed.
            Ok(_) => {}
            // The process is stopped. Its own server signals the channel when it continues.
            Err(_) => {
                let _ = connection.send(&Message::new(Op::Signal, [channel]).encode(), &[]);
            }
        }
    }

    /// Tells the peer that the process with this prefix has queue pairs in multicast groups, and waits for the answer.
    pub(crate) fn announce_multicast(&self, qpn_prefix: u32) {
        if let PeerLink::Remote { connection, .. } = &self.link {
            let connection = connection.lock().expect("no panic under this lock");
            // A stopped process searches for members when it sends to its first group.
            let _ = request(&connection, Message::new(Op::MulticastMember, [qpn_prefix]));
        }
    }

    /// Sends a message that has no answer. An error means that the peer is exiting.
    pub(crate) fn send(&self, message: Message) {
        match &self.link {
            PeerLink::Local { tasks, .. } => {
                if let Some(task) = Task::of(&message) {
                    tasks.add(task);
                }
            }
            PeerLink::Remote { connection, .. } => {
                let connection = connection.lock().expect("no panic under this lock");
                let _ = connection.send(&message.encode(), &[]);
            }
        }
    }
}

/// Sends a request and returns its answer, which has the request's operation or [`Op::Refused`].
fn request(connection: &Connection, message: Message) -> io::Result<(Message, Option<OwnedFd>)> {
    connection.send(&message.encode(), &[])?;
    let deadline = Instant::now() + ipc::TIMEOUT;
    while Instant::now() < deadline {
        let (answer, fd) = receive(connection)?;
        if answer.words == message.words && (answer.op == message.op || answer.op == Op::Refused) {
            return Ok((answer, fd));
        }
        // The answer to an earlier request that timed out.
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn receive(connection: &Connection) -> io::Result<(Message, Option<OwnedFd>)> {
    let mut buffer = [0; MESSAGE_LEN];
    let (n, fds) = connection.receive(&mut buffer)?;
    let message = Message::decode(&buffer[..n]).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((message, fds.into_iter().next()))
}

/// Maps a peer's file, provided that no access to it can fault.
fn map_whole(fd: OwnedFd) -> Option<Mapping> {
    let file = Memfd::from_peer(fd).ok()?;
    let mapping = file.map().or_else(|_| Mapping::new(file.as_fd(), 0, file.len(), false)).ok()?;
    if file.len() <= POPULATE && file.is_fully_allocated() {
        mapping.populate(file.len());
    }
    Some(mapping)
}
