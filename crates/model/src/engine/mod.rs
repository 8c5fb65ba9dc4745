//! The engine: packets travel routes of lines between endpoints in virtual time.
//!
//! - A [`Line`] takes packets one at a time: a serialiser with a rate, overhead per packet, a latency
//!   behind it, and a buffer of limited room before it. A packet starts on a line only when the next
//!   buffer of its route has room for it: credits.
//! - An [`Endpoint`] is code: it receives packets at its ports and sends others.
//! - A route is a list of lines that ends at a port. Lines, ports and routes carry the type of the bus
//!   they belong to ([`Pcie`], [`Network`], [`Internal`]), so a packet of one cannot get on another.
//!
//! One simulation runs on one thread and is a function of its input and seed. Whoever needs many (sweeps,
//! samples of parameters) runs many side by side; results do not depend on how many threads do it.

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
/// A network: packets are InfiniBand packets or those of a torus.
#[derive(Clone, Copy, Debug)]
pub struct Network;
/// Inside a part: requests, software steps.
#[derive(Clone, Copy, Debug)]
pub struct Internal;

impl Bus for Pcie {}
impl Bus for Network {}
impl Bus for Internal {}

/// A line of a bus.
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

/// A way over lines to a port.
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
    /// The number that travels in packets as their way back.
    #[must_use]
    pub fn number(self) -> u32 {
        self.index
    }

    /// The route that a packet of this bus brought as its way back.
    #[must_use]
    pub fn reply_to(packet: &Packet) -> Route<B> {
        Route { index: packet.reply, bus: PhantomData }
    }
}

/// An endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EndpointId(u32);

/// What travels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Packet {
    route: u32,
    hop: u16,
    /// What it is, by the endpoints' agreement.
    pub kind: u16,
    /// Payload in bytes.
    pub size: u32,
    /// Route of an answer.
    pub reply: u32,
    /// Whose it is, by the endpoints' agreement.
    pub tag: u64,
}

impl Packet {
    /// A packet of that kind and payload.
    #[must_use]
    pub fn new(kind: u16, size: u32, tag: u64) -> Packet {
        Packet { kind, size, tag, ..Packet::default() }
    }

    /// With a way back.
    #[must_use]
    pub fn with_reply<B: Bus>(self, reply: Route<B>) -> Packet {
        Packet { reply: reply.index, ..self }
    }
}

/// Code at the end of routes.
pub trait Endpoint: Any {
    /// A packet has arrived whole.
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>);

    /// A time that it asked for has come.
    fn timer(&mut self, _token: u64, _context: &mut Context<'_>) {}
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The line has put its packet out.
    Departed(u32),
    /// The packet has reached the next hop of its route.
    Arrived(Packet),
    Timer(u32, u64),
}

#[derive(Clone, Copy, Debug)]
enum Hop {
    Channel { channel: u32, bubble: u32 },
    Port { endpoint: u32, port: u16, buffer: u32 },
}

/// Room before a line or behind a port.
#[derive(Debug)]
struct Buffer {
    capacity: u64,
    used: u64,
    /// Lines whose first packet waits for room here, in order.
    waiting: std::collections::VecDeque<u32>,
}

/// What endpoints may use while they run.
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
    /// First hop of each route in `hops`.
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
    /// An empty one.
    #[must_use]
    pub fn new(seed: u64) -> Simulation {
        Simulation {
            core: Core {
                now: Picos::ZERO,
                queue: EventQueue::new(),
                channels: Vec::new(),
                buffers: Vec::new(),
                hops: Vec::new(),
                // Route 0 is none: packets without a way back have it.
                routes: vec![0],
                random: Random::new(seed),
                stopped: false,
            },
            endpoints: Vec::new(),
            events: 0,
        }
    }

    /// Adds a line.
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

    /// Gives an endpoint that was reserved its code.
    pub fn install(&mut self, id: EndpointId, endpoint: impl Endpoint) {
        self.endpoints[id.0 as usize] = Some(Box::new(endpoint));
    }

    /// A place for an endpoint whose code needs routes to others first.
    pub fn reserve_endpoint(&mut self) -> EndpointId {
        self.endpoints.push(None);
        EndpointId(self.endpoints.len() as u32 - 1)
    }

    /// A port without limit.
    pub fn port<B: Bus>(&mut self, endpoint: EndpointId, port: u16) -> PortId<B> {
        self.bounded_port(endpoint, port, u64::MAX)
    }

    /// A port that takes so many bytes until its endpoint [releases](Context::release) them.
    pub fn bounded_port<B: Bus>(&mut self, endpoint: EndpointId, port: u16, capacity: u64) -> PortId<B> {
        let buffer = self.core.buffer(capacity);
        PortId { endpoint: endpoint.0, port, buffer, bus: PhantomData }
    }

    /// Adds a route.
    pub fn route<B: Bus>(&mut self, channels: &[ChannelId<B>], to: PortId<B>) -> Route<B> {
        let channels: Vec<(ChannelId<B>, u32)> = channels.iter().map(|&channel| (channel, 0)).collect();
        self.bubble_route(&channels, to)
    }

    /// Adds a route whose packets enter a line only if so many bytes of its buffer stay free: bubble
    /// flow control, which keeps a ring from filling up with packets that wait for each other
    /// (Puente et al., ICPP 1999).
    pub fn bubble_route<B: Bus>(&mut self, channels: &[(ChannelId<B>, u32)], to: PortId<B>) -> Route<B> {
        let index = self.core.routes.len() as u32;
        self.core.routes.push(self.core.hops.len() as u32);
        self.core.hops.extend(
            channels.iter().map(|&(channel, bubble)| Hop::Channel { channel: channel.index, bubble }),
        );
        self.core.hops.push(Hop::Port { endpoint: to.endpoint, port: to.port, buffer: to.buffer });
        Route { index, bus: PhantomData }
    }

    /// Wakes an endpoint at a time.
    pub fn set_timer(&mut self, endpoint: EndpointId, at: Picos, token: u64) {
        self.core.queue.push(at, Event::Timer(endpoint.0, token));
    }

    /// Runs until nothing is left to happen, an endpoint stops it, or `limit` is reached.
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
                    Hop::Channel { channel, .. } => self.core.enqueue(channel, packet),
                    Hop::Port { endpoint, port, .. } => {
                        self.call(endpoint, |code, context| code.receive(port, packet, context));
                    }
                },
            }
        }
        self.core.now
    }

    fn call(&mut self, endpoint: u32, f: impl FnOnce(&mut dyn Endpoint, &mut Context<'_>)) {
        let code = self.endpoints[endpoint as usize].as_mut().expect("routes lead to installed endpoints");
        f(code.as_mut(), &mut Context { core: &mut self.core, endpoint });
    }

    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Picos {
        self.core.now
    }

    /// Events so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// What a line has done so far.
    #[must_use]
    pub fn channel_report<B: Bus>(&self, channel: ChannelId<B>) -> ChannelReport {
        self.core.channels[channel.index as usize].report(self.core.now)
    }

    /// What every line has done so far.
    pub fn channel_reports(&self) -> impl Iterator<Item = ChannelReport> + '_ {
        self.core.channels.iter().map(|channel| channel.report(self.core.now))
    }

    /// An endpoint's code, to read results from.
    ///
    /// # Panics
    /// If the endpoint is of another type.
    #[must_use]
    pub fn get<E: Endpoint>(&self, id: EndpointId) -> &E {
        let code: &dyn Any = self.endpoints[id.0 as usize].as_deref().expect("the endpoint is installed");
        code.downcast_ref().expect("the endpoint is of the type that was installed")
    }
}

