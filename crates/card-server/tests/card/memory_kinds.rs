//! Kinds of card memory: tests that hold for all of them, and the errors of each.
//!
//! The tests need neither a spare PCIe device nor a GPU. A file in a copy of the sysfs layout acts as BAR,
//! and `gpu_driver.cpp` as CUDA and Vulkan driver. docs/cards.md lists the differences to real devices, and the test for
//! a site that has them.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use millstream_card::checkpoint::{restore, save};
use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::info::CardInfo;
use millstream_card::{Card, OpenError};
use millstream_card::{RemoteCard, RemoteError, RemoteErrorKind};
use millstream_card_abi::codes::RegionState;
use millstream_card_abi::command::Cause;
use millstream_card_abi::dma::{BAR2_OFFSET, DmaDescriptor, DmaOperation};
use millstream_card_abi::ipc::Refusal;
use millstream_card_abi::registers::{REGION_CONTROL, region_at};
use millstream_card_abi::{CardName, MemoryRange};
use millstream_card_server::backing::{BackingKind, DevicePaths, default_size};
use millstream_card_server::{CardConfig, ServeError, serve};
use millstream_gpu::ENV_VULKAN;
use millstream_rdma::{Access, Region};
use millstream_shm::Memfd;
use tempfile::TempDir;

use crate::cards::{BANK, BANKS, NetworkCard, device};
use crate::gpu_driver;
use crate::host::{TIMEOUT, again};

const LEASE: Duration = Duration::from_secs(20);
const MEMORY: u64 = BANK * BANKS as u64;

/// Environment variable with the name of the card that [`a_local_user_of_a_gpu`] opens.
const GPU_CARD: &str = "MILLSTREAM_TEST_GPU_CARD";

/// A machine with a PCIe device at 0000:01:00.0 and a GPU.
fn machine() -> (TempDir, DevicePaths) {
    let folder = tempfile::tempdir().unwrap();
    let device = folder.path().join("bus/pci/devices/0000:01:00.0");
    fs::create_dir_all(&device).unwrap();
    let bar = |start: u64, size: u64, flags: u64| {
        format!("{start:#018x} {:#018x} {flags:#018x}\n", start + size - 1)
    };
    let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
    let bars = bar(0xf000_0000, 64 << 10, 0x40200)
        + none
        + &bar(0xe000, 256, 0x40101)
        + none
        + &bar(0x20_0000_0000, MEMORY, 0x14_220c)
        + none
        + none;
    fs::write(device.join("resource"), bars).unwrap();
    fs::write(device.join("enable"), "0\n").unwrap();
    // Data that the device's last user left.
    fs::write(device.join("resource4"), vec![0xaa; MEMORY as usize]).unwrap();

    let library = gpu_driver::build(folder.path()).to_str().unwrap().to_owned();
    let roots = DevicePaths {
        sysfs: folder.path().to_owned(),
        cuda: library.clone(),
        vulkan: library,
        ..DevicePaths::default()
    };
    (folder, roots)
}

/// Replaces the file of the BAR by one that nobody can shrink, as no one can shrink a file of sysfs. It lives as long as
/// the result.
fn seal_bar(roots: &DevicePaths) -> Memfd {
    let memory = Memfd::sealed("bar", MEMORY as usize).unwrap();
    let file = format!("/proc/{}/fd/{}", std::process::id(), memory.as_fd().as_raw_fd());
    let bytes = vec![0xaa; MEMORY as usize];
    OpenOptions::new().write(true).open(&file).unwrap().write_all(&bytes).unwrap();
    let bar = roots.sysfs.join("bus/pci/devices/0000:01:00.0/resource4");
    fs::remove_file(&bar).unwrap();
    symlink(file, bar).unwrap();
    memory
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at + seed * 1000).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

#[track_caller]
fn cause(outcome: Result<impl std::fmt::Debug, RemoteError>) -> Cause {
    match outcome.unwrap_err().kind {
        RemoteErrorKind::Rejected { cause, .. } | RemoteErrorKind::TransferFailed { cause, .. } => cause,
        other => panic!("{other}"),
    }
}

#[track_caller]
fn expect(node: &RemoteCard, offset: u64, expected: &[u8]) {
    let mut found = vec![0; expected.len()];
    node.read(offset, &mut found).unwrap();
    assert!(found == expected, "{} bytes at {offset:#x}", expected.len());
}

/// What a local user gets who opens a card.
#[derive(Clone, Copy, PartialEq)]
enum Local {
    Mapping,
    /// Another process maps it: Vulkan is a library of that process.
    Driver,
    /// The card refuses: the memory is not the host's to map.
    NotMappable,
    /// The client refuses: another process could shrink the memory.
    Unsafe,
}

