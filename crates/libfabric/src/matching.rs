//! Matching of messages with receives, in the order of both: tags with ignored bits, and sources.
//!
//! A message that no receive expects is kept until one does. Messages arrive in parts; of each node at most one is under way.

use std::collections::VecDeque;

use millstream_torus_core::NodeNumber;

use crate::header::{Header, Kind};

/// Memory of a receive.
pub trait ReceiveBuffer {
    /// Its size (bytes).
    fn size(&self) -> u64;
    /// Writes bytes. Those beyond the size are dropped.
    fn write(&mut self, offset: u64, bytes: &[u8]);
}

/// What a receive or a peek accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Only messages with a tag.
    pub tagged: bool,
    /// Only of this node.
    pub source: Option<NodeNumber>,
    /// The tag.
    pub tag: u64,
    /// Bits of the tag that may differ.
    pub ignore: u64,
}

impl Pattern {
    fn accepts(&self, message: &Message) -> bool {
        self.tagged == message.tagged
            && self.source.is_none_or(|source| source == message.source)
            && (!self.tagged || (self.tag ^ message.tag) & !self.ignore == 0)
    }
}

/// A receive that waits for a message.
#[derive(Debug)]
pub struct Receive<B> {
    /// Where the message goes.
    pub buffer: B,
    /// Context of the operation.
    pub context: usize,
    /// Whether its completion is written to the queue.
    pub signaled: bool,
    /// What it accepts.
    pub pattern: Pattern,
}

/// What is known of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its node.
    pub source: NodeNumber,
    /// Whether it has a tag.
    pub tagged: bool,
    /// The tag.
    pub tag: u64,
    /// Data for the completion.
    pub data: Option<u64>,
    /// Its length (bytes).
    pub total: u64,
    /// The source's request, if it waits for an acknowledgement.
    pub request: Option<u64>,
}

impl Message {
    fn of(source: NodeNumber, header: &Header) -> Message {
        Message {
            source,
            tagged: header.kind == Kind::Tagged,
            tag: header.tag,
            data: header.has_data.then_some(header.data),
            total: header.total,
            request: header.wants_acknowledgement.then_some(header.request),
        }
    }
}

/// A message and the receive that it matched.
#[derive(Debug)]
pub struct Received<B> {
    /// The message.
    pub message: Message,
    /// The receive.
    pub receive: Receive<B>,
}

/// How a message ended.
#[derive(Debug)]
pub enum Arrived<B> {
    /// A receive has it.
    Received(Received<B>),
    /// It was dropped.
    Discarded(Message),
    /// Its receive has failed before.
    Failed(Message),
}

/// A message that was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discarded {
    /// The message.
    pub message: Message,
    /// Whether all of it had arrived. Otherwise [`Matcher::arrive`] returns it at its end.
    pub is_whole: bool,
}

#[derive(Debug)]
struct Unexpected {
    id: u64,
    message: Message,
    bytes: Vec<u8>,
    /// The context of the peek that claimed it.
    claimed: Option<usize>,
    /// Its node is lost, or was, and the rest has not come yet: no receive gets it.
    suspended: bool,
}

impl Unexpected {
    fn is_free(&self) -> bool {
        self.claimed.is_none() && !self.suspended
    }
}

#[derive(Debug)]
enum Arriving<B> {
    Matched(Message, Receive<B>),
    Unexpected(u64),
    /// The rest is dropped.
    Discarded(Message),
    /// Its receive has failed, and the rest is dropped.
    Failed(Message),
}

/// Receives and messages of an endpoint.
#[derive(Debug)]
pub struct Matcher<B> {
    posted: VecDeque<Receive<B>>,
    unexpected: VecDeque<Unexpected>,
    arriving: Vec<Option<Arriving<B>>>,
    next: u64,
}

impl<B: ReceiveBuffer> Matcher<B> {
    /// For messages of this many nodes.
    #[must_use]
    pub fn new(nodes: usize) -> Matcher<B> {
        Matcher {
            posted: VecDeque::new(),
            unexpected: VecDeque::new(),
            arriving: (0..nodes).map(|_| None).collect(),
            next: 0,
        }
    }

    /// Posts a receive. Returns the message if it is here already.
    pub fn post(&mut self, receive: Receive<B>) -> Option<Received<B>> {
        let found = self.find(&receive.pattern);
        match found {
            Some(at) => self.take(at, receive),
            None => {
                self.posted.push_back(receive);
                None
            }
        }
    }

    fn find(&self, pattern: &Pattern) -> Option<usize> {
        self.unexpected
            .iter()
            .position(|unexpected| unexpected.is_free() && pattern.accepts(&unexpected.message))
    }

