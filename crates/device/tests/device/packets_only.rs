//! Processes of this host that are reached by packets only: with `MILLSTREAM_PATH=wire`, or in another PID namespace, as
//! those of containers with the host's network. The other end has no such setting.

use std::os::unix::process::CommandExt;

use millstream_device::types::{WC_OP_RDMA_READ, WC_OP_RDMA_WRITE, WC_OP_RECV};

use crate::support::{Completion, End, Kind, Placement, Process, QpConfig, connect, pattern};

/// In a child before `exec`: continues as the first process of a new PID namespace, and waits for that process outside.
fn enter_pid_namespace() -> std::io::Result<()> {
    // SAFETY: system calls only, as a forked child of a program with threads needs.
    unsafe {
        if libc::unshare(libc::CLONE_NEWPID) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        match libc::fork() {
            -1 => Err(std::io::Error::last_os_error()),
            0 => {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            }
            child => {
                // Only the inner process holds the pipes, so that each side sees the other's end.
                (0..1024).for_each(|fd| _ = libc::close(fd));
                libc::waitpid(child, std::ptr::null_mut(), 0);
                libc::_exit(0)
            }
        }
    }
}

#[test]
fn processes_of_two_pid_namespaces_exchange_packets() {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: a PID namespace takes root");
        return;
    }
    // SAFETY: the function makes system calls only.
    let inner = Process::start_with("actor", |command| unsafe { command.pre_exec(enter_pid_namespace) });
    transfer_both_ways(inner);
}

#[test]
fn a_process_follows_its_peer_to_packets() {
    transfer_both_ways(Process::start_with("actor", |command| command.env("MILLSTREAM_PATH", "wire")));
}

/// Connects this process to another one, and transfers from each of them.
fn transfer_both_ways(other: Process) {
    let (mut near, mut other) = (End::new(Placement::SameProcess), End::OtherProcess(Box::new(other)));
    connect(&mut near, &mut other, &QpConfig::default());
    let (source, target) = (near.hold(&pattern(1, 5000)), other.register(Kind::Anonymous, 5000, 0));
    near.write(1, &[source.all()], (target.addr, target.key));
    assert_eq!(near.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    assert_eq!(other.load(&target, 0, 5000), pattern(1, 5000));
    // The other way round, and with a completion.
    let back = near.register(Kind::Anonymous, 5000, 0);
    near.recv(2, &[back.all()]);
    other.send(3, &[target.all()]);
    assert_eq!(near.received(1), [Completion::ok(2, WC_OP_RECV, 5000)]);
    assert_eq!(near.load(&back, 0, 5000), pattern(1, 5000));
    other.sent(1);
    other.read(4, &[target.part(0, 100)], (source.addr, source.key));
    assert_eq!(other.sent(1), [Completion::ok(4, WC_OP_RDMA_READ, 100)]);
}
