//! Multicast groups of datagram queue pairs (IBTA volume 1, 10.5).
//!
//! Each process publishes in its arena which of its queue pairs belong to which groups. So a change needs no
//! message, and a process that exits leaves nothing behind. A sender reads the tables of all processes that
//! it knows. It searches for existing processes when it first sends to a group. A process that attaches its
//! first queue pair later announces itself.
//!
//! Other hosts are reached by packets to the group's IP address (annex A17.4.4). Each process joins the groups of its
//! queue pairs at its own socket, and so gets its own copy. Multicast loopback is off, because members on the
//! sender's host are reached through shared memory; `MILLSTREAM_PATH=wire` turns it on.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::time::Duration;

use millstream_link::Port;
use millstream_quantity::Qpn;
use millstream_shm::{Arena, socket};

use crate::address_changes::AddressChanges;
use crate::caps::MAX_MULTICAST;
use crate::clock;
use crate::errno::{Errno, Result};
use crate::gid::{self, GidEntry};
use crate::ipc;
use crate::layout::{Header, MULTICAST_TABLE, MulticastEntry, QPN_INDEX_BITS};
use crate::path;
use crate::peer::Peer;
use crate::peer_table::PeerTable;

/// The queue pair number that all datagrams to groups carry (10.5.1).
pub(crate) const MULTICAST_QPN: Qpn = Qpn::new(0xff_ffff);

/// The address of a group.
pub(crate) type Group = [u8; 16];

/// Whether a GID is a multicast address: of IPv6, or of IPv4 mapped into it (RoCE annex A17.4.4).
#[must_use]
pub fn is_group(gid: &Group) -> bool {
    let mapped = gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
    gid[0] == 0xff || (mapped && gid[12] & 0xf0 == 0xe0)
}

/// The group that a datagram with this route header is for.
pub(crate) fn group_of(header: &[u8; 40]) -> Option<Group> {
    let mut group = [0; 16];
    if header[0] >> 4 == 6 {
        group.copy_from_slice(&header[24..]);
    } else {
        group[10..12].fill(0xff);
        group[12..].copy_from_slice(&header[36..]);
    }
    is_group(&group).then_some(group)
}

/// Number of queue pair number prefixes.
const PREFIXES: usize = 1 << (24 - QPN_INDEX_BITS);

/// This process's attachments, and the processes that may have some.
#[derive(Debug)]
pub(crate) struct MulticastTable {
    qpn_prefix: u32,
    arena: &'static Arena,
    peers: &'static PeerTable,
    own: Mutex<Attachments>,
    /// Processes to connect to: a bit for each prefix.
    announced: Box<[AtomicU64]>,
    /// Number of announcements, and the number that were handled. The first stands for the search for
    /// processes that started before this one, which is repeated until it succeeds.
    announcements: AtomicU64,
    handled: AtomicU64,
    /// Held while announcements are handled.
    handling: Mutex<()>,
    /// When processes that have not answered are asked again, nanoseconds; zero if all have answered.
    ask_again_at: AtomicU64,
    members: Mutex<Vec<Arc<Peer>>>,
    /// Whether the processes that started before this one were searched for.
    searched: AtomicBool,
    /// Reports changes of the host's addresses once a group was joined at the port.
    changes: OnceLock<AddressChanges>,
}

/// Longest wait for the answers of all processes together. Stopped processes and full queues of names, which any user can
/// hold, must not delay the others.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// Time after which processes that have not answered are asked again, without a wait.
const ASK_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
struct Attachments {
    /// Indices of entries in the table.
    entries: HashMap<(Group, Qpn), usize>,
    free: Vec<usize>,
    /// Entries that were ever used.
    len: usize,
    /// Whether the process has announced itself.
    announced: bool,
    /// The interfaces on which each group was joined at the port.
    joined: HashMap<Group, BTreeSet<u32>>,
}

impl Attachments {
    fn has_members(&self, group: &Group) -> bool {
        self.entries.keys().any(|(of, _)| of == group)
    }

    /// Frees the entry of a detached queue pair. Leaves the group at the port with its last member.
    fn release(&mut self, arena: &Arena, port: Option<&Port>, index: usize, group: &Group) {
        entry(arena, index).qpn.store(0, Ordering::Release);
        self.free.push(index);
        if !self.has_members(group)
            && let Some(port) = port
        {
            for interface in self.joined.remove(group).unwrap_or_default() {
                // An error means that the interface is gone.
                let _ = port.udp().leave_multicast(Ipv6Addr::from(*group).to_canonical(), interface);
            }
        }
    }

