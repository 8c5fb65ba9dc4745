//! A card of this host: opened by name, with mapped registers and memory.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use millstream_card_abi::codes::{LeaseState, MemoryKind, RegionCommand};
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::image::image_hash;
use millstream_card_abi::ipc::{OpenReply, OpenRequest, Refusal, Role};
use millstream_card_abi::lease;
use millstream_card_abi::registers::{BAR0_BYTES, MAGIC, Registers, VERSION};
use millstream_card_abi::{CardName, IoContext as _, MappedMemory, MemoryRange, SyscallError};
use millstream_gpu::{HostVisible, VulkanError, vulkan_loader};
use millstream_shm::datagram::{Received, receive};
use millstream_shm::socket::{Connection, own_uid};
use millstream_shm::{EventFd, Mapping, Memfd, file_len, futex, is_sealed, is_sysfs};

/// Time between two attempts to connect to a card that is not running yet.
const RETRY_PERIOD: Duration = Duration::from_millis(5);

/// Time within which a running card answers, also on a busy host.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a card cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No card of this name serves this user.
    #[error("no card {0} on this host")]
    NotFound(CardName),
    /// A process of another user listens at the card's address.
    #[error("address of card {name} is used by user {uid}")]
    ForeignUser {
        /// The requested card.
        name: CardName,
        /// That user.
        uid: u32,
    },
    /// The card did not answer in time.
    #[error("card {0} does not answer")]
    NoAnswer(CardName),
    /// The card ended while it was opened.
    #[error("card {0} closed the connection")]
    Closed(CardName),
    /// The card refused the connection.
    #[error("card {name}: {refusal}")]
    Refused {
        /// The requested card.
        name: CardName,
        /// Its reason.
        refusal: Refusal,
    },
    /// The reply is malformed.
    #[error("card {name}: {what}")]
    Malformed {
        /// The requested card.
        name: CardName,
        /// The error in the reply.
        what: &'static str,
    },
    /// The GPU that the card's memory belongs to cannot be mapped.
    #[error("card {name}: its memory cannot be mapped: {cause}")]
    Gpu {
        /// The requested card.
        name: CardName,
        /// The driver's reason.
        cause: VulkanError,
    },
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] SyscallError),
}

/// The card does not have a kernel of this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("card has no kernel {name:?}; it has: {}", available.join(", "))]
pub struct NoSuchKernel {
    /// The requested name.
    pub name: String,
    /// The names of the card's kernels.
    pub available: Vec<String>,
}

/// An open card. Clones share one connection; the connection, and with it ownership, ends with the
/// last of them.
#[derive(Clone, Debug)]
pub struct Card {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: CardName,
    registers: Registers,
    memory: MappedMemory,
    memory_fd: OwnedFd,
    bar0_fd: OwnedFd,
    interrupt_fd: EventFd,
    connection: Connection,
    client: u32,
}

/// Why a command to a card of this host failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// Another client holds the lease.
    #[error("card {card} is leased to client {holder:#x} (epoch {epoch})")]
    Leased {
        /// The card.
        card: CardName,
        /// The holder.
        holder: u32,
        /// Epoch of its lease.
        epoch: u32,
    },
    /// The card did not execute the command in time.
    #[error("card {0} does not execute a command; check that it is running")]
    NoAnswer(CardName),
    /// The card does not have the kernel.
    #[error(transparent)]
    NoSuchKernel(#[from] NoSuchKernel),
    /// The card rejected the command.
    #[error("card {card}: region {region}: {fault}")]
    Refused {
        /// The card.
        card: CardName,
        /// The region.
        region: usize,
        /// The card's fault.
        fault: Fault,
    },
}

impl Card {
    /// Opens the card `name` of this user. Waits up to `timeout` for a card that is starting.
    pub fn open(name: &CardName, timeout: Duration) -> Result<Card, OpenError> {
        Card::open_as(name, Role::User, timeout)
    }

    /// Opens the card as its owner: the card ends with this connection. The card must have been started with
    /// the lifetime `Owner` and have no owner yet.
    pub fn open_as_owner(name: &CardName, timeout: Duration) -> Result<Card, OpenError> {
        Card::open_as(name, Role::Owner, timeout)
    }

