//! The emulated card as a process: creates memory and registers, runs the engine, hands the memory
//! to local users and ends with its owner.
//!
//! Everything that a card has is held by file descriptors, so a card that is killed leaves nothing
//! behind, and its users notice by the end of their connection.

use std::io::{self, ErrorKind, PipeReader};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use millstream_rdma::Device;
use millstream_shm::socket::{Connection, Listener, own_uid};
use millstream_shm::{EventFd, PAGE, futex, poll_readable};

use crate::backing::{BackingError, Kind, Roots};
use crate::command::{CAPABILITY_NETWORK, CAPABILITY_SPINS, nanos};
use crate::engine::desk::RingDesk;
use crate::engine::{Engine, Idle};
use crate::handshake::{Answer, Received, Refusal, Request, Role, receive};
use crate::hardware::{Hardware, Make};
use crate::kernel::Registry;
use crate::name::CardName;
use crate::net::copies::{Copies, CopyDesk};
use crate::net::crowd::Crowd;
use crate::net::port::Port;
use crate::net::{Greeting, PortError};
use crate::os::{Doing, OsError};
use crate::region::builtin::BUILTINS;
use crate::region::desk::Desk as RegionDesk;
use crate::region::kernel::{Builtin, Loader};
use crate::region::worker::{Shop, Worker};
use crate::registers::{MAGIC, MAX_BANKS, MAX_REGIONS, Registers, VERSION};
use crate::warden::{Parts, Warden};

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

/// Where a card is on the network.
#[derive(Debug)]
pub struct Network {
    /// Its verbs device.
    pub device: Device,
    /// Where it listens for nodes, for example `[::]:7480`; port 0 takes any free one.
    pub address: String,
}

/// A spin time from which on a card counts as one that never sleeps.
const ALWAYS: Duration = Duration::from_secs(3600);

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
    /// Size of the DMA window, BAR2 [bytes], a multiple of 4096.
    pub dma_bytes: u64,
    /// Regions that kernels can be loaded into, 1 to 8.
    pub regions: usize,
    /// What can be loaded into them by name, beyond what every card has.
    pub region_kernels: Vec<Builtin>,
    /// Formats of images that can be loaded into them.
    pub loaders: Vec<Arc<dyn Loader>>,
    /// Time from a heartbeat to the end of a lease unless its holder asks for another.
    pub lease: Duration,
    /// Its place on the network, if it has one.
    pub network: Option<Network>,
    /// What its memory is made of.
    pub kind: Kind,
    /// Where that is looked for.
    pub roots: Roots,
    /// How long a kernel that has to end may take to its next safe point before its region is given up.
    pub grace: Duration,
    /// How long a command of the rings may run unless their user sets another time.
    pub command_limit: Duration,
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
            dma_bytes: 16 << 20,
            regions: 2,
            region_kernels: Vec::new(),
            loaders: Vec::new(),
            lease: Duration::from_secs(5),
            network: None,
            kind: Kind::Emulated,
            roots: Roots::default(),
            grace: Duration::from_secs(5),
            command_limit: Duration::from_secs(60),
        }
    }

    fn check(&self) -> Result<(), ServeError> {
        let bad = ServeError::BankSize { bank_bytes: self.bank_bytes, bank_count: self.bank_count };
        let bytes = self.bank_bytes.checked_mul(self.bank_count.into());
        match bytes {
            Some(bytes)
                if bytes != 0
                    && bytes <= isize::MAX as u64
                    && self.bank_count <= MAX_BANKS
                    && self.bank_bytes.is_multiple_of(PAGE as u64) => {}
            _ => return Err(bad),
        }
        if self.dma_bytes == 0 || !self.dma_bytes.is_multiple_of(PAGE as u64) || self.dma_bytes >= 1 << 40 {
            return Err(ServeError::DmaSize(self.dma_bytes));
        }
        if !(1..=MAX_REGIONS).contains(&self.regions) {
            return Err(ServeError::Regions(self.regions));
        }
        Ok(())
    }
}

