//! Two hosts that exchange datagrams in virtual time.

use millstream_wire::Psn;

use super::*;
use crate::message::ConnectionParameters;

const PORT: PortName =
    PortName { space: 0x106, ip: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)), port: 7174 };

/// Two hosts and the events of each.
struct Pair {
    now: Instant,
    ends: [RemoteConnections; 2],
    ips: [IpAddr; 2],
    events: [Vec<CmEvent>; 2],
}

impl Pair {
    fn new() -> Self {
        Self {
            now: Instant::now(),
            ends: [RemoteConnections::new(0x123, 1, 0xfffff), RemoteConnections::new(0xabc, 2, 7)],
            ips: ["10.0.0.1".parse().unwrap(), PORT.ip],
            events: [Vec::new(), Vec::new()],
        }
    }

    /// Delivers the sent datagrams but those at the indices in `lose`.
    fn deliver(&mut self, lose: &[usize]) {
        for from in 0..2 {
            for (i, sent) in self.ends[from].take_outgoing().into_iter().enumerate() {
                assert_eq!((sent.from, sent.to), (self.ips[from], self.ips[1 - from]));
                if !lose.contains(&i) {
                    let events = self.ends[1 - from].receive(sent.to, sent.from, &sent.bytes, self.now);
                    self.events[1 - from].extend(events);
                }
            }
        }
    }

    /// Advances time to the next retransmission.
    fn advance_to_retransmission(&mut self) {
        self.now =
            self.ends.iter().filter_map(RemoteConnections::deadline).min().expect("something is repeated");
        let now = self.now;
        self.ends.iter_mut().for_each(|end| end.expire(now));
    }

    fn send(&mut self, end: usize, link: u64, message: &Message) {
        let now = self.now;
        self.ends[end].send(LinkId(link), message, now);
    }

    fn send_req(&mut self) -> ConnectionParameters {
        self.send_req_of(Transport::Rc)
    }

    fn send_req_of(&mut self, transport: Transport) -> ConnectionParameters {
        let ips = self.ips;
        self.ends[0].connect(LinkId(1), ips[0], PORT);
        let parameters = ConnectionParameters {
            qpn: Qpn::new(5),
            psn: Psn::new(9),
            mtu: 3,
            timeout: 14,
            private: vec![1; 56],
            transport,
            ..ConnectionParameters::default()
        };
        let [src, dst] =
            [(ips[0], 4000), (ips[1], PORT.port)].map(|(ip, port)| Address { ip, port, scope: 0 });
        self.send(0, 1, &Message::Req { src, dst, parameters: parameters.clone() });
        parameters
    }

    fn take_request(&mut self) -> Box<IncomingReq> {
        match self.events[1].pop() {
            Some(CmEvent::Request(request)) => request,
            other => panic!("{other:?}"),
        }
    }

    /// The request of end 0, as end 1 receives it.
    fn receive_request(&mut self) -> Box<IncomingReq> {
        self.send_req();
        self.deliver(&[]);
        self.take_request()
    }

    /// End 1 receives the request of end 0, adopts it as link 8, and sends a REP.
    fn accept_request(&mut self) {
        let request = self.receive_request();
        assert!(self.ends[1].adopt(LinkId(8), &request));
        self.send(1, 8, &Message::Rep(ConnectionParameters::default()));
    }
}

fn message_event(message: Message, link: u64) -> Vec<CmEvent> {
    vec![CmEvent::Message(LinkId(link), message)]
}

