//! A supervisor process. Several run; the lowest live one acts.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, SystemTime};

use millstream_health::{ObserverClock, Timers};
use millstream_quantity::Instant;
use millstream_torus_core::Dimensions;

use super::lines::{Lines, PROOF, Refusal};
use super::{FromSupervisor, SupervisorCore, ToSupervisor, Who};
use crate::proof::{self, Acceptor, Call, Purpose, Strangers};

/// Looks at reports that are overdue, in a period of reports.
const TICKS: u32 = 5;
/// Time for the first line.
const HELLO: Duration = Duration::from_secs(2);
/// Pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(20);
/// Interval of attempts to reach a lower supervisor.
const REDIAL: Duration = Duration::from_millis(100);

/// What a supervisor is.
#[derive(Clone, Debug)]
pub struct SupervisorOptions {
    /// Shape of the torus.
    pub dimensions: Dimensions,
    /// The run's key.
    pub key: u64,
    /// Address for reports, for example `127.0.0.1:0`.
    pub listen: String,
    /// Addresses of lower supervisors. This one begins to act only if none of them lives, and ends when one of them acts.
    pub lower: Vec<String>,
    /// Periods of reports.
    pub timers: Timers,
}

enum Input {
    /// A peer that knows the run's key.
    Connected(u64, Lines, Who),
    Message(u64, ToSupervisor),
    Closed(u64),
    Lower(usize, Lower),
    /// The list of lower supervisors is wrong.
    Misplaced(String),
    /// The launcher ended.
    End,
}

/// A lower supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lower {
    /// It lives and does not act, or nothing is known yet.
    Waits,
    Acts,
    /// It does not live.
    Lost,
}

struct Peer {
    lines: Lines,
    who: Who,
}

impl Drop for Peer {
    /// Its reader has a handle of its own.
    fn drop(&mut self) {
        self.lines.shut_down();
    }
}

/// Runs a supervisor until its standard input ends. Prints `{"listening": ADDRESS}`.
///
/// # Errors
/// The address cannot be used, or a lower supervisor has another place than in the list.
pub fn run(options: &SupervisorOptions) -> io::Result<()> {
    let listener = TcpListener::bind(&options.listen)
        .map_err(|cause| io::Error::new(cause.kind(), format!("listen at {}: {cause}", options.listen)))?;
    let line = serde_json::json!({ "listening": listener.local_addr()?.to_string() });
    writeln!(io::stdout(), "{line}")?;
    let (sender, inputs) = mpsc::channel();
    let acceptor = Acceptor { key: options.key, number: options.lower.len() as u16 };
    accept_all(listener, acceptor, sender.clone());
    for (at, address) in options.lower.iter().enumerate() {
        follow(at, address.clone(), options, sender.clone());
    }
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = io::stdin().read_to_end(&mut rest);
        let _ = sender.send(Input::End);
    });
    Supervisor::new(options).serve(&inputs)
}

fn accept_all(listener: TcpListener, acceptor: Acceptor, sender: Sender<Input>) {
    let admits = |purpose| {
        matches!(purpose, Purpose::Report | Purpose::Supervisor | Purpose::Watcher).then_some(purpose)
    };
    std::thread::spawn(move || {
        let strangers = Strangers::default();
        let mut number = 0;
        loop {
            strangers.wait_for_room();
            match listener.accept() {
                Ok((stream, address)) => {
                    let sender = sender.clone();
                    number += 1;
                    strangers.accept(stream, acceptor, admits, move |purpose, stream| {
                        match receive_hello(stream, purpose) {
                            Ok((lines, who, messages)) => read_all(number, lines, who, messages, &sender),
                            Err(cause) => tracing::warn!("{address} is refused: {cause}"),
                        }
                    });
                }
                // There may be descriptors again later.
                Err(error) => {
                    tracing::warn!("a connection could not be accepted: {error}");
                    std::thread::sleep(PAUSE);
                }
            }
        }
    });
}

/// Reads who a client of this run is, which has proved its purpose. Returns what it sent behind, too.
fn receive_hello(stream: TcpStream, purpose: Purpose) -> io::Result<(Lines, Who, Vec<ToSupervisor>)> {
    let mut lines = Lines::new(stream)?;
    lines.set_read_timeout(Some(HELLO))?;
    let mut messages = Vec::new();
    while messages.is_empty() {
        messages = lines.read()?;
    }
    let ToSupervisor::Hello { who } = messages.remove(0) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not say who it is"));
    };
    if (who == Who::Watcher) == (purpose == Purpose::Report) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not what it has proved to be"));
    }
    lines.set_read_timeout(None)?;
    Ok((lines, who, messages))
}

fn read_all(number: u64, mut lines: Lines, who: Who, messages: Vec<ToSupervisor>, sender: &Sender<Input>) {
    let Ok(writer) = lines.writer() else { return };
    let mut read = Ok(messages);
    if sender.send(Input::Connected(number, writer, who)).is_err() {
        return;
    }
    while let Ok(messages) = read {
        for message in messages {
            if sender.send(Input::Message(number, message)).is_err() {
                return;
            }
        }
        read = lines.read();
    }
    let _ = sender.send(Input::Closed(number));
}

