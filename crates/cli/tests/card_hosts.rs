//! Cards on separate hosts: leases, kernels, interrupts, DMA transfers and a stencil over a network of three
//! hosts. Network links are cut during operations.

#[path = "common/network.rs"]
mod network;
#[path = "common/running.rs"]
mod running;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteError, RemoteErrorKind, RemoteOptions};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::codes::MessageKind;
use millstream_card_abi::command::Cause;
use millstream_card_abi::dma::{DmaDescriptor, DmaOperation};
use millstream_rdma::{DeviceSelector, device};
use network::{Network, is_root, run};
use running::Running;

const MILLSTREAM: &str = env!("CARGO_BIN_EXE_millstream");
const TIMEOUT: Duration = Duration::from_secs(20);
/// The lease of a card that is cut off ends soon.
const SHORT_LEASE: Duration = Duration::from_secs(3);
const LONG_LEASE: Duration = Duration::from_secs(10);
const MEGABYTE: usize = 1 << 20;

/// Environment variable that makes this test program a node on the first host: the network's name.
const BE_A_NODE: &str = "MILLSTREAM_TEST_NODE";

/// A card on a host; dropping this value ends the card.
struct Card {
    // `ip netns exec` executes the card in place of itself.
    process: Running,
    address: String,
}

impl Card {
    fn serve(network: &Network, host: usize) -> Card {
        let process = network
            .command(host, MILLSTREAM)
            .args(["--device", "soft", "card", "--json", "serve", &format!("{}-{host}", network.name())])
            .args(["--memory", "64MiB", "--banks", "4", "--listen", &format!("{}:0", network.address(host))])
            .stdout(Stdio::piped())
            .spawn();
        let mut process = Running(process.unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let output: serde_json::Value = serde_json::from_str(&line).expect("the card says where it listens");
        Card { process, address: output["address"].as_str().unwrap().to_owned() }
    }

    fn kill(&mut self) {
        self.process.0.kill().unwrap();
        self.process.ended();
    }
}

/// Runs one of this program's tests as a node on the first host.
#[track_caller]
fn run_in_namespace(test: &str) {
    if !is_root() {
        return;
    }
    let network = Network::new(test);
    let this = std::env::current_exe().unwrap();
    let output = network
        .command(1, this.to_str().unwrap())
        .args([&format!("{test}_on_a_node"), "--exact", "--nocapture"])
        .env(BE_A_NODE, network.name())
        .env("MILLSTREAM_DEVICE", "soft")
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
    println!("{text}");
}

/// The network, if this process was started as a node; else the test returns at once.
fn network_around() -> Option<Network> {
    std::env::var(BE_A_NODE).ok().map(Network::made_by_another)
}

fn connect(card: &Card) -> RemoteCard {
    let device = device::open(&DeviceSelector::from_environment()).expect("run `make lib` first");
    RemoteCard::connect(&device, &card.address, RemoteOptions::default()).unwrap()
}

fn leased(card: &Card, lease: Duration) -> RemoteCard {
    let node = connect(card);
    node.acquire(lease, TIMEOUT).unwrap();
    node
}

fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at % 251) as u8 ^ seed).collect()
}

fn copy_to(from: MemoryRange, other: &RemoteCard, offset: u64) -> DmaDescriptor {
    let there = other.held().unwrap().memory.at(offset, from.len).unwrap();
    let (remote, key) = (there.addr, there.rkey.get());
    DmaDescriptor { operation: DmaOperation::Write, peer: 0, local: from, remote, key, notify: false }
}

#[test]
fn works() {
    run_in_namespace("works");
}

