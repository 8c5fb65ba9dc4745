//! The host monitor: a process of its own that shows that the host lives, and reports to the supervisors.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

use millstream_health::registers::{Condition, HostWatchdog, LinkState};
use millstream_health::verdict::NeighbourView;
use millstream_health::{HostReport, ObserverClock, PeerState, PeerWatch, Timers};
use millstream_shm::socket::Connection;
use millstream_torus_core::{Dimensions, Direction, NodeNumber};

use crate::attach::{AttachReply, AttachRequest, receive, send};
use crate::health_page::HealthPage;
use crate::node::socket_name;
use crate::proof::{Call, Purpose};
use crate::service::lines::{Lines, PROOF, Refusal};
use crate::service::{ToSupervisor, Who};

/// Interval of attempts to reach a supervisor.
const REDIAL: Duration = Duration::from_millis(200);

/// What a host monitor is.
#[derive(Clone, Debug)]
pub struct MonitorOptions {
    /// Shape of the torus.
    pub dimensions: Dimensions,
    /// Its node.
    pub node: NodeNumber,
    /// The run's key.
    pub key: u64,
    /// Addresses of the supervisors.
    pub supervisors: Vec<String>,
    /// Periods.
    pub timers: Timers,
}

/// Runs a host monitor until its standard input ends; then the host leaves in order.
///
/// # Errors
/// The node process cannot be reached.
pub fn run(options: &MonitorOptions) -> io::Result<()> {
    let socket = socket_name(options.key, options.node);
    let (connection, page) = open_page(&socket)?;
    let ended = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ended);
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = io::stdin().read_to_end(&mut rest);
        flag.store(true, Ordering::Relaxed);
    });
    HostMonitor::new(options, connection, page).serve(&ended);
    Ok(())
}

/// The health page of a node process, and the connection that ends with the process.
fn open_page(socket: &str) -> io::Result<(Connection, HealthPage)> {
    let failed = |cause: io::Error| {
        io::Error::new(cause.kind(), format!("cannot reach the node process at {socket:?}: {cause}"))
    };
    let connection = Connection::open(socket, Duration::from_secs(30)).map_err(failed)?;
    send(&connection, &AttachRequest::Monitor, &[]).map_err(failed)?;
    let (reply, descriptors) = receive::<AttachReply>(&connection).map_err(failed)?;
    if let AttachReply::Failed { reason } = reply {
        return Err(failed(io::Error::other(reason)));
    }
    let descriptor =
        descriptors.into_iter().next().ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
    let page = HealthPage::open(descriptor).map_err(failed)?;
    Ok((connection, page))
}

struct Supervisor {
    address: String,
    lines: Option<Lines>,
    /// The result of an attempt that is under way.
    dialled: Option<Receiver<io::Result<Lines>>>,
    tried: Option<Instant>,
    refusal: Refusal,
}

impl Supervisor {
    /// Connects without waiting: the host of a supervisor may have lost its power, and this one must show that it lives.
    /// Returns whether a connection is new.
    fn connect(&mut self, call: Call) -> bool {
        if self.lines.is_some() {
            return false;
        }
        if let Some(dialled) = &self.dialled {
            match dialled.try_recv() {
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => {}
                Ok(result) => {
                    self.refusal.tell(&self.address, &result);
                    self.lines = result.ok();
                }
            }
            self.dialled = None;
        } else if self.tried.is_none_or(|at| at.elapsed() >= REDIAL) {
            self.tried = Some(Instant::now());
            let (sender, dialled) = mpsc::channel();
            let address = self.address.clone();
            let dial = move || sender.send(Lines::dial(&address, call, Who::Monitor, PROOF));
            // Without a thread, it is tried again later.
            self.dialled = std::thread::Builder::new().spawn(dial).is_ok().then_some(dialled);
        }
        self.lines.is_some()
    }
}

struct HostMonitor {
    torus: Dimensions,
    node: NodeNumber,
    key: u64,
    timers: Timers,
    page: HealthPage,
    /// Hangs up when the node process ends.
    connection: Connection,
    tried: Option<Instant>,
    adapter: PeerWatch,
    supervisors: Vec<Supervisor>,
    sequence: u32,
}

impl HostMonitor {
    fn new(options: &MonitorOptions, connection: Connection, page: HealthPage) -> HostMonitor {
        let supervisor = |address: &String| Supervisor {
            address: address.clone(),
            lines: None,
            dialled: None,
            tried: None,
            refusal: Refusal::default(),
        };
        HostMonitor {
            torus: options.dimensions,
            node: options.node,
            key: options.key,
            timers: options.timers,
            page,
            connection,
            tried: None,
            adapter: PeerWatch::new(options.timers.misses),
            supervisors: options.supervisors.iter().map(supervisor).collect(),
            sequence: 0,
        }
    }