/// Why a card cannot run, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The size of the banks makes no sense.
    #[error(
        "card memory of {bank_count} banks of {bank_bytes} bytes: \
         expected 1 to {MAX_BANKS} banks of a multiple of {PAGE} bytes"
    )]
    BankSize {
        /// Size of a bank [bytes].
        bank_bytes: u64,
        /// Number of banks.
        bank_count: u32,
    },
    /// The size of the DMA window makes no sense.
    #[error("DMA window of {0} bytes: expected a multiple of {PAGE} bytes below 1 TiB")]
    DmaSize(u64),
    /// So many regions there cannot be.
    #[error("card of {0} regions: expected 1 to {MAX_REGIONS}")]
    Regions(usize),
    /// The card cannot be on the network.
    #[error("network of the card: {0}")]
    Network(#[from] PortError),
    /// Another card of this user has the name.
    #[error("card {0} is running already")]
    NameTaken(CardName),
    /// The engine ended although nobody asked it to; its own message says why.
    #[error("engine of card {0} failed")]
    EngineFailed(CardName),
    /// There is no memory of the kind asked for.
    #[error(transparent)]
    Backing(#[from] BackingError),
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
    serve_with(config, |_| {})
}

/// As [`serve`]; calls `ready` once the card can be opened, with the address at which it listens for nodes.
pub fn serve_with(config: Config, ready: impl FnOnce(Option<SocketAddr>)) -> Result<End, ServeError> {
    let uid = own_uid();
    config.check()?;
    // Listening comes first, it reserves the name; users who connect now wait for an answer until
    // the memory is there.
    let listener = match Listener::bind(&config.name.address(uid)) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            return Err(ServeError::NameTaken(config.name));
        }
        other => other.doing("listen on the card's socket")?,
    };
    listener.set_nonblocking().doing("listen on the card's socket")?;
    let mut inside = Inside::new(&config)?;
    ready(inside.warden.parts.port.as_ref().map(Port::address));
    let (hardware, crowd) = (inside.hardware.clone(), inside.warden.parts.crowd.clone());
    let (stop, shop, copies) = (inside.stop.clone(), inside.shop.clone(), inside.warden.parts.copies.clone());
    let wake = inside.warden.parts.wake.clone();
    let engine = Engine::new(
        hardware.registers.clone(),
        hardware.memory(),
        config.kernels,
        hardware.interrupt_fd.clone(),
        stop.clone(),
    );
    let idle = Idle { spin: config.spin, heartbeat: config.heartbeat };
    // The write end lives in the threads: however one of them ends, the read end notices.
    let (thread_ended, alive) = io::pipe().doing("watch the card's threads")?;
    let mut threads = Vec::new();
    let start = |what: &str, run: Box<dyn FnOnce() -> Result<(), ServeError> + Send>| {
        let mut held = alive.try_clone().doing("watch the card's threads")?;
        thread::Builder::new()
            .name(format!("{what} {}", config.name))
            .spawn(move || {
                let ended = run();
                use std::io::Write as _;
                // Nobody reads it any more if the card is ending.
                let _ = held.write_all(b"!");
                ended
            })
            .doing("start a thread of the card")
    };
    let nudge = {
        let (shop, wake, copies) = (shop.clone(), wake.clone(), copies.clone());
        move || {
            if is_anything_new(&shop.registers, shop.desks.len()) {
                shop.desks.iter().for_each(RegionDesk::nudge);
                copies.nudge();
                wake.signal();
            }
        }
    };
    let mut engine = engine.nudging(Box::new(nudge)).with_regions(shop.clone());
    // Threads that kernels run on.
    let mut kernels = vec![start("card", Box::new(move || Ok(engine.run(idle)?)))?];
    for mut worker in std::mem::take(&mut inside.workers) {
        kernels.push(start(
            "region",
            Box::new(move || {
                worker.serve();
                Ok(())
            }),
        )?);
    }
    let Inside { mut warden, copies: mut copier, .. } = inside;
    threads.push(start("warden", Box::new(move || Ok(warden.serve()?)))?);
    threads.push(start(
        "copies",
        Box::new(move || {
            copier.serve();
            Ok(())
        }),
    )?);

    let mut desk = Desk {
        uid,
        listener,
        thread_ended,
        lifetime: config.lifetime,
        claim_before: Instant::now(),
        users: Vec::new(),
        hardware: &hardware,
        crowd: &crowd,
        wake: &wake,
    };
    let ended = desk.attend();
    stop.store(true, Ordering::SeqCst);
    // The stop flag is not the futex word, so this wake can come too early; then the engine sleeps
    // one heartbeat longer.
    shop.rings.close();
    futex::wake_all(hardware.registers.doorbell());
    shop.desks.iter().for_each(|desk| {
        desk.want();
        desk.nudge();
    });
    copies.nudge();
    wake.signal();
    // A kernel that does not end has its thread until the process ends.
    let patience = Instant::now() + config.grace;
    for thread in kernels {
        while !thread.is_finished() && Instant::now() < patience {
            thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            threads.push(thread);
        }
    }
    for thread in threads {
        match thread.join() {
            Ok(ended) => ended?,
            Err(_) => return Err(ServeError::EngineFailed(config.name)),
        }
    }
    ended?.ok_or(ServeError::EngineFailed(config.name))
}

