//! The user's side of a card: find it by name, map it, watch it.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_shm::socket::{Connection, own_uid};
use millstream_shm::{EventFd, Mapping, Memfd, futex, is_sealed};

use crate::backing::Emulated;
use crate::command::{Cause, Fault, KernelId};
use crate::handshake::{Answer, Received, Refusal, Request, Role, receive};
use crate::lease;
use crate::memory::{Memory, Span};
use crate::name::CardName;
use crate::os::{Doing, OsError};
use crate::region::codes::RegionCommand;
use crate::registers::{BAR0_BYTES, MAGIC, Registers, VERSION};

/// Time between two looks for a card that is not there yet.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Time within which a card that runs answers even on a busy machine.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Why a card cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No card of this name serves this user.
    #[error("no card {0} on this host")]
    NotFound(CardName),
    /// A process of another user has the card's address.
    #[error("address of card {name} is held by user {uid}")]
    Impostor {
        /// The card asked for.
        name: CardName,
        /// The user who holds its address.
        uid: u32,
    },
    /// The card was found and did not answer in time.
    #[error("card {0} does not answer")]
    NoAnswer(CardName),
    /// The card ended while it was opened.
    #[error("card {0} closed the connection")]
    Closed(CardName),
    /// The card said no.
    #[error("card {name}: {refusal}")]
    Refused {
        /// The card asked for.
        name: CardName,
        /// Its reason.
        refusal: Refusal,
    },
    /// The answer is not one of a card.
    #[error("card {name}: {what}")]
    Malformed {
        /// The card asked for.
        name: CardName,
        /// What is wrong with its answer.
        what: &'static str,
    },
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// A kernel that a card does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("card has no kernel {name:?}, it has: {}", available.join(", "))]
pub struct NoSuchKernel {
    /// The name asked for.
    pub name: String,
    /// The names that the card has.
    pub available: Vec<String>,
}

/// An open card. Clones share one connection; the connection, and with it ownership, ends with the
/// last of them.
#[derive(Clone, Debug)]
pub struct Card {
    parts: Arc<Parts>,
}

#[derive(Debug)]
struct Parts {
    name: CardName,
    registers: Registers,
    memory: Memory,
    bar0_fd: Memfd,
    interrupt_fd: EventFd,
    connection: Connection,
    node: u32,
}

/// Why a card of this host could not be leased, or a kernel not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UseError {
    /// Another node has it.
    #[error("card {card} is leased to node {holder:#x} (epoch {epoch})")]
    Held {
        /// The card.
        card: CardName,
        /// The holder.
        holder: u32,
        /// Its epoch.
        epoch: u32,
    },
    /// It does not answer in time.
    #[error("card {0} does not carry out a command")]
    NoAnswer(CardName),
    /// It has no such kernel.
    #[error(transparent)]
    NoSuchKernel(#[from] NoSuchKernel),
    /// It refused.
    #[error("card {card}: region {region}: {fault}")]
    Refused {
        /// The card.
        card: CardName,
        /// The region.
        region: usize,
        /// Why.
        fault: Fault,
    },
}

impl Card {
    /// Opens the card `name` of this user. Waits up to `patience` for a card that is just starting.
    pub fn open(name: &CardName, patience: Duration) -> Result<Card, OpenError> {
        Card::open_as(name, Role::User, patience)
    }

    /// Opens the card as its owner: it ends when this connection does. The card must have been
    /// started with [`Lifetime::Owner`](crate::Lifetime::Owner) and have no owner yet.
    pub fn open_as_owner(name: &CardName, patience: Duration) -> Result<Card, OpenError> {
        Card::open_as(name, Role::Owner, patience)
    }