    fn open_as(name: &CardName, role: Role, timeout: Duration) -> Result<Card, OpenError> {
        let deadline = Instant::now() + timeout;
        let connection = connect(name, deadline)?;
        // If this fails, the receive below returns the reason.
        let _ = connection.send(&OpenRequest::new(role).to_bytes(), &[]);
        let (bytes, fds) = match receive(&connection) {
            Received::Message(bytes, fds) => (bytes, fds),
            Received::Malformed => return Err(malformed(name, "reply has the wrong length")),
            Received::Nothing => return Err(OpenError::NoAnswer(name.clone())),
            Received::Closed => return Err(OpenError::Closed(name.clone())),
        };
        let reply = OpenReply::from_bytes(&bytes);
        let memory_bytes =
            reply.outcome().map_err(|refusal| OpenError::Refused { name: name.clone(), refusal })?;
        let [bar0_fd, memory_fd, interrupt_fd]: [OwnedFd; 3] =
            fds.try_into().map_err(|_| malformed(name, "reply does not carry three descriptors"))?;
        let (bar0_fd, bar0) = map(name, bar0_fd, BAR0_BYTES as u64)?;
        let registers = Registers::new(bar0);
        if registers.magic().load(Ordering::Acquire) != MAGIC
            || registers.version().load(Ordering::Relaxed) != VERSION
        {
            return Err(malformed(name, "BAR0 does not contain the registers of a compatible card"));
        }
        let kind = registers.memory_kind().load(Ordering::Relaxed);
        let (memory_fd, memory) = match MemoryKind::from_code(kind) {
            Some(MemoryKind::Pci) => map_bar(name, memory_fd, memory_bytes)?,
            Some(MemoryKind::Cuda) => map_gpu(name, memory_fd, &reply, memory_bytes)?,
            _ => {
                let (fd, mapping) = map(name, memory_fd, memory_bytes)?;
                (fd, MappedMemory::new(Arc::new(mapping)))
            }
        };
        Ok(Card {
            inner: Arc::new(Inner {
                name: name.clone(),
                registers,
                memory,
                memory_fd,
                bar0_fd,
                interrupt_fd: EventFd::from_fd(interrupt_fd),
                connection,
                client: reply.client,
            }),
        })
    }

    /// Acquires the card's lease. Waits up to `timeout` while another client holds it. The lease ends with the
    /// connection and needs no heartbeats. Returns its epoch.
    ///
    /// # Errors
    /// [`CommandError`] if the lease is not free, or the card does not answer.
    pub fn acquire(&self, timeout: Duration) -> Result<u32, CommandError> {
        let (registers, client) = (self.registers(), self.inner.client);
        let deadline = Instant::now() + timeout;
        let epoch = loop {
            let word = registers.lease_word().load(Ordering::Acquire);
            let (epoch, holder) = lease::unpack(word);
            if holder != 0 {
                if Instant::now() >= deadline {
                    return Err(CommandError::Leased { card: self.name().clone(), holder, epoch });
                }
                std::thread::sleep(RETRY_PERIOD);
                continue;
            }
            let mine = lease::pack(epoch, client);
            let swapped =
                registers.lease_word().compare_exchange(word, mine, Ordering::SeqCst, Ordering::Relaxed);
            if swapped.is_ok() {
                break epoch;
            }
        };
        self.ring_doorbell();
        self.wait_until(|| registers.lease_holder().load(Ordering::Acquire) == client)?;
        Ok(epoch)
    }

    /// Whether this client holds the lease with this epoch.
    #[must_use]
    pub fn holds(&self, epoch: u32) -> bool {
        let registers = self.registers();
        // Read before the word, which the card changes before it leaves the state Clearing.
        let is_clearing = registers.lease_state().load(Ordering::Acquire) == LeaseState::Clearing as u32;
        !is_clearing
            && registers.lease_word().load(Ordering::Acquire) == lease::pack(epoch, self.inner.client)
    }

