//! Hub and peer prove to each other that they know the key, which neither sends.
//!
//! ```text
//!   peer                                         hub
//!    │ ── Hello: nonce, role ─────────────────► │
//!    │ ◄── Challenge: nonce, proof of the hub ── │
//!    │ ── Answer: who it is, proof of it ──────► │
//! ```
//!
//! A proof is HMAC-SHA-256 (RFC 2104) with the key over a label, both nonces and, from the peer, who it is. The hub proves
//! first, so a false hub gets no proof to search the key with. What follows on the stream is not protected.

use std::io::{self, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use ring::hmac::{self, HMAC_SHA256, Key, Tag};
use ring::rand::{SecureRandom as _, SystemRandom};
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};

use crate::frame::{Frame, Peer, invalid};

/// Time for the proofs of a connection.
const ANSWER: Duration = Duration::from_secs(10);
/// Interval of attempts.
const RETRY: Duration = Duration::from_millis(100);
/// A peer that has been silent for so long is asked in this interval whether it lives, and is lost after so many questions.
const SILENCE: Duration = Duration::from_secs(3);
const ASK_EVERY: Duration = Duration::from_secs(1);
const ASK: u32 = 7;
/// A peer of an agent that acknowledges neither questions nor data for so long is lost.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);
const HUB: &[u8] = b"millstream job: hub";
const PEER: &[u8] = b"millstream job: peer";

/// A number that is used once.
pub(crate) type Nonce = [u8; 32];

/// First frame of a connection to the hub.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    nonce: Nonce,
    /// Whether the peer is a relay, which has a key of its own.
    is_relay: bool,
}

/// The hub's answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Challenge {
    nonce: Nonce,
    proof: Vec<u8>,
}

/// The peer's answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// [`Peer`] as JSON: the proof is over these bytes.
    peer: String,
    proof: Vec<u8>,
}

/// Random bytes of the system.
pub(crate) fn random() -> io::Result<Nonce> {
    let mut bytes = Nonce::default();
    SystemRandom::new().fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(bytes)
}

/// The nonces of a connection: that of the peer, then that of the hub.
type Nonces = [Nonce; 2];

/// What a proof is over. The first parts have fixed lengths for each label, and no label begins another.
fn message(label: &[u8], nonces: &Nonces, who: &[u8]) -> Vec<u8> {
    [label, &nonces[0], &nonces[1], who].concat()
}

fn prove(key: &[u8], label: &[u8], nonces: &Nonces, who: &[u8]) -> Tag {
    hmac::sign(&Key::new(HMAC_SHA256, key), &message(label, nonces, who))
}

fn check(key: &[u8], label: &[u8], nonces: &Nonces, who: &[u8], proof: &[u8]) -> bool {
    hmac::verify(&Key::new(HMAC_SHA256, key), &message(label, nonces, who), proof).is_ok()
}

/// Sets up either end of a connection. A host that lost its power, or is cut off, closes no connection.
fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE)?;
    sockopt::set_tcp_keepintvl(stream, ASK_EVERY)?;
    Ok(sockopt::set_tcp_keepcnt(stream, ASK)?)
}

/// Sets up either end of a connection after the proofs. For the kernel, a peer that does not read acknowledges nothing. That is
/// usual for the output of a process, and never right for an agent, whose end ends its processes.
fn finish(stream: &TcpStream, peer: &Peer) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    if let Peer::Agent { .. } = peer {
        sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED.as_millis() as u32)?;
    }
    Ok(())
}

/// A stream that is read until a deadline.
struct Until<'s> {
    stream: &'s TcpStream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(bytes)
    }
}

/// The next frame before the deadline.
fn next(stream: &TcpStream, deadline: Instant) -> io::Result<Option<Frame>> {
    Frame::receive(&mut Until { stream, deadline })
}

/// Greets the hub of the key. An error of kind `PermissionDenied` means that the other side does not know the key.
pub(crate) fn greet(stream: &mut TcpStream, key: &[u8], peer: &Peer) -> io::Result<()> {
    let (own, deadline) = (random()?, Instant::now() + ANSWER);
    set_up(stream)?;
    Frame::Hello(Hello { nonce: own, is_relay: matches!(peer, Peer::Relay(_)) }).send(stream)?;
    let Some(Frame::Challenge(Challenge { nonce, proof })) = next(stream, deadline)? else {
        return Err(invalid("it does not answer as the hub of a job".to_owned()));
    };
    let nonces = [own, nonce];
    if !check(key, HUB, &nonces, &[], &proof) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the key of this job"));
    }
    let text = serde_json::to_string(peer)?;
    let proof = prove(key, PEER, &nonces, text.as_bytes()).as_ref().to_vec();
    Frame::Answer(Answer { peer: text, proof }).send(stream)?;
    finish(stream, peer)
}

