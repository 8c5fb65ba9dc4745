//! The processes of one user on one host that share the port, without a daemon.
//!
//! Each process has a socket on the port (`SO_REUSEPORT`). A BPF program on the group of sockets selects the
//! process by destination queue pair number ([`filter`]). It returns a socket index, and when a socket
//! closes, the kernel moves the last one to its index. So no socket may close before the last process exits.
//! Every process holds every socket, and the next process that joins takes over the socket of an exited one.
//! All processes read the socket of index zero, which receives queue pair 1 (connection management) and
//! unknown prefixes. docs/wire-link.md describes the protocol and its failure cases.

mod filter;
mod peer_sockets;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use millstream_lockfree::process::has_exited;
use millstream_shm::socket::{BoundSocket, Connection, Listener, listening_names, own_uid};
use millstream_shm::thread::spawn;
use millstream_shm::{EventFd, poll_readable};
use rustix::net::RecvFlags;

use crate::datagram::RxBuffers;
use crate::fork::CloseOnForkFd;
use crate::udp::{Shared, bind_shared, port_owners, receive};
pub(crate) use peer_sockets::PeerSockets;

/// Version of the messages.
const VERSION: u32 = 1;
/// Timeout for another process's answer. Its thread does nothing else, so only a stopped process takes
/// longer. The other members hold the same sockets.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);
/// Timeout for processes that are joining or ending.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
const END_TIMEOUT: Duration = Duration::from_secs(3);

/// The error of a process that cannot receive on the port.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Another user or program has the port.
    #[error(
        "UDP port {port} belongs to user {owner}, but this process runs as user {me}; only one user per network \
         namespace can receive RoCEv2 (the kernel's rxe is user 0)"
    )]
    PortInUse {
        /// The port.
        port: u16,
        /// User ID of the owner.
        owner: u32,
        /// User ID of this process.
        me: u32,
    },
    /// Sockets of this user on the port that are no members.
    #[error(
        "UDP port {port} has {found} sockets, but only {known} of Millstream: end the other program, or the forked \
         child of an ended one (`ss -lunp sport = {port}` shows it)"
    )]
    ForeignSockets {
        /// The port.
        port: u16,
        /// Sockets in the kernel's table.
        found: usize,
        /// Sockets in the group.
        known: usize,
    },
    /// Another process takes too long to join.
    #[error("another process has been joining the port for {} s; end it or let it continue (abstract socket @{name})", JOIN_TIMEOUT.as_secs())]
    Busy {
        /// The lock name that it holds.
        name: String,
    },
    /// A process of another version.
    #[error(
        "process {pid} runs an incompatible version of Millstream on the port; end it or run the same version"
    )]
    Version {
        /// Process ID.
        pid: u32,
    },
    /// The QPN prefix is in use.
    #[error("queue pair number prefix {qpn_prefix:#05x} is in use by another process")]
    PrefixInUse {
        /// The QPN prefix.
        qpn_prefix: u16,
    },
    /// An invalid setting.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Prefix of the names of all members on a port.
fn prefix(port: u16) -> String {
    format!("millstream-link/{}/{port}/", own_uid())
}

fn name(port: u16, qpn_prefix: u16) -> String {
    format!("{}{qpn_prefix:03x}", prefix(port))
}

/// One socket of the group.
#[derive(Debug)]
struct SocketSlot {
    socket: Arc<CloseOnForkFd>,
    /// QPN prefix of its process; zero for the shared socket.
    qpn_prefix: u16,
    /// Incremented each time the socket changes its owner.
    generation: u32,
}

/// The sockets of the group by index.
type SocketSlots = BTreeMap<u16, SocketSlot>;

/// Messages of 16 bytes: type, socket index, QPN prefix, generation, four bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// Asks for all sockets.
    Hello { version: u32 },
    /// Describes the socket that is attached.
    Slot { index: u16, qpn_prefix: u16, generation: u32 },
    /// End of the list.
    End,
}

