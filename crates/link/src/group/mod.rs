//! The processes of one user on one host that share the port, without a daemon.
//!
//! Every process has a socket of its own on the port (`SO_REUSEPORT`); a program at the group of sockets steers each
//! datagram to the process that its queue pair number names ([`filter`]). The program answers with a *place*, and
//! the kernel fills the place of a socket that is closed with the last one. So no socket may close before the last
//! process ends: each is handed to all processes, and the place of one that died goes to the next newcomer.
//! Place zero is a socket that all processes read: for queue pair 1 (connection management) and
//! whatever else the program does not know. docs/wire-link.md has the whole protocol, and what happens
//! when whom dies.

mod filter;
mod neighbours;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use millstream_lockfree::process::has_exited;
use millstream_shm::socket::{BoundSocket, Connection, Listener, listening_names, own_uid};
use millstream_shm::thread::spawn;
use millstream_shm::{EventFd, poll_readable};

use crate::datagram::Inbox;
use crate::fork::Ours;
use crate::udp::{Shared, bind_shared, holders, receive};
pub(crate) use neighbours::Neighbours;

/// Version of the messages.
const VERSION: u32 = 1;
/// How long one process waits for another's answer: its thread does nothing else, so only a stopped process
/// takes longer, and the others know what it knows.
const PATIENCE: Duration = Duration::from_millis(200);
/// How long to wait for others that are just joining or just ending.
const JOINING: Duration = Duration::from_secs(10);
const ENDING: Duration = Duration::from_secs(3);

/// Why a process cannot receive on the port.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Somebody else receives there.
    #[error(
        "UDP port {port} is held by user {holder}, not by Millstream programs of user {me}; on one host and network \
         namespace only one user can receive RoCEv2 (the kernel's rxe is user 0)"
    )]
    Held {
        /// The port.
        port: u16,
        /// Whose socket it is.
        holder: u32,
        /// Who wanted it.
        me: u32,
    },
    /// Sockets of this user that do not take part.
    #[error(
        "UDP port {port} has {found} sockets, of which Millstream knows {known}: another program of yours receives \
         there, or a forked child of an ended one is left (`ss -lunp sport = {port}` names it)"
    )]
    Foreign {
        /// The port.
        port: u16,
        /// Sockets in the kernel's table.
        found: usize,
        /// Sockets in the group.
        known: usize,
    },
    /// Another process's joining takes too long.
    #[error("another process has been joining for {} s; is it stopped? (abstract socket @{name})", JOINING.as_secs())]
    Busy {
        /// The name that it holds meanwhile.
        name: String,
    },
    /// A process of another version.
    #[error("process {pid} runs another version of Millstream, which cannot share the port")]
    Version {
        /// Which.
        pid: u32,
    },
    /// The number is in use.
    #[error("queue pair numbers 0x{block:03x}000 and up belong to another process")]
    Taken {
        /// Their high bits.
        block: u16,
    },
    /// A setting is wrong.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// The system refused something.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// What the names of all members on a port start with.
fn prefix(port: u16) -> String {
    format!("millstream-link/{}/{port}/", own_uid())
}

fn name(port: u16, block: u16) -> String {
    format!("{}{block:03x}", prefix(port))
}

/// One socket of the group.
#[derive(Debug)]
struct Seat {
    socket: Arc<Ours>,
    /// Who reads it; zero for the one that all read.
    block: u16,
    /// Rises each time that it changes hands.
    generation: u32,
}

/// By place.
type Seats = BTreeMap<u16, Seat>;

/// Messages of 16 bytes: kind, place, block, generation, each four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// "I am of this version; what do you know?"
    Hello { version: u32 },
    /// A socket comes with it.
    Seat { place: u16, block: u16, generation: u32 },
    /// No more of these.
    End,
}

impl Message {
    const LEN: usize = 16;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let words = match self {
            Self::Hello { version } => [1, version, 0, 0],
            Self::Seat { place, block, generation } => [2, place.into(), block.into(), generation],
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
            2 => Some(Self::Seat {
                place: word(1).try_into().ok()?,
                block: word(2).try_into().ok()?,
                generation: word(3),
            }),
            3 => Some(Self::End),
            _ => None,
        }
    }
}

/// Takes what is newer.
fn learn(seats: &mut Seats, place: u16, block: u16, generation: u32, socket: OwnedFd) {
    match seats.get_mut(&place) {
        Some(seat) if seat.generation >= generation => {}
        Some(seat) => (seat.block, seat.generation) = (block, generation),
        None => {
            seats.insert(place, Seat { socket: Arc::new(socket.into()), block, generation });
        }
    }
}

