//! Another process of this host, as an initiator sees it: its arena and the files that it exports.
//!
//! A stopped process must not stop this one. So nobody waits long for its answers, messages that it does not read wait here,
//! and no lock that another process's work needs is held meanwhile.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use millstream_lockfree::mr_entry::MrEntry;
use millstream_lockfree::process::{has_exited, is_thread_of, pidfd_has_exited, pidfd_open};
use millstream_lockfree::{CancelGuard, RobustLock, Shared};
use millstream_shm::socket::Connection;
use millstream_shm::{EventFd, MappedRef, Mapping, Memfd, poll_readable, thread};

use crate::caps::{MAX_MR, MAX_XRC_SRQ};
use crate::channel_table::ChannelTable;
use crate::exported_files::FileId;
use crate::ipc::{self, MESSAGE_LEN, Message, Op, VERSION, property};
use crate::layout::{
    ARENA_LEN, FILE_TABLE, FileEntry, Header, MAGIC, MR_TABLE, QP_TABLE, QpEntry, XRC_TABLE, XrcEntry,
};
use crate::mr_table::MrTable;
use crate::peer_channels::PeerChannels;
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
    /// Whether its queue pairs use packets only.
    pub(crate) wire: bool,
}

impl LocalId {
    /// The process's hello.
    pub(crate) fn hello(self) -> Message {
        let properties = [(self.asymmetric, property::ASYMMETRIC), (self.wire, property::WIRE)];
        let set = properties.into_iter().filter_map(|(has, bit)| has.then_some(bit)).sum();
        Message::new(Op::Hello, [VERSION, self.pid, set, 0, self.qpn_prefix])
    }
}

/// A process with queue pairs that ours are connected to; possibly this one.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Both sides registered for asymmetric fences.
    pub(crate) asymmetric: bool,
    /// Its queue pairs use packets only.
    pub(crate) wire: bool,
    arena: Arc<Mapping>,
    alive: AtomicBool,
    link: PeerLink,
    files: Mutex<HashMap<u32, MappedFile>>,
    channels: Mutex<PeerChannels>,
}

