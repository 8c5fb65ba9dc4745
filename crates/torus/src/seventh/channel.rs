//! One reliable connection between an outside host and its gateway. Both ends are alike: staging memory that the other end
//! writes, slots of messages that it sends, and slots of messages to it.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use millstream_rdma::memory::OutOfBounds;
use millstream_rdma::queue::Signal;
use millstream_rdma::{
    Access, CompletionQueue, Device, PreparedQueuePair, QueuePair, RcOptions, RemoteMemory, Sge, WrId,
};

use super::message::{MAX_COMMANDS, MESSAGE_BYTES};
use crate::control::STAGING;
use crate::memory::Memory;

/// Messages to an end whose completion has not been seen, and receives for messages from it: one for each command, and one
/// for [`FromGateway::Ready`](super::message::FromGateway::Ready).
const SLOTS: u32 = MAX_COMMANDS as u32 + 1;
const RECEIVE: u64 = 1 << 63;

/// Completions of one connection.
pub(super) const COMPLETIONS: u32 = 3 * SLOTS;

/// The number of a work request: kind, connection, slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkId {
    pub(super) connection: u32,
    pub(super) receive: bool,
    slot: u16,
}

impl WorkId {
    fn encode(self) -> WrId {
        let kind = if self.receive { RECEIVE } else { 0 };
        WrId(kind | u64::from(self.connection) << 16 | u64::from(self.slot))
    }

    pub(super) fn decode(id: WrId) -> WorkId {
        WorkId { connection: (id.0 >> 16) as u32, receive: id.0 & RECEIVE != 0, slot: id.0 as u16 }
    }
}

/// Memory and queue pair of an end before it is connected.
#[derive(Debug)]
pub(super) struct PreparedChannel {
    connection: u32,
    pub(super) prepared: PreparedQueuePair,
    staging: Memory,
    messages: Memory,
}

impl PreparedChannel {
    pub(super) fn new(
        device: &Device,
        queue: &CompletionQueue,
        connection: u32,
    ) -> io::Result<PreparedChannel> {
        let memory = |name, length, access| Memory::allocate(name, length, Some((device, access)));
        let staging = memory("millstream-torus-staging", STAGING as usize, Access::REMOTE_WRITE)?.0;
        let length = 2 * SLOTS as usize * MESSAGE_BYTES;
        let messages = memory("millstream-torus-messages", length, Access::LOCAL_WRITE)?.0;
        let options = RcOptions {
            // A WRITE of data before each message.
            send_depth: 2 * SLOTS,
            recv_depth: SLOTS,
            send_sges: 1,
            max_inline: 0,
            access: Access::REMOTE_WRITE,
            ..RcOptions::default()
        };
        let prepared = PreparedQueuePair::new(device, queue, queue, &options).map_err(io::Error::other)?;
        for slot in 0..SLOTS as u16 {
            let id = WorkId { connection, receive: true, slot };
            prepared.post_recv(&[sge_of(&messages, slot)?], id.encode()).map_err(io::Error::other)?;
        }
        Ok(PreparedChannel { connection, prepared, staging, messages })
    }

    /// The staging memory, for the other end.
    pub(super) fn staging(&self) -> io::Result<RemoteMemory> {
        Ok(self.staging.region().ok_or(io::ErrorKind::Unsupported)?.remote())
    }

    /// Splits off the queue pair to connect it.
    pub(super) fn into_parts(self) -> (PreparedQueuePair, UnconnectedMemory) {
        let memory =
            UnconnectedMemory { connection: self.connection, staging: self.staging, messages: self.messages };
        (self.prepared, memory)
    }
}

/// Memory of an end whose queue pair is being connected.
#[derive(Debug)]
pub(super) struct UnconnectedMemory {
    connection: u32,
    staging: Memory,
    messages: Memory,
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Channel {
    connection: u32,
    // Before the memory that it uses.
    pair: QueuePair,
    stream: Arc<TcpStream>,
    staging: Arc<Memory>,
    /// Staging memory of the other end.
    remote: RemoteMemory,
    messages: Memory,
    free: Vec<u16>,
}

impl Channel {
    pub(super) fn new(
        memory: UnconnectedMemory,
        pair: QueuePair,
        remote: RemoteMemory,
        stream: TcpStream,
    ) -> Channel {
        Channel {
            connection: memory.connection,
            pair,
            stream: Arc::new(stream),
            staging: Arc::new(memory.staging),
            remote,
            messages: memory.messages,
            free: (SLOTS as u16..2 * SLOTS as u16).collect(),
        }
    }

    pub(super) fn connection(&self) -> u32 {
        self.connection
    }

    /// Ends when the other end does.
    pub(super) fn stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    pub(super) fn staging(&self) -> &Arc<Memory> {
        &self.staging
    }

    /// Whether a message can be sent now.
    pub(super) fn is_ready(&self) -> bool {
        !self.free.is_empty()
    }

    /// Sends a message, after a range of the staging memory if there is one. The caller asked [`Channel::is_ready`].
    pub(super) fn send(&mut self, data: Option<(u64, u32)>, message: &[u8; MESSAGE_BYTES]) -> io::Result<()> {
        let Some(&slot) = self.free.last() else { return Err(io::ErrorKind::WouldBlock.into()) };
        let id = WorkId { connection: self.connection, receive: false, slot }.encode();
        if let Some((at, length)) = data.filter(|&(_, length)| length > 0) {
            let region = self.staging.region().ok_or(io::ErrorKind::Unsupported)?;
            let from = region.sge(at, length).map_err(out_of_bounds)?;
            let to = self.remote.at(at, length.into()).map_err(out_of_bounds)?;
            // The message behind it is signaled, and completes later.
            self.pair.post_write(&[from], to, Signal::No, id).map_err(io::Error::other)?;
        }
        self.messages.store(offset(slot), message).map_err(io::Error::other)?;
        self.pair.post_send(&[sge_of(&self.messages, slot)?], Signal::Yes, id).map_err(io::Error::other)?;
        self.free.pop();
        Ok(())
    }

    /// A message to the other end has left.
    pub(super) fn sent(&mut self, id: WorkId) {
        if (SLOTS..2 * SLOTS).contains(&u32::from(id.slot)) && !self.free.contains(&id.slot) {
            self.free.push(id.slot);
        }
    }

    /// The message that arrived, whose receive is posted again.
    pub(super) fn received(&mut self, id: WorkId, length: u32) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (length as usize).min(MESSAGE_BYTES)];
        self.messages.load(offset(id.slot), &mut bytes).map_err(io::Error::other)?;
        let again = WorkId { receive: true, ..id };
        let sge = sge_of(&self.messages, id.slot)?;
        self.pair.post_recv(&[sge], again.encode()).map_err(io::Error::other)?;
        Ok(bytes)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // A queue pair in error sends nothing more.
        let _ = self.pair.shut_down();
    }
}

fn out_of_bounds(error: OutOfBounds) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

fn offset(slot: u16) -> u64 {
    u64::from(slot) * MESSAGE_BYTES as u64
}

fn sge_of(messages: &Memory, slot: u16) -> io::Result<Sge> {
    let region = messages.region().ok_or(io::ErrorKind::Unsupported)?;
    region.sge(offset(slot), MESSAGE_BYTES as u32).map_err(out_of_bounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_work_requests_keep_their_fields() {
        for connection in [0, 7, u32::MAX] {
            for receive in [false, true] {
                let id = WorkId { connection, receive, slot: u16::MAX };
                assert_eq!(WorkId::decode(id.encode()), id);
            }
        }
    }
}