    fn serve(mut self, ended: &AtomicBool) {
        let origin = Instant::now();
        let write = Duration::from_millis(self.timers.write);
        // An adapter that paused with this process has time to write before it is read again.
        let mut clock = ObserverClock::new(2 * write);
        let (mut read, mut reported) = (None, None);
        let mut last = None;
        let due = |at: Option<Duration>, now: Duration, period: u64| {
            at.is_none_or(|at| now - at >= Duration::from_millis(period))
        };
        while !ended.load(Ordering::Relaxed) {
            self.find_restarted();
            self.write(Condition::Ok);
            let now = clock.advance(origin.elapsed());
            if due(read, now, self.timers.read) {
                read = Some(now);
                self.adapter.handle_read(self.page.adapter().sequence() as u32, false);
            }
            let page = self.snapshot(Condition::Ok);
            let connected = self.connect();
            // A change is reported at once.
            if connected || last != Some(page) || due(reported, origin.elapsed(), self.timers.report) {
                (last, reported) = (Some(page), Some(origin.elapsed()));
                self.report(page);
            }
            std::thread::sleep(write);
        }
        self.write(Condition::Stopping);
        let page = self.snapshot(Condition::Stopping);
        self.report(page);
    }

    /// If the node process has ended, looks for one that was started in its place.
    fn find_restarted(&mut self) {
        if !self.connection.is_hung_up() || self.tried.is_some_and(|at| at.elapsed() < REDIAL) {
            return;
        }
        self.tried = Some(Instant::now());
        if let Ok((connection, page)) = open_page(&socket_name(self.key, self.node)) {
            (self.connection, self.page) = (connection, page);
        }
    }

    fn write(&mut self, host: Condition) {
        self.sequence = self.sequence.wrapping_add(1);
        let reachable = self.supervisors.is_empty() || self.supervisors.iter().any(|s| s.lines.is_some());
        let word = HostWatchdog::default()
            .with_sequence(self.sequence.into())
            .with_host(host as u64)
            .with_service(reachable.into());
        self.page.set_host(word);
    }

    fn snapshot(&self, host: Condition) -> HostReport {
        let neighbours = Direction::ALL.map(|direction| {
            self.torus.neighbour(self.node, direction)?;
            let word = self.page.remote(direction);
            Some(NeighbourView {
                link: LinkState::from_code(word.link()),
                host: Condition::from_code(word.host()),
                service: word.service() == 1,
            })
        });
        let adapter = match self.adapter.state() {
            PeerState::Failed => Condition::Failed,
            // It ended before its register was seen to move.
            PeerState::Unknown if self.connection.is_hung_up() => Condition::Failed,
            _ => Condition::from_code(self.page.adapter().adapter()),
        };
        HostReport { host, adapter, neighbours }
    }

    /// Connects to supervisors that are not connected. Returns whether there are new connections.
    fn connect(&mut self) -> bool {
        let call = |to| Call { key: self.key, purpose: Purpose::Report, to };
        (0..)
            .zip(&mut self.supervisors)
            .fold(false, |new, (at, supervisor)| new | supervisor.connect(call(at)))
    }

    fn report(&mut self, page: HostReport) {
        let report = ToSupervisor::Report { node: self.node, page };
        for supervisor in &mut self.supervisors {
            if let Some(lines) = &mut supervisor.lines
                && lines.send(&report).is_err()
            {
                supervisor.lines = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use millstream_health::registers::AdapterWatchdog;
    use millstream_shm::socket::Listener;

    use super::*;

    #[test]
    fn a_node_process_that_ends_at_once_has_failed() {
        let name = format!("millstream-torus-monitor-test-{}", std::process::id());
        let listener = Listener::bind(&name).unwrap();
        let connection = Connection::open(&name, Duration::from_secs(10)).unwrap();
        let node = listener.accept().unwrap();
        let (page, _) = HealthPage::create().unwrap();
        page.set_adapter(AdapterWatchdog::default().with_sequence(7).with_adapter(Condition::Ok as u64));
        let options = MonitorOptions {
            dimensions: "1x1x1".parse().unwrap(),
            node: NodeNumber(0),
            key: 0,
            supervisors: Vec::new(),
            timers: Timers::default(),
        };
        let mut monitor = HostMonitor::new(&options, connection, page);
        monitor.adapter.handle_read(7, false);
        assert_eq!(monitor.snapshot(Condition::Ok).adapter, Condition::Ok);
        drop(node);
        // Its register was read once: nothing tells that it stands still.
        monitor.adapter.handle_read(7, false);
        assert_eq!(monitor.snapshot(Condition::Ok).adapter, Condition::Failed);
    }
}