#[test]
fn connection_survives_the_loss_of_each_message() {
    let mut pair = Pair::new();
    let parameters = pair.send_req();
    pair.deliver(&[0]);
    assert!(pair.events[1].is_empty());
    pair.advance_to_retransmission();
    pair.deliver(&[]);
    let request = pair.take_request();
    assert_eq!(request.name, PORT);
    let Message::Req { src, parameters: seen, .. } = &request.message else { panic!("{request:?}") };
    assert_eq!((src.port, seen), (4000, &parameters));
    pair.ends[1].adopt(LinkId(8), &request);

    // The REP is lost; the REQ is repeated and answered again.
    let reply =
        ConnectionParameters { qpn: Qpn::new(6), private: vec![2; 196], ..ConnectionParameters::default() };
    pair.send(1, 8, &Message::Rep(reply.clone()));
    pair.deliver(&[0]);
    pair.advance_to_retransmission();
    pair.deliver(&[]);
    assert_eq!(std::mem::take(&mut pair.events[0]), message_event(Message::Rep(reply), 1));
    assert!(pair.events[1].is_empty(), "a repetition is no second request");

    pair.send(0, 1, &Message::Rtu);
    pair.deliver(&[0]);
    pair.advance_to_retransmission();
    pair.deliver(&[]);
    pair.deliver(&[]);
    assert_eq!(std::mem::take(&mut pair.events[1]), message_event(Message::Rtu, 8));
    assert!(pair.ends.iter().all(|end| end.deadline().is_none()), "nothing is repeated any more");

    pair.send(0, 1, &Message::Dreq);
    pair.deliver(&[]);
    assert_eq!(std::mem::take(&mut pair.events[1]), message_event(Message::Dreq, 8));
    pair.send(1, 8, &Message::Drep);
    let now = pair.now;
    pair.ends[1].close(LinkId(8), now);
    pair.deliver(&[0]);
    pair.advance_to_retransmission();
    pair.deliver(&[]);
    pair.deliver(&[]);
    assert_eq!(std::mem::take(&mut pair.events[0]), message_event(Message::Drep, 1));
    assert!(pair.events[1].is_empty());
}

/// An XRC target has its queue pair number in the field "local EE context number", as in Linux's `cm_format_rep`.
#[test]
fn replies_have_the_number_in_the_field_of_the_transport() {
    for transport in [Transport::Rc, Transport::Uc, Transport::Xrc] {
        let mut pair = Pair::new();
        let parameters = pair.send_req_of(transport);
        pair.deliver(&[]);
        let request = pair.take_request();
        let Message::Req { parameters: seen, .. } = &request.message else { panic!("{request:?}") };
        assert_eq!(seen, &parameters);
        pair.ends[1].adopt(LinkId(8), &request);
        let reply = ConnectionParameters { qpn: Qpn::new(6), transport, ..ConnectionParameters::default() };
        pair.send(1, 8, &Message::Rep(reply));
        let [sent] = &pair.ends[1].take_outgoing()[..] else { panic!("one REP") };
        let Ok((_, cm::Message::Rep(rep))) = cm::Message::parse(&sent.bytes) else { panic!("a REP") };
        let numbers = if transport == Transport::Xrc { (0, 6) } else { (6, 0) };
        assert_eq!((rep.qpn.get(), rep.eecn.get()), numbers);
        let event = pair.ends[0].receive(sent.to, sent.from, &sent.bytes, pair.now);
        let Some(CmEvent::Message(_, Message::Rep(seen))) = event else { panic!("{event:?}") };
        assert_eq!((seen.qpn.get(), seen.transport), (6, transport));
    }
}

/// A host that was stopped reads a request together with its repetitions, before it adopts the first one.
#[test]
fn repetitions_that_are_read_together_are_one_connection() {
    let mut pair = Pair::new();
    pair.send_req();
    let ips = pair.ips;
    pair.ends[0].connect(LinkId(2), ips[0], PORT);
    let [src, dst] = [(ips[0], 4000), (ips[1], PORT.port)].map(|(ip, port)| Address { ip, port, scope: 0 });
    pair.send(0, 2, &Message::SidrReq { src, dst, private: Vec::new() });
    for (link, sent) in [1, 2].into_iter().zip(pair.ends[0].take_outgoing()) {
        let now = pair.now;
        let [first, second] =
            [(); 2].map(|()| match pair.ends[1].receive(sent.to, sent.from, &sent.bytes, now) {
                Some(CmEvent::Request(request)) => request,
                other => panic!("{other:?}"),
            });
        assert!(pair.ends[1].adopt(LinkId(10 * link), &first));
        assert!(!pair.ends[1].adopt(LinkId(10 * link + 1), &second));
        pair.ends[1].reject(&second);
        assert_eq!(pair.ends[1].connections.len() as u64, link);
        assert!(pair.ends[1].take_outgoing().is_empty(), "the connection decides about the answer");
    }
}