    /// Gives an unexpected message to a receive.
    fn take(&mut self, at: usize, mut receive: Receive<B>) -> Option<Received<B>> {
        let unexpected = self.unexpected.remove(at)?;
        receive.buffer.write(0, &unexpected.bytes);
        let message = unexpected.message;
        if unexpected.bytes.len() as u64 == message.total {
            return Some(Received { message, receive });
        }
        self.arriving[message.source.index()] = Some(Arriving::Matched(message, receive));
        None
    }

    /// Looks for a message without taking it.
    #[must_use]
    pub fn peek(&self, pattern: &Pattern) -> Option<Message> {
        self.find(pattern).map(|at| self.unexpected[at].message)
    }

    /// Keeps the message that [`Matcher::peek`] finds for [`Matcher::post_claimed`].
    pub fn claim(&mut self, pattern: &Pattern, context: usize) -> Option<Message> {
        let at = self.find(pattern)?;
        self.unexpected[at].claimed = Some(context);
        Some(self.unexpected[at].message)
    }

    /// Posts a receive of a claimed message. `None` inside if it is not whole yet, an error without such a message.
    ///
    /// # Errors
    /// The receive, if nothing was claimed with its context.
    pub fn post_claimed(&mut self, receive: Receive<B>) -> Result<Option<Received<B>>, Receive<B>> {
        let claimed = Some(receive.context);
        match self.unexpected.iter().position(|unexpected| unexpected.claimed == claimed) {
            Some(at) => Ok(self.take(at, receive)),
            None => Err(receive),
        }
    }

    /// Drops the message that [`Matcher::peek`] finds, or the one claimed with this context.
    pub fn discard(&mut self, pattern: &Pattern, claimed: Option<usize>) -> Option<Discarded> {
        let at = match claimed {
            Some(_) => self.unexpected.iter().position(|unexpected| unexpected.claimed == claimed),
            None => self.find(pattern),
        }?;
        let unexpected = self.unexpected.remove(at)?;
        let message = unexpected.message;
        let is_whole = unexpected.bytes.len() as u64 == message.total;
        if !is_whole {
            self.arriving[message.source.index()] = Some(Arriving::Discarded(message));
        }
        Some(Discarded { message, is_whole })
    }

    /// The rest of the message of a node that is under way does not come. Returns the message's receive.
    pub fn interrupt(&mut self, source: NodeNumber) -> Option<Receive<B>> {
        match self.arriving.get_mut(source.index())?.take()? {
            Arriving::Matched(_, receive) => Some(receive),
            Arriving::Unexpected(id) => {
                self.unexpected.retain(|unexpected| unexpected.id != id);
                None
            }
            Arriving::Discarded(_) | Arriving::Failed(_) => None,
        }
    }

    /// The rest of the message of a node that is under way comes only if the node comes back. Returns the message's receive.
    /// Without one, the message waits for its rest, and a receive for another message.
    pub fn suspend(&mut self, source: NodeNumber) -> Option<Receive<B>> {
        let current = self.arriving.get_mut(source.index())?;
        match current.take()? {
            Arriving::Matched(message, receive) => {
                *current = Some(Arriving::Failed(message));
                return Some(receive);
            }
            Arriving::Unexpected(id) => {
                *current = Some(Arriving::Unexpected(id));
                let at = self.unexpected.iter().position(|unexpected| unexpected.id == id)?;
                self.unexpected[at].suspended = true;
                if self.unexpected[at].claimed.is_some() {
                    // Its receive is known, and could not end.
                    *current = self.unexpected.remove(at).map(|lost| Arriving::Failed(lost.message));
                }
            }
            other => *current = Some(other),
        }
        None
    }

    /// A node is lost. Returns the receives that only it could complete. Its whole messages are still here.
    pub fn lose(&mut self, source: NodeNumber) -> Vec<Receive<B>> {
        let mut receives: Vec<_> = self.suspend(source).into_iter().collect();
        for receive in std::mem::take(&mut self.posted) {
            if receive.pattern.source == Some(source) {
                receives.push(receive);
            } else {
                self.posted.push_back(receive);
            }
        }
        receives
    }

    /// Takes a receive back.
    pub fn cancel(&mut self, context: usize) -> Option<Receive<B>> {
        let at = self.posted.iter().position(|receive| receive.context == context)?;
        self.posted.remove(at)
    }