    /// Begins an access to mapped card memory under the lease of this client with this epoch; none if the lease has
    /// ended. The card does not clear its memory for the next holder during the access, unless it lasts longer than
    /// the grace period.
    #[must_use]
    pub fn access(&self, epoch: u32) -> Option<MemoryAccess<'_>> {
        let registers = self.registers();
        registers.lease_accesses().fetch_add(1, Ordering::SeqCst);
        let access = MemoryAccess { registers };
        // The card stores its state, and then reads the number of accesses.
        fence(Ordering::SeqCst);
        self.holds(epoch).then_some(access)
    }

    /// Loads a kernel of the directory into a region.
    ///
    /// # Errors
    /// [`CommandError`] with the cause that the card names.
    pub fn load(&self, region: usize, kernel: &str) -> Result<(), CommandError> {
        self.load_while(region, kernel, || true)
    }

    /// As [`Card::load`]. `goes_on` ends the wait for the card early: for example, when a lease has ended.
    ///
    /// # Errors
    /// As [`Card::load`]; [`CommandError::NoAnswer`] if `goes_on` is false.
    pub fn load_while(
        &self,
        region: usize,
        kernel: &str,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), CommandError> {
        let number = self.kernel_number(kernel)?;
        self.load_kernel(region, number.into(), MemoryRange::new(0, 0), 0, goes_on)
    }

    /// Writes a kernel's image to card memory at `at`, and loads it into a region. A card needs a loader for it.
    ///
    /// # Errors
    /// [`CommandError`] with the cause that the card names.
    pub fn load_image(&self, region: usize, image: &[u8], at: u64) -> Result<(), CommandError> {
        let place = MemoryRange::new(at, image.len() as u64);
        self.memory().write(at, image).map_err(|error| CommandError::Refused {
            card: self.name().clone(),
            region,
            fault: error.fault(Cause::ImageOutsideMemory),
        })?;
        self.load_kernel(region, 0, place, image_hash(image), || true)
    }

    fn load_kernel(
        &self,
        region: usize,
        number: u64,
        image: MemoryRange,
        hash: u64,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), CommandError> {
        let control = self.registers().region(region);
        control.kernel().store(number, Ordering::Relaxed);
        control.image_base().store(image.offset, Ordering::Relaxed);
        control.image_bytes().store(image.len, Ordering::Relaxed);
        control.image_hash().store(hash, Ordering::Relaxed);
        let word = (control.doorbell().load(Ordering::Relaxed) >> 8).wrapping_add(1) << 8
            | RegionCommand::Load as u64;
        control.doorbell().store(word, Ordering::Release);
        self.ring_doorbell();
        self.wait_until_or_while(|| control.doorbell_ack().load(Ordering::Acquire) == word, goes_on)?;
        match control.cause().load(Ordering::Acquire) {
            0 => Ok(()),
            code => {
                let fault = Fault::new(Cause::from_code(code), control.detail().load(Ordering::Relaxed));
                Err(CommandError::Refused { card: self.name().clone(), region, fault })
            }
        }
    }

    /// Waits until `done`; a sleeping card reads its registers once per heartbeat period.
    fn wait_until(&self, done: impl Fn() -> bool) -> Result<(), CommandError> {
        self.wait_until_or_while(done, || true)
    }

    /// As `wait_until`, while `goes_on`.
    fn wait_until_or_while(
        &self,
        done: impl Fn() -> bool,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), CommandError> {
        let deadline = Instant::now() + 10 * ANSWER_TIMEOUT;
        while !done() {
            if Instant::now() >= deadline || !goes_on() || !self.is_alive() {
                return Err(CommandError::NoAnswer(self.name().clone()));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// The card's name.
    pub fn name(&self) -> &CardName {
        &self.inner.name
    }

    /// BAR0.
    pub fn registers(&self) -> &Registers {
        &self.inner.registers
    }

    /// Card memory, mapped.
    pub fn memory(&self) -> &MappedMemory {
        &self.inner.memory
    }

    /// Whether the memory is a GPU's. Then [`Card::memory_fd`] cannot be registered: register the mapping.
    pub fn is_gpu(&self) -> bool {
        let kind = self.registers().memory_kind().load(Ordering::Relaxed);
        MemoryKind::from_code(kind) == Some(MemoryKind::Cuda)
    }

    /// Descriptor of card memory, in place of the dma-buf of a real card: register ranges of it with
    /// `ibv_reg_dmabuf_mr`. Byte `n` of the file is byte `n` of card memory.
    pub fn memory_fd(&self) -> BorrowedFd<'_> {
        self.inner.memory_fd.as_fd()
    }

    /// Descriptor of BAR0.
    pub fn bar0_fd(&self) -> BorrowedFd<'_> {
        self.inner.bar0_fd.as_fd()
    }

    /// Descriptor that becomes readable at the next completion after
    /// [`Ring::arm_interrupt`](crate::Ring::arm_interrupt).
    pub fn interrupt_fd(&self) -> BorrowedFd<'_> {
        self.inner.interrupt_fd.as_fd()
    }

    /// Makes [`Card::interrupt_fd`] unreadable until the next interrupt.
    pub(crate) fn clear_interrupt(&self) {
        self.inner.interrupt_fd.clear();
    }

    /// Descriptor that hangs up (`POLLHUP`, `POLLIN`) when the card ends or dies. The card sends no data on it:
    /// poll it, do not read it.
    pub fn liveness_fd(&self) -> BorrowedFd<'_> {
        self.inner.connection.as_fd()
    }

    /// False once the card has ended or died.
    pub fn is_alive(&self) -> bool {
        !self.inner.connection.is_hung_up()
    }

    /// Memory bank `index`, if the card has it.
    pub fn bank(&self, index: u32) -> Option<MemoryRange> {
        let count = self.registers().bank_count().load(Ordering::Relaxed);
        let bytes = self.registers().bank_bytes().load(Ordering::Relaxed);
        let span = MemoryRange::new(bytes.checked_mul(index.into())?, bytes);
        (index < count && span.fits(self.memory().size())).then_some(span)
    }

    /// Number of the kernel `name` in the directory.
    fn kernel_number(&self, name: &str) -> Result<u32, NoSuchKernel> {
        let kernels = self.registers().kernels();
        match kernels.iter().find(|(_, known)| known == name) {
            Some((id, _)) => Ok(*id),
            None => Err(NoSuchKernel {
                name: name.to_owned(),
                available: kernels.into_iter().map(|(_, known)| known).collect(),
            }),
        }
    }

    /// Rings the doorbell of the card.
    pub(crate) fn ring_doorbell(&self) {
        let registers = self.registers();
        registers.doorbell().fetch_add(1, Ordering::SeqCst);
        // The card sets `sleeping` first and reads the doorbell afterwards; this thread does it in reverse order.
        // One of the two sees the other.
        if registers.sleeping().load(Ordering::SeqCst) != 0 {
            futex::wake_all(registers.doorbell());
        }
    }
}