/// Linux uses one transaction for all messages of one side of a connection.
#[test]
fn dreq_in_the_transaction_of_the_req_is_new() {
    let mut pair = Pair::new();
    pair.accept_request();
    pair.deliver(&[]);
    pair.send(0, 1, &Message::Rtu);
    pair.deliver(&[]);
    pair.events[1].clear();

    let (link, connection) = pair.ends[1].connections.iter().next().expect("it is connected");
    let (link, transaction, from) = (*link, connection.peer_transaction, connection.peer);
    let dreq = cm::Message::Dreq {
        local_id: connection.remote_id,
        remote_id: connection.local_id,
        remote_qpn: Qpn::new(6),
        private: &[],
    };
    let (bytes, own, now) = (dreq.emit(transaction), connection.own, pair.now);
    let events = pair.ends[1].receive(own, from, &bytes, now);
    assert_eq!(events, Some(CmEvent::Message(link, Message::Dreq)));
    assert_eq!(pair.ends[1].receive(own, from, &bytes, now), None, "it came again");
}

/// A program may disconnect before the RTU arrives, for example because a message has shown that the peer is ready.
#[test]
fn late_rtu_or_rej_does_not_end_the_repetition_of_a_dreq() {
    for late in [Message::Rtu, Message::Rej { reason: reason::CONSUMER, private: Vec::new() }] {
        let mut pair = Pair::new();
        pair.accept_request();
        pair.deliver(&[]);
        pair.events[0].clear();
        pair.send(1, 8, &Message::Dreq);
        assert_eq!(pair.ends[1].take_outgoing().len(), 1, "the DREQ, which is lost");
        pair.send(0, 1, &late);
        pair.deliver(&[]);
        pair.advance_to_retransmission();
        pair.deliver(&[]);
        assert_eq!(pair.events[0], message_event(Message::Dreq, 1));
    }
}

/// The DREQ ends a connection whose acceptance was lost.
#[test]
fn dreq_before_the_rep_is_not_remembered() {
    let mut pair = Pair::new();
    pair.accept_request();
    assert_eq!(pair.ends[1].take_outgoing().len(), 1, "the REP, which is lost");
    pair.send(1, 8, &Message::Dreq);
    pair.deliver(&[]);
    assert_eq!(pair.events[0], [], "there is no connection yet");
    // Both are repeated: the REQ, and so the REP, and the DREQ.
    for _ in 0..3 {
        pair.advance_to_retransmission();
        pair.deliver(&[]);
        pair.deliver(&[]);
    }
    let seen = std::mem::take(&mut pair.events[0]);
    let [CmEvent::Message(_, Message::Rep(_)), CmEvent::Message(_, Message::Dreq)] = &seen[..] else {
        panic!("{seen:?}")
    };
}

#[test]
fn refused_request_takes_no_communication_id() {
    let mut pair = Pair::new();
    let next = pair.ends[1].next;
    let request = pair.receive_request();
    pair.ends[1].reject(&request);
    let sent = pair.ends[1].take_outgoing().remove(0);
    let Ok((_, cm::Message::Rej { local_id, .. })) = cm::Message::parse(&sent.bytes) else {
        panic!("{sent:?}")
    };
    assert_eq!((local_id, pair.ends[1].next), (0, next));
}

