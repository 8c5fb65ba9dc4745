//! Both ends of a connection prove that they know its key, which neither sends, before one tells the other anything.
//!
//! ```text
//!   dials: magic (7), purpose (1), nonce (32) ─► accepts: number (2), nonce (32), proof (32) ─► dials: proof (32)
//!   ─► accepts: 1
//! ```
//! A proof is HMAC-SHA-256 (RFC 2104) with the key over a label, the purpose, the number of the end that accepts and both
//! nonces. So nobody in the place of a dead process can pass the proofs on to another one. What follows on the stream is not
//! protected.

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

const MAGIC: [u8; 7] = *b"mtorus3";
const HELLO_BYTES: usize = MAGIC.len() + 1 + NONCE_BYTES;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
/// Number, nonce and proof.
const ANSWER_BYTES: usize = 2 + NONCE_BYTES + PROOF_BYTES;
/// The end that accepts has a place for the other one.
const WELCOME: u8 = 1;
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
/// Least time between lines about connections that were refused.
const TOLD_EVERY: Duration = Duration::from_secs(1);
/// Interval of looks, and pause after what failed.
const LOOK: Duration = Duration::from_millis(20);

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A link, as the end that dials sees it.
    Link(Direction),
    /// A node process or a host monitor, at a supervisor.
    Report,
    /// A higher supervisor, at a lower one.
    Supervisor,
    /// A watcher, at any supervisor.
    Watcher,
    /// A host outside of the torus, at a seventh port.
    SeventhPort,
    /// A node of a mesh, where all learn their addresses.
    Rendezvous,
    /// A node of a mesh, at another one.
    Mesh,
}

/// Behind the directions.
const OTHERS: [(u8, Purpose); 6] = [
    (16, Purpose::Report),
    (17, Purpose::SeventhPort),
    (18, Purpose::Rendezvous),
    (19, Purpose::Mesh),
    (20, Purpose::Supervisor),
    (21, Purpose::Watcher),
];

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

    /// Whether the end that dials knows which one it wants: a node, or a supervisor by its place in the list.
    fn has_number(self) -> bool {
        !matches!(self, Self::Watcher | Self::SeventhPort | Self::Rendezvous)
    }

    /// Admits connections for this purpose only.
    pub(crate) fn only(self) -> impl Fn(Purpose) -> Option<()> + Send + 'static {
        move |purpose| (purpose == self).then_some(())
    }
}

/// What an end that dials wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) key: u64,
    pub(crate) purpose: Purpose,
    /// Number of the end that accepts: of a node, or a supervisor. Without meaning for the purposes that have none.
    pub(crate) to: u16,
}

/// An end that accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acceptor {
    pub(crate) key: u64,
    /// Its number, as in [`Call::to`].
    pub(crate) number: u16,
}

/// In place of a number for purposes without.
const NO_NUMBER: u16 = u16::MAX;

/// What a proof is over, but for the nonces.
#[derive(Clone, Copy)]
struct Terms {
    key: u64,
    purpose: u8,
    number: u16,
}

impl Terms {
    fn new(key: u64, purpose: Purpose, number: u16) -> Terms {
        let number = if purpose.has_number() { number } else { NO_NUMBER };
        Terms { key, purpose: purpose.code(), number }
    }

    /// All parts have fixed lengths for each label, and no label begins another.
    fn message(self, label: &[u8], nonces: [&Nonce; 2]) -> Vec<u8> {
        [label, &[self.purpose], &self.number.to_le_bytes(), nonces[0], nonces[1]].concat()
    }

    fn key(self) -> Key {
        Key::new(HMAC_SHA256, &self.key.to_le_bytes())
    }

    fn prove(self, label: &[u8], nonces: [&Nonce; 2]) -> hmac::Tag {
        hmac::sign(&self.key(), &self.message(label, nonces))
    }

