//! Another user of the same host: must not access memory, read data, or disturb the device.
//!
//! The tests switch to both users, which requires root. Without root they report that they were skipped.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use millstream_device::types::{WC_OP_RDMA_WRITE, WC_RETRY_EXC_ERR};
use millstream_quantity::Rkey;
use millstream_shm::poll_readable;
use millstream_shm::socket::{Connection, Listener};
use serde::{Deserialize, Serialize};

use crate::support::wire::{HELLO, message};
use crate::support::{Adapter, Completion, End, Kind, Process, QpConfig, connect, connect_queue_pair, next};
use crate::support::{pattern, recv_from_parent, send_to_parent, serve};

/// User ids of the two processes. Most systems have no such users.
pub(crate) const OWNER: u32 = 65533;
pub(crate) const STRANGER: u32 = 65532;

pub(crate) fn is_root(test: &str) -> bool {
    // SAFETY: a plain system call.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        eprintln!("{test} was not run: becoming another user takes root");
    }
    root
}

pub(crate) fn become_user(uid: u32) {
    // SAFETY: the C library switches all threads of this process. The switch makes the process undumpable,
    // which would protect it more than an ordinary process of the user; so that is undone.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setgid(uid), 0);
        assert_eq!(libc::setuid(uid), 0);
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
    }
}

/// In another process of another user: an end of a connection.
pub(crate) fn owner() {
    become_user(OWNER);
    serve();
}

/// The objects that the other user attacks.
#[derive(Serialize, Deserialize)]
struct Aim {
    process: u32,
    number: u32,
    /// Of a registered region.
    addr: u64,
    key: u32,
}

fn of_owner() -> End {
    End::OtherProcess(Box::new(Process::start("owner")))
}

#[test]
fn another_user_reaches_nothing() {
    if !is_root("another_user_reaches_nothing") {
        return;
    }
    let (mut near, mut owner) = (of_owner(), of_owner());
    let config = QpConfig::default();
    connect(&mut near, &mut owner, &config);
    let bytes = pattern(1, 10_000);
    let (source, target) = (near.hold(&bytes), owner.register(Kind::Anonymous, 10_000, 0));
    let write = |near: &mut End| {
        near.write(1, &[source.all()], (target.addr, target.key));
        assert_eq!(near.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    };
    write(&mut near);
    let (process, number) = (owner.process().id(), owner.number());
    let aim = Aim { process, number, addr: target.addr, key: target.key };
    let mut stranger = Process::start("trespasser");
    stranger.send_line(&serde_json::to_string(&aim).expect("plain data"));
    assert_eq!(stranger.recv_line(), "nothing");
    assert!(stranger.finish().success());
    assert!(owner.load(&target, 0, bytes.len()) == bytes, "as it was");
    write(&mut near);
}

/// In another process: another user, which tries every interface of the system.
pub(crate) fn trespasser() {
    become_user(STRANGER);
    let aim: Aim = serde_json::from_str(&recv_from_parent().expect("an aim")).expect("an aim");
    let denied = |what: &str, done: bool| {
        let error = std::io::Error::last_os_error();
        assert!(!done && matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)), "{what}: {error}");
    };
    // Files, memory and descriptors through /proc.
    let proc = format!("/proc/{}", aim.process);
    for folder in ["fd", "map_files"] {
        let error = std::fs::read_dir(format!("{proc}/{folder}")).expect_err(folder);
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{folder}");
    }
    for file in (0..64).map(|fd| format!("fd/{fd}")).chain(["mem", "maps", "environ"].map(str::to_owned)) {
        let error = std::fs::OpenOptions::new().read(true).open(format!("{proc}/{file}")).expect_err(&file);
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{file}");
    }
    let mut byte = 0u8;
    let here = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let there = libc::iovec { iov_base: aim.addr as *mut _, iov_len: 1 };
    let pid = aim.process as i32;
    // SAFETY: system calls with local variables; the kernel refuses all of them.
    unsafe {
        let (here, there) = (&raw const here, &raw const there);
        denied("reading its memory", libc::process_vm_readv(pid, here, 1, there, 1, 0) >= 0);
        denied("writing its memory", libc::process_vm_writev(pid, here, 1, there, 1, 0) >= 0);
        denied("tracing it", libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) >= 0);
        denied("killing it", libc::kill(pid, libc::SIGKILL) >= 0);
        let handle = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        assert!(handle >= 0, "that it is there is no secret");
        for fd in 0..64 {
            denied("taking a descriptor", libc::syscall(libc::SYS_pidfd_getfd, handle, fd, 0) >= 0);
        }
    }
    // Its socket, whose name is not secret. The client's own check is left out.
    let name = format!("millstream/{OWNER}/{:03x}", aim.number >> 12);
    let timeout = Duration::from_secs(5);
    let refused = Connection::open(&name, timeout).expect_err("our side looks at the user, too");
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    let connection = Connection::open_any_user(&name, timeout).expect("the socket itself is open to all");
    let _ = connection.send(&message(HELLO, &[crate::support::wire::VERSION, std::process::id(), 1]), &[]);
    assert!(matches!(connection.receive(&mut [0; 64]), Ok((0, _)) | Err(_)), "an answer");
    // With its own device, and with all numbers and keys.
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = adapter.qp(&cq).expect("a queue pair");
    let config = QpConfig { timeout: 8, retry_cnt: 1, ..QpConfig::default() };
    connect_queue_pair(&qp, aim.number, &config);
    let mut memory = vec![0xffu8; 8];
    let mr = adapter.register(&mut memory);
    let sges = [crate::support::element(&memory, &mr)];
    let wr = millstream_device::send_wr::SendWr {
        sges: &sges,
        remote_addr: aim.addr,
        rkey: Rkey::new(aim.key),
        ..millstream_device::send_wr::SendWr::default()
    };
    qp.post_send(&wr).expect("room");
    assert_eq!(next(&cq).status, WC_RETRY_EXC_ERR);
    send_to_parent("nothing");
}

