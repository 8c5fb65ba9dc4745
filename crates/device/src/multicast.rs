//! Multicast groups of datagram queue pairs (IBTA volume 1, 10.5).
//!
//! Each process shows in its arena which of its queue pairs belong to which groups, so nobody else has to
//! be told of a change, and nothing is left of a process that ends. A sender walks the tables of all
//! processes that it knows. It finds those that exist when it sends to a group for the first time; one that
//! attaches its first queue pair later introduces itself.
//!
//! Other hosts are reached by packets to the group's IP address (annex A17.4.4). Each process joins the groups of its
//! queue pairs at its own socket, so each gets its own copy. Members on the sender's host already have theirs, so
//! such packets do not come back to it, unless everything is to go by packets.

use std::collections::HashMap;
use std::io;
use std::net::Ipv6Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};

use millstream_link::Port;
use millstream_shm::socket;

use crate::caps::MAX_MULTICAST;
use crate::errno::{Errno, Result};
use crate::gid;
use crate::greeting;
use crate::host::Host;
use crate::layout::{MULTICAST_TABLE, MulticastEntry, QPN_INDEX_BITS};
use crate::path::{self, PathPreference};
use crate::peer::Peer;

/// The queue pair number that all datagrams to groups carry (10.5.1).
pub(crate) const EVERYBODY: u32 = 0xff_ffff;

/// The address of a group.
pub(crate) type Group = [u8; 16];

/// Whether this is the address of a group: of IPv6, or of IPv4 mapped into it (RoCE annex A17.4.4).
#[must_use]
pub fn is_group(gid: &Group) -> bool {
    let mapped = gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
    gid[0] == 0xff || (mapped && gid[12] & 0xf0 == 0xe0)
}

/// Whether members on this host, too, are to be reached by packets.
pub(crate) fn is_by_packets_only() -> bool {
    path::preference() == Ok(PathPreference::Wire)
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

/// Numbers of processes.
const BLOCKS: usize = 1 << (24 - QPN_INDEX_BITS);

/// This process's attachments, and the processes that may have some.
#[derive(Debug)]
pub(crate) struct Multicast {
    own: Mutex<Attachments>,
    /// Processes to get to know, a bit each.
    mentioned: Box<[AtomicU64]>,
    /// How often a process was mentioned, and how many of these times have been followed up. The first one
    /// stands for the search for those that were there before us.
    mentions: AtomicU64,
    met: AtomicU64,
    /// Held while processes are met: whoever needs them waits.
    meeting: Mutex<()>,
    peers: Mutex<Vec<Arc<Peer>>>,
}

#[derive(Debug, Default)]
struct Attachments {
    /// Places in the table.
    places: HashMap<(Group, u32), usize>,
    free: Vec<usize>,
    /// Places that were ever used.
    len: usize,
    introduced: bool,
}

impl Attachments {
    fn has_members(&self, group: &Group) -> bool {
        self.places.keys().any(|(of, _)| of == group)
    }

    /// Frees the place of an attachment that is no more.
    fn release(&mut self, host: &'static Host, place: usize, group: &Group) {
        entry(host, place).qpn.store(0, Ordering::Release);
        self.free.push(place);
        if !self.has_members(group)
            && let Some(port) = host.wire.port()
        {
            for interface in interfaces() {
                // It may be one that was not joined.
                let _ = port.udp().leave_multicast(Ipv6Addr::from(*group).to_canonical(), interface);
            }
        }
    }
}

/// The interfaces that packets of groups come by. Over loopback they come from this host only.
fn interfaces() -> Vec<u32> {
    let table = gid::table();
    let here = |entry: &gid::GidEntry| {
        let address = Ipv6Addr::from(entry.raw).to_canonical();
        address.is_loopback()
    };
    let mut interfaces: Vec<u32> = table
        .iter()
        .filter(|entry| is_by_packets_only() || !here(entry))
        .map(|entry| entry.ifindex)
        .collect();
    interfaces.sort_unstable();
    interfaces.dedup();
    interfaces
}

/// Has the packets of a group come to this process, by all interfaces that can.
fn join(port: &Port, group: &Group) -> Result<()> {
    let address = Ipv6Addr::from(*group).to_canonical();
    let (mut joined, mut refused) = (false, None);
    for interface in interfaces() {
        match port.udp().join_multicast(address, interface) {
            Ok(()) => joined = true,
            // By a former owner of the socket, or by `port_opened` a moment ago.
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) => joined = true,
            // The interface has no addresses of this family.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EADDRNOTAVAIL)) => {}
            Err(error) => refused = Some(error),
        }
    }
    match refused {
        Some(error) if !joined => refuse(address, &error),
        _ => Ok(()),
    }
}

