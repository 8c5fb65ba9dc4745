//! What a member knows of the others: their inboxes, and the services that their connection managers provide.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use millstream_wire::cm::Message;
use millstream_wire::{Packet, Qpn, gid};

use super::inbox::{InboxSender, Notice};
use crate::datagram::{PacketInfo, destination_qpn};

/// Low bits of a communication ID. The high bits are the QPN prefix of the process that it belongs to.
pub const COMMUNICATION_ID_INDEX_BITS: u32 = 20;
/// Longest wait for the notices of members. A stopped process takes longer.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(2);
/// Most services that are known, of all members together. Requests for further ones are rejected.
const MAX_SERVICES: usize = 1 << 16;
/// Inboxes beyond which those of members that have left are looked for.
const MIN_INBOXES: usize = 16;

/// A service at an address of this host, or at the wildcard address of its family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Service {
    /// Service ID.
    pub id: u64,
    /// The address, IPv4 mapped into IPv6.
    address: Ipv6Addr,
}

impl Service {
    /// A service at an address.
    #[must_use]
    pub fn new(id: u64, address: IpAddr) -> Service {
        Service { id, address: gid(address) }
    }

    pub(super) fn from_parts(id: u64, address: [u8; 16]) -> Service {
        Service { id, address: address.into() }
    }

    pub(super) fn address(&self) -> [u8; 16] {
        self.address.octets()
    }

    /// The services that take a request for this one, best first.
    fn or_wildcard(self) -> impl Iterator<Item = Service> {
        let any = match self.address.to_ipv4_mapped() {
            Some(_) => Ipv4Addr::UNSPECIFIED.into(),
            None => Ipv6Addr::UNSPECIFIED.into(),
        };
        [self, Service::new(self.id, any)].into_iter()
    }
}

/// The processes that may handle a packet for queue pair 1.
enum Receivers {
    /// The first one that exists, best first.
    First(Vec<u16>),
    /// The one that knows the request of the sender. Others ignore the packet.
    Every(BTreeSet<u16>),
}

/// The members and services of the group.
#[derive(Debug)]
pub(crate) struct Directory {
    own_prefix: u16,
    /// The sending end of this member's inbox, for others.
    own_inbox: InboxSender,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    inboxes: HashMap<u16, InboxSender>,
    /// The number of inboxes at which those of members that have left are looked for.
    sweep_at: usize,
    /// The members that provide each service, this one among them.
    services: BTreeMap<Service, BTreeSet<u16>>,
    /// Members that have not sent notices yet, and the time until which they may.
    silent: BTreeSet<u16>,
    silent_until: Option<Instant>,
}

/// The receiver of a packet for queue pair 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ManagementRoute {
    /// This process.
    Own,
    /// It was forwarded.
    Forwarded,
    /// It is not known yet. The sender repeats the packet.
    Unknown,
}

impl Directory {
    pub(super) fn new(own_prefix: u16, own_inbox: InboxSender) -> Self {
        Self { own_prefix, own_inbox, entries: Mutex::default() }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().expect("no panic under this lock")
    }

    /// These members will send notices. Until then packets without a known receiver are dropped.
    pub(super) fn expect(&self, members: BTreeSet<u16>) {
        let mut entries = self.entries();
        (entries.silent, entries.silent_until) = (members, Some(Instant::now() + NOTICE_TIMEOUT));
    }

    pub(super) fn own_inbox(&self) -> &InboxSender {
        &self.own_inbox
    }

    /// Handles a notice; returns the member of a [`Notice::Member`].
    pub(super) fn handle(&self, notice: Notice) -> Option<u16> {
        match notice {
            Notice::Member { qpn_prefix, inbox } => {
                let mut entries = self.entries();
                entries.insert(qpn_prefix, inbox.into());
                entries.silent.remove(&qpn_prefix);
                Some(qpn_prefix)
            }
            Notice::Service { qpn_prefix, service, provided } => {
                self.entries().set_service(qpn_prefix, service, provided);
                None
            }
        }
    }

    /// Adds a member that has joined, and tells it of this one.
    pub(super) fn add(&self, qpn_prefix: u16, inbox: InboxSender) {
        let services = {
            let mut entries = self.entries();
            // A former process with this prefix has exited.
            entries.remove(qpn_prefix);
            entries.insert(qpn_prefix, inbox.clone());
            entries.services_of(self.own_prefix)
        };
        // The inbox of a process that has just joined is empty. If it has exited, nobody needs the notices.
        for service in services {
            let _ = inbox.notify_service(self.own_prefix, service, true);
        }
        // Last: its receiver then knows the services, too.
        let _ = inbox.notify_member(self.own_prefix, &self.own_inbox);
    }