impl Message {
    const LEN: usize = 16;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let words = match self {
            Self::Hello { version } => [1, version, 0, 0],
            Self::Slot { index, qpn_prefix, generation } => [2, index.into(), qpn_prefix.into(), generation],
            Self::End => [3, 0, 0, 0],
        };
        let mut bytes = [0; Self::LEN];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let word = |i: usize| u32::from_ne_bytes(bytes[4 * i..4 * i + 4].try_into().expect("four bytes"));
        match word(0) {
            1 => Some(Self::Hello { version: word(1) }),
            2 => Some(Self::Slot {
                index: word(1).try_into().ok()?,
                qpn_prefix: word(2).try_into().ok()?,
                generation: word(3),
            }),
            3 => Some(Self::End),
            _ => None,
        }
    }
}

/// Adds a socket if it is newer than the known one.
fn update(slots: &mut SocketSlots, index: u16, qpn_prefix: u16, generation: u32, socket: OwnedFd) {
    match slots.get_mut(&index) {
        Some(slot) if slot.generation >= generation => {}
        Some(slot) => (slot.qpn_prefix, slot.generation) = (qpn_prefix, generation),
        None => {
            slots.insert(index, SocketSlot { socket: Arc::new(socket.into()), qpn_prefix, generation });
        }
    }
}

/// Membership in the group, which ends on drop.
#[derive(Debug)]
pub(crate) struct Member {
    stop: Arc<EventFd>,
    ended: Mutex<Receiver<()>>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.stop.signal();
        // The thread ends at once, or after the timeout of a stopped newcomer. An error means that it has
        // ended.
        let _ = self.ended.get_mut().expect("no panic under this lock").recv();
    }
}

/// Joins the group; returns the membership and the socket to receive from.
pub(crate) fn join(
    port: u16,
    shared: Arc<Shared>,
    peer_sockets: PeerSockets,
) -> Result<(Member, Arc<CloseOnForkFd>), JoinError> {
    let qpn_prefix = shared.qpn_prefix;
    assert!(qpn_prefix != 0 && qpn_prefix < 0xfff, "qpn_prefix {qpn_prefix:#x} belongs to nobody");
    // No other process joins from here on. The name is released if this process ends.
    let lock = lock(port)?;
    let taken = |error: io::Error| match error.raw_os_error() {
        Some(libc::EADDRINUSE) => JoinError::PrefixInUse { qpn_prefix },
        _ => error.into(),
    };
    let own_name = BoundSocket::bind(&name(port, qpn_prefix)).map_err(taken)?;
    peer_sockets.listen(qpn_prefix).map_err(taken)?;

    let (mut slots, others) = discover(port, qpn_prefix)?;
    let index =
        match slots.iter().find(|(index, slot)| **index != 0 && !others.contains_key(&slot.qpn_prefix)) {
            Some((&index, _)) => {
                let slot = slots.get_mut(&index).expect("just found");
                (slot.qpn_prefix, slot.generation) = (qpn_prefix, slot.generation.wrapping_add(1));
                drain(slot.socket.as_fd());
                index
            }
            None => bind_sockets(port, &mut slots, qpn_prefix)?,
        };
    let mine = &slots[&index];
    // First every process gets the socket, then datagrams are steered to it.
    let message = Message::Slot { index, qpn_prefix, generation: mine.generation };
    for other in others.keys() {
        // A process that cannot take it now is stopped with a long queue, or has just ended.
        if let Ok(connection) = Connection::open(&name(port, *other), ANSWER_TIMEOUT) {
            let _ = connection.send(&message.to_bytes(), &[mine.socket.as_fd()]);
        }
    }
    let mut indices: Vec<(u16, u16)> = slots
        .iter()
        .filter(|(_, slot)| slot.qpn_prefix == qpn_prefix || others.contains_key(&slot.qpn_prefix))
        .map(|(index, slot)| (slot.qpn_prefix, *index))
        .collect();
    filter::attach(mine.socket.as_fd(), &mut indices)?;
    let socket = mine.socket.clone();
    let listener = own_name.listen()?;
    drop(lock);

    let stop = Arc::new(EventFd::latch()?);
    let (end, ended) = channel();
    let thread = MemberThread { listener, slots, shared, peer_sockets, stop: stop.clone(), _end: end };
    spawn("mill-link", move || thread.run())?;
    Ok((Member { stop, ended: Mutex::new(ended) }, socket))
}

