//! The card process: creates memory and registers, starts the threads, serves local users, and ends as its
//! [`Lifetime`] says.
//!
//! File descriptors hold all resources of a card, so the system frees them when a card is killed. Its users
//! see the end of their connection.

use std::io::{self, ErrorKind, PipeReader};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use millstream_card_abi::command::{CAPABILITY_NETWORK, CAPABILITY_POLLING, nanos};
use millstream_card_abi::hello::ServerHello;
use millstream_card_abi::ipc::{OpenReply, OpenRequest, Refusal, Role};
use millstream_card_abi::registers::{
    KERNEL_ENTRY_BYTES, MAGIC, MAX_BANKS, MAX_KERNELS, MAX_REGIONS, Registers, VERSION,
};
use millstream_card_abi::{CardName, IoContext as _, SyscallError};
use millstream_rdma::{Device, VerbsError};
use millstream_shm::datagram::{Received, receive};
use millstream_shm::socket::{Connection, Listener, own_uid};
use millstream_shm::{EventFd, PAGE, futex, poll_readable, random_u64};
use millstream_tls::Security;

use crate::backing::{BackingKind, DevicePaths};
use crate::hardware::{Hardware, HardwareConfig, HardwareError};
use crate::kernel::builtin::BUILTINS;
use crate::kernel::gpu::PtxLoader;
use crate::kernel::{BuiltinKernel, KernelLoader};
use crate::lease_controller::{LeaseController, Resources};
use crate::net::clients::ClientRegistry;
use crate::net::dma::{DmaControl, DmaEngine};
use crate::net::port::NetworkPort;
use crate::polling::PollPolicy;
use crate::queue::QueueEngine;
use crate::queue::control::QueueControl;
use crate::region::context::RegionContext;
use crate::region::control::RegionControl;
use crate::region::slot::KernelSlot;
use crate::region::worker::RegionWorker;
use crate::windows::{WindowCloser, WindowControl};

/// Most local connections at a time.
const MAX_CONNECTIONS: usize = 64;

/// Spin time from which a card counts as polling.
const POLLING: Duration = Duration::from_secs(3600);

/// When a card ends without being killed.
#[derive(Debug)]
pub enum Lifetime {
    /// Never.
    Unbounded,
    /// When this descriptor becomes readable or hangs up. It is the read end of a pipe that the launcher
    /// holds open, or a pidfd of the launcher.
    Launcher(OwnedFd),
    /// When the connection ends that opened the card as its owner, or when no owner connects in time.
    Owner {
        /// Time for an owner to connect.
        claim_timeout: Duration,
    },
}

/// The network interface of a card.
#[derive(Debug)]
pub struct NetworkConfig {
    /// Its verbs device.
    pub device: Device,
    /// Where it listens for clients, for example `[::]:7480`; port 0 takes any free one.
    pub address: String,
}

/// Configuration of a card.
#[derive(Debug)]
pub struct CardConfig {
    /// Name under which processes of the same user find it.
    pub name: CardName,
    /// Size of one memory bank (bytes), a multiple of 4096.
    pub bank_bytes: u64,
    /// Number of banks.
    pub bank_count: u32,
    /// Allocate all pages at the start. Without it, the first touch of a page allocates it.
    pub prefault: bool,
    /// Request huge pages. The system may not grant them.
    pub huge_pages: bool,
    /// How long threads poll for further work before they sleep. Polling answers sooner and uses a processor.
    pub spin: Duration,
    /// Longest time between two heartbeats of an idle card. Also the longest delay of a doorbell that a
    /// client rings without immediate data: such an RDMA WRITE cannot wake the card.
    pub heartbeat: Duration,
    /// When the card ends.
    pub lifetime: Lifetime,
    /// Size of BAR2, the DMA window (bytes), a multiple of 4096.
    pub bar2_bytes: u64,
    /// Number of regions, 1 to 8.
    pub regions: usize,
    /// Kernels beyond those of every card.
    pub kernels: Vec<BuiltinKernel>,
    /// Loaders of kernel images.
    pub loaders: Vec<Arc<dyn KernelLoader>>,
    /// Time from a heartbeat to the expiry of a lease, unless its holder sets another one.
    pub lease_duration: Duration,
    /// Network interface, if the card has one.
    pub network: Option<NetworkConfig>,
    /// Keys of the card for its clients on the network and for peer cards; without, it trusts the network.
    pub security: Security,
    /// Kind of card memory.
    pub memory_kind: BackingKind,
    /// Where devices are found.
    pub device_paths: DevicePaths,
    /// Time for an interrupted kernel to reach a safe point before it is declared hung.
    pub grace: Duration,
    /// Longest time of one command, unless the user of the rings sets another one.
    pub command_timeout: Duration,
}

