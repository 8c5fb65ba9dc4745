//! Both ends of a link prove that they know the run's key, which neither sends, before one tells the other anything.
//!
//! ```text
//!   dials: magic (7), direction (1), nonce (32) ─► accepts: nonce (32), proof (32) ─► dials: proof (32)
//! ```
//! A proof is HMAC-SHA-256 (RFC 2104) with the key over a label, the direction and both nonces. What follows on the stream
//! is not protected.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millstream_rdma::Deadline;
use millstream_torus_core::{Direction, Sign};
use ring::hmac::{self, HMAC_SHA256, Key};
use ring::rand::{SecureRandom as _, SystemRandom};

const MAGIC: [u8; 7] = *b"mtorus2";
const HELLO_BYTES: usize = MAGIC.len() + 1 + NONCE_BYTES;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
const DIALS: &[u8] = b"millstream torus: dials";
const ACCEPTS: &[u8] = b"millstream torus: accepts";
/// Time for an end that has dialled: it sends at once.
const HELLO: Duration = Duration::from_secs(5);
/// Shortest timeout of a read; zero is refused.
const SHORTEST: Duration = Duration::from_millis(1);
/// Connections whose other end has not proved anything. Of more, the oldest ends.
const STRANGERS: usize = 64;

type Nonce = [u8; NONCE_BYTES];

fn nonce() -> io::Result<Nonce> {
    let mut bytes = [0; NONCE_BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(bytes)
}

/// What a proof is over. All parts have fixed lengths for each label, and no label begins another.
fn message(label: &[u8], direction: u8, nonces: [&Nonce; 2]) -> Vec<u8> {
    [label, &[direction], nonces[0], nonces[1]].concat()
}

fn prove(key: u64, label: &[u8], direction: u8, nonces: [&Nonce; 2]) -> hmac::Tag {
    let key = Key::new(HMAC_SHA256, &key.to_le_bytes());
    hmac::sign(&key, &message(label, direction, nonces))
}

fn check(key: u64, label: &[u8], direction: u8, nonces: [&Nonce; 2], proof: &[u8]) -> io::Result<()> {
    let key = Key::new(HMAC_SHA256, &key.to_le_bytes());
    hmac::verify(&key, &message(label, direction, nonces), proof)
        .map_err(|_| io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the run's key"))
}

/// Reads all bytes before the deadline, however slowly they come.
fn read(mut stream: &TcpStream, bytes: &mut [u8], deadline: Deadline) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        if deadline.passed() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(deadline.remaining().map(|left| left.max(SHORTEST)))?;
        match stream.read(rest) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => rest = &mut rest[length..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Proves the key at the end that dials. An error of kind `PermissionDenied` means that the other end does not know it.
pub(super) fn dial(mut stream: &TcpStream, key: u64, link: Direction, deadline: Deadline) -> io::Result<()> {
    let (own, direction) = (nonce()?, link.index() as u8);
    stream.write_all(&[&MAGIC[..], &[direction], &own].concat())?;
    let mut theirs = [0; NONCE_BYTES];
    let mut proof = [0; PROOF_BYTES];
    read(stream, &mut theirs, deadline)?;
    read(stream, &mut proof, deadline)?;
    let nonces = [&own, &theirs];
    check(key, ACCEPTS, direction, nonces, &proof)?;
    stream.write_all(prove(key, DIALS, direction, nonces).as_ref())
}

/// The same at the end that accepts. Returns the link as the other end sees it.
fn accept(mut stream: &TcpStream, key: u64) -> io::Result<Direction> {
    let deadline = Deadline::after(HELLO);
    let mut hello = [0; HELLO_BYTES];
    read(stream, &mut hello, deadline)?;
    let (magic, rest) = hello.split_at(MAGIC.len());
    let link = Direction::from_index(rest[0].into()).filter(|direction| direction.sign == Sign::Plus);
    let link = link.filter(|_| magic == MAGIC).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("it sent {:02x?}", &hello[..MAGIC.len() + 1]))
    })?;
    let mut theirs = [0; NONCE_BYTES];
    theirs.copy_from_slice(&rest[1..]);
    let own = nonce()?;
    let (direction, nonces) = (rest[0], [&theirs, &own]);
    stream.set_write_timeout(Some(HELLO))?;
    stream.write_all(&[&own, prove(key, ACCEPTS, direction, nonces).as_ref()].concat())?;
    let mut proof = [0; PROOF_BYTES];
    read(stream, &mut proof, deadline)?;
    check(key, DIALS, direction, nonces, &proof)?;
    Ok(link)
}

