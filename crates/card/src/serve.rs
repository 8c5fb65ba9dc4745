//! The emulated card as a process: creates memory and registers, runs the engine, hands the memory
//! to local users and ends with its owner.
//!
//! Everything that a card has is held by file descriptors, so a card that is killed leaves nothing
//! behind, and its users notice by the end of their connection.

use std::io::{self, ErrorKind, PipeReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use millstream_shm::socket::{Connection, Listener, own_uid};
use millstream_shm::{EventFd, Memfd, PAGE, futex, poll_readable};

use crate::command::{CAPABILITY_INTERRUPT_FD, CAPABILITY_VECTOR};
use crate::engine::{Engine, Idle};
use crate::handshake::{Answer, Received, Refusal, Request, Role, receive};
use crate::kernel::Registry;
use crate::memory::Memory;
use crate::name::CardName;
use crate::os::{Doing, OsError};
use crate::registers::{BAR0_BYTES, MAGIC, Registers, VERSION};

/// Most connections that a card serves at a time.
const MAX_CONNECTIONS: usize = 64;

/// When a card ends by itself.
#[derive(Debug)]
pub enum Lifetime {
    /// Never: it runs until its process is ended from outside.
    Unbound,
    /// When this descriptor becomes readable or hangs up: the read end of a pipe that the launcher
    /// holds open, or a pidfd of the launcher.
    Launcher(OwnedFd),
    /// When the connection ends that opened the card as its owner, or when none has done so in this
    /// time.
    Owner {
        /// Time for an owner to come.
        claim_within: Duration,
    },
}

/// What an emulated card is made of.
#[derive(Debug)]
pub struct Config {
    /// Name under which users of the same user id find it.
    pub name: CardName,
    /// Size of one memory bank [bytes], a multiple of 4096.
    pub bank_bytes: u64,
    /// Number of banks.
    pub bank_count: u32,
    /// What the card can compute.
    pub kernels: Registry,
    /// Give memory to all banks at the start. Without it pages cost memory, and time, once they
    /// are touched.
    pub prefault: bool,
    /// Ask for huge pages. The system may not grant them.
    pub huge_pages: bool,
    /// How long the card looks for further commands before it sleeps. A spinning card answers
    /// sooner and costs a processor.
    pub spin: Duration,
    /// Longest time between two heartbeats of a waiting card. Also the longest time until a card
    /// notices a doorbell that was rung by a remote write, which cannot wake it.
    pub heartbeat: Duration,
    /// When the card ends by itself.
    pub lifetime: Lifetime,
}

impl Config {
    /// A card with one bank of `bank_bytes` that runs `kernels`, sleeps when idle and never ends
    /// by itself.
    pub fn new(name: CardName, bank_bytes: u64, kernels: Registry) -> Config {
        Config {
            name,
            bank_bytes,
            bank_count: 1,
            kernels,
            prefault: false,
            huge_pages: false,
            spin: Duration::from_micros(20),
            heartbeat: Duration::from_millis(100),
            lifetime: Lifetime::Unbound,
        }
    }

    fn memory_bytes(&self) -> Result<u64, ServeError> {
        let bad = ServeError::BankSize { bank_bytes: self.bank_bytes, bank_count: self.bank_count };
        let bytes = self.bank_bytes.checked_mul(self.bank_count.into());
        match bytes {
            Some(bytes)
                if bytes != 0
                    && bytes <= isize::MAX as u64
                    && self.bank_bytes.is_multiple_of(PAGE as u64) =>
            {
                Ok(bytes)
            }
            _ => Err(bad),
        }
    }
}

/// Why a card cannot run, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The size of the banks makes no sense.
    #[error(
        "card memory of {bank_count} banks of {bank_bytes} bytes: \
         expected at least one bank of a multiple of {PAGE} bytes"
    )]
    BankSize {
        /// Size of a bank [bytes].
        bank_bytes: u64,
        /// Number of banks.
        bank_count: u32,
    },
    /// Another card of this user has the name.
    #[error("card {0} is running already")]
    NameTaken(CardName),
    /// The engine ended although nobody asked it to; its own message says why.
    #[error("engine of card {0} failed")]
    EngineFailed(CardName),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// Why a card ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its launcher is gone.
    LauncherGone,
    /// Its owner's connection is gone.
    OwnerGone,
    /// No owner came in time.
    NeverOwned,
}

