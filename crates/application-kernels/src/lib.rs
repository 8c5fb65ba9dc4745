//! Kernels of the applications on the torus, for the regions of cards.
//!
//! A program that serves a card adds [`ALL`] to the card's kernels. The crates of the applications define the arguments and
//! the arithmetic, which are those of host memory: results have the same bits.

pub mod bfs;
pub mod neurons;
pub mod spin;

use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::KernelWords;
use millstream_card_server::kernel::{BuiltinKernel, KernelRun};

/// The kernels.
pub const ALL: &[BuiltinKernel] = &[spin::BUILTIN, neurons::BUILTIN, bfs::BUILTIN];

/// The arguments of a run. Kernels of applications do not resume.
///
/// # Errors
/// `KernelNotResumable`, or [`refused`] with the index of the argument that `from_words` refuses.
fn arguments<A>(
    run: &KernelRun<'_>,
    from_words: impl FnOnce(&KernelWords) -> Result<A, u64>,
) -> Result<A, Fault> {
    match run.resume() {
        Some(state) => Err(Fault::new(Cause::KernelNotResumable, state[0])),
        None => from_words(run.arguments()).map_err(refused),
    }
}

/// The fault of an argument that is refused.
fn refused(index: u64) -> Fault {
    Fault::new(Cause::InvalidArgument, index)
}
