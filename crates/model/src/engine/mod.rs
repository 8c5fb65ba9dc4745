//! Discrete-event engine: packets travel along routes of channels between endpoints.
//!
//! - A [`Channel`] is a serialiser with a rate, overhead per packet, a propagation delay and a bounded input
//!   buffer. It starts a packet only if the next buffer on the route has room (credit-based flow control).
//! - An [`Endpoint`] is code that receives packets at its ports and sends packets.
//! - A [`Route`] is a list of channels that ends at a port. Channels, ports and routes carry the type of their
//!   bus ([`Pcie`], [`Cxl`], [`Network`], [`Internal`]), so a packet cannot enter another bus.
//!
//! A simulation runs on one thread and is a function of its input and seed. Sweeps and parameter samples run many
//! simulations in parallel; the number of threads does not change results.

mod channel;
mod event_queue;
mod random;

pub use channel::{Channel, ChannelReport};
pub use event_queue::EventQueue;
pub use millstream_quantity::{BytesPerSecond, Picos};
pub use random::Random;

use channel::ChannelState;
use std::any::Any;
use std::marker::PhantomData;

/// A bus that packets travel on.
pub trait Bus {}

/// PCI Express: packets are TLPs.
#[derive(Clone, Copy, Debug)]
pub struct Pcie;
/// CXL.mem: packets are messages of one cache line.
#[derive(Clone, Copy, Debug)]
pub struct Cxl;
/// A network: packets are InfiniBand or torus packets.
#[derive(Clone, Copy, Debug)]
pub struct Network;
/// Inside a component: requests and software steps.
#[derive(Clone, Copy, Debug)]
pub struct Internal;

impl Bus for Pcie {}
impl Bus for Cxl {}
impl Bus for Network {}
impl Bus for Internal {}

/// A channel of a bus.
#[derive(Debug)]
pub struct ChannelId<B> {
    index: u32,
    bus: PhantomData<B>,
}

/// A port of an endpoint.
#[derive(Debug)]
pub struct PortId<B> {
    endpoint: u32,
    port: u16,
    buffer: u32,
    bus: PhantomData<B>,
}

/// A list of channels that ends at a port.
#[derive(Debug)]
pub struct Route<B> {
    index: u32,
    bus: PhantomData<B>,
}

macro_rules! copy {
    ($($name:ident),+) => {
        $(impl<B> Clone for $name<B> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<B> Copy for $name<B> {})+
    };
}
copy!(ChannelId, PortId, Route);

impl<B: Bus> Route<B> {
    /// The number that a packet carries as its reply route.
    #[must_use]
    pub fn number(self) -> u32 {
        self.index
    }

    /// The reply route that a packet carries.
    #[must_use]
    pub fn reply_to(packet: &Packet) -> Route<B> {
        Route { index: packet.reply, bus: PhantomData }
    }
}

/// An endpoint of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EndpointId(u32);

/// A packet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Packet {
    route: u32,
    hop: u16,
    /// Packet type, defined by the endpoints.
    pub kind: u16,
    /// Payload bytes.
    pub size: u32,
    /// Number of the route for a reply.
    pub reply: u32,
    /// User data, defined by the endpoints.
    pub tag: u64,
}

impl Packet {
    /// A packet without a reply route.
    #[must_use]
    pub fn new(kind: u16, size: u32, tag: u64) -> Packet {
        Packet { kind, size, tag, ..Packet::default() }
    }

    /// Sets the reply route.
    #[must_use]
    pub fn with_reply<B: Bus>(self, reply: Route<B>) -> Packet {
        Packet { reply: reply.index, ..self }
    }
}

/// Code at the end of routes.
pub trait Endpoint: Any {
    /// A packet has arrived completely.
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>);

    /// A timer that the endpoint set has expired.
    fn timer(&mut self, _token: u64, _context: &mut Context<'_>) {}
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The channel has transmitted its packet.
    Departed(u32),
    /// The packet has reached the next hop of its route.
    Arrived(Packet),
    Timer(u32, u64),
}

