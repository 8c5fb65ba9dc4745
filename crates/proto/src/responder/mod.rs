//! The responder: takes requests, carries them out through [`Memory`], and answers (9.7.4, 9.7.5, 9.8.2).
//!
//! - [`execute`]: a request whose turn it is;
//! - [`kept`]: one that comes before its turn;
//! - [`duplicate`]: one that was carried out before;
//! - [`answer`]: acknowledgements and responses to be sent;
//! - [`unreliable`]: the same for unreliable connections, which answer nothing.

mod answer;
mod duplicate;
mod execute;
mod kept;
mod unreliable;

use std::collections::VecDeque;

use millstream_wire::{Msn, NakCode, Operation, Packet, Position, Rkey, Srqn, Syndrome};

use crate::config::Config;
use crate::early::Early;
use crate::event::{Event, Fault, Received, ReceivedKind, Status};
use crate::memory::Memory;
use crate::request::ReceiveId;
use crate::sequence::Sequence;
use answer::Answer;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Carried out.
    Executed,
    /// Carried out before; answered again, or left unanswered if the answer is no longer known.
    Duplicate,
    /// Something before it is missing.
    OutOfSequence,
    /// No receive request for it.
    NotReady,
    /// Dropped without a word.
    Dropped,
}

/// A message of several packets that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Send {
        receive: ReceiveId,
        offset: u32,
    },
    /// The rest of a WRITE.
    Write {
        rkey: Rkey,
        va: u64,
        left: u32,
        len: u32,
    },
}

/// A READ or atomic operation that was carried out: what a duplicate of it needs (9.7.5.1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Resource {
    start: Sequence,
    end: Sequence,
    what: Kept,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Read {
        queue: Srqn,
        va: u64,
        rkey: Rkey,
        len: u32,
    },
    /// The word as it was: an atomic operation is not done twice.
    Atomic(u64),
    AtomicWrite,
}

/// Why a request is refused, and how the receive request that it had taken ends.
struct Refused {
    nak: NakCode,
    receive: Option<(ReceiveId, Status)>,
}

impl From<NakCode> for Refused {
    fn from(nak: NakCode) -> Self {
        Self { nak, receive: None }
    }
}

/// What stops a request.
enum Stop {
    Refused(Refused),
    NoReceive,
}

impl From<NakCode> for Stop {
    fn from(nak: NakCode) -> Self {
        Self::Refused(nak.into())
    }
}

#[derive(Debug)]
pub(crate) struct Responder {
    config: Config,
    mtu: u32,
    /// The next packet (ePSN).
    expected: Sequence,
    msn: Msn,
    progress: Option<Progress>,
    /// The shared receive queue of the message under way (extended connections).
    queue: Srqn,
    /// The last packet that came too early, if that was told: once is enough until the expected one comes.
    early: Option<Sequence>,
    /// Packets that came too early.
    kept: Early,
    /// Where a gap was closed: those behind it may have their turn.
    catching_up: Option<Sequence>,
    /// The last packet carried out that an acknowledgement may name: none of a READ or atomic operation, which
    /// are answered by their responses only.
    acknowledgeable: Option<Sequence>,
    answers: VecDeque<Answer>,
    resources: VecDeque<Resource>,
    /// The refusal that ended the queue pair, and which packet it was about.
    refusal: Option<(Sequence, NakCode)>,
    /// A receive request of a message that broke off: the next message takes it (unreliable connections).
    held: Option<ReceiveId>,
}

