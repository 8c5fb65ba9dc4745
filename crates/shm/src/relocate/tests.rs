//! Moves of pages under loads, stores, system calls, pins and forks.

use super::*;
use crate::Mapping;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn pages(n: usize) -> Mapping {
    Mapping::anonymous(n * PAGE).unwrap()
}

/// False, with a printed reason, where this process may not move pages.
fn is_tested() -> bool {
    let tested = is_available();
    if !tested {
        println!("skipped: pages do not move here; run as root, or set vm.unprivileged_userfaultfd=1");
    }
    tested
}

#[test]
fn contents_survive_and_are_shared() {
    if !is_tested() {
        return;
    }
    let memory = pages(4);
    let base = memory.base() as usize;
    // SAFETY: within the four pages, here and below.
    unsafe { memory.base().add(5000).write(42) };
    let shared = move_pages(base + 100..base + 4 * PAGE - 100).unwrap();
    assert_eq!(shared.range, base + PAGE..base + 3 * PAGE);
    let view = Mapping::new(shared.as_fd(), 0, 2 * PAGE, true).unwrap();
    // SAFETY: as above.
    unsafe {
        assert_eq!(view.base().add(5000 - PAGE).read_volatile(), 42);
        view.base().add(1).write_volatile(9);
        assert_eq!(memory.base().add(PAGE + 1).read_volatile(), 9);
        drop(shared);
        assert_eq!(memory.base().add(PAGE + 1).read_volatile(), 9);
        view.base().add(1).write_volatile(10);
        assert_eq!(memory.base().add(PAGE + 1).read_volatile(), 9, "private again");
    }
}

#[test]
fn shared_twice_moves_once() {
    if !is_tested() {
        return;
    }
    let memory = pages(4);
    let base = memory.base() as usize;
    let a = move_pages(base..base + 4 * PAGE).unwrap();
    let b = move_pages(base + PAGE..base + 2 * PAGE).unwrap();
    assert_eq!((a.id(), b.offset), (b.id(), PAGE));
    drop(a);
    // SAFETY: inside the four pages.
    unsafe { memory.base().add(PAGE).write_volatile(3) };
    let view = Mapping::new(b.as_fd(), 0, 4 * PAGE, true).unwrap();
    // SAFETY: inside the view.
    assert_eq!(unsafe { view.base().add(PAGE).read_volatile() }, 3);
}

/// A message layer registers a part of a buffer, deregisters it, and registers all of it.
#[test]
fn pages_move_again_with_those_around_them() {
    if !is_tested() {
        return;
    }
    let memory = pages(12);
    let base = memory.base() as usize;
    // SAFETY: within the pages, here and below.
    (0..12 * PAGE).for_each(|at| unsafe { memory.base().add(at).write((at / 7) as u8) });
    drop(move_pages(base + 2 * PAGE..base + 6 * PAGE).unwrap());
    let shared = move_pages(base..base + 12 * PAGE).unwrap();
    assert!(shared.is_whole());
    let view = Mapping::new(shared.as_fd(), 0, 12 * PAGE, true).unwrap();
    for at in 0..12 * PAGE {
        // SAFETY: as above.
        assert_eq!(unsafe { view.base().add(at).read_volatile() }, (at / 7) as u8, "byte {at}");
    }
    drop(shared);
    // SAFETY: as above.
    (0..12 * PAGE)
        .for_each(|at| assert_eq!(unsafe { memory.base().add(at).read_volatile() }, (at / 7) as u8));
}

#[test]
fn a_part_of_a_shared_page_is_shared() {
    if !is_tested() {
        return;
    }
    let memory = pages(3);
    let base = memory.base() as usize;
    assert!(move_pages(base + 8..base + 16).is_err(), "not for a part of a page");
    let whole = move_pages(base..base + 3 * PAGE).unwrap();
    assert!(whole.is_last());
    let part = move_pages(base + PAGE + 8..base + PAGE + 16).unwrap();
    assert_eq!((part.range.clone(), part.offset), (base + PAGE + 8..base + PAGE + 16, PAGE + 8));
    assert!(!whole.is_last() && move_pages(base..base).is_err());
    let view = Mapping::new(whole.as_fd(), 0, 3 * PAGE, true).unwrap();
    drop(whole);
    assert!(part.is_last());
    // SAFETY: inside the three pages and their view.
    unsafe {
        view.base().add(PAGE + 9).write_volatile(5);
        assert_eq!(memory.base().add(PAGE + 9).read_volatile(), 5);
    }
}

