//! The multicast groups that a socket has joined. The kernel lists the groups of each interface, but not those of a
//! socket, so leaving all means to try each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;

use super::options::membership;

/// Leaves all groups, on all interfaces.
pub(crate) fn leave_all_groups(socket: BorrowedFd<'_>) {
    let read = |table| std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap_or_default();
    let (igmp, igmp6) = (read("igmp"), read("igmp6"));
    for (interface, group) in joined_v4(&igmp).chain(joined_v6(&igmp6)) {
        // An error means that another socket has joined this one.
        let _ = membership(socket, group, interface, false);
    }
}

/// The groups in `/proc/net/igmp`: a line for each interface, which begins with its index, and indented lines that begin with
/// a group's address, printed as a number of this machine.
fn joined_v4(table: &str) -> impl Iterator<Item = (u32, IpAddr)> {
    let mut interface = 0;
    table.lines().skip(1).filter_map(move |line| {
        let first = line.split_whitespace().next()?;
        if !line.starts_with(char::is_whitespace) {
            interface = first.parse().ok()?;
            return None;
        }
        let group = u32::from_str_radix(first, 16).ok()?;
        Some((interface, Ipv4Addr::from(group.to_ne_bytes()).into()))
    })
}

/// The groups in `/proc/net/igmp6`: lines of an interface's index, its name and a group's address.
fn joined_v6(table: &str) -> impl Iterator<Item = (u32, IpAddr)> {
    table.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        let interface = fields.next()?.parse().ok()?;
        let group = u128::from_str_radix(fields.nth(1)?, 16).ok()?;
        Some((interface, Ipv6Addr::from(group).into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_tables() {
        let group = u32::from_ne_bytes([239, 1, 2, 3]);
        let igmp = format!(
            "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
             1\tlo        :     1      V3\n\t\t\t\t{group:08X}     1 0:00000000\t\t0\n\
             12\teth0      :     1      V3\n\t\t\t\t{group:08X}     1 0:00000000\t\t0\n"
        );
        let address: IpAddr = "239.1.2.3".parse().unwrap();
        assert_eq!(joined_v4(&igmp).collect::<Vec<_>>(), [(1, address), (12, address)]);
        let igmp6 = "4    eth0            ff0200000000000000000001ff000002     1 00000004 0\n";
        let address: IpAddr = "ff02::1:ff00:2".parse().unwrap();
        assert_eq!(joined_v6(igmp6).collect::<Vec<_>>(), [(4, address)]);
    }
}
