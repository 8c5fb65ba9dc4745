//! Memory of every kind that an application may register.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use millstream_shm::{Mapping, Memfd, PAGE};
use serde::{Deserialize, Serialize};

/// Guard bytes before and after each piece of memory, which nothing may change.
pub(crate) const GUARD: usize = 64;

/// The type of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// A private anonymous mapping.
    Anonymous,
    /// From the allocator.
    Malloc,
    /// The top of the heap.
    Brk,
    /// The stack of a thread.
    ThreadStack,
    /// The stack of the main thread. Once per process.
    MainStack,
    /// Static, zero-initialised.
    Bss,
    /// Static, initialised from the program file.
    Data,
    /// A private mapping of a file.
    PrivateFile,
    /// A shared mapping of a file on disk.
    SharedFile,
    /// A shared mapping of a memfd, registered by its address.
    MappedMemfd,
    /// A memfd of sealed size, registered by descriptor.
    Dmabuf,
    /// A memfd that could shrink, registered by descriptor.
    UnsealedDmabuf,
    /// A memfd that is sealed against writable mappings after its registration.
    NoNewWriters,
    /// A private anonymous mapping without write permission.
    ReadOnly,
}

impl Kind {
    /// All writable types that work in every process.
    pub(crate) const WRITABLE: [Self; 12] = [
        Self::Anonymous,
        Self::Malloc,
        Self::Brk,
        Self::ThreadStack,
        Self::Bss,
        Self::Data,
        Self::PrivateFile,
        Self::SharedFile,
        Self::MappedMemfd,
        Self::Dmabuf,
        Self::UnsealedDmabuf,
        Self::NoNewWriters,
    ];

    /// Whether it is registered by descriptor.
    pub(crate) fn by_descriptor(self) -> bool {
        matches!(self, Self::Dmabuf | Self::UnsealedDmabuf | Self::NoNewWriters)
    }
}

/// A piece of memory with guard bytes around it.
#[derive(Debug)]
pub(crate) struct Memory {
    /// First usable byte.
    pub(crate) start: *mut u8,
    /// Usable bytes.
    pub(crate) len: usize,
    /// For memory that is registered by descriptor: the descriptor, and the offset of `start`.
    pub(crate) file: Option<(OwnedFd, usize)>,
    _owner: Owner,
}

#[derive(Debug)]
enum Owner {
    Mapping(#[expect(dead_code, reason = "held")] Mapping),
    Private(*mut u8, usize),
    Heap(#[expect(dead_code, reason = "held")] Vec<u8>),
    /// Never freed.
    Static,
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Self::Private(base, len) = *self {
            // SAFETY: mapped by us; the tests keep no pointers.
            unsafe { libc::munmap(base.cast(), len) };
        }
    }
}

impl Memory {
    /// `len` bytes that start `skew` bytes after a page boundary, plus guards.
    pub(crate) fn new(kind: Kind, len: usize, skew: usize) -> Self {
        let room = (len + skew + 2 * GUARD).next_multiple_of(PAGE) + 2 * PAGE;
        let (base, owner, fd) = match kind {
            Kind::Anonymous | Kind::ReadOnly => private(room, -1),
            Kind::Malloc => heap(room),
            Kind::Brk => brk(room),
            Kind::ThreadStack => thread_stack(room),
            Kind::MainStack => main_stack(room),
            Kind::Bss => (part(&raw mut BSS, &BSS_USED, room), Owner::Static, None),
            Kind::Data => (part(&raw mut DATA, &DATA_USED, room), Owner::Static, None),
            Kind::PrivateFile => private(room, file(room).as_raw_fd()),
            Kind::SharedFile => shared(file(room), room),
            Kind::MappedMemfd | Kind::Dmabuf | Kind::NoNewWriters => shared(memfd(room), room),
            Kind::UnsealedDmabuf => shared(unsealed(room), room),
        };
        // The first page boundary that leaves room for the guard.
        let base_address = base as usize;
        let offset = (base_address + GUARD).next_multiple_of(PAGE) - base_address + skew;
        let memory = Self {
            // SAFETY: inside the allocation, which has two pages more than needed.
            start: unsafe { base.add(offset) },
            len,
            file: fd.filter(|_| kind.by_descriptor()).map(|fd| (fd, offset)),
            _owner: owner,
        };
        if kind == Kind::ReadOnly {
            // SAFETY: our own mapping.
            assert_eq!(unsafe { libc::mprotect(base.cast(), room, libc::PROT_READ) }, 0);
        }
        memory
    }

