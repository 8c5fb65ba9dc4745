//! `spin`: over-relaxation of a spin glass in card memory. [`millstream_spin::kernel`] has the arguments.
//!
//! A run ends early, and cannot resume, at the end of a plane or of a step of sweeps: `Interrupted`. Its block is undefined
//! then.

use std::mem::size_of;

use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_server::kernel::{BuiltinKernel, Kernel, KernelRun};
use millstream_spin::kernel::{BOX_BYTES, MessageBox, NAME, Operation, SpinArguments, sums_to_words};
use millstream_spin::{Block, Geometry, Real, Sums, Sweeper};

/// The kernel.
pub const BUILTIN: BuiltinKernel = BuiltinKernel { name: NAME, make: || Box::<Spin>::default() };

/// The kernel, with the buffers that its runs reuse.
#[derive(Default)]
struct Spin {
    table: Vec<u8>,
    message: Vec<u8>,
}

impl Kernel for Spin {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let arguments = crate::arguments(run, SpinArguments::from_words)?;
        if arguments.double {
            self.compute::<f64>(run, &arguments)
        } else {
            self.compute::<f32>(run, &arguments)
        }
    }
}

/// The block of a run.
fn block<E: Real>(run: &KernelRun<'_>, arguments: &SpinArguments) -> Result<Block<E>, Fault> {
    let geometry = arguments.geometry();
    let values = geometry.values().and_then(|values| values.checked_mul(size_of::<E>()));
    let bytes = values.ok_or(Fault::new(Cause::AccessViolation, arguments.block))? as u64;
    let first = run.banks().as_ptr(MemoryRange::new(arguments.block, bytes))?.cast::<E>();
    if !first.addr().is_multiple_of(64) {
        return Err(Fault::new(Cause::InvalidArgument, 12));
    }
    // SAFETY: the range is in the run's banks, which outlive the run, and aligned. All bits are values. The holder of the
    // lease leaves the block to the run; one that does not gets undefined spins, which nothing else depends on.
    Ok(unsafe { Block::over(geometry, first) })
}

impl Spin {
    fn compute<E: Real>(&mut self, run: &mut KernelRun<'_>, arguments: &SpinArguments) -> Result<(), Fault> {
        let mut block = block::<E>(run, arguments)?;
        let planes = block.inside()[2].clone();
        let bytes = block.extent().sites() as u64 * 6 * E::BYTES as u64;
        run.beat()?;
        match arguments.operation {
            Operation::Fill => {
                for z in block.geometry().with_halos()[2].clone() {
                    block.fill_plane(z);
                    run.beat()?;
                }
                run.add_traffic(0, bytes);
            }
            Operation::Pack { table, boxes } => self.pack(run, &block, table, boxes)?,
            Operation::Unpack { table, boxes } => self.unpack(run, &mut block, table, boxes)?,
            Operation::Sweep { half_sweeps } => {
                let half_sweeps = half_sweeps as usize;
                let sweeper = Sweeper::new(arguments.threads.into());
                let stop = run.interrupt_requested();
                if !sweeper.sweep_until(&mut block, half_sweeps, stop) {
                    run.beat()?;
                    return Err(Fault::new(Cause::Interrupted, 0));
                }
                run.add_traffic(bytes, bytes / 2);
            }
            Operation::Measure => {
                let mut sums = Sums::default();
                for z in planes {
                    sums = sums.plus(&Sums::of_plane(&block, z));
                    run.beat()?;
                }
                for (index, word) in sums_to_words(&sums).into_iter().enumerate() {
                    run.set_result(index, word);
                }
                run.add_traffic(bytes, 0);
            }
        }
        Ok(())
    }

    /// The boxes of a table, checked.
    fn boxes(
        &mut self,
        run: &KernelRun<'_>,
        geometry: &Geometry,
        table: u64,
        boxes: u64,
    ) -> Result<Vec<MessageBox>, Fault> {
        self.table.resize(boxes as usize * BOX_BYTES, 0);
        run.banks().read(table, &mut self.table)?;
        let parse = |(bytes, i): (&[u8; BOX_BYTES], u64)| {
            let wrong = Fault::new(Cause::AccessViolation, table + i * BOX_BYTES as u64);
            MessageBox::from_bytes(bytes, geometry).ok_or(wrong)
        };
        self.table.as_chunks().0.iter().zip(0..).map(parse).collect()
    }

    fn pack<E: Real>(
        &mut self,
        run: &mut KernelRun<'_>,
        block: &Block<E>,
        table: u64,
        boxes: u64,
    ) -> Result<(), Fault> {
        for MessageBox { part, at } in self.boxes(run, block.geometry(), table, boxes)? {
            self.message.clear();
            block.pack(&part, &mut self.message);
            run.banks().write(at, &self.message)?;
            let bytes = self.message.len() as u64;
            run.add_traffic(bytes, bytes);
            run.beat()?;
        }
        Ok(())
    }

    fn unpack<E: Real>(
        &mut self,
        run: &mut KernelRun<'_>,
        block: &mut Block<E>,
        table: u64,
        boxes: u64,
    ) -> Result<(), Fault> {
        for MessageBox { part, at } in self.boxes(run, block.geometry(), table, boxes)? {
            self.message.resize(Geometry::box_bytes(&part, E::BYTES), 0);
            run.banks().read(at, &mut self.message)?;
            // The message has as many spins as the box.
            let _ = block.unpack(&part, &self.message);
            let bytes = self.message.len() as u64;
            run.add_traffic(bytes, bytes);
            run.beat()?;
        }
        Ok(())
    }
}
