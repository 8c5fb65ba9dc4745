//! The nodes around a card: who is there, and how the holder of the lease is told things.

use std::collections::{HashMap, HashSet};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard};

use millstream_rdma::queue::Signal;
use millstream_rdma::{Completion, CompletionQueue, QueuePair, WrId};

use std::sync::atomic::Ordering;

use crate::region::codes::MessageKind;
use crate::region::message::Message;
use crate::region::worker::{News, Outlet};
use crate::registers::{COPY_SLOTS, Registers};

/// Messages that may be under way to one node; beyond that they are lost. Each copy of a full ring may fail, while regions
/// tell of themselves.
pub(crate) const MESSAGE_DEPTH: u32 = 2 * COPY_SLOTS as u32;

/// Numbers of local nodes start here, so that they are told from those on the network.
pub(crate) const FIRST_LOCAL: u32 = 1 << 31;

/// A node on the network.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) pair: QueuePair,
    /// Its end tells of the node's death.
    pub(crate) stream: Arc<TcpStream>,
    under_way: u32,
}

impl Link {
    pub(crate) fn new(pair: QueuePair, stream: TcpStream) -> Link {
        Link { pair, stream: Arc::new(stream), under_way: 0 }
    }
}

#[derive(Debug, Default)]
struct Inside {
    links: HashMap<u32, Link>,
    locals: HashSet<u32>,
    /// Nodes whose connection is being made: they may act before the card knows that it is complete.
    arriving: HashSet<u32>,
    latest: u32,
    /// Node and epoch.
    holder: Option<(u32, u32)>,
    sent: Option<CompletionQueue>,
}

/// All nodes of a card.
#[derive(Debug)]
pub(crate) struct Crowd {
    card: u64,
    registers: Arc<Registers>,
    inside: Mutex<Inside>,
}

impl Crowd {
    pub(crate) fn new(card: u64, registers: Arc<Registers>) -> Crowd {
        Crowd { card, registers, inside: Mutex::default() }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        // Nobody panics with the lock held; and if: what is inside is whole after every statement.
        self.inside.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Where completions of messages arrive.
    pub(crate) fn set_sent(&self, queue: CompletionQueue) {
        self.inside().sent = Some(queue);
    }

    /// A number for a node of this host.
    pub(crate) fn join_local(&self) -> u32 {
        let mut inside = self.inside();
        let number = FIRST_LOCAL + next(&mut inside.latest);
        inside.locals.insert(number);
        self.show(&inside);
        number
    }

    pub(crate) fn leave_local(&self, node: u32) {
        let mut inside = self.inside();
        inside.locals.remove(&node);
        self.show(&inside);
    }

    /// A number for a node that is about to connect.
    pub(crate) fn number(&self) -> u32 {
        let mut inside = self.inside();
        let number = next(&mut inside.latest);
        inside.arriving.insert(number);
        number
    }

    /// The connection of an arriving node has failed.
    pub(crate) fn give_up(&self, node: u32) {
        self.inside().arriving.remove(&node);
    }

    pub(crate) fn is_arriving(&self, node: u32) -> bool {
        self.inside().arriving.contains(&node)
    }

    pub(crate) fn join(&self, node: u32, link: Link) {
        let mut inside = self.inside();
        inside.arriving.remove(&node);
        inside.links.insert(node, link);
        self.show(&inside);
    }

    pub(crate) fn leave(&self, node: u32) -> Option<Link> {
        let mut inside = self.inside();
        let link = inside.links.remove(&node);
        self.show(&inside);
        link
    }

    fn show(&self, inside: &Inside) {
        let nodes = inside.links.len() + inside.locals.len();
        self.registers.lease_nodes().store(nodes as u32, Ordering::Relaxed);
    }

    pub(crate) fn is_node(&self, node: u32) -> bool {
        let inside = self.inside();
        inside.links.contains_key(&node) || inside.locals.contains(&node)
    }

    /// Nodes on the network.
    pub(crate) fn len(&self) -> usize {
        self.inside().links.len()
    }

    /// Calls `look` for every node on the network.
    pub(crate) fn each(&self, mut look: impl FnMut(u32, &Link)) {
        self.inside().links.iter().for_each(|(node, link)| look(*node, link));
    }

    /// Calls `act` with the link of a node, if it is there.
    pub(crate) fn with<T>(&self, node: u32, act: impl FnOnce(&Link) -> T) -> Option<T> {
        self.inside().links.get(&node).map(act)
    }

    pub(crate) fn set_holder(&self, holder: Option<(u32, u32)>) {
        self.inside().holder = holder;
    }

    /// Sends a message to a node, if it can take one now.
    pub(crate) fn send(&self, node: u32, epoch: u32, news: News) {
        let mut inside = self.inside();
        self.post(&mut inside, node, epoch, news);
    }

    fn post(&self, inside: &mut Inside, node: u32, epoch: u32, news: News) {
        let message = Message {
            card: self.card,
            epoch,
            kind: news.kind,
            region: news.region,
            cause: news.cause,
            sequence: news.sequence,
            values: news.values,
        };
        let Inside { links, sent, .. } = inside;
        let Some(link) = links.get_mut(&node) else { return };
        if link.under_way >= MESSAGE_DEPTH / 2 {
            reap(links, sent.as_ref());
        }
        let Some(link) = links.get_mut(&node) else { return };
        let room = link.under_way < MESSAGE_DEPTH;
        let posted =
            room && link.pair.post_send_inline(&message.to_bytes(), Signal::Yes, WrId(node.into())).is_ok();
        let counter = if posted { self.registers.messages_sent() } else { self.registers.messages_lost() };
        counter.fetch_add(1, Ordering::Relaxed);
        link.under_way += u32::from(posted);
    }
}

/// Takes the completions of messages; failed ones show in the end of the node's connection.
fn reap(links: &mut HashMap<u32, Link>, sent: Option<&CompletionQueue>) {
    let Some(sent) = sent else { return };
    let mut buffer = [Completion::EMPTY; 32];
    while let Ok(completions) = sent.poll(&mut buffer)
        && !completions.is_empty()
    {
        for completion in completions {
            if let Some(link) = links.get_mut(&(completion.wr_id().0 as u32)) {
                link.under_way = link.under_way.saturating_sub(1);
            }
        }
    }
}

fn next(latest: &mut u32) -> u32 {
    *latest = latest.wrapping_add(1) % FIRST_LOCAL;
    *latest = (*latest).max(1);
    *latest
}

impl Outlet for Crowd {
    fn tell(&self, news: News) {
        let mut inside = self.inside();
        if let Some((node, epoch)) = inside.holder {
            self.post(&mut inside, node, epoch, news);
        }
    }
}

impl News {
    /// News that concerns no region.
    pub(crate) fn of_card(kind: MessageKind, sequence: u64, values: [u64; 4]) -> News {
        News { kind, region: 0, cause: None, sequence, values }
    }
}