#[derive(Clone, Copy, Debug)]
enum Hop {
    Channel { channel: u32 },
    Port { endpoint: u32, port: u16, buffer: u32 },
}

/// Input buffer of a channel or port.
#[derive(Debug)]
struct Buffer {
    capacity: u64,
    used: u64,
    /// Channels whose first packet waits for this buffer, in order.
    waiting: std::collections::VecDeque<u32>,
}

/// Simulation interface for a running endpoint.
#[derive(Debug)]
pub struct Context<'a> {
    core: &'a mut Core,
    endpoint: u32,
}

#[derive(Debug)]
struct Core {
    now: Picos,
    queue: EventQueue<Event>,
    channels: Vec<ChannelState>,
    buffers: Vec<Buffer>,
    hops: Vec<Hop>,
    /// Index of each route's first hop in `hops`.
    routes: Vec<u32>,
    random: Random,
    stopped: bool,
}

/// A simulation.
pub struct Simulation {
    core: Core,
    endpoints: Vec<Option<Box<dyn Endpoint>>>,
    events: u64,
}

impl std::fmt::Debug for Simulation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulation").field("now", &self.core.now).field("events", &self.events).finish()
    }
}

impl Simulation {
    /// An empty simulation.
    #[must_use]
    pub fn new(seed: u64) -> Simulation {
        Simulation {
            core: Core {
                now: Picos::ZERO,
                queue: EventQueue::new(),
                channels: Vec::new(),
                buffers: Vec::new(),
                hops: Vec::new(),
                // Route 0 means no route: packets without a reply route carry it.
                routes: vec![0],
                random: Random::new(seed),
                stopped: false,
            },
            endpoints: Vec::new(),
            events: 0,
        }
    }

    /// Adds a channel.
    pub fn add_channel<B: Bus>(&mut self, channel: Channel) -> ChannelId<B> {
        let index = self.core.channels.len() as u32;
        let buffer = self.core.buffer(channel.capacity);
        self.core.channels.push(ChannelState::new(channel, buffer));
        ChannelId { index, bus: PhantomData }
    }

    /// Adds an endpoint.
    pub fn add_endpoint(&mut self, endpoint: impl Endpoint) -> EndpointId {
        self.endpoints.push(Some(Box::new(endpoint)));
        EndpointId(self.endpoints.len() as u32 - 1)
    }

    /// Installs the code of a reserved endpoint.
    pub fn install(&mut self, id: EndpointId, endpoint: impl Endpoint) {
        self.endpoints[id.0 as usize] = Some(Box::new(endpoint));
    }

    /// Reserves an endpoint whose code needs routes to other endpoints first.
    pub fn reserve_endpoint(&mut self) -> EndpointId {
        self.endpoints.push(None);
        EndpointId(self.endpoints.len() as u32 - 1)
    }

    /// A port with an unlimited buffer.
    pub fn port<B: Bus>(&mut self, endpoint: EndpointId, port: u16) -> PortId<B> {
        self.bounded_port(endpoint, port, u64::MAX)
    }

    /// A port with a buffer of `capacity` bytes; its endpoint frees them with [`Context::return_credits`].
    pub fn bounded_port<B: Bus>(&mut self, endpoint: EndpointId, port: u16, capacity: u64) -> PortId<B> {
        let buffer = self.core.buffer(capacity);
        PortId { endpoint: endpoint.0, port, buffer, bus: PhantomData }
    }

    /// Adds a route.
    pub fn route<B: Bus>(&mut self, channels: &[ChannelId<B>], to: PortId<B>) -> Route<B> {
        let index = self.core.routes.len() as u32;
        self.core.routes.push(self.core.hops.len() as u32);
        self.core.hops.extend(channels.iter().map(|&channel| Hop::Channel { channel: channel.index }));
        self.core.hops.push(Hop::Port { endpoint: to.endpoint, port: to.port, buffer: to.buffer });
        Route { index, bus: PhantomData }
    }

    /// Sets a timer of an endpoint.
    pub fn set_timer(&mut self, endpoint: EndpointId, at: Picos, token: u64) {
        self.core.queue.push(at, Event::Timer(endpoint.0, token));
    }

