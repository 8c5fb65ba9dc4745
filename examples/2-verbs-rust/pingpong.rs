//! Two peers write into each other's memory in turn, by RDMA WRITE with immediate data. See README.md.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use millstream_rdma::queue::{Opcode, Signal};
use millstream_rdma::wait::WaitOptions;
use millstream_rdma::{
    Access, Completion, CompletionWaiter, Deadline, DeviceSelector, PreparedQueuePair, RcOptions, Region,
    RemoteMemory, WaitFd, WaitOutcome, WrId, connect, device, loader,
};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Timeout of one round, and of the connection.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Posted receives; each takes the immediate data of one WRITE.
const RECEIVES: u32 = 8;

/// Order of the peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Writes first.
    Ping,
    /// Writes in answer.
    Pong,
}

/// Parameters of a measurement.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) device: DeviceSelector,
    pub(crate) rounds: u32,
    pub(crate) bytes: u32,
}

fn main() -> Result<(), Error> {
    let mut plan = Plan { device: DeviceSelector::from_environment(), rounds: 10_000, bytes: 8 };
    let (mut listen, mut dial) = (None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--device" => plan.device = value.parse()?,
            "--rounds" => plan.rounds = value.parse()?,
            "--bytes" => plan.bytes = value.parse()?,
            "--listen" => listen = Some(value),
            "--dial" => dial = Some(value),
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    loader::ensure(&plan.device)?;
    let time = match (listen, dial) {
        (None, None) => two_threads(&plan)?,
        (Some(address), None) => {
            let listener = connect::listen(&address)?;
            println!("listening on {}", listener.address());
            play(Role::Pong, &plan, listener.accept(Deadline::NEVER)?.0)?
        }
        (None, Some(address)) => play(Role::Ping, &plan, connect::dial(&address, Deadline::after(TIMEOUT))?)?,
        _ => return Err("--listen and --dial exclude each other".into()),
    };
    println!(
        "{} rounds of {} bytes: {:.2} µs one way",
        plan.rounds,
        plan.bytes,
        time.as_secs_f64() * 1e6 / f64::from(plan.rounds) / 2.0
    );
    Ok(())
}

/// Runs both peers in this process.
pub(crate) fn two_threads(plan: &Plan) -> Result<Duration, Error> {
    let listener = connect::listen("127.0.0.1:0")?;
    let address = listener.address().to_string();
    std::thread::scope(|scope| {
        let pong = scope.spawn(|| play(Role::Pong, plan, listener.accept(Deadline::after(TIMEOUT))?.0));
        let ping = play(Role::Ping, plan, connect::dial(&address, Deadline::after(TIMEOUT))?)?;
        pong.join().map_err(|_| "the pong thread panicked")??;
        Ok(ping)
    })
}

/// Runs one peer: connects over `stream`, runs all rounds, and returns their time.
pub(crate) fn play(role: Role, plan: &Plan, mut stream: TcpStream) -> Result<Duration, Error> {
    let device = device::open(&plan.device)?;
    let mut waiter = CompletionWaiter::new(&device, WaitOptions::default())?;
    let queue = waiter.completion_queue(4 * RECEIVES)?;
    let landing = Region::landing(&device, c"pingpong-landing", plan.bytes as usize, Access::REMOTE_WRITE)?;
    let source = Region::landing(&device, c"pingpong-source", plan.bytes as usize, Access::SOURCE)?;
    let options = RcOptions { send_depth: RECEIVES, recv_depth: RECEIVES, ..RcOptions::default() };
    let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options)?;
    for _ in 0..RECEIVES {
        prepared.post_recv(&[], WrId(0))?;
    }
    let connected = prepared.connect(&mut stream, &landing.remote().encode(), Deadline::after(TIMEOUT))?;
    let pair = connected.pair;
    let peer =
        connected.private_data.as_slice().try_into().map_err(|_| "the peer sent no address of its memory")?;
    let target = RemoteMemory::decode(peer).at(0, plan.bytes.into())?;
    let all = source.sge(0, plan.bytes)?;

    let write = |round: u32| -> Result<(), Error> {
        source.copy_from_slice(0, &round.to_be_bytes())?;
        source.copy_from_slice(u64::from(plan.bytes) - 4, &round.to_be_bytes())?;
        Ok(pair.post_write_imm(&[all], target, round, Signal::Yes, WrId(1))?)
    };
    let start = Instant::now();
    for round in 0..plan.rounds {
        if role == Role::Ping {
            write(round)?;
        }
        let mut immediate = None;
        while immediate.is_none() {
            let deadline = Deadline::after(TIMEOUT);
            let mut others = [WaitFd::readable(&stream)];
            let wake = waiter.wait::<Error>(&[&queue], &mut others, deadline, || {
                let mut buffer = [Completion::EMPTY; 8];
                let taken = queue.poll(&mut buffer)?;
                for completion in taken {
                    completion.check()?;
                    if completion.opcode() == Opcode::ReceiveWriteImmediate {
                        immediate = completion.imm();
                        pair.post_recv(&[], WrId(0))?;
                    }
                }
                Ok(!taken.is_empty())
            })?;
            match wake {
                WaitOutcome::Progress | WaitOutcome::Interrupted => {}
                WaitOutcome::Descriptor => {
                    return Err(format!("{} closed the connection in round {round}", pair.peer()).into());
                }
                WaitOutcome::Deadline => {
                    return Err(format!("no WRITE from {} in round {round}", pair.peer()).into());
                }
            }
        }
        let (mut first, mut last) = ([0; 4], [0; 4]);
        landing.copy_to_slice(0, &mut first)?;
        landing.copy_to_slice(u64::from(plan.bytes) - 4, &mut last)?;
        let seen = (immediate, u32::from_be_bytes(first), u32::from_be_bytes(last));
        if seen != (Some(round), round, round) {
            return Err(format!(
                "round {round}: immediate data, first and last word are {seen:?}, expected {round} in each"
            )
            .into());
        }
        if role == Role::Pong {
            write(round)?;
        }
    }
    let time = start.elapsed();
    if role == Role::Pong {
        // The last WRITE must arrive before the queue pair is destroyed.
        wait_for_peer_to_finish(stream)?;
    }
    Ok(time)
}

/// Waits until the peer closes the stream, when it is done.
fn wait_for_peer_to_finish(mut stream: TcpStream) -> Result<(), Error> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    match std::io::Read::read(&mut stream, &mut [0])? {
        0 => Ok(()),
        _ => Err("the peer sent data after the last round".into()),
    }
}
