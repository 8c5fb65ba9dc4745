//! `neurons`: the spiking network in card memory. [`millstream_neurons::kernel`] has the arguments.
//!
//! A run ends early, and cannot resume, between the parts of a step: `Interrupted`. Its population is undefined then.

use millstream_application::HEADER_BYTES;
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_server::kernel::{BuiltinKernel, Kernel, KernelRun};
use millstream_neurons::Population;
use millstream_neurons::kernel::{ARRAYS, Description, NAME, Operation, VALUE_BYTES};

use crate::{arguments, refused};

/// The kernel.
pub const BUILTIN: BuiltinKernel = BuiltinKernel { name: NAME, make: || Box::<Neurons>::default() };

/// The kernel, with the population of the latest `Attach`.
#[derive(Default)]
struct Neurons {
    attached: Option<Attached>,
    bytes: Vec<u8>,
}

/// A population whose arrays are in card memory; between runs it has no addresses.
struct Attached {
    description: Description,
    /// Peers of each own column.
    peers_of: Vec<Vec<usize>>,
    population: Population,
}

impl Kernel for Neurons {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let operation = arguments(run, Operation::from_words)?;
        run.beat()?;
        // A run that fails leaves no population.
        let mut attached = match operation {
            Operation::Attach { at, bytes } => self.describe(run, at, bytes)?,
            _ => self.attached.take().ok_or(refused(0))?,
        };
        let arrays = addresses(run, &attached.description)?;
        // SAFETY: the ranges are in the run's banks, which outlive the run, and aligned; all bits are values. The holder of the
        // lease leaves the arrays to the run; one that does not gets undefined spikes, or an index that ends the run.
        unsafe { attached.population.place(arrays) };
        let outcome = self.execute(run, &mut attached, operation);
        attached.population.displace();
        outcome?;
        self.attached = Some(attached);
        Ok(())
    }
}

/// The addresses of the arrays in a run's banks.
fn addresses(run: &KernelRun<'_>, description: &Description) -> Result<[(*mut u8, usize); ARRAYS], Fault> {
    let mut arrays = [(std::ptr::null_mut(), 0); ARRAYS];
    for (array, (place, size)) in arrays.iter_mut().zip(description.arrays.iter().zip(VALUE_BYTES)) {
        let outside = Fault::new(Cause::AccessViolation, place.at);
        let bytes = place.count.checked_mul(size as u64).ok_or(outside)?;
        let first = run.banks().as_ptr(MemoryRange::new(place.at, bytes))?;
        if !first.addr().is_multiple_of(8) {
            return Err(outside);
        }
        // It fits into memory, as just checked.
        *array = (first, place.count as usize);
    }
    Ok(arrays)
}

impl Neurons {
    /// Reads and checks a description.
    fn describe(&mut self, run: &KernelRun<'_>, at: u64, bytes: u64) -> Result<Attached, Fault> {
        self.attached = None;
        // The operation bounds it.
        self.bytes.resize(bytes as usize, 0);
        run.banks().read(at, &mut self.bytes)?;
        let wrong = Fault::new(Cause::InvalidArgument, 1);
        let description: Description = serde_json::from_slice(&self.bytes).map_err(|_| wrong)?;
        // A population has a table of all columns: the banks bound what the kernel allocates.
        let [x, y] = description.network.grid.map(u64::from);
        let banks = u64::from(run.banks().mask().count_ones()) * run.banks().bank_bytes();
        if x.saturating_mul(y) > banks / 4 {
            return Err(wrong);
        }
        let population = description.population().ok_or(wrong)?;
        let mut peers_of = vec![Vec::new(); description.columns.len()];
        for (peer, messages) in description.peers.iter().enumerate() {
            messages.ranks.iter().for_each(|&rank| peers_of[rank as usize].push(peer));
        }
        Ok(Attached { description, peers_of, population })
    }

    fn execute(
        &mut self,
        run: &mut KernelRun<'_>,
        attached: &mut Attached,
        operation: Operation,
    ) -> Result<(), Fault> {
        let Attached { description, peers_of, population } = attached;
        match operation {
            Operation::Attach { .. } => {
                if !population.is_consistent() {
                    return Err(Fault::new(Cause::InvalidArgument, 1));
                }
            }
            Operation::Fire => {
                population.fire();
                let messages = population.messages(peers_of, description.peers.len());
                for (message, peer) in messages.iter().zip(&description.peers) {
                    self.write(run, peer.outgoing, message)?;
                }
                let firing: Vec<u8> =
                    population.firing().iter().flat_map(|neuron| neuron.to_le_bytes()).collect();
                self.write(run, description.firing, &firing)?;
            }
            Operation::Step { parity } => {
                population.deliver_earlier();
                population.receive_own();
                run.beat()?;
                for peer in &description.peers {
                    let at = peer.incoming[parity as usize];
                    if !self.read(run, at, population)? {
                        return Err(Fault::new(Cause::AccessViolation, at));
                    }
                }
                population.deliver_new();
                population.integrate();
                let counts = population.take_counts();
                let words = [counts.excitatory, counts.inhibitory, counts.events, counts.raster];
                for (index, word) in words.into_iter().enumerate() {
                    run.set_result(index, word);
                }
                // Neurons are read and written, synapses read at each arrival.
                let neurons = population.neurons() as u64;
                run.add_traffic(24 * neurons + 8 * counts.events, 24 * neurons);
            }
            Operation::Arrivals { at, bytes } => {
                let arrivals = population.arrivals_bytes();
                if arrivals.len() as u64 > bytes {
                    return Err(Fault::new(Cause::InvalidArgument, 2));
                }
                run.banks().write(at, &arrivals)?;
                run.set_result(0, arrivals.len() as u64);
            }
            Operation::SetArrivals { at, bytes, step } => {
                run.banks().check(MemoryRange::new(at, bytes))?;
                // It fits into memory, as just checked.
                self.bytes.resize(bytes as usize, 0);
                run.banks().read(at, &mut self.bytes)?;
                if !population.set_arrivals(&self.bytes, step) {
                    return Err(Fault::new(Cause::InvalidArgument, 1));
                }
            }
        }
        Ok(())
    }

    /// Writes a list of neurons.
    fn write(&self, run: &mut KernelRun<'_>, at: u64, neurons: &[u8]) -> Result<(), Fault> {
        let count = (neurons.len() / 4) as u64;
        run.banks().write(at, &count.to_le_bytes())?;
        run.banks().write(at.saturating_add(HEADER_BYTES as u64), neurons)?;
        run.add_traffic(0, HEADER_BYTES as u64 + neurons.len() as u64);
        Ok(())
    }

    /// Takes the spikes of a list. False if one has no targets here, or the list exceeds the memory.
    fn read(&mut self, run: &mut KernelRun<'_>, at: u64, population: &mut Population) -> Result<bool, Fault> {
        let mut header = [0; HEADER_BYTES];
        run.banks().read(at, &mut header)?;
        let count = u64::from_le_bytes(header);
        // The sender's columns may be more than the own ones.
        if count > u64::from(u32::MAX)
            || run.banks().check(MemoryRange::new(at, HEADER_BYTES as u64 + 4 * count)).is_err()
        {
            return Ok(false);
        }
        self.bytes.resize(4 * count as usize, 0);
        run.banks().read(at + HEADER_BYTES as u64, &mut self.bytes)?;
        run.add_traffic(HEADER_BYTES as u64 + 4 * count, 0);
        Ok(population.receive(self.bytes.as_chunks().0.iter().map(|&neuron| u32::from_le_bytes(neuron))))
    }
}
