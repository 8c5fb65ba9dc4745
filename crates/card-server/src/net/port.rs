//! The listening port of a card: connects queue pairs of clients and receives doorbells as immediate data.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use millstream_card_abi::hello::{ClientHello, ServerHello};
use millstream_card_abi::registers::{BAR0_BYTES, LEASE_PAGE};
use millstream_rdma::connect::{self, ConnectErrorKind, Listener};
use millstream_rdma::wait::{CompletionWaiter, WaitFd, WaitOptions};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, RcOptions, Region,
    VerbsError, WrId,
};
use millstream_shm::{EventFd, socket};
use millstream_tls::Security;

use crate::backing::EmulatedMemory;
use crate::net::clients::{ClientLink, ClientRegistry, MAX_CLIENTS, MAX_CONNECTING, MESSAGE_DEPTH};

/// Most doorbells with immediate data in flight from one client.
const DOORBELL_DEPTH: u32 = 64;

/// Most queue pairs of clients at once.
const MAX_QUEUE_PAIRS: u32 = (MAX_CLIENTS + MAX_CONNECTING) as u32;

/// Time for a connected client to send its hello.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Options of the queue pairs to clients. The memory regions restrict what a client can access.
fn options() -> RcOptions {
    RcOptions {
        send_depth: MESSAGE_DEPTH,
        recv_depth: DOORBELL_DEPTH,
        access: Access::REMOTE | Access::REMOTE_ATOMIC,
        ..RcOptions::default()
    }
}

type Connected = (u32, ClientLink);

/// The listening port of a card.
pub(crate) struct NetworkPort {
    pub(crate) device: Device,
    security: Security,
    listener: Listener,
    waiter: CompletionWaiter,
    doorbells: CompletionQueue,
    send_queue: CompletionQueue,
    bar0: Region,
    lease_words: Region,
    hello: ServerHello,
    connected: (Sender<Connected>, Receiver<Connected>),
    /// Clients that rang a doorbell while they were connecting, once per doorbell.
    early: Vec<u32>,
    wake: Arc<EventFd>,
}

