//! Frames between relay, hub and agent.
//!
//! ```text
//!   0        1                 5
//!   ┌────────┬─────────────────┬───────────┐
//!   │ kind   │ length (32, BE) │ payload   │
//!   └────────┴─────────────────┴───────────┘
//! ```

use std::io::{self, Read, Write};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::proof::{Answer, Challenge, Hello};

/// Longest payload (bytes).
const MAX_PAYLOAD: u32 = 1 << 20;

/// A process that a rank should start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRequest {
    /// Role of the process, as arguments.
    pub arguments: Vec<String>,
    /// Environment variables for it.
    pub environment: Vec<(String, String)>,
}

/// Who connects to the hub.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Peer {
    /// The agent of a rank.
    Agent { rank: usize },
    /// A process that an agent has started, by the number in [`Frame::Start`].
    Process { number: u64 },
    /// A relay.
    Relay(StartRequest),
}

#[derive(Debug)]
pub(crate) enum Frame {
    /// Peer to hub, first of all.
    Hello(Hello),
    /// Hub to peer.
    Challenge(Challenge),
    /// Peer to hub.
    Answer(Answer),
    /// Hub to agent: start a process, with this number. The address is that of the hub's host for other hosts, if a rank is there.
    Start(u64, Option<IpAddr>, StartRequest),
    /// Hub to agent: the run has ended.
    Finish,
    /// Standard input or output.
    Data(Vec<u8>),
    /// Standard error.
    Error(Vec<u8>),
    /// Standard input has ended.
    EndOfInput,
    /// The process has ended with this status.
    Exit(i32),
    /// Agent to hub: the process with this number has no connection to the hub, for this reason.
    Unconnected(u64, String),
}

impl Frame {
    pub(crate) fn send(&self, to: &mut impl Write) -> io::Result<()> {
        let json = |value: serde_json::Result<Vec<u8>>| value.map_err(io::Error::from);
        let (kind, payload) = match self {
            Frame::Hello(hello) => (0, json(serde_json::to_vec(hello))?),
            Frame::Start(number, seen, request) => (1, json(serde_json::to_vec(&(number, seen, request)))?),
            Frame::Finish => (2, Vec::new()),
            Frame::Data(bytes) => return send_raw(to, 3, bytes),
            Frame::Error(bytes) => return send_raw(to, 4, bytes),
            Frame::EndOfInput => (5, Vec::new()),
            Frame::Exit(code) => (6, code.to_be_bytes().to_vec()),
            Frame::Challenge(challenge) => (7, json(serde_json::to_vec(challenge))?),
            Frame::Answer(answer) => (8, json(serde_json::to_vec(answer))?),
            Frame::Unconnected(number, reason) => (9, json(serde_json::to_vec(&(number, reason)))?),
        };
        send_raw(to, kind, &payload)
    }

    /// The next frame; `None` at the end of the stream.
    pub(crate) fn receive(from: &mut impl Read) -> io::Result<Option<Frame>> {
        let mut header = [0; 5];
        match from.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let [kind, length @ ..] = header;
        let length = u32::from_be_bytes(length);
        if length > MAX_PAYLOAD {
            return Err(invalid(format!("frame of {length} bytes; at most {MAX_PAYLOAD}")));
        }
        let mut payload = vec![0; length as usize];
        from.read_exact(&mut payload)?;
        Ok(Some(match kind {
            0 => Frame::Hello(serde_json::from_slice(&payload)?),
            1 => {
                let (number, seen, request) = serde_json::from_slice(&payload)?;
                Frame::Start(number, seen, request)
            }
            2 => Frame::Finish,
            3 => Frame::Data(payload),
            4 => Frame::Error(payload),
            5 => Frame::EndOfInput,
            6 => {
                let code =
                    payload.try_into().map_err(|_| invalid("exit status is not 4 bytes".to_owned()))?;
                Frame::Exit(i32::from_be_bytes(code))
            }
            7 => Frame::Challenge(serde_json::from_slice(&payload)?),
            8 => Frame::Answer(serde_json::from_slice(&payload)?),
            9 => {
                let (number, reason) = serde_json::from_slice(&payload)?;
                Frame::Unconnected(number, reason)
            }
            _ => return Err(invalid(format!("unknown frame kind {kind}"))),
        }))
    }
}

fn send_raw(to: &mut impl Write, kind: u8, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length <= MAX_PAYLOAD);
    let length = length.ok_or_else(|| invalid(format!("frame of {} bytes", payload.len())))?;
    let mut bytes = Vec::with_capacity(5 + payload.len());
    bytes.push(kind);
    bytes.extend(length.to_be_bytes());
    bytes.extend(payload);
    to.write_all(&bytes)
}

pub(crate) fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_back(bytes in prop::collection::vec(any::<u8>(), 0..300), number: u64, code: i32) {
            let request = StartRequest {
                arguments: vec![String::from_utf8_lossy(&bytes).into_owned()],
                environment: vec![("A".to_owned(), number.to_string())],
            };
            let seen = Some(IpAddr::from((number as u32).to_be_bytes()));
            let mut sent = Vec::new();
            for frame in [
                Frame::Start(number, seen, request.clone()),
                Frame::Data(bytes.clone()),
                Frame::Exit(code),
                Frame::EndOfInput,
            ] {
                frame.send(&mut sent).unwrap();
            }
            let from = &mut sent.as_slice();
            let mut next = || Frame::receive(from).unwrap();
            let is_start = matches!(next(), Some(Frame::Start(n, s, r)) if (n, s, &r) == (number, seen, &request));
            let is_data = matches!(next(), Some(Frame::Data(b)) if b == bytes);
            let is_exit = matches!(next(), Some(Frame::Exit(c)) if c == code);
            prop_assert!(is_start && is_data && is_exit);
            prop_assert!(matches!(next(), Some(Frame::EndOfInput)) && next().is_none());
        }

        #[test]
        fn hostile_bytes_end_in_an_error_or_a_frame(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Frame::receive(&mut bytes.as_slice());
        }
    }
}