#[test]
fn communication_id_of_a_connection_is_not_given_to_another_one() {
    let mut pair = Pair::new();
    let first = pair.ends[1].next;
    pair.accept_request();
    pair.deliver(&[]);
    pair.send(0, 1, &Message::Rtu);
    pair.deliver(&[]);
    pair.events[1].clear();
    // All other numbers were used meanwhile.
    pair.ends[1].next = first;
    let ips = pair.ips;
    pair.ends[1].connect(LinkId(9), ips[1], PortName { ip: ips[0], ..PORT });
    pair.send(0, 1, &Message::Dreq);
    pair.deliver(&[]);
    assert_eq!(pair.events[1], message_event(Message::Dreq, 8));
}

#[test]
fn missing_listener_rejects_and_unknown_connection_gets_drep() {
    let mut pair = Pair::new();
    let request = pair.receive_request();
    pair.ends[1].reject(&request);
    pair.deliver(&[]);
    let [CmEvent::Message(LinkId(1), Message::Rej { reason, .. })] = &pair.events[0][..] else {
        panic!("{:?}", pair.events[0])
    };
    assert_eq!(*reason, reason::INVALID_SERVICE_ID);
    pair.events[0].clear();

    // The other side has lost the connection.
    pair.ends[1] = RemoteConnections::new(0xabc, 2, 0);
    pair.send(0, 1, &Message::Dreq);
    pair.deliver(&[]);
    pair.deliver(&[]);
    assert_eq!(pair.events[0], message_event(Message::Drep, 1));
}

/// The program decides for so long that the requester gives up.
#[test]
fn a_request_that_is_withdrawn_is_no_longer_waited_for() {
    for arrives in [true, false] {
        let mut pair = Pair::new();
        let request = pair.receive_request();
        assert!(pair.ends[1].adopt(LinkId(8), &request));
        let withdrawal = Message::Rej { reason: reason::TIMEOUT, private: vec![0; 148] };
        pair.send(0, 1, &withdrawal);
        let now = pair.now;
        pair.ends[0].close(LinkId(1), now);
        pair.deliver(if arrives { &[] } else { &[0] });
        if !arrives {
            // The REP is answered by the REJ.
            pair.send(1, 8, &Message::Rep(ConnectionParameters::default()));
            pair.deliver(&[]);
            assert!(pair.events[0].is_empty());
            pair.deliver(&[]);
        }
        assert_eq!(std::mem::take(&mut pair.events[1]), message_event(withdrawal, 8));
    }
}

#[test]
fn a_rep_for_an_unknown_connection_is_rejected() {
    let mut pair = Pair::new();
    pair.accept_request();
    // The requester's process has ended.
    pair.ends[0] = RemoteConnections::new(0x124, 1, 0);
    pair.deliver(&[]);
    pair.deliver(&[]);
    let rejection = Message::Rej { reason: 6, private: vec![0; 148] };
    assert_eq!(std::mem::take(&mut pair.events[1]), message_event(rejection, 8));
}

#[test]
fn missing_datagram_service_is_status_1() {
    let mut pair = Pair::new();
    let ips = pair.ips;
    pair.ends[0].connect(LinkId(1), ips[0], PORT);
    let [src, dst] = [(ips[0], 4000), (ips[1], PORT.port)].map(|(ip, port)| Address { ip, port, scope: 0 });
    pair.send(0, 1, &Message::SidrReq { src, dst, private: Vec::new() });
    pair.deliver(&[]);
    let request = pair.take_request();
    pair.ends[1].reject(&request);
    pair.deliver(&[]);
    let [CmEvent::Message(LinkId(1), Message::SidrRep { status: 1, .. })] = &pair.events[0][..] else {
        panic!("{:?}", pair.events[0])
    };
}