impl CardConfig {
    /// A card with one bank of `bank_bytes` that sleeps when idle and does not end on its own.
    pub fn new(name: CardName, bank_bytes: u64) -> CardConfig {
        CardConfig {
            name,
            bank_bytes,
            bank_count: 1,
            prefault: false,
            huge_pages: false,
            spin: Duration::from_micros(20),
            heartbeat: Duration::from_millis(100),
            lifetime: Lifetime::Unbounded,
            bar2_bytes: 16 << 20,
            regions: 2,
            kernels: Vec::new(),
            loaders: Vec::new(),
            lease_duration: Duration::from_secs(5),
            network: None,
            security: Security::NONE,
            memory_kind: BackingKind::Emulated,
            device_paths: DevicePaths::default(),
            grace: Duration::from_secs(5),
            command_timeout: Duration::from_secs(60),
        }
    }

    /// A card of `memory_bytes`, rounded up to whole pages, that ends when standard input closes: for a process that a
    /// launcher starts.
    ///
    /// # Errors
    /// Standard input cannot be watched.
    pub fn for_launcher(name: CardName, memory_bytes: u64, spin: Duration) -> Result<CardConfig, ServeError> {
        let launcher = io::stdin().as_fd().try_clone_to_owned().context("watch standard input")?;
        let mut config = CardConfig::new(name, memory_bytes.next_multiple_of(PAGE as u64));
        config.lifetime = Lifetime::Launcher(launcher);
        config.spin = spin;
        Ok(config)
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
        if self.bar2_bytes == 0 || !self.bar2_bytes.is_multiple_of(PAGE as u64) || self.bar2_bytes >= 1 << 40
        {
            return Err(ServeError::Bar2Size(self.bar2_bytes));
        }
        if !(1..=MAX_REGIONS).contains(&self.regions) {
            return Err(ServeError::Regions(self.regions));
        }
        Ok(())
    }

    /// The kernel directory: number and kernel.
    fn kernel_directory(&self) -> Result<Vec<(u32, BuiltinKernel)>, ServeError> {
        let kernels: Vec<_> = BUILTINS.iter().chain(&self.kernels).copied().collect();
        if kernels.len() > MAX_KERNELS {
            return Err(ServeError::TooManyKernels(kernels.len()));
        }
        for (index, kernel) in kernels.iter().enumerate() {
            let name = kernel.name;
            if name.is_empty() || name.len() > KERNEL_ENTRY_BYTES - 4 {
                return Err(ServeError::KernelName(name));
            }
            if kernels[..index].iter().any(|other| other.name == name) {
                return Err(ServeError::DuplicateKernel(name));
            }
        }
        Ok((1..).zip(kernels).collect())
    }
}

