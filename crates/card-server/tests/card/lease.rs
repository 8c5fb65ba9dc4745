//! Leases of cards on the network: acquisition, refusal, and cleanup at the end.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{Card, CommandError, RemoteCard, RemoteErrorKind, RemoteOptions, Ring, RingLayout};
use millstream_card_abi::codes::MessageKind;
use millstream_card_abi::command::{Cause, Descriptor, Fault};
use millstream_card_abi::events::VERIFY;
use millstream_card_abi::hello::{ClientHello, ServerHello};
use millstream_card_abi::registers::{LEASE_PAGE, at};
use millstream_card_abi::{CardName, MemoryRange, lease};
use millstream_card_server::{CardConfig, ExitReason, Lifetime, serve};
use millstream_rdma::queue::Signal;
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, PreparedQueuePair, QueuePair, RcOptions, Region,
    RemoteMemory, Rkey, Status, WrId, connect,
};

use crate::cards::{BANK, BANKS, NetworkCard, device};
use crate::host::{Process, TIMEOUT, again};

const SECOND: Duration = Duration::from_secs(1);
/// The duration of leases that do not expire.
const LONG_LEASE: Duration = Duration::from_secs(20);

#[test]
fn memory_is_the_holders_and_is_clear_for_the_next_one() {
    let card = NetworkCard::start();
    let (one, other) = (card.connect(), card.connect());
    assert!(matches!(one.write(0, b"early").unwrap_err().kind, RemoteErrorKind::NotLeased(None)));
    let held = one.acquire(LONG_LEASE, TIMEOUT).unwrap();
    let secret: Vec<u8> = (0..3 * BANK).map(|at| (at % 251) as u8 + 1).collect();
    one.write(BANK / 2, &secret).unwrap();
    let mut back = vec![0; secret.len()];
    one.read(BANK / 2, &mut back).unwrap();
    assert!(back == secret);

    let refused = other.acquire(LONG_LEASE, Duration::from_millis(30)).unwrap_err();
    let RemoteErrorKind::Leased { holder, epoch } = refused.kind else { panic!("{refused}") };
    assert_eq!((holder, epoch), (one.hello().client, held.epoch));
    let end = MemoryRange::new(BANK * u64::from(BANKS) - 4, 5);
    assert!(matches!(one.write(end.offset, &[0; 5]).unwrap_err().kind, RemoteErrorKind::OutOfRange { .. }));

    one.release().unwrap();
    assert!(matches!(one.read(0, &mut [0]).unwrap_err().kind, RemoteErrorKind::NotLeased(None)));
    let second = other.acquire(LONG_LEASE, TIMEOUT).unwrap();
    assert!(second.epoch > held.epoch);
    let mut all = vec![1; (u64::from(BANKS) * BANK) as usize];
    other.read(0, &mut all).unwrap();
    assert!(all.iter().all(|byte| *byte == 0), "the former holder's data");
    // The card counts the bytes by bank.
    other.release().unwrap();
    let bar0 = one.snapshot().unwrap();
    assert_eq!(bar0.u64_at(at::bank_rdma_written), BANK / 2);
    assert_eq!(bar0.u64_at(at::bank_rdma_written + 8), BANK);
    assert_eq!(bar0.u64_at(at::bank_rdma_read + 3 * 8), BANK + BANK / 2);
}