#[test]
fn datagrams_from_other_addresses_are_ignored() {
    let mut pair = Pair::new();
    pair.send_req();
    let sent = pair.ends[0].take_outgoing().remove(0);
    let now = pair.now;
    for len in 0..sent.bytes.len() {
        assert_eq!(pair.ends[1].receive(sent.to, sent.from, &sent.bytes[..len], now), None);
    }
    // A reply from an address that received no request.
    let request = match pair.ends[1].receive(sent.to, sent.from, &sent.bytes, now) {
        Some(CmEvent::Request(request)) => request,
        other => panic!("{other:?}"),
    };
    pair.ends[1].adopt(LinkId(8), &request);
    pair.send(1, 8, &Message::Rep(ConnectionParameters::default()));
    let reply = pair.ends[1].take_outgoing().remove(0);
    let other = "10.0.0.3".parse().unwrap();
    assert_eq!(pair.ends[0].receive(reply.to, other, &reply.bytes, now), None);
    assert!(pair.ends[0].receive(reply.to, reply.from, &reply.bytes, now).is_some());
}

/// A host that knows, or guesses, one communication ID of a connection ends it not with that alone.
#[test]
fn messages_with_the_communication_id_of_another_end_are_ignored() {
    let mut pair = Pair::new();
    pair.accept_request();
    pair.deliver(&[]);
    pair.events[0].clear();
    pair.send(0, 1, &Message::Rtu);
    pair.deliver(&[]);
    pair.events[1].clear();
    pair.send(0, 1, &Message::Dreq);
    let sent = pair.ends[0].take_outgoing().remove(0);
    let now = pair.now;
    let (transaction, message) = cm::Message::parse(&sent.bytes).unwrap();
    let cm::Message::Dreq { local_id, remote_id, remote_qpn, private } = message else {
        panic!("{message:?}")
    };
    for other in [local_id ^ 1, 0] {
        let forged = [
            cm::Message::Dreq { local_id: other, remote_id, remote_qpn, private },
            cm::Message::Rej {
                local_id: other,
                remote_id,
                message_type: cm::MessageType::Other,
                reason: 28,
                additional: &[],
                private: &[],
            },
        ];
        for message in forged {
            assert_eq!(pair.ends[1].receive(sent.to, sent.from, &message.emit(transaction), now), None);
        }
    }
    assert!(pair.ends[1].receive(sent.to, sent.from, &sent.bytes, now).is_some());
}

/// Requests to a port without a listener, and requests that are refused later, must not accumulate.
#[test]
#[cfg_attr(miri, ignore = "3,000 connections take minutes")]
fn refused_requests_do_not_accumulate() {
    const REQUESTS: u64 = 3000;
    let mut pair = Pair::new();
    let ips = pair.ips;
    for link in 1..=REQUESTS {
        pair.ends[0].connect(LinkId(link), ips[0], PORT);
        let parameters = ConnectionParameters {
            qpn: Qpn::new(5),
            psn: Psn::new(9),
            mtu: 3,
            timeout: 14,
            ..ConnectionParameters::default()
        };
        let (src, dst) =
            (Address { ip: ips[0], port: 1, scope: 0 }, Address { ip: PORT.ip, port: PORT.port, scope: 0 });
        pair.send(0, link, &Message::Req { src, dst, parameters });
        pair.deliver(&[]);
        let request = pair.take_request();
        pair.ends[1].adopt(LinkId(link), &request);
        let refusal = Message::Rej { reason: reason::CONSUMER, private: Vec::new() };
        pair.send(1, link, &refusal);
        let now = pair.now;
        pair.ends[1].close(LinkId(link), now);
        pair.deliver(&[]);
        pair.ends[0].close(LinkId(link), now);
    }
    assert_eq!(pair.ends.each_ref().map(|end| end.connections.len()), [table::MAX_CLOSED; 2]);
    // A duplicate of a recent request gets the same answer, and no second event.
    pair.events[1].clear();
    let deadline = pair.ends[1].deadline().expect("closed connections are forgotten");
    pair.ends.iter_mut().for_each(|end| end.expire(deadline));
    assert_eq!(pair.ends.each_ref().map(|end| end.connections.len()), [0; 2], "all were closed at one time");
    assert!(!pair.ends[0].has_unanswered());
}
