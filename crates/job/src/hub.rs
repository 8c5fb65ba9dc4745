//! The hub at rank 0: agents of all ranks, and the connections between relays and processes.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use crate::environment::{Job, Rendezvous};
use crate::error::JobError;
use crate::frame::{Frame, Peer, StartRequest};
use crate::inherited::Inherited;
use crate::proof::{self, Nonce};

/// Connections that wait to be accepted, as those of the standard library.
const BACKLOG: i32 = 128;
/// Connections at a time whose peer has not proved that it knows a key. Of more, the oldest ends.
const STRANGERS: usize = 256;
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(20);

/// Chooses the rank of a process.
type Placement = Box<dyn Fn(&StartRequest) -> usize + Send + Sync>;

/// The meeting point of a job, open at rank 0. Dropping it ends all agents.
pub struct Hub {
    shared: Arc<Shared>,
    address: SocketAddr,
    file: Option<PathBuf>,
    relay_key: Inherited,
}

struct Shared {
    /// Key of the job, for ranks.
    key: String,
    /// Random key for relays, so that nobody else requests processes.
    relay_key: Nonce,
    ranks: usize,
    placement: Placement,
    state: Mutex<State>,
    changed: Condvar,
    /// Connections without a proof, by number.
    strangers: Mutex<VecDeque<(u64, TcpStream)>>,
}

#[derive(Default)]
struct State {
    agents: Vec<Option<TcpStream>>,
    /// Relays whose process has not connected, by number, with the rank of the process.
    waiting: HashMap<u64, (usize, TcpStream)>,
    /// Processes that are connected with their relays, with their ranks.
    running: Vec<(usize, Weak<TcpStream>)>,
    /// Address of this host as the first rank of another host sees it.
    seen: Option<IpAddr>,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hub({}, {} ranks)", self.address, self.shared.ranks)
    }
}