    /// Runs until no event is left, an endpoint stops the run, or `limit` is reached.
    ///
    /// # Panics
    /// If a packet arrives at an endpoint that was reserved but not installed.
    pub fn run(&mut self, limit: Picos) -> Picos {
        while !self.core.stopped {
            let Some((at, event)) = self.core.queue.pop() else { break };
            if at > limit {
                self.core.stopped = true;
                break;
            }
            self.core.now = at;
            self.events += 1;
            match event {
                Event::Departed(channel) => self.core.departed(channel),
                Event::Timer(endpoint, token) => {
                    self.call(endpoint, |code, context| code.timer(token, context))
                }
                Event::Arrived(packet) => match self.core.hop(&packet) {
                    Hop::Channel { channel } => self.core.enqueue(channel, packet),
                    Hop::Port { endpoint, port, .. } => {
                        self.call(endpoint, |code, context| code.receive(port, packet, context));
                    }
                },
            }
        }
        self.core.now
    }

    fn call(&mut self, endpoint: u32, f: impl FnOnce(&mut dyn Endpoint, &mut Context<'_>)) {
        let code = self.endpoints[endpoint as usize].as_mut().expect("every routed endpoint is installed");
        f(code.as_mut(), &mut Context { core: &mut self.core, endpoint });
    }

    /// Simulated time.
    #[must_use]
    pub fn now(&self) -> Picos {
        self.core.now
    }

    /// Events processed so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Counters of a channel.
    #[must_use]
    pub fn channel_report<B: Bus>(&self, channel: ChannelId<B>) -> ChannelReport {
        self.core.channels[channel.index as usize].report(self.core.now)
    }

    /// Counters of all channels.
    pub fn channel_reports(&self) -> impl Iterator<Item = ChannelReport> + '_ {
        self.core.channels.iter().map(|channel| channel.report(self.core.now))
    }

    /// The code of an endpoint, to read results from.
    ///
    /// # Panics
    /// If the endpoint has another type.
    #[must_use]
    pub fn get<E: Endpoint>(&self, id: EndpointId) -> &E {
        let code: &dyn Any = self.endpoints[id.0 as usize].as_deref().expect("the endpoint is installed");
        code.downcast_ref().expect("the endpoint has the requested type")
    }
}

impl Context<'_> {
    /// Simulated time.
    #[must_use]
    pub fn now(&self) -> Picos {
        self.core.now
    }

    /// Random numbers of this simulation.
    pub fn random(&mut self) -> &mut Random {
        &mut self.core.random
    }

    /// Sends a packet. It queues before the route's first channel, without limit.
    pub fn send<B: Bus>(&mut self, route: Route<B>, packet: Packet) {
        self.core.inject(Packet { route: route.index, hop: 0, ..packet });
    }

    /// Sends a packet after a delay.
    pub fn send_after<B: Bus>(&mut self, delay: Picos, route: Route<B>, packet: Packet) {
        let packet = Packet { route: route.index, hop: 0, ..packet };
        self.core.queue.push(self.core.now + delay, Event::Arrived(packet));
    }

    /// Packets queued on the route's first channel, including the one in transmission.
    #[must_use]
    pub fn backlog<B: Bus>(&self, route: Route<B>) -> usize {
        match self.core.hops[self.core.routes[route.index as usize] as usize] {
            Hop::Channel { channel } => self.core.channels[channel as usize].backlog(),
            Hop::Port { .. } => 0,
        }
    }

    /// Frees a packet's bytes in the buffer of a bounded port.
    pub fn return_credits(&mut self, packet: &Packet) {
        if let Hop::Port { buffer, .. } = self.core.hop(packet) {
            self.core.return_credits(buffer, u64::from(packet.size));
        }
    }

    /// Sets a timer of this endpoint.
    pub fn set_timer(&mut self, delay: Picos, token: u64) {
        self.core.queue.push(self.core.now + delay, Event::Timer(self.endpoint, token));
    }

    /// Ends the run after this event.
    pub fn stop(&mut self) {
        self.core.stopped = true;
    }
}

