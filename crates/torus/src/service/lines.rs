//! Lines of JSON over a TCP stream.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use millstream_rdma::Deadline;
use rustix::net::sockopt;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ToSupervisor, Who};
use crate::proof::{self, Call};

/// Longest line. A state of 65,536 nodes fits.
const MAX_LINE: usize = 32 << 20;
/// Time for a supervisor to prove that it knows the run's key, for those that can wait.
pub(crate) const PROOF: Duration = Duration::from_secs(5);
/// A peer that takes no bytes for this long is given up.
const WRITE_LIMIT: Duration = Duration::from_secs(2);

/// A peer whose host lost its power, or is cut off, closes no connection. One that waits to read finds out by TCP's keepalive:
/// idle time before the first probe, interval, number of probes. One that writes finds out by bytes without acknowledgement.
const IDLE: Duration = Duration::from_secs(2);
const PROBE_EVERY: Duration = Duration::from_secs(1);
const PROBES: u32 = 3;
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);

/// A stream of lines.
#[derive(Debug)]
pub(crate) struct Lines {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// Tells once that a supervisor refuses this process, which goes on trying.
#[derive(Debug, Default)]
pub(crate) struct Refusal(bool);

impl Refusal {
    pub(crate) fn tell<T>(&mut self, address: &str, outcome: &io::Result<T>) {
        match outcome {
            Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
                if !std::mem::replace(&mut self.0, true) {
                    tracing::warn!("supervisor at {address}: {cause}");
                }
            }
            Err(_) => {}
            Ok(_) => self.0 = false,
        }
    }
}

impl Lines {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Lines> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE_LIMIT))?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, IDLE)?;
        sockopt::set_tcp_keepintvl(&stream, PROBE_EVERY)?;
        sockopt::set_tcp_keepcnt(&stream, PROBES)?;
        sockopt::set_tcp_user_timeout(&stream, UNACKNOWLEDGED.as_millis() as u32)?;
        Ok(Lines { stream, buffer: Vec::new() })
    }

    /// Connects to a supervisor, which proves within `limit` that it knows the run's key.
    pub(crate) fn dial(address: &str, call: Call, who: Who, limit: Duration) -> io::Result<Lines> {
        let deadline = Deadline::after(limit);
        let mut lines = Lines::new(millstream_rdma::connect::connect(address, deadline)?)?;
        proof::dial(&lines.stream, call, deadline)?;
        lines.send(&ToSupervisor::Hello { who })?;
        Ok(lines)
    }

    /// A second handle, for writing.
    pub(crate) fn writer(&self) -> io::Result<Lines> {
        Ok(Lines { stream: self.stream.try_clone()?, buffer: Vec::new() })
    }

    /// Ends the stream for all handles.
    pub(crate) fn shut_down(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Longest time of a read; `None` for no limit.
    pub(crate) fn set_read_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(limit)
    }

    pub(crate) fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }

    /// Reads once and returns whole messages. An end of the stream is an error, as is a line that is no message.
    pub(crate) fn read<T: DeserializeOwned>(&mut self) -> io::Result<Vec<T>> {
        let mut chunk = [0; 16 << 10];
        let read = self.stream.read(&mut chunk)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.buffer.extend_from_slice(&chunk[..read]);
        let mut messages = Vec::new();
        let mut start = 0;
        while let Some(length) = self.buffer[start..].iter().position(|&byte| byte == b'\n') {
            messages.push(serde_json::from_slice(&self.buffer[start..start + length])?);
            start += length + 1;
        }
        self.buffer.drain(..start);
        if self.buffer.len() > MAX_LINE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is too long"));
        }
        Ok(messages)
    }
}