    /// Joins a group at the port, on all interfaces that can and on which it was not joined.
    fn join(&mut self, port: &Port, group: &Group) -> Result<()> {
        let address = Ipv6Addr::from(*group).to_canonical();
        let joined = self.joined.entry(*group).or_default();
        let mut refused = None;
        for interface in interfaces() {
            if joined.contains(&interface) {
                continue;
            }
            match port.udp().join_multicast(address, interface) {
                Ok(()) => _ = joined.insert(interface),
                // The interface has no addresses of this family.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EADDRNOTAVAIL)) => {}
                Err(error) => refused = Some((interface, error)),
            }
        }
        match refused {
            Some((interface, error)) => {
                report_join_error(address, interface, &error);
                // Without packets the group is limited to this host.
                let code = error.raw_os_error().unwrap_or(libc::EIO);
                if path::is_wire() && joined.is_empty() { Err(Errno(code)) } else { Ok(()) }
            }
            None => Ok(()),
        }
    }

    /// Joins the groups of all attached queue pairs where they are not joined.
    fn join_all(&mut self, port: &Port) {
        let groups: BTreeSet<Group> = self.entries.keys().map(|(group, _)| *group).collect();
        for group in groups {
            let _ = self.join(port, &group);
        }
    }
}

/// The interfaces on which multicast packets arrive. Loopback has packets of this host only.
fn interfaces() -> BTreeSet<u32> {
    let here = |entry: &GidEntry| {
        let address = Ipv6Addr::from(entry.raw).to_canonical();
        address.is_loopback()
    };
    // As the host has them now: the table of GIDs may miss the last change.
    let entries = gid::of_interfaces().unwrap_or_default();
    entries.iter().filter(|entry| path::is_wire() || !here(entry)).map(|entry| entry.ifindex).collect()
}

/// Reports the first failed join. The usual cause is `net.ipv4.igmp_max_memberships`, 20 for each socket.
fn report_join_error(group: IpAddr, interface: u32, error: &io::Error) {
    static REPORTED: Once = Once::new();
    REPORTED.call_once(|| {
        let hint = if error.raw_os_error() == Some(libc::ENOBUFS) {
            "; raise sysctl net.ipv4.igmp_max_memberships"
        } else {
            ""
        };
        tracing::warn!(
            "cannot join multicast group {group} on interface {interface}, so its packets from there are lost: {error}{hint}"
        );
    });
}

impl MulticastTable {
    pub(crate) fn new(qpn_prefix: u32, arena: &'static Arena, peers: &'static PeerTable) -> Self {
        Self {
            qpn_prefix,
            arena,
            peers,
            own: Mutex::default(),
            announced: (0..PREFIXES / 64).map(|_| AtomicU64::new(0)).collect(),
            announcements: AtomicU64::new(1),
            handled: AtomicU64::new(0),
            handling: Mutex::default(),
            ask_again_at: AtomicU64::new(0),
            members: Mutex::default(),
            searched: AtomicBool::new(false),
            changes: OnceLock::new(),
        }
    }

