//! The agent of a rank: starts the processes that the hub requests.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::environment::{Job, Rendezvous};
use crate::error::JobError;
use crate::frame::{Frame, Peer, StartRequest};
use crate::hub::literal;
use crate::proof::{self, greet};

/// Time for rank 0 to open the meeting point.
const START: Duration = Duration::from_secs(60);
/// Interval of attempts to connect.
const RETRY: Duration = Duration::from_millis(100);
/// Time for processes to end after rank 0 was lost.
const END: Duration = Duration::from_secs(5);

/// What a rank knows when it starts a process.
#[derive(Clone, Copy, Debug)]
pub struct RankAddress {
    /// Address of this host for other hosts; a loopback address if all ranks are on this host.
    pub own: IpAddr,
}

/// Makes the command of a process; `None` if this rank does not start such a process.
pub type MakeCommand = dyn Fn(&StartRequest, RankAddress) -> Option<Command> + Send + Sync;

/// Serves the hub of the job until it ends the run. `make` decides what this rank executes.
///
/// SIGTERM and SIGINT do not end an agent and its processes: rank 0 gets the same signal and ends the run in order.
///
/// # Errors
/// [`JobError`] if rank 0 cannot be reached, or was lost.
pub fn serve(job: &Job, make: Arc<MakeCommand>) -> Result<(), JobError> {
    ignore_signals();
    serve_beside_hub(job, make)
}

/// The agent at rank 0, on a thread beside the hub; leaves the signals of this process alone.
///
/// # Errors
/// [`JobError`] as of [`serve`].
pub fn serve_beside_hub(job: &Job, make: Arc<MakeCommand>) -> Result<(), JobError> {
    let (mut stream, address) = connect(job, Instant::now() + START)?;
    let failed = |what: &str| JobError::os(format!("{what} rank 0"));
    let own = stream.local_addr().map_err(failed("address of"))?.ip();
    let reports = Arc::new(Mutex::new(stream.try_clone().map_err(failed("connection to"))?));
    let mut processes = Vec::new();
    let streams: Arc<Mutex<Vec<Weak<TcpStream>>>> = Arc::default();
    let ended = loop {
        match Frame::receive(&mut stream) {
            Ok(Some(Frame::Start(number, seen, request))) => {
                // This host's name may be a loopback address. Then rank 0 is here, too, and knows a better one.
                let own = seen.filter(|_| own.is_loopback()).unwrap_or(own);
                let (job, make, reports) = (job.clone(), Arc::clone(&make), Arc::clone(&reports));
                let streams = Arc::clone(&streams);
                processes.push(std::thread::spawn(move || {
                    match proof::dial(address, job.key.as_bytes(), &Peer::Process { number }) {
                        Ok(stream) => {
                            let stream = Arc::new(stream);
                            let mut open = streams.lock().unwrap_or_else(PoisonError::into_inner);
                            open.retain(|stream| stream.strong_count() > 0);
                            open.push(Arc::downgrade(&stream));
                            drop(open);
                            // A relay that is gone gets no report.
                            let _ = run(&job, &stream, &request, own, &*make);
                        }
                        Err(error) => {
                            let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
                            // Without this connection, the hub tells the relay that the rank is lost.
                            let _ = Frame::Unconnected(number, error.to_string()).send(&mut *reports);
                        }
                    }
                }));
            }
            Ok(Some(Frame::Finish)) => break Ok(()),
            Ok(None) | Err(_) => break Err(JobError::HubLost),
            Ok(Some(_)) => {}
        }
    };
    // The processes end with their connections. The host of rank 0 may have closed none.
    if ended.is_err() {
        for stream in streams.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade)
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
    let deadline = Instant::now() + END;
    while processes.iter().any(|process| !process.is_finished()) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    ended
}

/// Connects to the meeting point, which rank 0 may open later.
fn connect(job: &Job, deadline: Instant) -> Result<(TcpStream, SocketAddr), JobError> {
    loop {
        let (name, attempt) = match &job.rendezvous {
            Rendezvous::Address { host, port } => (format!("{host}:{port}"), dial(host, *port)),
            Rendezvous::File(path) => (format!("file:{}", path.display()), dial_published(path)),
        };
        // Only a proof tells that the key is another one; a file or a firewall may deny access, too.
        let greeted = attempt.map_err(io::Error::other).and_then(|(mut stream, address)| {
            greet(&mut stream, job.key.as_bytes(), &Peer::Agent { rank: job.rank })?;
            Ok((stream, address))
        });
        match greeted {
            Ok(connected) => return Ok(connected),
            Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
                return Err(JobError::OtherJob { address: name });
            }
            Err(cause) if Instant::now() >= deadline => {
                return Err(JobError::Unreachable { address: name, cause });
            }
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

fn dial_published(path: &std::path::Path) -> io::Result<(TcpStream, SocketAddr)> {
    let text = std::fs::read_to_string(path)?;
    let address = text.trim().rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) = address.ok_or(io::ErrorKind::InvalidData)?;
    dial(host, port)
}

fn dial(host: &str, port: u16) -> io::Result<(TcpStream, SocketAddr)> {
    let mut latest = io::ErrorKind::NotFound.into();
    for address in resolve(host, port)? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => return Ok((stream, address)),
            Err(error) => latest = error,
        }
    }
    Err(latest)
}