#[test]
fn what_is_not_plain_memory_stays() {
    let text = move_pages as *const () as usize;
    assert!(move_pages(text & !(PAGE - 1)..(text & !(PAGE - 1)) + PAGE).is_err());
    let small = [0u8; 64];
    assert!(move_pages(small.as_ptr() as usize..small.as_ptr() as usize + 64).is_err());
}

#[test]
fn no_store_is_lost_while_pages_move() {
    if !is_tested() {
        return;
    }
    let memory = Arc::new(pages(64));
    let stop = Arc::new(AtomicBool::new(false));
    let written = Arc::new(AtomicU64::new(0));
    let writer = {
        let (memory, stop, written) = (memory.clone(), stop.clone(), written.clone());
        std::thread::spawn(move || {
            let mut n = 0u64;
            while !stop.load(Ordering::Relaxed) {
                n += 1;
                for page in 0..64 {
                    // SAFETY: the first eight bytes of each page of the mapping.
                    unsafe { memory.base().add(page * PAGE).cast::<u64>().write_volatile(n) };
                }
            }
            written.store(n, Ordering::SeqCst);
        })
    };
    let base = memory.base() as usize;
    for _ in 0..200 {
        let mut shared = None;
        assert!(moves_in_time(|| {
            shared = move_pages(base..base + 64 * PAGE).ok();
            shared.is_some()
        }));
        std::thread::yield_now();
        drop(shared);
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    for page in 0..64 {
        // SAFETY: as above.
        let value = unsafe { memory.base().add(page * PAGE).cast::<u64>().read_volatile() };
        assert_eq!(value, written.load(Ordering::SeqCst), "page {page}");
    }
}

#[test]
fn a_forked_child_has_its_own_copy() {
    if !is_tested() {
        return;
    }
    let memory = pages(2);
    let base = memory.base();
    // SAFETY: inside the two pages; the child only stores, waits and exits.
    unsafe {
        base.write(1);
        let _shared = move_pages(base as usize..base as usize + 2 * PAGE).unwrap();
        let child = libc::fork();
        if child == 0 {
            libc::usleep(20_000);
            let seen = base.read_volatile();
            base.write_volatile(3);
            libc::_exit(i32::from(seen != 1));
        }
        base.write_volatile(2);
        let mut status = 0;
        libc::waitpid(child, &raw mut status, 0);
        assert_eq!(status, 0, "the child sees the contents as they were at the fork");
        assert_eq!(base.read_volatile(), 2, "the child's store stays in the child");
    }
}

#[test]
fn pages_that_a_fork_has_shared_move() {
    if !is_tested() {
        return;
    }
    for ends_first in [false, true] {
        let memory = pages(8);
        let byte = |page: usize| memory.base().wrapping_add(page * PAGE);
        let (reader, mut writer) = std::io::pipe().unwrap();
        // Page 3 does not exist.
        let existing = || (0..8).filter(|page| *page != 3);
        // SAFETY: bytes of the mapping, here and below; the child only reads, waits and exits.
        existing().for_each(|page| unsafe { byte(page).write_volatile(page as u8 + 1) });
        let wait = |child| {
            let mut status = 0;
            // SAFETY: waits for this test's child.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child sees the contents at the fork");
        };
        // SAFETY: as above. The child reads pages of its own, and a descriptor.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut go = [0u8];
            // SAFETY: as above.
            let same = unsafe {
                let ready = ends_first || libc::read(reader.as_raw_fd(), go.as_mut_ptr().cast(), 1) == 1;
                ready && existing().all(|page| byte(page).read_volatile() == page as u8 + 1)
            };
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!same)) };
        }
        assert!(child > 0);
        if ends_first {
            wait(child);
        }
        let base = memory.base() as usize;
        let mut moved = None;
        assert!(
            moves_in_time(|| {
                moved = move_pages(base..base + 8 * PAGE).ok();
                moved.is_some()
            }),
            "no store of this process is needed"
        );
        existing().for_each(|page| {
            // SAFETY: as above.
            unsafe {
                assert_eq!(byte(page).read_volatile(), page as u8 + 1);
                byte(page).write_volatile(99);
            }
        });
        if !ends_first {
            writer.write_all(&[1]).unwrap();
            wait(child);
        }
    }
}