#[test]
fn keys_of_a_lease_that_has_ended_open_nothing() {
    let card = NetworkCard::start();
    let (one, other) = (card.connect(), card.connect());
    let old = one.acquire(LONG_LEASE, TIMEOUT).unwrap();
    one.release().unwrap();
    other.acquire(LONG_LEASE, TIMEOUT).unwrap();
    other.write(0, b"not for everybody").unwrap();

    for (memory, write) in [(old.memory, true), (old.memory, false), (old.bar2, true)] {
        let client = VerbsClient::connect(&card.address);
        assert_eq!(client.access(memory, write), Status::RemoteAccessError);
    }
    // A key that was never issued is refused, too, and so are writes to the card's registers.
    let client = VerbsClient::connect(&card.address);
    let lease_words = RemoteMemory {
        addr: LEASE_PAGE.start as u64,
        rkey: Rkey::new(other.hello().lease_key),
        len: LEASE_PAGE.len() as u64,
    };
    assert_eq!(client.access(lease_words, true), Status::RemoteAccessError);
    let bar0 = RemoteMemory { addr: 0, rkey: Rkey::new(other.hello().bar0_key), len: 4096 };
    assert_eq!(VerbsClient::connect(&card.address).access(bar0, false), Status::Success);
    assert_eq!(VerbsClient::connect(&card.address).access(bar0, true), Status::RemoteAccessError);
    let mut text = [0; 17];
    other.read(0, &mut text).unwrap();
    assert_eq!(&text, b"not for everybody");
}

#[test]
fn a_lease_can_be_revoked_and_its_holder_learns_why() {
    let card = NetworkCard::start();
    let (one, other) = (card.connect(), card.connect());
    assert_eq!(other.revoke().unwrap(), None);
    let held = one.acquire(LONG_LEASE, TIMEOUT).unwrap();
    one.load(0, KernelSource::Builtin("spin")).unwrap();
    one.start(0, &RunRequest::new(&[])).unwrap();
    assert_eq!(other.revoke().unwrap(), Some(held.epoch));
    // The running kernel is stopped before the next holder acquires the lease.
    let next = other.acquire(LONG_LEASE, TIMEOUT).unwrap();
    assert!(next.epoch > held.epoch);
    assert_eq!(
        other.run(0, &RunRequest::new(&[]), TIMEOUT).unwrap_err().to_string().split(": ").nth(1).unwrap(),
        "region 0"
    );
    while let Some(message) = one.message(TIMEOUT).unwrap() {
        if message.kind == MessageKind::LeaseEnded {
            assert_eq!((message.cause, message.epoch), (Some(Cause::LeaseRevoked), held.epoch));
            break;
        }
    }
    let refused = one.write(0, &[1]).unwrap_err();
    assert!(matches!(refused.kind, RemoteErrorKind::NotLeased(Some(Cause::LeaseRevoked))), "{refused}");
}

#[test]
fn a_holder_that_dies_or_falls_silent_leaves_a_clear_card() {
    let card = NetworkCard::start();
    let other = card.connect();
    // A client that exits: its connection ends.
    let dying = card.connect();
    dying.acquire(Duration::from_secs(600), TIMEOUT).unwrap();
    dying.write(5, b"last words").unwrap();
    drop(dying);
    other.acquire(LONG_LEASE, TIMEOUT).unwrap();
    let mut bytes = [1; 20];
    other.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 20]);
    assert_eq!(other.register(at::lease_end_cause).unwrap() as u32, Cause::HolderDisconnected.code());
    other.release().unwrap();

    // A silent client: connected, but without heartbeat.
    let silent = VerbsClient::connect(&card.address);
    silent.take_lease();
    let taken = other.acquire(LONG_LEASE, Duration::ZERO).unwrap_err();
    assert!(matches!(taken.kind, RemoteErrorKind::Leased { .. }), "{taken}");
    other.acquire(LONG_LEASE, TIMEOUT).unwrap();
    assert_eq!(other.register(at::lease_end_cause).unwrap() as u32, Cause::LeaseExpired.code());
}

/// Environment variables that make this test binary write to a card until its lease ends: the card's address, and the file
/// to create before.
const WRITER_ENV: &str = "MILLSTREAM_TEST_WRITER";
const WRITER_FILE_ENV: &str = "MILLSTREAM_TEST_WRITER_FILE";

