//! The kernel `bfs` without a card: parents of searches on several nodes, and what it refuses.

use millstream_application::{HEADER_BYTES, Place};
use millstream_application_kernels::bfs::BUILTIN;
use millstream_bfs::distribution::Distribution;
use millstream_bfs::kernel::{Description, MORE, Operation, PeerMessages, array_counts, least_room};
use millstream_bfs::kronecker::Kronecker;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::KernelWords;
use millstream_card_server::Memory;
use millstream_card_server::kernel::{GrantedBanks, Kernel, KernelRun, StandaloneControl};

const BANK: u64 = 1 << 20;
const DESCRIPTION: u64 = 0;
const MESSAGES: u64 = 8192;
const ARRAYS: u64 = 128 << 10;

/// Neighbours of each vertex, in order.
fn neighbours() -> Vec<Vec<u64>> {
    let graph = Kronecker::new(8, 3, (2, 3));
    let mut neighbours = vec![Vec::new(); graph.vertices() as usize];
    for (a, b) in graph.part(0..graph.edges()).map(|edge| edge.ends()).filter(|(a, b)| a != b) {
        neighbours[a as usize].push(b);
        neighbours[b as usize].push(a);
    }
    for row in &mut neighbours {
        row.sort_unstable();
        row.dedup();
    }
    neighbours
}

/// Levels of all vertices.
fn levels(neighbours: &[Vec<u64>], root: u64) -> Vec<Option<u32>> {
    let mut levels = vec![None; neighbours.len()];
    levels[root as usize] = Some(0);
    let mut frontier = vec![root];
    for level in 1.. {
        let mut next = Vec::new();
        for vertex in std::mem::take(&mut frontier) {
            for &child in &neighbours[vertex as usize] {
                if levels[child as usize].is_none() {
                    levels[child as usize] = Some(level);
                    next.push(child);
                }
            }
        }
        if next.is_empty() {
            return levels;
        }
        frontier = next;
    }
    unreachable!("a level without vertices ends the search")
}

/// A node with a card of its own.
struct Node {
    memory: Memory,
    kernel: Box<dyn Kernel>,
    description: Description,
}

impl Node {
    fn run(&mut self, operation: Operation) -> Result<KernelWords, Fault> {
        let control = StandaloneControl::default();
        let banks = GrantedBanks::new(&self.memory, BANK, 1);
        let mut run = KernelRun::new(banks, operation.to_words(), &control);
        self.kernel.run(&mut run)?;
        Ok(*run.results())
    }

    /// Writes the description, and attaches it.
    fn attach(&mut self) -> Result<KernelWords, Fault> {
        let text = serde_json::to_vec(&self.description).unwrap();
        self.memory.write(DESCRIPTION, &text).unwrap();
        self.run(Operation::Attach { at: DESCRIPTION, bytes: text.len() as u64 })
    }
}

