//! Queue pairs before they are connected.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;

use millstream_quantity::{Psn, Qpn};
use sideway::ibverbs::address::{AddressHandleAttribute, Gid};
use sideway::ibverbs::device_context::LinkLayer;
use sideway::ibverbs::queue_pair::{
    CreateQueuePairErrorKind, ModifyQueuePairError, QueuePair as _, QueuePairAttribute, QueuePairState,
};

use super::error::{ConnectError, ConnectErrorKind};
use super::hello::{HEADER_LEN, Hello, HelloError, MAGIC_LEN, MAX_PRIVATE_DATA, is_tls};
use super::options::RcOptions;
use super::tcp::{ControlStream, read_exact, write_all};
use crate::deadline::Deadline;
use crate::device::Device;
use crate::error::os_error;
use crate::memory::Sge;
use crate::queue::{CompletionQueue, PostError, QueueError, QueuePair, RecvList, WrId, in_range};

/// Confirmation that this end is ready to receive.
const READY: u8 = 0x52;
/// Hop limit of packets.
const HOP_LIMIT: u8 = 64;

/// A queue pair in state INIT. Receives can be posted; nothing can be sent or received.
#[derive(Debug)]
pub struct PreparedQueuePair {
    pair: QueuePair,
    device: Device,
    options: RcOptions,
    psn: Psn,
}

/// A connected queue pair, and the peer's private data.
#[derive(Debug)]
pub struct ConnectedQueuePair {
    /// The queue pair.
    pub pair: QueuePair,
    /// The peer's private data.
    pub private_data: Vec<u8>,
}

impl PreparedQueuePair {
    /// Creates a queue pair. `send` and `recv` may be the same completion queue. It must have room for the completions of
    /// all queue pairs that use it.
    ///
    /// # Errors
    /// [`QueueError`] if an option exceeds the device's limit, or the device refuses.
    pub fn new(
        device: &Device,
        send: &CompletionQueue,
        recv: &CompletionQueue,
        options: &RcOptions,
    ) -> Result<PreparedQueuePair, QueueError> {
        let limits = device.limits();
        in_range(device, "send_depth", options.send_depth, limits.queue_depth)?;
        in_range(device, "recv_depth", options.recv_depth, limits.queue_depth)?;
        in_range(device, "send_sges", options.send_sges, limits.sges)?;
        in_range(device, "recv_sges", options.recv_sges, limits.sges)?;
        // These are 3-bit fields, and 0 is valid.
        in_range(device, "retries + 1", u32::from(options.retries) + 1, 8)?;
        in_range(device, "rnr_retries + 1", u32::from(options.rnr_retries) + 1, 8)?;

        let mut builder = device.domain().create_qp_builder();
        builder
            .setup_send_cq(send.shared())
            .setup_recv_cq(recv.shared())
            .setup_max_send_wr(options.send_depth)
            .setup_max_recv_wr(options.recv_depth)
            .setup_max_send_sge(options.send_sges)
            .setup_max_recv_sge(options.recv_sges)
            .setup_max_inline_data(options.max_inline);
        let owner = builder.build().map_err(|error| QueueError::Call {
            device: device.name().to_owned(),
            what: format!("create a queue pair with {options:?}"),
            cause: os_error!(error.0, CreateQueuePairErrorKind::Ibverbs),
        })?;
        let mut pair = QueuePair::new(owner, options.max_inline);
        let mut init = QueuePairAttribute::new();
        init.setup_state(QueuePairState::Init)
            .setup_pkey_index(0)
            .setup_port(device.port())
            .setup_access_flags(options.access.flags());
        pair.owner_mut().modify(&init).map_err(|error| QueueError::Call {
            device: device.name().to_owned(),
            what: "bring a queue pair to INIT".to_owned(),
            cause: io::Error::other(error),
        })?;
        Ok(PreparedQueuePair {
            pair,
            device: device.clone(),
            options: *options,
            psn: Psn::new(random_24_bits()),
        })
    }

    /// Its queue pair number.
    pub fn qpn(&self) -> Qpn {
        self.pair.qpn()
    }

