//! The clients of a card, and the messages to them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millstream_card_abi::message::Message;
use millstream_card_abi::registers::{DMA_RING_SLOTS, Registers};
use millstream_rdma::queue::Signal;
use millstream_rdma::{Completion, CompletionQueue, QueuePair, WrId};

use crate::notification::{Notification, NotificationSink};

/// Most messages outstanding to one client; further ones are dropped. Each transfer of a full DMA ring may fail
/// while regions send messages.
pub(crate) const MESSAGE_DEPTH: u32 = 2 * DMA_RING_SLOTS as u32;

/// Most clients on the network whose connection is complete.
pub(crate) const MAX_CLIENTS: usize = 64;

/// Most clients on the network whose connection is being established. A further one replaces the oldest, so that
/// silent clients do not keep others out.
pub(crate) const MAX_CONNECTING: usize = 16;

/// First id of local clients. Clients on the network have lower ids.
pub(crate) const FIRST_LOCAL_ID: u32 = 1 << 31;

/// The connection of a client on the network.
#[derive(Debug)]
pub(crate) struct ClientLink {
    pub(crate) queue_pair: QueuePair,
    /// Closes when the client exits.
    pub(crate) stream: Arc<TcpStream>,
    outstanding: u32,
}

impl ClientLink {
    pub(crate) fn new(queue_pair: QueuePair, stream: Arc<TcpStream>) -> ClientLink {
        ClientLink { queue_pair, stream, outstanding: 0 }
    }
}

#[derive(Debug, Default)]
struct State {
    links: HashMap<u32, ClientLink>,
    local: HashSet<u32>,
    /// Clients whose connection is being established, oldest first, with their streams. They may act before the card
    /// knows that the connection is complete.
    connecting: VecDeque<(u32, Arc<TcpStream>)>,
    /// Connections that ended before the client was added.
    refused: u64,
    latest_id: u32,
    /// Client and epoch.
    holder: Option<(u32, u32)>,
    send_queue: Option<CompletionQueue>,
}

impl State {
    /// Removes a client whose connection is being established. False if it is not there.
    fn take_connecting(&mut self, client: u32) -> bool {
        let position = self.connecting.iter().position(|(id, _)| *id == client);
        position.is_some_and(|position| self.connecting.remove(position).is_some())
    }
}

/// All clients of a card.
#[derive(Debug)]
pub(crate) struct ClientRegistry {
    card: u64,
    registers: Arc<Registers>,
    state: Mutex<State>,
}

