//! An endpoint as a machine over message rings: sends in order, receives, remote memory, atomic operations.
//!
//! It makes progress only when the application reads a completion queue or posts an operation (`FI_PROGRESS_MANUAL`).

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millstream_fabric::{Fabric, FabricError};
use millstream_torus_core::NodeNumber;

use crate::atomic::{self, AtomicKind};
use crate::header::{Header, Kind};
use crate::matching::{Matcher, Message, Pattern, Receive, ReceiveBuffer, Received};
use crate::memory::{Refused, Regions, UserBuffer};
use crate::ring::{Address, PAYLOAD, Rings};
use crate::sys;

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
    requests: HashMap<u64, Request>,
    next_request: u64,
    regions: Arc<Mutex<Regions>>,
    completions: VecDeque<Completion>,
    scratch: Vec<u8>,
}

fn lock(regions: &Mutex<Regions>) -> MutexGuard<'_, Regions> {
    regions.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error_of(refused: Refused) -> u32 {
    match refused {
        Refused::Key => sys::FI_EKEYREJECTED,
        Refused::Access => sys::FI_EACCES,
        Refused::Bounds => sys::FI_EINVAL,
    }
}

impl<F: Fabric> Endpoint<F> {
    /// An endpoint over rings. Others access the memory of `regions`.
    pub fn new(rings: Rings<F>, regions: Arc<Mutex<Regions>>) -> Endpoint<F> {
        let nodes = rings.nodes();
        Endpoint {
            rings,
            matcher: Matcher::new(nodes),
            queues: (0..nodes).map(|_| VecDeque::new()).collect(),
            requests: HashMap::new(),
            next_request: 1,
            regions,
            completions: VecDeque::new(),
            scratch: vec![0; PAYLOAD],
        }
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
        header.total = source.size();
        let completion = if acknowledged {
            header.wants_acknowledgement = true;
            header.request = self.add_request(to.node, UserBuffer::default(), completion);
            None
        } else {
            Some(completion)
        };
        self.submit(to, Outgoing { header, source, sent: 0, completion });
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
        header.total = source.size();
        header.request = self.add_request(to.node, reply, completion);
        self.submit(to, Outgoing { header, source, sent: 0, completion: None });
    }

    fn add_request(&mut self, node: NodeNumber, reply: UserBuffer, completion: Completion) -> u64 {
        let number = self.next_request;
        self.next_request += 1;
        self.requests.insert(number, Request { node, reply, completion });
        number
    }

    fn submit(&mut self, to: Address, outgoing: Outgoing) {
        self.rings.add_peer(to);
        let Some(queue) = self.queues.get_mut(to.node.index()) else { return };
        queue.push_back(outgoing);
        self.transmit(to.node);
    }

    /// Posts a receive.
    pub fn receive(&mut self, receive: Receive<UserBuffer>) {
        let done = self.matcher.post(receive);
        self.received(done);
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
            (false, true) => self.matcher.discard(pattern, None),
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
        let Some(message) = self.matcher.discard(pattern, Some(context)) else { return false };
        let mut completion =
            Completion::new(Side::Receive, context, sys::MS_FI_RECV | kind_flag(pattern.tagged));
        describe(&mut completion, &message);
        self.completions.push_back(completion);
        true
    }