/// Runs a card in this process until its [`Lifetime`] ends.
pub fn serve(config: Config) -> Result<End, ServeError> {
    let uid = own_uid();
    // Listening comes first, it reserves the name; users who connect now wait for an answer until
    // the memory is there.
    let listener = match Listener::bind(&config.name.address(uid)) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            return Err(ServeError::NameTaken(config.name));
        }
        other => other.doing("listen on the card's socket")?,
    };
    listener.set_nonblocking().doing("listen on the card's socket")?;
    let hardware = Hardware::new(&config)?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut engine = Engine::new(
        hardware.registers.clone(),
        hardware.memory.clone(),
        config.kernels,
        hardware.interrupt_fd.clone(),
        stop.clone(),
    );
    let idle = Idle { spin: config.spin, heartbeat: config.heartbeat };
    // The write end lives in the engine's thread: however that ends, the read end notices.
    let (engine_alive, engine_holds) = io::pipe().doing("watch the engine")?;
    let thread = thread::Builder::new()
        .name(format!("card {}", config.name))
        .spawn(move || {
            let _held = engine_holds;
            engine.run(idle)
        })
        .doing("start the engine")?;

    let mut desk = Desk {
        uid,
        listener,
        engine_alive,
        lifetime: config.lifetime,
        claim_before: Instant::now(),
        users: Vec::new(),
        hardware: &hardware,
    };
    let ended = desk.attend();
    stop.store(true, Ordering::Relaxed);
    // The stop flag is not the futex word, so this wake can come too early; then the engine sleeps
    // one heartbeat longer.
    futex::wake_all(hardware.registers.doorbell());
    match thread.join() {
        Ok(engine_ended) => engine_ended?,
        Err(_) => return Err(ServeError::EngineFailed(config.name)),
    }
    ended?.ok_or(ServeError::EngineFailed(config.name))
}

/// What users of the card get.
struct Hardware {
    registers: Arc<Registers>,
    memory: Arc<Memory>,
    bar0_fd: Memfd,
    memory_fd: Memfd,
    interrupt_fd: Arc<EventFd>,
}

impl Hardware {
    fn new(config: &Config) -> Result<Hardware, ServeError> {
        let memory_bytes = config.memory_bytes()?;
        let bar0_fd = Memfd::sealed("millstream-card-bar0", BAR0_BYTES).doing("make the registers")?;
        let memory_fd =
            Memfd::sealed("millstream-card-memory", memory_bytes as usize).doing("make card memory")?;
        let mapping = memory_fd.map().doing("map card memory")?;
        if config.huge_pages {
            mapping.advise_huge_pages();
        }
        if config.prefault {
            mapping.prefault(0, mapping.len()).doing("give memory to the pages of a card")?;
        }
        let registers = Registers::new(bar0_fd.map().doing("map the registers")?);
        let interrupt_fd = EventFd::latch().doing("create the interrupt descriptor")?;
        let mut capabilities = CAPABILITY_INTERRUPT_FD;
        if crate::kernel::vectorised() {
            capabilities |= CAPABILITY_VECTOR;
        }

        let set = Ordering::Relaxed;
        registers.version().store(VERSION, set);
        registers.process().store(std::process::id(), set);
        registers.capabilities().store(capabilities, set);
        registers.memory_bytes().store(memory_bytes, set);
        registers.bank_bytes().store(config.bank_bytes, set);
        registers.bank_count().store(config.bank_count, set);
        let mut kernel_count = 0;
        for (id, name) in config.kernels.names() {
            registers.set_kernel(kernel_count, id.0, name);
            kernel_count += 1;
        }
        registers.kernel_count().store(kernel_count as u32, set);
        registers.magic().store(MAGIC, Ordering::Release);
        Ok(Hardware {
            registers: Arc::new(registers),
            memory: Arc::new(Memory::new(mapping)),
            bar0_fd,
            memory_fd,
            interrupt_fd: Arc::new(interrupt_fd),
        })
    }
}

/// A user of the card.
struct User {
    connection: Connection,
    /// Nothing until the user has made its request.
    role: Option<Role>,
}

