//! Events of the channels, in order.

use std::collections::VecDeque;

use super::{Id, Manager};
use crate::abi::{self, AhAttr, ConnParam, Ece, EventAnswer, MAX_PRIVATE, Plain, UdParam, event};
use crate::message::ConnectionParameters;
use crate::system::{ChannelId, System};
use crate::{Errno, Result};

/// An event for the program.
#[derive(Clone, Debug)]
pub struct Event {
    /// The answer to GET_EVENT.
    pub answer: EventAnswer,
    /// The identifier of the event; for a request, the listener.
    pub(super) owner: u32,
    /// The identifier of an incoming connection.
    pub(super) child: Option<u32>,
    pub(super) group: Option<u32>,
}

#[derive(Debug, Default)]
pub(super) struct Queue(pub(super) VecDeque<Event>);

/// Private data as the kernel passes it: the whole field of the message, padded with zeroes.
fn padded(private: &[u8], len: usize) -> ([u8; MAX_PRIVATE], u8) {
    let mut field = [0; MAX_PRIVATE];
    let given = private.len().min(len);
    field[..given].copy_from_slice(&private[..given]);
    (field, len as u8)
}

/// Connection parameters for the program. The peer's inbound limit is this side's outbound limit, so the two
/// fields swap.
pub(super) fn conn_param(from: &ConnectionParameters, private_len: usize) -> ConnParam {
    let (private_data, private_data_len) = padded(&from.private, private_len);
    ConnParam {
        qp_num: from.qpn.get(),
        private_data,
        private_data_len,
        srq: from.srq,
        responder_resources: from.initiator_depth,
        initiator_depth: from.responder_resources,
        flow_control: from.flow_control,
        retry_count: from.retry_count,
        rnr_retry_count: from.rnr_retry_count,
        ..ConnParam::ZERO
    }
}

pub(super) fn private_only(private: &[u8], len: usize) -> ConnParam {
    conn_param(&ConnectionParameters { private: private.to_vec(), ..ConnectionParameters::default() }, len)
}

pub(super) fn ud_param(qp_num: u32, qkey: u32, ah_attr: AhAttr, private: &[u8], len: usize) -> UdParam {
    let (private_data, private_data_len) = padded(private, len);
    UdParam { qp_num, qkey, ah_attr, private_data, private_data_len, ..UdParam::ZERO }
}

impl Event {
    pub(super) fn new(kind: u32, status: i32) -> Self {
        let answer = EventAnswer { event: kind, status: status.cast_unsigned(), ..EventAnswer::ZERO };
        Self { answer, owner: 0, child: None, group: None }
    }

    pub(super) fn with(mut self, param: &impl Plain) -> Self {
        let bytes = param.bytes();
        self.answer.param[..bytes.len()].copy_from_slice(bytes);
        self
    }

    pub(super) fn with_ece(mut self, [vendor_id, attr_mod]: [u32; 2]) -> Self {
        self.answer.ece = Ece { vendor_id, attr_mod };
        self
    }
}

impl Manager {
    /// Queues an event of the identifier `number`. A connection that was not accepted yet has no `uid`, so
    /// its events are dropped; accepting it fails.
    pub(super) fn post_event(&mut self, system: &mut dyn System, number: u32, mut event: Event) {
        let Some(id) = self.ids.get(number) else { return };
        let group = event.group.and_then(|group| self.groups.get(group));
        let uid = group.map_or(id.uid, |group| group.uid);
        if uid == 0 {
            return;
        }
        event.owner = number;
        event.answer.uid = uid;
        event.answer.id = event.child.unwrap_or(event.group.unwrap_or(number));
        let channel = id.channel;
        let Some(queue) = self.channels.get_mut(&channel) else { return };
        queue.0.push_back(event);
        if queue.0.len() == 1 {
            system.ready(channel);
        }
    }

    /// The next event, which stays in the queue.
    #[must_use]
    pub fn peek_event(&self, channel: ChannelId) -> Option<&EventAnswer> {
        self.channels.get(&channel)?.0.front().map(|event| &event.answer)
    }

    /// Takes the next event; returns it, and whether it was the last.
    pub fn next_event(&mut self, channel: ChannelId) -> Option<(EventAnswer, bool)> {
        let queue = &mut self.channels.get_mut(&channel)?.0;
        let event = queue.pop_front()?;
        let last = queue.is_empty();
        if let Some(id) = self.ids.get_mut(event.owner) {
            id.reported += 1;
            if event.answer.event == event::CONNECT_REQUEST {
                id.waiting = id.waiting.saturating_sub(1);
            }
        }
        if let Some(group) = event.group.and_then(|group| self.groups.get_mut(group)) {
            group.reported += 1;
        }
        Some((event.answer, last))
    }

    /// Whether the channel has an event.
    #[must_use]
    pub fn has_event(&self, channel: ChannelId) -> bool {
        self.channels.get(&channel).is_some_and(|queue| !queue.0.is_empty())
    }

    /// Drops the events for which `about` holds; returns the incoming connections among them.
    pub(super) fn forget_events(&mut self, channel: ChannelId, about: impl Fn(&Event) -> bool) -> Vec<u32> {
        let Some(queue) = self.channels.get_mut(&channel) else { return Vec::new() };
        let forgotten = queue.0.iter().filter(|event| about(event)).filter_map(|event| event.child).collect();
        queue.0.retain(|event| !about(event));
        forgotten
    }

    /// Moves an identifier and its events to another channel; returns how many events the program has taken.
    ///
    /// # Errors
    /// ENOENT or EINVAL if the channel has no such identifier.
    pub fn migrate(
        &mut self,
        system: &mut dyn System,
        from: ChannelId,
        number: u32,
        to: ChannelId,
    ) -> Result<u32> {
        let id: &mut Id = self.id(from, number)?;
        id.channel = to;
        let reported = id.reported;
        if from == to {
            return Ok(reported);
        }
        let queue = self.channels.get_mut(&from).ok_or(Errno(libc::EINVAL))?;
        let (moved, kept): (VecDeque<_>, _) =
            std::mem::take(&mut queue.0).into_iter().partition(|event| event.owner == number);
        queue.0 = kept;
        // Pending connections of a listener move with it.
        for child in moved.iter().filter_map(|event| event.child) {
            if let Some(child) = self.ids.get_mut(child) {
                child.channel = to;
            }
        }
        let queue = self.channels.get_mut(&to).ok_or(Errno(libc::EINVAL))?;
        let wake = queue.0.is_empty() && !moved.is_empty();
        queue.0.extend(moved);
        if wake {
            system.ready(to);
        }
        Ok(reported)
    }
}

/// Event status of an errno: negative.
pub(super) fn failure(errno: i32) -> i32 {
    -errno
}

const _: () = assert!(size_of::<abi::UdParam>() == 304 && size_of::<abi::ConnParam>() <= 304);