/// Membership; ends when dropped.
#[derive(Debug)]
pub(crate) struct Member {
    stop: Arc<EventFd>,
    ended: Mutex<Receiver<()>>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.stop.signal();
        // The thread answers at once, or after a stopped newcomer's patience. An error means that it ended.
        let _ = self.ended.get_mut().expect("no panic under this lock").recv();
    }
}

/// Takes a place at the port; returns the membership and the socket to receive from.
pub(crate) fn join(
    port: u16,
    shared: Arc<Shared>,
    neighbours: Neighbours,
) -> Result<(Member, Arc<Ours>), JoinError> {
    let block = shared.block;
    assert!(block != 0 && block < 0xfff, "block {block:#x} belongs to nobody");
    // From here on nobody else joins; the name is free again when this process ends.
    let lock = lock(port)?;
    let taken = |error: io::Error| match error.raw_os_error() {
        Some(libc::EADDRINUSE) => JoinError::Taken { block },
        _ => error.into(),
    };
    let own_name = BoundSocket::bind(&name(port, block)).map_err(taken)?;
    neighbours.listen(block).map_err(taken)?;

    let (mut seats, others) = look_around(port, block)?;
    let place = match seats.iter().find(|(place, seat)| **place != 0 && !others.contains_key(&seat.block)) {
        Some((&place, _)) => {
            let seat = seats.get_mut(&place).expect("just found");
            (seat.block, seat.generation) = (block, seat.generation.wrapping_add(1));
            drain(seat.socket.as_fd());
            place
        }
        None => add_seats(port, &mut seats, block)?,
    };
    let mine = &seats[&place];
    // First everybody holds the socket, then datagrams are steered to it.
    let message = Message::Seat { place, block, generation: mine.generation };
    for other in others.keys() {
        // Who cannot take it now is stopped with a long queue, or just ended.
        if let Ok(connection) = Connection::open(&name(port, *other), PATIENCE) {
            let _ = connection.send(&message.to_bytes(), &[mine.socket.as_fd()]);
        }
    }
    let mut places: Vec<(u16, u16)> = seats
        .iter()
        .filter(|(_, seat)| seat.block == block || others.contains_key(&seat.block))
        .map(|(place, seat)| (seat.block, *place))
        .collect();
    filter::attach(mine.socket.as_fd(), &mut places)?;
    let socket = mine.socket.clone();
    let listener = own_name.listen()?;
    drop(lock);

    let stop = Arc::new(EventFd::latch()?);
    let (end, ended) = channel();
    let thread = Thread { listener, seats, shared, neighbours, stop: stop.clone(), _end: end };
    spawn("mill-link", move || thread.run())?;
    Ok((Member { stop, ended: Mutex::new(ended) }, socket))
}

