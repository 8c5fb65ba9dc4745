//! The connection manager of this process, with its sockets and its thread.
//!
//! Commands run in the program's threads under one lock, which no thread holds while it waits. One thread
//! polls the sockets and the timers, so that connections progress while the program is busy.
//!
//! An event channel is one end of a socket pair. While events wait, it holds a byte, so that it polls like
//! the device file, also after `dup` or `fork`. Channels are identified by their inode, so descriptors need
//! not be tracked. The other end reports a hang-up when the program has closed all descriptors of the
//! channel.

mod channel_table;
mod lifecycle;
mod sockets;
mod thread;

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use millstream_lockfree::CancelGuard;
use millstream_shm::thread::spawn;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::command::Command;
use crate::manager::Manager;
use crate::system::ChannelId;
use crate::{Errno, Result};

use channel_table::ChannelTable;
use sockets::{EpollSource, Sockets};

/// The connection manager and its sockets.
#[derive(Debug)]
struct Engine {
    pid: u32,
    manager: Manager,
    sockets: Sockets,
    /// Time without descriptors for new links, during which the thread sleeps.
    pause: Option<Duration>,
}

/// The connection manager of this process, and the channels of this process and its ancestors.
#[derive(Debug)]
struct ProcessState {
    engine: Option<Engine>,
    /// Inode, process that owns the connection manager, channel.
    channels: Vec<(u64, u32, ChannelId)>,
}

static PROCESS: Mutex<ProcessState> = Mutex::new(ProcessState { engine: None, channels: Vec::new() });
/// Inodes of channels, for callers that take no lock: signal handlers, and log output under the lock. Changed under the lock.
static INODES: ChannelTable = ChannelTable::new();

fn process() -> MutexGuard<'static, ProcessState> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProcessState {
    /// The connection manager, created on first use and again in a forked child.
    fn engine(&mut self) -> io::Result<&mut Engine> {
        if self.engine.is_none() {
            lifecycle::register_exit_handler();
            let sockets = Sockets::new()?;
            let epoll = sockets.epoll.as_raw_fd();
            let engine =
                Engine { pid: std::process::id(), manager: Manager::default(), sockets, pause: None };
            spawn("mill-cm", move || {
                INSIDE.set(true);
                thread::run(epoll);
            })?;
            self.engine = Some(engine);
        }
        self.engine.as_mut().ok_or_else(|| io::ErrorKind::Other.into())
    }
}

/// Whether any channel is open: a cheap test, almost always false.
#[must_use]
#[inline]
pub fn has_channels() -> bool {
    !INODES.is_empty()
}

/// Opens a channel with `O_CLOEXEC` and `O_NONBLOCK` as in `flags`.
///
/// # Errors
/// If sockets or the thread cannot be created.
pub fn open(flags: i32) -> io::Result<OwnedFd> {
    inside(|| open_channel(flags))
}

fn open_channel(flags: i32) -> io::Result<OwnedFd> {
    millstream_log::init();
    let mut kind = SocketFlags::empty();
    kind.set(SocketFlags::CLOEXEC, flags & libc::O_CLOEXEC != 0);
    kind.set(SocketFlags::NONBLOCK, flags & libc::O_NONBLOCK != 0);
    // No fork comes between: a child must not keep this end.
    let mut process = process();
    let (theirs, ours) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, kind, None)?;
    fcntl_setfd(&ours, FdFlags::CLOEXEC)?;
    let inode = socket_inode(theirs.as_raw_fd()).ok_or(io::ErrorKind::Other)?;
    let engine = process.engine()?;
    let pid = engine.pid;
    let channel = ChannelId(engine.sockets.add(EpollSource::Channel(ours))?);
    engine.manager.open(channel);
    process.add_channel(inode, pid, channel);
    Ok(theirs)
}

/// The inode of a descriptor, if it is a socket.
fn socket_inode(fd: RawFd) -> Option<u64> {
    // SAFETY: fills in a structure on the stack.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        // A direct system call, because an intercepted `fstat` would call this function. rustix requires an open
        // descriptor, and the program may pass any number.
        let failed = libc::syscall(libc::SYS_fstat, fd, &raw mut stat);
        (failed == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
    }
}

/// Whether `fd` is a channel: while none is open, a cheap test. It takes no lock and allocates nothing, because
/// signal handlers may call it.
#[must_use]
#[inline]
pub fn is_channel(fd: RawFd) -> bool {
    has_channels() && socket_inode(fd).is_some_and(|inode| INODES.contains(inode))
}

impl ProcessState {
    fn add_channel(&mut self, inode: u64, pid: u32, channel: ChannelId) {
        self.channels.push((inode, pid, channel));
        INODES.insert(inode);
    }

    fn remove_channels(&mut self, closed: &[ChannelId]) {
        for (inode, ..) in self.channels.extract_if(.., |(_, _, channel)| closed.contains(channel)) {
            INODES.remove(inode);
        }
    }