/// Addresses of a host. Slurm knows addresses of nodes whose names nobody else resolves.
fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Some(address) = literal(host) {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let resolved = (host, port).to_socket_addrs();
    if resolved.is_ok() || std::env::var_os("SLURM_JOB_ID").is_none() {
        return Ok(resolved?.collect());
    }
    let shown = Command::new("scontrol").args(["show", "node", host, "--oneliner"]).output()?;
    let text = String::from_utf8_lossy(&shown.stdout);
    let address = text.split_whitespace().find_map(|word| word.strip_prefix("NodeAddr="));
    match address {
        Some(address) => Ok((address, port).to_socket_addrs()?.collect()),
        None => Ok(resolved?.collect()),
    }
}

/// Runs one process to its end.
fn run(
    job: &Job,
    mut stream: &TcpStream,
    request: &StartRequest,
    own: IpAddr,
    make: &MakeCommand,
) -> io::Result<()> {
    let started = match make(request, RankAddress { own }) {
        None => Err(format!("rank {} does not start {:?}", job.rank, request.arguments)),
        Some(command) => spawn(command).map_err(|error| format!("rank {}: {error}", job.rank)),
    };
    let child = match started {
        Ok(child) => child,
        Err(reason) => {
            Frame::Error(format!("{reason}\n").into_bytes()).send(&mut stream)?;
            return Frame::Exit(127).send(&mut stream);
        }
    };
    attend(child, stream)
}

/// Starts a process that signals to this rank do not end.
fn spawn(mut command: Command) -> io::Result<Child> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: between fork and exec, the closure calls only `signal`, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            ignore_signals();
            Ok(())
        })
    };
    command.spawn().map_err(|error| {
        io::Error::new(error.kind(), format!("cannot start {}: {error}", command.get_program().display()))
    })
}

pub(crate) fn ignore_signals() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: SIG_IGN is a valid disposition of these signals, and no handler of this process is in use.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Connects the streams of a process with its relay. The end of the connection kills the process.
fn attend(mut child: Child, stream: &TcpStream) -> io::Result<()> {
    let sender = Arc::new(Mutex::new(stream.try_clone()?));
    // It is readable once the process has ended.
    let end = Arc::new(pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?);
    let mut outputs = Vec::new();
    if let Some(output) = child.stdout.take() {
        outputs.push(forward(output, Frame::Data, Arc::clone(&sender), Arc::clone(&end)));
    }
    if let Some(output) = child.stderr.take() {
        outputs.push(forward(output, Frame::Error, Arc::clone(&sender), Arc::clone(&end)));
    }
    let input = child.stdin.take();
    let process = Arc::new(Mutex::new(child));
    let of_input = Arc::clone(&process);
    let mut from = stream.try_clone()?;
    std::thread::spawn(move || {
        feed(&mut from, input);
        let _ = of_input.lock().unwrap_or_else(PoisonError::into_inner).kill();
    });
    while let Err(Errno::INTR) = poll(&mut [PollFd::new(&end, PollFlags::IN)], None) {}
    let status = process.lock().unwrap_or_else(PoisonError::into_inner).wait()?;
    for output in outputs {
        let _ = output.join();
    }
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    let sent = Frame::Exit(code).send(&mut *sender.lock().unwrap_or_else(PoisonError::into_inner));
    let _ = stream.shutdown(Shutdown::Write);
    sent
}

/// Forwards an output on a thread until it ends. After the end of the process, its children may keep it open: what is there then
/// is forwarded, and no more.
fn forward(
    mut output: impl Read + AsFd + Send + 'static,
    frame: fn(Vec<u8>) -> Frame,
    sender: Arc<Mutex<TcpStream>>,
    end: Arc<OwnedFd>,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        loop {
            // In this order: what the process wrote before its end is there when the end is seen.
            let mut polled = [PollFd::new(&end, PollFlags::IN), PollFd::new(&output, PollFlags::IN)];
            match poll(&mut polled, None) {
                Err(Errno::INTR) => continue,
                Ok(_) if !polled[1].revents().is_empty() => {}
                _ => return,
            }
            let Ok(read @ 1..) = output.read(&mut buffer) else { return };
            let mut sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
            if frame(buffer[..read].to_vec()).send(&mut *sender).is_err() {
                return;
            }
        }
    })
}

/// Feeds the standard input of a process until the connection ends.
fn feed(from: &mut TcpStream, mut input: Option<impl Write>) {
    while let Ok(Some(frame)) = Frame::receive(from) {
        match frame {
            Frame::Data(bytes) => {
                let written = input.as_mut().map(|open| open.write_all(&bytes).and_then(|()| open.flush()));
                // A process that has closed its input needs no more of it.
                if written.is_some_and(|written| written.is_err()) {
                    input = None;
                }
            }
            Frame::EndOfInput => input = None,
            _ => {}
        }
    }
}
