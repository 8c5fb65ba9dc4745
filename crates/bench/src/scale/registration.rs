//! The costs of registered private memory by its size: registration, a peer's passes over it, and deregistration.
//!
//! Pages of private memory move into a file that peers can map, either once a peer has used the region much, so that the first pass
//! goes through the kernel and the last one does not; or at registration. The environment of a process selects the way. So each
//! measurement is a process of its own, `millstream bench scale-registration`.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_rdma::connect::{dial, listen};
use millstream_rdma::queue::Signal;
use millstream_rdma::{
    Access, CompletionQueue, Deadline, DeviceSelector, PreparedQueuePair, Region, RemoteMemory, WrId, device,
    loader,
};

use serde::{Deserialize, Serialize};

use super::{BLOCK, Client, Failure, TIMEOUT, complete, options, print_and_wait};
use crate::memcpy::{Pages, memcpy};
use crate::{Figure, Table, median};

const SIZES: [(usize, &str); 5] = [
    (4 << 10, "4 KiB"),
    (64 << 10, "64 KiB"),
    (1 << 20, "1 MiB"),
    (16 << 20, "16 MiB"),
    (64 << 20, "64 MiB"),
];
/// Values of `MILLSTREAM_MOVE`, and what they select.
const POLICIES: [(&str, &str); 2] = [("used", "moved when used"), ("register", "moved at registration")];
/// Registrations and deregistrations of a region that no peer uses.
const REPEATS: u32 = 30;
/// The reader passes over the region for this long at least, and until the pages have moved.
const PASSES: Duration = Duration::from_secs(2);

/// Times of one size \[µs\].
#[derive(Debug, Default, Serialize, Deserialize)]
struct Costs {
    register: f64,
    deregister: f64,
    first_pass: f64,
    last_pass: f64,
    deregister_moved: f64,
    memcpy: f64,
}

/// Adds the rows of all sizes, in both ways.
pub(super) fn measure(table: &mut Table, program: &Path, rounds: usize) -> Result<(), Failure> {
    for (size, name) in SIZES {
        let mut found = POLICIES.map(|_| Vec::new());
        for _ in 0..rounds {
            for ((policy, _), found) in POLICIES.iter().zip(&mut found) {
                found.push(costs_in_process(program, size, policy)?);
            }
        }
        for ((_, way), found) in POLICIES.iter().zip(&found) {
            rows(table, &format!("{name} of touched private memory, {way}"), found);
        }
    }
    Ok(())
}

fn rows(table: &mut Table, name: &str, found: &[Costs]) {
    let of = |figure: fn(&Costs) -> f64| median(&found.iter().map(figure).collect::<Vec<_>>()).unwrap_or(0.0);
    let memcpy = of(|costs| costs.memcpy);
    for (what, value) in [
        ("register", of(|costs| costs.register)),
        ("deregister, not used by peers", of(|costs| costs.deregister)),
        ("deregister, used by peers", of(|costs| costs.deregister_moved)),
    ] {
        table.push(Figure::without_baseline(format!("{name}: {what}"), value, "µs"));
    }
    for (what, value) in [("first READ pass", of(|c| c.first_pass)), ("last READ pass", of(|c| c.last_pass))]
    {
        table.push(Figure::with_baseline(format!("{name}: {what}"), value, "µs", memcpy));
    }
}

/// Measures one size in a process in which pages move as `policy` says.
fn costs_in_process(program: &Path, size: usize, policy: &str) -> Result<Costs, Failure> {
    let environment = [("MILLSTREAM_MOVE", policy)];
    let mut server = Client::spawn(program, &["scale-registration", &size.to_string()], &environment)?;
    Ok(serde_json::from_str(&server.line()?)?)
}

