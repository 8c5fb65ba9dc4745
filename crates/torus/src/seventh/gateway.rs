//! The node's side of the seventh port: outside hosts, their commands, and what becomes of these.
//!
//! Everything that a host sends is input. A host that breaks a rule is disconnected; its commands end unseen and release
//! its memory. At any instant: commands = completed + cancelled + under way.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use millstream_fabric::{FIRST_COLLECTIVE_COUNTER, Notification, RegionId};
use millstream_rdma::connect::Listener;
use millstream_rdma::queue::PollError;
use millstream_rdma::{Completion as WorkCompletion, CompletionQueue, Deadline, Device};
use millstream_shm::EventFd;
use millstream_torus_core::{Dimensions, NodeNumber, Port};
use serde::{Deserialize, Serialize};

use super::channel::{COMPLETIONS, Channel, WorkId};
use super::handshake::{self, Status};
use super::message::{FromGateway, MAX_COMMANDS, decode_command};
use crate::control::{Command, CommandKind, Completion, STAGING};
use crate::engine::{Engine, Event, Failure, Operation, Span};
use crate::proof::{Acceptor, Purpose, Strangers};

/// Hosts at one gateway.
const MAX_HOSTS: usize = 16;
/// Completions that one look takes.
const BATCH: usize = 64;

/// Counters of a seventh port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutsideCounters {
    /// Hosts that were admitted.
    pub hosts: u64,
    /// Hosts that were refused or broke a rule.
    pub refused_hosts: u64,
    /// Commands of hosts.
    pub commands: u64,
    /// Commands whose result went to the host; failures are results.
    pub completed: u64,
    /// Commands of hosts that were gone before the end.
    pub cancelled: u64,
    /// Commands without a result so far.
    pub under_way: u64,
}

impl std::fmt::Display for OutsideCounters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} commands of outside hosts = {} completed + {} cancelled + {} under way",
            self.commands, self.completed, self.cancelled, self.under_way
        )
    }
}

impl OutsideCounters {
    pub(crate) fn add(&mut self, other: &OutsideCounters) {
        self.hosts += other.hosts;
        self.refused_hosts += other.refused_hosts;
        self.commands += other.commands;
        self.completed += other.completed;
        self.cancelled += other.cancelled;
        self.under_way += other.under_way;
    }

    /// Whether every command is accounted for.
    #[must_use]
    pub fn is_balanced(&self) -> bool {
        self.commands == self.completed + self.cancelled + self.under_way
    }
}

/// A command under way.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    host: u32,
    cookie: u32,
    /// Where the data of a get lie.
    fetched: Option<(u64, u32)>,
}

