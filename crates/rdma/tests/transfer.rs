//! The data path, for each operation and each kind of memory.

mod common;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use common::{End, both, device, soon};
use millstream_rdma::memory::MemoryError;
use millstream_rdma::queue::{Opcode, RecvList, Segment, SendList, Signal};
use millstream_rdma::{Access, Completion, RcOptions, Region, RemoteMemory, Status, WrId};

const SIZE: u32 = 64 * 1024;

fn pattern(seed: u8) -> Vec<u8> {
    (0..SIZE).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn remote(private_data: &[u8]) -> RemoteMemory {
    RemoteMemory::decode(private_data.try_into().unwrap())
}

/// An initiator, and a target with landing memory of [`SIZE`] bytes and four receives without elements.
fn initiator_and_target(access: Access) -> (End, (End, Region)) {
    both(
        |stream| End::connect(stream, RcOptions::default(), |_, _| Vec::new()),
        |stream| {
            let mut landing = None;
            let end = End::connect(stream, RcOptions::default(), |device, prepared| {
                for id in 0..4 {
                    prepared.post_recv(&[], WrId(id)).unwrap();
                }
                let region = Region::landing(device, c"test-landing", SIZE as usize, access).unwrap();
                let private_data = region.remote().encode().to_vec();
                landing = Some(region);
                private_data
            });
            (end, landing.unwrap())
        },
    )
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to_slice(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_write_with_immediate_data_lands_and_completes_in_host_order() {
    let (initiator, (target, landing)) = initiator_and_target(Access::REMOTE_WRITE);
    let source = Region::source(&initiator.device, pattern(1).into_boxed_slice(), false).unwrap();
    let to = remote(&initiator.private_data);
    // Three elements, out of order, to one address.
    let parts = [source.sge(100, 50).unwrap(), source.sge(0, 100).unwrap(), source.sge(5000, 1000).unwrap()];
    let at = to.at(10, 1150).unwrap();
    initiator.pair.post_write_imm(&parts, at, 0x0102_0304, Signal::Yes, WrId(77)).unwrap();

    let sent = initiator.completion();
    assert!(sent.is_success(), "{sent:?}");
    assert_eq!((sent.wr_id(), sent.opcode(), sent.qpn()), (WrId(77), Opcode::Write, initiator.pair.qpn()));
    let got = target.completion();
    assert!(got.is_success(), "{got:?}");
    assert_eq!(
        (got.wr_id(), got.opcode(), got.imm()),
        (WrId(0), Opcode::ReceiveWriteImmediate, Some(0x0102_0304))
    );
    assert_eq!((got.len(), got.qpn()), (1150, target.pair.qpn()));
    let bytes = pattern(1);
    let expected = [&[0; 10][..], &bytes[100..150], &bytes[..100], &bytes[5000..6000]].concat();
    assert_eq!(contents(&landing)[..1160], expected);
    assert!(contents(&landing)[1160..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_read_copies_the_peers_memory() {
    let (initiator, (_target, landing)) = initiator_and_target(Access::REMOTE_READ);
    landing.copy_from_slice(0, &pattern(2)).unwrap();
    let local =
        Region::landing(&initiator.device, c"test-local", SIZE as usize, Access::LOCAL_WRITE).unwrap();
    let from = remote(&initiator.private_data).at(1000, 3000).unwrap();
    let to = [local.sge(0, 1000).unwrap(), local.sge(2000, 2000).unwrap()];
    initiator.pair.post_read(&to, from, Signal::Yes, WrId(5)).unwrap();
    let done = initiator.completion();
    assert!(done.is_success(), "{done:?}");
    assert_eq!((done.wr_id(), done.opcode()), (WrId(5), Opcode::Read));
    assert_eq!(contents(&local)[..1000], pattern(2)[1000..2000]);
    assert_eq!(contents(&local)[2000..4000], pattern(2)[2000..4000]);
}

#[test]
fn sends_arrive_in_the_buffers_posted_inline_or_not() {
    let buffers = std::sync::Mutex::new(None);
    let (initiator, target) = both(
        |stream| End::connect(stream, RcOptions::default(), |_, _| Vec::new()),
        |stream| {
            End::connect(stream, RcOptions::default(), |device, prepared| {
                let region = Region::landing(device, c"test-buffers", 4096, Access::LOCAL_WRITE).unwrap();
                let mut list = RecvList::new(4, 4);
                for id in 0..4 {
                    list.recv(&[region.sge(id * 1024, 1024).unwrap()], WrId(id)).unwrap();
                }
                prepared.post_recv_list(&mut list).unwrap();
                assert!(list.is_empty());
                *buffers.lock().unwrap() = Some(region);
                Vec::new()
            })
        },
    );
    let source = Region::source(&initiator.device, pattern(3).into_boxed_slice(), false).unwrap();
    initiator.pair.post_send(&[source.sge(0, 1024).unwrap()], Signal::No, WrId(1)).unwrap();
    initiator.pair.post_send_inline(b"inline", Signal::Yes, WrId(2)).unwrap();
    initiator.pair.post_send_imm(&[], 42, Signal::Yes, WrId(3)).unwrap();
    assert_eq!(initiator.completion().wr_id(), WrId(2), "the first was not signaled");
    assert_eq!(initiator.completion().wr_id(), WrId(3));

    let got: Vec<Completion> = (0..3).map(|_| target.completion()).collect();
    assert!(got.iter().all(|each| each.is_success() && each.opcode() == Opcode::Receive), "{got:?}");
    assert_eq!(got.iter().map(Completion::len).collect::<Vec<_>>(), [1024, 6, 0]);
    assert_eq!(got.iter().map(Completion::imm).collect::<Vec<_>>(), [None, None, Some(42)]);
    let buffers = contents(buffers.lock().unwrap().as_ref().unwrap());
    assert_eq!(buffers[..1024], pattern(3)[..1024]);
    assert_eq!(buffers[1024..1030], *b"inline");
}

#[test]
fn a_list_is_posted_by_one_call_and_completes_in_order() {
    let (initiator, (target, landing)) = initiator_and_target(Access::REMOTE);
    let source = Region::source(&initiator.device, pattern(4).into_boxed_slice(), false).unwrap();
    let local = Region::landing(&initiator.device, c"test-local", 64, Access::LOCAL_WRITE).unwrap();
    let to = remote(&initiator.private_data);
    let mut list = SendList::new(8, 16);
    for round in 0..3u64 {
        for part in 0..4 {
            let sge = source.sge(round * 4000 + part * 1000, 1000).unwrap();
            let at = to.at(round * 4000 + part * 1000, 1000).unwrap();
            list.write(&[sge], at, Signal::No, WrId(part)).unwrap();
        }
        list.read(&[local.sge(0, 64).unwrap()], to.at(round * 4000, 64).unwrap(), Signal::Yes, WrId(100))
            .unwrap();
        list.write_imm(&[], to.start(), round as u32, Signal::Yes, WrId(101)).unwrap();
        initiator.pair.post_list(&mut list).unwrap();
        assert!(list.is_empty());
        let done = [initiator.completion(), initiator.completion()];
        assert_eq!(
            done.map(|each| (each.wr_id(), each.status())),
            [(WrId(100), Status::Success), (WrId(101), Status::Success)]
        );
        let start = round as usize * 4000;
        assert_eq!(contents(&local), pattern(4)[start..start + 64], "a READ sees the WRITEs before it");
        assert_eq!(target.completion().imm(), Some(round as u32));
    }
    assert_eq!(contents(&landing)[..12_000], pattern(4)[..12_000]);
}

#[test]
fn segments_of_a_region_are_one_list() {
    let (initiator, (target, landing)) = initiator_and_target(Access::REMOTE);
    let source = Region::source(&initiator.device, pattern(6).into_boxed_slice(), false).unwrap();
    let back = Region::landing(&initiator.device, c"test-back", 12_000, Access::LOCAL_WRITE).unwrap();
    let to = remote(&initiator.private_data);
    // In reverse order, each to another offset.
    let there = |part: u64| 11_000 - part * 1000;
    let parts = (0..12).map(|part| Segment { local: part * 1000, remote: there(part), length: 1000 });
    let mut list = SendList::new(8, 16);
    let mut left = parts.clone().peekable();
    while left.peek().is_some() {
        let added = list.write_segments(&source, &to, left.by_ref().take(5)).unwrap();
        assert!(added > 0 && added == list.len());
        list.signal_last(WrId(7));
        initiator.pair.post_list(&mut list).unwrap();
        assert_eq!((initiator.completion().wr_id(), list.len()), (WrId(7), 0));
    }
    assert_eq!(list.read_segments(&back, &to, parts.clone()).unwrap(), 8, "as many as there is room for");
    assert_eq!(list.read_segments(&back, &to, parts.clone()).unwrap(), 0);
    list.signal_last(WrId(8));
    initiator.pair.post_list(&mut list).unwrap();
    assert_eq!(initiator.completion().wr_id(), WrId(8));
    let (landed, back, sent) = (contents(&landing), contents(&back), pattern(6));
    for part in 0..12 {
        let (at, there) = (part * 1000, there(part as u64) as usize);
        assert_eq!(landed[there..there + 1000], sent[at..at + 1000], "part {part}");
        let is_back = back[at..at + 1000] == sent[at..at + 1000];
        assert_eq!(is_back, part < 8, "part {part}");
    }

    // An out-of-bounds segment is named; those before it are in the list.
    let outside =
        [(0, 0), (to.len - 1, 0), (0, to.len)].map(|(local, remote)| Segment { local, remote, length: 1000 });
    let error = list.write_segments(&source, &to, [outside[0], outside[2]]).unwrap_err();
    assert_eq!((error.memory, error.offset, error.length, list.len()), ("remote memory", to.len, 1000, 1));
    let error = list.write_segments(&source, &to, [outside[1]]).unwrap_err();
    assert_eq!((error.memory, list.len()), ("a memory region", 1));
    list.clear();

    // A rejected work request is identified by its id.
    let beyond = RemoteMemory { len: u64::MAX, ..to };
    let parts = [outside[0], outside[0], Segment { remote: to.len, ..outside[0] }, outside[0]];
    assert_eq!(list.write_segments(&source, &beyond, parts).unwrap(), 4);
    initiator.pair.post_list(&mut list).unwrap();
    let refused = initiator.completion();
    assert_eq!((refused.wr_id(), refused.status()), (WrId(2), Status::RemoteAccessError));
    drop(target);
}

#[test]
fn memory_of_a_descriptor_is_addressed_by_offset() {
    let device = device();
    let file = tempfile_of(&pattern(5));
    let region = Region::dmabuf(&device, file.try_clone().unwrap(), 4096, 8192, Access::REMOTE_READ).unwrap();
    assert_eq!((region.remote().addr, region.remote().len), (4096, 8192));
    assert!(region.as_ptr().is_none() && region.descriptor().is_some());
    assert!(region.copy_to_slice(0, &mut [0]).is_err());
    drop(region);

    // A peer writes to the card's memory; a mapping of the card shows it.
    let (initiator, (target, card)) = both(
        |stream| End::connect(stream, RcOptions::default(), |_, _| Vec::new()),
        |stream| {
            let mut card = None;
            let end = End::connect(stream, RcOptions::default(), |device, prepared| {
                prepared.post_recv(&[], WrId(0)).unwrap();
                let descriptor = file.try_clone().unwrap();
                let region = Region::dmabuf(device, descriptor, 4096, 8192, Access::REMOTE).unwrap();
                let private_data = region.remote().encode().to_vec();
                card = Some(region);
                private_data
            });
            (end, card.unwrap())
        },
    );
    let source = Region::source(&initiator.device, Arc::<[u8]>::from(pattern(6)), false).unwrap();
    let at = remote(&initiator.private_data).at(100, 1000).unwrap();
    initiator.pair.post_write_imm(&[source.sge(0, 1000).unwrap()], at, 1, Signal::Yes, WrId(1)).unwrap();
    assert!(initiator.completion().is_success());
    assert!(target.completion().is_success());
    let mut seen = vec![0; SIZE as usize];
    read_at(&file, &mut seen);
    let mut expected = pattern(5);
    expected[4196..5196].copy_from_slice(&pattern(6)[..1000]);
    assert!(seen == expected, "the card's memory differs from what was written");

    // The card is also a local buffer of its owner.
    let local = card.sge(100, 1000).unwrap();
    assert_eq!((local.addr(), local.len()), (4196, 1000));
}

#[test]
fn a_mapping_is_registered_with_its_offsets_as_addresses() {
    let memory = millstream_shm::Memfd::sealed("test-card", 16384).unwrap();
    let mapping = Arc::new(memory.map().unwrap());
    let (initiator, (target, region)) = both(
        |stream| End::connect(stream, RcOptions::default(), |_, _| Vec::new()),
        |stream| {
            let mut mapped = None;
            let end = End::connect(stream, RcOptions::default(), |device, prepared| {
                prepared.post_recv(&[], WrId(0)).unwrap();
                let region = Region::mapped(device, mapping.clone(), 4096, 8192, Access::REMOTE).unwrap();
                let private_data = region.remote().encode().to_vec();
                mapped = Some(region);
                private_data
            });
            (end, mapped.unwrap())
        },
    );
    assert_eq!((region.remote().addr, region.len()), (4096, 8192));
    assert!(region.as_ptr().is_none() && region.descriptor().is_none());
    assert_eq!(region.sge(100, 1).unwrap().addr(), 4196);
    let source = Region::source(&initiator.device, Arc::<[u8]>::from(pattern(6)), false).unwrap();
    let at = remote(&initiator.private_data).at(100, 1000).unwrap();
    initiator.pair.post_write_imm(&[source.sge(0, 1000).unwrap()], at, 1, Signal::Yes, WrId(1)).unwrap();
    assert!(initiator.completion().is_success() && target.completion().is_success());
    let mut seen = vec![0; 16384];
    read_at(&memory.into_fd(), &mut seen);
    assert!(seen[4196..5196] == pattern(6)[..1000]);
    assert!(seen[..4196].iter().chain(&seen[5196..]).all(|byte| *byte == 0));
}

#[test]
fn a_mapped_file_is_a_source() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&pattern(7)).unwrap();
    // SAFETY: no other process uses this file.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let (initiator, (target, landing)) = initiator_and_target(Access::REMOTE_WRITE);
    let source = Region::source(&initiator.device, map, false).unwrap();
    let to = remote(&initiator.private_data);
    initiator
        .pair
        .post_write_imm(
            &[source.sge(0, SIZE).unwrap()],
            to.at(0, SIZE.into()).unwrap(),
            9,
            Signal::No,
            WrId(1),
        )
        .unwrap();
    assert_eq!(target.completion().imm(), Some(9));
    assert!(contents(&landing) == pattern(7));
    assert!(source.copy_from_slice(0, &[0]).is_err(), "a source cannot be written to");
}

#[test]
fn an_access_violation_fails_and_flushes_the_rest() {
    for (case, access) in
        [("bounds", Access::REMOTE_WRITE), ("right", Access::REMOTE_READ), ("key", Access::REMOTE)]
    {
        let (initiator, (target, landing)) = initiator_and_target(access);
        let source = Region::source(&initiator.device, pattern(8).into_boxed_slice(), false).unwrap();
        let memory = remote(&initiator.private_data);
        let mut at = memory.start();
        match case {
            "bounds" => at.addr += u64::from(SIZE) - 10,
            "key" => at.rkey = millstream_rdma::Rkey::new(at.rkey.get() ^ 0x5555),
            _ => {}
        }
        assert!(memory.at(u64::from(SIZE) - 10, 100).is_err());
        let sge = [source.sge(0, 100).unwrap()];
        initiator.pair.post_write(&sge, at, Signal::No, WrId(1)).unwrap();
        let failed = initiator.completion();
        assert_eq!((failed.status(), failed.wr_id()), (Status::RemoteAccessError, WrId(1)), "{case}");
        initiator.pair.post_write(&sge, memory.start(), Signal::Yes, WrId(2)).unwrap();
        let flushed = initiator.completion();
        assert_eq!((flushed.status(), flushed.wr_id()), (Status::WorkRequestFlushedError, WrId(2)), "{case}");
        assert!(contents(&landing).iter().all(|byte| *byte == 0), "{case}: nothing was written");
        drop(target);
    }
}

#[test]
fn atomic_operations_change_the_word_and_return_its_previous_value() {
    let access = Access::REMOTE_ATOMIC | Access::REMOTE_READ;
    let options = RcOptions { access, ..RcOptions::default() };
    let (initiator, target) = both(
        |stream| End::connect(stream, RcOptions::default(), |_, _| Vec::new()),
        |stream| {
            let mut landing = None;
            let end = End::connect(stream, options, |device, _| {
                let region = Region::landing(device, c"test-words", 4096, access).unwrap();
                let private_data = region.remote().encode().to_vec();
                landing = Some(region);
                private_data
            });
            (end, landing.unwrap())
        },
    );
    let word = remote(&initiator.private_data).at(16, 8).unwrap();
    let previous = Region::landing(&initiator.device, c"test-previous", 8, Access::LOCAL_WRITE).unwrap();
    let result = previous.sge(0, 8).unwrap();
    let was = || u64::from_ne_bytes(contents(&previous).try_into().unwrap());
    initiator.pair.post_fetch_add(result, word, 5, WrId(1)).unwrap();
    let completion = initiator.completion();
    assert_eq!((completion.status(), completion.opcode(), was()), (Status::Success, Opcode::FetchAdd, 0));
    // A wrong compare value changes nothing and returns the word.
    for (guess, was_there) in [(4, 5), (5, 5), (5, 9)] {
        initiator.pair.post_compare_swap(result, word, (guess, 9), WrId(2)).unwrap();
        let completion = initiator.completion();
        assert_eq!((completion.status(), completion.opcode()), (Status::Success, Opcode::CompareSwap));
        assert_eq!(was(), was_there);
    }
    assert_eq!(contents(&target.1)[16..24], 9u64.to_ne_bytes());
}

#[test]
fn shutting_down_flushes_posted_work_requests() {
    let (initiator, (target, _landing)) = initiator_and_target(Access::REMOTE_WRITE);
    target.pair.shut_down().unwrap();
    for id in 0..4 {
        let flushed = target.completion();
        assert_eq!((flushed.status(), flushed.wr_id()), (Status::WorkRequestFlushedError, WrId(id)));
    }
    // The peer's next send fails.
    initiator
        .pair
        .post_write_imm(&[], remote(&initiator.private_data).start(), 1, Signal::Yes, WrId(1))
        .unwrap();
    let lost = initiator.completion();
    assert!(lost.status().is_peer_lost(), "{lost:?}");
}

#[test]
fn a_full_send_queue_is_an_error() {
    let options = RcOptions { send_depth: 4, ..RcOptions::default() };
    let (initiator, _target) = both(
        |stream| End::connect(stream, options, |_, _| Vec::new()),
        |stream| End::connect(stream, options, |_, _| Vec::new()),
    );
    // No receive is posted, so nothing completes.
    let refused = (0..10_000)
        .find_map(|id| initiator.pair.post_send_inline(b"x", Signal::Yes, WrId(id)).err())
        .expect("the queue never got full");
    assert!(refused.is_full(), "{refused}");
    assert_eq!(refused.qpn, initiator.pair.qpn());
}

#[test]
fn invalid_regions_are_refused() {
    let device = device();
    let empty = Region::landing(&device, c"test", 0, Access::REMOTE).unwrap_err();
    assert!(matches!(empty, MemoryError::Empty));
    let file = tempfile_of(&[1; 4096]);
    let beyond = Region::dmabuf(&device, file, 0, 1 << 20, Access::REMOTE).unwrap_err();
    assert!(matches!(&beyond, MemoryError::Register { len: 0x10_0000, .. }), "{beyond}");
    let region = Region::landing(&device, c"test", 100, Access::REMOTE).unwrap();
    assert!(region.sge(100, 0).is_ok() && region.sge(100, 1).is_err() && region.sge(u64::MAX, 2).is_err());
}

#[test]
fn options_beyond_the_device_name_the_field() {
    let device = device();
    let queue = millstream_rdma::CompletionQueue::new(&device, 8).unwrap();
    let options = RcOptions { send_depth: u32::MAX, ..RcOptions::default() };
    let error =
        millstream_rdma::PreparedQueuePair::new(&device, &queue, &queue, &options).unwrap_err().to_string();
    assert!(error.contains("send_depth = 4294967295") && error.contains(device.name()), "{error}");
    assert!(millstream_rdma::CompletionQueue::new(&device, 0).is_err());
    assert!(!soon().passed());
}

/// A memfd with these contents, as of an emulated card.
fn tempfile_of(contents: &[u8]) -> OwnedFd {
    let memory = millstream_shm::Memfd::sealed("test-card", contents.len()).unwrap();
    let mut file = std::fs::File::from(memory.into_fd());
    file.write_all(contents).unwrap();
    file.into()
}

fn read_at(descriptor: &OwnedFd, to: &mut [u8]) {
    use std::os::unix::fs::FileExt;
    std::fs::File::from(descriptor.try_clone().unwrap()).read_exact_at(to, 0).unwrap();
}