fn number(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Nodes with the rows of their vertices, and messages of the least room and `more_room` bytes.
fn nodes(neighbours: &[Vec<u64>], nodes: usize, column_bytes: usize, more_room: u64) -> Vec<Node> {
    let node = |here: usize| {
        let distribution = Distribution::new(neighbours.len() as u64, nodes, here);
        let room = (least_room(&distribution, column_bytes) + more_room).next_multiple_of(8);
        let memory = Memory::anonymous(BANK).unwrap();
        let (mut starts, mut columns) = (vec![0_u64], Vec::new());
        for vertex in (here..neighbours.len()).step_by(nodes) {
            let row = neighbours[vertex].iter().map(|&other| distribution.index(other).to_le_bytes());
            row.for_each(|index| columns.extend_from_slice(&index[..column_bytes]));
            starts.push((columns.len() / column_bytes) as u64);
        }
        let counts = [starts.len() as u64, (columns.len() / column_bytes) as u64];
        let sizes = [8, column_bytes as u64, 8, 8, 8, 8, 8, column_bytes as u64, 4];
        let (mut arrays, mut at) = ([Place::default(); 9], ARRAYS);
        let counts = counts.into_iter().chain(array_counts(&distribution));
        for ((place, count), size) in arrays.iter_mut().zip(counts).zip(sizes) {
            *place = Place { at, count };
            at += (count * size).next_multiple_of(8);
        }
        let starts: Vec<u8> = starts.iter().flat_map(|start| start.to_le_bytes()).collect();
        memory.write(arrays[0].at, &starts).unwrap();
        memory.write(arrays[1].at, &columns).unwrap();
        let of_peer = |peer: usize| {
            let at = |slot: u64| MESSAGES + (3 * peer as u64 + slot) * room;
            PeerMessages { node: peer as u16, outgoing: at(0), incoming: [at(1), at(2)] }
        };
        let description = Description {
            vertices: neighbours.len() as u64,
            nodes: nodes as u16,
            here: here as u16,
            column_bytes,
            arrays,
            room,
            peers: (0..nodes).filter(|&peer| peer != here).map(of_peer).collect(),
        };
        Node { memory, kernel: (BUILTIN.make)(), description }
    };
    (0..nodes).map(node).collect()
}

/// Copies the messages of all nodes into their places of a parity. Returns how many have a sender with more to scan.
fn exchange(nodes: &[Node], parity: usize) -> usize {
    let mut more = 0;
    for from in nodes {
        for to in nodes {
            let (source, target) = (from.description.here, to.description.here);
            let Some(sent) = from.description.peers.iter().find(|peer| peer.node == target) else { continue };
            let place = to.description.peers.iter().find(|peer| peer.node == source).expect("mutual");
            let header = u64::from_le_bytes(from.memory.read_array(sent.outgoing).unwrap());
            let mut bytes = vec![0; HEADER_BYTES + (header & !MORE) as usize];
            assert!(bytes.len() as u64 <= from.description.room);
            from.memory.read(sent.outgoing, &mut bytes).unwrap();
            to.memory.write(place.incoming[parity], &bytes).unwrap();
            more += usize::from(header & MORE != 0);
        }
    }
    more
}

/// Searches from a root; `bottom_up` chooses the direction of a level. Returns the rounds that were not the last of a level.
fn search(nodes: &mut [Node], root: u64, bottom_up: impl Fn(u32) -> bool) -> usize {
    let (mut rounds, mut parity) = (0, 0);
    for node in &mut *nodes {
        node.run(Operation::Start { root }).unwrap();
    }
    for level in 1.. {
        let vertices = loop {
            let write = if bottom_up(level) { Operation::Frontier } else { Operation::Scan { level } };
            for node in &mut *nodes {
                node.run(write).unwrap();
            }
            let more = exchange(nodes, parity);
            let read = if bottom_up(level) {
                Operation::BottomUp { parity: parity as u64, level }
            } else {
                Operation::Receive { parity: parity as u64, level }
            };
            parity = 1 - parity;
            let results: Vec<KernelWords> = nodes.iter_mut().map(|node| node.run(read).unwrap()).collect();
            assert!(results.iter().all(|words| words[0] == u64::from(more > 0)), "{results:?}");
            if more == 0 {
                break results.iter().map(|words| words[1]).sum::<u64>();
            }
            rounds += 1;
        };
        if vertices == 0 {
            break;
        }
    }
    rounds
}

/// Checks parents and levels on all cards.
fn check(nodes: &[Node], neighbours: &[Vec<u64>], root: u64) {
    let levels = levels(neighbours, root);
    for (vertex, level) in levels.iter().enumerate() {
        let Node { memory, description, .. } = &nodes[vertex % nodes.len()];
        let place = (vertex / nodes.len()) as u64;
        let size = description.column_bytes;
        let mut parent = vec![0; size];
        memory.read(description.arrays[7].at + place * size as u64, &mut parent).unwrap();
        let found = u32::from_le_bytes(memory.read_array(description.arrays[8].at + 4 * place).unwrap());
        assert_eq!(found, level.unwrap_or(u32::MAX), "level of {vertex}");
        match level {
            None => assert!(parent.iter().all(|&byte| byte == 0xFF)),
            Some(0) => assert_eq!(number(&parent), root),
            Some(level) => {
                let above = |&&other: &&u64| levels[other as usize] == Some(level - 1);
                let lowest = neighbours[vertex].iter().find(above).unwrap();
                assert_eq!(number(&parent), *lowest, "parent of {vertex}");
            }
        }
    }
}

#[test]
fn parents_are_the_lowest_for_all_nodes_widths_directions_and_rooms() {
    let neighbours = neighbours();
    let roots = (0..neighbours.len() as u64).filter(|&vertex| !neighbours[vertex as usize].is_empty());
    let roots: Vec<u64> = roots.step_by(29).collect();
    assert!(roots.len() > 4, "{roots:?}");
    let mut rounds = 0;
    for (count, column_bytes, more_room) in [(1, 4, 0), (2, 4, 0), (3, 6, 0), (5, 4, 8192), (8, 6, 64)] {
        let mut nodes = nodes(&neighbours, count, column_bytes, more_room);
        for node in &mut nodes {
            node.attach().unwrap();
        }
        for &root in &roots {
            for bottom_up in [|_| false, |_| true, |level| level % 2 == 0, |level| level > 2] {
                rounds += search(&mut nodes, root, bottom_up);
                check(&nodes, &neighbours, root);
            }
        }
    }
    assert!(rounds > 100, "{rounds}");
}

#[test]
fn wrong_descriptions_arguments_and_messages_are_refused() {
    let neighbours = neighbours();
    let invalid = |index| Err(Fault::new(Cause::InvalidArgument, index));
    let new = || nodes(&neighbours, 2, 4, 0).swap_remove(0);
    // Nothing is attached.
    assert_eq!(new().run(Operation::Start { root: 0 }), invalid(0));
    let changes: [fn(&mut Description); 14] = [
        |d| d.vertices = 0,
        |d| d.vertices = u64::MAX,
        |d| d.vertices += 64,
        |d| d.nodes = 0,
        |d| d.here = 2,
        |d| d.column_bytes = 5,
        |d| d.room = 8,
        |d| d.peers.clear(),
        |d| d.peers[0].node = 0,
        |d| d.arrays[0].count -= 1,
        |d| d.arrays[1].count -= 1,
        |d| d.arrays[3].count += 1,
        // Starts that are no starts, columns of nobody.
        |d| d.arrays[0].at += 8,
        |d| d.arrays[1].at = d.arrays[0].at,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut node = new();
        change(&mut node.description);
        assert_eq!(node.attach(), invalid(1), "change {i}");
        assert_eq!(node.run(Operation::Frontier), invalid(0));
    }
    for at in [BANK, u64::MAX - 7, ARRAYS + 4] {
        let mut node = new();
        node.description.arrays[0].at = at;
        let fault = node.attach().unwrap_err();
        assert_eq!((fault.cause, fault.detail), (Cause::AccessViolation, at));
    }
    let mut node = new();
    node.memory.write(DESCRIPTION, b"{").unwrap();
    assert_eq!(node.run(Operation::Attach { at: DESCRIPTION, bytes: 1 }), invalid(1));
    node.attach().unwrap();
    assert_eq!(node.run(Operation::Start { root: neighbours.len() as u64 }), invalid(1));
    // A length beyond the room, half a child, a child of nobody.
    let place = node.description.peers[0].incoming[0];
    let receive = Operation::Receive { parity: 0, level: 1 };
    let messages: [&[u8]; 3] =
        [&[0xFF; 7], &[4, 0, 0, 0, 0, 0, 0, 0], &[8, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0, 0, 1, 0, 0, 0]];
    for message in messages {
        node.attach().unwrap();
        node.run(Operation::Start { root: 1 }).unwrap();
        node.memory.write(place, message).unwrap();
        assert_eq!(node.run(receive), Err(Fault::new(Cause::AccessViolation, place)), "{message:?}");
        assert_eq!(node.run(receive), invalid(0));
    }
    // A length within a room that exceeds all memory.
    let mut roomy = new();
    roomy.description.room = 1 << 62;
    for read in [receive, Operation::BottomUp { parity: 0, level: 1 }] {
        roomy.attach().unwrap();
        roomy.run(Operation::Start { root: 1 }).unwrap();
        roomy.memory.write(place, &(1_u64 << 50).to_le_bytes()).unwrap();
        assert_eq!(roomy.run(read), Err(Fault::new(Cause::AccessViolation, place)));
    }
    // A frontier with a vertex that the peer does not have.
    node.attach().unwrap();
    node.memory.write(place, &[3, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0x7F]).unwrap();
    let fault = node.run(Operation::BottomUp { parity: 0, level: 1 });
    assert_eq!(fault, Err(Fault::new(Cause::AccessViolation, place)));
    for (words, index) in
        [([6, 0, 0], 0), ([0, 0, 1 << 40], 2), ([2, 0, 1 << 32], 2), ([3, 2, 0], 1), ([5, 0, 1 << 32], 2)]
    {
        let mut all = [0; 16];
        all[..3].copy_from_slice(&words);
        assert_eq!(Operation::from_words(&all), Err(index));
    }
}