#[test]
fn works_on_a_node() {
    let Some(network) = network_around() else { return };
    let cards = [2, 3].map(|host| Card::serve(&network, host));
    let [one, other] = [&cards[0], &cards[1]].map(|card| leased(card, LONG_LEASE));
    let mine = pattern(3, 3 * MEGABYTE);
    one.write(100, &mine).unwrap();
    let mut back = vec![0; mine.len()];
    one.read(100, &mut back).unwrap();
    assert!(back == mine);

    // A kernel, and the message at its end.
    one.load(0, KernelSource::Builtin("mix")).unwrap();
    let rung = one.start(0, &RunRequest::new(&[100 << 20 >> 4, 4096, 3])).unwrap();
    let message = loop {
        let message = one.message(TIMEOUT).unwrap().expect("an interrupt");
        if message.sequence == rung {
            break message;
        }
    };
    assert_eq!((message.kind, message.region, message.cause), (MessageKind::RegionDone, 0, None));
    assert_eq!((message.card, message.values[0]), (one.hello().card, 3));

    // From card to card; the data does not pass this host.
    let before = bytes_on_link(&network, 1, "rx");
    one.connect_peer(0, &cards[1].address).unwrap();
    one.run_dma(&[copy_to(MemoryRange::new(100, mine.len() as u64), &other, 4096)], TIMEOUT).unwrap();
    assert!(bytes_on_link(&network, 1, "rx") - before < MEGABYTE as u64);
    other.read(4096, &mut back).unwrap();
    assert!(back == mine);

    // The key of an ended lease is invalid for other hosts, too.
    let stale = copy_to(MemoryRange::new(0, 64), &other, 0);
    other.release().unwrap();
    other.acquire(LONG_LEASE, TIMEOUT).unwrap();
    let refused = one.run_dma(&[stale], TIMEOUT).unwrap_err();
    assert!(
        matches!(refused.kind, RemoteErrorKind::TransferFailed { cause: Cause::DmaRemoteAccess, .. }),
        "{refused}"
    );
    one.release().unwrap();
    other.release().unwrap();
    for card in &cards {
        let tested = run(MILLSTREAM, &["card", "selftest", &card.address], &[]);
        assert!(tested.status.success(), "{}", String::from_utf8_lossy(&tested.stdout));
    }
    let stencil = stencil(&cards, 1000).arg("--verify").output().unwrap();
    let output = String::from_utf8_lossy(&stencil.stdout);
    assert!(stencil.status.success() && output.contains("every point equals the reference"), "{output}");
}

/// Bytes that a host has received (`rx`) or sent (`tx`) on its link.
fn bytes_on_link(network: &Network, host: usize, direction: &str) -> u64 {
    let links = run("ip", &["-n", &network.host(host), "-s", "-j", "link", "show", "wire0"], &[]);
    let links: serde_json::Value = serde_json::from_slice(&links.stdout).unwrap();
    links[0]["stats64"][direction]["bytes"].as_u64().unwrap()
}

fn stencil(cards: &[Card], iterations: u32) -> Command {
    let mut command = Command::new(MILLSTREAM);
    let addresses: Vec<_> = cards.iter().map(|card| card.address.as_str()).collect();
    command.args(["stencil", "--grid", "1000x500", "--iterations", &iterations.to_string()]);
    command.args(["--checkpoint", "100", "--cards", &addresses.join(",")]);
    command
}

#[test]
fn is_cut() {
    run_in_namespace("is_cut");
}

/// Checks the error of a cut network: reported soon, and fatal to the connection.
fn ends<T: std::fmt::Debug>(doing: &str, started: Instant, outcome: Result<T, RemoteError>) {
    let error = outcome.unwrap_err();
    assert!(error.is_fatal(), "{doing}: {error}");
    assert!(error.to_string().contains("retry") || error.to_string().contains("died"), "{doing}: {error}");
    assert!(started.elapsed() < TIMEOUT / 2, "{doing}: {:?}", started.elapsed());
    println!("{doing}: after {:?}: {error}", started.elapsed());
}

