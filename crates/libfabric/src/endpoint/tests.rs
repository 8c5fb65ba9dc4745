//! Endpoints of threads' nodes, on one thread.

use millstream_fabric::LocalNode;
use millstream_fabric::unreliable::UnreliableNode;

use super::target::READ_STEP;
use super::*;

const HERE: NodeNumber = NodeNumber(0);
const OTHER: NodeNumber = NodeNumber(1);

/// Larger than a ring.
const LONG: usize = 3 * READ_STEP as usize + 7;

fn open(node: LocalNode) -> Endpoint<LocalNode> {
    Endpoint::new(Rings::new(node).expect("few nodes").without_grace(), Arc::default())
}

fn endpoints<const N: usize>() -> [Endpoint<LocalNode>; N] {
    let nodes: [LocalNode; N] =
        LocalNode::all(format!("{N}x1x1").parse().unwrap()).try_into().expect("the nodes");
    nodes.map(open)
}

fn buffer(bytes: &mut [u8]) -> UserBuffer {
    // SAFETY: the tests keep the bytes longer than the endpoints.
    unsafe { UserBuffer::new([(bytes.as_mut_ptr(), bytes.len())]) }
}

fn pattern(source: Option<NodeNumber>, tag: u64) -> Pattern {
    Pattern { tagged: true, source, tag, ignore: 0 }
}

fn post<F: Fabric>(at: &mut Endpoint<F>, source: Option<NodeNumber>, tag: u64, bytes: &mut [u8]) {
    let (pattern, buffer) = (pattern(source, tag), buffer(bytes));
    at.receive(Receive { buffer, context: tag as usize, signaled: true, pattern });
}

fn send<F: Fabric>(from: &mut Endpoint<F>, to: Address, tag: u64, bytes: Vec<u8>, acknowledged: bool) {
    let completion = Completion::new(Side::Transmit, tag as usize, sys::MS_FI_SEND | sys::MS_FI_TAGGED);
    let header = Header { tag, ..Header::new(Kind::Tagged) };
    from.send(to, header, Source::Owned(bytes), completion, acknowledged);
}

/// Contexts and errors of all completions.
fn completed<F: Fabric>(at: &mut Endpoint<F>) -> Vec<(usize, u32)> {
    std::iter::from_fn(|| at.poll_completion()).map(|done| (done.context, done.error)).collect()
}

fn settle<const N: usize>(mut endpoints: [&mut Endpoint<LocalNode>; N]) {
    while endpoints.iter_mut().fold(false, |worked, endpoint| endpoint.progress() | worked) {}
}

/// Closes the endpoint of a node, and opens another one.
fn reopened(endpoint: Endpoint<LocalNode>) -> Endpoint<LocalNode> {
    open(endpoint.rings.close())
}

#[test]
fn operations_on_a_lost_node_complete_in_error() {
    let [mut here, mut other] = endpoints();
    let address = other.address();
    let mut bytes = [[0; 8]; 6];
    let [first, second, third, fourth, fifth, sixth] = &mut bytes;
    send(&mut other, here.address(), 1, vec![7; 8], false);
    post(&mut here, Some(OTHER), 2, second);
    post(&mut here, Some(HERE), 3, third);
    post(&mut here, None, 4, fourth);
    send(&mut here, address, 5, vec![1; 8], true);
    send(&mut here, address, 6, vec![1; LONG], false);
    drop(other);
    settle([&mut here]);
    let mut failed = completed(&mut here);
    failed.sort_unstable();
    assert_eq!(failed, [2, 5, 6].map(|context| (context, sys::FI_ECONNABORTED)));
    // Its last message is here; later operations fail at once.
    post(&mut here, Some(OTHER), 1, first);
    post(&mut here, Some(OTHER), 7, fifth);
    send(&mut here, address, 8, vec![1; 8], true);
    let lost = sys::FI_ECONNABORTED;
    assert_eq!(completed(&mut here), [(1, 0), (7, lost), (8, lost)]);
    // The other receives wait for other nodes.
    let own = here.address();
    send(&mut here, own, 3, vec![1; 8], true);
    send(&mut here, own, 4, vec![1; 8], true);
    settle([&mut here]);
    let mut done = completed(&mut here);
    done.sort_unstable();
    assert_eq!(done, [(3, 0), (3, 0), (4, 0), (4, 0)]);
    post(&mut here, None, 9, sixth);
    assert_eq!(completed(&mut here), []);
}

