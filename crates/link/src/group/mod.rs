//! The processes of one user on one host that share the port, without a daemon.
//!
//! Each process has a socket on the port (`SO_REUSEPORT`). A BPF program on the group of sockets selects the
//! process by destination queue pair number ([`filter`]). It returns a socket index, and when a socket
//! closes, the kernel moves the last one to its index. So no socket may close before the last process exits.
//! Every process holds every socket, and the next process that joins takes over the socket of an exited one.
//! All processes read the socket of index zero, which receives queue pair 1 (connection management) and
//! unknown prefixes. docs/wire-link.md describes the protocol and its failure cases.

mod directory;
mod filter;
mod inbox;
mod lock;
mod member;
mod message;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use millstream_lockfree::process::has_exited;
use millstream_shm::fork::CloseOnForkFd;
use millstream_shm::socket::{Connection, Listener, listening_names, own_uid};
use millstream_shm::thread::spawn;
use millstream_shm::{EventFd, poll_readable, random_u64};
use rustix::net::RecvFlags;

use crate::udp::{Shared, bind_shared, leave_all_groups, port_owners};
pub use directory::{COMMUNICATION_ID_INDEX_BITS, Service};
pub(crate) use directory::{Directory, ManagementRoute, is_management};
use inbox::{Inbox, Received};
use lock::lock;
pub(crate) use member::Member;
use member::MemberThread;
use message::{Message, VERSION};