    fn open_as(name: &CardName, role: Role, patience: Duration) -> Result<Card, OpenError> {
        let deadline = Instant::now() + patience;
        let connection = connect(name, deadline)?;
        // If this fails the card has closed; then the receive below says so, or why.
        let _ = connection.send(&Request::new(role).to_bytes(), &[]);
        let (bytes, fds) = match receive(&connection) {
            Received::Message(bytes, fds) => (bytes, fds),
            Received::Malformed => return Err(malformed(name, "answer has the wrong length")),
            Received::Nothing => return Err(OpenError::NoAnswer(name.clone())),
            Received::Closed => return Err(OpenError::Closed(name.clone())),
        };
        let answer = Answer::from_bytes(&bytes);
        let memory_bytes =
            answer.outcome().map_err(|refusal| OpenError::Refused { name: name.clone(), refusal })?;
        let [bar0_fd, memory_fd, interrupt_fd]: [OwnedFd; 3] =
            fds.try_into().map_err(|_| malformed(name, "answer does not carry three descriptors"))?;
        let (bar0_fd, bar0) = map(name, bar0_fd, BAR0_BYTES as u64)?;
        let (memory_fd, mapping) = map(name, memory_fd, memory_bytes)?;
        let registers = Registers::new(bar0);
        if registers.magic().load(Ordering::Acquire) != MAGIC
            || registers.version().load(Ordering::Relaxed) != VERSION
        {
            return Err(malformed(name, "registers are not those of a card"));
        }
        Ok(Card {
            parts: Arc::new(Parts {
                name: name.clone(),
                registers,
                memory: Memory::new(Box::new(Emulated::of_peer(memory_fd, mapping))),
                bar0_fd,
                interrupt_fd: EventFd::from_fd(interrupt_fd),
                connection,
                node: answer.node,
            }),
        })
    }

    /// Takes the card's lease, waiting up to `patience` while another node holds it. It ends with the
    /// connection; no heartbeats are needed. Returns its epoch.
    ///
    /// # Errors
    /// [`UseError`] if the card is not free, or does not answer.
    pub fn lease(&self, patience: Duration) -> Result<u32, UseError> {
        let (registers, node) = (self.registers(), self.parts.node);
        let deadline = Instant::now() + patience;
        let epoch = loop {
            let word = registers.lease_word().load(Ordering::Acquire);
            let (epoch, holder) = lease::unpack(word);
            if holder != 0 {
                if Instant::now() >= deadline {
                    return Err(UseError::Held { card: self.name().clone(), holder, epoch });
                }
                std::thread::sleep(LOOK_AGAIN);
                continue;
            }
            let mine = lease::word(epoch, node);
            let swapped =
                registers.lease_word().compare_exchange(word, mine, Ordering::SeqCst, Ordering::Relaxed);
            if swapped.is_ok() {
                break epoch;
            }
        };
        self.ring_doorbell();
        self.until(|| registers.lease_holder().load(Ordering::Acquire) == node)?;
        Ok(epoch)
    }

    /// Loads a kernel of the directory into a region.
    ///
    /// # Errors
    /// [`UseError`] with the cause that the card names.
    pub fn load(&self, region: usize, kernel: &str) -> Result<(), UseError> {
        let number = self.kernel(kernel)?.0;
        let shown = self.registers().region(region);
        shown.kernel().store(number.into(), Ordering::Relaxed);
        shown.image_hash().store(0, Ordering::Relaxed);
        let word =
            (shown.doorbell().load(Ordering::Relaxed) >> 8).wrapping_add(1) << 8 | RegionCommand::Load as u64;
        shown.doorbell().store(word, Ordering::Release);
        self.ring_doorbell();
        self.until(|| shown.taken().load(Ordering::Acquire) == word)?;
        match shown.cause().load(Ordering::Acquire) {
            0 => Ok(()),
            code => {
                let fault = Fault::new(Cause::from_code(code), shown.detail().load(Ordering::Relaxed));
                Err(UseError::Refused { card: self.name().clone(), region, fault })
            }
        }
    }

    /// Waits until the card has done something; what it sleeps through, it notices after its heartbeat.
    fn until(&self, done: impl Fn() -> bool) -> Result<(), UseError> {
        let deadline = Instant::now() + 10 * ANSWER_WITHIN;
        while !done() {
            if Instant::now() >= deadline || !self.is_alive() {
                return Err(UseError::NoAnswer(self.name().clone()));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// The card's name.
    pub fn name(&self) -> &CardName {
        &self.parts.name
    }

    /// BAR0.
    pub fn registers(&self) -> &Registers {
        &self.parts.registers
    }

    /// Card memory, mapped.
    pub fn memory(&self) -> &Memory {
        &self.parts.memory
    }

    /// Descriptor of card memory, which stands for the dma-buf of a real card: register ranges of
    /// it with `ibv_reg_dmabuf_mr`. Byte `n` of the file is byte `n` of card memory.
    pub fn memory_fd(&self) -> BorrowedFd<'_> {
        self.parts.memory.backing().shared().expect("only such memory is mapped by other processes")
    }

    /// Descriptor of BAR0, to be registered like card memory for control from remote nodes.
    pub fn bar0_fd(&self) -> BorrowedFd<'_> {
        self.parts.bar0_fd.as_fd()
    }

    /// Descriptor that becomes readable at the next completion after
    /// [`Ring::arm`](crate::Ring::arm).
    pub fn interrupt_fd(&self) -> BorrowedFd<'_> {
        self.parts.interrupt_fd.as_fd()
    }