/// Whether a read ended before anything came.
fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// Follows a lower supervisor: it lives while its states come, and they say whether it acts.
fn follow(at: usize, address: String, options: &SupervisorOptions, sender: Sender<Input>) {
    let report = Duration::from_millis(options.timers.report);
    let silence = options.timers.missed_reports * report;
    let call = Call { key: options.key, purpose: Purpose::Supervisor, to: at as u16 };
    std::thread::spawn(move || {
        let (mut refusal, mut is_first) = (Refusal::default(), true);
        loop {
            let connected = Lines::dial(&address, call, Who::Watcher, PROOF)
                .and_then(|lines| lines.set_read_timeout(Some(report)).map(|()| lines));
            // Two would act if this one took a living one for dead.
            if let Err(cause) = &connected
                && proof::is_other_number(cause)
                && is_first
            {
                let what = "name all lower supervisors, the lowest first";
                let _ = sender.send(Input::Misplaced(format!("supervisor at {address}: {cause}; {what}")));
            }
            refusal.tell(&address, &connected);
            if let Ok(mut lines) = connected {
                is_first = false;
                let (origin, mut clock) = (std::time::Instant::now(), ObserverClock::new(2 * report));
                let mut heard = Duration::ZERO;
                loop {
                    let read = lines.read::<FromSupervisor>();
                    let now = clock.advance(origin.elapsed());
                    match read {
                        Ok(messages) => {
                            heard = now;
                            for message in messages {
                                let FromSupervisor::State(state) = message else { continue };
                                let lower = if state.acting { Lower::Acts } else { Lower::Waits };
                                if sender.send(Input::Lower(at, lower)).is_err() {
                                    return;
                                }
                            }
                        }
                        Err(error) if waits(&error) && now - heard < silence => {}
                        Err(_) => break,
                    }
                }
            }
            if sender.send(Input::Lower(at, Lower::Lost)).is_err() {
                return;
            }
            std::thread::sleep(REDIAL);
        }
    });
}

struct Supervisor {
    core: SupervisorCore,
    peers: BTreeMap<u64, Peer>,
    lower: Vec<Lower>,
    origin: std::time::Instant,
    clock: ObserverClock,
    last_sent: Instant,
    heartbeat: Duration,
}

impl Supervisor {
    fn new(options: &SupervisorOptions) -> Supervisor {
        let index = options.lower.len() as u16;
        Supervisor {
            core: SupervisorCore::new(options.dimensions, index, options.timers),
            peers: BTreeMap::new(),
            lower: vec![Lower::Waits; options.lower.len()],
            origin: std::time::Instant::now(),
            clock: ObserverClock::new(Duration::from_millis(options.timers.report)),
            last_sent: Instant::default(),
            heartbeat: Duration::from_millis(options.timers.report),
        }
    }

    /// Time without this process's pauses: reports that wait to be read are not overdue.
    fn now(&mut self) -> Instant {
        Instant::from_nanos(self.clock.advance(self.origin.elapsed()).as_nanos() as u64)
    }

    fn serve(mut self, inputs: &Receiver<Input>) -> io::Result<()> {
        loop {
            let mut next = match inputs.recv_timeout(self.heartbeat / TICKS) {
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                next => next.ok(),
            };
            // All that waits, so that a burst is judged once.
            while let Some(input) = next {
                match input {
                    Input::End => return Ok(()),
                    Input::Misplaced(what) => return Err(io::Error::new(io::ErrorKind::InvalidInput, what)),
                    input => self.handle(input),
                }
                next = inputs.try_recv().ok();
            }
            self.tick();
        }
    }

    fn handle(&mut self, input: Input) {
        let now = self.now();
        match input {
            Input::Connected(number, mut lines, who) => {
                if let Who::Node { node, incarnation } = who {
                    if let Some(lost) = self.core.announced()
                        && lines.send(&FromSupervisor::Lost(lost.clone())).is_err()
                    {
                        lines.shut_down();
                        return;
                    }
                    self.core.handle_node(node, incarnation);
                }
                self.peers.insert(number, Peer { lines, who });
            }
            Input::Closed(number) => drop(self.peers.remove(&number)),
            Input::Lower(at, lower) => self.lower[at] = lower,
            Input::Message(number, message) => {
                let Some(who) = self.peers.get(&number).map(|peer| peer.who) else { return };
                match message {
                    ToSupervisor::Report { node, page } => self.core.handle_report(node, page, now),
                    ToSupervisor::Answer(answer) => {
                        if let Who::Node { node, .. } = who {
                            self.core.handle_answer(node, &answer);
                        }
                    }
                    ToSupervisor::Application { node, attached } => {
                        self.core.handle_application(node, attached);
                    }
                    ToSupervisor::Hello { .. } => {}
                }
            }
            Input::End | Input::Misplaced(_) => {}
        }
    }