/// Whether a local user has written anything that is not for the rings. The same doorbell serves both, and a
/// busy ring must not wake the rest of the card again and again.
fn is_anything_new(registers: &Registers, regions: usize) -> bool {
    let get = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Acquire);
    let epoch = get(registers.lease_epoch());
    let holder = registers.lease_holder().load(Ordering::Acquire);
    get(registers.lease_word()) != crate::lease::word(epoch as u32, holder)
        || get(registers.lease_release()) == epoch
        || get(registers.lease_revoke()) == epoch
        || get(registers.card_command()) != get(registers.card_taken())
        || get(registers.copy_producer()) != get(registers.copy_consumer())
        || (0..regions).any(|index| {
            let region = registers.region(index);
            get(region.doorbell()) != get(region.taken())
        })
}

/// The threads of a card, before they start.
struct Inside {
    hardware: Arc<Hardware>,
    shop: Arc<Shop>,
    stop: Arc<AtomicBool>,
    workers: Vec<Worker>,
    warden: Warden,
    copies: Copies,
}

impl Inside {
    fn new(config: &Config) -> Result<Inside, ServeError> {
        let hardware = Arc::new(Hardware::new(&Make {
            kind: &config.kind,
            roots: &config.roots,
            bank_bytes: config.bank_bytes,
            bank_count: config.bank_count,
            dma_bytes: config.dma_bytes,
            prefault: config.prefault,
            huge_pages: config.huge_pages,
        })?);
        let registers = hardware.registers.clone();
        let stop = Arc::new(AtomicBool::new(false));
        let wake = Arc::new(EventFd::latch().doing("create a wake-up")?);
        let card = random();
        let crowd = Arc::new(Crowd::new(card, registers.clone()));

        // Kernels of the rings first, under their own numbers; a region knows the event kernels by the same.
        let mut directory: Vec<(u32, String)> =
            config.kernels.names().map(|(id, name)| (id.0, name.to_owned())).collect();
        let mut builtins = Vec::new();
        for builtin in BUILTINS.iter().chain(&config.region_kernels) {
            let known = directory.iter().find(|(_, name)| name == builtin.name).map(|(id, _)| *id);
            let id = known.unwrap_or(directory.len() as u32 + 1);
            if known.is_none() {
                directory.push((id, builtin.name.to_owned()));
            }
            builtins.push((id, *builtin));
        }

        let set = Ordering::Relaxed;
        let mut capabilities = registers.capabilities().load(set);
        if config.network.is_some() {
            capabilities |= CAPABILITY_NETWORK;
        }
        if config.spin >= ALWAYS {
            capabilities |= CAPABILITY_SPINS;
        }
        registers.capabilities().store(capabilities, set);
        registers.region_count().store(config.regions as u32, set);
        registers.card_id().store(card, set);
        registers.command_limit_ns().store(nanos(config.command_limit), set);
        let greeting = Greeting {
            magic: MAGIC,
            version: VERSION,
            card,
            memory_bytes: hardware.memory().size(),
            bank_bytes: config.bank_bytes,
            bank_count: config.bank_count,
            region_count: config.regions as u32,
            capabilities,
            dma_bytes: config.dma_bytes,
            ..Greeting::default()
        };
        let port = match &config.network {
            None => None,
            Some(Network { device, address }) => {
                Some(Port::open(device, address, &hardware.bar0, greeting, &crowd, wake.clone())?)
            }
        };
        let shop = Arc::new(Shop {
            registers: registers.clone(),
            hardware: hardware.clone(),
            bank_bytes: config.bank_bytes,
            bank_count: config.bank_count,
            builtins,
            loaders: config.loaders.clone(),
            stop: stop.clone(),
            desks: (0..config.regions).map(|_| RegionDesk::default()).collect(),
            rings: RingDesk::default(),
            command_limit: config.command_limit,
            spin: config.spin,
            heartbeat: config.heartbeat,
            wake: wake.clone(),
        });
        let workers =
            (0..config.regions).map(|index| Worker::new(index, shop.clone(), crowd.clone())).collect();
        let desk = Arc::new(CopyDesk::default());
        let device = config.network.as_ref().map(|network| &network.device);
        let copies = Copies::new(
            hardware.clone(),
            desk.clone(),
            crowd.clone(),
            stop.clone(),
            Idle { spin: config.spin, heartbeat: config.heartbeat },
            device,
        )?;
        let warden = Warden::new(Parts {
            hardware: hardware.clone(),
            shop: shop.clone(),
            crowd,
            copies: desk,
            port,
            wake,
            stop: stop.clone(),
            lease: config.lease,
            grace: config.grace,
        });
        hardware.complete(directory.iter().map(|(id, name)| (*id, name.as_str())));
        Ok(Inside { hardware, shop, stop, workers, warden, copies })
    }
}

