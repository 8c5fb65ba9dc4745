//! A node process: the links, the engine and the place of an application, in one loop.

mod input;
mod message;
mod monitor;
mod options;
mod pending;
mod port;
mod reconnect;
mod registration;
mod service;

pub use message::{NodeCommand, NodeMessage};
pub use options::{NodeError, NodeOptions, SeventhOptions};

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use millstream_fabric::RegionId;
use millstream_health::ObserverClock;
use millstream_quantity::Instant;
use millstream_rdma::connect::{Listener, listen};
use millstream_rdma::wait::WaitOptions;
use millstream_rdma::{Completion, CompletionQueue, CompletionWaiter, Deadline, Device, WaitFd};
use millstream_shm::polling::Polling;
use millstream_shm::socket::{self, Connection};
use millstream_torus_core::{Direction, NodeNumber};

use crate::attach::{AttachReply, AttachRequest, send};
use crate::card::LeasedCard;
use crate::engine::Engine;
use crate::health_page::HealthPage;
use crate::key;
use crate::service::{FromSupervisor, LostNodes, ToSupervisor};
use crate::seventh::gateway::{self, Gateway};
use crate::traffic::TrafficCounters;
use crate::verbs::{Connections, LinkConnector, LinkEvent, LinkStream, VerbsLinks, connect_all};
use input::{Input, await_peers, parse};
use monitor::AdapterMonitor;
use options::context;
use pending::PendingConnections;
use port::Port;
use reconnect::{Outcome, Reconnector};
use registration::MemoryKeeper;
use service::Service;

/// How long the nodes of a torus wait for each other at the start.
const START: Duration = Duration::from_secs(60);
/// Longest sleep: timers are looked at as often.
const LONGEST_SLEEP: Duration = Duration::from_millis(200);
const COMPLETIONS_PER_POLL: usize = 64;
/// Interval of looks at other descriptors while packets come.
const DESCRIPTORS_EVERY: Duration = Duration::from_millis(10);
/// Looks between two reads of the clock while packets come, and packets that move meanwhile.
const LOOKS: u32 = 64;
const PACKETS: u64 = 64;

/// The abstract socket of a node for applications.
#[must_use]
pub fn socket_name(key: u64, node: NodeNumber) -> String {
    socket_names(key).replace("{rank}", &node.0.to_string())
}

/// The sockets of all nodes; `{rank}` stands for the node's number. Other users read the names of abstract sockets.
pub(crate) fn socket_names(key: u64) -> String {
    format!("millstream-torus-{:016x}-{{rank}}", key::derive(key, b"millstream torus: sockets"))
}

/// The region of all mailboxes. Packets, which are not protected, have it.
fn mailbox(key: u64) -> RegionId {
    RegionId(key::derive(key, b"millstream torus: mailboxes"))
}

/// Runs a node process until its standard input ends. Reports go to standard output.
///
/// # Errors
/// [`NodeError`], which is also reported.
pub fn run(options: &NodeOptions) -> Result<(), NodeError> {
    let result = Node::start(options).and_then(|node| node.map_or(Ok(()), Node::serve));
    if let Err(error) = &result {
        say(&NodeMessage::Failed { reason: error.to_string() });
    }
    result
}

