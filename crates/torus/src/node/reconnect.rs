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

use crate::proof::Strangers;
use crate::verbs::{Connected, LinkConnector, LinkError};

/// Longest time of an attempt.
const ATTEMPT: Duration = Duration::from_secs(5);
const FIRST_BACK_OFF: Duration = Duration::from_millis(100);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(2);
/// A connection that breaks earlier counts as an attempt that failed.
const STEADY: Duration = Duration::from_secs(5);

/// The end of an attempt.
#[derive(Debug)]
pub(super) enum Outcome {
    /// A neighbour wants to connect this link.
    Accepted(Direction, TcpStream),
    /// A link is connected.
    Connected(Direction, u8, Box<Connected>),
    /// It cannot be connected; with the reason if its other end refuses this one, or is another node.
    Failed(Direction, Option<String>),
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    busy: bool,
    /// The newest connection, until it has broken.
    connected_at: Option<Instant>,
    retry_at: Instant,
    back_off: Duration,
    /// Whether a line has said that the other end refuses this one.
    is_told: bool,
}

impl Attempt {
    fn new(now: Instant) -> Attempt {
        Attempt { busy: false, connected_at: None, retry_at: now, back_off: FIRST_BACK_OFF, is_told: false }
    }

    fn fail(&mut self, now: Instant) {
        self.retry_at = now + self.back_off;
        self.back_off = (2 * self.back_off).min(LONGEST_BACK_OFF);
    }

    /// Whether a link that is down should be dialled now.
    fn is_due(&mut self, now: Instant) -> bool {
        if self.busy {
            return false;
        }
        match self.connected_at.take() {
            Some(at) if now - at < STEADY => self.fail(now),
            Some(_) => (self.retry_at, self.back_off) = (now, FIRST_BACK_OFF),
            None => {}
        }
        now >= self.retry_at
    }
}

/// Attempts to connect links, each on a thread of its own.
#[derive(Debug)]
pub(super) struct Reconnector {
    connector: Arc<LinkConnector>,
    peers: Vec<String>,
    strangers: Strangers,
    attempts: [Attempt; DIRECTIONS],
    sender: Sender<Outcome>,
    outcomes: Receiver<Outcome>,
    wake: Arc<EventFd>,
}

impl Reconnector {
    pub(super) fn new(connector: LinkConnector, peers: Vec<String>) -> std::io::Result<Reconnector> {
        let (sender, outcomes) = mpsc::channel();
        let attempt = Attempt::new(Instant::now());
        Ok(Reconnector {
            connector: Arc::new(connector),
            peers,
            strangers: Strangers::default(),
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
                let attempt = &mut self.attempts[direction.index()];
                (attempt.busy, attempt.is_told) = (false, false);
                attempt.connected_at = Some(Instant::now());
            }
            Outcome::Failed(direction, refusal) => {
                let attempt = &mut self.attempts[direction.index()];
                attempt.busy = false;
                attempt.fail(Instant::now());
                if let Some(reason) = refusal
                    && !std::mem::replace(&mut attempt.is_told, true)
                {
                    tracing::warn!("{}: {reason}", self.connector.here);
                }
            }
        }
        Some(outcome)
    }

    /// Whether a link that is down should be dialled now.
    pub(super) fn is_due(&mut self, direction: Direction) -> bool {
        direction.sign == Sign::Plus
            && self.connector.torus.neighbour(self.connector.here, direction).is_some()
            && self.attempts[direction.index()].is_due(Instant::now())
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
        let begun = std::thread::Builder::new().spawn(move || {
            let outcome = match work(&connector) {
                Ok(connected) => Outcome::Connected(direction, incarnation, Box::new(connected)),
                Err(error) => {
                    tracing::debug!("{}: {error}", connector.here);
                    let refusal = matches!(error, LinkError::Key { .. }).then(|| error.to_string());
                    Outcome::Failed(direction, refusal)
                }
            };
            let _ = sender.send(outcome);
            wake.signal();
        });
        if let Err(error) = begun {
            tracing::warn!("link {direction} is tried later: {error}");
            let _ = self.sender.send(Outcome::Failed(direction, None));
            self.wake.signal();
        }
    }

    /// Accepts a connection. Its link is known when its other end has proved that it knows the key, without waiting here.
    pub(super) fn accept(&self, listener: &Listener) {
        let Ok((stream, _)) = listener.accept(Deadline::after(Duration::ZERO)) else { return };
        let (sender, wake) = (self.sender.clone(), Arc::clone(&self.wake));
        self.connector.accept(&self.strangers, stream, move |direction, stream| {
            let _ = sender.send(Outcome::Accepted(direction, stream));
            wake.signal();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_break_at_once_are_dialled_less_and_less_often() {
        let mut now = Instant::now();
        let mut attempt = Attempt::new(now);
        let mut pause = |attempt: &mut Attempt, lived| {
            attempt.connected_at = Some(now);
            now += lived;
            let broken = now;
            while !attempt.is_due(now) {
                now += Duration::from_millis(10);
            }
            (now - broken).as_millis()
        };
        let short: Vec<_> = (0..7).map(|_| pause(&mut attempt, Duration::from_millis(120))).collect();
        assert_eq!(short, [100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(pause(&mut attempt, STEADY), 0);
        assert_eq!(pause(&mut attempt, Duration::ZERO), 100);
    }
}