    /// The channel of `fd`, or EIO if another process owns it.
    fn channel(&self, fd: RawFd) -> Option<Result<ChannelId>> {
        let inode = socket_inode(fd)?;
        let (_, pid, channel) = self.channels.iter().find(|(other, ..)| *other == inode)?;
        let alive = self.engine.as_ref().is_some_and(|engine| engine.pid == *pid);
        // A forked child inherits channels, but not their connection manager.
        Some(if alive { Ok(*channel) } else { Err(Errno(libc::EIO)) })
    }
}

fn warn_of_inherited_channel() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!("rdma_cm event channels cannot be used after a fork: open them in the child process");
    });
}

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandStatus {
    Done,
    /// GET_EVENT found no event.
    NoEvent,
}

/// Executes a command written to `fd`; `None` if that is not a channel.
///
/// Like a write to the device, the call is a thread cancellation point while it waits for an event. It holds
/// no lock then.
///
/// # Safety
/// The addresses in the command are valid.
pub unsafe fn write(fd: RawFd, written: &[u8]) -> Option<Result<usize>> {
    if INSIDE.get() {
        // Log output, because the program has closed its standard error before it opened the channel. It is no command.
        return Some(Err(Errno(libc::EINVAL)));
    }
    loop {
        // SAFETY: the caller vouches for the addresses.
        let outcome = inside(|| unsafe { try_write(fd, written) });
        match outcome? {
            Ok(CommandStatus::Done) => return Some(Ok(written.len())),
            Ok(CommandStatus::NoEvent) => {
                if let Err(error) = wait(fd) {
                    return Some(Err(error));
                }
            }
            Err(error) => return Some(Err(error)),
        }
    }
}

thread_local! {
    /// Whether this thread executes the connection manager, and so may hold the lock.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Executes the connection manager in a thread of the program.
fn inside<R>(run: impl FnOnce() -> R) -> R {
    without_cancellation(|| {
        INSIDE.set(true);
        let result = run();
        INSIDE.set(false);
        result
    })
}

/// Runs code that must not be cancelled because it owns resources, such as the lock. Functions of the C library in it may be
/// thread cancellation points.
pub(crate) fn without_cancellation<R>(run: impl FnOnce() -> R) -> R {
    let _uncancelled = CancelGuard::new();
    run()
}

// The C library's function is a thread cancellation point, where the stack may unwind; a system call by rustix is none.
unsafe extern "C-unwind" {
    fn recv(fd: i32, to: *mut libc::c_void, len: usize, flags: i32) -> isize;
}

/// Waits until the channel has an event; EAGAIN on a non-blocking channel.
fn wait(fd: RawFd) -> Result<()> {
    let mut byte = 0u8;
    // SAFETY: one byte on the stack.
    let n = unsafe { recv(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK) };
    if n < 0 { Err(io::Error::last_os_error().into()) } else { Ok(()) }
}

/// # Safety
/// As for [`write`].
unsafe fn try_write(fd: RawFd, written: &[u8]) -> Option<Result<CommandStatus>> {
    let mut process = process();
    let channel = match process.channel(fd)? {
        Ok(channel) => channel,
        Err(error) => {
            // Printing is a `write`, which may take the lock.
            drop(process);
            warn_of_inherited_channel();
            return Some(Err(error));
        }
    };
    let command = match Command::parse(written) {
        Ok(command) => command,
        Err(error) => return Some(Err(error)),
    };
    let from = command.source_channel().and_then(|fd| Some((fd, process.channel(fd)?.ok()?)));
    let Engine { manager, sockets, .. } = process.engine.as_mut()?;
    // SAFETY: the caller vouches for the addresses.
    Some(unsafe {
        if command.is_get_event() {
            command.get_event(manager, channel).map(|more| {
                if more == Some(false) {
                    drain(fd);
                }
                if more.is_some() { CommandStatus::Done } else { CommandStatus::NoEvent }
            })
        } else {
            let before = manager.deadline();
            let channels = [(fd, channel)].into_iter().chain(from);
            let waiting: Vec<_> = channels.filter(|(_, channel)| manager.has_event(*channel)).collect();
            let done = command.run(manager, sockets, channel, from.map(|(_, channel)| channel));
            let nearer = manager.deadline().is_some_and(|new| before.is_none_or(|old| new < old));
            if nearer {
                sockets.wake.signal();
            }
            // The command may have removed the last events together with their identifier.
            for (fd, _) in waiting.into_iter().filter(|(_, channel)| !manager.has_event(*channel)) {
                drain(fd);
            }
            done.map(|()| CommandStatus::Done)
        }
    })
}

/// Takes the byte that signals waiting events.
fn drain(fd: RawFd) {
    // SAFETY: the program's descriptor, which was found to be a channel under the lock.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let _ = net::recv(fd, &mut [0u8; 1], RecvFlags::DONTWAIT);
}