/// The card's side of all connections.
struct Desk<'a> {
    uid: u32,
    listener: Listener,
    engine_alive: PipeReader,
    lifetime: Lifetime,
    /// Meaningful while the card waits for its owner.
    claim_before: Instant,
    users: Vec<User>,
    hardware: &'a Hardware,
}

impl Desk<'_> {
    /// Serves connections until the card's life ends; `None` if the engine ended first.
    fn attend(&mut self) -> Result<Option<End>, OsError> {
        if let Lifetime::Owner { claim_within } = self.lifetime {
            self.claim_before = Instant::now() + claim_within;
        }
        loop {
            let timeout = if self.is_unclaimed() {
                let left = self.claim_before.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(Some(End::NeverOwned));
                }
                Some(left)
            } else {
                None
            };
            let mut watched: Vec<BorrowedFd<'_>> = vec![self.engine_alive.as_fd(), self.listener.as_fd()];
            if let Lifetime::Launcher(fd) = &self.lifetime {
                watched.push(fd.as_fd());
            }
            let first_user = watched.len();
            watched.extend(self.users.iter().map(|user| user.connection.as_fd()));
            let ready = poll_readable(&watched, timeout).doing("wait for users")?;

            if ready[0] {
                return Ok(None);
            }
            if first_user == 3 && ready[2] {
                return Ok(Some(End::LauncherGone));
            }
            // Backwards, because a user whose connection ends leaves the list.
            for index in (0..self.users.len()).rev() {
                if ready[first_user + index] && !self.hear(index) {
                    let gone = self.users.swap_remove(index);
                    if gone.role == Some(Role::Owner) {
                        return Ok(Some(End::OwnerGone));
                    }
                }
            }
            if ready[1] {
                self.welcome()?;
            }
        }
    }

    fn is_unclaimed(&self) -> bool {
        matches!(self.lifetime, Lifetime::Owner { .. }) && !self.is_owned()
    }

    fn is_owned(&self) -> bool {
        self.users.iter().any(|user| user.role == Some(Role::Owner))
    }

    /// Takes a new connection, if it is one for us.
    fn welcome(&mut self) -> Result<(), OsError> {
        let accepted = self.listener.accept_anyone();
        let gone = [ErrorKind::WouldBlock, ErrorKind::ConnectionAborted, ErrorKind::Interrupted];
        if accepted.as_ref().is_err_and(|error| gone.contains(&error.kind())) {
            // The peer has given up between the poll and the accept.
            return Ok(());
        }
        let connection = accepted.doing("accept a connection")?;
        connection.set_nonblocking().doing("accept a connection")?;
        let refusal = if connection.peer().uid != self.uid {
            Some(Refusal::OtherUser)
        } else if self.users.len() == MAX_CONNECTIONS {
            Some(Refusal::TooMany)
        } else {
            None
        };
        match refusal {
            Some(refusal) => refuse(&connection, refusal),
            None => self.users.push(User { connection, role: None }),
        }
        Ok(())
    }

    /// Handles what a user has to say; false if its connection is over.
    fn hear(&mut self, index: usize) -> bool {
        let claimable = self.is_unclaimed();
        let user = &mut self.users[index];
        let request = match receive(&user.connection) {
            Received::Nothing => return true,
            Received::Message(bytes, _) if user.role.is_none() => bytes,
            // There is one request per connection; afterwards it only shows who is alive.
            Received::Message(..) | Received::Malformed | Received::Closed => return false,
        };
        let role = match Request::from_bytes(&request).role() {
            Ok(Role::Owner) if !claimable => Err(Refusal::NotForOwning),
            other => other,
        };
        match role {
            Ok(role) => {
                user.role = Some(role);
                let hardware = self.hardware;
                let fds =
                    [hardware.bar0_fd.as_fd(), hardware.memory_fd.as_fd(), hardware.interrupt_fd.as_fd()];
                let answer = Answer::new(Ok(hardware.memory.size()));
                user.connection.send(&answer.to_bytes(), &fds).is_ok()
            }
            Err(refusal) => {
                refuse(&user.connection, refusal);
                false
            }
        }
    }
}

fn refuse(connection: &Connection, refusal: Refusal) {
    // Who has gone already need not be told.
    let _ = connection.send(&Answer::new(Err(refusal)).to_bytes(), &[]);
}