/// Connections whose other end has not proved yet that it knows the key. A thread each checks them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Strangers(Arc<Mutex<VecDeque<Arc<TcpStream>>>>);

impl Strangers {
    /// Accepts a connection, and gives it to `then` if its other end knows the key.
    pub(crate) fn accept(
        &self,
        stream: TcpStream,
        key: u64,
        then: impl FnOnce(Direction, TcpStream) + Send + 'static,
    ) {
        let address = stream.peer_addr().map_or_else(|_| "a peer".to_owned(), |peer| peer.to_string());
        let stream = Arc::new(stream);
        self.add(Arc::clone(&stream));
        let strangers = self.clone();
        let work = move || {
            let proved = accept(&stream, key);
            strangers.lock().retain(|other| !Arc::ptr_eq(other, &stream));
            match (proved, Arc::into_inner(stream)) {
                (Ok(link), Some(stream)) => then(link, stream),
                (Ok(_), None) => {}
                (Err(cause), _) => tracing::warn!("{address} is not a node of this torus: {cause}"),
            }
        };
        if let Err(error) = std::thread::Builder::new().spawn(work) {
            tracing::warn!("a connection is refused: {error}");
            // No thread has it.
            self.lock().retain(|stream| Arc::strong_count(stream) > 1);
        }
    }

    fn add(&self, stream: Arc<TcpStream>) {
        let mut waiting = self.lock();
        if waiting.len() >= STRANGERS
            && let Some(oldest) = waiting.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        waiting.push_back(stream);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<TcpStream>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const KEY: u64 = 0x1234_5678_9abc_def0;

    /// What both ends of a connection with these keys find.
    fn meet(dials: u64, accepts: u64) -> (io::Result<()>, io::Result<Direction>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let link = Direction::ALL.into_iter().find(|direction| direction.sign == Sign::Plus).unwrap();
        let dialled = std::thread::spawn(move || {
            dial(&TcpStream::connect(address).unwrap(), dials, link, Deadline::after(LONG))
        });
        let accepted = accept(&listener.accept().unwrap().0, accepts);
        (dialled.join().unwrap(), accepted)
    }

    #[test]
    fn both_ends_of_a_link_know_the_key_or_find_that_the_other_does_not() {
        let (dialled, accepted) = meet(KEY, KEY);
        assert!(dialled.is_ok() && accepted.is_ok());
        let (dialled, accepted) = meet(KEY, KEY ^ 1);
        assert_eq!(dialled.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(accepted.is_err());
    }

    /// A stranger learns a number and a proof, and the proofs of one connection are none of another.
    #[test]
    fn a_stranger_gets_no_further_than_its_hello() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (strangers, (sender, accepted)) = (Strangers::default(), mpsc::channel());
        let address = listener.local_addr().unwrap();
        let connect = || {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            let sender = sender.clone();
            strangers.accept(listener.accept().unwrap().0, KEY, move |link, _| sender.send(link).unwrap());
            stream
        };
        let mut stranger = connect();
        stranger.write_all(&[&MAGIC[..], &[0], &[7; NONCE_BYTES]].concat()).unwrap();
        let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
        stranger.read_exact(&mut answer).unwrap();
        stranger.write_all(&answer[NONCE_BYTES..]).unwrap();
        assert_eq!(stranger.read(&mut [0]).unwrap_or(0), 0, "nothing but that");
        // More than are checked at once, and none sends anything: the first ones end at once.
        let silent: Vec<_> = (0..STRANGERS + 8).map(|_| connect()).collect();
        let start = std::time::Instant::now();
        for mut stream in silent.iter().take(8) {
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
        }
        assert!(start.elapsed() < HELLO, "a newer one took its place");
        let node = connect();
        let link = Direction::from_index(0).unwrap();
        dial(&node, KEY, link, Deadline::after(LONG)).unwrap();
        assert_eq!(accepted.recv_timeout(LONG), Ok(link));
        assert!(accepted.try_recv().is_err());
    }
}