impl ClientRegistry {
    pub(crate) fn new(card: u64, registers: Arc<Registers>) -> ClientRegistry {
        ClientRegistry { card, registers, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held, and the state is consistent after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the completion queue of sent messages.
    pub(crate) fn set_send_queue(&self, queue: CompletionQueue) {
        self.state().send_queue = Some(queue);
    }

    /// Adds a local client and returns its id.
    pub(crate) fn add_local(&self) -> u32 {
        let mut state = self.state();
        let id = FIRST_LOCAL_ID + next_id(&mut state.latest_id);
        state.local.insert(id);
        self.publish(&state);
        id
    }

    pub(crate) fn remove_local(&self, client: u32) {
        let mut state = self.state();
        state.local.remove(&client);
        self.publish(&state);
    }

    /// Reserves an id for a client whose connection is being established. None if there are too many clients.
    pub(crate) fn reserve_id(&self, stream: Arc<TcpStream>) -> Option<u32> {
        let mut state = self.state();
        if state.links.len() >= MAX_CLIENTS {
            self.count_refused(&mut state);
            return None;
        }
        if state.connecting.len() >= MAX_CONNECTING
            && let Some((_, oldest)) = state.connecting.pop_front()
        {
            // Ends its handshake. The stream may be closed already.
            let _ = oldest.shutdown(Shutdown::Both);
            self.count_refused(&mut state);
        }
        let id = next_id(&mut state.latest_id);
        state.connecting.push_back((id, stream));
        Some(id)
    }

    /// Releases the id of a client whose connection was not established.
    pub(crate) fn abandon(&self, client: u32) {
        let mut state = self.state();
        if state.take_connecting(client) {
            self.count_refused(&mut state);
        }
    }

    pub(crate) fn is_connecting(&self, client: u32) -> bool {
        self.state().connecting.iter().any(|(id, _)| *id == client)
    }

    /// Adds a client whose connection is complete, unless it was replaced or there are too many.
    pub(crate) fn add(&self, client: u32, link: ClientLink) {
        let mut state = self.state();
        if !state.take_connecting(client) {
            return;
        }
        if state.links.len() >= MAX_CLIENTS {
            return self.count_refused(&mut state);
        }
        state.links.insert(client, link);
        self.publish(&state);
    }

    fn count_refused(&self, state: &mut State) {
        state.refused += 1;
        self.registers.clients_refused().store(state.refused, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, client: u32) -> Option<ClientLink> {
        let mut state = self.state();
        let link = state.links.remove(&client);
        self.publish(&state);
        link
    }

    fn publish(&self, state: &State) {
        let clients = state.links.len() + state.local.len();
        self.registers.client_count().store(clients as u32, Ordering::Relaxed);
    }

    pub(crate) fn contains(&self, client: u32) -> bool {
        let state = self.state();
        state.links.contains_key(&client) || state.local.contains(&client)
    }

    /// Calls `visit` for every client on the network.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(u32, &ClientLink)) {
        self.state().links.iter().for_each(|(client, link)| visit(*client, link));
    }

    /// Calls `act` with the link of a client, if it is connected.
    pub(crate) fn with<T>(&self, client: u32, act: impl FnOnce(&ClientLink) -> T) -> Option<T> {
        self.state().links.get(&client).map(act)
    }

    pub(crate) fn set_holder(&self, holder: Option<(u32, u32)>) {
        self.state().holder = holder;
    }

    /// Sends a message to a client, unless too many are outstanding.
    pub(crate) fn send(&self, client: u32, epoch: u32, notification: Notification) {
        let mut state = self.state();
        self.post(&mut state, client, epoch, notification);
    }

    fn post(&self, state: &mut State, client: u32, epoch: u32, notification: Notification) {
        let message = Message {
            card: self.card,
            epoch,
            kind: notification.kind,
            region: notification.region,
            cause: notification.cause,
            sequence: notification.sequence,
            values: notification.values,
        };
        let State { links, send_queue, .. } = state;
        let Some(link) = links.get_mut(&client) else { return };
        if link.outstanding >= MESSAGE_DEPTH / 2 {
            reap(links, send_queue.as_ref());
        }
        let Some(link) = links.get_mut(&client) else { return };
        let room = link.outstanding < MESSAGE_DEPTH;
        let bytes = message.to_bytes();
        let posted =
            room && link.queue_pair.post_send_inline(&bytes, Signal::Yes, WrId(client.into())).is_ok();
        let counter = if posted { self.registers.messages_sent() } else { self.registers.messages_dropped() };
        counter.fetch_add(1, Ordering::Relaxed);
        link.outstanding += u32::from(posted);
    }
}

/// Polls the completions of messages. A failed one also ends the connection of its client.
fn reap(links: &mut HashMap<u32, ClientLink>, send_queue: Option<&CompletionQueue>) {
    let Some(queue) = send_queue else { return };
    let mut buffer = [Completion::EMPTY; 32];
    while let Ok(completions) = queue.poll(&mut buffer)
        && !completions.is_empty()
    {
        for completion in completions {
            if let Some(link) = links.get_mut(&(completion.wr_id().0 as u32)) {
                link.outstanding = link.outstanding.saturating_sub(1);
            }
        }
    }
}

fn next_id(latest: &mut u32) -> u32 {
    *latest = latest.wrapping_add(1) % FIRST_LOCAL_ID;
    *latest = (*latest).max(1);
    *latest
}

impl NotificationSink for ClientRegistry {
    fn notify(&self, notification: Notification) {
        let mut state = self.state();
        if let Some((client, epoch)) = state.holder {
            self.post(&mut state, client, epoch, notification);
        }
    }
}