#[test]
fn moved_pages_are_allocated_and_keep_their_contents() {
    if !is_tested() {
        return;
    }
    const PAGES: usize = 3 * exchange::PAGEMAP_BATCH + 7;
    let memory = pages(PAGES);
    let written = [0, exchange::PAGEMAP_BATCH - 1, exchange::PAGEMAP_BATCH, PAGES - 1];
    for page in written {
        // SAFETY: within the pages, here and below.
        unsafe { memory.base().add(page * PAGE + 9).write_volatile(page as u8 | 1) };
    }
    let base = memory.base() as usize;
    let shared = move_pages(base..base + PAGES * PAGE).unwrap();
    assert!(shared.moved.memory.is_fully_allocated());
    let check = |turn: &str| {
        for page in 0..PAGES {
            let expected = if written.contains(&page) { page as u8 | 1 } else { 0 };
            // SAFETY: as above.
            let found = unsafe { memory.base().add(page * PAGE + 9).read_volatile() };
            assert_eq!(found, expected, "page {page}, {turn}");
        }
    };
    check("shared");
    drop(shared);
    check("private again");
}

#[test]
fn locked_pages_stay() {
    let memory = pages(2);
    let base = memory.base() as usize;
    // SAFETY: this test's pages.
    if unsafe { libc::mlock(memory.base().cast(), 2 * PAGE) } == 0 {
        assert!(move_pages(base..base + 2 * PAGE).is_err());
    }
    // SAFETY: as above.
    unsafe { memory.base().add(PAGE).write_volatile(3) };
}

#[test]
fn pages_that_the_kernel_has_pinned_stay() {
    if !is_tested() {
        return;
    }
    let memory = pages(8);
    let base = memory.base() as usize;
    for page in 0..8 {
        // SAFETY: within the pages, here and below.
        unsafe { memory.base().add(page * PAGE).write_volatile(page as u8 + 1) };
    }
    let Some(ring) = pin(base + 5 * PAGE) else { return };
    let refused = move_pages(base..base + 8 * PAGE).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
    for page in 0..8 {
        // SAFETY: as above.
        assert_eq!(unsafe { memory.base().add(page * PAGE).read_volatile() }, page as u8 + 1);
    }
    drop(ring);
    assert!(moves_in_time(|| move_pages(base..base + 8 * PAGE).is_ok()));
}

/// Pins the page at an address as a fixed buffer of a ring. None, with a printed reason, where io_uring is not available.
fn pin(page: usize) -> Option<OwnedFd> {
    /// `IORING_REGISTER_BUFFERS` (linux/io_uring.h).
    const REGISTER_BUFFERS: u32 = 0;
    // The parameters of a ring, all zero.
    let mut parameters = [0u64; 15];
    // SAFETY: makes a new descriptor; the parameters take 120 bytes.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
    if ring < 0 {
        println!("skipped: io_uring is not available: {}", io::Error::last_os_error());
        return None;
    }
    // SAFETY: a new descriptor.
    let ring = unsafe { OwnedFd::from_raw_fd(ring as i32) };
    let fixed = libc::iovec { iov_base: page as *mut libc::c_void, iov_len: PAGE };
    // SAFETY: one buffer, a page of the test.
    let registered = unsafe {
        libc::syscall(libc::SYS_io_uring_register, ring.as_raw_fd(), REGISTER_BUFFERS, &raw const fixed, 1)
    };
    assert_eq!(registered, 0, "{}", io::Error::last_os_error());
    Some(ring)
}