    /// Copies `bytes` to `at`, which may reach into the guards.
    pub(crate) fn store(&self, at: isize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: inside the memory and its guards; raw copies are what peers do, too.
        unsafe { self.start.offset(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    /// Copies bytes out.
    pub(crate) fn load(&self, at: isize, len: usize) -> Vec<u8> {
        self.check(at, len);
        let mut bytes = vec![0; len];
        // SAFETY: as above.
        unsafe { self.start.offset(at).copy_to(bytes.as_mut_ptr(), len) };
        bytes
    }

    fn check(&self, at: isize, len: usize) {
        let guard = GUARD as isize;
        assert!(at >= -guard && at + len as isize <= self.len as isize + guard, "{at} + {len} is outside");
    }
}

type Piece = (*mut u8, Owner, Option<OwnedFd>);

fn private(len: usize, fd: i32) -> Piece {
    let flags = libc::MAP_PRIVATE | if fd < 0 { libc::MAP_ANONYMOUS } else { 0 };
    // SAFETY: a new mapping.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    (base.cast(), Owner::Private(base.cast(), len), None)
}

fn shared(fd: OwnedFd, len: usize) -> Piece {
    let mapping = Mapping::new(fd.as_fd(), 0, len, true).expect("room for a mapping");
    (mapping.base(), Owner::Mapping(mapping), Some(fd))
}

fn heap(len: usize) -> Piece {
    let mut bytes = vec![0u8; len];
    (bytes.as_mut_ptr(), Owner::Heap(bytes), None)
}

fn brk(len: usize) -> Piece {
    // SAFETY: the allocator tolerates other users of the break; these bytes stay ours for ever.
    let base = unsafe { libc::sbrk(len as libc::intptr_t) };
    assert_ne!(base as isize, -1);
    (base.cast(), Owner::Static, None)
}

/// A thread that sleeps for ever with the memory on its stack.
fn thread_stack(len: usize) -> Piece {
    const MOST: usize = 1 << 18;
    assert!(len <= MOST);
    let (sender, receiver) = channel();
    std::thread::Builder::new()
        .stack_size(MOST + (64 << 10))
        .spawn(move || {
            let mut memory = [0u8; MOST];
            sender.send(memory.as_mut_ptr() as usize).expect("somebody waits");
            loop {
                std::thread::park();
            }
        })
        .expect("room for a thread");
    (receiver.recv().expect("sent at once") as *mut u8, Owner::Static, None)
}

/// A part of the main thread's stack, below the part that it uses while it waits for the test threads.
fn main_stack(len: usize) -> Piece {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("this is Linux");
    let line = maps.lines().find(|line| line.ends_with("[stack]")).expect("every process has one");
    let (start, _) = line.split_once('-').expect("a range");
    let base = (usize::from_str_radix(start, 16).expect("hexadecimal") - len) as *mut u8;
    // SAFETY: a stack grows when memory below it is touched; nothing else uses that memory.
    unsafe { base.write_bytes(0, len) };
    (base, Owner::Static, None)
}

const STATIC: usize = 1 << 20;
static mut BSS: [u8; STATIC] = [0; STATIC];
static mut DATA: [u8; STATIC] = [1; STATIC];
static BSS_USED: AtomicUsize = AtomicUsize::new(0);
static DATA_USED: AtomicUsize = AtomicUsize::new(0);

/// The next `len` bytes of a static array.
fn part(array: *mut [u8; STATIC], used: &AtomicUsize, len: usize) -> *mut u8 {
    let at = used.fetch_add(len, Ordering::Relaxed);
    assert!(at + len <= STATIC, "static memory is used up");
    // SAFETY: inside the array; each part is used once.
    unsafe { array.cast::<u8>().add(at) }
}

fn file(len: usize) -> OwnedFd {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(len as u64).expect("room for it");
    file.into()
}

fn memfd(len: usize) -> OwnedFd {
    Memfd::new("test", len).expect("room for it").into_fd()
}

fn new_memfd() -> OwnedFd {
    // SAFETY: a new descriptor without another owner.
    unsafe {
        let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

fn unsealed(len: usize) -> OwnedFd {
    let fd = new_memfd();
    // SAFETY: our own descriptor.
    assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), len as i64) }, 0);
    fd
}

/// Seals the memory against new writable mappings. Existing mappings remain.
pub(crate) fn forbid_new_writers(memory: &Memory) {
    let (fd, _) = memory.file.as_ref().expect("a memfd");
    // SAFETY: our own descriptor.
    assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE) }, 0);
}
