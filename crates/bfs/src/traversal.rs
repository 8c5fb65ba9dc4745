//! The data of searches on one node, and the steps of a level. No network: what goes to other nodes is bytes.
//!
//! The parent of a vertex is the lowest of its neighbours in the previous level. So parents depend on the graph and the root
//! only: not on the nodes, on the direction, or on the order of messages.

use millstream_application::Array;

use crate::bitmap::{Bitmap, bits, contains, insert};
use crate::column::Column;
use crate::distribution::Distribution;
use crate::graph::Rows;

/// Level of a vertex that was not reached.
pub const NO_LEVEL: u32 = u32::MAX;

/// New vertices of a level, and the length of their rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Vertices.
    pub vertices: u64,
    /// Entries of their rows.
    pub entries: u64,
}

/// Where a scan of the frontier goes on after its messages were full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    place: u64,
    /// Entry of the row of that place.
    entry: usize,
}

/// What a search of one node works on.
#[derive(Debug)]
pub struct Traversal<C> {
    /// Who owns which vertex.
    pub distribution: Distribution,
    /// The graph.
    pub rows: Rows<C>,
    /// Own vertices that have a parent, by place.
    pub visited: Bitmap,
    /// Vertices of other nodes that this node has sent to their owners, by index.
    pub sent: Bitmap,
    /// The frontier of all nodes by index, while the search goes bottom-up.
    pub frontier_of_all: Bitmap,
    /// The newest level of this node, by place.
    pub frontier: Bitmap,
    /// The level that is being found top-down, by place.
    pub next: Bitmap,
    /// Parents of this node's vertices, by place; [`Column::NONE`] outside of the tree.
    pub parents: Array<C>,
    /// Levels of this node's vertices, by place; [`NO_LEVEL`] outside of the tree.
    pub levels: Array<u32>,
    /// Where [`Traversal::scan`] goes on.
    pub cursor: Cursor,
}

impl<C: Column> Traversal<C> {
    /// Allocates the memory of searches.
    #[must_use]
    pub fn new(distribution: Distribution, rows: Rows<C>) -> Traversal<C> {
        let (own, all) = (distribution.own_count(), distribution.indices());
        Traversal {
            distribution,
            rows,
            visited: Bitmap::new(own),
            sent: Bitmap::new(all),
            frontier_of_all: Bitmap::new(all),
            frontier: Bitmap::new(own),
            next: Bitmap::new(own),
            parents: vec![C::NONE; own as usize].into(),
            levels: vec![NO_LEVEL; own as usize].into(),
            cursor: Cursor::default(),
        }
    }

    /// Forgets the last search and makes the root the frontier. Returns the length of the root's row if this node owns it.
    pub fn start(&mut self, root: u64) -> u64 {
        self.parents.fill(C::NONE);
        self.levels.fill(NO_LEVEL);
        for bitmap in [&mut self.visited, &mut self.sent, &mut self.frontier, &mut self.next] {
            bitmap.clear();
        }
        self.cursor = Cursor::default();
        let Some(place) = self.distribution.own_place(root) else { return 0 };
        self.visited.insert(place);
        self.frontier.insert(place);
        self.parents[place as usize] = C::new(root);
        self.levels[place as usize] = 0;
        self.rows.degree(place)
    }

    /// Top-down: takes the own children of the frontier, and appends (place, parent) of the others to the messages to their
    /// owners, each child once. Returns false if a message would exceed `room`: the next call goes on there.
    ///
    /// `room` has space for a child at least.
    pub fn scan(&mut self, level: u32, room: usize, messages: &mut [Vec<u8>]) -> bool {
        // Parents that another node sent are not in order with the own ones.
        let is_first = self.cursor == Cursor::default();
        let Cursor { place: begin, entry: first_entry } = std::mem::take(&mut self.cursor);
        let (distribution, here) = (self.distribution, self.distribution.here());
        let (starts, columns) = (&*self.rows.starts, &*self.rows.columns);
        let sent = self.sent.words_mut();
        let mut own = OwnVertices {
            visited: self.visited.words_mut(),
            next: self.next.words_mut(),
            parents: &mut self.parents,
            levels: &mut self.levels,
            level,
        };
        for (&word, first) in self.frontier.words().iter().zip((0..).step_by(64)).skip(begin as usize / 64) {
            let done = if first < begin { (1 << (begin - first)) - 1 } else { 0 };
            for bit in bits(word & !done) {
                let place = first + bit;
                let parent = C::new(distribution.vertex(distribution.index_at(here, place)));
                let row = starts[place as usize] as usize..starts[place as usize + 1] as usize;
                let entry = if place == begin { first_entry } else { 0 };
                for (column, entry) in columns[row.start + entry..row.end].iter().zip(entry..) {
                    let index = column.get();
                    let owner = distribution.owner(index);
                    if owner == here {
                        if is_first {
                            own.claim_first(distribution.place(index), parent);
                        } else {
                            own.claim(distribution.place(index), parent);
                        }
                        continue;
                    }
                    let message = &mut messages[owner];
                    if message.len() + 2 * C::BYTES > room && !contains(sent, index) {
                        self.cursor = Cursor { place, entry };
                        return false;
                    }
                    if insert(sent, index) {
                        C::new(distribution.place(index)).append(message);
                        parent.append(message);
                    }
                }
            }
        }
        true
    }