#[test]
fn a_message_that_its_node_does_not_end_fails_its_receive() {
    let [mut here, mut other] = endpoints();
    let mut bytes = vec![0; LONG];
    post(&mut here, None, 1, &mut bytes);
    send(&mut other, here.address(), 1, vec![1; LONG], false);
    drop(other);
    settle([&mut here]);
    assert_eq!(completed(&mut here), [(1, sys::FI_ECONNABORTED)]);
}

#[test]
fn what_waits_for_an_endpoint_fails_when_its_node_opens_another() {
    let [mut here, mut other] = endpoints();
    let (mut part, mut whole) = (vec![0; LONG], [0; 8]);
    post(&mut here, None, 1, &mut part);
    post(&mut here, Some(OTHER), 2, &mut whole);
    send(&mut other, here.address(), 1, vec![1; LONG], false);
    let earlier = other.address();
    send(&mut here, earlier, 3, vec![1; 8], true);
    here.progress();
    assert_eq!(completed(&mut here), []);
    let mut other = reopened(other);
    send(&mut other, here.address(), 2, vec![5; 8], true);
    settle([&mut here, &mut other]);
    let mut done = completed(&mut here);
    done.sort_unstable();
    assert_eq!(done, [(1, sys::FI_ECONNABORTED), (2, 0), (3, sys::FI_ECONNABORTED)]);
    assert_eq!((whole, completed(&mut other)), ([5; 8], vec![(2, 0)]));
    send(&mut here, earlier, 4, vec![1; 8], false);
    assert_eq!(completed(&mut here), [(4, sys::FI_ECONNABORTED)]);
    let mut back = [0; 8];
    post(&mut other, None, 5, &mut back);
    send(&mut here, other.address(), 5, vec![6; 8], true);
    settle([&mut here, &mut other]);
    assert_eq!((completed(&mut here), completed(&mut other)), (vec![(5, 0)], vec![(5, 0)]));
}

#[test]
fn a_dropped_message_is_acknowledged_when_its_source_may_reuse_the_memory() {
    let [mut here, mut other] = endpoints();
    send(&mut other, here.address(), 1, vec![1; 8], true);
    here.peek(&pattern(None, 1), 10, false, true);
    assert_eq!(completed(&mut here), [(10, 0)]);
    settle([&mut here, &mut other]);
    assert_eq!(completed(&mut other), [(1, 0)]);
    // A part of this one is here.
    send(&mut other, here.address(), 2, vec![1; LONG], true);
    here.peek(&pattern(None, 2), 11, true, false);
    assert!(here.discard_claimed(&pattern(None, 2), 11));
    here.progress();
    other.progress();
    assert_eq!(completed(&mut other), []);
    settle([&mut here, &mut other]);
    assert_eq!((completed(&mut here), completed(&mut other)), (vec![(11, 0), (11, 0)], vec![(2, 0)]));
}

#[test]
fn a_long_read_is_exact_and_holds_up_no_other_node() {
    const KEY: u64 = 3;
    let [mut here, mut reader, mut other] = endpoints();
    let byte = |i: usize| (i * 7 + i / 4096) as u8;
    let (mut memory, mut found): (Vec<u8>, _) = ((0..LONG).map(byte).collect(), vec![0; LONG]);
    // SAFETY: the memory lives longer than the endpoints.
    assert!(unsafe { lock(&here.regions).add(KEY, memory.as_mut_ptr(), LONG as u64, true, true) });
    let request = |kind, data| Header { key: KEY, data, ..Header::new(kind) };
    let completion = |context| Completion::new(Side::Transmit, context, sys::MS_FI_RMA);
    let (to, read) = (here.address(), request(Kind::ReadRequest, LONG as u64));
    reader.send_request(to, read, Source::Owned(Vec::new()), buffer(&mut found), completion(1));
    // Behind the read, so it changes nothing before.
    reader.send(to, request(Kind::Write, 0), Source::Owned(vec![0xee; LONG]), completion(2), true);
    let mut bytes = [0; 8];
    post(&mut here, None, 4, &mut bytes);
    send(&mut other, to, 4, vec![1; 8], false);
    assert!(here.progress() && here.readings[reader.address().node.index()].is_some());
    assert_eq!(completed(&mut here), [(4, 0)]);
    settle([&mut here, &mut reader]);
    assert_eq!(completed(&mut reader), [(1, 0), (2, 0)]);
    assert!(found.iter().enumerate().all(|(i, &found)| found == byte(i)));
    // A region that is closed meanwhile ends the read.
    reader.send_request(to, read, Source::Owned(Vec::new()), buffer(&mut found), completion(3));
    here.progress();
    lock(&here.regions).remove(KEY);
    settle([&mut here, &mut reader]);
    assert_eq!(completed(&mut reader), [(3, sys::FI_EKEYREJECTED)]);
    assert_eq!(memory, vec![0xee; LONG]);
}