/// Connects to the hub and greets it. One that is cut off tries again for a while: too many others may have connected.
pub(crate) fn dial(hub: impl ToSocketAddrs, key: &[u8], peer: &Peer) -> io::Result<TcpStream> {
    let deadline = Instant::now() + ANSWER;
    let address = hub.to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound)?;
    loop {
        let mut stream = TcpStream::connect_timeout(&address, ANSWER)?;
        match greet(&mut stream, key, peer) {
            Ok(()) => return Ok(stream),
            Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied || Instant::now() > deadline => {
                return Err(cause);
            }
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Receives a peer. `key` is the key of relays, or of ranks.
pub(crate) fn receive<'k>(stream: &mut TcpStream, key: impl Fn(bool) -> &'k [u8]) -> io::Result<Peer> {
    let deadline = Instant::now() + ANSWER;
    set_up(stream)?;
    let Some(Frame::Hello(Hello { nonce, is_relay })) = next(stream, deadline)? else {
        return Err(invalid("no hello".to_owned()));
    };
    let key = key(is_relay);
    let nonces = [nonce, random()?];
    let proof = prove(key, HUB, &nonces, &[]).as_ref().to_vec();
    Frame::Challenge(Challenge { nonce: nonces[1], proof }).send(stream)?;
    let Some(Frame::Answer(Answer { peer, proof })) = next(stream, deadline)? else {
        return Err(invalid("no answer".to_owned()));
    };
    if !check(key, PEER, &nonces, peer.as_bytes(), &proof) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the peer does not know the key"));
    }
    let peer: Peer = serde_json::from_str(&peer)?;
    if matches!(peer, Peer::Relay(_)) != is_relay {
        return Err(invalid("the peer is not what its hello says".to_owned()));
    }
    finish(stream, &peer)?;
    Ok(peer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// What both sides of a connection with these keys find.
    fn meet(of_peer: &'static [u8], of_hub: &'static [u8]) -> (io::Result<()>, io::Result<Peer>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let peer = std::thread::spawn(move || {
            greet(&mut TcpStream::connect(address).unwrap(), of_peer, &Peer::Agent { rank: 3 })
        });
        let hub = receive(&mut listener.accept().unwrap().0, |_| of_hub);
        (peer.join().unwrap(), hub)
    }

    #[test]
    fn both_sides_know_the_key_or_find_that_the_other_does_not() {
        let (peer, hub) = meet(b"17.0.secret", b"17.0.secret");
        assert!(peer.is_ok() && matches!(hub.unwrap(), Peer::Agent { rank: 3 }));
        let (peer, hub) = meet(b"17.0.secret", b"17.0");
        assert_eq!(peer.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(hub.is_err());
    }

    /// An application may be stopped, or its reader, for as long as somebody likes.
    #[test]
    fn only_an_agent_is_lost_when_its_peer_does_not_read() {
        let timeouts = |peer: Peer| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let hub = std::thread::spawn(move || {
                let mut stream = listener.accept().unwrap().0;
                receive(&mut stream, |_| b"key").unwrap();
                sockopt::tcp_user_timeout(&stream).unwrap()
            });
            greet(&mut stream, b"key", &peer).unwrap();
            assert_eq!(sockopt::tcp_keepcnt(&stream), Ok(ASK));
            [sockopt::tcp_user_timeout(&stream).unwrap(), hub.join().unwrap()]
        };
        assert_eq!(timeouts(Peer::Process { number: 1 }), [0, 0]);
        assert_eq!(timeouts(Peer::Agent { rank: 1 }), [10_000, 10_000]);
    }

    #[test]
    fn a_proof_is_of_its_side_its_nonces_and_its_peer() {
        let nonces = [[1; 32], [2; 32]];
        let proof = prove(b"key", PEER, &nonces, b"rank 3");
        let proof = proof.as_ref();
        assert!(check(b"key", PEER, &nonces, b"rank 3", proof));
        assert!(!check(b"key", HUB, &nonces, b"rank 3", proof));
        assert!(!check(b"key", PEER, &[[1; 32], [3; 32]], b"rank 3", proof));
        assert!(!check(b"key", PEER, &nonces, b"rank 4", proof));
        assert!(!check(b"other", PEER, &nonces, b"rank 3", proof));
        assert!(!check(b"key", PEER, &nonces, b"rank 3", &[]));
    }
}