fn lock(port: u16) -> Result<BoundSocket, JoinError> {
    let name = format!("{}join", prefix(port));
    let deadline = Instant::now() + JOINING;
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

/// What all living members know together, and who they are, with their process ids.
fn look_around(port: u16, own: u16) -> Result<(Seats, BTreeMap<u16, u32>), JoinError> {
    let prefix = prefix(port);
    let (mut seats, mut others) = (Seats::new(), BTreeMap::new());
    for name in listening_names(&prefix) {
        let Some(block) = name.strip_prefix(&prefix).and_then(|block| u16::from_str_radix(block, 16).ok())
        else {
            continue;
        };
        if block == own {
            continue;
        }
        // Nobody listens: it has just ended.
        let Ok(connection) = Connection::open(&name, PATIENCE) else { continue };
        let pid = connection.peer().pid;
        // A forked child may still hold the name of its parent that is gone.
        if pid != 0 && has_exited(pid) {
            continue;
        }
        others.insert(block, pid);
        // Stopped ones do not answer; what they know others know, too.
        ask(&connection, &mut seats)?;
    }
    Ok((seats, others))
}

fn ask(connection: &Connection, seats: &mut Seats) -> Result<(), JoinError> {
    let mut buffer = [0; Message::LEN];
    if connection.send(&Message::Hello { version: VERSION }.to_bytes(), &[]).is_err() {
        return Ok(());
    }
    while let Ok((len, fds)) = connection.receive(&mut buffer) {
        match (Message::parse(&buffer[..len]), fds.into_iter().next()) {
            (Some(Message::Seat { place, block, generation }), Some(socket)) => {
                learn(seats, place, block, generation, socket);
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

/// Binds another socket, and the shared one before it if there is none. The new one's place is the last.
fn add_seats(port: u16, seats: &mut Seats, block: u16) -> Result<u16, JoinError> {
    let deadline = Instant::now() + ENDING;
    // Processes that end close their sockets one after the other.
    loop {
        let users = holders(port);
        if users.len() == seats.len() {
            break;
        }
        let me = own_uid();
        if let Some(&holder) = users.iter().find(|user| **user != me) {
            return Err(JoinError::Held { port, holder, me });
        }
        if Instant::now() > deadline {
            return Err(JoinError::Foreign { port, found: users.len(), known: seats.len() });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    if seats.keys().copied().ne(0..seats.len() as u16) {
        return Err(JoinError::Foreign { port, found: seats.len(), known: seats.len() - 1 });
    }
    let bind = || {
        bind_shared(port).map_err(|error| match error.raw_os_error() {
            // A socket that the table did not show, such as the kernel's own.
            Some(libc::EADDRINUSE) => JoinError::Held { port, holder: 0, me: own_uid() },
            _ => error.into(),
        })
    };
    for block in [0, block].into_iter().skip(usize::from(!seats.is_empty())) {
        let place = seats.len() as u16;
        let socket: Arc<Ours> = Arc::new(bind()?.into());
        if place == 0 {
            filter::attach(socket.as_fd(), &mut [])?;
        }
        seats.insert(place, Seat { socket, block, generation: 0 });
    }
    Ok(seats.len() as u16 - 1)
}

/// Forgets what came for the former owner.
fn drain(socket: BorrowedFd<'_>) {
    let mut byte = 0u8;
    // SAFETY: the buffer is one writable byte; the rest of each datagram is dropped.
    while unsafe { libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) } >= 0 {}
}

/// What a member does besides receiving: it answers newcomers, and takes what came by a detour.
struct Thread {
    listener: Listener,
    seats: Seats,
    shared: Arc<Shared>,
    neighbours: Neighbours,
    stop: Arc<EventFd>,
    /// Dropped last: says that everything is closed.
    _end: Sender<()>,
}

impl Thread {
    fn run(mut self) {
        let mut inbox = Inbox::new(1);
        let mut buffer = vec![0; neighbours::LONGEST];
        loop {
            let common = self.seats.get(&0).map(|seat| seat.socket.clone());
            let mut fds = vec![self.stop.as_fd(), self.listener.as_fd(), self.neighbours.as_fd()];
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
                while let Some((origin, packet)) = self.neighbours.receive(&mut buffer) {
                    self.shared.enqueue(origin, packet);
                }
            }
            if ready.get(3) == Some(&true)
                && let Some(socket) = common
            {
                inbox.filled.clear();
                // Another process may have been faster.
                if receive(socket.as_fd(), &mut inbox).is_ok() {
                    self.take_common(&inbox);
                }
            }
        }
    }

    /// Packets from the socket that all read.
    fn take_common(&self, inbox: &Inbox) {
        for received in inbox.received() {
            for (_, packet) in received.packets() {
                self.shared.counters.received.add(1);
                self.shared.counters.received_bytes.add(packet.len() as u64);
                if self.shared.keep(&self.neighbours, &received.origin, packet) {
                    self.shared.enqueue_own(received.origin, packet);
                }
            }
        }
    }

    /// Tells a newcomer all, or learns its socket.
    fn answer(&mut self, connection: &Connection) {
        let mut buffer = [0; Message::LEN];
        if connection.set_timeout(PATIENCE).is_err() {
            return;
        }
        let Ok((len, fds)) = connection.receive(&mut buffer) else { return };
        match (Message::parse(&buffer[..len]), fds.into_iter().next()) {
            (Some(Message::Hello { .. }), _) => {
                let hello = Message::Hello { version: VERSION };
                let mut sent = connection.send(&hello.to_bytes(), &[]);
                for (&place, seat) in &self.seats {
                    let message = Message::Seat { place, block: seat.block, generation: seat.generation };
                    sent = sent.and_then(|()| connection.send(&message.to_bytes(), &[seat.socket.as_fd()]));
                }
                let _ = sent.and_then(|()| connection.send(&Message::End.to_bytes(), &[]));
            }
            (Some(Message::Seat { place, block, generation }), Some(socket)) => {
                learn(&mut self.seats, place, block, generation, socket);
            }
            _ => {}
        }
    }
}
