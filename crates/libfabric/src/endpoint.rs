//! An endpoint as a machine over message rings: sends in order, receives, remote memory, atomic operations. `target` has what
//! others do with its memory.
//!
//! It makes progress only when the application reads a completion queue or posts an operation (`FI_PROGRESS_MANUAL`). The work
//! of one call for each node is that of a ring: no node waits for a long transfer of another.

mod target;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_fabric::{Fabric, FabricError};
use millstream_torus_core::NodeNumber;

use crate::header::{Header, Kind};
use crate::matching::{Arrived, Discarded, Matcher, Message, Pattern, Receive, ReceiveBuffer, Received};
use crate::memory::{Regions, UserBuffer};
use crate::ring::{Address, PAYLOAD, Rings, SLOTS};
use crate::sys;
use target::{Reading, Writing};

/// An endpoint that closes waits for so long for nodes that have come back and must say what they have received.
const CLOSING: Duration = Duration::from_secs(10);

/// The queue that a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Of sends, and of reads, writes and atomic operations of this endpoint.
    Transmit,
    /// Of receives, and of writes of others with data.
    Receive,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// Its queue.
    pub side: Side,
    /// Context of the operation.
    pub context: usize,
    /// What completed: `FI_SEND`, `FI_RECV`, `FI_TAGGED` and so on.
    pub flags: u64,
    /// Length of the data (bytes).
    pub length: u64,
    /// Data of the source.
    pub data: u64,
    /// The message's tag.
    pub tag: u64,
    /// The node that sent it.
    pub source: Option<NodeNumber>,
    /// 0, or an error of libfabric.
    pub error: u32,
    /// Bytes that did not fit.
    pub overflow: u64,
    /// Whether it is written to the queue. Errors are always written, and counters count all completions.
    pub signaled: bool,
}

impl Completion {
    /// A success.
    #[must_use]
    pub fn new(side: Side, context: usize, flags: u64) -> Completion {
        Completion {
            side,
            context,
            flags,
            length: 0,
            data: 0,
            tag: 0,
            source: None,
            error: 0,
            overflow: 0,
            signaled: true,
        }
    }
}

/// Bytes to send.
#[derive(Debug)]
pub enum Source {
    /// The application's, until the operation completes.
    User(UserBuffer),
    /// A copy.
    Owned(Vec<u8>),
}

impl Source {
    fn size(&self) -> u64 {
        match self {
            Source::User(buffer) => buffer.size(),
            Source::Owned(bytes) => bytes.len() as u64,
        }
    }

    fn read(&self, offset: u64, length: usize, into: &mut Vec<u8>) {
        match self {
            Source::User(buffer) => buffer.read(offset, length, into),
            Source::Owned(bytes) => into.extend_from_slice(&bytes[offset as usize..offset as usize + length]),
        }
    }
}

/// A message on its way out.
#[derive(Debug)]
struct Outgoing {
    header: Header,
    source: Source,
    sent: u64,
    /// Reported when the last byte has left.
    completion: Option<Completion>,
}

impl Outgoing {
    fn new(header: Header, source: Source, completion: Option<Completion>) -> Outgoing {
        Outgoing { header: Header { total: source.size(), ..header }, source, sent: 0, completion }
    }

    /// Whether it is of an operation of this endpoint. Otherwise its node waits for it.
    fn is_own(&self) -> bool {
        !matches!(self.header.kind, Kind::Reply | Kind::Acknowledge | Kind::Interrupt)
    }

    /// Whether its node has begun to receive it.
    fn is_begun(&self) -> bool {
        self.sent > 0 && matches!(self.header.kind, Kind::Message | Kind::Tagged)
    }
}

/// A request that waits for the reply of another node.
#[derive(Debug)]
struct Request {
    node: NodeNumber,
    /// Memory for the reply's data.
    reply: UserBuffer,
    completion: Completion,
}