/// Unpredictable; the standard library's hash keys come from the operating system.
fn random() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _};
    std::hash::RandomState::new().build_hasher().finish()
}

/// A user of the card.
struct User {
    connection: Connection,
    /// Nothing until the user has made its request.
    role: Option<Role>,
    /// Its number for the lease word, with the role.
    node: u32,
}

/// The card's side of all connections.
struct Desk<'a> {
    uid: u32,
    listener: Listener,
    thread_ended: PipeReader,
    lifetime: Lifetime,
    /// Meaningful while the card waits for its owner.
    claim_before: Instant,
    users: Vec<User>,
    hardware: &'a Hardware,
    crowd: &'a Crowd,
    wake: &'a EventFd,
}

impl Desk<'_> {
    /// Serves connections until the card's life ends; `None` if one of its threads ended first.
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
            let mut watched: Vec<BorrowedFd<'_>> =
                vec![self.thread_ended.as_fd(), self.listener.as_fd(), self.hardware.replaced.as_fd()];
            if let Lifetime::Launcher(fd) = &self.lifetime {
                watched.push(fd.as_fd());
            }
            let first_user = watched.len();
            watched.extend(self.users.iter().map(|user| user.connection.as_fd()));
            let ready = poll_readable(&watched, timeout).doing("wait for users")?;

            if ready[0] {
                return Ok(None);
            }
            if first_user == 4 && ready[3] {
                return Ok(Some(End::LauncherGone));
            }
            if ready[2] && !self.part() {
                return Ok(Some(End::OwnerGone));
            }
            // Backwards, because a user whose connection ends leaves the list.
            for index in (0..self.users.len()).rev() {
                if ready.get(first_user + index) == Some(&true) && !self.hear(index) {
                    let gone = self.users.swap_remove(index);
                    if gone.role.is_some() {
                        self.crowd.leave_local(gone.node);
                        self.wake.signal();
                    }
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

    /// Ends all connections: what the users have mapped is not card memory any more. False if the owner's was
    /// among them.
    fn part(&mut self) -> bool {
        self.hardware.replaced.clear();
        let generation = self.hardware.generation();
        let owned = self.is_owned();
        for user in self.users.drain(..) {
            if user.role.is_some() {
                self.crowd.leave_local(user.node);
            }
        }
        self.hardware.set_parted(generation);
        self.wake.signal();
        !owned
    }

    fn is_unclaimed(&self) -> bool {
        matches!(self.lifetime, Lifetime::Owner { .. }) && !self.is_owned()
    }

    fn is_owned(&self) -> bool {
        self.users.iter().any(|user| user.role == Some(Role::Owner))
    }

    /// Takes a new connection, if it is one for us.
    fn welcome(&mut self) -> Result<(), OsError> {
        let accepted = self.listener.accept_any_user();
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
            None => self.users.push(User { connection, role: None, node: 0 }),
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
                let (hardware, memory) = (self.hardware, self.hardware.memory());
                let Some(shared) = memory.backing().shared() else {
                    refuse(&user.connection, Refusal::NotMappable);
                    return false;
                };
                user.role = Some(role);
                user.node = self.crowd.join_local();
                let fds = [hardware.bar0.fd(), shared, hardware.interrupt_fd.as_fd()];
                let answer = Answer { node: user.node, ..Answer::new(Ok(memory.size())) };
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