/// Tests a card with any kind of memory. Kernels run in place if it is `mapped` in the card's process.
fn check_memory_kind(kind: &str, number: &str, roots: &DevicePaths, mapped: bool, local: Local) {
    let (card, neighbour) = (NetworkCard::of(kind, roots), NetworkCard::start());
    let (node, other) = (card.connect(), neighbour.connect());
    let info = CardInfo::of(&node.snapshot().unwrap());
    assert_eq!((info.memory_kind.as_str(), info.memory_bytes), (number, MEMORY));
    node.acquire(LEASE, TIMEOUT).unwrap();
    let held = other.acquire(LEASE, TIMEOUT).unwrap();

    // All bytes are zero at first. Then every bank can be written and read, at its edges and across them.
    expect(&node, 0, &vec![0; MEMORY as usize]);
    for bank in 0..u64::from(BANKS) {
        node.write(bank * BANK + BANK - 3000, &pattern(bank, 3000)).unwrap();
        node.write(bank * BANK, &pattern(bank + 7, 5)).unwrap();
    }
    for bank in 0..u64::from(BANKS) {
        expect(&node, bank * BANK + BANK - 3000, &pattern(bank, 3000));
        expect(&node, bank * BANK, &pattern(bank + 7, 5));
    }
    node.write(BANK - 50_000, &pattern(9, 100_000)).unwrap();
    expect(&node, BANK - 50_000, &pattern(9, 100_000));
    let outside = node.write(MEMORY - 4, &[0; 8]).unwrap_err();
    assert!(matches!(outside.kind, RemoteErrorKind::OutOfRange { .. }), "{outside}");

    // Kernels and clients see each other's writes. A kernel cannot access banks that were not granted.
    node.load(0, KernelSource::Builtin("fill")).unwrap();
    let len = BANK + 4096;
    node.run(0, &RunRequest::new(&[0, 3, len]), TIMEOUT).unwrap();
    node.write(8, &5u64.to_le_bytes()).unwrap();
    node.load(0, KernelSource::Builtin("copy")).unwrap();
    node.run(0, &RunRequest::new(&[0, 2 * BANK, len]), TIMEOUT).unwrap();
    node.load(0, KernelSource::Builtin("reduce")).unwrap();
    let sums = node.run(0, &RunRequest::new(&[2 * BANK, 0, len]), TIMEOUT).unwrap();
    assert_eq!(sums[..2], [len, 3 * len / 8 + 2]);
    let foreign = RunRequest { banks: 0b1, ..RunRequest::new(&[BANK - 8, 0, 16]) };
    assert_eq!(cause(node.run(0, &foreign, TIMEOUT)), Cause::AccessViolation);
    // A kernel that works in place needs mapped memory.
    node.load(1, KernelSource::Builtin("stencil")).unwrap();
    let stencil = node.run(1, &RunRequest::new(&[0, 16, 16, 16, 0, 4096, 1]), TIMEOUT);
    match mapped {
        true => assert_eq!(stencil.unwrap()[0], 1),
        false => assert_eq!(cause(stencil), Cause::MemoryNotMapped),
    }

    // Transfers: through the DMA window, within memory, to another card and back.
    let copy = DmaDescriptor {
        operation: DmaOperation::Local,
        peer: 0,
        local: MemoryRange::new(BANK, 8192),
        remote: BAR2_OFFSET,
        key: 0,
        notify: false,
    };
    node.write(BANK, &pattern(3, 8192)).unwrap();
    let back = DmaDescriptor { local: MemoryRange::new(BAR2_OFFSET, 8192), remote: 3 * BANK, ..copy };
    let within = DmaDescriptor { remote: 3 * BANK + 10_000, ..copy };
    node.run_dma(&[copy, back, within], TIMEOUT).unwrap();
    expect(&node, 3 * BANK, &pattern(3, 8192));
    expect(&node, 3 * BANK + 10_000, &pattern(3, 8192));
    node.connect_peer(0, &neighbour.address).unwrap();
    let there = held.memory;
    let send = DmaDescriptor {
        operation: DmaOperation::Write,
        remote: there.addr + 77,
        key: there.rkey.get(),
        ..copy
    };
    let fetch = DmaDescriptor { operation: DmaOperation::Read, local: MemoryRange::new(77, 8192), ..send };
    node.run_dma(&[send, fetch], TIMEOUT).unwrap();
    expect(&other, 77, &pattern(3, 8192));
    expect(&node, 77, &pattern(3, 8192));

    // A card with another kind of memory restores its checkpoint.
    let file = tempfile::tempdir().unwrap();
    let file = file.path().join("card.checkpoint");
    save(&node, &file, |_, _| {}).unwrap();
    restore(&other, &file, |_, _| {}).unwrap();
    expect(&other, 3 * BANK + 10_000, &pattern(3, 8192));

    // The next holder finds zeroed memory, and the former holder's keys are invalid.
    let old = node.held().unwrap().memory;
    node.release().unwrap();
    let next = card.connect();
    next.acquire(LEASE, TIMEOUT).unwrap();
    expect(&next, 0, &vec![0; MEMORY as usize]);
    other.connect_peer(1, &card.address).unwrap();
    let stale = DmaDescriptor {
        operation: DmaOperation::Write,
        peer: 1,
        remote: old.addr,
        key: old.rkey.get(),
        ..copy
    };
    assert_eq!(cause(other.run_dma(&[stale], TIMEOUT)), Cause::DmaRemoteAccess);

    // A local user can map host memory, BARs that cannot shrink, and GPU memory with the help of its driver.
    let name: CardName = format!("net-{}", card.process.id()).parse().unwrap();
    if local == Local::Driver {
        let client = again("memory_kinds::a_local_user_of_a_gpu")
            .env(GPU_CARD, name.to_string())
            .env(ENV_VULKAN, &roots.vulkan)
            .status();
        assert!(client.unwrap().success());
        expect(&next, BANK - 8, &pattern(6, 16));
        return;
    }
    match Card::open(&name, TIMEOUT) {
        Ok(open) => {
            assert!(local == Local::Mapping && open.memory().size() == MEMORY);
            next.write(BANK - 8, &pattern(5, 16)).unwrap();
            let mut found = [0; 16];
            open.memory().read(BANK - 8, &mut found).unwrap();
            assert_eq!(&found[..], pattern(5, 16));
        }
        Err(OpenError::Refused { refusal, .. }) => {
            assert!(local == Local::NotMappable && refusal == Refusal::NotMappable, "{refusal}");
        }
        Err(OpenError::Malformed { what, .. }) => {
            assert!(local == Local::Unsafe && what.contains("sealed against shrinking"), "{what}");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn host_memory_passes_the_memory_suite() {
    let (_folder, roots) = machine();
    check_memory_kind("emulated", "Emulated", &roots, true, Local::Mapping);
}

#[test]
fn a_bar_is_a_cards_memory() {
    let (_folder, roots) = machine();
    let _bar = seal_bar(&roots);
    check_memory_kind("pci:0000:01:00.0", "Pci", &roots, true, Local::Mapping);
}

#[test]
fn a_local_user_does_not_map_a_bar_whose_file_can_shrink() {
    let (_folder, roots) = machine();
    check_memory_kind("pci:0000:01:00.0", "Pci", &roots, true, Local::Unsafe);
}

#[test]
fn gpu_memory_is_a_cards() {
    let (_folder, roots) = machine();
    check_memory_kind("cuda:0", "Cuda", &roots, false, Local::Driver);
}

#[test]
fn without_vulkan_gpu_memory_is_a_dmabuf() {
    let (_folder, roots) = machine();
    let roots = DevicePaths { vulkan: "libvulkan-of-nobody.so.1".to_owned(), ..roots };
    check_memory_kind("cuda:0", "Cuda", &roots, false, Local::NotMappable);
}

/// Not a test: maps a GPU's card, and writes to its memory.
#[test]
fn a_local_user_of_a_gpu() {
    let Ok(name) = std::env::var(GPU_CARD) else { return };
    let card = Card::open(&name.parse().unwrap(), TIMEOUT).unwrap();
    assert_eq!((card.memory().size(), card.is_gpu()), (MEMORY, true));
    card.memory().write(BANK - 8, &pattern(6, 16)).unwrap();
    let mut found = [0; 16];
    card.memory().read(BANK - 8, &mut found).unwrap();
    assert_eq!(&found[..], pattern(6, 16));
    // The registration is that of a builder unit.
    let region = Region::mapped(&device(), card.memory().mapping().clone(), 0, 4096, Access::REMOTE_WRITE);
    assert_eq!(region.unwrap().len(), 4096);
}

/// Doubles words: `gpu_driver.cpp` has the kernel.
const DOUBLE_WORDS: &str = include_str!("../../../cli/src/card/double_words.ptx");

#[test]
fn a_users_kernel_runs_on_the_gpu() {
    let (_folder, roots) = machine();
    let card = NetworkCard::of("cuda:0", &roots);
    let node = card.connect();
    node.acquire(LEASE, TIMEOUT).unwrap();
    for (word, at) in (1..5u64).zip((BANK..).step_by(8)) {
        node.write(at, &word.to_le_bytes()).unwrap();
    }
    let image = KernelSource::Image { image: DOUBLE_WORDS.as_bytes(), at: 0 };
    node.load(0, image).unwrap();
    let results = node.run(0, &RunRequest::new(&[BANK, 4]), TIMEOUT).unwrap();
    assert_eq!(results[..2], [20, 0]);
    expect(&node, BANK + 24, &8u64.to_le_bytes());
    let some_banks = RunRequest { banks: 0b1, ..RunRequest::new(&[BANK, 4]) };
    assert_eq!(cause(node.run(0, &some_banks, TIMEOUT)), Cause::BanksNotGranted);
    for (image, expected) in [
        (DOUBLE_WORDS.replace("double_words", "unknown"), Cause::GpuFailed),
        (DOUBLE_WORDS.replace(".entry", ".func"), Cause::KernelFormat),
        (DOUBLE_WORDS.replace("//\n", "words\n"), Cause::KernelFormat),
    ] {
        let refused = node.load(0, KernelSource::Image { image: image.as_bytes(), at: 0 });
        assert_eq!(cause(refused), expected);
    }
}

/// The card ends with its launcher, too: see the end of [`NetworkCard`].
#[test]
fn clearing_and_copies_do_not_wait_for_a_kernel_of_the_gpu_that_does_not_end() {
    let (_folder, roots) = machine();
    let card = NetworkCard::of("cuda:0", &roots);
    let node = card.connect();
    node.acquire(LEASE, TIMEOUT).unwrap();
    let image = DOUBLE_WORDS.replace("double_words", "endless");
    node.load(0, KernelSource::Image { image: image.as_bytes(), at: 0 }).unwrap();
    node.start(0, &RunRequest::new(&[])).unwrap();
    let state = || node.register(REGION_CONTROL + region_at::status).unwrap() as u32;
    let until = Instant::now() + TIMEOUT;
    while state() != RegionState::Running as u32 {
        assert!(Instant::now() < until, "region is in state {}", state());
    }
    node.write(BANK, &pattern(3, 8192)).unwrap();
    let copy = DmaDescriptor {
        operation: DmaOperation::Local,
        peer: 0,
        local: MemoryRange::new(BANK, 8192),
        remote: 3 * BANK,
        key: 0,
        notify: false,
    };
    node.run_dma(&[copy], TIMEOUT).unwrap();
    expect(&node, 3 * BANK, &pattern(3, 8192));
    node.clear().unwrap();
    expect(&node, 0, &vec![0; MEMORY as usize]);
    assert_eq!(state(), RegionState::Running as u32);
}

#[test]
fn a_device_that_is_not_there_or_too_small_is_named() {
    let (folder, roots) = machine();
    let device = folder.path().join("bus/pci/devices/0000:01:00.0");
    let refused = |kind: &str, memory: u64| {
        let name = format!("kinds-{}", std::process::id()).parse().unwrap();
        let mut config = CardConfig::new(name, memory);
        config.memory_kind = kind.parse().unwrap();
        config.device_paths = roots.clone();
        match serve(config) {
            Err(ServeError::Hardware(error)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let size = |kind: &str| default_size(&kind.parse::<BackingKind>().unwrap(), &roots);
    assert_eq!(size("pci:0000:01:00.0").unwrap(), Some(MEMORY), "the largest BAR");
    assert_eq!(size("pci:0000:01:00.0/bar0").unwrap(), Some(64 << 10));
    for (kind, memory, expected) in [
        ("pci:0000:02:00.0", 4096, "no PCI device 0000:02:00.0: "),
        ("pci:0000:01:00.0/bar1", 4096, "BAR 1 of PCI device 0000:01:00.0 is not present"),
        ("pci:0000:01:00.0/bar2", 4096, "BAR 2 of PCI device 0000:01:00.0 is I/O ports, not memory"),
        (
            "pci:0000:01:00.0",
            MEMORY + 4096,
            "BAR 4 of PCI device 0000:01:00.0 has 16777216 bytes, card memory of 16781312 bytes does not fit",
        ),
        ("pci:0000:01:00.0/bar0", 4096, "resource0: No such file or directory"),
        ("cuda:3", 4096, "cuda:3: no GPU 3: the driver has 1 GPUs"),
        // Vulkan has no room for it, either.
        ("cuda:0", 2 << 30, "cuda:0: cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2)"),
    ] {
        let error = refused(kind, memory);
        assert!(error.contains(expected), "{kind}: {error}");
    }
    assert_eq!(fs::read_to_string(device.join("enable")).unwrap(), "1", "it answers to its BARs");
    fs::write(device.join("resource"), "no numbers\n").unwrap();
    assert!(refused("pci:0000:01:00.0", 4096).contains("expected three hexadecimal numbers per line"));
    fs::write(device.join("resource"), "0xe000 0xe0ff 0x101\n").unwrap();
    assert!(refused("pci:0000:01:00.0", 4096).contains("PCI device 0000:01:00.0 has no memory BAR"));
    assert!(refused("pci:0000:01:00.0/bar5", 4096).contains("BAR 5"));
}