impl Core {
    fn buffer(&mut self, capacity: u64) -> u32 {
        self.buffers.push(Buffer { capacity, used: 0, waiting: std::collections::VecDeque::new() });
        self.buffers.len() as u32 - 1
    }

    #[inline]
    fn hop(&self, packet: &Packet) -> Hop {
        self.hops[self.routes[packet.route as usize] as usize + packet.hop as usize]
    }

    /// Queues a packet of an endpoint on the route's first channel without a buffer limit: it waits in the
    /// endpoint's own memory.
    fn inject(&mut self, packet: Packet) {
        match self.hop(&packet) {
            Hop::Channel { channel } => {
                let buffer = self.channels[channel as usize].buffer;
                self.buffers[buffer as usize].used += u64::from(packet.size);
                self.enqueue(channel, packet);
            }
            Hop::Port { .. } => self.queue.push(self.now, Event::Arrived(packet)),
        }
    }

    #[inline]
    fn enqueue(&mut self, channel: u32, packet: Packet) {
        let state = &mut self.channels[channel as usize];
        state.queue.push_back(packet);
        if state.is_idle() {
            self.start(channel);
        }
    }

    /// Starts the first packet if the next buffer has room; else the channel waits for credits.
    fn start(&mut self, channel: u32) {
        let state = &mut self.channels[channel as usize];
        let Some(&packet) = state.queue.front() else { return };
        let next = Packet { hop: packet.hop + 1, ..packet };
        let hop = self.hops[self.routes[packet.route as usize] as usize + next.hop as usize];
        let (buffer, to_channel) = match hop {
            Hop::Channel { channel } => (self.channels[channel as usize].buffer, true),
            Hop::Port { buffer, .. } => (buffer, false),
        };
        let buffer_state = &mut self.buffers[buffer as usize];
        let size = u64::from(packet.size);
        // An empty buffer accepts a packet of any size: otherwise a packet above the capacity would wait
        // forever.
        if buffer_state.used > 0 && buffer_state.used.saturating_add(size) > buffer_state.capacity {
            buffer_state.waiting.push_back(channel);
            self.channels[channel as usize].block(self.now);
            return;
        }
        buffer_state.used = buffer_state.used.saturating_add(size);
        let random = &mut self.random;
        let state = &mut self.channels[channel as usize];
        let span = state.start(self.now, packet, random);
        if to_channel && state.channel.cut_through {
            // The head leaves at once. The next channel is not faster, so it cannot finish before this one.
            self.queue.push(self.now + state.channel.latency, Event::Arrived(next));
        }
        self.queue.push(self.now + span, Event::Departed(channel));
    }

    fn departed(&mut self, channel: u32) {
        let state = &mut self.channels[channel as usize];
        let packet = state.finish(self.now);
        let buffer = state.buffer;
        let next = Packet { hop: packet.hop + 1, ..packet };
        let to_channel = matches!(self.hop(&next), Hop::Channel { .. });
        let state = &self.channels[channel as usize];
        if !(to_channel && state.channel.cut_through) {
            let latency = state.channel.latency;
            self.queue.push(self.now + latency, Event::Arrived(next));
        }
        self.return_credits(buffer, u64::from(packet.size));
        if self.channels[channel as usize].is_idle() {
            self.start(channel);
        }
    }

    /// Frees buffer space and restarts the channels that wait for it, in order.
    fn return_credits(&mut self, buffer: u32, bytes: u64) {
        let buffer_state = &mut self.buffers[buffer as usize];
        buffer_state.used = buffer_state.used.saturating_sub(bytes);
        for _ in 0..buffer_state.waiting.len() {
            let Some(channel) = self.buffers[buffer as usize].waiting.pop_front() else { break };
            self.channels[channel as usize].unblock(self.now);
            self.start(channel);
            if self.channels[channel as usize].is_blocked() {
                // The channel queued again at the back; it keeps its place at the front.
                let waiting = &mut self.buffers[buffer as usize].waiting;
                waiting.rotate_right(1);
                break;
            }
        }
    }
}