    /// Posts a receive; see [`QueuePair::post_recv`].
    ///
    /// # Errors
    /// As [`QueuePair::post_recv`].
    pub fn post_recv(&self, to: &[Sge], wr_id: WrId) -> Result<(), PostError> {
        self.pair.post_recv(to, wr_id)
    }

    /// Posts all receives of a list; see [`QueuePair::post_recv_list`].
    ///
    /// # Errors
    /// As [`QueuePair::post_recv_list`].
    pub fn post_recv_list(&self, list: &mut RecvList) -> Result<(), PostError> {
        self.pair.post_recv_list(list)
    }

    /// Connects to the peer at the other end of `stream`. The peer must call this concurrently.
    ///
    /// Sends `private_data`, at most [`MAX_PRIVATE_DATA`] bytes, and returns the peer's private data.
    /// Afterwards both ends can send and receive. The stream's timeouts are removed.
    ///
    /// # Errors
    /// [`ConnectError`] with the peer's address.
    pub fn connect(
        mut self,
        stream: &mut impl ControlStream,
        private_data: &[u8],
        deadline: Deadline,
    ) -> Result<ConnectedQueuePair, ConnectError> {
        let peer =
            stream.peer_addr().map_or_else(|_| "(unconnected)".to_owned(), |address| address.to_string());
        if private_data.len() > MAX_PRIVATE_DATA {
            let cause = io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{} bytes of private data exceed the limit of {MAX_PRIVATE_DATA}",
                    private_data.len()
                ),
            );
            return Err(ConnectError::stream(&peer, "sending the connection record", cause));
        }
        let mine = Hello {
            qpn: self.pair.qpn(),
            psn: self.psn,
            gid: self.device.gid().gid.octets(),
            lid: self.device.lid(),
            mtu: self.device.mtu(),
            max_rd_atomic: self.options.max_rd_atomic.min(self.device.limits().max_qp_rd_atom),
        };
        write_all(stream, &mine.encode(private_data), deadline)
            .map_err(|cause| ConnectError::stream(&peer, "sending the connection record", cause))?;
        let (theirs, private_data) = receive_hello(stream, &peer, deadline)?;
        self.ready_to_receive(&theirs).map_err(|error| transition(&peer, "RTR", error))?;
        self.ready_to_send(&theirs).map_err(|error| transition(&peer, "RTS", error))?;

        write_all(stream, &[READY], deadline)
            .map_err(|cause| ConnectError::stream(&peer, "confirming the connection", cause))?;
        let mut ready = [0];
        read_exact(stream, &mut ready, deadline)
            .map_err(|cause| ConnectError::stream(&peer, "waiting for the confirmation", cause))?;
        if ready != [READY] {
            let kind = ConnectErrorKind::NotReady { found: ready[0], expected: READY };
            return Err(ConnectError::new(&peer, kind));
        }
        stream
            .set_read_timeout(None)
            .and_then(|()| stream.set_write_timeout(None))
            .map_err(|cause| ConnectError::stream(&peer, "removing the timeouts", cause))?;
        self.pair.set_peer(peer);
        Ok(ConnectedQueuePair { pair: self.pair, private_data })
    }

    fn ready_to_receive(&mut self, theirs: &Hello) -> Result<(), ModifyQueuePairError> {
        let device = &self.device;
        let mut route = AddressHandleAttribute::new();
        route.setup_port(device.port()).setup_dest_lid(theirs.lid);
        // Within an InfiniBand subnet the LID suffices; all other routes need a GRH.
        if device.link_layer() == LinkLayer::Ethernet || theirs.lid == 0 {
            route.setup_grh(&Gid { raw: theirs.gid }, 0, device.gid_index(), HOP_LIMIT, 0);
        }
        let mut attributes = QueuePairAttribute::new();
        attributes
            .setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(device.mtu().min(theirs.mtu))
            .setup_dest_qp_num(theirs.qpn.get())
            .setup_rq_psn(theirs.psn.get())
            .setup_max_dest_read_atomic(self.options.max_rd_atomic.min(device.limits().max_qp_rd_atom))
            .setup_min_rnr_timer(self.options.rnr_timer.code())
            .setup_address_vector(&route);
        self.pair.owner_mut().modify(&attributes)
    }

    fn ready_to_send(&mut self, theirs: &Hello) -> Result<(), ModifyQueuePairError> {
        let mut attributes = QueuePairAttribute::new();
        attributes
            .setup_state(QueuePairState::ReadyToSend)
            .setup_sq_psn(self.psn.get())
            .setup_timeout(self.options.ack_timeout.exponent())
            .setup_retry_cnt(self.options.retries)
            .setup_rnr_retry(self.options.rnr_retries)
            .setup_max_read_atomic(
                theirs
                    .max_rd_atomic
                    .min(self.options.max_rd_atomic)
                    .min(self.device.limits().max_qp_init_rd_atom),
            );
        self.pair.owner_mut().modify(&attributes)
    }
}