    /// Tells all members whether this one provides a service.
    pub(crate) fn set_service(&self, service: Service, provided: bool) {
        let inboxes: Vec<(u16, InboxSender)> = {
            let mut entries = self.entries();
            entries.set_service(self.own_prefix, service, provided);
            entries.inboxes.iter().map(|(qpn_prefix, inbox)| (*qpn_prefix, inbox.clone())).collect()
        };
        for (qpn_prefix, inbox) in inboxes {
            // A stopped process with a full inbox rejects requests for the service until it restarts.
            let sent = inbox.notify_service(self.own_prefix, service, provided);
            if sent.is_err_and(|error| means_left(&error)) {
                self.entries().remove_inbox(qpn_prefix, &inbox);
            }
        }
    }

    /// Forwards a packet to a member.
    ///
    /// # Errors
    /// ECONNREFUSED if there is no such member, EAGAIN if its inbox is full.
    pub(crate) fn forward(&self, qpn_prefix: u16, info: &PacketInfo, packet: &[u8]) -> io::Result<()> {
        let inbox = self.entries().inboxes.get(&qpn_prefix).cloned();
        let Some(inbox) = inbox else { return Err(io::ErrorKind::ConnectionRefused.into()) };
        match inbox.forward(info, packet) {
            Err(error) if means_left(&error) => {
                self.entries().remove_inbox(qpn_prefix, &inbox);
                Err(io::ErrorKind::ConnectionRefused.into())
            }
            done => done,
        }
    }

    /// Forwards a packet for queue pair 1 to the connection manager that it is for.
    ///
    /// The high bits of a communication ID name its process. Requests name a service, at the address that they are sent to; if
    /// nobody provides it, any connection manager rejects them. Other packets without a receiver are for the process that
    /// received them, which answers for a process that has exited.
    pub(crate) fn forward_management(&self, info: &PacketInfo, packet: &[u8]) -> ManagementRoute {
        let receivers = match self.receivers(info.destination, packet) {
            None => return ManagementRoute::Own,
            Some(Receivers::First(receivers)) => receivers,
            Some(Receivers::Every(members)) => {
                for member in members.into_iter().filter(|member| *member != self.own_prefix) {
                    // The sender gives up, whether it arrives or not.
                    let _ = self.forward(member, info, packet);
                }
                return ManagementRoute::Own;
            }
        };
        for receiver in receivers {
            if receiver == self.own_prefix {
                return ManagementRoute::Own;
            }
            match self.forward(receiver, info, packet) {
                // A sender repeats what a full inbox does not take.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                _ => return ManagementRoute::Forwarded,
            }
        }
        if self.entries().is_incomplete() { ManagementRoute::Unknown } else { ManagementRoute::Own }
    }

    fn receivers(&self, destination: IpAddr, packet: &[u8]) -> Option<Receivers> {
        let packet = Packet::new_checked(packet).ok()?;
        let (_, message) = Message::parse(packet.payload()).ok()?;
        let service = match &message {
            Message::Req(request) => request.service_id,
            Message::SidrReq { service_id, .. } => *service_id,
            Message::Rep(reply) => return Some(Receivers::First(vec![owner(reply.remote_id)])),
            Message::SidrRep { request_id, .. } => return Some(Receivers::First(vec![owner(*request_id)])),
            rejection if rejection.withdrawn_request().is_some() => {
                return Some(Receivers::Every(self.entries().services.values().flatten().copied().collect()));
            }
            Message::Mra { remote_id, .. }
            | Message::Rej { remote_id, .. }
            | Message::Rtu { remote_id, .. }
            | Message::Dreq { remote_id, .. }
            | Message::Drep { remote_id, .. } => return Some(Receivers::First(vec![owner(*remote_id)])),
        };
        let entries = self.entries();
        let services = Service::new(service, destination).or_wildcard();
        let providers = services.filter_map(|service| entries.services.get(&service)).flatten();
        // No process may answer for a member that is merely slow.
        let managers = entries.services.values().flatten().take(usize::from(!entries.is_incomplete()));
        Some(Receivers::First(providers.chain(managers).copied().collect()))
    }
}

fn owner(communication_id: u32) -> u16 {
    (communication_id >> COMMUNICATION_ID_INDEX_BITS) as u16
}

/// Whether an error of sending to an inbox means that its member has left. A full inbox, or a lack of memory, does not.
fn means_left(error: &io::Error) -> bool {
    !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM))
}

