//! The hub at rank 0: agents of all ranks, and the connections between relays and processes.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::environment::{Job, Rendezvous};
use crate::error::JobError;
use crate::frame::{Frame, Hello, Peer, StartRequest};

/// Time for the first frame of a connection.
const HELLO: Duration = Duration::from_secs(10);

/// Chooses the rank of a process.
type Placement = Box<dyn Fn(&StartRequest) -> usize + Send + Sync>;

/// The meeting point of a job, open at rank 0. Dropping it ends all agents.
pub struct Hub {
    shared: Arc<Shared>,
    address: SocketAddr,
    file: Option<std::path::PathBuf>,
}

struct Shared {
    key: String,
    ranks: usize,
    placement: Placement,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    agents: Vec<Option<TcpStream>>,
    /// Relays whose process has not connected, by number, with the rank of the process.
    waiting: HashMap<u64, (usize, TcpStream)>,
    next: u64,
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
        let (bind, name) = match &job.rendezvous {
            Rendezvous::Address { host, port } if is_loopback(host) => {
                (SocketAddr::from((Ipv4Addr::LOCALHOST, *port)), format!("{host}:{port}"))
            }
            Rendezvous::Address { host, port } => {
                (SocketAddr::from((Ipv4Addr::UNSPECIFIED, *port)), format!("{host}:{port}"))
            }
            Rendezvous::File(path) => {
                (SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), format!("file:{}", path.display()))
            }
        };
        let failed = |cause| JobError::Listen { address: name.clone(), cause };
        let listener = TcpListener::bind(bind).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let file = match &job.rendezvous {
            Rendezvous::File(path) => {
                publish(path, address.port()).map_err(JobError::os(format!("write {}", path.display())))?;
                Some(path.clone())
            }
            Rendezvous::Address { .. } => None,
        };
        let state = State { agents: (0..job.ranks).map(|_| None).collect(), ..State::default() };
        let shared = Arc::new(Shared {
            key: job.key.clone(),
            ranks: job.ranks,
            placement: Box::new(place),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let serving = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&serving);
                std::thread::spawn(move || shared.serve(stream));
            }
        });
        Ok(Hub { shared, address, file })
    }

    /// Where relays of this host connect.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.address.port()))
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

    /// Serves one connection. One without a hello of this job is dropped.
    fn serve(&self, mut stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let _ = stream.set_read_timeout(Some(HELLO));
        let Ok(Some(Frame::Hello(Hello { key, peer }))) = Frame::receive(&mut stream) else { return };
        if key != self.key || stream.set_read_timeout(None).is_err() {
            return;
        }
        match peer {
            Peer::Agent { rank } => self.agent(rank, stream),
            Peer::Relay(request) => self.relay(&request, stream),
            Peer::Process { number } => {
                let relay = self.state().waiting.remove(&number);
                if let Some((_, relay)) = relay {
                    splice(relay, stream);
                }
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
            if let (Ok(peer), Ok(own)) = (stream.peer_addr(), stream.local_addr())
                && peer.ip() != own.ip()
            {
                state.seen.get_or_insert(own.ip());
            }
            self.changed.notify_all();
        }
        while let Ok(Some(_)) = Frame::receive(&mut stream) {}
        let mut state = self.state();
        state.agents[rank] = None;
        // Their processes will not connect.
        state.waiting.retain(|_, (of, relay)| *of != rank || relay.shutdown(Shutdown::Both).is_err());
    }

    /// Requests the process of a relay from its rank.
    fn relay(&self, request: &StartRequest, mut stream: TcpStream) {
        let rank = (self.placement)(request);
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        let sent = match state.agents.get_mut(rank) {
            Some(Some(agent)) => Frame::Start(number, request.clone()).send(agent).is_ok(),
            _ => false,
        };
        if sent {
            state.waiting.insert(number, (rank, stream));
        } else {
            let _ = Frame::Error(format!("rank {rank} is lost\n").into_bytes()).send(&mut stream);
        }
    }
}

/// Copies both directions until both have ended.
fn splice(one: TcpStream, other: TcpStream) {
    let (Ok(mut from), Ok(mut to)) = (one.try_clone(), other.try_clone()) else { return };
    let back = std::thread::spawn(move || copy(&mut from, &mut to));
    let (mut from, mut to) = (other, one);
    copy(&mut from, &mut to);
    let _ = back.join();
}

/// Copies one direction; its end is passed on.
fn copy(from: &mut TcpStream, to: &mut TcpStream) {
    // An error ends the direction as its end does.
    let _ = io::copy(from, to);
    let _ = to.shutdown(Shutdown::Write);
}

pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Writes the address of this host to the file, which appears whole.
fn publish(path: &std::path::Path, port: u16) -> io::Result<()> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    let partial = path.with_extension(format!("partial-{}", std::process::id()));
    std::fs::write(&partial, format!("{}:{port}\n", host.trim()))?;
    std::fs::rename(&partial, path)
}