/// One of the places for hosts, until it is dropped.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(taken: &Arc<AtomicUsize>) -> Option<Place> {
        let next = |count| (count < MAX_HOSTS).then_some(count + 1);
        let taken_one = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok();
        taken_one.then(|| Place(Arc::clone(taken)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Host {
    _place: Place,
    channel: Channel,
    /// Commands given to the engine.
    under_way: usize,
    /// Results that wait for a place.
    results: VecDeque<(FromGateway, Option<(u64, u32)>)>,
}

/// Completions of connections of a gateway.
pub(crate) fn completions() -> u32 {
    // Those of hosts that are gone are flushed before others take their places.
    2 * MAX_HOSTS as u32 * COMPLETIONS
}

/// A host that is admitted, or why it is not; `None` for a stranger, of which [`Strangers`] tells.
type Admission = Result<(Channel, Place), Option<String>>;

/// A node's seventh port.
#[derive(Debug)]
pub(crate) struct Gateway {
    key: u64,
    torus: Dimensions,
    here: NodeNumber,
    device: Device,
    queue: CompletionQueue,
    listener: Arc<Listener>,
    hosts: BTreeMap<u32, Host>,
    next_host: u32,
    places: Arc<AtomicUsize>,
    strangers: Strangers,
    sender: Sender<Admission>,
    connected: Receiver<Admission>,
    wake: Arc<EventFd>,
    operations: BTreeMap<u32, UnderWay>,
    next_operation: u32,
    counters: OutsideCounters,
}

impl Gateway {
    pub(crate) fn new(
        device: &Device,
        queue: CompletionQueue,
        listener: Listener,
        key: u64,
        (torus, here): (Dimensions, NodeNumber),
    ) -> io::Result<Gateway> {
        let (sender, connected) = mpsc::channel();
        Ok(Gateway {
            key,
            torus,
            here,
            device: device.clone(),
            queue,
            listener: Arc::new(listener),
            hosts: BTreeMap::new(),
            next_host: 0,
            places: Arc::default(),
            strangers: Strangers::default(),
            sender,
            connected,
            wake: Arc::new(EventFd::latch()?),
            operations: BTreeMap::new(),
            next_operation: 0,
            counters: OutsideCounters::default(),
        })
    }

    pub(crate) fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    pub(crate) fn listener(&self) -> &Arc<Listener> {
        &self.listener
    }

    /// Readable when a host has connected.
    pub(crate) fn wake(&self) -> &Arc<EventFd> {
        &self.wake
    }

    /// Hosts, with the streams that end when they do.
    pub(crate) fn streams(&self) -> Vec<(u32, Arc<TcpStream>)> {
        self.hosts.iter().map(|(&number, host)| (number, Arc::clone(host.channel.stream()))).collect()
    }

    pub(crate) fn counters(&self) -> OutsideCounters {
        OutsideCounters { under_way: self.operations.len() as u64, ..self.counters }
    }

    /// Accepts a host, without waiting for it here.
    pub(crate) fn accept(&mut self) {
        let Ok((stream, address)) = self.listener.accept(Deadline::after(Duration::ZERO)) else { return };
        let connection = self.next_host;
        self.next_host = self.next_host.wrapping_add(1);
        let places = Arc::clone(&self.places);
        let (sender, wake) = (self.sender.clone(), Arc::clone(&self.wake));
        let (device, queue) = (self.device.clone(), self.queue.clone());
        let identity = (self.torus, self.here);
        let acceptor = Acceptor { key: self.key, number: self.here.0 };
        self.strangers.check(stream, acceptor, Purpose::SeventhPort.only(), move |proved| {
            let connected = proved.ok_or(None).and_then(|((), mut stream)| {
                let told = |reason: String| Some(format!("{address}: {reason}"));
                let place = admit(&mut stream, &places).map_err(told)?;
                let channel = handshake::finish(&device, &queue, connection, identity, stream);
                Ok((channel.map_err(|error| told(error.to_string()))?, place))
            });
            let _ = sender.send(connected);
            wake.signal();
        });
    }

    /// Takes hosts that have connected.
    pub(crate) fn take_connected(&mut self) {
        while let Ok(outcome) = self.connected.try_recv() {
            match outcome {
                Ok((channel, place)) => {
                    let number = channel.connection();
                    let ready = VecDeque::from([(FromGateway::Ready, None)]);
                    self.hosts.insert(number, Host { _place: place, channel, under_way: 0, results: ready });
                    self.counters.hosts += 1;
                    self.send_results(number);
                }
                Err(reason) => {
                    self.counters.refused_hosts += 1;
                    if let Some(reason) = reason {
                        tracing::warn!("{}: a host was not admitted: {reason}", self.here);
                    }
                }
            }
        }
    }

    /// A host has gone: its commands end unseen.
    pub(crate) fn remove(&mut self, number: u32, engine: &mut Engine) {
        if self.hosts.remove(&number).is_none() {
            return;
        }
        let operations = &self.operations;
        engine.cancel(Port::Seventh, |id| operations.get(&id).is_some_and(|under| under.host == number));
        let before = self.operations.len();
        self.operations.retain(|_, under| under.host != number);
        self.counters.cancelled += (before - self.operations.len()) as u64;
    }

    fn expel(&mut self, number: u32, reason: &str, engine: &mut Engine) {
        tracing::warn!("{}: host {number} of the seventh port is disconnected: {reason}", self.here);
        self.counters.refused_hosts += 1;
        self.remove(number, engine);
    }

    /// Takes messages of hosts. Returns whether there were any.
    pub(crate) fn poll(&mut self, engine: &mut Engine) -> Result<bool, PollError> {
        let mut buffer = [WorkCompletion::EMPTY; BATCH];
        let taken = self.queue.poll(&mut buffer)?.len();
        for completion in &buffer[..taken] {
            let id = WorkId::decode(completion.wr_id());
            // Of a host that is gone.
            let Some(host) = self.hosts.get_mut(&id.connection) else { continue };
            if !completion.is_success() {
                tracing::debug!("{}: {:?}", self.here, completion.status());
                self.remove(id.connection, engine);
            } else if !id.receive {
                host.channel.sent(id);
                self.send_results(id.connection);
            } else if let Err(reason) = self.take(id, completion.len(), engine) {
                self.expel(id.connection, &reason, engine);
            }
        }
        Ok(taken > 0)
    }

    /// Takes one message of a host.
    fn take(&mut self, id: WorkId, length: u32, engine: &mut Engine) -> Result<(), String> {
        let number = self.free_number();
        let Some(host) = self.hosts.get_mut(&id.connection) else { return Ok(()) };
        let bytes = host.channel.received(id, length).map_err(|error| error.to_string())?;
        if host.under_way + host.results.len() >= MAX_COMMANDS {
            return Err(format!("it has more than {MAX_COMMANDS} commands under way"));
        }
        let command = decode_command(&bytes).map_err(|error| error.to_string())?;
        self.counters.commands += 1;
        match operation(host, &command, engine) {
            Ok(operation) => {
                host.under_way += 1;
                let fetched = match command.kind {
                    CommandKind::Get { at, length, .. } => Some((at, length)),
                    _ => None,
                };
                let under = UnderWay { host: id.connection, cookie: command.cookie, fetched };
                self.operations.insert(number, under);
                engine.post(Port::Seventh, Operation { cookie: number, ..operation });
            }
            Err(failure) => {
                let done = Completion { cookie: command.cookie, value: 0, failure: Some(failure) };
                host.results.push_back((FromGateway::Completed(done), None));
                self.counters.completed += 1;
                self.send_results(id.connection);
            }
        }
        Ok(())
    }

    fn free_number(&mut self) -> u32 {
        loop {
            let number = self.next_operation;
            self.next_operation = number.wrapping_add(1);
            if !self.operations.contains_key(&number) {
                return number;
            }
        }
    }

    /// Sends results to hosts. Returns whether there were any.
    pub(crate) fn report(&mut self, engine: &mut Engine) -> bool {
        let mut reported = false;
        while let Some(event) = engine.poll_event(Port::Seventh) {
            let Event::Completed { cookie, value, failure } = event else { continue };
            let Some(under) = self.operations.remove(&cookie) else { continue };
            self.counters.completed += 1;
            reported = true;
            let Some(host) = self.hosts.get_mut(&under.host) else { continue };
            host.under_way -= 1;
            let data = under.fetched.filter(|_| failure.is_none());
            let done = Completion { cookie: under.cookie, value, failure };
            host.results.push_back((FromGateway::Completed(done), data));
            self.send_results(under.host);
        }
        reported
    }

    fn send_results(&mut self, number: u32) {
        let Some(host) = self.hosts.get_mut(&number) else { return };
        while host.channel.is_ready() {
            let Some((message, data)) = host.results.pop_front() else { return };
            if let Err(error) = host.channel.send(data, &message.encode()) {
                // The stream or the queue pair shows its end.
                tracing::warn!("{}: host {number} of the seventh port: {error}", self.here);
                return;
            }
        }
    }
}

/// Gives a host that knows the key a place.
fn admit(stream: &mut TcpStream, places: &Arc<AtomicUsize>) -> Result<Place, String> {
    let place = Place::take(places);
    let status = if place.is_some() { Status::Admitted } else { Status::Full };
    handshake::answer(stream, status).map_err(|error| error.to_string())?;
    place.ok_or_else(|| "there is no place for another host".to_owned())
}

/// The operation of a host's command. All data are in the staging memory.
fn operation(host: &Host, command: &Command, engine: &mut Engine) -> Result<Operation, Failure> {
    if let CommandKind::Put { notification: Notification::Counter { index, .. }, .. } = command.kind
        && index >= FIRST_COLLECTIVE_COUNTER
    {
        // Those of collective operations belong to the nodes.
        return Err(Failure::Access);
    }
    command.operation(|local, at, length| {
        let inside = at <= STAGING && u64::from(length) <= STAGING - at;
        if local != RegionId(0) || !inside {
            return Err(Failure::Access);
        }
        engine.count_staged(length);
        Ok(Span { memory: Arc::clone(host.channel.staging()), offset: at })
    })
}
