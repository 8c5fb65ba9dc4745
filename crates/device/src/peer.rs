//! Another process of this host, as an initiator sees it: its arena and what of its memory is mapped.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use millstream_lockfree::mr_entry::MrEntry;
use millstream_lockfree::process::{has_exited, pidfd_has_exited, pidfd_open};
use millstream_shm::socket::Connection;
use millstream_shm::{EventFd, Mapping, Memfd};

use crate::caps::{MAX_MR, MAX_XRC_SRQ};
use crate::files::FileId;
use crate::greeting::{self, LEN, Message, Op, VERSION};
use crate::host::Host;
use crate::layout::{
    ARENA_LEN, FILES, FileEntry, Header, MAGIC, MR_TABLE, QP_TABLE, QpEntry, XRC_TABLE, XrcEntry,
};
use crate::progress::Work;

/// A process with queue pairs that ours are connected to; possibly this one.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) pid: u32,
    /// Both sides can leave the expensive fence to the rare side.
    pub(crate) asymmetric: bool,
    arena: ArenaView,
    alive: AtomicBool,
    /// Readable once the process has ended. Its sockets may outlive it in a forked child.
    process: Option<OwnedFd>,
    /// None for this process itself.
    connection: Option<Mutex<Connection>>,
    files: Mutex<HashMap<u32, MappedFile>>,
    channels: Mutex<HashMap<u32, Arc<EventFd>>>,
}

/// A file's generation, and its mapping if it can be mapped.
type MappedFile = (u32, Option<Arc<Mapping>>);

#[derive(Debug)]
enum ArenaView {
    Own(&'static Host),
    Mapped(Mapping),
}

/// Mappings up to this size are filled at once: the memory exists already, and the first transfer
/// should not pay for page faults.
const POPULATE: usize = 256 << 20;

impl Peer {
    pub(crate) fn myself(host: &'static Host) -> Self {
        Self {
            pid: host.pid,
            asymmetric: host.asymmetric,
            arena: ArenaView::Own(host),
            alive: AtomicBool::new(true),
            process: None,
            connection: None,
            files: Mutex::default(),
            channels: Mutex::default(),
        }
    }

    pub(crate) fn connect(host: &'static Host, block: u32) -> io::Result<Self> {
        let connection = Connection::open(&greeting::name(block), greeting::PATIENCE)?;
        let pid = connection.peer().pid;
        if has_exited(pid) {
            // The name is held by a child of the process that took it.
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let process = pidfd_open(pid).ok();
        let hello = Message::new(Op::Hello, [VERSION, host.pid, u32::from(host.asymmetric)]);
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
        let mapping = memory.map()?;
        // SAFETY: the mapping is ARENA_LEN bytes and starts with a header of atomics.
        let header = unsafe { &*mapping.base().cast::<Header>() };
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(invalid("the peer's arena has another layout"));
        }
        Ok(Self {
            pid,
            asymmetric: host.asymmetric && asymmetric == 1,
            arena: ArenaView::Mapped(mapping),
            alive: AtomicBool::new(true),
            process,
            connection: Some(Mutex::new(connection)),
            files: Mutex::default(),
            channels: Mutex::default(),
        })
    }

    #[inline]
    pub(crate) fn alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    /// Whether the process has ended, noticed or not.
    pub(crate) fn has_ended(&self) -> bool {
        !self.alive() || self.process.as_ref().is_some_and(|process| pidfd_has_exited(process.as_fd()))
    }

    pub(crate) fn mark_dead(&self) {
        self.alive.store(false, Ordering::Release);
        // Nothing of a dead process is worth keeping; transfers under way hold their own reference.
        self.files.lock().expect("no panic under this lock").clear();
    }

    /// This process, if it is its own peer.
    pub(crate) fn own_host(&self) -> Option<&'static Host> {
        match &self.arena {
            ArenaView::Own(host) => Some(host),
            ArenaView::Mapped(_) => None,
        }
    }

    /// The descriptors that have an event when the process ends: of its connection a hang-up, of the
    /// process itself that it is readable. Negative where there is none.
    pub(crate) fn liveness(&self) -> [libc::pollfd; 2] {
        let connection = self.connection.as_ref().map_or(-1, |connection| {
            connection.lock().expect("no panic under this lock").as_fd().as_raw_fd()
        });
        let process = self.process.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        [(connection, libc::POLLRDHUP), (process, libc::POLLIN)].map(|(fd, events)| libc::pollfd {
            fd,
            events,
            revents: 0,
        })
    }