/// Writes to a card if this process was started for that.
pub(crate) fn writer_main() {
    let Ok(address) = std::env::var(WRITER_ENV) else { return };
    let device = device();
    let card = RemoteCard::connect(&device, &address, RemoteOptions::default()).unwrap();
    let (bytes, banks) = (BANK as usize, u64::from(BANKS));
    let region = Region::landing(&device, c"writer", bytes, Access::LOCAL_WRITE).unwrap();
    region.copy_from_slice(0, &vec![0xaa; bytes]).unwrap();
    card.acquire(Duration::from_secs(2), TIMEOUT).unwrap();
    let parts: Vec<_> = (0..banks).map(|bank| (0, MemoryRange::new(bank * BANK, BANK))).collect();
    std::fs::File::create(std::env::var(WRITER_FILE_ENV).unwrap()).unwrap();
    while card.write_many(&region, &parts).is_ok() {}
    std::process::exit(0);
}

/// A process of the same host is stopped in the middle of a transfer and continues after its lease has expired. The bytes
/// that it still copies reach no next holder.
#[test]
fn a_holder_that_was_stopped_during_a_transfer_writes_into_no_other_lease() {
    let card = NetworkCard::start();
    let other = card.connect();
    let folder = tempfile::tempdir().unwrap();
    for attempt in 0.. {
        assert!(attempt < 20, "the writer was never stopped in the middle of a transfer");
        let file = folder.path().join(attempt.to_string());
        let mut writer = again("writer_main");
        writer.env(WRITER_ENV, &card.address).env(WRITER_FILE_ENV, &file);
        let mut writer = Process { name: "writer".parse().unwrap(), child: writer.spawn().unwrap() };
        let until = Instant::now() + TIMEOUT;
        while !file.exists() {
            assert!(Instant::now() < until, "the writer does not begin");
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(20));
        writer.stop();
        let clearing = |other: &RemoteCard| other.register(at::card_command_cause).unwrap() as u32;
        let mut was_inside = false;
        let until = Instant::now() + 2 * TIMEOUT;
        while !was_inside && other.acquire(60 * SECOND, Duration::from_millis(10)).is_err() {
            assert!(Instant::now() < until, "the lease does not end");
            was_inside = clearing(&other) == Cause::WindowInUse.code();
        }
        writer.resume();
        if was_inside {
            other.acquire(60 * SECOND, TIMEOUT).unwrap();
        }
        assert!(writer.ended().success());
        let mut all = vec![1; (u64::from(BANKS) * BANK) as usize];
        other.read(0, &mut all).unwrap();
        assert_eq!(all.iter().filter(|byte| **byte != 0).count(), 0, "bytes of the former holder");
        other.release().unwrap();
        if was_inside {
            return;
        }
    }
}

#[test]
fn a_lease_outlives_its_duration_while_its_holder_lives() {
    let card = NetworkCard::start();
    let (one, other) = (card.connect(), card.connect());
    // Its heartbeats come four times in it, on a busy machine, too.
    let held = one.acquire(4 * SECOND, TIMEOUT).unwrap();
    let refused = other.acquire(LONG_LEASE, 9 * SECOND).unwrap_err();
    assert!(matches!(refused.kind, RemoteErrorKind::Leased { .. }), "{refused}");
    one.write(0, &[1]).unwrap();
    assert_eq!(one.held().unwrap().epoch, held.epoch);
}

#[test]
fn a_lease_outlives_its_duration_during_one_long_call() {
    const DURATION: Duration = Duration::from_secs(4);
    let card = NetworkCard::start();
    let device = device();
    let one = RemoteCard::connect(&device, &card.address, RemoteOptions::default()).unwrap();
    let region = Region::landing(&device, c"client", BANK as usize, Access::LOCAL_WRITE).unwrap();
    one.acquire(DURATION, TIMEOUT).unwrap();
    let mut parts = vec![(0, MemoryRange::new(0, BANK)); 64];
    loop {
        let started = Instant::now();
        one.write_many(&region, &parts).unwrap();
        if started.elapsed() > DURATION * 3 / 2 {
            break;
        }
        parts.extend_from_within(..);
    }
}