/// Whether an attempt succeeds soon. The kernel unpins pages some time after the ring's end.
fn moves_in_time(mut attempt: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !attempt() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

#[test]
fn a_move_that_a_pinned_page_has_ended_goes_on_later() {
    if !is_tested() {
        return;
    }
    let count = 3 * PIECE / PAGE;
    let memory = pages(count);
    let base = memory.base() as usize;
    let range = base..base + count * PAGE;
    for page in 0..count {
        // SAFETY: within the pages, here and below.
        unsafe { memory.base().add(page * PAGE).cast::<u32>().write_volatile(page as u32 + 1) };
    }
    let Some(ring) = pin(base + PIECE + 7 * PAGE) else { return };
    let part = move_pages_while(range.clone(), || true).expect("the first piece moves");
    assert!(!part.is_whole());
    assert_eq!(part.range, base..base + PIECE);
    let again = move_pages_while(range.clone(), || true).expect("the first piece stays shared");
    assert_eq!((again.range.clone(), again.id()), (part.range.clone(), part.id()));
    drop(ring);
    let mut whole = again;
    assert!(moves_in_time(|| {
        whole = move_pages_while(range.clone(), || true).expect("the first piece stays shared");
        whole.is_whole()
    }));
    assert_eq!((whole.range.clone(), whole.id()), (range, part.id()));
    drop(part);
    let check = |when: &str| {
        for page in 0..count {
            // SAFETY: as above.
            let found = unsafe { memory.base().add(page * PAGE).cast::<u32>().read_volatile() };
            assert_eq!(found, page as u32 + 1, "page {page}, {when}");
        }
    };
    check("shared");
    drop(whole);
    check("private again");
}

#[test]
fn a_huge_page_with_a_pinned_part_stays() {
    if !is_tested() {
        return;
    }
    ends(|| {
        let memory = pages(2 * PIECE / PAGE);
        // The first huge page inside the mapping.
        let base = (memory.base() as usize).next_multiple_of(PIECE);
        // SAFETY: memory of this test, here and below. Without huge pages the test pins a small one.
        unsafe {
            libc::madvise(base as *mut libc::c_void, PIECE, libc::MADV_HUGEPAGE);
            (base as *mut u8).write_volatile(4);
        }
        let Some(ring) = pin(base + 9 * PAGE) else { return };
        let refused = move_pages(base..base + PIECE).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
        // SAFETY: as above.
        assert_eq!(unsafe { (base as *mut u8).read_volatile() }, 4);
        drop(ring);
        assert!(moves_in_time(|| move_pages(base..base + PIECE).is_ok()));
    });
}

#[test]
fn system_calls_wait_while_pages_move() {
    if !is_tested() {
        return;
    }
    let memory = Arc::new(pages(64));
    let stop = Arc::new(AtomicBool::new(false));
    let (mut reader, writer) = std::io::pipe().unwrap();
    let reading = {
        let (memory, stop) = (memory.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut reads = 0u32;
            while !stop.load(Ordering::Relaxed) {
                (&writer).write_all(&[reads as u8; 8]).unwrap();
                let at = memory.base().wrapping_add(reads as usize % 64 * PAGE);
                // SAFETY: eight bytes of a page of the mapping.
                let into = unsafe { std::slice::from_raw_parts_mut(at, 8) };
                reader.read_exact(into).expect("no read fails");
                // SAFETY: as above.
                assert_eq!(unsafe { at.add(7).read_volatile() }, reads as u8);
                reads += 1;
            }
            reads
        })
    };
    let base = memory.base() as usize;
    for _ in 0..200 {
        assert!(moves_in_time(|| move_pages(base..base + 64 * PAGE).is_ok()));
    }
    stop.store(true, Ordering::Relaxed);
    assert!(reading.join().unwrap() > 0);
}

#[test]
fn no_signal_handler_is_installed() {
    if !is_tested() {
        return;
    }
    let handler = || {
        // SAFETY: reads the disposition of a signal.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGSEGV, std::ptr::null(), &raw mut action);
            action.sa_sigaction
        }
    };
    let before = handler();
    let memory = pages(2);
    let base = memory.base() as usize;
    let _shared = move_pages(base..base + 2 * PAGE).unwrap();
    assert_eq!(handler(), before);
}

/// Runs a test in another thread, and fails if it does not end in time.
fn ends(test: impl FnOnce() + Send + 'static) {
    let (end, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        test();
        end.send(()).unwrap();
    });
    ended.recv_timeout(std::time::Duration::from_secs(60)).expect("the move ends");
}

#[test]
fn pages_of_the_heap_move_with_what_moving_them_uses() {
    if !is_tested() {
        return;
    }
    ends(|| {
        // Freed chunks of these sizes are what the allocator returns next.
        let around = || vec![7u8; 16 * PAGE];
        let (before, inside, after) = (around(), (1..400).map(|n| vec![0u8; n]), around());
        let inside: Vec<Vec<u8>> = inside.collect();
        let last = around();
        let starts = [&before, &after, &last].map(|block| block.as_ptr().addr());
        let start = *starts.iter().min().unwrap();
        let end = *starts.iter().max().unwrap() + 16 * PAGE;
        drop(inside);
        for _ in 0..20 {
            // Other tests change the address space.
            assert!(moves_in_time(|| move_pages(start..end).is_ok()));
        }
        assert!([before, after, last].iter().flatten().all(|byte| *byte == 7));
    });
}