#[test]
fn socket_names_of_another_user_do_not_delay() {
    if !is_root("socket_names_of_another_user_do_not_delay") {
        return;
    }
    let mut squatter = Process::start("squatter");
    squatter.send_line("take");
    let taken: u32 = squatter.recv_line().parse().expect("a number");
    // New devices take other names.
    let (mut a, mut b) = (of_owner(), of_owner());
    let config = QpConfig { timeout: 10, retry_cnt: 2, ..QpConfig::default() };
    connect(&mut a, &mut b, &config);
    let (source, target) = (a.hold(&[1; 64]), b.register(Kind::Anonymous, 64, 0));
    a.write(1, &[source.all()], (target.addr, target.key));
    assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    // A process that connects to one of the squatter's numbers sends it nothing.
    let mut lost = of_owner();
    lost.open(&config);
    let start = Instant::now();
    lost.connect_to(taken << 12 | 1, &config);
    let source = lost.hold(&[1; 64]);
    lost.send(1, &[source.all()]);
    assert_eq!(lost.sent(1)[0].status, WC_RETRY_EXC_ERR);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    squatter.send_line("what did you hear?");
    assert_eq!(squatter.recv_line(), "calls without a word");
    assert!(squatter.finish().success());
}

/// In another process: another user, which holds socket names of the owner.
pub(crate) fn squatter() {
    become_user(STRANGER);
    recv_from_parent().expect("the word");
    let name = |block: u32| format!("millstream/{OWNER}/{block:03x}");
    let held: Vec<_> =
        (1..800).filter_map(|block| Some((block, Listener::bind(&name(block)).ok()?))).collect();
    let (block, listener) = held.last().expect("some are free");
    send_to_parent(&block.to_string());
    recv_from_parent().expect("a question");
    let mut calls = 0;
    while poll_readable(&[listener.as_fd()], Some(Duration::ZERO)).expect("a descriptor") == [true] {
        let call = listener.accept_any_user().expect("somebody called");
        let mut buffer = [0; 64];
        assert!(matches!(call.receive(&mut buffer), Ok((0, _)) | Err(_)), "the caller said something");
        calls += 1;
    }
    assert_ne!(calls, 0);
    send_to_parent("calls without a word");
}

/// In another process: another user, which holds socket names of the owner whose queues of connections are full.
pub(crate) fn full_queues() {
    become_user(STRANGER);
    let mut held = Vec::new();
    for block in 1..4000 {
        if held.len() == 600 {
            break;
        }
        held.extend(full_queue(&format!("millstream/{OWNER}/{block:03x}")).into_iter().flatten());
    }
    assert_eq!(held.len(), 600, "300 names are free");
    send_to_parent("full");
    recv_from_parent();
}

/// A listener without room in its queue, and the client that waits there. None if the name is taken.
fn full_queue(name: &str) -> Option<[OwnedFd; 2]> {
    // SAFETY: plain system calls with local variables; the descriptors are new.
    unsafe {
        let [listener, client] = [(); 2].map(|()| {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            assert!(fd >= 0);
            OwnedFd::from_raw_fd(fd)
        });
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        let len = (size_of::<libc::sa_family_t>() + 1 + name.len()) as libc::socklen_t;
        let address = (&raw const address).cast();
        if libc::bind(listener.as_raw_fd(), address, len) != 0 {
            return None;
        }
        assert_eq!(libc::listen(listener.as_raw_fd(), 0), 0);
        assert_eq!(libc::connect(client.as_raw_fd(), address, len), 0);
        Some([listener, client])
    }
}