/// The path of messages to a peer.
#[derive(Debug)]
enum PeerLink {
    /// The peer is this process.
    Local { channels: &'static ChannelTable, tasks: &'static TaskQueue, mrs: &'static MrTable },
    /// The peer is another process.
    Remote {
        connection: Connection,
        /// Held from a request to its answer.
        request: Mutex<()>,
        /// Until when no answer is expected, because the last one did not come in time.
        silent_until: Mutex<Option<Instant>>,
        /// Messages that the process has not read yet, when its socket was full.
        unsent: Mutex<VecDeque<Message>>,
        tasks: &'static TaskQueue,
        /// Readable once the process has exited. Its sockets may outlive it in a forked child.
        pidfd: Option<OwnedFd>,
        /// A thread by which the kernel finds the memory of the process, also after the end of its main thread.
        memory_thread: u32,
    },
}

/// Longest wait for an answer. A thread of the peer answers at once, unless the process is stopped; whoever gets no answer
/// takes a slower way.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// Longest wait for the first answer of a process. There is no other way before.
const HELLO_TIME: Duration = Duration::from_millis(500);

/// The time after a missing answer in which no further one is waited for.
const SILENCE: Duration = Duration::from_secs(1);

/// Most messages that wait for a process that does not read.
const MAX_UNSENT: usize = 4096;

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
            asymmetric: id.asymmetric,
            wire: id.wire,
            arena,
            alive: AtomicBool::new(true),
            link: PeerLink::Local { channels, tasks, mrs },
            files: Mutex::default(),
            channels: Mutex::default(),
        }
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

    /// A thread of the process, by which the kernel finds its memory.
    pub(crate) fn memory_thread(&self) -> u32 {
        match self.link {
            PeerLink::Local { .. } => thread::id(),
            PeerLink::Remote { memory_thread, .. } => memory_thread,
        }
    }

    /// Notes that the process has exited.
    pub(crate) fn mark_lost(&self) {
        self.alive.store(false, Ordering::Release);
        // Transfers in flight hold their own reference to a mapping.
        self.files.lock().expect("no panic under this lock").clear();
    }

    /// The descriptors that report the exit of the process: the connection hangs up, the process descriptor becomes
    /// readable. Negative where there is none. The connection also reports room for the messages that wait.
    pub(crate) fn exit_events(&self) -> [libc::pollfd; 2] {
        let (connection, pidfd, unsent) = match &self.link {
            PeerLink::Local { .. } => (-1, -1, false),
            PeerLink::Remote { connection, pidfd, unsent, .. } => (
                connection.as_fd().as_raw_fd(),
                pidfd.as_ref().map_or(-1, AsRawFd::as_raw_fd),
                !unsent.lock().expect("no panic under this lock").is_empty(),
            ),
        };
        let events = libc::POLLRDHUP | if unsent { libc::POLLOUT } else { 0 };
        [(connection, events), (pidfd, libc::POLLIN)].map(|(fd, events)| libc::pollfd {
            fd,
            events,
            revents: 0,
        })
    }

    /// Sends the messages that waited for room.
    pub(crate) fn send_unsent(&self) {
        let PeerLink::Remote { connection, unsent, .. } = &self.link else { return };
        let mut unsent = unsent.lock().expect("no panic under this lock");
        while let Some(message) = unsent.front() {
            match connection.try_send(&message.encode()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // An error means that the peer is exiting.
                _ => unsent.pop_front(),
            };
        }
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
        let _uncancelled = CancelGuard::new();
        let mut files = self.files.lock().expect("no panic under this lock");
        if let Some((generation, mapping)) = files.get(&id.slot)
            && *generation == id.generation
        {
            return mapping.clone();
        }
        // Unmap the files that the peer has withdrawn.
        files.retain(|slot, (generation, _)| self.file_generation(*slot) == *generation);
        let mapping = match self.request(Message::new(Op::File, [id.slot, id.generation])) {
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
        if let PeerLink::Local { channels, .. } = &self.link {
            return channels.signal(channel);
        }
        let mut channels = self.channels.lock().expect("no panic under this lock");
        if let Some(event) = channels.get(channel) {
            return event.signal();
        }
        let _uncancelled = CancelGuard::new();
        match self.request(Message::new(Op::Channel, [channel])) {
            Ok((answer, Some(fd))) if answer.op == Op::Channel => {
                if let Ok(event) = EventFd::from_peer(fd) {
                    event.signal();
                    channels.insert(channel, event);
                }
            }
            // The channel is closed.
            Ok(_) => {}
            // The process is stopped. Its own server signals the channel when it continues.
            Err(_) => self.send(Message::new(Op::Signal, [channel])),
        }
    }

    /// Tells the peers that the process with this prefix has queue pairs in multicast groups, and waits for their answers, all
    /// of them together no longer than `wait`. A stopped process reads the message when it continues.
    pub(crate) fn announce_multicast(peers: &[Arc<Self>], qpn_prefix: u32, wait: Duration) {
        let message = Message::new(Op::MulticastMember, [qpn_prefix]);
        let deadline = Instant::now() + wait;
        peers.iter().for_each(|peer| peer.send(message));
        for peer in peers {
            let left = deadline.saturating_duration_since(Instant::now());
            // A process is silent only if it had the time to answer.
            if left >= wait / 4 {
                let _ = peer.request_within(message, left);
            }
        }
    }

    /// Sends a request and returns its answer, which has the request's operation or [`Op::Refused`].
    ///
    /// # Errors
    /// TimedOut without an answer in [`ANSWER_TIME`], and at once for a while afterwards.
    fn request(&self, message: Message) -> io::Result<(Message, Option<OwnedFd>)> {
        self.request_within(message, ANSWER_TIME)
    }

    /// As [`request`](Self::request), for an answer within `time`.
    fn request_within(&self, message: Message, time: Duration) -> io::Result<(Message, Option<OwnedFd>)> {
        let PeerLink::Remote { connection, request, silent_until, .. } = &self.link else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let _one_at_a_time = request.lock().expect("no panic under this lock");
        if self.is_silent() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let result = exchange(connection, message, Instant::now() + time);
        let until = result.is_err().then(|| Instant::now() + SILENCE);
        *silent_until.lock().expect("no panic under this lock") = until;
        result
    }

    /// Whether the process did not answer recently, so that it is not asked.
    pub(crate) fn is_silent(&self) -> bool {
        let PeerLink::Remote { silent_until, .. } = &self.link else { return false };
        let until = *silent_until.lock().expect("no panic under this lock");
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Sends a message that has no answer. An error means that the peer is exiting.
    pub(crate) fn send(&self, message: Message) {
        match &self.link {
            PeerLink::Local { tasks, .. } => {
                if let Some(task) = Task::of(&message) {
                    tasks.add(task);
                }
            }
            PeerLink::Remote { connection, unsent, tasks, .. } => {
                let mut unsent = unsent.lock().expect("no panic under this lock");
                let is_full = || {
                    let sent = connection.try_send(&message.encode());
                    sent.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
                };
                if unsent.is_empty() && !is_full() {
                    return;
                }
                // A repeated report is one report for its receiver, too.
                if unsent.len() < MAX_UNSENT && !unsent.contains(&message) {
                    unsent.push_back(message);
                }
                drop(unsent);
                tasks.wake();
            }
        }
    }
}

/// A connection to a process that has not answered the hello yet.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    me: LocalId,
    pid: u32,
    connection: Connection,
    pidfd: Option<OwnedFd>,
    /// The next wait for the answer.
    wait: Duration,
}