/// An endpoint.
#[derive(Debug)]
pub struct Endpoint<F> {
    rings: Rings<F>,
    matcher: Matcher<UserBuffer>,
    queues: Vec<VecDeque<Outgoing>>,
    readings: Vec<Option<Reading>>,
    /// The write of each node that is under way.
    writes: Vec<Writing>,
    /// Nodes whose loss is known, after their last messages.
    lost: Vec<bool>,
    requests: HashMap<u64, Request>,
    next_request: u64,
    regions: Arc<Mutex<Regions>>,
    completions: VecDeque<Completion>,
    scratch: Vec<u8>,
    is_closed: bool,
}

fn lock(regions: &Mutex<Regions>) -> MutexGuard<'_, Regions> {
    regions.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<F: Fabric> Endpoint<F> {
    /// An endpoint over rings. Others access the memory of `regions`.
    pub fn new(rings: Rings<F>, regions: Arc<Mutex<Regions>>) -> Endpoint<F> {
        let nodes = rings.nodes();
        Endpoint {
            rings,
            matcher: Matcher::new(nodes),
            queues: (0..nodes).map(|_| VecDeque::new()).collect(),
            readings: (0..nodes).map(|_| None).collect(),
            writes: vec![Writing::default(); nodes],
            lost: vec![false; nodes],
            requests: HashMap::new(),
            next_request: 1,
            regions,
            completions: VecDeque::new(),
            scratch: vec![0; PAYLOAD],
            is_closed: false,
        }
    }

    /// Drops all operations under way: their memory is the application's again.
    pub fn close(&mut self) {
        let nodes = self.rings.nodes();
        self.is_closed = true;
        self.matcher = Matcher::new(nodes);
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.readings.iter_mut().for_each(|reading| *reading = None);
        self.requests.clear();
        self.completions.clear();
    }

    /// Its address.
    pub fn address(&self) -> Address {
        self.rings.address()
    }

    /// The next completion.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// Sends a message. With `acknowledged`, it completes when it is in place at the target.
    pub fn send(
        &mut self,
        to: Address,
        mut header: Header,
        source: Source,
        completion: Completion,
        acknowledged: bool,
    ) {
        if !self.connect(to, &completion) {
            return;
        }
        let completion = if acknowledged {
            header.wants_acknowledgement = true;
            header.request = self.add_request(to.node, UserBuffer::default(), completion);
            None
        } else {
            Some(completion)
        };
        self.submit(to.node, Outgoing::new(header, source, completion));
    }

    /// Sends a request. The target's reply is written to `reply`.
    pub fn send_request(
        &mut self,
        to: Address,
        mut header: Header,
        source: Source,
        reply: UserBuffer,
        completion: Completion,
    ) {
        if !self.connect(to, &completion) {
            return;
        }
        header.request = self.add_request(to.node, reply, completion);
        self.submit(to.node, Outgoing::new(header, source, None));
    }

    fn add_request(&mut self, node: NodeNumber, reply: UserBuffer, completion: Completion) -> u64 {
        let number = self.next_request;
        self.next_request += 1;
        self.requests.insert(number, Request { node, reply, completion });
        number
    }

    /// Prepares an operation on an endpoint. If the address is that of one that has ended, the operation fails.
    fn connect(&mut self, to: Address, completion: &Completion) -> bool {
        if !self.rings.knows(to) && to.node.index() < self.queues.len() {
            // What an endpoint before has sent is received first.
            self.handle_arrived(to.node);
        }
        if self.rings.connect(to) {
            self.end_earlier(to.node);
            return true;
        }
        self.completions.push_back(Completion { error: sys::FI_ECONNABORTED, ..*completion });
        false
    }

    fn submit(&mut self, to: NodeNumber, outgoing: Outgoing) {
        self.queues[to.index()].push_back(outgoing);
        self.transmit(to);
    }

    /// Posts a receive.
    pub fn receive(&mut self, receive: Receive<UserBuffer>) {
        let source = receive.pattern.source;
        let done = self.matcher.post(receive);
        self.received(done);
        if let Some(source) = source.filter(|source| self.lost.get(source.index()) == Some(&true)) {
            self.lose_receives(source);
        }
    }

    /// Posts a receive of a claimed message. False if nothing was claimed with its context.
    pub fn receive_claimed(&mut self, receive: Receive<UserBuffer>) -> bool {
        match self.matcher.post_claimed(receive) {
            Ok(done) => {
                self.received(done);
                true
            }
            Err(_) => false,
        }
    }

    /// Looks for a message, claims it, or drops it, and completes with what was found.
    pub fn peek(&mut self, pattern: &Pattern, context: usize, claim: bool, discard: bool) {
        self.progress();
        let found = match (claim, discard) {
            (true, _) => self.matcher.claim(pattern, context),
            (false, true) => self.discard(pattern, None),
            (false, false) => self.matcher.peek(pattern),
        };
        let mut completion =
            Completion::new(Side::Receive, context, sys::MS_FI_RECV | kind_flag(pattern.tagged));
        match found {
            Some(message) => describe(&mut completion, &message),
            None => {
                completion.error = sys::FI_ENOMSG;
                completion.tag = pattern.tag;
            }
        }
        self.completions.push_back(completion);
    }

    /// Drops a claimed message.
    pub fn discard_claimed(&mut self, pattern: &Pattern, context: usize) -> bool {
        let Some(message) = self.discard(pattern, Some(context)) else { return false };
        let mut completion =
            Completion::new(Side::Receive, context, sys::MS_FI_RECV | kind_flag(pattern.tagged));
        describe(&mut completion, &message);
        self.completions.push_back(completion);
        true
    }

    fn discard(&mut self, pattern: &Pattern, claimed: Option<usize>) -> Option<Message> {
        let Discarded { message, is_whole } = self.matcher.discard(pattern, claimed)?;
        if is_whole {
            self.acknowledge_message(&message);
        }
        Some(message)
    }

    /// Cancels a receive. It completes with `FI_ECANCELED`.
    pub fn cancel(&mut self, context: usize) {
        if let Some(receive) = self.matcher.cancel(context) {
            self.fail_receive(&receive, sys::FI_ECANCELED);
        }
    }

    fn fail_receive(&mut self, receive: &Receive<UserBuffer>, error: u32) {
        let Pattern { tagged, source, tag, .. } = receive.pattern;
        let completion = Completion::new(Side::Receive, receive.context, sys::MS_FI_RECV | kind_flag(tagged));
        self.completions.push_back(Completion { error, tag, source, ..completion });
    }

    /// The receives that only a lost node could complete fail.
    fn lose_receives(&mut self, node: NodeNumber) {
        for receive in self.matcher.lose(node) {
            self.fail_receive(&receive, sys::FI_ECONNABORTED);
        }
    }

    fn received(&mut self, done: Option<Received<UserBuffer>>) {
        let Some(Received { message, receive }) = done else { return };
        let flags = sys::MS_FI_RECV | kind_flag(message.tagged);
        let mut completion = Completion::new(Side::Receive, receive.context, flags);
        describe(&mut completion, &message);
        completion.signaled = receive.signaled;
        let size = receive.buffer.size();
        if message.total > size {
            completion.error = sys::FI_ETRUNC;
            (completion.length, completion.overflow) = (size, message.total - size);
        }
        self.completions.push_back(completion);
        self.acknowledge_message(&message);
    }

    fn acknowledge_message(&mut self, message: &Message) {
        if let Some(request) = message.request {
            self.acknowledge(message.source, request, 0);
        }
    }

    fn acknowledge(&mut self, node: NodeNumber, request: u64, error: u32) {
        let header = Header { request, data: error.into(), ..Header::new(Kind::Acknowledge) };
        self.reply(node, header, Vec::new());
    }

    fn reply(&mut self, node: NodeNumber, header: Header, bytes: Vec<u8>) {
        self.queues[node.index()].push_back(Outgoing::new(header, Source::Owned(bytes), None));
    }

    /// Handles what arrived and sends what can be sent. Returns whether there was anything.
    pub fn progress(&mut self) -> bool {
        if self.is_closed {
            return false;
        }
        let mut worked = false;
        self.rings.look_for_lost_puts();
        for at in 0..self.queues.len() {
            let node = NodeNumber(at as u16);
            // In this order: the last messages of a lost node are here.
            let is_lost = self.rings.is_lost(node);
            let (handled, is_drained) = self.handle_arrived(node);
            let is_lost = is_lost && is_drained;
            if is_lost && !self.lost[at] {
                self.fail_node(node, sys::FI_ECONNABORTED);
                self.lose_receives(node);
                worked = true;
            }
            self.lost[at] = is_lost;
            if is_drained && self.rings.take_ended(node) {
                worked |= self.end_node(node);
            }
            worked |= handled | self.rings.recover(node) | self.transmit(node);
        }
        worked
    }

    /// Handles what arrived from a node, at most what fits into its ring. Returns whether there was anything, and whether
    /// nothing is left.
    fn handle_arrived(&mut self, node: NodeNumber) -> (bool, bool) {
        let mut worked = false;
        for _ in 0..SLOTS {
            if self.readings[node.index()].is_some() {
                self.continue_reading(node);
                return (true, false);
            }
            let next = self.rings.peek(node);
            self.end_earlier(node);
            let Some(header) = next else { return (worked, true) };
            worked = true;
            self.handle(node, &header);
            self.rings.free(node);
        }
        (worked, false)
    }

    /// If a node has another endpoint, what waits for the one before fails.
    fn end_earlier(&mut self, node: NodeNumber) {
        if self.rings.take_reopened(node) {
            self.end_node(node);
            self.lost[node.index()] = false;
        }
    }

    /// The endpoint of a node has ended, or this node cannot reach any: nothing more goes there or comes from there.
    fn end_node(&mut self, node: NodeNumber) -> bool {
        let failed = self.fail_node(node, sys::FI_ECONNABORTED);
        self.interrupt(node);
        let is_reading = self.readings[node.index()].take().is_some();
        let queue = std::mem::take(&mut self.queues[node.index()]);
        failed || is_reading || !queue.is_empty()
    }

    /// Sends messages to a node while it has slots.
    fn transmit(&mut self, node: NodeNumber) -> bool {
        let mut worked = false;
        for _ in 0..SLOTS {
            let Some(outgoing) = self.queues[node.index()].front_mut() else { return worked };
            if self.lost[node.index()] {
                return self.fail_node(node, sys::FI_ECONNABORTED) | worked;
            }
            match self.rings.is_ready(node) {
                Ok(true) => {}
                Ok(false) => return worked,
                Err(error) => return self.refused(node, error) | worked,
            }
            let length = (outgoing.header.total - outgoing.sent).min(PAYLOAD as u64);
            let (offset, source) = (outgoing.sent, &outgoing.source);
            let header = Header { offset, length: length as u32, ..outgoing.header };
            let result = self.rings.send(node, header, |slot| source.read(offset, length as usize, slot));
            if let Err(error) = result {
                return self.refused(node, error) | worked;
            }
            outgoing.sent += length;
            worked = true;
            if outgoing.sent == outgoing.header.total
                && let Some(done) = self.queues[node.index()].pop_front()
            {
                self.completions.extend(done.completion);
            }
        }
        worked
    }

    /// A message to a node was refused. Returns whether what waits for the node fails: one that seems lost may come back.
    fn refused(&mut self, node: NodeNumber, error: FabricError) -> bool {
        match error {
            FabricError::NodeLost { .. } if self.rings.seems_lost(node) => false,
            FabricError::NodeLost { node: lost } if lost == node && node != self.address().node => false,
            FabricError::NoRoute { .. } => self.fail_node(node, sys::FI_EHOSTUNREACH),
            _ => self.end_node(node),
        }
    }

    /// A node is lost: all that waits for it here fails, but receives. It may come back, and then gets what it waits for itself.
    /// Returns whether there was anything.
    fn fail_node(&mut self, node: NodeNumber, code: u32) -> bool {
        let before = self.completions.len();
        let queue = &mut self.queues[node.index()];
        let is_begun = queue.front().is_some_and(Outgoing::is_begun);
        let (own, mut answers): (VecDeque<_>, VecDeque<_>) = queue.drain(..).partition(Outgoing::is_own);
        if is_begun {
            let header = Header::new(Kind::Interrupt);
            answers.push_front(Outgoing::new(header, Source::Owned(Vec::new()), None));
        }
        self.queues[node.index()] = answers;
        let failed = !own.is_empty();
        let completions = own.into_iter().filter_map(|outgoing| outgoing.completion);
        self.completions.extend(completions.map(|completion| Completion { error: code, ..completion }));
        if let Some(receive) = self.matcher.suspend(node) {
            self.fail_receive(&receive, sys::FI_ECONNABORTED);
        }
        let requests: Vec<u64> = (self.requests.iter())
            .filter(|(_, request)| request.node == node)
            .map(|(&number, _)| number)
            .collect();
        requests.into_iter().for_each(|number| self.end_request(node, number, code));
        failed || self.completions.len() > before
    }

    /// The message of a node that is under way ends here.
    fn interrupt(&mut self, node: NodeNumber) {
        if let Some(receive) = self.matcher.interrupt(node) {
            self.fail_receive(&receive, sys::FI_ECONNABORTED);
        }
    }

    fn handle(&mut self, node: NodeNumber, header: &Header) {
        let mut bytes = std::mem::take(&mut self.scratch);
        let length = header.length as usize;
        // A header's length is at most that of a slot.
        if self.rings.load(node, 0, &mut bytes[..length]).is_ok() {
            let data = &bytes[..length];
            match header.kind {
                Kind::Message | Kind::Tagged => {
                    if header.offset == 0 {
                        self.interrupt(node);
                    }
                    match self.matcher.arrive(node, header, data) {
                        Some(Arrived::Discarded(message)) => self.acknowledge_message(&message),
                        Some(Arrived::Received(done)) => self.received(Some(done)),
                        Some(Arrived::Failed(message)) => {
                            if let Some(request) = message.request {
                                self.acknowledge(node, request, sys::FI_ECONNABORTED);
                            }
                        }
                        None => {}
                    }
                }
                Kind::Write => self.handle_write(node, header, data),
                Kind::ReadRequest => self.handle_read(node, header),
                Kind::Atomic => self.handle_atomic(node, header, data),
                Kind::Reply => self.handle_reply(node, header, data),
                Kind::Acknowledge => self.end_request(node, header.request, header.data as u32),
                Kind::Interrupt => self.interrupt(node),
            }
        }
        self.scratch = bytes;
    }

    fn handle_reply(&mut self, node: NodeNumber, header: &Header, data: &[u8]) {
        let Some(request) = self.requests.get_mut(&header.request) else { return };
        if request.node == node {
            request.reply.write(header.offset, data);
            if header.is_last() {
                self.end_request(node, header.request, 0);
            }
        }
    }

    fn end_request(&mut self, node: NodeNumber, number: u64, error: u32) {
        if self.requests.get(&number).is_some_and(|request| request.node == node)
            && let Some(request) = self.requests.remove(&number)
        {
            self.completions.push_back(Completion { error, ..request.completion });
        }
    }

    /// Waits until everything sent is in place, or its node is lost.
    pub fn flush(&mut self) {
        let start = Instant::now();
        while !self.rings.flush() && start.elapsed() < CLOSING {
            std::thread::sleep(Duration::from_millis(1));
            self.progress();
        }
    }
}

fn kind_flag(tagged: bool) -> u64 {
    if tagged { sys::MS_FI_TAGGED } else { sys::MS_FI_MSG }
}

fn describe(completion: &mut Completion, message: &Message) {
    completion.length = message.total;
    completion.tag = message.tag;
    completion.source = Some(message.source);
    if let Some(data) = message.data {
        completion.data = data;
        completion.flags |= sys::MS_FI_REMOTE_CQ_DATA;
    }
}