#[test]
fn an_invalid_lease_word_is_restored() {
    let card = NetworkCard::start();
    let one = card.connect();
    let client = VerbsClient::connect(&card.address);
    let word = one.register(at::lease_word).unwrap();
    let (epoch, _) = lease::unpack(word);
    // A client id that does not exist, a future epoch, and all ones.
    for forged in [lease::pack(epoch, 4711), lease::pack(epoch + 1, one.hello().client), u64::MAX] {
        assert_eq!(client.compare_swap(at::lease_word, word, forged), word);
        let until = std::time::Instant::now() + TIMEOUT;
        while one.register(at::lease_word).unwrap() != word {
            assert!(std::time::Instant::now() < until, "the word stays forged");
        }
    }
    // The card counts a word after it has restored it.
    let until = std::time::Instant::now() + TIMEOUT;
    while one.register(at::lease_rejects).unwrap() < 3 {
        assert!(std::time::Instant::now() < until, "a forged word is not counted");
    }
    assert_eq!(one.register(at::lease_rejects).unwrap(), 3);
    one.acquire(LONG_LEASE, TIMEOUT).unwrap();
}

/// Two nodes acquire, use and release one card 10,000 times in total: never both at once, and never with the
/// other's data.
#[test]
fn two_nodes_race_for_one_card() {
    race(10_000);
}

fn race(times: u32) {
    let card = NetworkCard::start();
    let (inside, done) = (AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for number in 1..=2u8 {
            let (card, inside, done) = (&card, &inside, &done);
            scope.spawn(move || {
                let node = card.connect();
                let mut latest = 0;
                while done.fetch_add(1, Ordering::Relaxed) < times {
                    let held = node.acquire(LONG_LEASE, TIMEOUT).unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                    assert!(held.epoch > latest);
                    latest = held.epoch;
                    let mut bytes = [7; 64];
                    node.read(BANK - 32, &mut bytes).unwrap();
                    assert_eq!(bytes, [0; 64], "the other node's data");
                    node.write(BANK - 32, &[number; 64]).unwrap();
                    inside.fetch_sub(1, Ordering::SeqCst);
                    node.release().unwrap();
                }
            });
        }
    });
    let leases = card.connect().register(at::lease_grants).unwrap();
    assert_eq!(leases, u64::from(times));
}

/// A client that uses plain verbs instead of `RemoteCard`.
struct VerbsClient {
    pair: QueuePair,
    queue: CompletionQueue,
    local: Region,
    hello: ServerHello,
    _stream: std::net::TcpStream,
}

