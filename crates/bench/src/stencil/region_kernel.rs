//! A region kernel on card memory, without a card around it.

use std::error::Error;
use std::time::Instant;

use millstream_card_abi::MemoryRange;
use millstream_card_abi::registers::KernelWords;
use millstream_card_abi::stencil::StencilArguments;
use millstream_card_server::Memory;
use millstream_card_server::kernel::stencil::BUILTIN;
use millstream_card_server::kernel::{GrantedBanks, Kernel, KernelRun, StandaloneControl};

/// A kernel with its memory and the arguments of its run.
pub(super) struct BareKernel {
    memory: Memory,
    kernel: Box<dyn Kernel>,
    arguments: KernelWords,
    points: f64,
}

impl BareKernel {
    /// A kernel on two float32 planes of `side` × `side` points. `arguments` gets the offset of the second plane.
    pub(super) fn new(
        kernel: Box<dyn Kernel>,
        side: u64,
        sweeps: u64,
        arguments: impl Fn(u64) -> KernelWords,
    ) -> Result<BareKernel, Box<dyn Error>> {
        let plane = (side * side * 4).next_multiple_of(2 << 20);
        let memory = Memory::anonymous(2 * plane)?;
        memory.prefault(MemoryRange::new(0, 2 * plane))?;
        Ok(BareKernel { memory, kernel, arguments: arguments(plane), points: (side * side * sweeps) as f64 })
    }

    /// The built-in stencil kernel: all rows and sweeps in one run.
    pub(super) fn native(side: u64, sweeps: u64) -> Result<BareKernel, Box<dyn Error>> {
        BareKernel::new((BUILTIN.make)(), side, sweeps, |plane| {
            let arguments = StencilArguments {
                double: false,
                rows: side,
                columns: side,
                pitch: side,
                source: 0,
                destination: plane,
                sweeps,
                ranges: [0..0, 0..0],
            };
            arguments.to_words()
        })
    }

    /// Runs the kernel once.
    pub(super) fn points_per_second(&mut self) -> Result<f64, Box<dyn Error>> {
        let control = StandaloneControl::default();
        let banks = GrantedBanks::new(&self.memory, self.memory.size(), 1);
        let start = Instant::now();
        self.kernel.run(&mut KernelRun::new(banks, self.arguments, &control))?;
        Ok(self.points / start.elapsed().as_secs_f64())
    }
}