    /// Address of the byte at `offset` of the arena, if `len` bytes from there are inside.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        if offset > ARENA_LEN || ARENA_LEN - offset < len {
            return None;
        }
        match &self.arena {
            ArenaView::Own(host) => Some(host.arena.at(offset).as_ptr()),
            // SAFETY: inside the mapping, which is ARENA_LEN bytes.
            ArenaView::Mapped(mapping) => Some(unsafe { mapping.base().add(offset) }),
        }
    }

    /// Held while memory that not everybody can map is changed by an atomic operation.
    pub(crate) fn atomics(&self) -> Option<&millstream_lockfree::RobustLock> {
        let at = self.at(0, size_of::<Header>())?;
        // SAFETY: the arena starts with its header, which is made of atomics.
        Some(unsafe { &(*at.cast::<Header>()).atomics })
    }

    pub(crate) fn qp_entry(&self, index: usize) -> Option<&QpEntry> {
        let at = self.at(QP_TABLE + index * size_of::<QpEntry>(), size_of::<QpEntry>())?;
        // SAFETY: in the arena, aligned, and made of atomics.
        Some(unsafe { &*at.cast::<QpEntry>() })
    }

    pub(crate) fn xrc_entry(&self, number: u32) -> Option<&XrcEntry> {
        let index = number as usize % MAX_XRC_SRQ;
        let at = self.at(XRC_TABLE + index * size_of::<XrcEntry>(), size_of::<XrcEntry>())?;
        // SAFETY: as above.
        Some(unsafe { &*at.cast::<XrcEntry>() })
    }

    #[inline]
    pub(crate) fn mr_entry(&self, key: u32) -> Option<&MrEntry> {
        let at = self.at(MR_TABLE + (key >> 16) as usize * size_of::<MrEntry>(), size_of::<MrEntry>())?;
        // SAFETY: as above.
        Some(unsafe { &*at.cast::<MrEntry>() })
    }

    fn file_generation(&self, slot: u32) -> u32 {
        let offset = FILES + slot as usize * size_of::<FileEntry>();
        let Some(at) = self.at(offset, size_of::<FileEntry>()) else { return 0 };
        // SAFETY: as above.
        unsafe { &*at.cast::<FileEntry>() }.generation.load(Ordering::Acquire)
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
        // A new file is the moment to let go of those that the peer has withdrawn.
        files.retain(|slot, (generation, _)| self.file_generation(*slot) == *generation);
        let connection = self.connection.as_ref()?.lock().expect("no panic under this lock");
        let mapping = match ask(&connection, Message::new(Op::File, [id.slot, id.generation])) {
            Ok((answer, fd)) if answer.op == Op::File => fd.and_then(map_whole).map(Arc::new),
            // Withdrawn in this moment: the key is no longer valid either.
            Ok(_) => return None,
            Err(_) => return None,
        };
        files.insert(id.slot, (id.generation, mapping.clone()));
        mapping
    }

    /// Signals one of the peer's completion channels.
    pub(crate) fn signal(&self, channel: u32) {
        if let ArenaView::Own(host) = &self.arena {
            if let Some(event) = host.channel(channel) {
                event.signal();
            }
            return;
        }
        let mut channels = self.channels.lock().expect("no panic under this lock");
        if let Some(event) = channels.get(&channel) {
            return event.signal();
        }
        let Some(connection) = &self.connection else { return };
        let connection = connection.lock().expect("no panic under this lock");
        match ask(&connection, Message::new(Op::Channel, [channel])) {
            Ok((answer, Some(fd))) if answer.op == Op::Channel => {
                if let Ok(event) = EventFd::from_peer(fd) {
                    event.signal();
                    channels.insert(channel, Arc::new(event));
                }
            }
            // The channel is gone.
            Ok(_) => {}
            // A stopped process. It sleeps twice, and somebody must wake it when it is continued.
            Err(_) => {
                let _ = connection.send(&Message::new(Op::Signal, [channel]).encode(), &[]);
            }
        }
    }

    /// Says that the process `block` has queue pairs in multicast groups, and waits until that is known.
    pub(crate) fn introduce(&self, block: u32) {
        if let Some(connection) = &self.connection {
            let connection = connection.lock().expect("no panic under this lock");
            // A stopped process will look for us, or has lost nothing that it waits for.
            let _ = ask(&connection, Message::new(Op::Member, [block]));
        }
    }

    pub(crate) fn header(&self) -> Option<&Header> {
        let at = self.at(0, size_of::<Header>())?;
        // SAFETY: the arena starts with its header, which is made of atomics.
        Some(unsafe { &*at.cast::<Header>() })
    }

    /// Tells the peer something that needs no answer. A peer that cannot be told is dying.
    pub(crate) fn tell(&self, host: &Host, message: Message) {
        if let Some(connection) = &self.connection {
            let connection = connection.lock().expect("no panic under this lock");
            let _ = connection.send(&message.encode(), &[]);
        } else if let Some(work) = Work::of(&message) {
            host.progress.add(work);
        }
    }
}

/// Asks for something, and returns the answer: what was asked for, or [`Op::Refused`].
fn ask(connection: &Connection, message: Message) -> io::Result<(Message, Option<OwnedFd>)> {
    connection.send(&message.encode(), &[])?;
    let deadline = Instant::now() + greeting::PATIENCE;
    while Instant::now() < deadline {
        let (answer, fd) = receive(connection)?;
        if answer.words == message.words && (answer.op == message.op || answer.op == Op::Refused) {
            return Ok((answer, fd));
        }
        // The answer to an earlier request that was not waited for.
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn receive(connection: &Connection) -> io::Result<(Message, Option<OwnedFd>)> {
    let mut buffer = [0; LEN];
    let (n, fds) = connection.receive(&mut buffer)?;
    let message = Message::decode(&buffer[..n]).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((message, fds.into_iter().next()))
}

/// Maps a peer's file, provided that touching it can never fault.
fn map_whole(fd: OwnedFd) -> Option<Mapping> {
    let file = Memfd::from_peer(fd).ok()?;
    let mapping = file.map().or_else(|_| Mapping::new(file.as_fd(), 0, file.len(), false)).ok()?;
    if file.len() <= POPULATE && file.is_fully_allocated() {
        mapping.populate(file.len());
    }
    Some(mapping)
}