/// Usually `net.ipv4.igmp_max_memberships`, 20 for each socket.
fn refuse(group: std::net::IpAddr, error: &io::Error) -> Result<()> {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        let more = if error.raw_os_error() == Some(libc::ENOBUFS) {
            " (sysctl net.ipv4.igmp_max_memberships)"
        } else {
            ""
        };
        eprintln!("millstream: no packets of multicast group {group} from other hosts: {error}{more}");
    });
    // Then it is a group of this host.
    if is_by_packets_only() { Err(Errno(error.raw_os_error().unwrap_or(libc::EIO))) } else { Ok(()) }
}

impl Default for Multicast {
    fn default() -> Self {
        Self {
            own: Mutex::default(),
            mentioned: (0..BLOCKS / 64).map(|_| AtomicU64::new(0)).collect(),
            mentions: AtomicU64::new(1),
            met: AtomicU64::new(0),
            meeting: Mutex::default(),
            peers: Mutex::default(),
        }
    }
}

impl Multicast {
    /// Attaches a queue pair to a group. Twice is once.
    pub(crate) fn attach(&self, host: &'static Host, group: Group, qpn: u32) -> Result<()> {
        let first = {
            let mut own = self.own.lock().expect("no panic under this lock");
            if own.places.contains_key(&(group, qpn)) {
                return Ok(());
            }
            let place = match own.free.pop() {
                Some(place) => place,
                None if own.len < MAX_MULTICAST => {
                    own.len += 1;
                    own.len - 1
                }
                None => return Err(Errno::NOMEM),
            };
            if !own.has_members(&group)
                && let Some(port) = host.wire.port()
                && let Err(error) = join(port, &group)
            {
                own.free.push(place);
                return Err(error);
            }
            own.places.insert((group, qpn), place);
            let entry = entry(host, place);
            let [high, low] = halves(&group);
            entry.group[0].store(high, Ordering::Relaxed);
            entry.group[1].store(low, Ordering::Relaxed);
            entry.qpn.store(qpn, Ordering::Release);
            host.header().multicast_len.store(own.len as u32, Ordering::Release);
            !std::mem::replace(&mut own.introduced, true)
        };
        if first {
            self.mention(host.block);
            for block in processes().filter(|block| *block != host.block) {
                if let Ok(peer) = host.peer_of(block << QPN_INDEX_BITS) {
                    peer.introduce(host.block);
                }
            }
        }
        Ok(())
    }

    /// Detaches a queue pair from a group.
    pub(crate) fn detach(&self, host: &'static Host, group: Group, qpn: u32) -> Result<()> {
        let mut own = self.own.lock().expect("no panic under this lock");
        let place = own.places.remove(&(group, qpn)).ok_or(Errno::INVAL)?;
        own.release(host, place, &group);
        Ok(())
    }

    /// The port was opened: it gets the packets of groups that queue pairs belong to already. One that it cannot join
    /// was told.
    pub(crate) fn port_opened(&self, port: &Port) {
        // Nothing but multicast: that it cannot be set is told by copies that come twice.
        let _ = port.udp().set_multicast_loop(is_by_packets_only());
        let own = self.own.lock().expect("no panic under this lock");
        let mut groups: Vec<Group> = own.places.keys().map(|(group, _)| *group).collect();
        groups.sort_unstable();
        groups.dedup();
        for group in groups {
            let _ = join(port, &group);
        }
    }

    /// This process's queue pairs in a group.
    pub(crate) fn own_members(&self, group: &Group) -> Vec<u32> {
        let own = self.own.lock().expect("no panic under this lock");
        own.places.keys().filter(|(of, _)| of == group).map(|(_, qpn)| *qpn).collect()
    }

