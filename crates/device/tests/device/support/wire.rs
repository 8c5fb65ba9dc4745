//! A second definition of the messages between devices, for programs that are not devices.

use std::os::fd::OwnedFd;
use std::time::Duration;

use millstream_shm::socket::Connection;

pub(crate) use crate::operations::VERSION;

pub(crate) const HELLO: u32 = 1;
pub(crate) const FILE: u32 = 2;
pub(crate) const CHANNEL: u32 = 3;
pub(crate) const FAULT: u32 = 4;
pub(crate) const REFUSED: u32 = 6;
pub(crate) const LIMIT_REACHED: u32 = 7;
pub(crate) const CONTACT: u32 = 9;
pub(crate) const OVERRUN: u32 = 10;
pub(crate) const SHARED: u32 = 11;
pub(crate) const MEMBER: u32 = 12;
pub(crate) const ABANDONED: u32 = 13;
pub(crate) const REGION_BUSY: u32 = 14;

/// Name of the socket of the process that owns this queue pair.
pub(crate) fn socket_name(qpn: u32) -> String {
    // SAFETY: a plain system call.
    let user = unsafe { libc::geteuid() };
    format!("millstream/{user}/{:03x}", qpn >> 12)
}

/// Connects to the process that owns this queue pair.
pub(crate) fn connect_to_owner(qpn: u32) -> Connection {
    Connection::open(&socket_name(qpn), Duration::from_secs(5)).expect("somebody listens")
}

/// A message: an operation and five words.
pub(crate) fn message(op: u32, words: &[u32]) -> Vec<u8> {
    let mut all = [0u32; 6];
    all[0] = op;
    all[1..=words.len()].copy_from_slice(words);
    all.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// The words of an answer.
pub(crate) fn words(answer: &[u8]) -> Vec<u32> {
    answer.chunks_exact(4).map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]])).collect()
}

/// Sends a request. Returns the answer's words, operation first, and its descriptors.
pub(crate) fn ask(connection: &Connection, op: u32, request: &[u32]) -> (Vec<u32>, Vec<OwnedFd>) {
    connection.send(&message(op, request), &[]).expect("the device listens");
    let mut buffer = [0; 64];
    let (n, fds) = connection.receive(&mut buffer).expect("the device answers");
    (words(&buffer[..n]), fds)
}

/// Sends a hello, and returns the device's arena.
pub(crate) fn exchange_hello(connection: &Connection) -> OwnedFd {
    let (answer, fds) = ask(connection, HELLO, &[VERSION, std::process::id(), 1]);
    assert_eq!(answer[..2], [HELLO, VERSION]);
    fds.into_iter().next().expect("its arena")
}