fn receive_hello(
    stream: &mut impl ControlStream,
    peer: &str,
    deadline: Deadline,
) -> Result<(Hello, Vec<u8>), ConnectError> {
    let failed = |cause| ConnectError::stream(peer, "waiting for the connection record", cause);
    let mistaken = |error| ConnectError::new(peer, ConnectErrorKind::Hello(error));
    let mut header = [0; HEADER_LEN];
    let (magic, rest) = header.split_at_mut(MAGIC_LEN);
    read_exact(stream, magic, deadline).map_err(failed)?;
    // An alert of TLS is shorter than the header.
    if is_tls(magic) {
        return Err(mistaken(HelloError::Tls));
    }
    read_exact(stream, rest, deadline).map_err(failed)?;
    let mut private_data = vec![0; Hello::private_data_len(&header).map_err(mistaken)?];
    read_exact(stream, &mut private_data, deadline).map_err(failed)?;
    let hello = Hello::decode(&header, &private_data).map_err(mistaken)?;
    Ok((hello, private_data))
}

fn transition(peer: &str, state: &'static str, error: ModifyQueuePairError) -> ConnectError {
    ConnectError::new(peer, ConnectErrorKind::Transition { state, cause: describe(&error) })
}

/// The error's text with those of its sources, which name the cause.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// Random, so that packets of an earlier connection are not accepted. The hash keys of the standard library come from
/// the operating system.
fn random_24_bits() -> u32 {
    (RandomState::new().build_hasher().finish() & 0x00ff_ffff) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::{dial, listen};
    use std::io::Write;
    use std::time::Duration;

    #[test]
    fn an_unknown_peer_is_refused_and_named() {
        let listener = listen("127.0.0.1:0").unwrap();
        let deadline = Deadline::after(Duration::from_secs(10));
        let mut unknown_peer = dial(&listener.address().to_string(), deadline).unwrap();
        let (mut stream, address) = listener.accept(deadline).unwrap();
        unknown_peer.write_all(b"GET / HTTP/1.1\r\nHost: example\r\nAccept: text/html\r\n\r\n").unwrap();
        let error = receive_hello(&mut stream, &address.to_string(), deadline).unwrap_err();
        assert!(
            matches!(error.kind, ConnectErrorKind::Hello(HelloError::Magic { found }) if &found == b"GET ")
        );
        assert!(
            error.to_string().starts_with(&format!("peer {address}: is not a Millstream program")),
            "{error}"
        );
    }

    #[test]
    fn a_closed_or_silent_peer_ends_the_wait() {
        let listener = listen("127.0.0.1:0").unwrap();
        let far = Deadline::after(Duration::from_secs(10));
        let silent = dial(&listener.address().to_string(), far).unwrap();
        let (mut stream, _) = listener.accept(far).unwrap();
        let soon = Deadline::after(Duration::from_millis(30));
        let error = receive_hello(&mut stream, "it", soon).unwrap_err();
        assert!(matches!(error.kind, ConnectErrorKind::TimedOut { .. }), "{error}");
        drop(silent);
        let error = receive_hello(&mut stream, "it", far).unwrap_err();
        assert!(matches!(error.kind, ConnectErrorKind::Closed { .. }), "{error}");
    }

    #[test]
    fn sequence_numbers_are_of_24_bits_and_differ() {
        let drawn: std::collections::HashSet<u32> = (0..64).map(|_| random_24_bits()).collect();
        assert!(drawn.len() > 32);
        assert!(drawn.iter().all(|psn| *psn <= 0x00ff_ffff));
    }
}