#[test]
fn a_stack_that_is_in_use_stays() {
    ends(|| {
        let block = [7u8; 8 * PAGE];
        let start = block.as_ptr().addr();
        assert!(move_pages(start..start + block.len()).is_err());
        assert!(block.iter().all(|byte| *byte == 7));
    });
}

/// Runs `test` in a forked child, whose result is its exit status.
fn holds_in_a_child(test: impl FnOnce() -> bool + Send + 'static) {
    // SAFETY: the C library makes its heap usable in the child; the child ends itself.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let holds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test)).unwrap_or(false);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!holds)) };
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: waits for this test's child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "{status:#x}");
}

/// Fills pages with bytes that differ from zero.
fn fill(memory: &Mapping) {
    // SAFETY: bytes of the mapping.
    (0..memory.len()).for_each(|at| unsafe { memory.base().add(at).write_volatile((at / 7) as u8 | 1) });
}

fn is_filled(memory: &Mapping) -> bool {
    // SAFETY: bytes of the mapping.
    (0..memory.len()).all(|at| unsafe { memory.base().add(at).read_volatile() } == (at / 7) as u8 | 1)
}

fn move_all(memory: &Mapping) -> SharedPages {
    let base = memory.base() as usize;
    move_pages(base..base + memory.len()).unwrap()
}

/// Maps other private memory in place of a mapping.
fn replace_pages(memory: &Mapping) {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: replaces memory of the test, which nobody refers to.
    let mapped = unsafe { libc::mmap(memory.base().cast(), memory.len(), protection, flags, -1, 0) };
    assert_eq!(mapped, memory.base().cast());
}

#[test]
fn pages_keep_their_contents_where_the_list_of_mappings_cannot_be_read() {
    if !is_tested() {
        return;
    }
    holds_in_a_child(|| {
        let memory = pages(2 * PIECE / PAGE + 3);
        fill(&memory);
        let shared = move_all(&memory);
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: changes the limit of this child. One descriptor is left for the faults, and none for the list.
        unsafe {
            let free = libc::dup(0);
            libc::close(free);
            libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
            let few = libc::rlimit { rlim_cur: free as libc::rlim_t + 1, ..limit };
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few);
        }
        let ranges = || MOVED_RANGES.lock().len();
        let before = ranges();
        drop(shared);
        let kept = is_filled(&memory) && ranges() == before;
        // SAFETY: as above. The child of a child gets copies of pages that are still shared.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        holds_in_a_child({
            let base = memory.base().addr();
            move || {
                // SAFETY: the first byte of the pages.
                unsafe { (base as *mut u8).write_volatile(99) };
                true
            }
        });
        let own = is_filled(&memory);
        // The next deregistration moves the pages back.
        let other = pages(1);
        drop(move_all(&other));
        kept && own && ranges() == before - 1 && is_filled(&memory)
    });
}