impl Context<'_> {
    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Picos {
        self.core.now
    }

    /// Random numbers of this simulation.
    pub fn random(&mut self) -> &mut Random {
        &mut self.core.random
    }

    /// Sends a packet; it waits before the route's first line as long as it has to.
    pub fn send<B: Bus>(&mut self, route: Route<B>, packet: Packet) {
        self.core.inject(Packet { route: route.index, hop: 0, ..packet });
    }

    /// Sends a packet later.
    pub fn send_after<B: Bus>(&mut self, delay: Picos, route: Route<B>, packet: Packet) {
        let packet = Packet { route: route.index, hop: 0, ..packet };
        self.core.queue.push(self.core.now + delay, Event::Arrived(packet));
    }

    /// Packets that wait on the route's first line or are being put out by it.
    #[must_use]
    pub fn backlog<B: Bus>(&self, route: Route<B>) -> usize {
        match self.core.hops[self.core.routes[route.index as usize] as usize] {
            Hop::Channel { channel, .. } => self.core.channels[channel as usize].backlog(),
            Hop::Port { .. } => 0,
        }
    }

    /// Gives room of a bounded port back.
    pub fn return_credits(&mut self, packet: &Packet) {
        if let Hop::Port { buffer, .. } = self.core.hop(packet) {
            self.core.return_credits(buffer, u64::from(packet.size));
        }
    }

    /// Asks to be woken.
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

    /// A packet from an endpoint: the first line's queue takes it whatever its room, as an endpoint's
    /// own memory would.
    fn inject(&mut self, packet: Packet) {
        match self.hop(&packet) {
            Hop::Channel { channel, .. } => {
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

    /// Starts the line's first packet if the next buffer has room; else the line waits for room.
    fn start(&mut self, channel: u32) {
        let state = &mut self.channels[channel as usize];
        let Some(&packet) = state.queue.front() else { return };
        let next = Packet { hop: packet.hop + 1, ..packet };
        let hop = self.hops[self.routes[packet.route as usize] as usize + next.hop as usize];
        let (buffer, bubble, to_channel) = match hop {
            Hop::Channel { channel, bubble } => (self.channels[channel as usize].buffer, bubble, true),
            Hop::Port { buffer, .. } => (buffer, 0, false),
        };
        let buffer_state = &mut self.buffers[buffer as usize];
        let size = u64::from(packet.size);
        // An empty buffer takes any packet, so that none waits for ever for room that cannot be.
        if buffer_state.used > 0
            && buffer_state.used.saturating_add(size + u64::from(bubble)) > buffer_state.capacity
        {
            buffer_state.waiting.push_back(channel);
            self.channels[channel as usize].block(self.now);
            return;
        }
        buffer_state.used = buffer_state.used.saturating_add(size);
        let random = &mut self.random;
        let state = &mut self.channels[channel as usize];
        let span = state.start(self.now, packet, random);
        if to_channel && state.channel.cut_through {
            // The head leaves at once; the next line cannot finish before this one as it is not faster.
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

    /// Room has become free: the lines that wait for it try again, in order.
    fn return_credits(&mut self, buffer: u32, bytes: u64) {
        let buffer_state = &mut self.buffers[buffer as usize];
        buffer_state.used = buffer_state.used.saturating_sub(bytes);
        for _ in 0..buffer_state.waiting.len() {
            let Some(channel) = self.buffers[buffer as usize].waiting.pop_front() else { break };
            self.channels[channel as usize].unblock(self.now);
            self.start(channel);
            if self.channels[channel as usize].is_blocked() {
                // It has queued up again at the back: it goes first, as it did.
                let waiting = &mut self.buffers[buffer as usize].waiting;
                waiting.rotate_right(1);
                break;
            }
        }
    }
}
