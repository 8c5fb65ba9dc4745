//! How an outside host is admitted: over TCP, before a queue pair exists.
//!
//! ```text
//!   both: proof of the key ─► gateway: status (1) ─► both: queue pair, identity as JSON ─► gateway: Ready
//! ```
//! [`proof`] has the first step. Without the key the gateway spends no memory on a host.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use millstream_rdma::connect::ConnectError;
use millstream_rdma::device::{DeviceError, DeviceSelector};
use millstream_rdma::queue::QueueError;
use millstream_rdma::wait::WaitError;
use millstream_rdma::{CompletionQueue, Deadline, Device, RemoteMemory};
use millstream_torus_core::{Dimensions, NodeNumber};
use serde::{Deserialize, Serialize};

use super::channel::{Channel, PreparedChannel};
use crate::control::STAGING;
use crate::proof::{self, Call, ProofError, Purpose};

const VERSION: u32 = 1;
/// How long a host may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);

/// What an outside host connects to.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// Address of a node's seventh port.
    pub address: String,
    /// The key of the seventh port.
    pub key: u64,
    /// The device.
    pub device: DeviceSelector,
}

/// Why an outside host cannot use a gateway.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The environment names no gateway.
    #[error(
        "{name} is not set, or malformed: address and key of a seventh port (`millstream torus run --seventh`)"
    )]
    Environment {
        /// The variable.
        name: &'static str,
    },
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device refused a queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// Completions cannot be waited for.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// The connection failed.
    #[error("gateway {address}: {cause}")]
    Connect {
        /// Its address.
        address: String,
        /// The cause.
        cause: ConnectError,
    },
    /// The gateway does not admit this host.
    #[error("gateway {address} refused: {reason}")]
    Refused {
        /// Its address.
        address: String,
        /// The reason.
        reason: &'static str,
    },
    /// A system call failed, or the peer sent something else than expected.
    #[error("gateway {address}: {cause}")]
    Io {
        /// Its address.
        address: String,
        /// The cause.
        cause: io::Error,
    },
}

/// What a gateway answers to a host that knows the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Admitted = 0,
    Full = 2,
}

/// A node, as it tells outside hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct GatewayIdentity {
    version: u32,
    dimensions: String,
    node: u16,
    staging: Vec<u8>,
}

/// An outside host, as it tells its gateway.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct HostIdentity {
    version: u32,
    staging: Vec<u8>,
}

fn malformed(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn staging_of(version: u32, bytes: &[u8]) -> io::Result<RemoteMemory> {
    if version != VERSION {
        return Err(malformed(format!("it has version {version}, but this program has {VERSION}")));
    }
    let bytes: &[u8; RemoteMemory::ENCODED_LEN] = bytes
        .try_into()
        .map_err(|_| malformed(format!("{} bytes do not name staging memory", bytes.len())))?;
    let staging = RemoteMemory::decode(bytes);
    staging.slice(0, STAGING).map_err(|_| malformed("its staging memory is too small"))
}

pub(super) fn answer(stream: &mut TcpStream, status: Status) -> io::Result<()> {
    stream.set_write_timeout(Some(HELLO))?;
    stream.write_all(&[status as u8])
}

/// The gateway's side, for an admitted host.
pub(super) fn finish(
    device: &Device,
    queue: &CompletionQueue,
    connection: u32,
    (torus, here): (Dimensions, NodeNumber),
    mut stream: TcpStream,
) -> io::Result<Channel> {
    let channel = PreparedChannel::new(device, queue, connection)?;
    let mine = GatewayIdentity {
        version: VERSION,
        dimensions: torus.to_string(),
        node: here.0,
        staging: channel.staging()?.encode().to_vec(),
    };
    let (prepared, memory) = channel.into_parts();
    let connected = prepared
        .connect(&mut stream, &serde_json::to_vec(&mine)?, Deadline::after(HELLO))
        .map_err(io::Error::other)?;
    let theirs: HostIdentity = serde_json::from_slice(&connected.private_data)?;
    let remote = staging_of(theirs.version, &theirs.staging)?;
    Ok(Channel::new(memory, connected.pair, remote, stream))
}

/// The host's side. Returns the shape of the torus and the gateway's number, too.
pub(super) fn join(
    options: &GatewayOptions,
    device: &Device,
    queue: &CompletionQueue,
    deadline: Deadline,
) -> Result<(Channel, Dimensions, NodeNumber), HostError> {
    let address = || options.address.clone();
    let connect = |cause| HostError::Connect { address: address(), cause };
    let io = |cause| HostError::Io { address: address(), cause };
    let refused = |reason| Err(HostError::Refused { address: address(), reason });
    let retry = Deadline::after(HELLO);
    let call = Call { key: options.key, purpose: Purpose::SeventhPort, to: 0 };
    let mut stream = match proof::connect(&options.address, call, deadline, retry) {
        Ok(stream) => stream,
        Err(ProofError::Connect(cause)) => return Err(connect(cause)),
        Err(ProofError::Proof(cause)) if cause.kind() == io::ErrorKind::PermissionDenied => {
            return refused("the key is not that of its seventh port");
        }
        Err(ProofError::Proof(cause)) => return Err(io(cause)),
    };
    let mut status = [0];
    stream.set_read_timeout(Some(HELLO)).map_err(io)?;
    stream.read_exact(&mut status).map_err(io)?;
    match status[0] {
        status if status == Status::Admitted as u8 => {}
        status if status == Status::Full as u8 => {
            return refused("its seventh port has no place for another host");
        }
        other => return Err(io(malformed(format!("it answered {other}")))),
    }
    let channel = PreparedChannel::new(device, queue, 0).map_err(io)?;
    let mine = HostIdentity { version: VERSION, staging: channel.staging().map_err(io)?.encode().to_vec() };
    let mine = serde_json::to_vec(&mine).map_err(|error| io(error.into()))?;
    let (prepared, memory) = channel.into_parts();
    let connected = prepared.connect(&mut stream, &mine, deadline).map_err(connect)?;
    let theirs: GatewayIdentity =
        serde_json::from_slice(&connected.private_data).map_err(|error| io(error.into()))?;
    let remote = staging_of(theirs.version, &theirs.staging).map_err(io)?;
    let torus: Dimensions = theirs
        .dimensions
        .parse()
        .map_err(|_| io(malformed(format!("its torus is {:?}", theirs.dimensions))))?;
    let gateway = NodeNumber(theirs.node);
    if !torus.contains(gateway) {
        return Err(io(malformed(format!("{gateway} is not in a torus of {torus}"))));
    }
    Ok((Channel::new(memory, connected.pair, remote, stream), torus, gateway))
}
