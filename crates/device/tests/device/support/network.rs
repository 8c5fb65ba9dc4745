//! A private network namespace: no other process is on its UDP port, so the order of the test's processes is
//! known.

use std::io;

/// Moves this thread, and the threads and processes that it starts later, to a network namespace with
/// loopback only. False, with the reason on standard error, where the system does not allow that.
pub(crate) fn own_network(test: &str) -> bool {
    let done = enter();
    if let Err(error) = &done {
        eprintln!("{test} was not run: no network namespace of its own: {error}");
    }
    done.is_ok()
}

fn enter() -> io::Result<()> {
    // SAFETY: plain system calls with locals of ours.
    unsafe {
        let check = |result: i32| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
        check(libc::unshare(libc::CLONE_NEWNET))?;
        let socket = check(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?;
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(c"lo".to_bytes()) {
            *to = *from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        let up = check(libc::ioctl(socket, libc::SIOCSIFFLAGS as _, &raw const request));
        libc::close(socket);
        up.map(|_| ())
    }
}