/// Writes a message to the launcher; if it is gone, standard input ends, too.
fn say(message: &NodeMessage) {
    if let Ok(line) = serde_json::to_string(message) {
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

struct Node {
    options: NodeOptions,
    device: Device,
    waiter: CompletionWaiter,
    state: State,
    input: Input,
    applications: Arc<socket::Listener>,
    streams: Vec<(Direction, Arc<std::net::TcpStream>)>,
    /// While it is leased.
    card: Option<Arc<LeasedCard>>,
    service: Service,
    /// The health page for a host monitor.
    health: OwnedFd,
    /// Host monitors, which notice the end of this process by these.
    monitors: Vec<Arc<Connection>>,
    /// Clients that may become an application or a monitor.
    pending: PendingConnections,
    listener: Arc<Listener>,
    reconnector: Reconnector,
    keeper: MemoryKeeper,
    /// An application that waits for the supervisors to take this node back.
    waiting: Option<(Arc<Connection>, AttachRequest)>,
    /// An application has gone, and the supervisors do not know yet.
    departed: bool,
    lost: LostNodes,
}

/// What moves packets.
struct State {
    engine: Engine,
    links: VerbsLinks,
    queue: CompletionQueue,
    port: Port,
    gateway: Option<Gateway>,
    completions: Vec<Completion>,
    origin: std::time::Instant,
    clock: ObserverClock,
    monitor: Option<AdapterMonitor>,
    polling: Polling,
    /// Packets or commands moved since it was last cleared.
    moved: bool,
    /// The torus ends: so do the neighbours.
    finishing: bool,
    /// The application broke the rules of its control memory.
    faulty: bool,
}

impl Node {
    /// Listens, waits for the addresses of all nodes, and connects. `None` if the launcher ended before.
    fn start(options: &NodeOptions) -> Result<Option<Node>, NodeError> {
        let torus = options.dimensions;
        if !torus.contains(options.node) {
            return Err(NodeError::NoSuchNode { node: options.node.0, dimensions: torus });
        }
        let device = millstream_rdma::device::open(&options.device)?;
        let card = lease_card(options)?;
        // `State::work` polls.
        let wait = WaitOptions { spin: Duration::ZERO, descriptors_every: DESCRIPTORS_EVERY };
        let waiter = CompletionWaiter::new(&device, wait)?;
        let queue = waiter.completion_queue(VerbsLinks::completions(&options.engine))?;
        let mut links =
            VerbsLinks::new(&device, options.engine).map_err(context("memory for receive slots"))?;
        let mut engine = Engine::new(torus, options.node, options.engine);
        if options.rejoin {
            engine.rejoin();
        }
        let publish = options.publish_card;
        let keeper = MemoryKeeper::start().map_err(context("a thread that frees memory"))?;
        let port = Port::new(&device, card.clone(), publish, &mut engine, mailbox(options.key), &keeper)
            .map_err(context("memory for an application"))?;
        let socket = socket_name(options.key, options.node);
        let applications = socket::Listener::bind(&socket).map_err(context("listen for applications"))?;
        applications.set_nonblocking();
        let listener = listen(&options.listen)?;
        let mut input = Input::open().map_err(context("read standard input"))?;
        let gateway = open_gateway(options, &device, &waiter)?;
        say(&NodeMessage::Listening {
            address: listener.address().to_string(),
            socket,
            seventh: gateway.as_ref().map(|gateway| gateway.listener().address().to_string()),
        });
        let peers = match &options.peers {
            Some(peers) => Some(peers.clone()),
            None => await_peers(&mut input)?,
        };
        let Some(peers) = peers else { return Ok(None) };
        if peers.len() != torus.nodes() {
            return Err(NodeError::Peers { given: peers.len(), dimensions: torus });
        }
        let connections = Connections {
            device: &device,
            queue: &queue,
            torus,
            here: options.node,
            key: options.key,
            options: options.engine,
            listener: &listener,
            peers: &peers,
            deadline: Deadline::after(START),
        };
        let reconnector = LinkConnector::new(&links, &connections)
            .map_err(NodeError::from)
            .and_then(|link| Reconnector::new(link, peers.clone()).map_err(context("connect links again")))?;
        let streams: Vec<LinkStream> =
            if options.rejoin { Vec::new() } else { connect_all(&mut links, &connections)? };
        streams.iter().for_each(|&(direction, _)| engine.set_link(direction, true));
        say(&NodeMessage::Ready);
        let (page, health) = HealthPage::create().map_err(context("memory for the health page"))?;
        let service = Service::connect(&options.supervisors, options.key, options.node)
            .map_err(context("connect to supervisors"))?;
        let monitor = (options.timers).map(|timers| {
            AdapterMonitor::new(&torus, options.node, timers, page, !options.rejoin, Instant::default())
        });
        let longest_sleep = monitor.as_ref().map_or(LONGEST_SLEEP, AdapterMonitor::sleep);
        let state = State {
            clock: ObserverClock::new(2 * longest_sleep),
            monitor,
            polling: Polling::new(options.spin),
            moved: false,
            finishing: false,
            engine,
            links,
            queue,
            port,
            gateway,
            completions: vec![Completion::EMPTY; COMPLETIONS_PER_POLL],
            origin: std::time::Instant::now(),
            faulty: false,
        };
        Ok(Some(Node {
            options: options.clone(),
            device,
            waiter,
            state,
            input,
            applications: Arc::new(applications),
            streams: streams.into_iter().map(|(direction, stream)| (direction, Arc::new(stream))).collect(),
            card,
            service,
            health,
            monitors: Vec::new(),
            pending: PendingConnections::default(),
            listener: Arc::new(listener),
            reconnector,
            keeper,
            waiting: None,
            // The application of the node's earlier process is gone.
            departed: options.rejoin,
            lost: LostNodes::default(),
        }))
    }

    fn serve(mut self) -> Result<(), NodeError> {
        loop {
            self.state.work()?;
            let (wake, listener) = (Arc::clone(self.state.port.wake()), Arc::clone(&self.applications));
            let input = Arc::clone(&self.input.file);
            let connection = self.state.port.connection().map(Arc::clone);
            let streams = self.streams.clone();
            let orders = Arc::clone(self.service.wake());
            let (neighbours, attempts) = (Arc::clone(&self.listener), Arc::clone(self.reconnector.wake()));
            let mut fds = vec![
                WaitFd::readable(&*wake),
                WaitFd::readable(&*listener),
                WaitFd::readable(&*input),
                WaitFd::readable(&*orders),
                WaitFd::readable(&*neighbours),
                WaitFd::readable(&*attempts),
            ];
            let links_at = fds.len();
            fds.extend(streams.iter().map(|(_, stream)| WaitFd::readable(&**stream)));
            let application_at = fds.len();
            fds.extend(connection.iter().map(|connection| WaitFd::readable(&**connection)));
            let (card, card_at) = (self.card.clone(), fds.len());
            fds.extend(card.iter().map(|card| WaitFd::readable(&**card)));
            let (clients, clients_at) = (self.pending.connections(), fds.len());
            fds.extend(clients.iter().map(|client| WaitFd::readable(&**client)));
            // Outside hosts are admitted once this node takes part.
            let gateway = self.state.gateway.as_ref().filter(|_| self.state.engine.has_joined());
            let seventh = gateway.map(|gateway| (Arc::clone(gateway.listener()), Arc::clone(gateway.wake())));
            let (hosts, seventh_at) = (gateway.map(Gateway::streams).unwrap_or_default(), fds.len());
            if let Some((listener, wake)) = &seventh {
                fds.extend([WaitFd::readable(&**listener), WaitFd::readable(&**wake)]);
            }
            fds.extend(hosts.iter().map(|(_, stream)| WaitFd::readable(&**stream)));

            let deadline = Deadline::after(self.state.sleep());
            let mut queues = vec![self.state.queue.clone()];
            queues.extend(self.state.gateway.as_ref().map(|gateway| gateway.queue().clone()));
            let queues: Vec<_> = queues.iter().collect();
            let state = &mut self.state;
            // The application signals the event only while this is set; `progress` looks at its ring afterwards.
            state.port.control().set_node_waits(true);
            self.waiter.wait(&queues, &mut fds, deadline, || state.progress())?;
            state.port.control().set_node_waits(false);

            let ready: Vec<bool> = fds.iter().map(WaitFd::is_ready).collect();
            if ready[0] {
                wake.clear();
            }
            if ready[1] {
                self.accept();
            }
            for (at, client) in clients.iter().enumerate() {
                if ready[clients_at + at] {
                    self.take(client);
                }
            }
            self.pending.expire();
            if ready[2] && !self.handle_commands()? {
                return Ok(());
            }
            for (at, (direction, _)) in streams.iter().enumerate() {
                if ready[links_at + at] {
                    self.stream_ended(*direction);
                }
            }
            if ready[3] {
                orders.clear();
                self.take_orders();
            }
            if ready[4] {
                self.reconnector.accept(&neighbours);
            }
            if ready[5] {
                attempts.clear();
            }
            self.reconnect();
            let unreachable = self.state.port.finish_registrations(&mut self.state.engine).is_err();
            let gone = ready.get(application_at) == Some(&true)
                && self.state.port.serve(&mut self.state.engine).is_err();
            if unreachable || gone || self.state.faulty {
                self.detach()?;
            }
            if ready.get(card_at) == Some(&true)
                && let Some(card) = &self.card
            {
                card.set_ended();
            }
            if let Some((_, wake)) = &seventh {
                if ready[seventh_at + 1] {
                    wake.clear();
                }
                let gone = (hosts.iter().zip(&ready[seventh_at + 2..])).filter(|&(_, &ready)| ready);
                let gone: Vec<_> = gone.map(|((host, _), _)| *host).collect();
                self.state.serve_gateway(ready[seventh_at], &gone);
            }
            self.check_lease();
            self.state.tick();
            self.report();
        }
    }

    /// What supervisors sent.
    fn take_orders(&mut self) {
        while let Some(message) = self.service.receive() {
            match message {
                FromSupervisor::Order(order) => {
                    for answer in self.state.engine.handle_order(&order) {
                        self.service.send(&ToSupervisor::Answer(answer));
                    }
                }
                FromSupervisor::Lost(lost) => {
                    if self.lost.replace(lost) {
                        self.show_lost();
                    }
                }
                FromSupervisor::State(_) => {}
            }
        }
    }

    /// Shows the application which nodes are lost.
    fn show_lost(&self) {
        let control = self.state.port.control();
        for node in self.options.dimensions.all() {
            control.set_lost(node, self.lost.nodes.contains(&node));
        }
        control.signal();
    }

    /// What supervisors wait for.
    fn report(&mut self) {
        if let Some(answer) = self.state.engine.poll_drained() {
            self.service.send(&ToSupervisor::Answer(answer));
        }
        // Its last puts have arrived by then, so that nobody takes it for lost before.
        if self.departed && self.state.engine.is_port_idle(millstream_torus_core::Port::Local) {
            self.departed = false;
            let node = self.options.node;
            self.service.send(&ToSupervisor::Application { node, attached: false });
        }
    }

    fn accept(&mut self) {
        match self.applications.accept().and_then(|connection| self.pending.add(connection)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!("an application could not attach: {error}"),
        }
    }

    /// A client has sent its request, or is gone.
    fn take(&mut self, client: &Arc<Connection>) {
        let taken = self.pending.take(client).and_then(|request| match request {
            Some(request) => self.serve_client(Arc::clone(client), request),
            None => Ok(()),
        });
        if let Err(error) = taken {
            tracing::warn!("an application could not attach: {error}");
        }
    }

    fn serve_client(&mut self, connection: Arc<Connection>, request: AttachRequest) -> io::Result<()> {
        if request == AttachRequest::Monitor {
            send(&connection, &AttachReply::Health, &[self.health.as_fd()])?;
            self.monitors.retain(|monitor| !monitor.is_hung_up());
            self.monitors.push(connection);
            return Ok(());
        }
        if !self.state.engine.has_joined() {
            self.waiting = Some((connection, request));
            return Ok(());
        }
        self.attach(connection, &request)
    }

    fn attach(&mut self, connection: Arc<Connection>, request: &AttachRequest) -> io::Result<()> {
        // An application that has ended leaves its place at once, although its end is still to be read here.
        if self.state.port.connection().is_some_and(|earlier| earlier.is_hung_up()) {
            self.detach().map_err(io::Error::other)?;
        }
        if self.state.port.attach(connection, request)? {
            self.departed = false;
            let node = self.options.node;
            self.service.send(&ToSupervisor::Application { node, attached: true });
        }
        Ok(())
    }

    /// Ends what uses the card when its lease has ended.
    fn check_lease(&mut self) {
        let Some(card) = self.card.take_if(|card| !card.is_leased()) else { return };
        tracing::warn!("{}: the lease of card {} has ended", self.options.node, card.name());
        self.state.engine.handle_lost_memory();
        self.state.port.control().set_card_gone();
        self.state.port.control().signal();
    }

    /// Connects links that are down, and takes connected ones into use.
    fn reconnect(&mut self) {
        while let Some(outcome) = self.reconnector.poll() {
            match outcome {
                Outcome::Accepted(direction, stream) => self.link_accepted(direction, stream),
                Outcome::Connected(direction, incarnation, connected) => {
                    // Only a node of this run gets this far; the old connection is dead for it.
                    self.state.fail_link(direction, "the neighbour connected anew");
                    // A packet that came over the old connection may still be here: then both try again.
                    if !self.state.begin_anew(direction) {
                        self.reconnector.postpone(direction);
                        continue;
                    }
                    let (direction, stream) = self.state.links.take(*connected, incarnation);
                    self.streams.retain(|&(other, _)| other != direction);
                    self.streams.push((direction, Arc::new(stream)));
                    self.state.link_connected(direction);
                }
                Outcome::Failed(..) => {}
            }
        }
        for direction in Direction::ALL {
            if !self.state.finishing
                && !self.state.engine.link_is_up(direction)
                && self.reconnector.is_due(direction)
            {
                if !self.state.begin_anew(direction) {
                    self.reconnector.postpone(direction);
                    continue;
                }
                let incarnation = self.state.links.begin(direction);
                self.reconnector.dial(direction, incarnation);
            }
        }
        if self.state.engine.has_joined()
            && let Some((connection, request)) = self.waiting.take()
            && let Err(error) = self.attach(connection, &request)
        {
            tracing::warn!("an application could not attach: {error}");
        }
    }

    /// The neighbour in a negative direction connects again.
    fn link_accepted(&mut self, direction: Direction, stream: std::net::TcpStream) {
        if self.reconnector.is_busy(direction) || self.state.finishing {
            return;
        }
        // A packet that came over the old connection may still be here: the neighbour tries again. A
        // connection that is in use ends only when the other end is known to be the neighbour.
        if !self.state.engine.link_is_up(direction) && !self.state.begin_anew(direction) {
            return;
        }
        let incarnation = self.state.links.begin(direction);
        self.reconnector.finish(direction, incarnation, stream);
    }

    /// The application has gone. What it posted is still done, its regions end, the links go on.
    fn detach(&mut self) -> Result<(), NodeError> {
        let state = &mut self.state;
        // The last ones may have come after the last look at the ring. Nothing is taken from a faulty application, and
        // what is behind a faulty command is lost with it.
        if !state.faulty {
            let _ = state.port.take_last_commands(&mut state.engine);
        }
        state.engine.detach();
        state.faulty = false;
        let (publish, mailbox) = (self.options.publish_card, mailbox(self.options.key));
        self.state.port = Port::new(
            &self.device,
            self.card.clone(),
            publish,
            &mut self.state.engine,
            mailbox,
            &self.keeper,
        )
        .map_err(context("memory for an application"))?;
        self.departed = true;
        self.show_lost();
        Ok(())
    }

    /// Handles commands of the launcher. False at their end.
    fn handle_commands(&mut self) -> Result<bool, NodeError> {
        let Some(lines) = self.input.read().map_err(context("read standard input"))? else {
            return Ok(false);
        };
        for line in lines {
            match parse(&line)? {
                NodeCommand::Counters => say(&NodeMessage::Counters(self.state.counters())),
                NodeCommand::Finish => self.state.finishing = true,
                NodeCommand::Peers(_) => {}
            }
        }
        Ok(true)
    }

    /// The neighbour's process closed its stream, or ended.
    fn stream_ended(&mut self, direction: Direction) {
        self.streams.retain(|&(other, _)| other != direction);
        self.state.fail_link(direction, "the neighbour's process ended");
    }
}

fn lease_card(options: &NodeOptions) -> Result<Option<Arc<LeasedCard>>, NodeError> {
    let Some(name) = &options.card else { return Ok(None) };
    let card = LeasedCard::acquire(name).map_err(|cause| NodeError::Card { name: name.clone(), cause })?;
    Ok(Some(Arc::new(card)))
}

/// The seventh port, if the node has one.
fn open_gateway(
    options: &NodeOptions,
    device: &Device,
    waiter: &CompletionWaiter,
) -> Result<Option<Gateway>, NodeError> {
    let Some(seventh) = &options.seventh else { return Ok(None) };
    let queue = waiter.completion_queue(gateway::completions())?;
    let listener = listen(&seventh.listen)?;
    let here = (options.dimensions, options.node);
    Gateway::new(device, queue, listener, seventh.key, here)
        .map(Some)
        .map_err(context("open the seventh port"))
}

impl State {
    /// Admits outside hosts, and removes those that have gone.
    fn serve_gateway(&mut self, accept: bool, gone: &[u32]) {
        let Some(gateway) = &mut self.gateway else { return };
        gateway.take_connected();
        if accept {
            gateway.accept();
        }
        gone.iter().for_each(|&host| gateway.remove(host, &mut self.engine));
    }

    fn counters(&self) -> TrafficCounters {
        let outside = self.gateway.as_ref().map(Gateway::counters).unwrap_or_default();
        TrafficCounters { outside, ..TrafficCounters::of(&self.engine) }
    }

    /// Time without this process's pauses: a neighbour that paused with it is not silent.
    fn now(&mut self) -> Instant {
        Instant::from_nanos(self.clock.advance(self.origin.elapsed()).as_nanos() as u64)
    }

    fn sleep(&mut self) -> Duration {
        let longest = self.monitor.as_ref().map_or(LONGEST_SLEEP, AdapterMonitor::sleep);
        let now = self.now();
        self.engine.poll_timeout().map_or(longest, |at| at.since(now)).min(longest)
    }

    fn tick(&mut self) {
        let now = self.now();
        self.engine.handle_time(now);
        let Some(monitor) = &mut self.monitor else { return };
        let links = &mut self.links;
        for direction in Direction::ALL {
            if let Some(word) = links.take_keepalive(direction) {
                monitor.frame(direction, word, now);
            }
        }
        let monitored = monitor.tick(|direction| links.frames_sent(direction), now);
        for (direction, word) in monitored.words {
            links.set_diagnosis(direction, word);
            self.engine.set_diagnosis(direction, word);
            links.send_idle(direction);
        }
        monitored.silent.into_iter().for_each(|direction| links.send_keepalive(direction));
        for direction in monitored.broken {
            self.fail_link(direction, "no frame arrived in time");
        }
    }

    /// Works until there has been nothing to do for some time, or other descriptors are due. Only packets and commands
    /// make the process poll: idle frames come all the time.
    fn work(&mut self) -> Result<(), NodeError> {
        let end = std::time::Instant::now() + self.sleep().min(DESCRIPTORS_EVERY);
        let (mut looks, mut moved) = (0_u32, self.engine.moved());
        loop {
            if std::mem::take(&mut self.moved) {
                self.polling.begin();
            }
            if !self.progress()? && !self.polling.pause() {
                return Ok(());
            }
            looks = looks.wrapping_add(1);
            let is_due = looks.is_multiple_of(LOOKS) || self.engine.moved() - moved >= PACKETS;
            if is_due {
                moved = self.engine.moved();
            }
            if self.faulty || (is_due && std::time::Instant::now() >= end) {
                return Ok(());
            }
        }
    }

    /// Handles completions and commands, and moves packets. Returns whether there was work.
    fn progress(&mut self) -> Result<bool, NodeError> {
        let mut completed = self.poll_completions()?;
        if let Some(gateway) = &mut self.gateway {
            completed |= gateway.poll(&mut self.engine)?;
        }
        // The application learns of what arrived before the node answers it.
        let mut moved = self.engine.deliver(&mut self.links);
        let Ok(reported) = self.port.report(&mut self.engine) else { return Ok(self.fault()) };
        moved |= reported;
        let Ok(commands) = self.port.take_commands(&mut self.engine) else { return Ok(self.fault()) };
        moved |= commands;
        moved |= self.engine.run(&mut self.links);
        if let Some(gateway) = &mut self.gateway {
            moved |= gateway.report(&mut self.engine);
        }
        let Ok(reported) = self.port.report(&mut self.engine) else { return Ok(self.fault()) };
        moved |= reported;
        self.moved |= moved;
        Ok(completed | moved)
    }

    /// The application broke the rules: it is detached after this look.
    fn fault(&mut self) -> bool {
        self.faulty = true;
        true
    }

    fn poll_completions(&mut self) -> Result<bool, NodeError> {
        let mut completions = std::mem::take(&mut self.completions);
        let taken = self.queue.poll(&mut completions)?.len();
        for completion in &completions[..taken] {
            self.handle_completion(completion);
        }
        self.links.post_receives();
        self.completions = completions;
        Ok(taken > 0)
    }

    fn handle_completion(&mut self, completion: &Completion) {
        match self.links.handle_completion(completion, &mut self.engine) {
            Some(LinkEvent::Frame { side, frame }) => {
                let now = self.now();
                if let Some(monitor) = &mut self.monitor {
                    monitor.frame(side, frame.diagnosis, now);
                }
                if let Err(error) = self.links.handle_frame(side, frame, &mut self.engine) {
                    self.engine.count_malformed();
                    self.fail_link(side, &error.to_string());
                }
            }
            Some(LinkEvent::Failed { side }) => self.fail_link(side, "the queue pair failed"),
            None => {}
        }
    }

    /// Forgets the old connection of a link that is down. False while a packet that came over it is here.
    fn begin_anew(&mut self, direction: Direction) -> bool {
        self.links.release_slots(direction, &mut self.engine);
        self.engine.reset_link(direction).is_ok()
    }

    /// A link is in use again.
    fn link_connected(&mut self, direction: Direction) {
        tracing::info!("{}: link {direction} is connected again", self.engine.here());
        self.engine.set_link(direction, true);
        let now = self.now();
        if let Some(monitor) = &mut self.monitor {
            monitor.connected(direction, now);
        }
        while let Some(completion) = self.links.early() {
            self.handle_completion(&completion);
        }
        self.links.post_receives();
    }

    fn fail_link(&mut self, direction: Direction, cause: &str) {
        if self.engine.link_is_up(direction) {
            if !self.finishing {
                tracing::warn!("{}: link {direction} failed: {cause}", self.engine.here());
            }
            self.engine.set_link(direction, false);
            self.links.shut_down(direction);
            let now = self.now();
            if let Some(monitor) = &mut self.monitor {
                monitor.failed(direction, now);
            }
        }
    }
}