/// An access to mapped card memory, from [`Card::access`]; it ends when this is dropped.
#[derive(Debug)]
#[must_use]
pub struct MemoryAccess<'a> {
    registers: &'a Registers,
}

impl Drop for MemoryAccess<'_> {
    fn drop(&mut self) {
        // After the grace period the card has set the count to zero.
        let _ = self
            .registers
            .lease_accesses()
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |count| count.checked_sub(1));
    }
}

/// Connects to the card `name` of this user and waits until `deadline` for it to start. Receives on the connection
/// time out at the deadline, and not before [`ANSWER_TIMEOUT`].
fn connect(name: &CardName, deadline: Instant) -> Result<Connection, OpenError> {
    let uid = own_uid();
    let address = name.address(uid);
    let connection = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match Connection::open_any_user(&address, left.max(ANSWER_TIMEOUT)) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            // The backlog of the card's socket is full.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(OpenError::NoAnswer(name.clone()));
            }
            other => break other.context("connect to the card's socket")?,
        }
        if left.is_zero() {
            return Err(OpenError::NotFound(name.clone()));
        }
        std::thread::sleep(RETRY_PERIOD);
    };
    match connection.peer().uid {
        served_by if served_by == uid => Ok(connection),
        served_by => Err(OpenError::ForeignUser { name: name.clone(), uid: served_by }),
    }
}

/// Maps the first `bytes` bytes of a BAR, if nobody can shrink the file behind it. A file of sysfs cannot shrink, and takes
/// no seals. After the device was removed, an access raises SIGBUS or reads all ones.
fn map_bar(name: &CardName, fd: OwnedFd, bytes: u64) -> Result<(OwnedFd, MappedMemory), OpenError> {
    if !is_sysfs(fd.as_fd()) && !is_sealed(fd.as_fd()) {
        return Err(malformed(name, "the BAR is neither a file of sysfs nor sealed against shrinking"));
    }
    let len = file_len(fd.as_fd()).context("query the size of card memory")?;
    if bytes == 0 || (len as u64) < bytes {
        return Err(malformed(name, "memory does not have the announced size"));
    }
    let mapping = Mapping::new(fd.as_fd(), 0, bytes as usize, true).context("map card memory")?;
    Ok((fd, MappedMemory::new(Arc::new(mapping))))
}

/// Maps memory of a GPU, which only its driver can map.
fn map_gpu(
    name: &CardName,
    fd: OwnedFd,
    reply: &OpenReply,
    bytes: u64,
) -> Result<(OwnedFd, MappedMemory), OpenError> {
    let uuid = reply.gpu_uuid().ok_or(malformed(name, "reply names no GPU"))?;
    let kept = fd.try_clone().context("duplicate the descriptor of card memory")?;
    let imported = HostVisible::import(&vulkan_loader(), uuid, fd, bytes as usize);
    let imported = imported.map_err(|cause| OpenError::Gpu { name: name.clone(), cause })?;
    Ok((kept, MappedMemory::new(Arc::new(imported.into_mapping()))))
}

fn malformed(name: &CardName, what: &'static str) -> OpenError {
    OpenError::Malformed { name: name.clone(), what }
}

/// Maps memory of `bytes` bytes that came with the reply, if accesses to it can never raise SIGBUS.
fn map(name: &CardName, fd: OwnedFd, bytes: u64) -> Result<(OwnedFd, Mapping), OpenError> {
    if !is_sealed(fd.as_fd()) {
        return Err(malformed(name, "memory is not sealed against shrinking"));
    }
    let memory = Memfd::from_peer(fd).context("query the size of card memory")?;
    if bytes == 0 || memory.len() as u64 != bytes {
        return Err(malformed(name, "memory does not have the announced size"));
    }
    let mapping = memory.map().context("map card memory")?;
    Ok((memory.into_fd(), mapping))
}
