//! Connections of the DMA engine to peer cards.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use millstream_card_abi::codes::{MessageKind, PeerState};
use millstream_card_abi::command::Cause;
use millstream_card_abi::hello::{ClientHello, ServerHello};
use millstream_card_abi::registers::{MAX_PEERS, PEER_BYTES, PEER_TABLE};
use millstream_rdma::queue::SendList;
use millstream_rdma::{CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, RcOptions, Region};
use millstream_tls::{Security, Stream};

use super::{DEPTH, DmaEngine};
use crate::notification::Notification;

/// Time to connect a peer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connected peer card.
pub(super) struct Peer {
    pub(super) queue_pair: QueuePair,
    /// Keeps the connection alive for the peer.
    _stream: Stream,
}

/// An attempt to connect a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectAttempt {
    /// Counts attempts over all leases: a later one for the same peer, or the end of the lease, replaces this one.
    number: u64,
    peer: usize,
    /// The command that began it.
    command: u64,
}

pub(super) type ConnectOutcome = (ConnectAttempt, Result<Peer, Cause>);

/// The network state of the engine.
pub(super) struct Network {
    pub(super) device: Device,
    pub(super) security: Security,
    pub(super) queue: CompletionQueue,
    pub(super) list: SendList,
    /// Card memory, registered without remote access.
    pub(super) memory: Region,
    /// Generation of that card memory.
    pub(super) memory_generation: u32,
    pub(super) peers: [Option<Peer>; MAX_PEERS],
    /// The attempts whose outcome is awaited, by peer.
    pub(super) attempts: [Option<ConnectAttempt>; MAX_PEERS],
    /// Whether a thread connects the peer, also for an abandoned attempt. There is at most one for each.
    pub(super) connecting: [bool; MAX_PEERS],
    /// The command for which the next attempt begins when that thread has ended, by peer.
    pub(super) waiting: [Option<u64>; MAX_PEERS],
    /// Number of attempts.
    pub(super) attempted: u64,
    pub(super) connect_outcomes: (Sender<ConnectOutcome>, Receiver<ConnectOutcome>),
}

impl Network {
    /// Disconnects all peers, and abandons attempts.
    pub(super) fn reset(&mut self) {
        (self.peers, self.attempts, self.waiting) = Default::default();
    }

    /// Disconnects a peer, and abandons the attempt to connect it.
    fn disconnect(&mut self, peer: usize) {
        (self.peers[peer], self.attempts[peer], self.waiting[peer]) = (None, None, None);
    }

    fn begin_attempt(&mut self, peer: usize, command: u64) -> ConnectAttempt {
        self.attempted += 1;
        let attempt = ConnectAttempt { number: self.attempted, peer, command };
        self.attempts[peer] = Some(attempt);
        self.connecting[peer] = true;
        attempt
    }

    /// Whether the peer still waits for this attempt, which has ended.
    fn end_attempt(&mut self, attempt: ConnectAttempt) -> bool {
        self.connecting[attempt.peer] = false;
        self.attempts[attempt.peer].take_if(|current| *current == attempt).is_some()
    }
}

impl DmaEngine {
    /// Connects the peer of a command, on a separate thread. While an earlier attempt for this peer runs, the latest command
    /// waits for its end.
    pub(super) fn connect_peer(&mut self, command: u64) {
        let index = (command & 0xff) as usize;
        let registers = self.hardware.registers.clone();
        let failed = |cause: Cause| Notification {
            kind: MessageKind::PeerFault,
            region: index as u32,
            cause: Some(cause),
            sequence: command,
            values: [index as u64, 0, 0, 0],
        };
        if index >= MAX_PEERS {
            return self.notifications.notify(failed(Cause::DmaPeerNotConnected));
        }
        if let Some(network) = &mut self.network {
            network.disconnect(index);
        }
        let mut text = [0; PEER_BYTES];
        registers.read_bytes(PEER_TABLE + index * PEER_BYTES, &mut text);
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(PEER_BYTES);
        let address = std::str::from_utf8(&text[..end]).ok().filter(|text| text.contains(':'));
        let (Some(address), Some(network)) = (address, &mut self.network) else {
            registers.peer_cause(index).store(Cause::PeerAddress.code(), Ordering::Relaxed);
            registers.peer_state(index).store(PeerState::Failed as u32, Ordering::Release);
            return self.notifications.notify(failed(Cause::PeerAddress));
        };
        registers.peer_state(index).store(PeerState::Connecting as u32, Ordering::Release);
        if network.connecting[index] {
            network.waiting[index] = Some(command);
            return;
        }
        let attempt = network.begin_attempt(index, command);
        let (address, device, queue) = (address.to_owned(), network.device.clone(), network.queue.clone());
        let security = network.security.clone();
        let (reached, control) = (network.connect_outcomes.0.clone(), self.control.clone());
        let spawned = std::thread::Builder::new().name(format!("peer {index}")).spawn(move || {
            let peer = connect_to(&device, &queue, &address, &security);
            let _ = reached.send((attempt, peer.ok_or(Cause::PeerUnreachable)));
            control.connect_ended.store(true, Ordering::Release);
            control.notify();
        });
        if spawned.is_err() {
            network.end_attempt(attempt);
            registers.peer_state(index).store(PeerState::Failed as u32, Ordering::Release);
            self.notifications.notify(failed(Cause::PeerUnreachable));
        }
    }

    /// Publishes the outcome of attempts to connect a peer, and begins those that waited for their end.
    pub(super) fn handle_connect_outcomes(&mut self) {
        // A load first: a swap waits for all earlier stores.
        if !self.control.connect_ended.load(Ordering::Relaxed)
            || !self.control.connect_ended.swap(false, Ordering::Acquire)
        {
            return;
        }
        while let Some(network) = &mut self.network
            && let Ok((attempt, outcome)) = network.connect_outcomes.1.try_recv()
        {
            let is_awaited = network.end_attempt(attempt);
            if let Some(command) = network.waiting[attempt.peer].take() {
                self.connect_peer(command);
                continue;
            }
            if !is_awaited {
                continue;
            }
            let ConnectAttempt { peer: index, command, .. } = attempt;
            let registers = &self.hardware.registers;
            let (kind, state, cause) = match &outcome {
                Ok(_) => (MessageKind::PeerConnected, PeerState::Connected, None),
                Err(cause) => (MessageKind::PeerFault, PeerState::Failed, Some(*cause)),
            };
            network.peers[index] = outcome.ok();
            registers.peer_cause(index).store(cause.map_or(0, Cause::code), Ordering::Relaxed);
            registers.peer_state(index).store(state as u32, Ordering::Release);
            let notification = Notification::of_card(kind, command, [index as u64, 0, 0, 0]);
            self.notifications.notify(Notification { region: index as u32, cause, ..notification });
        }
    }
}

fn connect_to(device: &Device, queue: &CompletionQueue, address: &str, security: &Security) -> Option<Peer> {
    let deadline = Deadline::after(CONNECT_TIMEOUT);
    let options = RcOptions { send_depth: DEPTH, recv_depth: 1, ..RcOptions::default() };
    let stream = security.dial(address, deadline);
    let mut stream =
        stream.inspect_err(|error| tracing::warn!(%error, "no connection to a peer card")).ok()?;
    let prepared = PreparedQueuePair::new(device, queue, queue, &options).ok()?;
    let connected = prepared.connect(&mut stream, &ClientHello::new(true).to_bytes(), deadline).ok()?;
    ServerHello::parse(&connected.private_data)?;
    Some(Peer { queue_pair: connected.pair, _stream: stream })
}