/// Why a card cannot run, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Bad number or size of the banks.
    #[error(
        "card memory of {bank_count} banks of {bank_bytes} bytes: \
         expected 1 to {MAX_BANKS} banks of a multiple of {PAGE} bytes"
    )]
    BankSize {
        /// Size of a bank (bytes).
        bank_bytes: u64,
        /// Number of banks.
        bank_count: u32,
    },
    /// Bad size of BAR2.
    #[error("BAR2 of {0} bytes: expected a multiple of {PAGE} bytes below 1 TiB")]
    Bar2Size(u64),
    /// Bad number of regions.
    #[error("card of {0} regions: expected 1 to {MAX_REGIONS}")]
    Regions(usize),
    /// A kernel name does not fit into the directory.
    #[error("kernel name {0:?} has {len} bytes, expected 1 to {max}", len = .0.len(), max = KERNEL_ENTRY_BYTES - 4)]
    KernelName(&'static str),
    /// Two kernels have one name.
    #[error("kernel {0:?} is configured twice, or is a kernel of every card")]
    DuplicateKernel(&'static str),
    /// The directory is full.
    #[error("card of {0} kernels: expected at most {MAX_KERNELS}")]
    TooManyKernels(usize),
    /// The network interface failed.
    #[error("network of the card: {0}")]
    Network(#[from] VerbsError),
    /// Another card of this user has the name.
    #[error("card {0} is running already")]
    NameTaken(CardName),
    /// A thread of the card panicked; its own message says why.
    #[error("a thread of card {0} failed")]
    ThreadFailed(CardName),
    /// Memory or registers could not be created.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] SyscallError),
}

/// Why a card ended as configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// Its launcher has exited.
    LauncherExited,
    /// Its owner's connection has ended.
    OwnerDisconnected,
    /// No owner connected in time.
    OwnerTimeout,
}

/// The end of a thread of the card, also by a panic: the read end of the pipe becomes readable.
struct ThreadEnd(io::PipeWriter);

impl Drop for ThreadEnd {
    fn drop(&mut self) {
        use std::io::Write as _;
        // If the card is ending already, no thread reads it.
        let _ = self.0.write_all(b"!");
    }
}

/// Runs a card in this process until its [`Lifetime`] ends.
pub fn serve(config: CardConfig) -> Result<ExitReason, ServeError> {
    serve_with(config, |_| {})
}

/// Runs a card as [`serve`] does. Calls `ready` once the card can be opened, with the address at which it listens
/// for clients.
pub fn serve_with(
    config: CardConfig,
    ready: impl FnOnce(Option<SocketAddr>),
) -> Result<ExitReason, ServeError> {
    let uid = own_uid();
    config.check()?;
    // Listening comes first because it reserves the name. A user that connects now waits for the reply until the
    // memory is allocated.
    let listener = match Listener::bind(&config.name.address(uid)) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            return Err(ServeError::NameTaken(config.name));
        }
        other => other.context("listen on the card's socket")?,
    };
    listener.set_nonblocking();
    let parts = CardParts::new(&config)?;
    let CardParts {
        hardware,
        context,
        clients,
        dma_control,
        workers,
        mut controller,
        mut dma_engine,
        window_closer,
    } = parts;
    ready(controller.resources.port.as_ref().map(NetworkPort::address));
    let (thread_ended, alive) = io::pipe().context("watch the card's threads")?;
    let start = |what: &str, run: Box<dyn FnOnce() -> Result<(), ServeError> + Send>| {
        let alive = ThreadEnd(alive.try_clone().context("watch the card's threads")?);
        thread::Builder::new()
            .name(format!("{what} {}", config.name))
            .spawn(move || {
                let _alive = alive;
                run()
            })
            .context("start a thread of the card")
    };
    let on_other_doorbell = {
        let (context, dma_control) = (context.clone(), dma_control.clone());
        move || {
            if is_anything_new(&context.registers, context.regions.len()) {
                context.regions.iter().for_each(RegionControl::notify);
                dma_control.notify();
                context.controller_wake.signal();
            }
        }
    };
    let mut queue =
        QueueEngine::new(context.clone(), hardware.interrupt_fd.clone(), Box::new(on_other_doorbell));
    let mut threads = vec![start("queue", Box::new(move || Ok(queue.run()?)))?];
    for mut worker in workers {
        threads.push(start(
            "region",
            Box::new(move || {
                worker.serve();
                Ok(())
            }),
        )?);
    }
    if config.network.is_some() {
        threads.push(start(
            "windows",
            Box::new(move || {
                window_closer.serve();
                Ok(())
            }),
        )?);
    }
    threads.push(start("lease", Box::new(move || Ok(controller.serve()?)))?);
    threads.push(start(
        "dma",
        Box::new(move || {
            dma_engine.serve();
            Ok(())
        }),
    )?);

    let mut server = ConnectionServer {
        uid,
        listener,
        thread_ended,
        lifetime: config.lifetime,
        claim_deadline: Instant::now(),
        users: Vec::new(),
        hardware: &hardware,
        clients: &clients,
        controller_wake: &context.controller_wake,
    };
    let ended = server.run();
    context.stop.store(true, Ordering::SeqCst);
    context.queue.close();
    // The stop flag is not the futex word, so this wake can come too early. Then the queue sleeps for one
    // more heartbeat period.
    futex::wake_all(hardware.registers.doorbell());
    context.regions.iter().for_each(|region| {
        region.request_interrupt();
        region.notify();
    });
    dma_control.notify();
    context.controller_wake.signal();
    let deadline = Instant::now() + config.grace;
    for thread in threads {
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        // The thread of a hung kernel, and one that waits for the GPU which it holds, live until the process exits.
        if !thread.is_finished() {
            continue;
        }
        match thread.join() {
            Ok(ended) => ended?,
            Err(_) => return Err(ServeError::ThreadFailed(config.name)),
        }
    }
    ended?.ok_or(ServeError::ThreadFailed(config.name))
}