    /// A part of a message arrived. Returns the message when it is whole, and expected or dropped. What was under way before is
    /// at its end, or was taken by [`Matcher::interrupt`].
    pub fn arrive(&mut self, source: NodeNumber, header: &Header, bytes: &[u8]) -> Option<Arrived<B>> {
        let current = self.arriving.get_mut(source.index())?;
        let arriving = if header.offset == 0 {
            *current = None;
            self.begin(Message::of(source, header))
        } else {
            current.take()?
        };
        match arriving {
            Arriving::Matched(message, mut receive) => {
                receive.buffer.write(header.offset, bytes);
                if header.is_last() {
                    return Some(Arrived::Received(Received { message, receive }));
                }
                self.arriving[source.index()] = Some(Arriving::Matched(message, receive));
            }
            Arriving::Unexpected(id) => {
                let at = self.unexpected.iter().rposition(|unexpected| unexpected.id == id)?;
                let unexpected = &mut self.unexpected[at];
                unexpected.bytes.extend_from_slice(bytes);
                let was_suspended = std::mem::take(&mut unexpected.suspended);
                if !header.is_last() {
                    self.arriving[source.index()] = Some(Arriving::Unexpected(id));
                }
                if was_suspended {
                    let message = unexpected.message;
                    let receive = self.take_posted(&message)?;
                    return self.take(at, receive).map(Arrived::Received);
                }
            }
            Arriving::Discarded(message) => {
                if header.is_last() {
                    return Some(Arrived::Discarded(message));
                }
                self.arriving[source.index()] = Some(Arriving::Discarded(message));
            }
            Arriving::Failed(message) => {
                if header.is_last() {
                    return Some(Arrived::Failed(message));
                }
                self.arriving[source.index()] = Some(Arriving::Failed(message));
            }
        }
        None
    }

    /// The first receive that accepts a message.
    fn take_posted(&mut self, message: &Message) -> Option<Receive<B>> {
        let at = self.posted.iter().position(|receive| receive.pattern.accepts(message))?;
        self.posted.remove(at)
    }

