//! Hosts outside of the torus: processes that reach its nodes through a gateway's seventh port.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use millstream_fabric::conformance::{INITIATOR_BYTES, check_initiator};
use millstream_fabric::{Fabric, FabricError, Notification, RegionId};
use millstream_health::NodeState;
use millstream_rdma::device::DeviceSelector;
use millstream_rdma::queue::Signal;
use millstream_rdma::{Access, CompletionQueue, Deadline, PreparedQueuePair, RcOptions, Region, WrId};
use millstream_torus::engine::OutsideAccess;
use millstream_torus::launch::{LaunchError, LaunchedTorus, Launcher};
use millstream_torus::node::SeventhOptions;
use millstream_torus::seventh::directory::PublishedRegion;
use millstream_torus::seventh::host::{ENV_GATEWAY, ENV_GATEWAY_KEY};
use millstream_torus::seventh::{GatewayOptions, HostError};
use millstream_torus::traffic::TrafficCounters;
use millstream_torus::{OutsideHost, TorusNode};
use millstream_torus_core::NodeNumber;
use ring::hmac;
use rustix::process::Signal as ProcessSignal;

use super::{LONG, await_end, await_state, kill, launcher};

const KEY: u64 = 0x5eed_5eed_0000_0007;
/// Raised by an outside host that has finished.
const DONE: u16 = 9;

fn with_seventh_port(dimensions: &str, supervisors: usize) -> Launcher {
    let seventh = Some(SeventhOptions { listen: "127.0.0.1:0".to_owned(), key: KEY });
    Launcher { seventh, supervisors, ..launcher(dimensions) }
}

/// A process outside of the torus. Dropping it kills it.
struct OutsideProcess(Child);

impl Drop for OutsideProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts this program as an outside host.
fn outside(torus: &LaunchedTorus, gateway: u16, role: &str, arguments: &[&str]) -> OutsideProcess {
    let (address, key) = torus.gateway(NodeNumber(gateway)).expect("a seventh port");
    let process = Command::new(std::env::current_exe().expect("known"))
        .args(["outside", role])
        .args(arguments)
        .env(ENV_GATEWAY, address)
        .env(ENV_GATEWAY_KEY, format!("{key:016x}"))
        .env(millstream_rdma::loader::ENV_DEVICE, "soft")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    OutsideProcess(process.expect("starts"))
}

fn line_of(host: &mut OutsideProcess) -> String {
    let mut line = String::new();
    let output = host.0.stdout.as_mut().expect("piped");
    BufReader::with_capacity(1, output).read_line(&mut line).expect("a line");
    line.trim().to_owned()
}

fn assert_success(host: &mut OutsideProcess) {
    let status = host.0.wait().expect("waits");
    assert!(status.success(), "the outside host ended with {status}");
}

/// What runs beside nodes.
pub(super) fn run_application(role: &str, node: &mut TorusNode) {
    match role {
        "serve" => serve(node),
        "stop" => {
            publish_process_id(node);
            rustix::process::kill_process(rustix::process::getpid(), ProcessSignal::STOP).expect("self");
            node.wait_counter(DONE, 1, node.here(), LONG).expect("an outside host finishes");
        }
        other => panic!("no application {other}"),
    }
}

/// What runs outside.
pub(super) fn run_outside(role: &str, arguments: &[String]) {
    let mut host = OutsideHost::from_environment(DeviceSelector::from_environment()).expect("a gateway");
    match role {
        "use" => use_all_nodes(&mut host),
        "wake" => wake_the_gateways_application(&mut host),
        "flood" => flood(&mut host, arguments),
        "finish" => finish(&mut host),
        "finish-others" => {
            let nodes: Vec<_> = host.dimensions().all().filter(|node| node.0 != 3).collect();
            nodes.into_iter().for_each(|node| say_done(&mut host, node));
        }
        "lose" => lose_a_node(&mut host),
        other => panic!("no outside host {other}"),
    }
}

fn region(node: &mut TorusNode, size: usize, name: &str, access: OutsideAccess) -> RegionId {
    let region = node.register(size);
    node.publish(region, name, access).expect("a valid name");
    region
}