    /// Whether a queue pair belongs to any group.
    pub(crate) fn has(&self, qpn: u32) -> bool {
        let own = self.own.lock().expect("no panic under this lock");
        own.places.keys().any(|(_, member)| *member == qpn)
    }

    /// Detaches a queue pair from all groups.
    pub(crate) fn detach_all(&self, host: &'static Host, qpn: u32) {
        let mut own = self.own.lock().expect("no panic under this lock");
        let places: Vec<_> = own.places.extract_if(|(_, member), _| *member == qpn).collect();
        for ((group, _), place) in places {
            own.release(host, place, &group);
        }
    }

    /// Notes a process that has, or may have, queue pairs in groups.
    pub(crate) fn mention(&self, block: u32) {
        if let Some(word) = self.mentioned.get(block as usize / 64) {
            word.fetch_or(1 << (block % 64), Ordering::AcqRel);
            self.mentions.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The queue pairs of this host that belong to a group, found by whoever sends to it.
    pub(crate) fn members(&self, host: &'static Host, group: &Group) -> Vec<u32> {
        if self.met.load(Ordering::Acquire) != self.mentions.load(Ordering::Acquire) {
            self.meet(host);
        }
        let mut peers = self.peers.lock().expect("no panic under this lock");
        peers.retain(|peer| peer.alive());
        peers.iter().flat_map(|peer| members_in(peer, group)).collect()
    }

    #[cold]
    fn meet(&self, host: &'static Host) {
        let _meeting = self.meeting.lock().expect("no panic under this lock");
        if self.met.load(Ordering::Acquire) == 0 {
            processes().for_each(|block| self.mention(block));
        }
        let mentions = self.mentions.load(Ordering::Acquire);
        for (index, word) in self.mentioned.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                let block = index as u32 * 64 + bits.trailing_zeros();
                bits &= bits - 1;
                // One that ended meanwhile has no queue pairs.
                let Ok(peer) = host.peer_of(block << QPN_INDEX_BITS) else { continue };
                let mut peers = self.peers.lock().expect("no panic under this lock");
                if !peers.iter().any(|known| Arc::ptr_eq(known, &peer)) {
                    peers.push(peer);
                }
            }
        }
        self.met.store(mentions, Ordering::Release);
    }
}

/// The queue pairs that a process shows as members of the group.
fn members_in(peer: &Peer, group: &Group) -> Vec<u32> {
    let wanted = halves(group);
    let len = peer.header().map_or(0, |header| header.multicast_len.load(Ordering::Acquire) as usize);
    (0..len.min(MAX_MULTICAST))
        .filter_map(|place| {
            let at =
                peer.at(MULTICAST_TABLE + place * size_of::<MulticastEntry>(), size_of::<MulticastEntry>())?;
            // SAFETY: in the arena, aligned, and made of atomics.
            let entry = unsafe { &*at.cast::<MulticastEntry>() };
            let qpn = entry.qpn.load(Ordering::Acquire);
            let found = [0, 1].map(|half: usize| entry.group[half].load(Ordering::Relaxed));
            (qpn != 0 && found == wanted).then_some(qpn)
        })
        .collect()
}

fn entry(host: &'static Host, place: usize) -> &'static MulticastEntry {
    // SAFETY: inside the arena, which lives for ever; all fields are atomics.
    unsafe {
        host.arena.at(MULTICAST_TABLE + place * size_of::<MulticastEntry>()).cast::<MulticastEntry>().as_ref()
    }
}

fn halves(group: &Group) -> [u64; 2] {
    let half = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().expect("eight bytes"));
    [half(&group[..8]), half(&group[8..])]
}

/// The numbers of this user's processes that have the device open now.
fn processes() -> impl Iterator<Item = u32> {
    let prefix = greeting::name_prefix();
    let names = socket::listening_names(&prefix);
    names.into_iter().filter_map(move |name| match name.strip_prefix(&prefix) {
        Some(block) if block.len() == 3 => u32::from_str_radix(block, 16).ok(),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn groups_are_told_from_hosts() {
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