/// Whether a local user has written a register other than the queue's. All share one doorbell, and a busy
/// queue must not wake the other threads with every command.
fn is_anything_new(registers: &Registers, regions: usize) -> bool {
    let get = |word: &AtomicU64| word.load(Ordering::Acquire);
    let epoch = get(registers.lease_epoch());
    let holder = registers.lease_holder().load(Ordering::Acquire);
    get(registers.lease_word()) != millstream_card_abi::lease::pack(epoch as u32, holder)
        || get(registers.lease_release()) == epoch
        || get(registers.lease_revoke()) == epoch
        || get(registers.card_command()) != get(registers.card_command_ack())
        || get(registers.dma_producer()) != get(registers.dma_consumer())
        || (0..regions).any(|index| {
            let region = registers.region(index);
            get(region.doorbell()) != get(region.doorbell_ack())
        })
}

/// The parts of a card, before its threads start.
struct CardParts {
    hardware: Arc<Hardware>,
    context: Arc<RegionContext>,
    clients: Arc<ClientRegistry>,
    dma_control: Arc<DmaControl>,
    workers: Vec<RegionWorker>,
    controller: LeaseController,
    dma_engine: DmaEngine,
    window_closer: WindowCloser,
}

impl CardParts {
    fn new(config: &CardConfig) -> Result<CardParts, ServeError> {
        let builtin_kernels = config.kernel_directory()?;
        let hardware = Arc::new(Hardware::new(&HardwareConfig {
            memory_kind: &config.memory_kind,
            device_paths: &config.device_paths,
            bank_bytes: config.bank_bytes,
            bank_count: config.bank_count,
            bar2_bytes: config.bar2_bytes,
            prefault: config.prefault,
            huge_pages: config.huge_pages,
            for_adapter: config.network.as_ref().is_some_and(|network| !network.device.is_soft()),
        })?);
        let registers = hardware.registers.clone();
        let stop = Arc::new(AtomicBool::new(false));
        let controller_wake = Arc::new(EventFd::latch().context("create an event descriptor")?);
        let card = random_u64();
        let clients = Arc::new(ClientRegistry::new(card, registers.clone()));

        let set = Ordering::Relaxed;
        let mut capabilities = registers.capabilities().load(set);
        if config.network.is_some() {
            capabilities |= CAPABILITY_NETWORK;
        }
        if config.spin >= POLLING {
            capabilities |= CAPABILITY_POLLING;
        }
        registers.capabilities().store(capabilities, set);
        registers.region_count().store(config.regions as u32, set);
        registers.card_id().store(card, set);
        registers.default_command_timeout_ns().store(nanos(config.command_timeout), set);
        let hello = ServerHello {
            magic: MAGIC,
            version: VERSION,
            card,
            memory_bytes: hardware.memory().size(),
            bank_bytes: config.bank_bytes,
            bank_count: config.bank_count,
            region_count: config.regions as u32,
            capabilities,
            bar2_bytes: config.bar2_bytes,
            ..ServerHello::default()
        };
        let port = match &config.network {
            None => None,
            Some(NetworkConfig { device, address }) => Some(NetworkPort::open(
                device,
                (address, &config.security),
                &hardware.bar0,
                hello,
                &clients,
                controller_wake.clone(),
            )?),
        };
        let directory: Vec<_> = builtin_kernels.iter().map(|(id, kernel)| (*id, kernel.name)).collect();
        let mut loaders = config.loaders.clone();
        if let Some(gpu_memory) = hardware.memory().gpu_memory() {
            loaders.push(Arc::new(PtxLoader::new(gpu_memory.gpu().clone())));
        }
        let polling = PollPolicy { spin: config.spin, heartbeat: config.heartbeat };
        let context = Arc::new(RegionContext {
            registers,
            hardware: hardware.clone(),
            started: Instant::now(),
            bank_bytes: config.bank_bytes,
            bank_count: config.bank_count,
            builtin_kernels,
            loaders,
            stop: stop.clone(),
            regions: (0..config.regions).map(|_| RegionControl::default()).collect(),
            kernels: (0..config.regions).map(|_| KernelSlot::default()).collect(),
            queue: QueueControl::default(),
            command_timeout: config.command_timeout,
            polling,
            controller_wake,
        });
        let workers = (0..config.regions)
            .map(|index| RegionWorker::new(index, context.clone(), clients.clone()))
            .collect();
        let dma_control = Arc::new(DmaControl::default());
        let network = config.network.as_ref().map(|network| (&network.device, &config.security));
        let dma_engine = DmaEngine::new(
            (hardware.clone(), config.bank_bytes),
            dma_control.clone(),
            clients.clone(),
            stop.clone(),
            polling,
            network,
        )?;
        let (window_control, window_closer) = WindowControl::new(stop, context.controller_wake.clone());
        let controller = LeaseController::new(Resources {
            hardware: hardware.clone(),
            context: context.clone(),
            clients: clients.clone(),
            dma: dma_control.clone(),
            window_control,
            port,
            lease_duration: config.lease_duration,
            grace: config.grace,
        });
        hardware.publish_directory(&directory);
        Ok(CardParts {
            hardware,
            context,
            clients,
            dma_control,
            workers,
            controller,
            dma_engine,
            window_closer,
        })
    }
}

