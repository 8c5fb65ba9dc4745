//! Both ends of a connection prove that they know its key, which neither sends, before one tells the other anything.
//!
//! ```text
//!   dials: magic (7), purpose (1), nonce (32) ─► accepts: nonce (32), proof (32) ─► dials: proof (32)
//! ```
//! A proof is HMAC-SHA-256 (RFC 2104) with the key over a label, the purpose and both nonces. What follows on the stream
//! is not protected.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_rdma::Deadline;
use millstream_rdma::connect::{ConnectError, ConnectErrorKind, Listener};
use millstream_torus_core::Direction;
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
pub(crate) const STRANGERS: usize = 256;
/// Time that a connection has if others can wait.
const TURN: Duration = Duration::from_millis(200);
/// Interval of looks, and pause after what failed.
const LOOK: Duration = Duration::from_millis(20);

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A link, as the end that dials sees it.
    Link(Direction),
    /// A node, monitor or watcher, at a supervisor.
    Supervisor,
    /// A host outside of the torus, at a seventh port.
    SeventhPort,
    /// A node of a mesh, where all learn their addresses.
    Rendezvous,
    /// A node of a mesh, at another one.
    Mesh,
}

/// Behind the directions.
const OTHERS: [(u8, Purpose); 4] =
    [(16, Purpose::Supervisor), (17, Purpose::SeventhPort), (18, Purpose::Rendezvous), (19, Purpose::Mesh)];

impl Purpose {
    fn code(self) -> u8 {
        match self {
            Self::Link(direction) => direction.index() as u8,
            other => OTHERS.iter().find(|(_, purpose)| *purpose == other).map_or(u8::MAX, |&(code, _)| code),
        }
    }

    fn from_code(code: u8) -> Option<Purpose> {
        let other = OTHERS.iter().find(|&&(other, _)| other == code).map(|&(_, purpose)| purpose);
        other.or_else(|| Direction::from_index(code.into()).map(Self::Link))
    }

    /// Admits connections for this purpose only.
    pub(crate) fn only(self) -> impl Fn(Purpose) -> Option<()> + Send + 'static {
        move |purpose| (purpose == self).then_some(())
    }
}

type Nonce = [u8; NONCE_BYTES];
/// Connections, and since when each waits.
type Waiting = VecDeque<(Instant, Arc<TcpStream>)>;