impl NetworkPort {
    /// Listens at `address`. The port completes `hello` with addresses and keys.
    pub(crate) fn open(
        device: &Device,
        (address, security): (&str, &Security),
        bar0: &EmulatedMemory,
        hello: ServerHello,
        clients: &ClientRegistry,
        wake: Arc<EventFd>,
    ) -> Result<NetworkPort, VerbsError> {
        let listener = connect::listen(address)?;
        let rights = Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let lease_words = bar0.register_part(device, LEASE_PAGE.start as u64, LEASE_PAGE.len(), rights)?;
        let bar0 = bar0.register_part(device, 0, BAR0_BYTES, Access::REMOTE_READ)?;
        let waiter =
            CompletionWaiter::new(device, WaitOptions { spin: Duration::ZERO, ..WaitOptions::default() })?;
        // An adapter may have shallower queues (rxe: 32,767). They suffice unless all clients use their whole depth at a time.
        let depth = |each: u32| (each * MAX_QUEUE_PAIRS).min(device.limits().completions);
        let doorbells = waiter.completion_queue(depth(DOORBELL_DEPTH))?;
        let send_queue = CompletionQueue::new(device, depth(MESSAGE_DEPTH))?;
        // The registry polls its own handle of the same queue.
        clients.set_send_queue(send_queue.clone());
        Ok(NetworkPort {
            device: device.clone(),
            security: security.clone(),
            listener,
            waiter,
            doorbells,
            send_queue,
            bar0,
            lease_words,
            hello,
            connected: channel(),
            early: Vec::new(),
            wake,
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Waits for a doorbell, a client, or `deadline`. Returns the immediate data received.
    pub(crate) fn wait(
        &mut self,
        clients: &Arc<ClientRegistry>,
        deadline: Deadline,
    ) -> Result<Vec<u32>, VerbsError> {
        let mut streams: Vec<(u32, Arc<TcpStream>)> = Vec::new();
        clients.for_each(|client, link| streams.push((client, link.stream.clone())));
        let mut others = vec![WaitFd::readable(&self.listener), WaitFd::readable(&*self.wake)];
        others.extend(streams.iter().map(|(_, stream)| WaitFd::readable(&**stream)));
        let mut immediates = Vec::new();
        let mut gone = Vec::new();
        let (doorbells, early) = (&self.doorbells, &mut self.early);
        self.waiter.wait(&[doorbells], &mut others, deadline, || {
            let mut buffer = [Completion::EMPTY; 16];
            let completions = doorbells.poll(&mut buffer)?;
            for completion in completions {
                let client = completion.wr_id().0 as u32;
                if !completion.is_success() {
                    gone.push(client);
                    continue;
                }
                immediates.extend(completion.imm());
                if clients.is_connecting(client) {
                    early.push(client);
                    continue;
                }
                let again = clients.with(client, |link| link.queue_pair.post_recv(&[], completion.wr_id()));
                if !matches!(again, Some(Ok(()))) {
                    gone.push(client);
                }
            }
            Ok::<_, VerbsError>(!completions.is_empty())
        })?;
        let ready: Vec<bool> = others.iter().map(WaitFd::is_ready).collect();
        drop(others);
        self.wake.clear();
        let closed = streams.iter().zip(&ready[2..]).filter(|(_, ready)| **ready);
        gone.extend(closed.map(|((client, _), _)| *client));
        for client in gone {
            clients.remove(client);
        }
        if ready[0] {
            self.accept(clients);
        }
        while let Ok((client, link)) = self.connected.1.try_recv() {
            // Its early doorbells have consumed receives.
            self.early.retain(|rang| {
                *rang != client || link.queue_pair.post_recv(&[], WrId(client.into())).is_err()
            });
            clients.add(client, link);
        }
        self.early.retain(|client| clients.is_connecting(*client));
        Ok(immediates)
    }

    /// Connects a client on a separate thread, so that a slow client does not block the card. A client that exceeds the
    /// limits is disconnected.
    fn accept(&self, clients: &Arc<ClientRegistry>) {
        let (stream, _) = match self.listener.accept(Deadline::after(Duration::ZERO)) {
            Ok(accepted) => accepted,
            Err(error) => {
                // Without a free descriptor the connection stays pending.
                if let ConnectErrorKind::Stream { cause, .. } = &error.kind
                    && let Some(pause) = socket::Listener::pause(cause)
                {
                    std::thread::sleep(pause);
                }
                return;
            }
        };
        let stream = Arc::new(stream);
        let Some(client) = clients.reserve_id(stream.clone()) else { return };
        let Some(prepared) = self.prepare(client) else { return clients.abandon(client) };
        let hello = ServerHello {
            client,
            bar0_addr: self.bar0.remote().addr,
            bar0_key: self.bar0.rkey().get(),
            lease_key: self.lease_words.rkey().get(),
            ..self.hello
        };
        let (connected, wake, registry) = (self.connected.0.clone(), self.wake.clone(), clients.clone());
        let security = self.security.clone();
        let spawned = std::thread::Builder::new().name(format!("client {client}")).spawn(move || {
            match shake_hands(prepared, stream.try_clone().ok(), &security, &hello) {
                Some(queue_pair) => {
                    let _ = connected.send((client, ClientLink::new(queue_pair, stream)));
                }
                None => registry.abandon(client),
            }
            wake.signal();
        });
        if spawned.is_err() {
            clients.abandon(client);
        }
    }

    fn prepare(&self, client: u32) -> Option<PreparedQueuePair> {
        let prepared =
            PreparedQueuePair::new(&self.device, &self.send_queue, &self.doorbells, &options()).ok()?;
        for _ in 0..DOORBELL_DEPTH {
            prepared.post_recv(&[], WrId(client.into())).ok()?;
        }
        Some(prepared)
    }
}

fn shake_hands(
    prepared: PreparedQueuePair,
    stream: Option<TcpStream>,
    security: &Security,
    hello: &ServerHello,
) -> Option<QueuePair> {
    let deadline = Deadline::after(HANDSHAKE_TIMEOUT);
    let stream = security.accept(stream?, deadline);
    let mut stream = stream.inspect_err(|error| tracing::warn!(%error, "a client was refused")).ok()?;
    let connected = prepared.connect(&mut stream, &hello.to_bytes(), deadline).ok()?;
    ClientHello::parse(&connected.private_data)?;
    Some(connected.pair)
}