/// A connection of a local user.
struct UserConnection {
    connection: Connection,
    /// None until the user has sent its request.
    role: Option<Role>,
    /// Its id for the lease word, once it has a role.
    client: u32,
}

/// Serves the connections of local users.
struct ConnectionServer<'a> {
    uid: u32,
    listener: Listener,
    thread_ended: PipeReader,
    lifetime: Lifetime,
    /// When the card ends without an owner.
    claim_deadline: Instant,
    users: Vec<UserConnection>,
    hardware: &'a Hardware,
    clients: &'a ClientRegistry,
    controller_wake: &'a EventFd,
}

impl ConnectionServer<'_> {
    /// Serves connections until the card's lifetime ends; `None` if one of its threads ended first.
    fn run(&mut self) -> Result<Option<ExitReason>, SyscallError> {
        if let Lifetime::Owner { claim_timeout } = self.lifetime {
            self.claim_deadline = Instant::now() + claim_timeout;
        }
        loop {
            let timeout = if self.is_unclaimed() {
                let left = self.claim_deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(Some(ExitReason::OwnerTimeout));
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
            let ready = poll_readable(&watched, timeout).context("wait for users")?;

            if ready[0] {
                return Ok(None);
            }
            if first_user == 4 && ready[3] {
                return Ok(Some(ExitReason::LauncherExited));
            }
            if ready[2] && !self.disconnect_all() {
                return Ok(Some(ExitReason::OwnerDisconnected));
            }
            // In reverse order, because a user whose connection ends leaves the list.
            for index in (0..self.users.len()).rev() {
                if ready.get(first_user + index) == Some(&true) && !self.handle_request(index) {
                    let gone = self.users.swap_remove(index);
                    if gone.role.is_some() {
                        self.clients.remove_local(gone.client);
                        self.controller_wake.signal();
                    }
                    if gone.role == Some(Role::Owner) {
                        return Ok(Some(ExitReason::OwnerDisconnected));
                    }
                }
            }
            if ready[1] {
                self.accept()?;
            }
        }
    }

    /// Ends all connections, because the users have mapped memory that was replaced. False if the owner's was
    /// among them.
    fn disconnect_all(&mut self) -> bool {
        self.hardware.replaced.clear();
        let generation = self.hardware.generation();
        let owned = self.is_owned();
        for user in self.users.drain(..) {
            if user.role.is_some() {
                self.clients.remove_local(user.client);
            }
        }
        self.hardware.set_disconnected(generation);
        self.controller_wake.signal();
        !owned
    }

    fn is_unclaimed(&self) -> bool {
        matches!(self.lifetime, Lifetime::Owner { .. }) && !self.is_owned()
    }

    fn is_owned(&self) -> bool {
        self.users.iter().any(|user| user.role == Some(Role::Owner))
    }

    /// Accepts or refuses a new connection.
    fn accept(&mut self) -> Result<(), SyscallError> {
        let accepted = self.listener.accept_any_user();
        let gone = [ErrorKind::WouldBlock, ErrorKind::ConnectionAborted, ErrorKind::Interrupted];
        if accepted.as_ref().is_err_and(|error| gone.contains(&error.kind())) {
            // The peer closed the connection between poll and accept.
            return Ok(());
        }
        if let Some(pause) = accepted.as_ref().err().and_then(Listener::pause) {
            // The connection stays pending.
            thread::sleep(pause);
            return Ok(());
        }
        let connection = accepted.context("accept a connection")?;
        connection.set_nonblocking().context("accept a connection")?;
        let refusal = if connection.peer().uid != self.uid {
            Some(Refusal::OtherUser)
        } else if self.users.len() == MAX_CONNECTIONS {
            Some(Refusal::TooManyConnections)
        } else {
            None
        };
        match refusal {
            Some(refusal) => refuse(&connection, refusal),
            None => self.users.push(UserConnection { connection, role: None, client: 0 }),
        }
        Ok(())
    }

    /// Handles the request of a user; false if its connection has to end.
    fn handle_request(&mut self, index: usize) -> bool {
        let claimable = self.is_unclaimed();
        let user = &mut self.users[index];
        let request = match receive(&user.connection) {
            Received::Nothing => return true,
            Received::Message(bytes, _) if user.role.is_none() => bytes,
            // There is one request per connection; later the connection only shows that both sides are alive.
            Received::Message(..) | Received::Malformed | Received::Closed => return false,
        };
        let role = match OpenRequest::from_bytes(&request).role() {
            Ok(Role::Owner) if !claimable => Err(Refusal::OwnerRejected),
            other => other,
        };
        match role {
            Ok(role) => {
                let (hardware, memory) = (self.hardware, self.hardware.memory());
                let Some(shared) = memory.backing().shared_fd() else {
                    refuse(&user.connection, Refusal::NotMappable);
                    return false;
                };
                user.role = Some(role);
                user.client = self.clients.add_local();
                let fds = [hardware.bar0.fd(), shared, hardware.interrupt_fd.as_fd()];
                let mut reply = OpenReply { client: user.client, ..OpenReply::new(Ok(memory.size())) };
                if let Some(gpu_memory) = memory.gpu_memory() {
                    reply = reply.of_gpu(gpu_memory.gpu().uuid());
                }
                user.connection.send(&reply.to_bytes(), &fds).is_ok()
            }
            Err(refusal) => {
                refuse(&user.connection, refusal);
                false
            }
        }
    }
}

fn refuse(connection: &Connection, refusal: Refusal) {
    // A peer that has closed the connection needs no reply.
    let _ = connection.send(&OpenReply::new(Err(refusal)).to_bytes(), &[]);
}
