//! `bfs`: breadth-first search in card memory. [`millstream_bfs::kernel`] has the arguments.
//!
//! A run ends early, and cannot resume, between the parts of a step: `Interrupted`. Its search is undefined then.

use millstream_application::{Array, HEADER_BYTES, Place};
use millstream_bfs::bitmap::Bitmap;
use millstream_bfs::column::{Column, U48};
use millstream_bfs::distribution::Distribution;
use millstream_bfs::graph::Rows;
use millstream_bfs::kernel::{Description, MORE, NAME, Operation};
use millstream_bfs::traversal::{Cursor, Found, Traversal};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_server::kernel::{BuiltinKernel, GrantedBanks, Kernel, KernelRun};

use crate::{arguments, refused};

/// The kernel.
pub const BUILTIN: BuiltinKernel = BuiltinKernel { name: NAME, make: || Box::<Bfs>::default() };

/// The kernel, with the graph of the latest `Attach`.
#[derive(Default)]
struct Bfs {
    attached: Option<Attached>,
    bytes: Vec<u8>,
    /// Children for each node.
    messages: Vec<Vec<u8>>,
}

/// A graph whose arrays are in card memory.
struct Attached {
    description: Description,
    distribution: Distribution,
    cursor: Cursor,
}

impl Kernel for Bfs {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let operation = arguments(run, Operation::from_words)?;
        run.beat()?;
        // A run that fails leaves no graph.
        let mut attached = match operation {
            Operation::Attach { at, bytes } => self.describe(run, at, bytes)?,
            _ => self.attached.take().ok_or(refused(0))?,
        };
        match attached.description.column_bytes {
            u32::BYTES => self.execute::<u32>(run, &mut attached, operation)?,
            U48::BYTES => self.execute::<U48>(run, &mut attached, operation)?,
            _ => return Err(refused(1)),
        }
        self.attached = Some(attached);
        Ok(())
    }
}

/// The values of an array in a run's banks.
fn values<T>(banks: GrantedBanks<'_>, place: Place) -> Result<Array<T>, Fault> {
    let outside = Fault::new(Cause::AccessViolation, place.at);
    let bytes = place.count.checked_mul(size_of::<T>() as u64).ok_or(outside)?;
    let first = banks.as_ptr(MemoryRange::new(place.at, bytes))?.cast::<T>();
    if !first.is_aligned() {
        return Err(outside);
    }
    // SAFETY: the range is in the run's banks, which outlive the run, and aligned; the array does not outlive the run. All
    // bits are values of numbers, the only types here. The holder of the lease leaves the arrays to the run; one that does
    // not gets an undefined result, or an index that ends the run.
    Ok(unsafe { Array::over(first, place.count as usize) })
}

/// The search of a run.
fn traversal<C: Column>(banks: GrantedBanks<'_>, attached: &Attached) -> Result<Traversal<C>, Fault> {
    let [starts, columns, visited, sent, frontier_of_all, frontier, next, parents, levels] =
        attached.description.arrays;
    let bitmap = |place| values(banks, place).map(Bitmap::over);
    Ok(Traversal {
        distribution: attached.distribution,
        rows: Rows { starts: values(banks, starts)?, columns: values(banks, columns)? },
        visited: bitmap(visited)?,
        sent: bitmap(sent)?,
        frontier_of_all: bitmap(frontier_of_all)?,
        frontier: bitmap(frontier)?,
        next: bitmap(next)?,
        parents: values(banks, parents)?,
        levels: values(banks, levels)?,
        cursor: attached.cursor,
    })
}

impl Bfs {
    /// Reads and checks a description.
    fn describe(&mut self, run: &KernelRun<'_>, at: u64, bytes: u64) -> Result<Attached, Fault> {
        self.attached = None;
        // The operation bounds it.
        self.bytes.resize(bytes as usize, 0);
        run.banks().read(at, &mut self.bytes)?;
        let wrong = Fault::new(Cause::InvalidArgument, 1);
        let description: Description = serde_json::from_slice(&self.bytes).map_err(|_| wrong)?;
        let distribution = description.distribution().ok_or(wrong)?;
        Ok(Attached { description, distribution, cursor: Cursor::default() })
    }