#[test]
fn an_address_that_is_used_before_its_first_message_is_of_the_endpoint_that_lives() {
    let [mut here, mut other] = endpoints();
    let (earlier, mut bytes) = (other.address(), [[0; 8]; 3]);
    let [first, second, third] = &mut bytes;
    post(&mut here, None, 1, first);
    post(&mut here, None, 2, second);
    send(&mut other, here.address(), 1, vec![1; 8], false);
    let mut other = reopened(other);
    post(&mut other, None, 3, third);
    send(&mut here, other.address(), 3, vec![3; 8], true);
    send(&mut here, earlier, 4, vec![4; 8], false);
    assert_eq!(completed(&mut here), [(1, 0), (4, sys::FI_ECONNABORTED)]);
    send(&mut other, here.address(), 2, vec![2; 8], true);
    settle([&mut here, &mut other]);
    let mut done = completed(&mut here);
    done.sort_unstable();
    assert_eq!(done, [(2, 0), (3, 0)]);
    let mut done = completed(&mut other);
    done.sort_unstable();
    assert_eq!(done, [(2, 0), (3, 0)]);
    assert_eq!(bytes, [[1; 8], [2; 8], [3; 8]]);
}

/// What is under way arrives, and the endpoints go on until there is nothing left.
fn settle_unreliable(endpoints: &mut [Endpoint<UnreliableNode>; 2]) {
    for _ in 0..1000 {
        for (at, endpoint) in endpoints.iter_mut().enumerate() {
            endpoint.progress();
            endpoint.rings.fabric().execute(NodeNumber(1 - at as u16), usize::MAX);
        }
    }
}

/// The other node is away for longer than it is waited for, and knows nothing of that.
#[test]
fn a_lost_node_that_comes_back_misses_nothing() {
    const KEY: u64 = 3;
    let open =
        |node| Rings::new(UnreliableNode::new(node)).expect("few nodes").without_grace().without_pause();
    let nodes: [LocalNode; 2] = LocalNode::all("2x1x1".parse().unwrap()).try_into().expect("the nodes");
    let mut endpoints = nodes.map(|node| Endpoint::new(open(node), Arc::default()));
    let addresses = [endpoints[0].address(), endpoints[1].address()];
    let [mut words, mut old] = [[5_u64.to_le_bytes()], [[0; 8]]];
    // SAFETY: the memory lives longer than the endpoints.
    assert!(unsafe { lock(&endpoints[0].regions).add(KEY, words[0].as_mut_ptr(), 8, true, true) });
    let (mut long, mut failing, mut last) = (vec![0; LONG], vec![0; LONG], [0; 8]);
    let (mut expected, mut named) = (vec![0; LONG], [0; 8]);
    let [here, other] = &mut endpoints;
    // Each waits for the other: a part of a message without a receive, of one with a receive, an atomic operation.
    let header = Header { key: KEY, ..Header::new(Kind::Atomic) };
    let header = Header { data: 1, datatype: sys::FI_UINT64 as u8, operation: sys::FI_SUM as u8, ..header };
    let completion = Completion::new(Side::Transmit, 10, sys::MS_FI_ATOMIC);
    let one = Source::Owned(1_u64.to_le_bytes().to_vec());
    other.send_request(addresses[0], header, one, buffer(&mut old[0]), completion);
    send(other, addresses[0], 1, vec![1; LONG], true);
    post(other, None, 2, &mut failing);
    send(here, addresses[1], 2, vec![2; LONG], true);
    post(here, Some(OTHER), 3, &mut named);
    for endpoint in [other, here] {
        let to = NodeNumber(1 - endpoint.address().node.0);
        endpoint.rings.fabric().execute(to, usize::MAX);
        endpoint.progress();
    }
    assert_eq!(words[0], 6_u64.to_le_bytes());
    let [here, other] = &mut endpoints;
    // A part of the long message is there, and no answer has left.
    other.progress();
    assert!(completed(here).is_empty() && completed(other).is_empty());
    here.rings.fabric().set_away(OTHER, true);
    other.rings.fabric().lose(HERE);
    here.progress();
    let mut failed = completed(here);
    failed.sort_unstable();
    assert_eq!(failed, [2, 3].map(|context| (context, sys::FI_ECONNABORTED)));
    post(here, None, 1, &mut long);
    here.progress();
    assert_eq!((completed(here), completed(other)), (vec![], vec![]), "the message has not come yet");
    here.rings.fabric().set_away(OTHER, false);
    settle_unreliable(&mut endpoints);
    let [here, other] = &mut endpoints;
    assert_eq!(completed(here), [(1, 0)]);
    let mut done = completed(other);
    done.sort_unstable();
    assert_eq!(done, [(1, 0), (2, sys::FI_ECONNABORTED), (10, 0)]);
    assert!(long.iter().all(|&byte| byte == 1));
    assert_eq!((words[0], old[0]), (6_u64.to_le_bytes(), 5_u64.to_le_bytes()), "executed once");
    // Later messages in both directions.
    post(other, None, 4, &mut expected);
    post(here, Some(OTHER), 5, &mut last);
    send(here, addresses[1], 4, vec![4; LONG], true);
    send(other, addresses[0], 5, vec![5; 8], true);
    settle_unreliable(&mut endpoints);
    for (endpoint, contexts) in endpoints.iter_mut().zip([[4, 5], [4, 5]]) {
        let mut done = completed(endpoint);
        done.sort_unstable();
        assert_eq!(done, contexts.map(|context| (context, 0)));
    }
    assert!(expected.iter().all(|&byte| byte == 4) && last == [5; 8]);
}