impl Hub {
    /// Opens the meeting point of the job. `place` chooses the rank of each process.
    ///
    /// # Errors
    /// [`JobError::Listen`].
    pub fn open(
        job: &Job,
        place: impl Fn(&StartRequest) -> usize + Send + Sync + 'static,
    ) -> Result<Hub, JobError> {
        let (host, port, name) = match &job.rendezvous {
            Rendezvous::Address { host, port } => (Some(host.as_str()), *port, format!("{host}:{port}")),
            Rendezvous::File(path) => (None, 0, format!("file:{}", path.display())),
        };
        let failed = |cause| JobError::Listen { address: name.clone(), cause };
        let listener = listen(host, port).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let port = bound.port();
        // What listens on all addresses listens on this one, too.
        let address =
            if bound.ip().is_loopback() { bound } else { SocketAddr::from((Ipv4Addr::LOCALHOST, port)) };
        let file = match &job.rendezvous {
            Rendezvous::File(path) => {
                publish(path, port).map_err(JobError::os(format!("write {}", path.display())))?;
                Some(path.clone())
            }
            Rendezvous::Address { .. } => None,
        };
        let own_key = proof::random().map_err(JobError::os("make the key of relays"))?;
        let relay_key = Inherited::new(&own_key).map_err(JobError::os("store the key of relays"))?;
        let state = State { agents: (0..job.ranks).map(|_| None).collect(), ..State::default() };
        let shared = Arc::new(Shared {
            key: job.key.clone(),
            relay_key: own_key,
            ranks: job.ranks,
            placement: Box::new(place),
            state: Mutex::new(state),
            changed: Condvar::new(),
            strangers: Mutex::default(),
        });
        let serving = Arc::clone(&shared);
        std::thread::spawn(move || {
            let mut is_told = false;
            for (number, stream) in (0..).zip(listener.incoming()) {
                let served = stream.and_then(|stream| Shared::begin(&serving, number, stream));
                // Descriptors, memory or threads ran out; there may be some again later.
                if let Err(error) = served.or_else(unless_aborted) {
                    if !std::mem::replace(&mut is_told, true) {
                        // Nobody may read it.
                        let _ = writeln!(io::stderr(), "rank 0 cannot accept a connection: {error}");
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        });
        Ok(Hub { shared, address, file, relay_key })
    }

    /// Where relays of this host connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The file with the key of relays; processes that this process starts can read it, other users cannot.
    pub fn relay_key(&self) -> PathBuf {
        self.relay_key.path()
    }

    /// The address of this host as ranks of other hosts see it; `None` if all ranks are on this host.
    pub fn own_address(&self) -> Option<IpAddr> {
        self.shared.state().seen
    }

    /// Waits until the agents of all ranks have connected.
    ///
    /// # Errors
    /// [`JobError::Missing`].
    pub fn wait_for_ranks(&self, timeout: Duration) -> Result<(), JobError> {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state();
        loop {
            let missing: Vec<usize> = state
                .agents
                .iter()
                .enumerate()
                .filter_map(|(rank, agent)| agent.is_none().then_some(rank))
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let (ranks, seconds) = (self.shared.ranks, timeout.as_secs());
                return Err(JobError::Missing { missing, ranks, seconds });
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tells all agents that the run has ended.
    pub fn finish(&self) {
        for agent in self.shared.state().agents.iter_mut().flatten() {
            // An agent that is lost needs no message.
            let _ = Frame::Finish.send(agent);
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        for agent in self.shared.state().agents.iter().flatten() {
            let _ = agent.shutdown(Shutdown::Both);
        }
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn strangers(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one connection on a thread of its own.
    fn begin(shared: &Arc<Shared>, number: u64, stream: TcpStream) -> io::Result<()> {
        let mut strangers = shared.strangers();
        if strangers.len() == STRANGERS
            && let Some((_, oldest)) = strangers.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        strangers.push_back((number, stream.try_clone()?));
        drop(strangers);
        let serving = Arc::clone(shared);
        let begun = std::thread::Builder::new().spawn(move || serving.serve(number, stream));
        if begun.is_err() {
            shared.strangers().retain(|(other, _)| *other != number);
        }
        begun.map(drop)
    }

    /// Serves one connection. One without a proof of the key is dropped.
    fn serve(&self, number: u64, mut stream: TcpStream) {
        let key = |is_relay| if is_relay { &self.relay_key[..] } else { self.key.as_bytes() };
        let peer = proof::receive(&mut stream, key);
        self.strangers().retain(|(other, _)| *other != number);
        let Ok(peer) = peer else { return };
        match peer {
            Peer::Agent { rank } => self.agent(rank, stream),
            // Rank 0 starts relays on this host only.
            Peer::Relay(_) if !stream.peer_addr().is_ok_and(|peer| address_of(peer).is_loopback()) => {}
            Peer::Relay(request) => self.relay(&request, stream),
            Peer::Process { number } => {
                let stream = Arc::new(stream);
                let mut state = self.state();
                let Some((rank, relay)) = state.waiting.remove(&number) else { return };
                state.running.retain(|(_, process)| process.strong_count() > 0);
                state.running.push((rank, Arc::downgrade(&stream)));
                drop(state);
                splice(&relay, &stream);
            }
        }
    }

    /// Registers the agent of a rank, and waits for its end.
    fn agent(&self, rank: usize, mut stream: TcpStream) {
        let Ok(copy) = stream.try_clone() else { return };
        {
            let mut state = self.state();
            match state.agents.get_mut(rank) {
                Some(agent @ None) => *agent = Some(copy),
                // A rank outside of the job, or one that is there already.
                _ => return,
            }
            if let (Ok(peer), Ok(own)) =
                (stream.peer_addr().map(address_of), stream.local_addr().map(address_of))
                && peer != own
                // The name of this host may be a loopback address other than 127.0.0.1.
                && !own.is_loopback()
            {
                state.seen.get_or_insert(own);
            }
            self.changed.notify_all();
        }
        while let Ok(Some(frame)) = Frame::receive(&mut stream) {
            let Frame::Unconnected(number, reason) = frame else { continue };
            let relay = self.state().waiting.remove(&number);
            if let Some((_, mut relay)) = relay {
                let reason = format!("rank {rank} cannot connect the process to rank 0: {reason}\n");
                let _ = Frame::Error(reason.into_bytes()).send(&mut relay);
            }
        }
        let mut state = self.state();
        state.agents[rank] = None;
        // Their processes will not connect.
        state.waiting.retain(|_, (of, relay)| *of != rank || relay.shutdown(Shutdown::Both).is_err());
        // The host of the rank may have closed no connection.
        for process in state.running.iter().filter(|(of, _)| *of == rank).filter_map(|(_, it)| it.upgrade()) {
            let _ = process.shutdown(Shutdown::Both);
        }
    }

    /// Requests the process of a relay from its rank.
    fn relay(&self, request: &StartRequest, mut stream: TcpStream) {
        let rank = (self.placement)(request);
        // Only the rank learns the number, so nobody else takes the place of the process.
        let Ok([a, b, c, d, e, f, g, h, ..]) = proof::random() else { return };
        let number = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let mut state = self.state();
        let seen = state.seen;
        let sent = match state.agents.get_mut(rank) {
            Some(Some(agent)) => Frame::Start(number, seen, request.clone()).send(agent).is_ok(),
            _ => false,
        };
        if sent {
            state.waiting.insert(number, (rank, stream));
        } else {
            let _ = Frame::Error(format!("rank {rank} is lost\n").into_bytes()).send(&mut stream);
        }
    }
}

/// Success for a connection that its peer has ended before it was accepted.
fn unless_aborted(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::ConnectionAborted { Ok(()) } else { Err(error) }
}

/// Copies both directions until both have ended.
fn splice(one: &TcpStream, other: &TcpStream) {
    std::thread::scope(|scope| {
        // Without a thread, both ends see that the connection ends.
        if std::thread::Builder::new().spawn_scoped(scope, || copy(one, other)).is_ok() {
            copy(other, one);
        }
    });
}

/// Copies one direction; its end is passed on.
fn copy(mut from: &TcpStream, mut to: &TcpStream) {
    // An error ends the direction as its end does.
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

/// Listens on a port for ranks that know this host by the name or address; without one, by any of its names.
fn listen(host: Option<&str>, port: u16) -> io::Result<TcpListener> {
    match host.and_then(literal) {
        Some(IpAddr::V4(address)) if address.is_loopback() => TcpListener::bind((Ipv4Addr::LOCALHOST, port)),
        Some(IpAddr::V6(address)) if address.is_loopback() => TcpListener::bind((address, port)),
        Some(IpAddr::V4(_)) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        // A host may be without IPv6.
        _ => listen_on_both(port).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))),
    }
}

/// Listens on a port of IPv4 and IPv6.
fn listen_on_both(port: u16) -> io::Result<TcpListener> {
    let socket = net::socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    net::sockopt::set_ipv6_v6only(&socket, false)?;
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// The address of an end of a connection; that of IPv4 on a listener of both.
fn address_of(end: SocketAddr) -> IpAddr {
    end.ip().to_canonical()
}

/// A host that is an address, or `localhost`. Addresses of IPv6 are in brackets before a port.
pub(crate) fn literal(host: &str) -> Option<IpAddr> {
    if host == "localhost" {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    bare.parse().ok()
}

/// Writes the address of this host to the file, which appears whole.
fn publish(path: &std::path::Path, port: u16) -> io::Result<()> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    let partial = path.with_extension(format!("partial-{}", std::process::id()));
    std::fs::write(&partial, format!("{}:{port}\n", host.trim()))?;
    std::fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent;
    use crate::proof::greet;
    use std::io::Read as _;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn job(rank: usize, port: u16) -> Job {
        let rendezvous = Rendezvous::Address { host: "127.0.0.1".to_owned(), port };
        Job { rank, ranks: 2, key: "17.0.kept".to_owned(), rendezvous }
    }

    #[test]
    fn the_key_of_the_job_requests_no_process() {
        let hub = Hub::open(&job(0, 0), |_| 1).unwrap();
        let job = job(1, hub.address.port());
        let mut agent = TcpStream::connect(hub.address).unwrap();
        greet(&mut agent, job.key.as_bytes(), &Peer::Agent { rank: 1 }).unwrap();
        let request =
            || Peer::Relay(StartRequest { arguments: vec!["builder".to_owned()], environment: Vec::new() });
        let mut relay = TcpStream::connect(hub.address).unwrap();
        let refused = greet(&mut relay, job.key.as_bytes(), &request()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        // The first request that reaches the rank is that with the hub's key.
        let mut relay = TcpStream::connect(hub.address).unwrap();
        greet(&mut relay, &std::fs::read(hub.relay_key()).unwrap(), &request()).unwrap();
        assert!(matches!(Frame::receive(&mut agent), Ok(Some(Frame::Start(..)))));
    }

    #[test]
    fn silent_connections_keep_no_rank_out() {
        let hub = Hub::open(&job(0, 0), |_| 1).unwrap();
        let silent: Vec<_> = (0..STRANGERS + 8).map(|_| TcpStream::connect(hub.address).unwrap()).collect();
        // Those that were first make room.
        for mut stream in silent.iter().take(8) {
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
        }
        let mut agent = TcpStream::connect(hub.address).unwrap();
        greet(&mut agent, b"17.0.kept", &Peer::Agent { rank: 1 }).unwrap();
    }

    #[test]
    fn a_name_of_this_host_with_a_loopback_address_is_no_address_for_other_hosts() {
        let rendezvous = Rendezvous::Address { host: "name-of-this-host".to_owned(), port: 0 };
        let job = Job { rendezvous, ..job(0, 0) };
        let hub = Hub::open(&job, |_| 0).unwrap();
        let _agents = [0, 1].map(|rank| {
            let mut agent = TcpStream::connect(("127.0.1.1", hub.address.port())).unwrap();
            greet(&mut agent, job.key.as_bytes(), &Peer::Agent { rank }).unwrap();
            agent
        });
        hub.wait_for_ranks(Duration::from_secs(60)).unwrap();
        assert_eq!(hub.own_address(), None);
    }

    #[test]
    fn ranks_meet_at_addresses_and_names_of_both_families() {
        for host in ["[::1]", "[::]", "127.0.0.1", "localhost", "name-of-this-host"] {
            let rendezvous = |port| Rendezvous::Address { host: host.to_owned(), port };
            let hub = Hub::open(&Job { rendezvous: rendezvous(0), ..job(0, 0) }, |_| 1).unwrap();
            let port = hub.address.port();
            let _ranks = [0, 1].map(|rank| {
                // Nobody resolves that name here.
                let host = if host.starts_with("name") { "[::1]" } else { host };
                let rendezvous = Rendezvous::Address { host: host.to_owned(), port };
                let job = Job { rendezvous, ..job(rank, port) };
                std::thread::spawn(move || {
                    agent::serve_beside_hub(&job, Arc::new(|_: &StartRequest, _| None))
                })
            });
            hub.wait_for_ranks(Duration::from_secs(60)).unwrap();
            assert_eq!(hub.own_address(), None, "{host}");
            let key = std::fs::read(hub.relay_key()).unwrap();
            let mut relay = TcpStream::connect(hub.address()).unwrap();
            let request = StartRequest { arguments: vec!["builder".to_owned()], environment: Vec::new() };
            greet(&mut relay, &key, &Peer::Relay(request)).unwrap();
            let answer = Frame::receive(&mut relay).unwrap();
            assert!(matches!(answer, Some(Frame::Error(_))), "{host}: {answer:?}");
        }
    }

    /// The rank is there, but its process has no connection.
    #[test]
    fn a_relay_learns_why_its_process_has_no_connection() {
        let hub = Hub::open(&job(0, 0), |_| 1).unwrap();
        let mut agent = TcpStream::connect(hub.address).unwrap();
        greet(&mut agent, b"17.0.kept", &Peer::Agent { rank: 1 }).unwrap();
        let mut relay = TcpStream::connect(hub.address).unwrap();
        let request = StartRequest { arguments: vec!["builder".to_owned()], environment: Vec::new() };
        greet(&mut relay, &std::fs::read(hub.relay_key()).unwrap(), &Peer::Relay(request)).unwrap();
        let Ok(Some(Frame::Start(number, ..))) = Frame::receive(&mut agent) else { panic!("no start") };
        Frame::Unconnected(number, "timed out".to_owned()).send(&mut agent).unwrap();
        let reason = Frame::receive(&mut relay).unwrap();
        let expected = "rank 1 cannot connect the process to rank 0: timed out\n";
        assert!(matches!(&reason, Some(Frame::Error(text)) if text == expected.as_bytes()), "{reason:?}");
        assert!(Frame::receive(&mut relay).unwrap().is_none());
    }

    #[test]
    fn a_false_hub_gets_no_key_and_is_not_obeyed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let job = job(1, listener.local_addr().unwrap().port());
        let started = Arc::new(AtomicBool::new(false));
        let starts = Arc::clone(&started);
        let agent = std::thread::spawn(move || {
            agent::serve_beside_hub(
                &job,
                Arc::new(move |_: &StartRequest, _| {
                    starts.store(true, Ordering::Relaxed);
                    None
                }),
            )
        });
        let (mut stream, _) = listener.accept().unwrap();
        // A proof needs the key, so a false hub has that of another key.
        let of_hub = stream.try_clone().unwrap();
        let refused = proof::receive(&mut { of_hub }, |_| b"17.0");
        let request = StartRequest { arguments: vec!["builder".to_owned()], environment: Vec::new() };
        let _ = Frame::Start(0, None, request).send(&mut stream).and_then(|()| stream.flush());
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(refused.is_err() && rest.is_empty(), "{refused:?} {rest:?}");
        assert!(matches!(agent.join().unwrap(), Err(JobError::OtherJob { .. })));
        assert!(!started.load(Ordering::Relaxed));
    }
}