/// Timeout for another process's answer. Its thread does nothing else, so only a process that is stopped, or waits for a
/// processor, takes longer. The other members hold the same sockets.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);
/// Timeout for processes of this user that are joining or ending, or of which none answers.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
const END_TIMEOUT: Duration = Duration::from_secs(3);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3);

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
    /// Processes of this user have the port, and none of them answers.
    #[error(
        "the processes of Millstream on UDP port {port} do not answer, so their sockets are out of reach; end them or let \
         them continue if they are stopped: {}",
        pids.iter().map(|pid| format!("process {pid}")).collect::<Vec<_>>().join(", ")
    )]
    Silent {
        /// The port.
        port: u16,
        /// Their process IDs.
        pids: Vec<u32>,
    },
    /// Another process takes too long to join.
    #[error("another process has been joining the port for {} s; end it or let it continue (abstract socket @{name})", JOIN_TIMEOUT.as_secs())]
    Busy {
        /// The lock name that it holds.
        name: String,
    },
    /// Another user holds the names of the mutex.
    #[error(
        "another user's processes hold all {count} socket names of processes that join the port (from @{name} on); end \
         them"
    )]
    NamesTaken {
        /// The first name.
        name: String,
        /// Number of names.
        count: u32,
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

/// Common start of the names of the group.
fn name_prefix(port: u16) -> String {
    format!("millstream-link/{}/{port}/", own_uid())
}

/// The name of a member. The random part keeps other users from taking it before.
fn new_name(port: u16, qpn_prefix: u16) -> String {
    format!("{}{qpn_prefix:03x}.{:016x}", name_prefix(port), random_u64())
}

/// The QPN prefix in the name of a member.
fn prefix_in(name: &str, name_prefix: &str) -> Option<u16> {
    let name = name.strip_prefix(name_prefix)?;
    // Members of older versions have no random part. They answer with their version.
    let (qpn_prefix, _) = name.split_once('.').unwrap_or((name, ""));
    u16::from_str_radix(qpn_prefix, 16).ok()
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

/// Adds a socket if it is newer than the known one.
fn update(slots: &mut SocketSlots, index: u16, qpn_prefix: u16, generation: u32, socket: CloseOnForkFd) {
    match slots.get_mut(&index) {
        Some(slot) if slot.generation >= generation => {}
        Some(slot) => (slot.qpn_prefix, slot.generation) = (qpn_prefix, generation),
        None => {
            slots.insert(index, SocketSlot { socket: Arc::new(socket), qpn_prefix, generation });
        }
    }
}

/// A process's share of the group.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) member: Member,
    /// The socket to receive from.
    pub(crate) socket: Arc<CloseOnForkFd>,
    pub(crate) shared: Arc<Shared>,
}

/// Joins the group. `shared` makes the state of the member's thread.
pub(crate) fn join(
    port: u16,
    qpn_prefix: u16,
    shared: impl FnOnce(Arc<Directory>) -> Arc<Shared>,
) -> Result<Joined, JoinError> {
    assert!(qpn_prefix != 0 && qpn_prefix < 0xfff, "qpn_prefix {qpn_prefix:#x} belongs to nobody");
    // No other process joins from here on. The name is released if this process ends.
    let lock = lock(port)?;
    let Members { mut slots, others, unreachable } = discover_sockets(port, qpn_prefix)?;
    let (inbox, sender) = inbox::inbox()?;
    let directory = Arc::new(Directory::new(qpn_prefix, sender));
    directory.expect(others.keys().copied().collect());
    let is_other = |prefix: u16| others.contains_key(&prefix) || unreachable.contains(&prefix);
    let index = match free_socket(&slots, qpn_prefix, is_other) {
        Some(index) => {
            let slot = slots.get_mut(&index).expect("just found");
            (slot.qpn_prefix, slot.generation) = (qpn_prefix, slot.generation.wrapping_add(1));
            leave_all_groups(slot.socket.as_fd());
            drain(slot.socket.as_fd());
            index
        }
        None => bind_sockets(port, &mut slots, qpn_prefix)?,
    };
    let mine = &slots[&index];
    // First every process gets the socket, then datagrams are steered to it.
    let message = Message::Slot { index, qpn_prefix, generation: mine.generation };
    let mut answering = BTreeMap::new();
    for (prefix, other) in &others {
        // A process that cannot take it now is stopped with a long queue, or has just ended.
        if let Ok(connection) = Connection::open(&other.name, ANSWER_TIMEOUT) {
            let fds = [mine.socket.as_fd(), directory.own_inbox().as_fd()];
            if connection.send(&message.to_bytes(), &fds).is_ok() && other.answers {
                answering.insert(*prefix, other.pid);
            }
        }
    }
    let shared = shared(directory.clone());
    await_notices(&inbox, &directory, &shared, answering)?;
    let mut indices: Vec<(u16, u16)> = slots
        .iter()
        .filter(|(_, slot)| slot.qpn_prefix == qpn_prefix || is_other(slot.qpn_prefix))
        .map(|(index, slot)| (slot.qpn_prefix, *index))
        .collect();
    filter::attach(mine.socket.as_fd(), &mut indices)?;
    let socket = mine.socket.clone();
    let listener = Listener::bind(&new_name(port, qpn_prefix))?;
    drop(lock);

    let stop = Arc::new(EventFd::latch()?);
    let (end, ended) = channel();
    let thread = MemberThread::new(listener, inbox, slots, shared.clone(), stop.clone(), end);
    spawn("mill-link", move || thread.run())?;
    Ok(Joined { member: Member::new(stop, ended), socket, shared })
}

/// The index of a socket whose process has exited: that of an earlier process with the same prefix if there is one, so that
/// no prefix has two sockets.
fn free_socket(slots: &SocketSlots, qpn_prefix: u16, is_other: impl Fn(u16) -> bool) -> Option<u16> {
    let mut sockets = slots.iter().filter(|(index, _)| **index != 0);
    let same = sockets.clone().find(|(_, slot)| slot.qpn_prefix == qpn_prefix);
    same.or_else(|| sockets.find(|(_, slot)| !is_other(slot.qpn_prefix))).map(|(&index, _)| index)
}

/// Waits until these members, with their processes, have sent notices of themselves and of their services.
fn await_notices(
    inbox: &Inbox,
    directory: &Directory,
    shared: &Shared,
    mut missing: BTreeMap<u16, u32>,
) -> io::Result<()> {
    // A member that waits for a processor sends them later; one that has stopped meanwhile, when it continues.
    let deadline = Instant::now() + SILENCE_TIMEOUT;
    let mut buffer = vec![0; inbox::MAX_MESSAGE];
    while !missing.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if poll_readable(&[inbox.as_fd()], Some(left.min(ANSWER_TIMEOUT)))? == [false] {
            if left.is_zero() {
                break;
            }
            missing.retain(|_, pid| *pid == 0 || !has_exited(*pid));
        }
        while let Some(received) = inbox.receive(&mut buffer) {
            match received {
                Received::Packet(info, packet) => shared.enqueue(info, packet),
                Received::Notice(notice) => {
                    directory.handle(notice).map(|qpn_prefix| missing.remove(&qpn_prefix));
                }
            }
        }
    }
    Ok(())
}

