//! The health page of a node: watchdog registers of host and adapter, and what the adapter knows of neighbours.
//!
//! ```text
//!   0: host watchdog │ 8: adapter watchdog │ 16: remote fault descriptors (6)
//! ```
//! Each word has one writer, and is stored at once. The reader takes it as input.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use millstream_health::registers::{AdapterWatchdog, HostWatchdog, RemoteFault};
use millstream_shm::PAGE;
use millstream_torus_core::Direction;

use crate::memory::Memory;

const HOST: usize = 0;
const ADAPTER: usize = 8;
const REMOTE: usize = 16;

/// A health page.
#[derive(Debug)]
pub struct HealthPage(Memory);

impl HealthPage {
    /// Creates a page, with a descriptor for the host monitor.
    ///
    /// # Errors
    /// The system has no memory.
    pub fn create() -> io::Result<(HealthPage, OwnedFd)> {
        let (memory, descriptor) = Memory::allocate("millstream-torus-health", PAGE, None)?;
        Ok((HealthPage(memory), descriptor))
    }

    /// Maps the page of a node process.
    ///
    /// # Errors
    /// It is too short, or cannot be mapped.
    pub fn open(descriptor: OwnedFd) -> io::Result<HealthPage> {
        let memory = Memory::from_peer(descriptor, None)?;
        memory.check(0, PAGE as u64).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(HealthPage(memory))
    }

    fn load(&self, at: usize) -> u64 {
        self.0.mapping().word64(at).load(Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u64) {
        self.0.mapping().word64(at).store(value, Ordering::Release);
    }

    /// The host monitor's register.
    #[must_use]
    pub fn host(&self) -> HostWatchdog {
        HostWatchdog(self.load(HOST))
    }

    /// Writes the host monitor's register.
    pub fn set_host(&self, word: HostWatchdog) {
        self.store(HOST, word.0);
    }

    /// The adapter monitor's register.
    #[must_use]
    pub fn adapter(&self) -> AdapterWatchdog {
        AdapterWatchdog(self.load(ADAPTER))
    }

    /// Writes the adapter monitor's register.
    pub fn set_adapter(&self, word: AdapterWatchdog) {
        self.store(ADAPTER, word.0);
    }

    /// What the adapter knows of a neighbour.
    #[must_use]
    pub fn remote(&self, direction: Direction) -> RemoteFault {
        RemoteFault(self.load(REMOTE + 8 * direction.index()))
    }

    /// Writes what the adapter knows of a neighbour.
    pub fn set_remote(&self, direction: Direction, word: RemoteFault) {
        self.store(REMOTE + 8 * direction.index(), word.0);
    }
}