#[test]
fn is_cut_on_a_node() {
    let Some(network) = network_around() else { return };
    let mut cards = vec![Card::serve(&network, 2), Card::serve(&network, 3)];
    let pause = || std::thread::sleep(Duration::from_millis(100));

    // The link is cut during a kernel, a transfer, a copy to the other card, and a copy from the card. In the
    // third case the initiator continues. The link is cut when the kernel runs and the cards are connected: that can
    // take a second, where a host resolves an address anew after an earlier cut.
    for (doing, host) in [("kernel", 2), ("transfer", 2), ("copy", 3), ("copy out", 2)] {
        let [one, other] = [&cards[0], &cards[1]].map(|card| leased(card, SHORT_LEASE));
        let mut rung = 0;
        match doing {
            "kernel" => {
                one.write(0, &pattern(1, MEGABYTE)).unwrap();
                one.load(0, KernelSource::Builtin("mix")).unwrap();
                rung = one.start(0, &RunRequest::new(&[0, 4096, u64::MAX])).unwrap();
            }
            "transfer" => {}
            _ => one.connect_peer(0, &cards[1].address).unwrap(),
        }
        let started = std::thread::scope(|scope| {
            let cut = scope.spawn(|| {
                pause();
                network.cut(host);
                Instant::now()
            });
            match doing {
                "kernel" => {
                    let outcome = one.wait(rung, TIMEOUT);
                    ends(doing, cut.join().unwrap(), outcome);
                }
                "transfer" => {
                    let bytes = pattern(1, 4 * MEGABYTE);
                    let outcome = loop {
                        if let Err(error) = one.write(0, &bytes) {
                            break Err::<(), _>(error);
                        }
                    };
                    ends(doing, cut.join().unwrap(), outcome);
                }
                _ => {
                    let copy = copy_to(MemoryRange::new(0, 32 << 20), &other, 0);
                    let error = loop {
                        if let Err(error) = one.run_dma(&[copy], TIMEOUT) {
                            break error;
                        }
                    };
                    let started = cut.join().unwrap();
                    if host == 2 {
                        ends(doing, started, Err::<(), _>(error));
                    } else {
                        let lost = matches!(
                            error.kind,
                            RemoteErrorKind::TransferFailed { cause: Cause::DmaPeerLost, .. }
                        );
                        assert!(lost, "{error}");
                        println!("{doing}: after {:?}: {error}", started.elapsed());
                        one.write(0, b"goes on").unwrap();
                    }
                }
            }
            Instant::now()
        });
        // The lease of the card without link expires, as the card reports to a client on its own host.
        let cut_off = &cards[host - 2];
        let free = |info: &serde_json::Value| info["lease"]["holder"] == 0;
        let info = until(&network, host, &cut_off.address, free);
        assert_eq!(info["lease"]["end_cause"], Cause::LeaseExpired.to_string(), "{info}");
        println!("{doing}: free {:?} later", started.elapsed());
        if doing == "kernel" {
            // The card also removes the client that it can no longer reach.
            until(&network, host, &cut_off.address, |info| info["lease"]["clients"] == 1);
        }
        network.restore(host);
        let again = leased(cut_off, LONG_LEASE);
        let mut bytes = vec![1; MEGABYTE];
        again.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "{doing}: the former holder's data");
    }

    // A stencil job continues when one of its cards is cut off, and fails when the last one is killed.
    let sent = bytes_on_link(&network, 3, "tx");
    let mut job = stencil(&cards, 1_000_000).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // The card's half of the grid has left it twice: the cards are connected and compute.
    let deadline = Instant::now() + TIMEOUT;
    while bytes_on_link(&network, 3, "tx") < sent + 2 * MEGABYTE as u64 {
        assert!(Instant::now() < deadline && job.try_wait().unwrap().is_none(), "the job computes");
        pause();
    }
    network.cut(3);
    std::thread::sleep(Duration::from_secs(3));
    assert!(job.try_wait().unwrap().is_none(), "the job goes on with one card");
    cards[0].kill();
    let until = Instant::now() + TIMEOUT;
    while job.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "the job does not end");
        pause();
    }
    let ended = job.wait_with_output().unwrap();
    let output = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success(), "{output}");
    for card in &cards {
        assert!(output.contains(&card.address), "{output}");
    }
}

/// Waits until the state that a card reports on its own host is as wanted; returns it.
fn until(
    network: &Network,
    host: usize,
    address: &str,
    wanted: impl Fn(&serde_json::Value) -> bool,
) -> serde_json::Value {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let output = network
            .command(host, MILLSTREAM)
            .args(["--device", "soft", "card", "info", address, "--json"])
            .output()
            .unwrap();
        let info: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        if wanted(&info) {
            return info;
        }
        assert!(Instant::now() < deadline, "{info:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