/// Whether a packet is for queue pair 1.
pub(crate) fn is_management(packet: &[u8]) -> bool {
    destination_qpn(packet) == Some(Qpn::GSI)
}

impl Entries {
    /// Whether a member may exist that this process has not heard of.
    fn is_incomplete(&self) -> bool {
        !self.silent.is_empty() && self.silent_until.is_some_and(|until| Instant::now() < until)
    }

    fn set_service(&mut self, qpn_prefix: u16, service: Service, provided: bool) {
        if provided {
            if self.services.len() < MAX_SERVICES || self.services.contains_key(&service) {
                self.services.entry(service).or_default().insert(qpn_prefix);
            }
        } else if let Some(providers) = self.services.get_mut(&service) {
            providers.remove(&qpn_prefix);
            if providers.is_empty() {
                self.services.remove(&service);
            }
        }
    }

    fn services_of(&self, qpn_prefix: u16) -> Vec<Service> {
        let provided = self.services.iter().filter(|(_, providers)| providers.contains(&qpn_prefix));
        provided.map(|(service, _)| *service).collect()
    }

    /// Adds a member's inbox. Nobody reports that a member has left, so its inbox stays until it is looked for: when there are
    /// twice as many as were found alive the last time.
    fn insert(&mut self, qpn_prefix: u16, inbox: InboxSender) {
        if self.inboxes.len() >= self.sweep_at.max(MIN_INBOXES) {
            let left = self.inboxes.iter().filter(|(_, inbox)| inbox.probe().is_err_and(|e| means_left(&e)));
            let left: Vec<u16> = left.map(|(qpn_prefix, _)| *qpn_prefix).collect();
            left.into_iter().for_each(|qpn_prefix| self.remove(qpn_prefix));
            self.sweep_at = 2 * self.inboxes.len();
        }
        self.inboxes.insert(qpn_prefix, inbox);
    }

    /// Removes a member that has left, unless another one has its prefix now.
    fn remove_inbox(&mut self, qpn_prefix: u16, inbox: &InboxSender) {
        if self.inboxes.get(&qpn_prefix).is_some_and(|now| now.is_same(inbox)) {
            self.remove(qpn_prefix);
        }
    }

    fn remove(&mut self, qpn_prefix: u16) {
        self.inboxes.remove(&qpn_prefix);
        for service in self.services_of(qpn_prefix) {
            self.set_service(qpn_prefix, service, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::inbox::{Inbox, Received, inbox};
    use super::*;

    fn is_empty(inbox: &Inbox) -> bool {
        !matches!(inbox.receive(&mut [0; 100]), Some(Received::Packet(..)))
    }

    #[test]
    fn few_inboxes_of_members_that_have_left_are_kept() {
        let (_own, own_inbox) = inbox().unwrap();
        let directory = Directory::new(1, own_inbox);
        let living: Vec<_> = (10..30)
            .map(|prefix| {
                let (receiver, sender) = inbox().unwrap();
                directory.add(prefix, sender);
                (prefix, receiver)
            })
            .collect();
        for prefix in 100..1000 {
            let (receiver, sender) = inbox().unwrap();
            directory.add(prefix, sender);
            drop(receiver);
            assert!(directory.entries().inboxes.len() <= 2 * living.len() + MIN_INBOXES);
        }
        let info = PacketInfo {
            source: [10, 1, 2, 3].into(),
            source_port: 50_000,
            destination: [10, 1, 2, 4].into(),
            interface: 3,
            tos: 1,
        };
        for (prefix, receiver) in &living {
            directory.forward(*prefix, &info, b"packet").unwrap();
            // Behind the notice of this member.
            assert!(is_empty(receiver) && !is_empty(receiver) && is_empty(receiver));
        }
    }

    #[test]
    fn a_change_of_services_removes_members_that_have_left() {
        let (_own, own_inbox) = inbox().unwrap();
        let directory = Directory::new(1, own_inbox);
        let (_receiver, sender) = inbox().unwrap();
        directory.add(2, sender);
        directory.add(3, inbox().unwrap().1);
        let service = |id| Service::new(id, [10, 1, 2, 4].into());
        directory.handle(Notice::Service { qpn_prefix: 3, service: service(77), provided: true });
        directory.set_service(service(5), true);
        let entries = directory.entries();
        assert_eq!(entries.inboxes.keys().collect::<Vec<_>>(), [&2]);
        assert_eq!(entries.services.keys().collect::<Vec<_>>(), [&service(5)]);
    }
}