/// Publishes regions, and ends when an outside host says so.
fn serve(node: &mut TorusNode) {
    let here = node.here();
    let hidden = node.register(64);
    let fixed = node.register(64);
    node.store(fixed, 0, &hidden.0.to_le_bytes()).expect("own region");
    node.store(fixed, 8, &u64::from(here.0).to_le_bytes()).expect("own region");
    let data = region(node, INITIATOR_BYTES, "data", OutsideAccess::ReadWrite);
    node.publish(fixed, "fixed", OutsideAccess::Read).expect("a valid name");
    let ended = region(node, 64, "ended", OutsideAccess::Read);
    node.deregister(ended).expect("own region");
    for (wrong, name) in [(RegionId(1), "none"), (data, "two words"), (fixed, "data")] {
        assert!(node.publish(wrong, name, OutsideAccess::Read).is_err(), "{name}");
    }
    match node.wait_counter(DONE, 1, here, LONG) {
        // Its node process was killed.
        Err(FabricError::NodeLost { node }) if node == here => return,
        other => other.expect("an outside host finishes"),
    }
    let event = node.poll_event();
    if let Some(event) = event {
        assert_eq!((event.tag, event.region, event.offset, event.length), (77, data, 16, 8));
        let mut word = [0; 8];
        node.load(data, 16, &mut word).expect("own region");
        assert_eq!(word, u64::from(here.0).to_le_bytes());
    }
    let mut bytes = [1; 64];
    node.load(hidden, 0, &mut bytes).expect("own region");
    assert_eq!(bytes, [0; 64], "nobody wrote what is not published");
    node.load(fixed, 16, &mut bytes[..48]).expect("own region");
    assert_eq!(bytes[..48], [0; 48], "nobody wrote what is published for reading");
}

fn publish_process_id(node: &mut TorusNode) {
    let region = region(node, 8, "process", OutsideAccess::Read);
    node.store(region, 0, &u64::from(std::process::id()).to_le_bytes()).expect("own region");
}

