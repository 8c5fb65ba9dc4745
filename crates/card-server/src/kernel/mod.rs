//! Kernels: programs that a region runs on the banks of card memory.
//!
//! A [`Kernel`] is loaded into a region: from the card's directory of [`BuiltinKernel`]s, or from an image by
//! a [`KernelLoader`]. The region's doorbell or the command queue starts it. A [`KernelRun`] gives it sixteen
//! argument words and access to [`GrantedBanks`]; it leaves sixteen result words.
//!
//! A kernel calls [`KernelRun::safe_point`] at least every few milliseconds. It passes sixteen state words, from
//! which another run could continue on the same banks. At a safe point it can be stopped, paused for a
//! checkpoint, or ended by its deadline.

mod banks;
pub mod blocks;
pub mod builtin;
pub mod events;
pub mod gpu;
mod run;
pub mod stencil;

use std::fmt;

use millstream_card_abi::AccessError;
use millstream_card_abi::command::{Cause, Fault};

pub use self::banks::GrantedBanks;
pub(crate) use self::run::Heartbeat;
pub use self::run::{KernelRun, RunControl, StandaloneControl};

/// A program that a region can run.
pub trait Kernel: Send {
    /// Runs to the end, or until a safe point returns a fault, which the kernel returns to its caller.
    ///
    /// A kernel keeps buffers in itself, so that a run in the steady state allocates nothing.
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault>;
}

/// A kernel that is part of the card, by name.
#[derive(Clone, Copy)]
pub struct BuiltinKernel {
    /// Name in the kernel directory, 1 to 28 bytes.
    pub name: &'static str,
    /// Creates an instance.
    pub make: fn() -> Box<dyn Kernel>,
}

impl fmt::Debug for BuiltinKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BuiltinKernel").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Creates kernels from images in card memory.
pub trait KernelLoader: Send + Sync {
    /// The image format, for messages and the documentation.
    fn format(&self) -> &'static str;

    /// Whether the image is of this loader's format.
    fn recognises(&self, image: &[u8]) -> bool;

    /// Creates a kernel from an image. The image is untrusted input; a bad one is a fault with the cause
    /// `KernelFormat` or `KernelTooLarge`.
    fn load(&self, image: &[u8]) -> Result<LoadedKernel, Fault>;
}

impl fmt::Debug for dyn KernelLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelLoader({})", self.format())
    }
}

/// A kernel with its name.
pub struct LoadedKernel {
    /// Name for the region's registers, which hold the first 32 bytes.
    pub name: String,
    /// The kernel.
    pub kernel: Box<dyn Kernel>,
}

impl fmt::Debug for LoadedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedKernel").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Maps a failed memory access to the fault that ends the command.
pub(crate) fn outside(cause: Cause) -> impl Fn(AccessError) -> Fault {
    move |error| error.fault(cause)
}