    /// Top-down: takes the children of another node's message; `None` if it is malformed.
    pub fn receive(&mut self, message: &[u8], level: u32) -> Option<()> {
        let pairs = message.chunks_exact(2 * C::BYTES);
        pairs.remainder().is_empty().then_some(())?;
        let count = self.distribution.own_count();
        let mut own = OwnVertices {
            visited: self.visited.words_mut(),
            next: self.next.words_mut(),
            parents: &mut self.parents,
            levels: &mut self.levels,
            level,
        };
        for pair in pairs {
            let (place, parent) = (C::read(pair).get(), C::read(&pair[C::BYTES..]));
            (place < count).then_some(())?;
            own.claim(place, parent);
        }
        Some(())
    }

    /// Top-down: makes what was found the frontier.
    pub fn end_top_down(&mut self) -> Found {
        self.frontier.words_mut().copy_from_slice(self.next.words());
        self.next.clear();
        let mut found = Found::default();
        for place in self.frontier.iter() {
            found.vertices += 1;
            found.entries += self.rows.degree(place);
        }
        found
    }

    /// Bottom-up: the message to all nodes with this node's frontier. The frontiers of the others follow.
    pub fn share_frontier(&mut self) -> Vec<u8> {
        self.frontier_of_all.clear();
        let own = self.frontier.words();
        let first = (self.distribution.index_at(self.distribution.here(), 0) / 64) as usize;
        self.frontier_of_all.words_mut()[first..first + own.len()].copy_from_slice(own);
        if self.distribution.nodes() == 1 { Vec::new() } else { self.frontier.to_message() }
    }

    /// Bottom-up: adds the frontier of another node. False if the message is malformed.
    #[must_use]
    pub fn add_frontier(&mut self, node: usize, message: &[u8]) -> bool {
        let (first, limit) = (self.distribution.index_at(node, 0), self.distribution.count(node));
        self.frontier_of_all.add_message(message, first, limit)
    }

    /// Bottom-up: looks for the first neighbour of each unvisited vertex in the frontier of all nodes.
    pub fn bottom_up(&mut self, level: u32) -> Found {
        let mut found = Found::default();
        let own = self.distribution.own_count();
        let (starts, columns) = (&*self.rows.starts, &*self.rows.columns);
        let frontier_of_all = self.frontier_of_all.words();
        let (parents, levels) = (&mut *self.parents, &mut *self.levels);
        let words = self.visited.words_mut().iter_mut().zip(self.frontier.words_mut());
        for ((visited, new), first) in words.zip((0..).step_by(64)) {
            let mut unvisited = !*visited;
            if own - first < 64 {
                unvisited &= (1 << (own - first)) - 1;
            }
            *new = 0;
            for bit in bits(unvisited) {
                let place = (first + bit) as usize;
                let row = &columns[starts[place] as usize..starts[place + 1] as usize];
                if let Some(index) = row.iter().find(|index| contains(frontier_of_all, index.get())) {
                    parents[place] = C::new(self.distribution.vertex(index.get()));
                    levels[place] = level;
                    *new |= 1 << bit;
                    found.vertices += 1;
                    found.entries += row.len() as u64;
                }
            }
            *visited |= *new;
        }
        found
    }
}

/// The vertices of this node, while a level is found top-down.
struct OwnVertices<'t, C> {
    visited: &'t mut [u64],
    next: &'t mut [u64],
    parents: &'t mut [C],
    levels: &'t mut [u32],
    level: u32,
}

impl<C: Column> OwnVertices<'_, C> {
    /// Gives a vertex its parent, unless it has one: parents come in order. Returns whether it had none.
    fn claim_first(&mut self, place: u64, parent: C) -> bool {
        let is_new = insert(self.visited, place);
        if is_new {
            self.parents[place as usize] = parent;
            self.levels[place as usize] = self.level;
            insert(self.next, place);
        }
        is_new
    }

    /// Gives a vertex its parent, unless it has a lower one or is of an earlier level.
    fn claim(&mut self, place: u64, parent: C) {
        let at = place as usize;
        if !self.claim_first(place, parent) && self.levels[at] == self.level && parent < self.parents[at] {
            self.parents[at] = parent;
        }
    }
}