impl HalfOpen {
    /// Connects to the process that owns the queue pair numbers with this prefix, and says hello.
    ///
    /// # Errors
    /// What the socket reports; ConnectionRefused if the process has exited; Unsupported for a process in another PID
    /// namespace.
    pub(crate) fn open(me: LocalId, qpn_prefix: u32) -> io::Result<Self> {
        Self::over(me, Connection::open(&ipc::socket_name(qpn_prefix), ipc::TIMEOUT)?)
    }

    /// As [`open`](Self::open), without a wait for a full queue.
    ///
    /// # Errors
    /// As [`open`](Self::open); WouldBlock if the queue is full.
    pub(crate) fn open_at_once(me: LocalId, qpn_prefix: u32) -> io::Result<Self> {
        Self::over(me, Connection::open_at_once(&ipc::socket_name(qpn_prefix), ipc::TIMEOUT)?)
    }

    fn over(me: LocalId, connection: Connection) -> io::Result<Self> {
        let pid = connection.peer().pid;
        if pid == 0 {
            return Err(other_pid_namespace());
        }
        if has_exited(pid) {
            // A child of the process holds the socket name.
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let pidfd = pidfd_open(pid).ok();
        connection.try_send(&me.hello().encode())?;
        Ok(Self { me, pid, connection, pidfd, wait: HELLO_TIME })
    }

    /// Waits for the answer, for [`HELLO_TIME`] at first and no longer than a moment later.
    ///
    /// # Errors
    /// TimedOut without an answer: the connection stays open, for another attempt.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        let wait = std::mem::replace(&mut self.wait, Duration::from_millis(1));
        self.wait_for(wait)
    }

    /// Waits for the answer for the time `wait`.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub(crate) fn wait_for(&self, wait: Duration) -> io::Result<()> {
        wait_readable(&self.connection, Instant::now() + wait)
    }

    /// The process, from its answer, which has arrived.
    ///
    /// # Errors
    /// What the socket reports; InvalidData for another version; Unsupported for a process in another PID namespace.
    pub(crate) fn finish(self, tasks: &'static TaskQueue) -> io::Result<Peer> {
        let (answer, fd) = receive(&self.connection)?;
        let [version, own_pid, properties, server_thread, ..] = answer.words;
        let invalid = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
        let fd = fd.ok_or_else(|| invalid("the peer sent no arena"))?;
        if answer.op != Op::Hello || version != VERSION {
            return Err(invalid("the peer runs another version of the device"));
        }
        if own_pid != self.pid {
            return Err(other_pid_namespace());
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
        let Self { me, pid, connection, pidfd, .. } = self;
        let memory_thread = if is_thread_of(pid, server_thread) { server_thread } else { pid };
        let (request, silent_until, unsent) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Peer {
            asymmetric: me.asymmetric && properties & property::ASYMMETRIC != 0,
            wire: properties & property::WIRE != 0,
            arena,
            alive: AtomicBool::new(true),
            link: PeerLink::Remote { connection, request, silent_until, unsent, tasks, pidfd, memory_thread },
            files: Mutex::default(),
            channels: Mutex::default(),
        })
    }
}

/// Locks in shared memory record process ids, and the kernel copies between processes by their ids.
fn other_pid_namespace() -> io::Error {
    let cause = "the peer runs in another PID namespace, so shared memory cannot be used";
    io::Error::new(io::ErrorKind::Unsupported, cause)
}

/// Sends a request and waits for its answer.
fn exchange(
    connection: &Connection,
    message: Message,
    deadline: Instant,
) -> io::Result<(Message, Option<OwnedFd>)> {
    connection.try_send(&message.encode())?;
    loop {
        wait_readable(connection, deadline)?;
        let (answer, fd) = receive(connection)?;
        if answer.words == message.words && (answer.op == message.op || answer.op == Op::Refused) {
            return Ok((answer, fd));
        }
        // The answer to an earlier request that timed out.
    }
}

/// Waits for a message, or for the end of the connection.
fn wait_readable(connection: &Connection, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if poll_readable(&[connection.as_fd()], Some(left))? == [true] {
            return Ok(());
        }
        // A signal ends the wait early.
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
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