/// The measuring process: measures one size, and prints the times.
///
/// # Errors
/// The first error of a process, a connection or a verbs call.
pub fn registration(program: &Path, size: usize) -> Result<(), Failure> {
    loader::ensure(&DeviceSelector::from_environment())?;
    print_and_wait(&serde_json::to_string(&costs(program, size)?)?)
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

fn costs(program: &Path, size: usize) -> Result<Costs, Failure> {
    let device = device::open(&DeviceSelector::from_environment())?;
    let mut costs = Costs { memcpy: pass_of_memcpy(size)?, ..Costs::default() };
    let memory: Arc<[u8]> = vec![1u8; size].into();
    for _ in 0..REPEATS {
        let start = Instant::now();
        let region = Region::source(&device, memory.clone(), true)?;
        costs.register += micros(start) / f64::from(REPEATS);
        let start = Instant::now();
        drop(region);
        costs.deregister += micros(start) / f64::from(REPEATS);
    }
    let region = Region::source(&device, memory, true)?;
    let queue = CompletionQueue::new(&device, 16)?;
    let listener = listen("127.0.0.1:0")?;
    let mut client =
        Client::spawn(program, &["scale-reader", &listener.address().to_string(), &size.to_string()], &[])?;
    let (mut stream, _) = listener.accept(Deadline::after(TIMEOUT))?;
    let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options())?;
    let _connection = prepared.connect(&mut stream, &region.remote().encode(), Deadline::after(TIMEOUT))?;
    let (first, last): (f64, f64) = serde_json::from_str(&client.line()?)?;
    (costs.first_pass, costs.last_pass) = (first, last);
    let start = Instant::now();
    drop(region);
    costs.deregister_moved = micros(start);
    Ok(costs)
}

/// Time of a memcpy of the whole size \[µs\].
fn pass_of_memcpy(size: usize) -> Result<f64, Failure> {
    let gb_s = memcpy(Pages::Base, size.min(BLOCK as usize), size, size, Duration::from_millis(50))?;
    Ok(size as f64 / gb_s / 1e3)
}

/// The reading process: passes over the server's region, and prints the times of the first pass and of the last ones.
///
/// # Errors
/// The first error of a connection or of a verbs call.
pub fn reader(address: &str, size: usize) -> Result<(), Failure> {
    loader::ensure(&DeviceSelector::from_environment())?;
    let device = device::open(&DeviceSelector::from_environment())?;
    let queue = CompletionQueue::new(&device, 16)?;
    let target = Region::landing(&device, c"millstream-scale", size, Access::LOCAL_WRITE)?;
    target.populate()?;
    let mut stream = dial(address, Deadline::after(TIMEOUT))?;
    let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options())?;
    let connected = prepared.connect(&mut stream, &[], Deadline::after(TIMEOUT))?;
    let encoded = connected.private_data.as_slice().try_into().map_err(|_| "no memory to read from")?;
    let source = RemoteMemory::decode(encoded);
    let pass = || -> Result<f64, Failure> {
        let start = Instant::now();
        for at in (0..size).step_by(BLOCK as usize) {
            let len = (size - at).min(BLOCK as usize);
            let into = target.sge(at as u64, len as u32)?;
            connected.pair.post_read(&[into], source.at(at as u64, len as u64)?, Signal::Yes, WrId(0))?;
            complete(&queue, 1)?;
        }
        Ok(micros(start))
    };
    let first = pass()?;
    let start = Instant::now();
    let mut passes = Vec::new();
    while start.elapsed() < PASSES {
        passes.push(pass()?);
    }
    let last = median(&passes[passes.len() - passes.len().div_ceil(4)..]).unwrap_or(first);
    print_and_wait(&serde_json::to_string(&(first, last))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_has_a_baseline() {
        for (size, name) in SIZES {
            // The thread may wait for a processor during a measurement.
            let mut times = (0..5).map(|_| pass_of_memcpy(size).expect("memory"));
            let is_short = times.any(|time| {
                assert!(time > 0.0, "{name}: {time} µs");
                time < 1e6
            });
            assert!(is_short, "{name}");
        }
    }
}