fn nonce() -> io::Result<Nonce> {
    let mut bytes = [0; NONCE_BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(bytes)
}

/// What a proof is over. All parts have fixed lengths for each label, and no label begins another.
fn message(label: &[u8], purpose: u8, nonces: [&Nonce; 2]) -> Vec<u8> {
    [label, &[purpose], nonces[0], nonces[1]].concat()
}

fn prove(key: u64, label: &[u8], purpose: u8, nonces: [&Nonce; 2]) -> hmac::Tag {
    let key = Key::new(HMAC_SHA256, &key.to_le_bytes());
    hmac::sign(&key, &message(label, purpose, nonces))
}

fn check(key: u64, label: &[u8], purpose: u8, nonces: [&Nonce; 2], proof: &[u8]) -> io::Result<()> {
    let key = Key::new(HMAC_SHA256, &key.to_le_bytes());
    hmac::verify(&key, &message(label, purpose, nonces), proof)
        .map_err(|_| io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the key"))
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
            // The second is a timeout, by the deadline or a moment earlier.
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Proves the key at the end that dials. An error of kind `PermissionDenied` means that the other end does not know it.
/// Reads have no timeout afterwards.
pub(crate) fn dial(mut stream: &TcpStream, key: u64, purpose: Purpose, deadline: Deadline) -> io::Result<()> {
    let (own, purpose) = (nonce()?, purpose.code());
    stream.write_all(&[&MAGIC[..], &[purpose], &own].concat())?;
    let mut theirs = [0; NONCE_BYTES];
    let mut proof = [0; PROOF_BYTES];
    read(stream, &mut theirs, deadline)?;
    read(stream, &mut proof, deadline)?;
    let nonces = [&own, &theirs];
    check(key, ACCEPTS, purpose, nonces, &proof)?;
    stream.set_read_timeout(None)?;
    stream.write_all(prove(key, DIALS, purpose, nonces).as_ref())
}

/// Why there is no connection with a proof.
#[derive(Debug)]
pub(crate) enum ProofError {
    /// No connection.
    Connect(ConnectError),
    /// No proof.
    Proof(io::Error),
}

/// Connects and proves the key. One that is cut off is followed by another attempt until `retry`: the other end may have had
/// too many connections, or was slow.
pub(crate) fn connect(
    address: &str,
    key: u64,
    purpose: Purpose,
    deadline: Deadline,
    retry: Deadline,
) -> Result<TcpStream, ProofError> {
    loop {
        let stream = millstream_rdma::connect::dial(address, deadline).map_err(ProofError::Connect)?;
        match dial(&stream, key, purpose, deadline) {
            Ok(()) => return Ok(stream),
            Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied || retry.passed() => {
                return Err(ProofError::Proof(cause));
            }
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

/// The next connection, if one comes at once, until the deadline.
pub(crate) fn next(listener: &Listener, deadline: Deadline) -> Result<Option<TcpStream>, ConnectError> {
    if deadline.passed() {
        let (peer, doing) = (listener.address().to_string(), "waiting for a connection");
        return Err(ConnectError { peer, kind: ConnectErrorKind::TimedOut { doing } });
    }
    match listener.accept(Deadline::after(LOOK)) {
        Ok((stream, _)) => return Ok(Some(stream)),
        Err(error) if matches!(error.kind, ConnectErrorKind::TimedOut { .. }) => {}
        // There may be descriptors again later.
        Err(_) => std::thread::sleep(LOOK),
    }
    Ok(None)
}

/// Proves the key at the end that accepts. Other purposes than those that `admits` knows end before this end proves anything.
pub(crate) fn accept<T>(
    mut stream: &TcpStream,
    key: u64,
    admits: impl FnOnce(Purpose) -> Option<T>,
) -> io::Result<T> {
    let deadline = Deadline::after(HELLO);
    let mut hello = [0; HELLO_BYTES];
    read(stream, &mut hello, deadline)?;
    let (magic, rest) = hello.split_at(MAGIC.len());
    let purpose = Purpose::from_code(rest[0]).filter(|_| magic == MAGIC);
    let admitted = purpose.and_then(admits).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("it sent {:02x?}", &hello[..MAGIC.len() + 1]))
    })?;
    let mut theirs = [0; NONCE_BYTES];
    theirs.copy_from_slice(&rest[1..]);
    let own = nonce()?;
    let (purpose, nonces) = (rest[0], [&theirs, &own]);
    stream.set_write_timeout(Some(HELLO))?;
    stream.write_all(&[&own, prove(key, ACCEPTS, purpose, nonces).as_ref()].concat())?;
    let mut proof = [0; PROOF_BYTES];
    read(stream, &mut proof, deadline)?;
    check(key, DIALS, purpose, nonces, &proof)?;
    stream.set_read_timeout(None)?;
    Ok(admitted)
}

/// The other end of a connection, for messages.
pub(crate) fn peer_address(stream: &TcpStream) -> String {
    stream.peer_addr().map_or_else(|_| "(unconnected)".to_owned(), |peer| peer.to_string())
}

/// Connections whose other end has not proved yet that it knows the key. A thread each checks them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Strangers(Arc<Mutex<Waiting>>);

impl Strangers {
    /// Waits until another connection can be accepted that ends none of the last 200 ms: many nodes may start at once. For
    /// threads that do nothing else.
    pub(crate) fn wait_for_room(&self) {
        loop {
            let age = {
                let waiting = self.lock();
                let Some((since, _)) = waiting.front().filter(|_| waiting.len() >= STRANGERS) else { return };
                since.elapsed()
            };
            let Some(left) = TURN.checked_sub(age) else { return };
            std::thread::sleep(left.min(LOOK));
        }
    }

    /// Accepts a connection, and gives it to `then`, on a thread of its own, if its other end knows the key and `admits` its
    /// purpose.
    pub(crate) fn accept<T>(
        &self,
        stream: TcpStream,
        key: u64,
        admits: impl FnOnce(Purpose) -> Option<T> + Send + 'static,
        then: impl FnOnce(T, TcpStream) + Send + 'static,
    ) {
        let address = peer_address(&stream);
        self.check(stream, key, admits, move |outcome| match outcome {
            Ok((admitted, stream)) => then(admitted, stream),
            Err(cause) => tracing::warn!("{address} is refused: {cause}"),
        });
    }

    /// As [`accept`](Self::accept), with the outcome.
    pub(crate) fn check<T>(
        &self,
        stream: TcpStream,
        key: u64,
        admits: impl FnOnce(Purpose) -> Option<T> + Send + 'static,
        then: impl FnOnce(io::Result<(T, TcpStream)>) + Send + 'static,
    ) {
        let stream = Arc::new(stream);
        self.add(Arc::clone(&stream));
        let strangers = self.clone();
        let work = move || {
            let proved = accept(&stream, key, admits);
            strangers.lock().retain(|(_, other)| !Arc::ptr_eq(other, &stream));
            // Another one took its place meanwhile.
            let ended = || io::Error::from(io::ErrorKind::ConnectionAborted);
            then(proved.and_then(|admitted| Ok((admitted, Arc::into_inner(stream).ok_or_else(ended)?))));
        };
        if let Err(error) = std::thread::Builder::new().spawn(work) {
            tracing::warn!("a connection is refused: {error}");
            // No thread has it.
            self.lock().retain(|(_, stream)| Arc::strong_count(stream) > 1);
        }
    }

    fn add(&self, stream: Arc<TcpStream>) {
        let mut waiting = self.lock();
        if waiting.len() >= STRANGERS
            && let Some((_, oldest)) = waiting.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        waiting.push_back((Instant::now(), stream));
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
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
    fn meet((dials, of_dial): (u64, Purpose), (accepts, of_accept): (u64, Purpose)) -> [io::Result<()>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let dialled = std::thread::spawn(move || {
            dial(&TcpStream::connect(address).unwrap(), dials, of_dial, Deadline::after(LONG))
        });
        let accepted = accept(&listener.accept().unwrap().0, accepts, of_accept.only());
        [dialled.join().unwrap(), accepted]
    }

    #[test]
    fn every_purpose_has_a_code_of_its_own() {
        let links = Direction::ALL.into_iter().map(Purpose::Link);
        let all: Vec<_> = links.chain(OTHERS.map(|(_, purpose)| purpose)).collect();
        assert!(all.iter().all(|purpose| Purpose::from_code(purpose.code()) == Some(*purpose)));
        assert_eq!((0..=u8::MAX).filter_map(Purpose::from_code).count(), all.len());
    }

    #[test]
    fn both_ends_know_the_key_or_find_that_the_other_does_not() {
        let link = Purpose::Link(Direction::ALL[0]);
        let [dialled, accepted] = meet((KEY, link), (KEY, link));
        assert!(dialled.is_ok() && accepted.is_ok());
        let [dialled, accepted] = meet((KEY, link), (KEY ^ 1, link));
        assert_eq!(dialled.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(accepted.is_err());
    }

    #[test]
    fn a_connection_for_another_purpose_ends_without_a_proof() {
        let [dialled, accepted] = meet((KEY, Purpose::SeventhPort), (KEY, Purpose::Supervisor));
        assert!(dialled.is_err_and(|error| error.kind() != io::ErrorKind::PermissionDenied));
        assert_eq!(accepted.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn many_that_start_at_once_are_all_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let count = 4 * STRANGERS;
        let dialled: Vec<_> = (0..count)
            .map(|_| {
                std::thread::spawn(move || {
                    let stream = TcpStream::connect(address).unwrap();
                    dial(&stream, KEY, Purpose::Rendezvous, Deadline::after(LONG)).unwrap();
                })
            })
            .collect();
        let (strangers, (sender, accepted)) = (Strangers::default(), mpsc::channel());
        for _ in 0..count {
            strangers.wait_for_room();
            let sender = sender.clone();
            let stream = listener.accept().unwrap().0;
            strangers.accept(stream, KEY, Purpose::Rendezvous.only(), move |(), _| sender.send(()).unwrap());
        }
        (0..count).for_each(|_| accepted.recv_timeout(LONG).unwrap());
        dialled.into_iter().for_each(|dialled| dialled.join().unwrap());
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
            let stream_of_node = listener.accept().unwrap().0;
            strangers.accept(stream_of_node, KEY, Some, move |purpose, _| sender.send(purpose).unwrap());
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
        let start = Instant::now();
        for mut stream in silent.iter().take(8) {
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
        }
        assert!(start.elapsed() < HELLO, "a newer one took its place");
        let node = connect();
        let link = Purpose::Link(Direction::ALL[0]);
        dial(&node, KEY, link, Deadline::after(LONG)).unwrap();
        assert_eq!(accepted.recv_timeout(LONG), Ok(link));
        assert!(accepted.try_recv().is_err());
    }
}