impl VerbsClient {
    fn connect(address: &str) -> VerbsClient {
        let (device, deadline) = (device(), Deadline::after(RemoteOptions::default().timeout));
        let queue = CompletionQueue::new(&device, 64).unwrap();
        let options = RcOptions { send_depth: 16, recv_depth: 16, ..RcOptions::default() };
        let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options).unwrap();
        let local = Region::landing(&device, c"client", 4096, Access::LOCAL_WRITE).unwrap();
        for slot in 0..16 {
            prepared.post_recv(&[local.sge(1024 + 64 * slot, 64).unwrap()], WrId(slot)).unwrap();
        }
        let mut stream = connect::dial(address, deadline).unwrap();
        let hello = ClientHello::new(false).to_bytes();
        let connected = prepared.connect(&mut stream, &hello, deadline).unwrap();
        let hello = ServerHello::parse(&connected.private_data).unwrap();
        let client = VerbsClient { pair: connected.pair, queue, local, hello, _stream: stream };
        // The card has accepted the client once it has answered a read.
        while client.word(at::client_count) == 0 {}
        client
    }

    fn status(&self) -> Status {
        let mut buffer = [Completion::EMPTY];
        let deadline = Deadline::after(TIMEOUT);
        loop {
            if let [completion] = self.queue.poll(&mut buffer).unwrap()
                && completion.wr_id() == WrId(99)
            {
                return completion.status();
            }
            assert!(!deadline.passed(), "no completion");
        }
    }

    fn access(&self, memory: RemoteMemory, write: bool) -> Status {
        let local = [self.local.sge(0, 64).unwrap()];
        match write {
            true => self.pair.post_write(&local, memory.start(), Signal::Yes, WrId(99)).unwrap(),
            false => self.pair.post_read(&local, memory.start(), Signal::Yes, WrId(99)).unwrap(),
        }
        self.status()
    }

    fn word(&self, offset: usize) -> u64 {
        let from = RemoteMemory { addr: 0, rkey: Rkey::new(self.hello.bar0_key), len: 65536 };
        let local = [self.local.sge(0, 4).unwrap()];
        self.pair.post_read(&local, from.at(offset as u64, 4).unwrap(), Signal::Yes, WrId(99)).unwrap();
        assert_eq!(self.status(), Status::Success);
        let mut word = [0; 4];
        self.local.copy_to_slice(0, &mut word).unwrap();
        u32::from_le_bytes(word).into()
    }

    fn compare_swap(&self, offset: usize, compare: u64, swap: u64) -> u64 {
        let words = RemoteMemory { addr: 0, rkey: Rkey::new(self.hello.lease_key), len: 65536 };
        let word = words.at(offset as u64, 8).unwrap();
        self.pair.post_compare_swap(self.local.sge(8, 8).unwrap(), word, (compare, swap), WrId(99)).unwrap();
        assert_eq!(self.status(), Status::Success);
        let mut was = [0; 8];
        self.local.copy_to_slice(8, &mut was).unwrap();
        u64::from_ne_bytes(was)
    }

    fn take_lease(&self) {
        let epoch = self.word(at::lease_word + 4) as u32;
        let free = lease::pack(epoch, 0);
        assert_eq!(self.compare_swap(at::lease_word, free, lease::pack(epoch, self.hello.client)), free);
    }
}

/// A user on the card's host acquires the lease through BAR0; its rings run the kernel that it loads.
#[test]
fn a_local_user_leases_a_card_and_loads_a_kernel() {
    let name: CardName = format!("local-{}", std::process::id()).parse().unwrap();
    let mut config = CardConfig::new(name.clone(), 1 << 20);
    config.lifetime = Lifetime::Owner { claim_timeout: TIMEOUT };
    let card = std::thread::spawn(|| serve(config));
    let owner = Card::open_as_owner(&name, TIMEOUT).unwrap();
    let user = Card::open(&name, TIMEOUT).unwrap();
    let epoch = user.acquire(TIMEOUT).unwrap();
    let refused = owner.acquire(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(refused, CommandError::Leased { epoch: held, .. } if held == epoch), "{refused}");

    let mut ring = Ring::open(&user, RingLayout::at(0, 16)).unwrap();
    let nothing = MemoryRange::new(0x4000, 0);
    let descriptor = Descriptor { region: 1, flags: 0, args: nothing, result: nothing, cookie: 1 };
    let mut outcome = || {
        ring.submit(&descriptor).unwrap();
        ring.wait(TIMEOUT).unwrap().outcome
    };
    assert_eq!(outcome(), Err(Fault::new(Cause::RegionEmpty, 0)));
    assert!(matches!(user.load(0, "nonsense"), Err(CommandError::NoSuchKernel(_))));
    user.load(1, VERIFY).unwrap();
    assert_eq!(outcome(), Err(Fault::new(Cause::ArgsLength, 0)), "it runs, and finds no arguments");
    drop((ring, user));
    // The card is free and its memory zero once the user has exited.
    owner.acquire(TIMEOUT).unwrap();
    assert_eq!(owner.memory().read_array::<64>(0).unwrap(), [0; 64]);
    drop(owner);
    assert_eq!(card.join().unwrap().unwrap(), ExitReason::OwnerDisconnected);
}