fn find(host: &mut OutsideHost, node: NodeNumber, name: &str) -> PublishedRegion {
    let start = Instant::now();
    loop {
        // A node without application has no directory entries; its process answers all the same.
        if let Some(region) = host.find(node, name).expect("the node lives") {
            return region;
        }
        assert!(start.elapsed() < LONG, "{node} publishes no {name}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Tells a node's application that this host has finished.
fn say_done(host: &mut OutsideHost, node: NodeNumber) {
    let data = find(host, node, "data").region;
    let done = Notification::Counter { index: DONE, add: 1 };
    // The host's end waits for it.
    host.put(node, data, 0, &[], done).expect("valid");
}

fn use_all_nodes(host: &mut OutsideHost) {
    for node in host.dimensions().all() {
        let data = find(host, node, "data");
        assert_eq!((data.size, data.access), (INITIATOR_BYTES as u64, OutsideAccess::ReadWrite));
        check_initiator(host, node, data.region);
        let fixed = find(host, node, "fixed").region;
        let mut words = [0; 16];
        host.get(node, fixed, 0, &mut words).expect("readable");
        assert_eq!(words[8..], u64::from(node.0).to_le_bytes());
        let hidden = RegionId(u64::from_le_bytes(words[..8].try_into().expect("8 bytes")));
        assert_eq!(host.find(node, "ended").expect("lives"), None);
        let refused = |region: RegionId| FabricError::Access { node, region: region.0 };
        assert_eq!(host.get(node, hidden, 0, &mut words), Err(refused(hidden)));
        for region in [hidden, fixed] {
            let put = host.put(node, region, 0, &[9; 8], Notification::Event { tag: 1 });
            assert_eq!(put.and_then(|()| host.flush(node)), Err(refused(region)));
            assert_eq!(host.fetch_add(node, region, 0, 1), Err(refused(region)));
        }
        // Counters of collective operations are the nodes' own.
        let collective = Notification::Counter { index: millstream_fabric::FIRST_COLLECTIVE_COUNTER, add: 1 };
        let put = host.put(node, data.region, 0, &[9; 8], collective).and_then(|()| host.flush(node));
        assert_eq!(put, Err(refused(data.region)));
        let word = u64::from(node.0).to_le_bytes();
        host.put(node, data.region, 16, &word, Notification::Event { tag: 77 }).expect("valid");
        host.flush(node).expect("lives");
    }
    assert_eq!(host.counter(0), Err(FabricError::NotANode));
    assert_eq!(host.exchange(&[], LONG), Err(FabricError::NotANode));
    for node in host.dimensions().all() {
        say_done(host, node);
    }
}

fn wake_the_gateways_application(host: &mut OutsideHost) {
    let gateway = host.gateway();
    let process = find(host, gateway, "process").region;
    let mut id = [0; 8];
    host.get(gateway, process, 0, &mut id).expect("readable");
    let pid = u64::from_le_bytes(id) as u32;
    let start = Instant::now();
    while !is_stopped(pid) {
        assert!(start.elapsed() < LONG, "process {pid} does not stop");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The application that would poll is stopped; its node process forwards.
    let node = NodeNumber(1);
    let data = find(host, node, "data").region;
    check_initiator(host, node, data);
    say_done(host, node);
    kill(pid, ProcessSignal::CONT);
    kill(pid, ProcessSignal::KILL);
}

fn is_stopped(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
}

/// Puts without end.
fn flood(host: &mut OutsideHost, arguments: &[String]) {
    let node = NodeNumber(arguments[0].parse().expect("a number"));
    let data = find(host, node, "data").region;
    let block = vec![0xf1; 200_000];
    for round in 0.. {
        host.put(node, data, 100_000, &block, Notification::None).expect("valid");
        if round == 20 {
            println!("flooding");
        }
    }
}

fn finish(host: &mut OutsideHost) {
    for node in host.dimensions().all() {
        let data = find(host, node, "data").region;
        let mut block = vec![0; 100_000];
        host.get(node, data, 0, &mut block).expect("readable");
        assert!(block[32..].iter().all(|&byte| byte == 0), "{node}: a dead host wrote outside of its puts");
        say_done(host, node);
    }
}

/// Puts to node 3 until it is lost, then to the others.
fn lose_a_node(host: &mut OutsideHost) {
    let lost = NodeNumber(3);
    let regions: Vec<_> = host.dimensions().all().map(|node| find(host, node, "data").region).collect();
    println!("ready");
    let block = vec![3; 300_000];
    let error = loop {
        let put = host.put(lost, regions[lost.index()], 0, &block, Notification::None);
        if let Err(error) = put.and_then(|()| host.flush(lost)) {
            break error;
        }
    };
    assert_eq!(error, FabricError::NodeLost { node: lost });
    let mut word = [0; 8];
    assert_eq!(host.get(lost, regions[lost.index()], 0, &mut word), Err(error));
    assert_eq!(host.lost_node(), None, "the gateway lives");
    for node in host.dimensions().all().filter(|&node| node != lost) {
        host.put(node, regions[node.index()], 40, &[4; 8], Notification::None).expect("valid");
        host.flush(node).expect("lives");
        host.get(node, regions[node.index()], 40, &mut word).expect("lives");
        assert_eq!(word, [4; 8]);
    }
    println!("survived");
    // Until the gateway dies.
    let error = loop {
        if let Err(error) = host.published(NodeNumber(1)) {
            break error;
        }
    };
    assert_eq!(error, FabricError::NodeLost { node: host.gateway() });
    assert_eq!(host.lost_node(), Some(host.gateway()));
}

fn application(role: &str) -> Vec<std::ffi::OsString> {
    super::application(&format!("seventh-{role}"))
}

/// Counts of all nodes, which balance.
fn finished(torus: LaunchedTorus) -> Result<TrafficCounters, LaunchError> {
    let total = TrafficCounters::total(&torus.finish()?);
    assert!(total.outside.is_balanced() && total.outside.under_way == 0, "{total}");
    Ok(total)
}

fn an_outside_host_uses_every_node(dimensions: &str, gateway: u16) -> Result<(), LaunchError> {
    let mut torus = with_seventh_port(dimensions, 0).launch()?;
    let mut host = outside(&torus, gateway, "use", &[]);
    torus.run(&application("serve"))?;
    assert_success(&mut host);
    let total = finished(torus)?;
    assert_eq!((total.outside.hosts, total.outside.cancelled, total.outside.refused_hosts), (1, 0, 0));
    assert_eq!((total.dropped_total(), total.malformed, total.repeated), (0, 0, 0), "{total}");
    assert!(total.outside.commands > 200 && total.staged_bytes > 0, "{total}");
    Ok(())
}

/// The gateway's application is stopped; packets pass, and what it published is readable.
fn a_gateway_serves_without_its_application() -> Result<(), LaunchError> {
    let mut torus = with_seventh_port("2x1x1", 0).launch()?;
    let mut host = outside(&torus, 0, "wake", &[]);
    let script = format!(
        "if test $MILLSTREAM_TORUS_RANK = 0; then exec {}; else exec {}; fi",
        application("stop").join(std::ffi::OsStr::new(" ")).to_string_lossy(),
        application("serve").join(std::ffi::OsStr::new(" ")).to_string_lossy()
    );
    let ended = torus.run_surviving(&["sh".into(), "-c".into(), script.into()], |_| {})?;
    assert!(ended[1].1.success(), "{ended:?}");
    assert_success(&mut host);
    // No application is left at all: the directories are empty, and the node processes say so.
    let mut idle = OutsideHost::connect(&options(&torus, KEY)).expect("admitted");
    for node in idle.dimensions().all() {
        // A node process notices the end of its application when it runs.
        let until = Instant::now() + LONG;
        while idle.published(node).is_ok_and(|published| !published.is_empty()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(idle.published(node), Ok(Vec::new()));
    }
    drop(idle);
    finished(torus).map(drop)
}

fn options(torus: &LaunchedTorus, key: u64) -> GatewayOptions {
    let (address, _) = torus.gateway(NodeNumber(0)).expect("a seventh port");
    GatewayOptions { address: address.to_owned(), key, device: DeviceSelector::Soft }
}

/// More hosts than a gateway has places, each killed in the middle of its puts.
fn killed_hosts_free_what_they_held() -> Result<(), LaunchError> {
    let mut torus = with_seventh_port("3x1x1", 0).launch()?;
    let mut round = 0;
    let (mut flooding, mut last): (Vec<OutsideProcess>, Option<OutsideProcess>) = (Vec::new(), None);
    torus.run_surviving(&application("serve"), |torus| {
        if round < 10 {
            round += 1;
            flooding = ["1", "2"].map(|target| outside(torus, 0, "flood", &[target])).into();
            for host in &mut flooding {
                assert_eq!(line_of(host), "flooding");
            }
            flooding.clear();
        } else if last.is_none() {
            last = Some(outside(torus, 0, "finish", &[]));
        }
    })?;
    assert_success(last.as_mut().expect("started"));
    let total = finished(torus)?;
    assert_eq!(total.outside.hosts, 21, "{total}");
    assert_eq!(total.dropped_total(), 0, "{total}");
    Ok(())
}

/// A node behind the gateway dies, then the gateway.
fn an_outside_host_learns_of_lost_nodes() -> Result<(), LaunchError> {
    let mut torus = with_seventh_port("2x2x1", 1).launch()?;
    let mut host: Option<OutsideProcess> = None;
    let mut step = 0;
    torus.run_surviving(&application("serve"), |torus| match step {
        0 => {
            let well = torus.state().is_some_and(|state| {
                let mut rows = state.nodes.iter();
                state.settled && rows.all(|row| row.state == NodeState::Ok && row.application == Some(true))
            });
            if well {
                let started = host.insert(outside(torus, 0, "lose", &[]));
                assert_eq!(line_of(started), "ready");
                kill(torus.pid(NodeNumber(3)).expect("exists"), ProcessSignal::KILL);
                step = 1;
            }
        }
        1 => {
            let started = host.as_mut().expect("started");
            assert_eq!(line_of(started), "survived");
            await_state(torus, "node 3 is avoided", |state| state.settled && state.nodes[3].avoided);
            // The applications of the others end.
            let mut other = outside(torus, 0, "finish-others", &[]);
            assert_success(&mut other);
            step = 2;
        }
        _ => {}
    })?;
    let mut host = host.expect("started");
    kill(torus.pid(NodeNumber(0)).expect("exists"), ProcessSignal::KILL);
    assert_success(&mut host);
    await_end(&mut torus, NodeNumber(0));
    let counters = torus.finish()?;
    assert!(counters.iter().all(TrafficCounters::is_balanced), "{counters:?}");
    Ok(())
}

/// Strangers, wrong keys, too many hosts, and hosts that break the rules: none harms a host that keeps them.
fn wrong_hosts_are_refused() -> Result<(), LaunchError> {
    let mut torus = with_seventh_port("2x1x1", 0).launch()?;
    let mut checked = false;
    torus.run_surviving(&application("serve"), |torus| {
        if !std::mem::replace(&mut checked, true) {
            let mut good = OutsideHost::connect(&options(torus, KEY)).expect("admitted");
            refuse_strangers(torus);
            refuse_more_hosts_than_places(torus);
            for broken in [Broken::Message, Broken::Key, Broken::ShortMessage, Broken::Range] {
                disconnect(torus, broken);
                let data = find(&mut good, NodeNumber(1), "data").region;
                let mut word = [0; 8];
                good.get(NodeNumber(1), data, 0, &mut word).expect("a good host is not harmed");
            }
            good.dimensions().all().for_each(|node| say_done(&mut good, node));
        }
    })?;
    let total = finished(torus)?;
    assert!(total.outside.refused_hosts >= 6, "{total}");
    Ok(())
}

fn refuse_strangers(torus: &LaunchedTorus) {
    let (address, _) = torus.gateway(NodeNumber(0)).expect("a seventh port");
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 16], &[0xff; 4096]] {
        let mut stranger = TcpStream::connect(address).expect("it listens");
        stranger.set_read_timeout(Some(LONG)).expect("valid");
        // It may close before it has read all.
        let _ = stranger.write_all(bytes);
        assert_eq!(stranger.read(&mut [0]).unwrap_or(0), 0, "closed without an answer");
    }
    let refused = OutsideHost::connect(&options(torus, KEY ^ 1)).expect_err("another key");
    let text = refused.to_string();
    assert!(text.ends_with("refused: the key is not that of its seventh port"), "{text}");
}

fn refuse_more_hosts_than_places(torus: &LaunchedTorus) {
    let mut hosts = Vec::new();
    let refused = loop {
        match OutsideHost::connect(&options(torus, KEY)) {
            Ok(host) => hosts.push(host),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, HostError::Refused { .. }), "{refused}");
    assert_eq!(hosts.len(), 15, "16 places, one of which is taken");
    drop(hosts);
    let start = Instant::now();
    while let Err(error) = OutsideHost::connect(&options(torus, KEY)) {
        assert!(start.elapsed() < LONG, "places are not free again: {error}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    /// A message that is no command.
    Message,
    /// Half of a message.
    ShortMessage,
    /// A get whose data the gateway cannot write: the key names no memory.
    Key,
    /// A get into a range outside of the staging memory: an error of the operation.
    Range,
}

/// Shows the gateway that this end knows the key, which it does not send.
fn prove_key(stream: &mut TcpStream, key: u64) {
    let (purpose, own) = (17, [7; 32]);
    stream.write_all(&[&b"mtorus3"[..], &[purpose], &own].concat()).expect("reads");
    let mut answer = [0; 66];
    stream.read_exact(&mut answer).expect("answers");
    let (number, answer) = answer.split_at(2);
    let (theirs, proof) = answer.split_at(32);
    assert_eq!(number, [0xff; 2], "an outside host knows no node's number");
    let key = hmac::Key::new(hmac::HMAC_SHA256, &key.to_le_bytes());
    let message = |label: &[u8]| [label, &[purpose], number, &own, theirs].concat();
    hmac::verify(&key, &message(b"millstream torus: accepts"), proof).expect("knows the key, too");
    let proof = hmac::sign(&key, &message(b"millstream torus: dials"));
    stream.write_all(proof.as_ref()).expect("reads");
    let mut welcome = [0];
    stream.read_exact(&mut welcome).expect("it is welcome");
}

/// Speaks to the gateway as a program of another origin would, and breaks a rule.
fn disconnect(torus: &LaunchedTorus, broken: Broken) {
    const STAGING: usize = 4 << 20;
    let deadline = Deadline::after(LONG);
    let device = millstream_rdma::device::open(&DeviceSelector::Soft).expect("the soft device");
    let queue = CompletionQueue::new(&device, 256).expect("a queue");
    let staging = Region::landing(&device, c"staging", STAGING, Access::REMOTE_WRITE).expect("memory");
    let messages = Region::landing(&device, c"messages", 4096, Access::LOCAL_WRITE).expect("memory");
    let rc = RcOptions { max_inline: 0, access: Access::REMOTE_WRITE, ..RcOptions::default() };
    let prepared = PreparedQueuePair::new(&device, &queue, &queue, &rc).expect("a queue pair");
    for slot in 0..8 {
        let to = messages.sge(64 * slot, 64).expect("inside");
        prepared.post_recv(&[to], WrId(slot)).expect("room");
    }
    let (address, key) = torus.gateway(NodeNumber(0)).expect("a seventh port");
    let mut stream = TcpStream::connect(address).expect("it listens");
    prove_key(&mut stream, key);
    let mut status = [9];
    stream.read_exact(&mut status).expect("answers");
    assert_eq!(status, [0]);
    let mut remote = staging.remote().encode();
    if broken == Broken::Key {
        let last = remote.len() - 1;
        for at in [0, last / 2, last] {
            remote[at] ^= 0x11;
        }
    }
    let identity = serde_json::json!({ "version": 1, "staging": remote.to_vec() });
    let connected = prepared.connect(&mut stream, identity.to_string().as_bytes(), deadline);
    let Ok(connected) = connected else {
        // The damaged staging memory may also be refused at once.
        assert_eq!(broken, Broken::Key);
        return;
    };
    let directory = u64::from_le_bytes(*b"torusdir");
    let at = if broken == Broken::Range { u64::MAX } else { 0 };
    // Kind 2 is a get; target 0; cookie 5; region, offset, length, local region, place.
    let mut words = [2 | 5 << 32, directory, 0, 96, 0, at, 0, 0_u64];
    if broken == Broken::Message {
        words = [u64::MAX; 8];
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    messages.copy_from_slice(2048, &bytes).expect("inside");
    let length = if broken == Broken::ShortMessage { 32 } else { 64 };
    let from = messages.sge(2048, length).expect("inside");
    // Ready comes first.
    let mut buffer = [millstream_rdma::Completion::EMPTY; 8];
    let start = Instant::now();
    let mut seen = 0;
    let mut sent = false;
    let mut failure = None;
    stream.set_nonblocking(true).expect("valid");
    loop {
        assert!(start.elapsed() < LONG, "{broken:?}: {seen} messages");
        for completion in queue.poll(&mut buffer).expect("polls") {
            if completion.is_success() && completion.wr_id().0 < 8 {
                seen += 1;
                let mut message = [0; 64];
                messages.copy_to_slice(64 * completion.wr_id().0, &mut message).expect("inside");
                failure = (seen == 2).then_some(message[8]);
            }
        }
        if seen == 1 && !std::mem::replace(&mut sent, true) {
            connected.pair.post_send(&[from], Signal::Yes, WrId(99)).expect("room");
        }
        let is_closed = matches!(stream.read(&mut [0]), Ok(0));
        if broken == Broken::Range {
            if let Some(failure) = failure {
                assert_eq!(failure, 4, "no access");
                return;
            }
            assert!(!is_closed, "an error of an operation keeps the connection");
        } else if is_closed {
            return;
        }
    }
}

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, run: fn() -> Result<(), LaunchError>| {
        Trial::test(name, move || run().map_err(|error| Failed::from(error.to_string())))
    };
    vec![
        trial("an_outside_host_uses_every_node_of_2x2x2", || an_outside_host_uses_every_node("2x2x2", 5)),
        trial("an_outside_host_uses_a_node_alone", || an_outside_host_uses_every_node("1x1x1", 0)),
        trial("a_gateway_serves_without_its_application", a_gateway_serves_without_its_application),
        trial("killed_outside_hosts_free_what_they_held", killed_hosts_free_what_they_held),
        trial("an_outside_host_learns_of_lost_nodes", an_outside_host_learns_of_lost_nodes),
        trial("wrong_outside_hosts_are_refused", wrong_hosts_are_refused),
    ]
}
