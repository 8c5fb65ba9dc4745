//! A responder's memory: the checks of memory keys, and copies (IBTA volume 1, 10.6).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use millstream_lockfree::{CancelGuard, RobustGuard, copy_in_order};
use millstream_shm::process_vm::{self, Direction};

use super::keys::{AccessRight, AtomicAccess, RemoteKeys, RemoteMr};
use super::remote_qp::RemoteQp;
use super::transfer::{ExecError, UNRESPONSIVE, failed};
use crate::adapter::wait_until;
use crate::ipc::{Message, Op};
use crate::peer::Peer;
use crate::send_wr::SendWr;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_ON_DEMAND, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, WC_REM_OP_ERR,
    WC_RETRY_EXC_ERR, WR_ATOMIC_CMP_AND_SWP, vendor,
};

/// A range of a responder's memory that was checked.
pub(super) enum RemoteRange<'a> {
    /// The whole range is mapped here.
    Mapped(*mut u8),
    /// A part of the range is not mapped; it is copied through the kernel.
    Unmapped { mr: &'a RemoteMr, peer: &'a Peer, at: u64 },
}

impl RemoteRange<'_> {
    /// Copies `len` bytes to the range, from its byte `offset` on. The last bytes become visible last.
    ///
    /// # Safety
    /// `from` is valid for `len` bytes, which fit into the range behind `offset`.
    #[inline(always)]
    pub(super) unsafe fn store(&self, offset: u64, from: *const u8, len: usize) -> Result<(), ExecError> {
        match *self {
            Self::Mapped(base) => {
                // SAFETY: the destination is mapped for stores and cannot shrink; the caller vouches for the rest.
                unsafe { copy_in_order(base.wrapping_add(offset as usize), from, len) };
                Ok(())
            }
            Self::Unmapped { mr, peer, at } => {
                copy_by_pieces(mr, peer, at + offset, from.cast_mut(), len, Direction::Write)
            }
        }
    }

    /// Copies `len` bytes from the range, from its byte `offset` on.
    ///
    /// # Safety
    /// `to` is valid for `len` bytes, which lie in the range behind `offset`.
    #[inline(always)]
    pub(super) unsafe fn load(&self, offset: u64, to: *mut u8, len: usize) -> Result<(), ExecError> {
        match *self {
            Self::Mapped(base) => {
                // SAFETY: as in `store`.
                unsafe { copy_in_order(to, base.wrapping_add(offset as usize), len) };
                Ok(())
            }
            Self::Unmapped { mr, peer, at } => {
                copy_by_pieces(mr, peer, at + offset, to, len, Direction::Read)
            }
        }
    }
}

impl RemoteKeys {
    /// A range of at least one byte whose cached key is valid, mapped, and allows the access. None if it has to be looked
    /// up, by [`resolve`](Self::resolve).
    #[inline(always)]
    pub(super) fn mapped(
        &self,
        target: &RemoteQp,
        key: u32,
        at: u64,
        len: u64,
        access: AccessRight,
    ) -> Option<RemoteRange<'_>> {
        // The protection domain is read last: earlier, it would occupy a register during the look-up.
        Some(RemoteRange::Mapped(self.known(key)?.mapped(target.pd_of(access), at, len, access)?))
    }

    /// A range of the responder `target`, checked. An error is the cause for the completion.
    #[inline(always)]
    pub(super) fn resolve<'a>(
        &'a mut self,
        peer: &'a Arc<Peer>,
        target: &RemoteQp,
        (key, at, len): (u32, u64, u64),
        access: AccessRight,
    ) -> Result<RemoteRange<'a>, u32> {
        if let Some(RemoteRange::Mapped(base)) = self.mapped(target, key, at, len, access) {
            return Ok(RemoteRange::Mapped(base));
        }
        self.look_up(peer, target, (key, at, len), access)
    }

    /// Checks that the region still allows the access, after loads from it. Its owner may have promoted it meanwhile.
    ///
    /// # Errors
    /// The cause for the completion.
    #[inline(always)]
    pub(super) fn confirm(
        &mut self,
        peer: &Arc<Peer>,
        target: &RemoteQp,
        (key, at, len): (u32, u64, u64),
        access: u32,
    ) -> Result<(), u32> {
        if self.is_still_known(key) {
            return Ok(());
        }
        check_access(self.find(peer, key)?, target, at, len, access)
    }

    /// Looks a range up whose key is new, that is not mapped as a whole, or that must not be accessed.
    #[inline(never)]
    fn look_up<'a>(
        &'a mut self,
        peer: &'a Arc<Peer>,
        target: &RemoteQp,
        (key, at, len): (u32, u64, u64),
        access: AccessRight,
    ) -> Result<RemoteRange<'a>, u32> {
        let mr = self.find(peer, key)?;
        match access {
            AccessRight::Read => check_access(mr, target, at, len, ACCESS_REMOTE_READ)?,
            AccessRight::RemoteWrite => check_access(mr, target, at, len, ACCESS_REMOTE_WRITE)?,
            // A receive's memory is a region of a protection domain, never a window of a queue pair.
            AccessRight::LocalWrite => check(mr, target.pd_of(access), at, len, ACCESS_LOCAL_WRITE)?,
        }
        if mr.maps(at, len) && (mr.writable || access == AccessRight::Read) {
            return Ok(RemoteRange::Mapped(mr.base.wrapping_add((at - mr.map_start) as usize)));
        }
        Ok(RemoteRange::Unmapped { mr, peer, at })
    }
}