    fn check(self, label: &[u8], nonces: [&Nonce; 2], proof: &[u8]) -> io::Result<()> {
        hmac::verify(&self.key(), &self.message(label, nonces), proof)
            .map_err(|_| io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the key"))
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

/// It knows the key, and is another one.
#[derive(Debug, thiserror::Error)]
#[error("it is number {found}, not {expected}")]
struct OtherNumber {
    found: u16,
    expected: u16,
}

/// Whether the other end has proved that it is another one.
pub(crate) fn is_other_number(cause: &io::Error) -> bool {
    cause.get_ref().is_some_and(|inner| inner.is::<OtherNumber>())
}

/// Proves the key at the end that dials. An error of kind `PermissionDenied` means that the other end does not know it, or
/// [is another one](is_other_number): another attempt would end alike. Reads have no timeout afterwards.
pub(crate) fn dial(mut stream: &TcpStream, call: Call, deadline: Deadline) -> io::Result<()> {
    let terms = Terms::new(call.key, call.purpose, call.to);
    let own = nonce()?;
    stream.write_all(&[&MAGIC[..], &[terms.purpose], &own].concat())?;
    let mut answer = [0; ANSWER_BYTES];
    read(stream, &mut answer, deadline)?;
    let (number, rest) = answer.split_at(2);
    let (theirs, proof) = rest.split_at(NONCE_BYTES);
    let number = u16::from_le_bytes([number[0], number[1]]);
    let theirs: &Nonce = theirs.try_into().map_err(io::Error::other)?;
    let nonces = [&own, theirs];
    Terms { number, ..terms }.check(ACCEPTS, nonces, proof)?;
    if number != terms.number {
        let other = OtherNumber { found: number, expected: terms.number };
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, other));
    }
    stream.write_all(terms.prove(DIALS, nonces).as_ref())?;
    let mut welcome = [0];
    read(stream, &mut welcome, deadline)?;
    if welcome != [WELCOME] {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it sent {welcome:02x?}")));
    }
    stream.set_read_timeout(None)
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
    call: Call,
    deadline: Deadline,
    retry: Deadline,
) -> Result<TcpStream, ProofError> {
    loop {
        let stream = millstream_rdma::connect::dial(address, deadline).map_err(ProofError::Connect)?;
        match dial(&stream, call, deadline) {
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
/// The other end waits for its [`welcome`] then.
fn accept<T>(
    mut stream: &TcpStream,
    acceptor: Acceptor,
    admits: impl FnOnce(Purpose) -> Option<T>,
) -> io::Result<T> {
    let deadline = Deadline::after(HELLO);
    let mut hello = [0; HELLO_BYTES];
    read(stream, &mut hello, deadline)?;
    let (magic, rest) = hello.split_at(MAGIC.len());
    let unknown =
        || io::Error::new(io::ErrorKind::InvalidData, format!("it sent {:02x?}", &hello[..MAGIC.len() + 1]));
    let purpose = Purpose::from_code(rest[0]).filter(|_| magic == MAGIC).ok_or_else(unknown)?;
    let admitted = admits(purpose).ok_or_else(unknown)?;
    let theirs: &Nonce = rest[1..].try_into().map_err(io::Error::other)?;
    let own = nonce()?;
    let (terms, nonces) = (Terms::new(acceptor.key, purpose, acceptor.number), [theirs, &own]);
    stream.set_write_timeout(Some(HELLO))?;
    let answer = [&terms.number.to_le_bytes()[..], &own, terms.prove(ACCEPTS, nonces).as_ref()].concat();
    stream.write_all(&answer)?;
    let mut proof = [0; PROOF_BYTES];
    read(stream, &mut proof, deadline)?;
    terms.check(DIALS, nonces, &proof)?;
    stream.set_read_timeout(None)?;
    Ok(admitted)
}

/// Tells the other end that its connection is used. Fails if it was ended meanwhile.
fn welcome(mut stream: &TcpStream) -> io::Result<()> {
    stream.write_all(&[WELCOME])
}

/// The other end of a connection, for messages.
pub(crate) fn peer_address(stream: &TcpStream) -> String {
    stream.peer_addr().map_or_else(|_| "(unconnected)".to_owned(), |peer| peer.to_string())
}

/// Tells of connections that were refused, once a second at most: anybody can open many.
#[derive(Debug, Default)]
struct Refusals {
    told: Option<Instant>,
    untold: u64,
}

impl Refusals {
    fn add(&mut self, address: &str, cause: &io::Error) {
        // Ends that gave up, and port scanners.
        let gone = matches!(
            cause.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
        );
        if gone {
            return tracing::debug!("{address} is refused: {cause}");
        }
        if self.told.is_some_and(|at| at.elapsed() < TOLD_EVERY) {
            self.untold += 1;
            return;
        }
        let others = std::mem::take(&mut self.untold);
        self.told = Some(Instant::now());
        match others {
            0 => tracing::warn!("{address} is refused: {cause}"),
            _ => tracing::warn!("{address} is refused: {cause}; so were {others} before"),
        }
    }
}

/// Connections whose other end has not proved yet that it knows the key. A thread each checks them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Strangers {
    waiting: Arc<Mutex<Waiting>>,
    refusals: Arc<Mutex<Refusals>>,
}

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
        acceptor: Acceptor,
        admits: impl FnOnce(Purpose) -> Option<T> + Send + 'static,
        then: impl FnOnce(T, TcpStream) + Send + 'static,
    ) {
        self.check(stream, acceptor, admits, |outcome| {
            if let Some((admitted, stream)) = outcome {
                then(admitted, stream);
            }
        });
    }

    /// As [`accept`](Self::accept); `then` also learns of a connection that was refused. Lines tell of those.
    pub(crate) fn check<T>(
        &self,
        stream: TcpStream,
        acceptor: Acceptor,
        admits: impl FnOnce(Purpose) -> Option<T> + Send + 'static,
        then: impl FnOnce(Option<(T, TcpStream)>) + Send + 'static,
    ) {
        let (address, stream) = (peer_address(&stream), Arc::new(stream));
        self.add(Arc::clone(&stream));
        let strangers = self.clone();
        let work = move || {
            let proved = accept(&stream, acceptor, admits);
            strangers.lock().retain(|(_, other)| !Arc::ptr_eq(other, &stream));
            // No other one takes its place from here on.
            let welcome = proved.and_then(|admitted| welcome(&stream).map(|()| admitted));
            let ended = || io::Error::from(io::ErrorKind::ConnectionAborted);
            let outcome =
                welcome.and_then(|admitted| Ok((admitted, Arc::into_inner(stream).ok_or_else(ended)?)));
            then(outcome.inspect_err(|cause| strangers.refuse(&address, cause)).ok());
        };
        if let Err(error) = std::thread::Builder::new().spawn(work) {
            self.refuse("a connection", &error);
            // No thread has it.
            self.lock().retain(|(_, stream)| Arc::strong_count(stream) > 1);
        }
    }

    fn refuse(&self, address: &str, cause: &io::Error) {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).add(address, cause);
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
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const KEY: u64 = 0x1234_5678_9abc_def0;

    const NODE: Acceptor = Acceptor { key: KEY, number: 5 };

    fn call(purpose: Purpose) -> Call {
        Call { key: KEY, purpose, to: NODE.number }
    }

    /// What both ends of a connection find.
    fn meet(call: Call, acceptor: Acceptor, purpose: Purpose) -> [io::Result<()>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let dialled = std::thread::spawn(move || {
            dial(&TcpStream::connect(address).unwrap(), call, Deadline::after(LONG))
        });
        let stream = listener.accept().unwrap().0;
        let accepted = accept(&stream, acceptor, purpose.only()).and_then(|()| welcome(&stream));
        drop(stream);
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
        let [dialled, accepted] = meet(call(link), NODE, link);
        assert!(dialled.is_ok() && accepted.is_ok());
        let [dialled, accepted] = meet(call(link), Acceptor { key: KEY ^ 1, ..NODE }, link);
        assert_eq!(dialled.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(accepted.is_err());
    }

    #[test]
    fn another_node_than_the_one_that_was_dialled_is_refused_and_named() {
        let other = Acceptor { number: 6, ..NODE };
        for purpose in [Purpose::Link(Direction::ALL[0]), Purpose::Report, Purpose::Supervisor, Purpose::Mesh]
        {
            let [dialled, accepted] = meet(call(purpose), other, purpose);
            let refusal = dialled.unwrap_err();
            assert_eq!(refusal.to_string(), "it is number 6, not 5");
            assert!(is_other_number(&refusal));
            assert!(accepted.is_err());
        }
        for purpose in [Purpose::Watcher, Purpose::SeventhPort, Purpose::Rendezvous] {
            let [dialled, accepted] = meet(call(purpose), other, purpose);
            assert!(dialled.is_ok() && accepted.is_ok(), "{purpose:?} is for any of them");
        }
    }

    /// Somebody without the key has the place of node 5, and passes everything on to node 6, but for the number.
    #[test]
    fn proofs_that_are_passed_on_to_another_node_are_refused() {
        let [place, listener] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [dialled, other] = [&place, &listener].map(|listener| listener.local_addr().unwrap());
        let link = Purpose::Link(Direction::ALL[0]);
        let dials = std::thread::spawn(move || {
            dial(&TcpStream::connect(dialled).unwrap(), call(link), Deadline::after(LONG))
        });
        let passes = std::thread::spawn(move || {
            let (mut from, mut to) = (place.accept().unwrap().0, TcpStream::connect(other).unwrap());
            let mut hello = [0; HELLO_BYTES];
            from.read_exact(&mut hello).unwrap();
            to.write_all(&hello).unwrap();
            let mut answer = [0; ANSWER_BYTES];
            to.read_exact(&mut answer).unwrap();
            answer[..2].copy_from_slice(&5u16.to_le_bytes());
            from.write_all(&answer).unwrap();
            assert_eq!(from.read(&mut [0]).unwrap_or(0), 0, "no proof");
        });
        let accepted = accept(&listener.accept().unwrap().0, Acceptor { number: 6, ..NODE }, link.only());
        assert_eq!(dials.join().unwrap().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        passes.join().unwrap();
        assert!(accepted.is_err());
    }

    /// One that is ended in favour of another, between its proof and the welcome, tries again.
    #[test]
    fn a_connection_is_used_by_both_ends_or_by_none() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let link = Purpose::Link(Direction::ALL[0]);
        let dials = std::thread::spawn(move || {
            connect(&address, call(link), Deadline::after(LONG), Deadline::after(LONG)).map(drop)
        });
        let first = listener.accept().unwrap().0;
        accept(&first, NODE, link.only()).unwrap();
        first.shutdown(Shutdown::Both).unwrap();
        assert!(welcome(&first).is_err());
        let second = listener.accept().unwrap().0;
        accept(&second, NODE, link.only()).and_then(|()| welcome(&second)).unwrap();
        assert!(dials.join().unwrap().is_ok());
    }

    #[test]
    fn a_connection_for_another_purpose_ends_without_a_proof() {
        let [dialled, accepted] = meet(call(Purpose::SeventhPort), NODE, Purpose::Supervisor);
        assert!(dialled.is_err_and(|error| error.kind() != io::ErrorKind::PermissionDenied));
        assert_eq!(accepted.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn many_that_start_at_once_are_all_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let count = 4 * STRANGERS;
        let dialled: Vec<_> = (0..count)
            .map(|_| {
                let (address, purpose) = (address.clone(), Purpose::Rendezvous);
                std::thread::spawn(move || {
                    connect(&address, call(purpose), Deadline::after(LONG), Deadline::after(LONG)).map(drop)
                })
            })
            .collect();
        let (sender, accepted) = mpsc::channel();
        std::thread::spawn(move || {
            let strangers = Strangers::default();
            // On a slow machine some are ended in favour of others, and come again.
            for stream in listener.incoming() {
                strangers.wait_for_room();
                let sender = sender.clone();
                strangers.accept(stream.unwrap(), NODE, Purpose::Rendezvous.only(), move |(), _| {
                    sender.send(()).unwrap();
                });
            }
        });
        (0..count).for_each(|_| accepted.recv_timeout(LONG).unwrap());
        assert!(dialled.into_iter().all(|dialled| dialled.join().unwrap().is_ok()));
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
            strangers.accept(stream_of_node, NODE, Some, move |purpose, _| sender.send(purpose).unwrap());
            stream
        };
        let mut stranger = connect();
        stranger.write_all(&[&MAGIC[..], &[0], &[7; NONCE_BYTES]].concat()).unwrap();
        let mut answer = [0; ANSWER_BYTES];
        stranger.read_exact(&mut answer).unwrap();
        stranger.write_all(&answer[2 + NONCE_BYTES..]).unwrap();
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
        dial(&node, call(link), Deadline::after(LONG)).unwrap();
        assert_eq!(accepted.recv_timeout(LONG), Ok(link));
        assert!(accepted.try_recv().is_err());
    }
}