    fn execute<C: Column>(
        &mut self,
        run: &mut KernelRun<'_>,
        attached: &mut Attached,
        operation: Operation,
    ) -> Result<(), Fault> {
        let mut search = traversal::<C>(run.banks(), attached)?;
        let description = &attached.description;
        match operation {
            Operation::Attach { .. } => {
                if !search.rows.is_consistent(&search.distribution) {
                    return Err(Fault::new(Cause::InvalidArgument, 1));
                }
            }
            Operation::Start { root } => {
                if root >= search.distribution.vertices() {
                    return Err(Fault::new(Cause::InvalidArgument, 1));
                }
                run.set_result(0, search.start(root));
            }
            Operation::Scan { level } => {
                self.messages.resize(search.distribution.nodes(), Vec::new());
                self.messages.iter_mut().for_each(Vec::clear);
                let room = (description.room as usize).saturating_sub(HEADER_BYTES);
                let more = if search.scan(level, room, &mut self.messages) { 0 } else { MORE };
                for peer in &description.peers {
                    write(run, peer.outgoing, &self.messages[usize::from(peer.node)], more)?;
                }
            }
            Operation::Receive { parity, level } => {
                let mut more = u64::from(search.cursor != Cursor::default());
                for peer in &description.peers {
                    let at = peer.incoming[parity as usize];
                    more |= self.read(run, at, description.room)?;
                    search.receive(&self.bytes, level).ok_or(Fault::new(Cause::AccessViolation, at))?;
                    run.beat()?;
                }
                let found = if more == 0 { search.end_top_down() } else { Found::default() };
                set_results(run, more, found);
                run.add_traffic(found.entries * C::BYTES as u64, found.vertices * C::BYTES as u64);
            }
            Operation::Frontier => {
                let message = search.share_frontier();
                for peer in &description.peers {
                    write(run, peer.outgoing, &message, 0)?;
                }
            }
            Operation::BottomUp { parity, level } => {
                for peer in &description.peers {
                    let at = peer.incoming[parity as usize];
                    self.read(run, at, description.room)?;
                    if !search.add_frontier(peer.node.into(), &self.bytes) {
                        return Err(Fault::new(Cause::AccessViolation, at));
                    }
                }
                run.beat()?;
                let found = search.bottom_up(level);
                set_results(run, 0, found);
                run.add_traffic(search.rows.columns.len() as u64, found.vertices * C::BYTES as u64);
            }
        }
        attached.cursor = search.cursor;
        Ok(())
    }

    /// Takes a message's bytes. Returns 1 if its sender has more to scan, else 0.
    fn read(&mut self, run: &mut KernelRun<'_>, at: u64, room: u64) -> Result<u64, Fault> {
        let mut header = [0; HEADER_BYTES];
        run.banks().read(at, &mut header)?;
        let header = u64::from_le_bytes(header);
        let length = header & !MORE;
        let outside = Fault::new(Cause::AccessViolation, at);
        if length > room - HEADER_BYTES as u64 {
            return Err(outside);
        }
        let first = at.checked_add(HEADER_BYTES as u64).ok_or(outside)?;
        // A description's room can exceed all memory: the banks bound what the kernel allocates.
        run.banks().check(MemoryRange::new(first, length)).map_err(|_| outside)?;
        self.bytes.resize(length as usize, 0);
        run.banks().read(first, &mut self.bytes)?;
        run.add_traffic(HEADER_BYTES as u64 + length, 0);
        Ok(u64::from(header & MORE != 0))
    }
}

/// Writes a message.
fn write(run: &mut KernelRun<'_>, at: u64, message: &[u8], more: u64) -> Result<(), Fault> {
    let length = message.len() as u64;
    run.banks().write(at, &(length | more).to_le_bytes())?;
    run.banks().write(at.saturating_add(HEADER_BYTES as u64), message)?;
    run.add_traffic(0, HEADER_BYTES as u64 + length);
    Ok(())
}

fn set_results(run: &mut KernelRun<'_>, more: u64, found: Found) {
    for (index, word) in [more, found.vertices, found.entries].into_iter().enumerate() {
        run.set_result(index, word);
    }
}