    /// Cancels a receive. It completes with `FI_ECANCELED`.
    pub fn cancel(&mut self, context: usize) {
        if let Some(receive) = self.matcher.cancel(context) {
            let flags = sys::MS_FI_RECV | kind_flag(receive.pattern.tagged);
            let completion = Completion::new(Side::Receive, context, flags);
            self.completions.push_back(Completion {
                error: sys::FI_ECANCELED,
                tag: receive.pattern.tag,
                ..completion
            });
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
        if let Some(request) = message.request {
            self.acknowledge(message.source, request, 0);
        }
    }

    fn acknowledge(&mut self, node: NodeNumber, request: u64, error: u32) {
        let header = Header { request, data: error.into(), ..Header::new(Kind::Acknowledge) };
        self.reply(node, header, Vec::new());
    }

    fn reply(&mut self, node: NodeNumber, mut header: Header, bytes: Vec<u8>) {
        header.total = bytes.len() as u64;
        self.queues[node.index()].push_back(Outgoing {
            header,
            source: Source::Owned(bytes),
            sent: 0,
            completion: None,
        });
    }

    /// Handles what arrived and sends what can be sent. Returns whether there was anything.
    pub fn progress(&mut self) -> bool {
        let mut worked = false;
        for node in 0..self.queues.len() {
            let node = NodeNumber(node as u16);
            while let Some(header) = self.rings.peek(node) {
                worked = true;
                self.handle(node, &header);
                self.rings.free(node);
            }
            worked |= self.transmit(node);
        }
        worked
    }

    /// Sends messages to a node while it has slots.
    fn transmit(&mut self, node: NodeNumber) -> bool {
        let mut worked = false;
        while let Some(outgoing) = self.queues[node.index()].front_mut() {
            if !self.rings.is_ready(node) {
                return worked;
            }
            worked = true;
            let length = (outgoing.header.total - outgoing.sent).min(PAYLOAD as u64);
            let (offset, source) = (outgoing.sent, &outgoing.source);
            let header = Header { offset, length: length as u32, ..outgoing.header };
            let result = self.rings.send(node, header, |slot| source.read(offset, length as usize, slot));
            outgoing.sent += length;
            if let Err(error) = result {
                self.fail_node(node, error);
                return true;
            }
            if outgoing.sent == outgoing.header.total
                && let Some(done) = self.queues[node.index()].pop_front()
            {
                self.completions.extend(done.completion);
            }
        }
        worked
    }

    /// A node is lost: all that waits for it fails.
    fn fail_node(&mut self, node: NodeNumber, error: FabricError) {
        let code = match error {
            FabricError::NoRoute { .. } => sys::FI_EHOSTUNREACH,
            _ => sys::FI_ECONNABORTED,
        };
        let failed = self.queues[node.index()].drain(..).filter_map(|outgoing| outgoing.completion);
        self.completions.extend(failed.map(|completion| Completion { error: code, ..completion }));
        let requests: Vec<u64> = (self.requests.iter())
            .filter(|(_, request)| request.node == node)
            .map(|(&number, _)| number)
            .collect();
        requests.into_iter().for_each(|number| self.end_request(node, number, code));
    }

    fn handle(&mut self, node: NodeNumber, header: &Header) {
        let mut bytes = std::mem::take(&mut self.scratch);
        let length = header.length as usize;
        // A header's length is at most that of a slot.
        if self.rings.load(node, 0, &mut bytes[..length]).is_ok() {
            let data = &bytes[..length];
            match header.kind {
                Kind::Message | Kind::Tagged => {
                    let done = self.matcher.arrive(node, header, data);
                    self.received(done);
                }
                Kind::Write => self.handle_write(node, header, data),
                Kind::ReadRequest => self.handle_read(node, header),
                Kind::Atomic => self.handle_atomic(node, header, data),
                Kind::Reply => self.handle_reply(node, header, data),
                Kind::Acknowledge => self.end_request(node, header.request, header.data as u32),
            }
        }
        self.scratch = bytes;
    }

    fn handle_write(&mut self, node: NodeNumber, header: &Header, data: &[u8]) {
        let whole = lock(&self.regions).range(header.key, header.tag, header.total, true);
        let error = match whole {
            Ok(mut target) => {
                target.write(header.offset, data);
                0
            }
            Err(refused) => error_of(refused),
        };
        if !header.is_last() {
            return;
        }
        if header.wants_acknowledgement {
            self.acknowledge(node, header.request, error);
        }
        if error == 0 && header.has_data {
            let flags = sys::MS_FI_REMOTE_WRITE | sys::MS_FI_RMA | sys::MS_FI_REMOTE_CQ_DATA;
            let completion = Completion::new(Side::Receive, 0, flags);
            let (length, data) = (header.total, header.data);
            self.completions.push_back(Completion { length, data, source: Some(node), ..completion });
        }
    }

    fn handle_read(&mut self, node: NodeNumber, header: &Header) {
        let range = lock(&self.regions).range(header.key, header.tag, header.data, false);
        match range {
            Ok(target) => {
                let mut bytes = Vec::new();
                target.read(0, header.data as usize, &mut bytes);
                self.reply(node, Header { request: header.request, ..Header::new(Kind::Reply) }, bytes);
            }
            Err(refused) => self.acknowledge(node, header.request, error_of(refused)),
        }
    }

    fn handle_atomic(&mut self, node: NodeNumber, header: &Header, data: &[u8]) {
        let kind = match header.data {
            0 => AtomicKind::Write,
            1 => AtomicKind::Fetch,
            _ => AtomicKind::Compare,
        };
        match self.apply_atomic(header, data, kind) {
            Ok(_) if kind == AtomicKind::Write => self.acknowledge(node, header.request, 0),
            Ok(old) => self.reply(node, Header { request: header.request, ..Header::new(Kind::Reply) }, old),
            Err(error) => self.acknowledge(node, header.request, error),
        }
    }

    /// Carries out an atomic operation. The data are operands, then values to compare with. Returns the previous values.
    fn apply_atomic(&self, header: &Header, data: &[u8], kind: AtomicKind) -> Result<Vec<u8>, u32> {
        let (datatype, operation) = (header.datatype.into(), header.operation.into());
        if !atomic::is_supported(datatype, operation, kind) {
            return Err(sys::FI_EOPNOTSUPP);
        }
        let size = atomic::size_of(datatype).ok_or(sys::FI_EOPNOTSUPP)?;
        let operands = if kind == AtomicKind::Compare { data.len() / 2 } else { data.len() };
        if header.total != data.len() as u64 || operands % size != 0 {
            return Err(sys::FI_EINVAL);
        }
        let mut target =
            lock(&self.regions).range(header.key, header.tag, operands as u64, true).map_err(error_of)?;
        let mut old = Vec::new();
        target.read(0, operands, &mut old);
        let mut new = old.clone();
        let compare = if kind == AtomicKind::Compare { &data[operands..] } else { data };
        let values = new.chunks_exact_mut(size).zip(data.chunks_exact(size)).zip(compare.chunks_exact(size));
        for ((value, operand), compare) in values {
            atomic::apply(datatype, operation, value, operand, compare).ok_or(sys::FI_EOPNOTSUPP)?;
        }
        target.write(0, &new);
        Ok(old)
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

    /// Waits until everything sent is in place.
    pub fn flush(&mut self) {
        self.rings.flush();
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
