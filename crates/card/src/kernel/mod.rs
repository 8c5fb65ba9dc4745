//! Kernels: what a card can compute on its memory, found by name.
//!
//! A kernel sees card memory and nothing else. It gets its arguments as a range of that memory,
//! which a user wrote and may still be writing: copy, then check, then use the copy.

pub mod cluster7;
pub mod slot;
#[cfg(test)]
mod tests;
pub mod verify;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::command::{Cause, Fault, KernelId, Tally};
use crate::memory::{AccessError, Memory, Span};
use crate::registers::{KERNEL_ENTRY_BYTES, MAX_KERNELS};

/// Something a card can compute.
pub trait Kernel: Send {
    /// Command flags that the kernel knows; the card refuses others.
    fn flags(&self) -> u32 {
        0
    }

    /// Runs one command. Any memory that the kernel needs beyond card memory it keeps in itself,
    /// so that a run in the steady state allocates nothing.
    fn run(&mut self, job: &mut Job<'_>) -> Result<(), Fault>;
}

/// One run of a kernel: what it may use, and where it counts.
#[derive(Debug)]
pub struct Job<'a> {
    /// Card memory.
    pub memory: &'a Memory,
    /// Flags of the command, all known to the kernel.
    pub flags: u32,
    /// Arguments, inside card memory.
    pub args: Span,
    /// Place for the result, inside card memory.
    pub result: Span,
    /// What the kernel has counted so far.
    pub tally: Tally,
    pub(crate) pulse: &'a Pulse<'a>,
}

impl Job<'_> {
    /// Shows that the kernel is alive, and ends it with a fault if the card is to stop. Call it
    /// once per event or every few microseconds.
    pub fn beat(&self) -> Result<(), Fault> {
        self.pulse.beat();
        if self.pulse.stop.load(Ordering::Relaxed) {
            return Err(Fault::new(Cause::Interrupted, 0));
        }
        Ok(())
    }

    /// Copies the first `N` bytes of the arguments, which must have at least as many.
    pub fn read_args<const N: usize>(&self) -> Result<[u8; N], Fault> {
        if self.args.len < N as u64 {
            return Err(Fault::new(Cause::ArgsLength, self.args.len));
        }
        self.memory.read_array(self.args.offset).map_err(outside(Cause::ArgsOutsideMemory))
    }
}

/// Appends a list of places, as it follows the arguments of a kernel.
fn append_places(places: &[slot::Place], bytes: &mut Vec<u8>) {
    for place in places {
        bytes.extend(place.to_bytes());
    }
}

/// The heartbeat of a card and the wish that it stop.
#[derive(Debug)]
pub(crate) struct Pulse<'a> {
    pub(crate) heartbeat: &'a AtomicU64,
    pub(crate) stop: &'a AtomicBool,
}

impl Pulse<'_> {
    pub(crate) fn beat(&self) {
        // Only the card writes this register, so load and store need not be one operation.
        let beats = self.heartbeat.load(Ordering::Relaxed);
        self.heartbeat.store(beats.wrapping_add(1), Ordering::Relaxed);
    }
}

/// Names the cause with which an access outside card memory, or to memory that fails, ends a command.
pub(crate) fn outside(cause: Cause) -> impl Fn(AccessError) -> Fault {
    move |error| error.fault(cause)
}

/// The kernels of one card. A kernel's number is its position here, from 1.
#[derive(Default)]
pub struct Registry {
    kernels: Vec<(String, Box<dyn Kernel>)>,
}

/// A kernel that cannot be added to a card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The name is empty, or longer than the directory has room for.
    #[error("kernel name {0:?} has {len} bytes, expected 1 to {max}", len = .0.len(), max = KERNEL_ENTRY_BYTES - 4)]
    NameLength(String),
    /// The card has a kernel of this name.
    #[error("card has a kernel {0:?} already")]
    Duplicate(String),
    /// The directory is full.
    #[error("card cannot hold more than {MAX_KERNELS} kernels")]
    Full,
}

impl Registry {
    /// A card without kernels.
    pub fn empty() -> Registry {
        Registry::default()
    }

    /// The kernels that every card of this version has.
    pub fn builtin() -> Registry {
        let mut registry = Registry::empty();
        let added = registry
            .add(verify::NAME, verify::Verify::new())
            .and_then(|_| registry.add(cluster7::NAME, cluster7::Cluster7::new()));
        added.expect("two short names that differ");
        registry
    }

    /// Adds a kernel.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        kernel: impl Kernel + 'static,
    ) -> Result<KernelId, RegistryError> {
        let name = name.into();
        if name.is_empty() || name.len() > KERNEL_ENTRY_BYTES - 4 {
            return Err(RegistryError::NameLength(name));
        }
        if self.kernels.iter().any(|(known, _)| *known == name) {
            return Err(RegistryError::Duplicate(name));
        }
        if self.kernels.len() == MAX_KERNELS {
            return Err(RegistryError::Full);
        }
        self.kernels.push((name, Box::new(kernel)));
        Ok(KernelId(self.kernels.len() as u32))
    }

    /// Numbers and names of all kernels.
    pub fn names(&self) -> impl Iterator<Item = (KernelId, &str)> {
        (1..).map(KernelId).zip(self.kernels.iter().map(|(name, _)| name.as_str()))
    }

    /// The kernel with this number.
    pub(crate) fn get(&mut self, id: KernelId) -> Option<&mut dyn Kernel> {
        let index = (id.0 as usize).checked_sub(1)?;
        match self.kernels.get_mut(index) {
            Some((_, kernel)) => Some(kernel.as_mut()),
            None => None,
        }
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

/// True if the kernels use the vector unit of this processor.
pub(crate) fn vectorised() -> bool {
    millstream_camera::trigger::has_avx2()
}
