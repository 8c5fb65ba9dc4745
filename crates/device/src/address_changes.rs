//! Changes of the host's addresses and interfaces, as the kernel reports them (`rtnetlink(7)`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use millstream_shm::fork::CloseOnForkFd;

/// A descriptor that is readable after a change.
#[derive(Debug)]
pub(crate) struct AddressChanges(CloseOnForkFd);

impl AddressChanges {
    /// Begins to watch.
    ///
    /// # Errors
    /// Those of `socket` and `bind`.
    pub(crate) fn new() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let socket = CloseOnForkFd::open(|| {
            // SAFETY: makes a new descriptor, which nobody else owns.
            unsafe {
                let fd = libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE);
                if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
            }
        })?;
        // SAFETY: a plain structure, which the call reads from the stack.
        let bound = unsafe {
            let mut address: libc::sockaddr_nl = std::mem::zeroed();
            address.nl_family = libc::AF_NETLINK as u16;
            address.nl_groups =
                (libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR) as u32;
            let len = size_of::<libc::sockaddr_nl>() as u32;
            libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len)
        };
        if bound == 0 { Ok(Self(socket)) } else { Err(io::Error::last_os_error()) }
    }

    /// Forgets the changes so far. Their contents do not matter: whoever waits looks at the addresses.
    pub(crate) fn clear(&self) {
        let mut unused = [0u8; 64];
        loop {
            // SAFETY: the start of a message is written to the stack, and the rest dropped.
            let received = unsafe {
                libc::recv(self.0.as_raw_fd(), unused.as_mut_ptr().cast(), unused.len(), libc::MSG_TRUNC)
            };
            // Messages that were lost for lack of room are a change like others (ENOBUFS).
            let goes_on = [libc::EINTR, libc::ENOBUFS];
            if received < 0
                && !io::Error::last_os_error().raw_os_error().is_some_and(|e| goes_on.contains(&e))
            {
                return;
            }
        }
    }
}

impl AsFd for AddressChanges {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