#[test]
fn pages_move_in_a_process_whose_main_thread_has_ended() {
    if !is_tested() {
        return;
    }
    holds_in_a_child(|| {
        let memory = pages(2 * PIECE / PAGE + 3);
        fill(&memory);
        let shared = move_all(&memory);
        std::thread::spawn(move || {
            // SAFETY: ends this child, with its result.
            let end = |holds: bool| unsafe { libc::_exit(i32::from(!holds)) };
            while !std::fs::read("/proc/self/maps").is_ok_and(|text| text.is_empty()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(shared);
            let back = is_filled(&memory);
            let again = move_pages(memory.base() as usize..memory.base() as usize + memory.len());
            end(back && again.is_ok() && is_filled(&memory));
        });
        // SAFETY: ends the main thread alone, as `pthread_exit` does.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
        false
    });
}

/// As `realloc` does with a large buffer.
#[test]
fn pages_that_the_application_has_moved_elsewhere_keep_their_contents() {
    if !is_tested() {
        return;
    }
    let memory = pages(8);
    fill(&memory);
    let shared = move_all(&memory);
    let place = pages(8);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: moves the test's pages to another mapping of the test.
    let moved = unsafe { libc::mremap(memory.base().cast(), memory.len(), place.len(), flags, place.base()) };
    assert_eq!(moved, place.base().cast());
    std::mem::forget(memory);
    drop(shared);
    assert!(is_filled(&place));
}

#[test]
fn a_deregistration_in_a_forked_child_leaves_the_parents_pages() {
    if !is_tested() {
        return;
    }
    let memory = pages(8);
    fill(&memory);
    let shared = move_all(&memory);
    let (base, len) = (memory.base().addr(), memory.len());
    // SAFETY: the child deregisters, looks at its pages, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(shared);
        // SAFETY: as above.
        unsafe {
            let kept = (0..len).all(|at| ((base + at) as *const u8).read_volatile() == (at / 7) as u8 | 1);
            libc::_exit(i32::from(!kept))
        }
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: waits for this test's child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child keeps its copies");
    assert!(is_filled(&memory), "still shared");
    drop(shared);
    assert!(is_filled(&memory), "private again");
}

/// A child that has no room for copies of all pages at once gets them in pieces; one that has no room for a piece gets none, and no
/// access. In no case do its stores reach the parent.
#[test]
fn a_forked_child_without_memory_shares_no_page() {
    if !is_tested() {
        return;
    }
    for (room, end_of_child) in [(3 * PIECE, 0), (PIECE / 4, libc::SIGSEGV)] {
        holds_in_a_child(move || {
            let memory = pages(8 * PIECE / PAGE);
            let base = memory.base();
            // SAFETY: inside the pages; the child stores, and ends.
            unsafe {
                base.write(1);
                let _shared = move_all(&memory);
                let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
                let used = statm.split(' ').next().unwrap().parse::<usize>().unwrap() * PAGE;
                let limit = libc::rlimit { rlim_cur: (used + room) as u64, rlim_max: libc::RLIM_INFINITY };
                assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &raw const limit), 0);
                let child = libc::fork();
                if child == 0 {
                    libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                    let seen = base.read_volatile();
                    base.write_volatile(99);
                    libc::_exit(i32::from(seen != 1));
                }
                let mut status = 0;
                libc::waitpid(child, &raw mut status, 0);
                status == end_of_child && base.read_volatile() == 1
            }
        });
    }
}

#[test]
fn a_fork_leaves_memory_that_has_replaced_moved_pages() {
    if !is_tested() {
        return;
    }
    // One unmapped, one replaced, one in the middle of which a page is replaced.
    let [gone, other, part] = [8, 8, 8].map(pages);
    [&other, &part].into_iter().for_each(fill);
    let ranges = [&gone, &other, &part].map(move_all);
    drop(gone);
    replace_pages(&other);
    // SAFETY: a page of the test.
    let middle = Mapping::from_raw(unsafe { part.base().add(3 * PAGE) }, PAGE);
    replace_pages(&middle);
    fill(&other);
    fill(&middle);
    let (start, end) = (part.base().addr(), 3 * PAGE);
    holds_in_a_child(move || {
        // SAFETY: bytes of the test's mappings.
        let same =
            (0..end).all(|at| unsafe { ((start + at) as *const u8).read_volatile() } == (at / 7) as u8 | 1);
        // SAFETY: as above. The parent must not see this.
        unsafe { (start as *mut u8).write_volatile(99) };
        let kept = same && is_filled(&other) && is_filled(&middle);
        std::mem::forget((other, middle));
        kept
    });
    // SAFETY: as above.
    assert_eq!(unsafe { part.base().read_volatile() }, 1);
    drop(ranges);
}

#[test]
fn pages_that_are_no_longer_mapped_are_not_found() {
    if !is_tested() {
        return;
    }
    let memory = pages(8);
    let base = memory.base().addr();
    let range = base..base + memory.len();
    let old = move_all(&memory);
    replace_pages(&memory);
    assert!(find_moved(range.clone()).is_none());
    assert!(find_moved(base + PAGE + 8..base + PAGE + 16).is_none());
    let new = move_all(&memory);
    assert_ne!(old.id(), new.id());
    assert_eq!(find_moved(range).expect("the new pages").id(), new.id());
    let view = Mapping::new(new.as_fd(), 0, memory.len(), true).unwrap();
    // SAFETY: inside the view and the pages.
    unsafe {
        view.base().add(5).write_volatile(42);
        assert_eq!(memory.base().add(5).read_volatile(), 42);
        drop(old);
        view.base().add(6).write_volatile(43);
        assert_eq!(
            memory.base().add(6).read_volatile(),
            43,
            "the end of the old region leaves the new pages"
        );
    }
    drop(new);
    // SAFETY: as above.
    assert_eq!(unsafe { memory.base().add(6).read_volatile() }, 43);
}