/// The part of a message that has a receive is no message, but its source learns so.
#[test]
fn a_message_whose_receive_has_failed_is_acknowledged_with_an_error() {
    let nodes: [LocalNode; 2] = LocalNode::all("2x1x1".parse().unwrap()).try_into().expect("the nodes");
    let open =
        |node| Rings::new(UnreliableNode::new(node)).expect("few nodes").without_grace().without_pause();
    let mut endpoints = nodes.map(|node| Endpoint::new(open(node), Arc::default()));
    let mut long = vec![0; LONG];
    let to = endpoints[0].address();
    let [here, other] = &mut endpoints;
    post(here, None, 1, &mut long);
    send(other, to, 1, vec![1; LONG], true);
    other.rings.fabric().execute(HERE, usize::MAX);
    here.progress();
    here.rings.fabric().set_away(OTHER, true);
    here.progress();
    assert_eq!(completed(here), [(1, sys::FI_ECONNABORTED)]);
    here.rings.fabric().set_away(OTHER, false);
    settle_unreliable(&mut endpoints);
    assert_eq!(completed(&mut endpoints[1]), [(1, sys::FI_ECONNABORTED)]);
    assert_eq!(completed(&mut endpoints[0]), []);
}

#[test]
fn a_closed_endpoint_touches_no_memory() {
    let [mut here, mut other] = endpoints();
    let mut bytes = vec![0; LONG];
    post(&mut here, None, 1, &mut bytes);
    send(&mut other, here.address(), 1, vec![1; LONG], false);
    here.close();
    // Another thread made progress when the endpoint was closed.
    assert!(!here.progress());
    assert!(bytes.iter().all(|&byte| byte == 0));
    assert_eq!(completed(&mut here), []);
}

#[test]
fn a_write_whose_region_comes_or_changes_in_its_middle_fails() {
    for is_there in [false, true] {
        let [mut here, mut other] = endpoints();
        let (mut first, mut second) = (vec![0; LONG], vec![0; LONG]);
        let regions = Arc::clone(&other.regions);
        // SAFETY: the bytes live longer than the endpoints.
        let add = |bytes: &mut Vec<u8>| unsafe {
            lock(&regions).add(17, bytes.as_mut_ptr(), LONG as u64, true, true)
        };
        if is_there {
            assert!(add(&mut first));
        }
        let completion = Completion::new(Side::Transmit, 1, sys::MS_FI_WRITE);
        let header = Header { key: 17, has_data: true, data: 5, ..Header::new(Kind::Write) };
        here.send(other.address(), header, Source::Owned(vec![1; LONG]), completion, true);
        other.progress();
        lock(&other.regions).remove(17);
        assert!(add(&mut second));
        settle([&mut here, &mut other]);
        assert_eq!(completed(&mut here), [(1, sys::FI_EKEYREJECTED)]);
        assert_eq!(completed(&mut other), [], "no event of a write that failed");
        assert!(second.iter().all(|&byte| byte == 0) && first.contains(&1) == is_there);
    }
}