    fn begin(&mut self, message: Message) -> Arriving<B> {
        if let Some(receive) = self.take_posted(&message) {
            return Arriving::Matched(message, receive);
        }
        let id = self.next;
        self.next += 1;
        self.unexpected.push_back(Unexpected {
            id,
            message,
            bytes: Vec::new(),
            claimed: None,
            suspended: false,
        });
        Arriving::Unexpected(id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl ReceiveBuffer for Vec<u8> {
        fn size(&self) -> u64 {
            self.len() as u64
        }

        fn write(&mut self, offset: u64, bytes: &[u8]) {
            let start = (offset as usize).min(self.len());
            let end = (start + bytes.len()).min(self.len());
            self[start..end].copy_from_slice(&bytes[..end - start]);
        }
    }

    fn receive(context: usize, source: Option<u16>, tag: u64, ignore: u64) -> Receive<Vec<u8>> {
        let pattern = Pattern { tagged: true, source: source.map(NodeNumber), tag, ignore };
        Receive { buffer: vec![0; 64], context, signaled: true, pattern }
    }

    fn header(tag: u64, total: u64, offset: u64, length: u32) -> Header {
        Header { tag, total, offset, length, ..Header::new(Kind::Tagged) }
    }

    fn received(arrived: Option<Arrived<Vec<u8>>>) -> Option<Received<Vec<u8>>> {
        arrived.map(|arrived| match arrived {
            Arrived::Received(received) => received,
            Arrived::Discarded(message) | Arrived::Failed(message) => panic!("{message:?} was dropped"),
        })
    }

    /// What a plain list says: the oldest receive that accepts a message gets it, else the message waits.
    #[derive(Default)]
    struct Reference {
        posted: Vec<(usize, Option<u16>, u64, u64)>,
        waiting: Vec<(u16, u64, u64)>,
        pairs: Vec<(usize, u64)>,
    }

    impl Reference {
        fn accepts(receive: &(usize, Option<u16>, u64, u64), source: u16, tag: u64) -> bool {
            receive.1.is_none_or(|only| only == source) && (receive.2 ^ tag) & !receive.3 == 0
        }

        fn message(&mut self, source: u16, tag: u64, id: u64) {
            match self.posted.iter().position(|receive| Reference::accepts(receive, source, tag)) {
                Some(at) => self.pairs.push((self.posted.remove(at).0, id)),
                None => self.waiting.push((source, tag, id)),
            }
        }

        fn receive(&mut self, receive: (usize, Option<u16>, u64, u64)) {
            match self.waiting.iter().position(|&(source, tag, _)| Reference::accepts(&receive, source, tag))
            {
                Some(at) => self.pairs.push((receive.0, self.waiting.remove(at).2)),
                None => self.posted.push(receive),
            }
        }
    }

    proptest! {
        /// Whole messages of up to 3 nodes with few tags, in any order with receives.
        #[test]
        fn pairs_are_those_of_a_plain_list(steps in prop::collection::vec((any::<bool>(), 0..4_u16, 0..3_u64, 0..3_u64), 1..60)) {
            let (mut matcher, mut reference) = (Matcher::new(3), Reference::default());
            let mut pairs = Vec::new();
            for (number, (is_message, source, tag, ignore)) in steps.into_iter().enumerate() {
                let done = if is_message {
                    let source = source % 3;
                    reference.message(source, tag, number as u64);
                    let bytes = (number as u64).to_le_bytes();
                    received(matcher.arrive(NodeNumber(source), &header(tag, 8, 0, 8), &bytes))
                } else {
                    let source = (source < 3).then_some(source);
                    reference.receive((number, source, tag, ignore));
                    matcher.post(receive(number, source, tag, ignore))
                };
                pairs.extend(done.map(|done| {
                    let id = u64::from_le_bytes(done.receive.buffer[..8].try_into().unwrap());
                    (done.receive.context, id)
                }));
            }
            prop_assert_eq!(pairs, reference.pairs);
        }
    }

    #[test]
    fn a_message_in_parts_may_be_matched_between_them() {
        let mut matcher = Matcher::new(1);
        assert!(matcher.arrive(NodeNumber(0), &header(1, 6, 0, 2), b"ab").is_none());
        assert!(matcher.post(receive(7, None, 1, 0)).is_none());
        assert!(matcher.arrive(NodeNumber(0), &header(1, 6, 2, 2), b"cd").is_none());
        let done = received(matcher.arrive(NodeNumber(0), &header(1, 6, 4, 2), b"ef")).unwrap();
        assert_eq!((&done.receive.buffer[..6], done.receive.context), (&b"abcdef"[..], 7));
    }

    #[test]
    fn a_claimed_message_is_for_its_claim_only() {
        let mut matcher = Matcher::new(1);
        let any = Pattern { tagged: true, source: None, tag: 0, ignore: u64::MAX };
        assert_eq!(matcher.peek(&any), None);
        matcher.arrive(NodeNumber(0), &header(1, 2, 0, 2), b"ab");
        assert_eq!(matcher.claim(&any, 5).map(|message| message.total), Some(2));
        assert_eq!(matcher.peek(&any), None);
        assert!(matcher.post(receive(6, None, 1, 0)).is_none());
        assert!(matcher.post_claimed(receive(4, None, 1, 0)).is_err());
        let done = matcher.post_claimed(receive(5, None, 1, 0)).unwrap().unwrap();
        assert_eq!(&done.receive.buffer[..2], b"ab");
        assert_eq!(matcher.cancel(6).map(|receive| receive.context), Some(6));
        assert!(matcher.cancel(6).is_none());
    }

    #[test]
    fn a_dropped_message_is_reported_at_its_end() {
        let mut matcher: Matcher<Vec<u8>> = Matcher::new(1);
        let any = Pattern { tagged: true, source: None, tag: 0, ignore: u64::MAX };
        assert!(matcher.arrive(NodeNumber(0), &header(1, 4, 0, 2), b"ab").is_none());
        let discarded = matcher.discard(&any, None).unwrap();
        assert!(!discarded.is_whole);
        let end = matcher.arrive(NodeNumber(0), &header(1, 4, 2, 2), b"cd");
        assert!(matches!(end, Some(Arrived::Discarded(message)) if message == discarded.message));
        matcher.arrive(NodeNumber(0), &header(2, 2, 0, 2), b"ef");
        assert!(matcher.discard(&any, None).is_some_and(|discarded| discarded.is_whole));
        assert_eq!(matcher.peek(&any), None);
    }

    #[test]
    fn a_lost_node_leaves_its_whole_messages_and_no_receive_of_its_own() {
        let mut matcher = Matcher::new(2);
        matcher.arrive(NodeNumber(1), &header(1, 2, 0, 2), b"ab");
        matcher.arrive(NodeNumber(1), &header(2, 4, 0, 2), b"cd");
        assert!(matcher.post(receive(5, Some(1), 9, 0)).is_none());
        assert!(matcher.post(receive(6, Some(0), 9, 0)).is_none());
        assert!(matcher.post(receive(7, None, 9, 0)).is_none());
        // The second message has matched, and is under way.
        assert!(matcher.post(receive(8, None, 2, 0)).is_none());
        let lost: Vec<_> = matcher.lose(NodeNumber(1)).iter().map(|receive| receive.context).collect();
        assert_eq!(lost, [8, 5]);
        let done = matcher.post(receive(9, Some(1), 1, 0)).unwrap();
        assert_eq!(&done.receive.buffer[..2], b"ab");
        // A message under way that nobody expects is dropped.
        matcher.arrive(NodeNumber(1), &header(3, 4, 0, 2), b"cd");
        assert!(matcher.lose(NodeNumber(1)).is_empty());
        assert_eq!(matcher.peek(&Pattern { tagged: true, source: None, tag: 3, ignore: 0 }), None);
        assert_eq!(matcher.cancel(6).map(|receive| receive.context), Some(6));
    }
}