    /// Makes [`Card::interrupt_fd`] unreadable until the next interrupt.
    pub(crate) fn clear_interrupt(&self) {
        self.parts.interrupt_fd.clear();
    }

    /// Descriptor that hangs up (`POLLHUP`, `POLLIN`) when the card ends or dies; the card sends
    /// nothing on it. Poll it, never read it.
    pub fn liveness_fd(&self) -> BorrowedFd<'_> {
        self.parts.connection.as_fd()
    }

    /// False once the card has ended or died.
    pub fn is_alive(&self) -> bool {
        !self.parts.connection.is_hung_up()
    }

    /// Memory bank `index`, if the card has it.
    pub fn bank(&self, index: u32) -> Option<Span> {
        let count = self.registers().bank_count().load(Ordering::Relaxed);
        let bytes = self.registers().bank_bytes().load(Ordering::Relaxed);
        let span = Span::new(bytes.checked_mul(index.into())?, bytes);
        (index < count && span.fits(self.memory().size())).then_some(span)
    }

    /// Number of the kernel `name`.
    pub fn kernel(&self, name: &str) -> Result<KernelId, NoSuchKernel> {
        let kernels = self.registers().kernels();
        match kernels.iter().find(|(_, known)| known == name) {
            Some((id, _)) => Ok(KernelId(*id)),
            None => Err(NoSuchKernel {
                name: name.to_owned(),
                available: kernels.into_iter().map(|(_, known)| known).collect(),
            }),
        }
    }

    /// Tells the card to look at its rings.
    pub(crate) fn ring_doorbell(&self) {
        let registers = self.registers();
        registers.doorbell().fetch_add(1, Ordering::SeqCst);
        // The card announces its sleep first and looks at the doorbell afterwards, we do it the
        // other way round: one of the two sees the other.
        if registers.sleeping().load(Ordering::SeqCst) != 0 {
            futex::wake_all(registers.doorbell());
        }
    }
}

/// Connects to the card `name` of this user, waiting until `deadline` for it to appear. Its answer
/// may take until then as well, and at least [`ANSWER_WITHIN`].
fn connect(name: &CardName, deadline: Instant) -> Result<Connection, OpenError> {
    let uid = own_uid();
    let address = name.address(uid);
    let connection = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match Connection::open_any_user(&address, left.max(ANSWER_WITHIN)) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            // More connections wait for the card already than the system allows.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(OpenError::NoAnswer(name.clone()));
            }
            other => break other.doing("connect to the card's socket")?,
        }
        if left.is_zero() {
            return Err(OpenError::NotFound(name.clone()));
        }
        std::thread::sleep(LOOK_AGAIN);
    };
    match connection.peer().uid {
        served_by if served_by == uid => Ok(connection),
        served_by => Err(OpenError::Impostor { name: name.clone(), uid: served_by }),
    }
}

fn malformed(name: &CardName, what: &'static str) -> OpenError {
    OpenError::Malformed { name: name.clone(), what }
}

/// Maps memory of `bytes` bytes that came with the answer, if touching it can never raise SIGBUS.
fn map(name: &CardName, fd: OwnedFd, bytes: u64) -> Result<(Memfd, Mapping), OpenError> {
    if !is_sealed(fd.as_fd()) {
        return Err(malformed(name, "size of the memory is not sealed"));
    }
    let memory = Memfd::from_peer(fd).doing("look at the size of card memory")?;
    if bytes == 0 || memory.len() as u64 != bytes {
        return Err(malformed(name, "memory has another size than announced"));
    }
    let mapping = memory.map().doing("map card memory")?;
    Ok((memory, mapping))
}