impl Responder {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            mtu: config.mtu.bytes(),
            expected: Sequence::first(config.receive_psn),
            msn: Msn::new(0),
            progress: None,
            queue: Srqn::new(0),
            early: None,
            kept: Early::default(),
            catching_up: None,
            acknowledgeable: None,
            answers: VecDeque::new(),
            resources: VecDeque::new(),
            refusal: None,
            held: None,
            config,
        }
    }

    /// Takes a request from the peer.
    pub(crate) fn handle_request<M: Memory>(
        &mut self,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<Outcome, Fault> {
        let at = self.expected.nearest(packet.bth().psn());
        // The sequence number comes first: nothing else of a packet counts unless it is its turn (9.7.4.1.2).
        if at > self.expected {
            self.keep_for_later(at, packet);
            return Ok(self.too_early(at));
        }
        if at < self.expected {
            self.duplicate(at, packet);
            return Ok(Outcome::Duplicate);
        }
        match self.execute(at, packet, memory, events) {
            Ok(()) => {
                if self.early.take().is_some() {
                    self.catching_up = Some(self.expected);
                }
                Ok(Outcome::Executed)
            }
            Err(Stop::NoReceive) => {
                self.not_ready(at);
                Ok(Outcome::NotReady)
            }
            Err(Stop::Refused(refused)) => Err(self.refuse(at, refused, events)),
        }
    }

    /// No receive request for a packet.
    fn not_ready(&mut self, at: Sequence) {
        // What follows is early, and must not be told so: the requester knows where to begin again.
        self.early = Some(at);
        self.answer_refused(at, Syndrome::RnrNak { timer_code: self.config.min_rnr_timer });
    }

    /// A packet from beyond the next one: one before it was lost (9.7.5.2.8). Told once, and once more when the
    /// requester has begun again without the lost one: packets come in order otherwise.
    fn too_early(&mut self, at: Sequence) -> Outcome {
        let begins_again = self.early.is_none_or(|last| at <= last);
        if begins_again {
            self.answer_refused(self.expected, Syndrome::Nak(NakCode::SequenceError));
        }
        self.early = Some(at);
        Outcome::OutOfSequence
    }

    /// Fails over a request. What it had taken comes back with an error, before the failure is told.
    fn refuse(&mut self, at: Sequence, refused: Refused, events: &mut VecDeque<Event>) -> Fault {
        self.refusal = Some((at, refused.nak));
        self.kept.clear();
        let in_progress = match self.progress.take() {
            Some(Progress::Send { receive, .. }) => Some((receive, Status::Flushed)),
            _ => None,
        };
        let receive = refused.receive.or(in_progress);
        if let Some((id, status)) = receive {
            events.push_back(Event::Received(broken(id, status)));
        }
        self.answer_refused(at, Syndrome::Nak(refused.nak));
        match refused.nak {
            NakCode::RemoteAccess => Fault::PeerAccess,
            NakCode::InvalidRequest if refused.receive.is_none() => Fault::PeerRequest,
            _ => Fault::Receive,
        }
    }

    /// A request to a queue pair that has failed over one: the refusal is said again, in case it was lost.
    pub(crate) fn handle_request_after_failure(&mut self, packet: &Packet<&[u8]>) -> Outcome {
        let Some((at, nak)) = self.refusal else { return Outcome::Dropped };
        let is_about = at.nearest(packet.bth().psn()) <= at;
        if is_about && self.answers.is_empty() {
            self.answer_refused(at, Syndrome::Nak(nak));
        }
        Outcome::Dropped
    }

    /// The queue pair fails for another reason: gives back what was taken, and answers nothing any more.
    pub(crate) fn flush(&mut self, events: &mut VecDeque<Event>) {
        self.kept.clear();
        let receive = match self.progress.take() {
            Some(Progress::Send { receive, .. }) => Some(receive),
            _ => None,
        };
        for id in [receive, self.held.take()].into_iter().flatten() {
            events.push_back(Event::Received(broken(id, Status::Flushed)));
        }
        if self.refusal.is_none() {
            self.answers.clear();
        }
        self.resources.clear();
    }

    /// Checks that the packet is the next one of its message, and has the payload of its place there
    /// (9.7.4.1.3, 9.7.4.1.6).
    fn check_position(&self, packet: &Packet<&[u8]>) -> Result<(), NakCode> {
        let (operation, position) = (packet.opcode().operation(), packet.opcode().position());
        let follows = match self.progress {
            None => position.begins(),
            Some(Progress::Send { .. }) => operation == Operation::Send && !position.begins(),
            Some(Progress::Write { .. }) => operation == Operation::Write && !position.begins(),
        };
        let payload = packet.payload().len() as u32;
        let fits = match position {
            Position::First | Position::Middle => payload == self.mtu,
            Position::Last => (1..=self.mtu).contains(&payload),
            Position::Only => payload <= self.mtu,
        };
        if follows && fits { Ok(()) } else { Err(NakCode::InvalidRequest) }
    }

    /// Whether the queue pair allows the operation at all (9.7.4.1.4).
    fn check_operation(&self, operation: Operation) -> Result<(), NakCode> {
        let allowed = match operation {
            Operation::Write | Operation::AtomicWrite => self.config.remote_write,
            Operation::ReadRequest => self.config.remote_read,
            Operation::CompareSwap | Operation::FetchAdd => self.config.remote_atomic,
            _ => true,
        };
        if allowed { Ok(()) } else { Err(NakCode::InvalidRequest) }
    }
}

/// A receive request that ends without a message.
fn broken(id: ReceiveId, status: Status) -> Received {
    Received {
        id,
        status,
        kind: ReceivedKind::Send,
        len: 0,
        immediate: None,
        invalidated: None,
        solicited: false,
        source: None,
    }
}