/// The protection of the mapping at `address`, and whether it is shared.
fn mapping_at(address: usize) -> Option<(libc::c_int, bool)> {
    let vmas = maps::vmas(address..address + 1).unwrap();
    vmas.first().map(|vma| (vma.protection, vma.shared))
}

/// A program may protect pages of a registered region. Neither a fork nor a deregistration accesses them, or lifts the protection.
#[test]
fn protected_pages_stay_protected() {
    if !is_tested() {
        return;
    }
    for protection in [libc::PROT_NONE, libc::PROT_READ] {
        holds_in_a_child(move || {
            let memory = pages(8);
            fill(&memory);
            let shared = move_all(&memory);
            let page = memory.base().wrapping_add(2 * PAGE);
            // SAFETY: a page of the test, not accessed before it can be again.
            let protect = |protection| unsafe { libc::mprotect(page.cast(), PAGE, protection) == 0 };
            assert!(protect(protection));
            // SAFETY: the child looks at its mappings and pages, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let kept = mapping_at(page.addr()) == Some((protection, false))
                    && mapping_at(memory.base().addr()) == Some((READ_WRITE, false))
                    && protect(READ_WRITE)
                    && is_filled(&memory);
                // SAFETY: as above.
                unsafe { libc::_exit(i32::from(!kept)) };
            }
            let mut status = 0;
            // SAFETY: our own child.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child's pages");
            drop(shared);
            mapping_at(page.addr()) == Some((protection, false)) && protect(READ_WRITE) && is_filled(&memory)
        });
    }
}

#[test]
fn memory_with_code_stays_in_place() {
    if !is_tested() {
        return;
    }
    let memory = pages(4);
    memory.protect(READ_WRITE | libc::PROT_EXEC).unwrap();
    let base = memory.base().addr();
    assert_eq!(move_pages(base..base + memory.len()).unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

/// The parent waits for the child's copies also if all descriptors are in use.
#[test]
fn a_fork_without_a_free_descriptor_gives_the_child_copies() {
    if !is_tested() {
        return;
    }
    holds_in_a_child(|| {
        let memory = pages(8 * PIECE / PAGE);
        fill(&memory);
        let limit = libc::rlimit { rlim_cur: 128, rlim_max: 128 };
        // SAFETY: a plain system call of a process of its own.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        let _shared = move_all(&memory);
        let mut taken = Vec::new();
        for _ in 0..3 {
            while let Ok(file) = std::fs::File::open("/dev/null") {
                taken.push(file);
            }
            // SAFETY: the child looks at its pages, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let status = i32::from(!is_filled(&memory));
                // SAFETY: as above.
                unsafe { libc::_exit(status) };
            }
            // SAFETY: bytes of the mapping. If the parent did not wait, the child would see them.
            (0..memory.len()).step_by(PAGE).for_each(|at| unsafe { memory.base().add(at).write_volatile(0) });
            let mut status = 0;
            // SAFETY: our own child.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            if status != 0 {
                return false;
            }
            fill(&memory);
        }
        true
    });
}

/// Of memory that is hidden, a child has neither pages nor the file, and it leaves the parent's pages alone.
#[test]
fn a_child_gets_no_hidden_pages() {
    if !is_tested() {
        return;
    }
    // In a process of its own, because nothing shows the pages again.
    holds_in_a_child(|| {
        let [before, after] = [8, 8].map(pages);
        [&before, &after].into_iter().for_each(fill);
        let first = move_all(&before);
        hide_from_children().unwrap();
        let second = move_all(&after);
        // SAFETY: the child looks at its mappings, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let has_file = std::fs::read_dir("/proc/self/fd").unwrap().flatten().any(|fd| {
                std::fs::read_link(fd.path()).is_ok_and(|file| file.to_string_lossy().contains(FILE_NAME))
            });
            let is_gone = |memory: &Mapping| mapping_at(memory.base().addr()).is_none();
            let none = is_gone(&before) && is_gone(&after) && !has_file;
            drop([first, second]);
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!none)) };
        }
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child");
        let is_shared = [&before, &after].map(|memory| mapping_at(memory.base().addr()));
        assert_eq!(is_shared, [Some((READ_WRITE, true)); 2]);
        drop([first, second]);
        is_filled(&before) && is_filled(&after)
    });
}
