//! The network side of a card: listens for nodes, connects queue pairs, takes doorbells that come with
//! immediate data.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use millstream_rdma::connect::{self, ConnectError, Listener};
use millstream_rdma::memory::MemoryError;
use millstream_rdma::queue::QueueError;
use millstream_rdma::wait::{WaitError, WaitFd, WaitOptions, Waiter};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, RcOptions, Region,
    WrId,
};
use millstream_shm::EventFd;

use super::crowd::{Crowd, Link, MESSAGE_DEPTH};
use super::{Greeting, Visit};
use crate::backing::Emulated;
use crate::registers::{BAR0_BYTES, LEASE_PAGE};

/// Doorbells with immediate data that may be under way from one node.
const DOORBELL_DEPTH: u32 = 64;

/// Most nodes that a card serves.
pub(crate) const MAX_NODES: u32 = 64;

/// Time for a node that has connected to say what it is.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Why a card cannot be on the network.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// It cannot listen there.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The device refuses a queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The device refuses the card's memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Waiting failed.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// What nodes may do with a card's queue pairs; the regions say what with which memory.
pub(crate) fn options() -> RcOptions {
    RcOptions {
        send_depth: MESSAGE_DEPTH,
        recv_depth: DOORBELL_DEPTH,
        access: Access::REMOTE | Access::REMOTE_ATOMIC,
        ..RcOptions::default()
    }
}

type Joined = (u32, Link);

/// The network side of a card.
pub(crate) struct Port {
    pub(crate) device: Device,
    listener: Listener,
    waiter: Waiter,
    doorbells: CompletionQueue,
    sent: CompletionQueue,
    bar0: Region,
    lease_words: Region,
    greeting: Greeting,
    joined: (Sender<Joined>, Receiver<Joined>),
    /// Nodes that rang while they were arriving, once for each time.
    early: Vec<u32>,
    wake: Arc<EventFd>,
}

impl Port {
    /// Listens at `address`. `greeting` lacks what only the port knows.
    pub(crate) fn open(
        device: &Device,
        address: &str,
        bar0: &Emulated,
        greeting: Greeting,
        crowd: &Crowd,
        wake: Arc<EventFd>,
    ) -> Result<Port, PortError> {
        let listener = connect::listen(address)?;
        let rights = Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let lease_words = bar0.register_part(device, LEASE_PAGE.start as u64, LEASE_PAGE.len(), rights)?;
        let bar0 = bar0.register_part(device, 0, BAR0_BYTES, Access::REMOTE_READ)?;
        let waiter = Waiter::new(device, WaitOptions { spin: Duration::ZERO, ..WaitOptions::default() })?;
        let doorbells = waiter.completion_queue(DOORBELL_DEPTH * MAX_NODES)?;
        let sent = CompletionQueue::new(device, MESSAGE_DEPTH * MAX_NODES)?;
        // The crowd polls its own handle of the same queue.
        crowd.set_sent(sent.clone());
        Ok(Port {
            device: device.clone(),
            listener,
            waiter,
            doorbells,
            sent,
            bar0,
            lease_words,
            greeting,
            joined: channel(),
            early: Vec::new(),
            wake,
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Waits for a doorbell, a node, or `deadline`. Returns the immediate data that came.
    pub(crate) fn wait(&mut self, crowd: &Arc<Crowd>, deadline: Deadline) -> Result<Vec<u32>, PortError> {
        let mut streams: Vec<(u32, Arc<TcpStream>)> = Vec::new();
        crowd.each(|node, link| streams.push((node, link.stream.clone())));
        let mut others = vec![WaitFd::readable(&self.listener), WaitFd::readable(&*self.wake)];
        others.extend(streams.iter().map(|(_, stream)| WaitFd::readable(&**stream)));
        let mut rung = Vec::new();
        let mut gone = Vec::new();
        let (doorbells, early) = (&self.doorbells, &mut self.early);
        self.waiter.wait(&[doorbells], &mut others, deadline, || {
            let mut buffer = [Completion::EMPTY; 16];
            let completions = doorbells.poll(&mut buffer).map_err(poll_failed)?;
            for completion in completions {
                let node = completion.wr_id().0 as u32;
                if !completion.is_success() {
                    gone.push(node);
                    continue;
                }
                rung.extend(completion.imm());
                if crowd.is_arriving(node) {
                    early.push(node);
                    continue;
                }
                let again = crowd.with(node, |link| link.pair.post_recv(&[], completion.wr_id()));
                if !matches!(again, Some(Ok(()))) {
                    gone.push(node);
                }
            }
            Ok::<_, PortError>(!completions.is_empty())
        })?;
        let ready: Vec<bool> = others.iter().map(WaitFd::is_ready).collect();
        drop(others);
        self.wake.clear();
        gone.extend(streams.iter().zip(&ready[2..]).filter(|(_, ready)| **ready).map(|((node, _), _)| *node));
        for node in gone {
            crowd.leave(node);
        }
        if ready[0] {
            self.welcome(crowd);
        }
        while let Ok((node, link)) = self.joined.1.try_recv() {
            // What it rang before it was known has used up receives.
            self.early.retain(|rang| *rang != node || link.pair.post_recv(&[], WrId(node.into())).is_err());
            crowd.join(node, link);
        }
        self.early.retain(|node| crowd.is_arriving(*node));
        Ok(rung)
    }

    /// Connects a node, on a thread of its own: what a stranger does must not hold the card.
    fn welcome(&self, crowd: &Arc<Crowd>) {
        let Ok((stream, _)) = self.listener.accept(Deadline::after(Duration::ZERO)) else { return };
        if crowd.len() >= MAX_NODES as usize {
            return;
        }
        let node = crowd.number();
        let Some(prepared) = self.prepare(node) else { return crowd.give_up(node) };
        let greeting = Greeting {
            node,
            bar0_addr: self.bar0.remote().addr,
            bar0_key: self.bar0.rkey().get(),
            lease_key: self.lease_words.rkey().get(),
            ..self.greeting
        };
        let (joined, wake, all) = (self.joined.0.clone(), self.wake.clone(), crowd.clone());
        let spawned = std::thread::Builder::new().name(format!("node {node}")).spawn(move || {
            match meet(prepared, stream.try_clone().ok(), &greeting) {
                Some(pair) => {
                    let _ = joined.send((node, Link::new(pair, stream)));
                }
                None => all.give_up(node),
            }
            wake.signal();
        });
        if spawned.is_err() {
            crowd.give_up(node);
        }
    }

    fn prepare(&self, node: u32) -> Option<PreparedQueuePair> {
        let prepared = PreparedQueuePair::new(&self.device, &self.sent, &self.doorbells, &options()).ok()?;
        for _ in 0..DOORBELL_DEPTH {
            prepared.post_recv(&[], WrId(node.into())).ok()?;
        }
        Some(prepared)
    }
}

fn meet(prepared: PreparedQueuePair, stream: Option<TcpStream>, greeting: &Greeting) -> Option<QueuePair> {
    let connected = prepared.connect(&mut stream?, &greeting.to_bytes(), Deadline::after(HANDSHAKE)).ok()?;
    Visit::from_extra(&connected.private_data)?;
    Some(connected.pair)
}

fn poll_failed(error: millstream_rdma::queue::PollError) -> PortError {
    PortError::Wait(WaitError { what: "take doorbells from the completion queue", cause: error.cause })
}