/// Executes an atomic operation on the aligned eight bytes at `wr.remote_addr`, which were checked; the old value. `me`
/// is this process.
pub(super) fn atomic_word(mr: &RemoteMr, peer: &Peer, me: u32, wr: &SendWr<'_>) -> Result<u64, ExecError> {
    let Some(word) = mapped_word(mr, wr.remote_addr)? else { return change_by_copies(mr, peer, me, wr) };
    let _others = lock_others(mr, peer, me)?;
    Ok(match wr.opcode {
        WR_ATOMIC_CMP_AND_SWP => word
            .compare_exchange(wr.compare_add, wr.swap, Ordering::AcqRel, Ordering::Acquire)
            .unwrap_or_else(|old| old),
        _ => word.fetch_add(wr.compare_add, Ordering::AcqRel),
    })
}

/// The eight bytes at `at`, if they are to be changed by the processor; None if by copies.
#[inline]
fn mapped_word(mr: &RemoteMr, at: u64) -> Result<Option<&AtomicU64>, ExecError> {
    match mr.atomic_access(at) {
        AtomicAccess::Mapped(word) => Ok(Some(word)),
        AtomicAccess::Copied => Ok(None),
        AtomicAccess::NotMappedYet => Err(ExecError::PeerNotReady),
        AtomicAccess::NotMappable => Err(failed(WC_REM_OP_ERR, vendor::COPY)),
    }
}

/// Excludes operations through the kernel on a mapped word, while some initiators may still execute those.
#[inline]
fn lock_others<'a>(mr: &RemoteMr, peer: &'a Peer, me: u32) -> Result<Option<RobustGuard<'a>>, ExecError> {
    if mr.locks_atomics { lock_atomics(peer, me).map(Some) } else { Ok(None) }
}

/// Excludes other atomic operations through the kernel on the peer's memory.
fn lock_atomics(peer: &Peer, me: u32) -> Result<RobustGuard<'_>, ExecError> {
    let lock = peer.atomics_lock().ok_or(failed(WC_RETRY_EXC_ERR, vendor::PEER_GONE))?;
    lock.lock(me).ok_or(UNRESPONSIVE)
}

/// Executes an atomic operation on memory that not every initiator can map, one initiator at a time.
#[cold]
fn change_by_copies(mr: &RemoteMr, peer: &Peer, me: u32, wr: &SendWr<'_>) -> Result<u64, ExecError> {
    let _guard = lock_atomics(peer, me)?;
    let mut old = [0u8; 8];
    copy_by_pieces(mr, peer, wr.remote_addr, old.as_mut_ptr(), 8, Direction::Read)?;
    let old = u64::from_ne_bytes(old);
    let new = match wr.opcode {
        WR_ATOMIC_CMP_AND_SWP if old != wr.compare_add => return Ok(old),
        WR_ATOMIC_CMP_AND_SWP => wr.swap,
        _ => old.wrapping_add(wr.compare_add),
    };
    let mut new = new.to_ne_bytes();
    copy_by_pieces(mr, peer, wr.remote_addr, new.as_mut_ptr(), 8, Direction::Write)?;
    Ok(old)
}

/// Stores the aligned eight bytes at `at`, which were checked, atomically. `me` is this process.
pub(super) fn store_word(
    mr: &RemoteMr,
    peer: &Peer,
    me: u32,
    at: u64,
    mut value: [u8; 8],
) -> Result<(), ExecError> {
    if let Some(word) = mapped_word(mr, at)? {
        let _others = lock_others(mr, peer, me)?;
        word.store(u64::from_ne_bytes(value), Ordering::Release);
        return Ok(());
    }
    // Not between the two copies of another initiator's atomic operation.
    let _guard = lock_atomics(peer, me)?;
    copy_by_pieces(mr, peer, at, value.as_mut_ptr(), 8, Direction::Write)
}

/// Checks that a region or window allows the access to `len` bytes from `at`. An error is the cause for the completion.
#[inline]
pub(super) fn check_access(
    mr: &RemoteMr,
    target: &RemoteQp,
    at: u64,
    len: u64,
    access: u32,
) -> Result<(), u32> {
    check(mr, target.pd, at, len, access)
        .or_else(|cause| check_window_access(mr, target, at, len, access, cause))
}

/// Checks a memory window of type 2, which belongs to its queue pair and not to a protection domain.
#[cold]
fn check_window_access(
    mr: &RemoteMr,
    target: &RemoteQp,
    at: u64,
    len: u64,
    access: u32,
    cause: u32,
) -> Result<(), u32> {
    if mr.belongs_to(target.qpn()) { check(mr, 0, at, len, access) } else { Err(cause) }
}

