//! Links that come back: a node dials again in positive directions and accepts in negative ones, while packets move.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use millstream_rdma::Deadline;
use millstream_rdma::connect::Listener;
use millstream_shm::EventFd;
use millstream_torus_core::topology::DIRECTIONS;
use millstream_torus_core::{Direction, Sign};

use crate::verbs::{Connected, LinkConnector, LinkError};

/// Longest time of an attempt.
const ATTEMPT: Duration = Duration::from_secs(5);
const FIRST_BACK_OFF: Duration = Duration::from_millis(100);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(2);

/// The end of an attempt.
#[derive(Debug)]
pub(super) enum Outcome {
    /// A neighbour wants to connect this link.
    Accepted(Direction, TcpStream),
    /// A link is connected.
    Connected(Direction, u8, Box<Connected>),
    /// It cannot be connected.
    Failed(Direction),
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    busy: bool,
    retry_at: Instant,
    back_off: Duration,
}

/// Attempts to connect links, each on a thread of its own.
#[derive(Debug)]
pub(super) struct Reconnector {
    connector: Arc<LinkConnector>,
    peers: Vec<String>,
    attempts: [Attempt; DIRECTIONS],
    sender: Sender<Outcome>,
    outcomes: Receiver<Outcome>,
    wake: Arc<EventFd>,
}

impl Reconnector {
    pub(super) fn new(connector: LinkConnector, peers: Vec<String>) -> std::io::Result<Reconnector> {
        let (sender, outcomes) = mpsc::channel();
        let attempt = Attempt { busy: false, retry_at: Instant::now(), back_off: FIRST_BACK_OFF };
        Ok(Reconnector {
            connector: Arc::new(connector),
            peers,
            attempts: [attempt; DIRECTIONS],
            sender,
            outcomes,
            wake: Arc::new(EventFd::latch()?),
        })
    }

    /// Readable when an attempt has ended.
    pub(super) fn wake(&self) -> &Arc<EventFd> {
        &self.wake
    }

    /// The next end of an attempt.
    pub(super) fn poll(&mut self) -> Option<Outcome> {
        let outcome = self.outcomes.try_recv().ok()?;
        match &outcome {
            Outcome::Accepted(..) => {}
            Outcome::Connected(direction, ..) => {
                self.attempts[direction.index()].busy = false;
                self.attempts[direction.index()].back_off = FIRST_BACK_OFF;
            }
            Outcome::Failed(direction) => {
                let attempt = &mut self.attempts[direction.index()];
                attempt.busy = false;
                attempt.retry_at = Instant::now() + attempt.back_off;
                attempt.back_off = (2 * attempt.back_off).min(LONGEST_BACK_OFF);
            }
        }
        Some(outcome)
    }

    /// Whether a link that is down should be dialled now.
    pub(super) fn is_due(&self, direction: Direction) -> bool {
        let attempt = &self.attempts[direction.index()];
        direction.sign == Sign::Plus
            && !attempt.busy
            && Instant::now() >= attempt.retry_at
            && self.connector.torus.neighbour(self.connector.here, direction).is_some()
    }

    /// Tries this link later.
    pub(super) fn postpone(&mut self, direction: Direction) {
        self.attempts[direction.index()].retry_at = Instant::now() + FIRST_BACK_OFF;
    }

    /// Dials a neighbour.
    pub(super) fn dial(&mut self, direction: Direction, incarnation: u8) {
        let neighbour = self.connector.torus.neighbour(self.connector.here, direction);
        let Some(address) = neighbour.and_then(|node| self.peers.get(node.index()).cloned()) else { return };
        self.attempt(direction, incarnation, move |connector| {
            connector.dial(direction, &address, incarnation, Deadline::after(ATTEMPT))
        });
    }

    /// Finishes what a neighbour began.
    pub(super) fn finish(&mut self, direction: Direction, incarnation: u8, stream: TcpStream) {
        self.attempt(direction, incarnation, move |connector| {
            connector.finish(direction, stream, incarnation, Deadline::after(ATTEMPT))
        });
    }

    /// Whether an attempt for a link is under way.
    pub(super) fn is_busy(&self, direction: Direction) -> bool {
        self.attempts[direction.index()].busy
    }

    fn attempt(
        &mut self,
        direction: Direction,
        incarnation: u8,
        work: impl FnOnce(&LinkConnector) -> Result<Connected, LinkError> + Send + 'static,
    ) {
        self.attempts[direction.index()].busy = true;
        let (connector, sender, wake) =
            (Arc::clone(&self.connector), self.sender.clone(), Arc::clone(&self.wake));
        std::thread::spawn(move || {
            let outcome = match work(&connector) {
                Ok(connected) => Outcome::Connected(direction, incarnation, Box::new(connected)),
                Err(error) => {
                    tracing::debug!("{}: {error}", connector.here);
                    Outcome::Failed(direction)
                }
            };
            let _ = sender.send(outcome);
            wake.signal();
        });
    }

    /// Accepts a connection and reads which link it is, without waiting here.
    pub(super) fn accept(&self, listener: &Listener) {
        let Ok((mut stream, address)) = listener.accept(Deadline::after(Duration::ZERO)) else { return };
        let (connector, sender, wake) =
            (Arc::clone(&self.connector), self.sender.clone(), Arc::clone(&self.wake));
        std::thread::spawn(move || match connector.receive_hello(&mut stream) {
            Ok(direction) => {
                let _ = sender.send(Outcome::Accepted(direction, stream));
                wake.signal();
            }
            Err(cause) => tracing::warn!("{address} is not a node of a torus: {cause}"),
        });
    }
}