/// A live member.
#[derive(Debug)]
struct OtherMember {
    name: String,
    pid: u32,
    /// It has answered. A stopped process has not.
    answers: bool,
}

/// The result of [`discover`].
#[derive(Debug, Default)]
struct Members {
    slots: SocketSlots,
    others: BTreeMap<u16, OtherMember>,
    /// Prefixes in names that cannot be connected to. Their owners may be members, or another user's processes.
    unreachable: BTreeSet<u16>,
}

/// As [`discover`], with the sockets if any member holds some.
///
/// # Errors
/// As for [`discover`]; Silent if no member answers.
fn discover_sockets(port: u16, own: u16) -> Result<Members, JoinError> {
    let deadline = Instant::now() + SILENCE_TIMEOUT;
    loop {
        let members = discover(port, own)?;
        if members.others.is_empty() || !members.slots.is_empty() || port_owners(port).is_empty() {
            return Ok(members);
        }
        // A member that waits for a processor answers later.
        if Instant::now() > deadline {
            let pids = members.others.values().map(|other| other.pid).collect();
            return Err(JoinError::Silent { port, pids });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The live members, and the sockets that they hold.
fn discover(port: u16, own: u16) -> Result<Members, JoinError> {
    let name_prefix = name_prefix(port);
    let mut members = Members::default();
    let mut asked = Vec::new();
    for name in listening_names(&name_prefix)? {
        let Some(qpn_prefix) = prefix_in(&name, &name_prefix) else { continue };
        let connection = match Connection::open_at_once(&name, ANSWER_TIMEOUT) {
            Ok(connection) => connection,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                members.unreachable.insert(qpn_prefix);
                continue;
            }
            // A member that was not asked would lose its packets to this one.
            Err(error) if Listener::pause(&error).is_some() => return Err(error.into()),
            // Another user's process, or a member that has just ended.
            Err(_) => continue,
        };
        let pid = connection.peer().pid;
        // A forked child may still hold the name of its dead parent.
        if pid != 0 && has_exited(pid) {
            continue;
        }
        if qpn_prefix == own {
            return Err(JoinError::PrefixInUse { qpn_prefix });
        }
        members.others.insert(qpn_prefix, OtherMember { name, pid, answers: false });
        if connection.send(&Message::Hello { version: VERSION }.to_bytes(), &[]).is_ok() {
            asked.push((qpn_prefix, connection));
        }
    }
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    for (qpn_prefix, connection) in asked {
        // Stopped members do not answer; the other members hold the same sockets.
        let left = deadline.saturating_duration_since(Instant::now());
        if receive_sockets(&connection, left, &mut members.slots)?
            && let Some(other) = members.others.get_mut(&qpn_prefix)
        {
            other.answers = true;
        }
    }
    Ok(members)
}

/// Receives the sockets that a member holds; false if it does not answer. Each of its messages is waited for as long as `wait`.
fn receive_sockets(
    connection: &Connection,
    wait: Duration,
    slots: &mut SocketSlots,
) -> Result<bool, JoinError> {
    let mut buffer = [0; Message::LEN];
    while let Ok((len, fds)) = connection.receive_close_on_fork(&mut buffer, wait) {
        match (Message::parse(&buffer[..len]), fds.into_iter().next()) {
            (Some(Message::Slot { index, qpn_prefix, generation }), Some(socket)) => {
                update(slots, index, qpn_prefix, generation, socket);
            }
            (Some(Message::Hello { version }), _) if version == VERSION => {}
            (Some(Message::Hello { .. }), _) => {
                return Err(JoinError::Version { pid: connection.peer().pid });
            }
            (Some(Message::End), _) => return Ok(true),
            _ => break,
        }
    }
    Ok(false)
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
        let socket = Arc::new(bind()?);
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