    fn tick(&mut self) {
        let now = self.now();
        // One that has judged nothing would change routes as if nobody were dead. Until then a higher one goes on.
        if self.lower.iter().all(|&lower| lower == Lower::Lost) && self.core.has_judged() {
            // Terms grow with time, so a supervisor that is started again has a higher one than it had. Nodes that refuse it,
            // because the clock was set back, make it take a higher one.
            let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            self.core.act(time.as_micros() as u64);
        } else if self.lower.contains(&Lower::Acts) {
            self.core.step_back();
        }
        let changed = self.core.handle_time(now);
        while let Some((node, order)) = self.core.poll() {
            self.send(
                &FromSupervisor::Order(order),
                |who| matches!(who, Who::Node { node: other, .. } if other == node),
            );
        }
        if let Some(lost) = self.core.poll_lost() {
            self.send(&FromSupervisor::Lost(lost), |who| matches!(who, Who::Node { .. }));
        }
        if changed || now.since(self.last_sent) >= self.heartbeat {
            self.last_sent = now;
            let state = FromSupervisor::State(self.core.state());
            self.send(&state, |who| who == Who::Watcher);
        }
    }

    fn send(&mut self, message: &FromSupervisor, to: impl Fn(Who) -> bool) {
        let mut failed = Vec::new();
        for (&number, peer) in self.peers.iter_mut().filter(|(_, peer)| to(peer.who)) {
            if peer.lines.send(message).is_err() {
                failed.push(number);
            }
        }
        failed.into_iter().for_each(|number| drop(self.peers.remove(&number)));
    }
}

#[cfg(test)]
mod tests {
    use millstream_health::HostReport;
    use millstream_health::registers::Condition;
    use millstream_torus_core::NodeNumber;

    use super::*;
    use crate::proof::STRANGERS;

    /// Waits until the supervisor has closed a connection.
    fn await_end(mut stream: TcpStream) {
        stream.set_read_timeout(Some(10 * HELLO)).unwrap();
        // Closed, also with bytes that were not read.
        let end = stream.read(&mut [0]);
        assert!(matches!(&end, Ok(0)) || end.is_err_and(|error| !waits(&error)));
    }

    #[test]
    fn clients_without_the_key_are_disconnected_and_take_no_place_for_long() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, inputs) = mpsc::channel();
        accept_all(listener, Acceptor { key: 7, number: 0 }, sender);
        let call = |key| Call { key, purpose: Purpose::Watcher, to: 0 };
        let connect = || TcpStream::connect(address).unwrap();
        let silent: Vec<_> = (0..STRANGERS + 8).map(|_| connect()).collect();
        let wrong = Lines::dial(&address.to_string(), call(8), Who::Watcher, 10 * HELLO).unwrap_err();
        assert_eq!(wrong.kind(), io::ErrorKind::PermissionDenied);
        let right = Lines::dial(&address.to_string(), call(7), Who::Watcher, 10 * HELLO).unwrap();
        let input = inputs.recv_timeout(10 * HELLO).unwrap();
        assert!(matches!(input, Input::Connected(_, _, Who::Watcher)));
        silent.into_iter().for_each(await_end);
        drop(right);
        assert!(matches!(inputs.recv_timeout(10 * HELLO).unwrap(), Input::Closed(_)));
        assert!(inputs.try_recv().is_err(), "no stranger is a peer");
    }

    /// One that took a living supervisor for dead would act beside it.
    #[test]
    fn a_supervisor_with_a_wrong_list_of_lower_ones_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        accept_all(listener, Acceptor { key: 7, number: 1 }, mpsc::channel().0);
        let options = SupervisorOptions {
            dimensions: "1x1x1".parse().unwrap(),
            key: 7,
            listen: String::new(),
            lower: vec![address.clone()],
            timers: Timers::default(),
        };
        let (sender, inputs) = mpsc::channel();
        follow(0, address.clone(), &options, sender);
        let error = Supervisor::new(&options).serve(&inputs).unwrap_err().to_string();
        assert!(error.contains(&address) && error.contains("it is number 1, not 0"), "{error}");
    }

    #[test]
    fn a_supervisor_acts_when_it_has_judged_and_until_a_lower_one_acts() {
        let options = SupervisorOptions {
            dimensions: "1x1x1".parse().unwrap(),
            key: 7,
            listen: String::new(),
            lower: vec![String::new()],
            timers: Timers::default(),
        };
        let mut supervisor = Supervisor::new(&options);
        let mut acts = |lower, reports| {
            supervisor.handle(Input::Lower(0, lower));
            if reports {
                let (ok, neighbours) = (Condition::Ok, Default::default());
                let page = HostReport { host: ok, adapter: ok, neighbours };
                supervisor.core.handle_report(NodeNumber(0), page, Instant::default());
            }
            (0..2).for_each(|_| supervisor.tick());
            supervisor.core.is_acting()
        };
        assert!(!acts(Lower::Waits, false) && !acts(Lower::Lost, false), "it has no reports");
        assert!(!acts(Lower::Waits, true) && acts(Lower::Lost, true));
        assert!(acts(Lower::Waits, true), "the lower one was started again and has judged nothing");
        assert!(!acts(Lower::Acts, true) && !acts(Lower::Waits, true) && acts(Lower::Lost, true));
    }
}