    /// Attaches a queue pair to a group. A second call does nothing. `port` is asked for once no port that opens can miss the
    /// queue pair.
    ///
    /// # Errors
    /// ENOMEM when the table is full; what joining the group at the port, and the search for other processes, report.
    pub(crate) fn attach<'a>(
        &self,
        port: impl FnOnce() -> Option<&'a Port>,
        group: Group,
        qpn: Qpn,
    ) -> Result<()> {
        let others = {
            let mut own = self.own.lock().expect("no panic under this lock");
            let others = if own.announced { Vec::new() } else { processes()? };
            if own.entries.contains_key(&(group, qpn)) {
                return Ok(());
            }
            let index = match own.free.pop() {
                Some(index) => index,
                None if own.len < MAX_MULTICAST => {
                    own.len += 1;
                    own.len - 1
                }
                None => return Err(Errno::NOMEM),
            };
            if !own.has_members(&group)
                && let Some(port) = port()
            {
                self.watch_addresses();
                if let Err(error) = own.join(port, &group) {
                    own.free.push(index);
                    return Err(error);
                }
            }
            own.entries.insert((group, qpn), index);
            let entry = entry(self.arena, index);
            let [high, low] = halves(&group);
            // A reader that sees a part of the group sees that the entry was free.
            fence(Ordering::Release);
            entry.group[0].store(high, Ordering::Relaxed);
            entry.group[1].store(low, Ordering::Relaxed);
            entry.qpn.store(qpn.get(), Ordering::Release);
            self.arena.get::<Header>(0).multicast_len.store(own.len as u32, Ordering::Release);
            if std::mem::replace(&mut own.announced, true) { None } else { Some(others) }
        };
        if let Some(mut others) = others {
            self.announce(self.qpn_prefix);
            others.retain(|prefix| *prefix != self.qpn_prefix);
            let (peers, _unanswered) = self.peers.owners_of(others, ANSWER_TIME);
            Peer::announce_multicast(&peers, self.qpn_prefix, ANSWER_TIME);
        }
        Ok(())
    }

    /// Detaches a queue pair from a group.
    ///
    /// # Errors
    /// EINVAL if it is not attached.
    pub(crate) fn detach(&self, port: Option<&Port>, group: Group, qpn: Qpn) -> Result<()> {
        let mut own = self.own.lock().expect("no panic under this lock");
        let index = own.entries.remove(&(group, qpn)).ok_or(Errno::INVAL)?;
        own.release(self.arena, port, index, &group);
        Ok(())
    }

    /// Joins the groups of attached queue pairs at a port that was just opened. Errors were reported on standard error.
    pub(crate) fn port_opened(&self, port: &Port) {
        // An error shows in duplicates of multicast datagrams only.
        let _ = port.udp().set_multicast_loop(path::is_wire());
        let mut own = self.own.lock().expect("no panic under this lock");
        if !own.entries.is_empty() {
            self.watch_addresses();
            own.join_all(port);
        }
    }

    fn watch_addresses(&self) {
        if self.changes.get().is_none() {
            match AddressChanges::new() {
                Ok(changes) => _ = self.changes.set(changes),
                Err(error) => tracing::warn!(
                    "multicast packets from interfaces that come later are lost, because changes are not reported: {error}"
                ),
            }
        }
    }

    /// Readable when the host's addresses have changed, and groups may have to be joined on more interfaces.
    pub(crate) fn address_changes(&self) -> Option<BorrowedFd<'_>> {
        self.changes.get().map(AsFd::as_fd)
    }

    /// Joins the groups on interfaces that came after the queue pairs were attached.
    pub(crate) fn addresses_changed(&self, port: Option<&Port>) {
        if let Some(changes) = self.changes.get() {
            // Before the interfaces are listed.
            changes.clear();
        }
        if let Some(port) = port {
            self.own.lock().expect("no panic under this lock").join_all(port);
        }
    }

    /// This process's queue pairs in a group.
    pub(crate) fn own_members(&self, group: &Group) -> Vec<Qpn> {
        let own = self.own.lock().expect("no panic under this lock");
        own.entries.keys().filter(|(of, _)| of == group).map(|(_, qpn)| *qpn).collect()
    }

    /// Whether a queue pair belongs to any group.
    pub(crate) fn has(&self, qpn: Qpn) -> bool {
        let own = self.own.lock().expect("no panic under this lock");
        own.entries.keys().any(|(_, member)| *member == qpn)
    }

    /// Detaches a queue pair from all groups.
    pub(crate) fn detach_all(&self, port: Option<&Port>, qpn: Qpn) {
        let mut own = self.own.lock().expect("no panic under this lock");
        let detached: Vec<_> = own.entries.extract_if(|(_, member), _| *member == qpn).collect();
        for ((group, _), index) in detached {
            own.release(self.arena, port, index, &group);
        }
    }

    /// Notes a process that has, or may have, queue pairs in groups.
    pub(crate) fn announce(&self, qpn_prefix: u32) {
        if self.mark(qpn_prefix) {
            self.announcements.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Notes a process that says hello, and may have queue pairs in groups. The next datagram does not wait for it.
    pub(crate) fn said_hello(&self, qpn_prefix: u32) {
        if self.mark(qpn_prefix) {
            self.ask_again_at.store(1, Ordering::SeqCst);
        }
    }

    /// Sets the bit of a process to connect to; false if there is no such prefix.
    fn mark(&self, qpn_prefix: u32) -> bool {
        let word = self.announced.get(qpn_prefix as usize / 64);
        word.map(|word| word.fetch_or(1 << (qpn_prefix % 64), Ordering::SeqCst)).is_some()
    }

    /// The queue pairs of this host that belong to a group.
    pub(crate) fn members(&self, group: &Group) -> Vec<Qpn> {
        if self.handled.load(Ordering::Acquire) != self.announcements.load(Ordering::Acquire) {
            self.handle_announcements(ANSWER_TIME);
        } else if matches!(self.ask_again_at.load(Ordering::Relaxed), at if at != 0 && at <= clock::monotonic())
        {
            // After a search that failed, nobody was asked yet.
            let is_first = !self.searched.load(Ordering::Relaxed);
            self.handle_announcements(if is_first { ANSWER_TIME } else { Duration::ZERO });
        }
        let mut peers = self.members.lock().expect("no panic under this lock");
        peers.retain(|peer| peer.alive());
        peers.iter().flat_map(|peer| members_in(peer, group)).collect()
    }

    /// Connects to the processes that have announced themselves. Those that do not answer within `wait` stay announced.
    #[cold]
    fn handle_announcements(&self, wait: Duration) {
        let _handling = self.handling.lock().expect("no panic under this lock");
        if !self.searched.load(Ordering::Relaxed)
            && let Ok(prefixes) = processes()
        {
            prefixes.into_iter().for_each(|prefix| self.announce(prefix));
            self.searched.store(true, Ordering::Relaxed);
        }
        let announcements = self.announcements.load(Ordering::Acquire);
        let mut announced = Vec::new();
        for (index, word) in self.announced.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                announced.push(index as u32 * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
        // A process that has exited meanwhile has no queue pairs.
        let (peers, unanswered) = self.peers.owners_of(announced, wait);
        {
            let mut members = self.members.lock().expect("no panic under this lock");
            for peer in peers {
                if !members.iter().any(|known| Arc::ptr_eq(known, &peer)) {
                    members.push(peer);
                }
            }
        }
        for prefix in &unanswered {
            self.mark(*prefix);
        }
        let again = clock::monotonic() + ASK_INTERVAL.as_nanos() as u64;
        let is_complete = unanswered.is_empty() && self.searched.load(Ordering::Relaxed);
        self.ask_again_at.store(if is_complete { 0 } else { again }, Ordering::SeqCst);
        // A process has said hello meanwhile.
        if is_complete && self.announced.iter().any(|word| word.load(Ordering::SeqCst) != 0) {
            self.ask_again_at.store(again, Ordering::SeqCst);
        }
        self.handled.store(announcements, Ordering::Release);
    }
}

/// The queue pairs that a process publishes as members of the group.
fn members_in(peer: &Peer, group: &Group) -> Vec<Qpn> {
    let wanted = halves(group);
    let len = peer.header().map_or(0, |header| header.multicast_len.load(Ordering::Acquire) as usize);
    (0..len.min(MAX_MULTICAST))
        .filter_map(|index| {
            let entry: &MulticastEntry =
                peer.arena().get(MULTICAST_TABLE + index * size_of::<MulticastEntry>())?;
            let qpn = entry.qpn.load(Ordering::Acquire);
            let found = [0, 1].map(|half: usize| entry.group[half].load(Ordering::Relaxed));
            // The entry may have been freed, and used for another group.
            fence(Ordering::Acquire);
            let is_same = entry.qpn.load(Ordering::Relaxed) == qpn;
            (is_same && qpn != 0 && found == wanted).then_some(Qpn::new(qpn))
        })
        .collect()
}

fn entry(arena: &Arena, index: usize) -> &MulticastEntry {
    arena.get(MULTICAST_TABLE + index * size_of::<MulticastEntry>())
}

fn halves(group: &Group) -> [u64; 2] {
    let half = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().expect("eight bytes"));
    [half(&group[..8]), half(&group[8..])]
}

/// The prefixes of this user's processes that have the device open now.
fn processes() -> io::Result<Vec<u32>> {
    let prefix = ipc::socket_name_prefix();
    let names = socket::listening_names(&prefix)?;
    let prefix_in = |name: String| match name.strip_prefix(&prefix) {
        Some(prefix) if prefix.len() == 3 => u32::from_str_radix(prefix, 16).ok(),
        _ => None,
    };
    Ok(names.into_iter().filter_map(prefix_in).collect())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn multicast_gids_are_recognised() {
        for (text, group) in
            [("ff02::1", true), ("ff0e::ffff:e001:203", true), ("fe80::1", false), ("::1", false)]
        {
            assert_eq!(is_group(&text.parse::<Ipv6Addr>().unwrap().octets()), group, "{text}");
        }
        for (text, group) in [("224.0.0.1", true), ("239.255.255.255", true), ("192.0.2.1", false)] {
            let mapped = text.parse::<Ipv4Addr>().unwrap().to_ipv6_mapped().octets();
            assert_eq!(is_group(&mapped), group, "{text}");
        }
    }

    #[test]
    fn both_forms_of_the_route_header_name_the_group() {
        let v6: Ipv6Addr = "ff0e::5".parse().unwrap();
        let mut header = [0; 40];
        header[0] = 0x60;
        header[24..].copy_from_slice(&v6.octets());
        assert_eq!(group_of(&header), Some(v6.octets()));
        let v4 = Ipv4Addr::new(239, 1, 2, 3);
        let mut header = [0; 40];
        header[20] = 0x45;
        header[36..].copy_from_slice(&v4.octets());
        assert_eq!(group_of(&header), Some(v4.to_ipv6_mapped().octets()));
        header[36] = 192;
        assert_eq!(group_of(&header), None);
    }
}