#[inline]
fn check(mr: &RemoteMr, pd: u32, at: u64, len: u64, access: u32) -> Result<(), u32> {
    if mr.pd != pd {
        Err(vendor::DOMAIN)
    } else if mr.access & access != access {
        Err(vendor::PERMISSION)
    } else if !mr.contains(at, len) {
        Err(vendor::BOUNDS)
    } else {
        Ok(())
    }
}

/// Copies a range that is not mapped as a whole: up to three pieces, the outer ones through the kernel.
#[cold]
fn copy_by_pieces(
    mr: &RemoteMr,
    peer: &Peer,
    at: u64,
    local: *mut u8,
    len: usize,
    direction: Direction,
) -> Result<(), ExecError> {
    if mr.discards_stores() && direction == Direction::Write {
        return Ok(());
    }
    let end = at + len as u64;
    let (from, to) = (mr.map_start.clamp(at, end), mr.map_end.clamp(at, end));
    let usable = from < to && (mr.writable || direction == Direction::Read);
    let (from, to) = if usable { (from, to) } else { (end, end) };
    for (start, stop, mapped) in [(at, from, false), (from, to, true), (to, end, false)] {
        if start == stop {
            continue;
        }
        let n = (stop - start) as usize;
        // SAFETY: within the local range that the caller vouches for.
        let here = unsafe { local.add((start - at) as usize) };
        if mapped {
            // SAFETY: inside the mapped part.
            unsafe {
                let there = mr.base.add((start - mr.map_start) as usize);
                match direction {
                    Direction::Write => copy_in_order(there, here, n),
                    Direction::Read => copy_in_order(here, there, n),
                }
            }
            continue;
        }
        let start_of_copy = Instant::now();
        let step = if mr.may_move() { KERNEL_COPY.min(n) } else { n };
        for done in (0..n).step_by(step) {
            let len = step.min(n - done) as u64;
            let piece = process_vm::IoVec { base: here as u64 + done as u64, len };
            let remote = process_vm::IoVec { base: mr.va(start) + done as u64, len };
            // SAFETY: the local piece is the application's registered (or inline) memory.
            let copy = || unsafe {
                let tid = peer.memory_thread();
                process_vm::copy(tid, &[piece], remote, direction)?;
                if direction == Direction::Read { process_vm::check_read(tid, piece, remote) } else { Ok(()) }
            };
            copy_while_pages_move(mr, copy).map_err(|error| match error.raw_os_error() {
                Some(libc::ESRCH) => failed(WC_RETRY_EXC_ERR, vendor::PEER_GONE),
                _ => {
                    report_refused_copy(&error);
                    failed(WC_REM_OP_ERR, vendor::COPY)
                }
            })?;
        }
        if mr.add_kernel_time(kernel_time(n, start_of_copy.elapsed())) {
            peer.send(Message::new(Op::RegionBusy, [mr.key()]));
        }
    }
    Ok(())
}

/// Reports the first copy that the system does not permit.
fn report_refused_copy(error: &io::Error) {
    static REPORTED: Once = Once::new();
    if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) {
        REPORTED.call_once(|| {
            let _uncancelled = CancelGuard::new();
            tracing::warn!(
                "the kernel refuses copies between processes, which memory needs that cannot be mapped: {error}; look at \
                 kernel.yama.ptrace_scope and the seccomp profile, or use MILLSTREAM_PATH=wire"
            );
        });
    }
}

/// Bytes that one system call copies to or from pages that may move. The kernel pins the pages of a call, up to 4 MiB at once,
/// until it has copied them, and a pinned page cannot move.
const KERNEL_COPY: usize = 256 << 10;

/// Time that a copy of `n` bytes through the kernel, which took `elapsed`, takes beyond a copy to mapped memory \[ns\]: a system
/// call, and the kernel's own mapping of each page. A copy that was interrupted counts four times the usual at most.
fn kernel_time(n: usize, elapsed: Duration) -> u64 {
    let usual = 600 + n as u64 / 20;
    let mapped = n as u64 / 32;
    (elapsed.as_nanos() as u64).saturating_sub(mapped).clamp(usual / 2, usual * 4)
}

/// The longest time for which copies fail with EFAULT because an unprivileged process moves the pages.
const LONGEST_MOVE: Duration = Duration::from_millis(100);

/// Repeats a copy through the kernel that fails with EFAULT: either process may be moving the pages into shared memory
/// (`millstream_shm::relocate`). Pages of an on-demand region never move.
fn copy_while_pages_move(mr: &RemoteMr, mut copy: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let is_fault = |result: &io::Result<()>| {
        result.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT))
    };
    let mut result = copy();
    if is_fault(&result) && mr.access & ACCESS_ON_DEMAND == 0 {
        wait_until(Instant::now() + LONGEST_MOVE, || {
            result = copy();
            !is_fault(&result)
        });
    }
    result
}