fn lock(port: u16) -> Result<BoundSocket, JoinError> {
    let name = format!("{}join", prefix(port));
    let deadline = Instant::now() + JOIN_TIMEOUT;
    loop {
        match BoundSocket::bind(&name) {
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) => {}
            done => return Ok(done?),
        }
        if Instant::now() > deadline {
            return Err(JoinError::Busy { name });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The sockets of the live members, and the members with their process IDs.
fn discover(port: u16, own: u16) -> Result<(SocketSlots, BTreeMap<u16, u32>), JoinError> {
    let prefix = prefix(port);
    let (mut slots, mut others) = (SocketSlots::new(), BTreeMap::new());
    for name in listening_names(&prefix) {
        let Some(qpn_prefix) =
            name.strip_prefix(&prefix).and_then(|qpn_prefix| u16::from_str_radix(qpn_prefix, 16).ok())
        else {
            continue;
        };
        if qpn_prefix == own {
            continue;
        }
        // No listener: the member has just ended.
        let Ok(connection) = Connection::open(&name, ANSWER_TIMEOUT) else { continue };
        let pid = connection.peer().pid;
        // A forked child may still hold the name of its dead parent.
        if pid != 0 && has_exited(pid) {
            continue;
        }
        others.insert(qpn_prefix, pid);
        // Stopped members do not answer; the other members hold the same sockets.
        request_sockets(&connection, &mut slots)?;
    }
    Ok((slots, others))
}

fn request_sockets(connection: &Connection, slots: &mut SocketSlots) -> Result<(), JoinError> {
    let mut buffer = [0; Message::LEN];
    if connection.send(&Message::Hello { version: VERSION }.to_bytes(), &[]).is_err() {
        return Ok(());
    }
    while let Ok((len, fds)) = connection.receive(&mut buffer) {
        match (Message::parse(&buffer[..len]), fds.into_iter().next()) {
            (Some(Message::Slot { index, qpn_prefix, generation }), Some(socket)) => {
                update(slots, index, qpn_prefix, generation, socket);
            }
            (Some(Message::Hello { version }), _) if version == VERSION => {}
            (Some(Message::Hello { .. }), _) => {
                return Err(JoinError::Version { pid: connection.peer().pid });
            }
            _ => break,
        }
    }
    Ok(())
}

/// Binds another socket, and the shared one before it if there is none. The new one gets the last index.
fn bind_sockets(port: u16, slots: &mut SocketSlots, qpn_prefix: u16) -> Result<u16, JoinError> {
    let deadline = Instant::now() + END_TIMEOUT;
    // Exiting processes close their sockets one after the other.
    loop {
        let users = port_owners(port);
        if users.len() == slots.len() {
            break;
        }
        let me = own_uid();
        if let Some(&owner) = users.iter().find(|user| **user != me) {
            return Err(JoinError::PortInUse { port, owner, me });
        }
        if Instant::now() > deadline {
            return Err(JoinError::ForeignSockets { port, found: users.len(), known: slots.len() });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    if slots.keys().copied().ne(0..slots.len() as u16) {
        return Err(JoinError::ForeignSockets { port, found: slots.len(), known: slots.len() - 1 });
    }
    let bind = || {
        bind_shared(port).map_err(|error| match error.raw_os_error() {
            // A socket that the table does not show, such as the kernel's own.
            Some(libc::EADDRINUSE) => JoinError::PortInUse { port, owner: 0, me: own_uid() },
            _ => error.into(),
        })
    };
    for qpn_prefix in [0, qpn_prefix].into_iter().skip(usize::from(!slots.is_empty())) {
        let index = slots.len() as u16;
        let socket: Arc<CloseOnForkFd> = Arc::new(bind()?.into());
        if index == 0 {
            filter::attach(socket.as_fd(), &mut [])?;
        }
        slots.insert(index, SocketSlot { socket, qpn_prefix, generation: 0 });
    }
    Ok(slots.len() as u16 - 1)
}

/// Drops datagrams for the former owner.
fn drain(socket: BorrowedFd<'_>) {
    // The rest of each datagram is dropped with its first byte.
    while rustix::net::recv(socket, &mut [0u8; 1], RecvFlags::DONTWAIT).is_ok() {}
}

/// The thread of a member: answers processes that join, and receives forwarded packets.
struct MemberThread {
    listener: Listener,
    slots: SocketSlots,
    shared: Arc<Shared>,
    peer_sockets: PeerSockets,
    stop: Arc<EventFd>,
    /// Dropped last: signals that everything is closed.
    _end: Sender<()>,
}

impl MemberThread {
    fn run(mut self) {
        let mut inbox = RxBuffers::new(1);
        let mut buffer = vec![0; peer_sockets::MAX_MESSAGE];
        loop {
            let common = self.slots.get(&0).map(|slot| slot.socket.clone());
            let mut fds = vec![self.stop.as_fd(), self.listener.as_fd(), self.peer_sockets.as_fd()];
            fds.extend(common.as_ref().map(|socket| socket.as_fd()));
            let Ok(ready) = poll_readable(&fds, None) else { return };
            if ready[0] {
                return;
            }
            if ready[1]
                && let Ok(connection) = self.listener.accept()
            {
                self.answer(&connection);
            }
            if ready[2] {
                while let Some((info, packet)) = self.peer_sockets.receive(&mut buffer) {
                    self.shared.enqueue(info, packet);
                }
            }
            if ready.get(3) == Some(&true)
                && let Some(socket) = common
            {
                inbox.filled.clear();
                // Another process may have been faster.
                if receive(socket.as_fd(), &mut inbox).is_ok() {
                    self.receive_shared(&inbox);
                }
            }
        }
    }

    /// Handles packets from the shared socket.
    fn receive_shared(&self, inbox: &RxBuffers) {
        for received in inbox.received() {
            for (_, packet) in received.packets() {
                self.shared.counters.received.add(1);
                self.shared.counters.received_bytes.add(packet.len() as u64);
                if self.shared.deliver_or_forward(&self.peer_sockets, &received.info, packet) {
                    self.shared.enqueue_own(received.info, packet);
                }
            }
        }
    }

    /// Sends all sockets to a process that joins, or adds its socket.
    fn answer(&mut self, connection: &Connection) {
        let mut buffer = [0; Message::LEN];
        if connection.set_timeout(ANSWER_TIMEOUT).is_err() {
            return;
        }
        let Ok((len, fds)) = connection.receive(&mut buffer) else { return };
        match (Message::parse(&buffer[..len]), fds.into_iter().next()) {
            (Some(Message::Hello { .. }), _) => {
                let hello = Message::Hello { version: VERSION };
                let mut sent = connection.send(&hello.to_bytes(), &[]);
                for (&index, slot) in &self.slots {
                    let message =
                        Message::Slot { index, qpn_prefix: slot.qpn_prefix, generation: slot.generation };
                    sent = sent.and_then(|()| connection.send(&message.to_bytes(), &[slot.socket.as_fd()]));
                }
                let _ = sent.and_then(|()| connection.send(&Message::End.to_bytes(), &[]));
            }
            (Some(Message::Slot { index, qpn_prefix, generation }), Some(socket)) => {
                update(&mut self.slots, index, qpn_prefix, generation, socket);
            }
            _ => {}
        }
    }
}
