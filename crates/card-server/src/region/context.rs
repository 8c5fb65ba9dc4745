//! State that the regions, the command queue and the lease controller of a card share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use millstream_card_abi::registers::Registers;
use millstream_shm::EventFd;

use crate::hardware::Hardware;
use crate::kernel::{BuiltinKernel, KernelLoader};
use crate::polling::PollPolicy;
use crate::queue::control::QueueControl;
use crate::region::control::RegionControl;
use crate::region::slot::KernelSlot;

/// State that the regions, the command queue and the lease controller of a card share.
pub(crate) struct RegionContext {
    pub(crate) registers: Arc<Registers>,
    pub(crate) hardware: Arc<Hardware>,
    /// Zero of the card's clock.
    pub(crate) started: Instant,
    pub(crate) bank_bytes: u64,
    pub(crate) bank_count: u32,
    /// Kernels by their numbers in the directory.
    pub(crate) builtin_kernels: Vec<(u32, BuiltinKernel)>,
    pub(crate) loaders: Vec<Arc<dyn KernelLoader>>,
    /// The card ends.
    pub(crate) stop: Arc<AtomicBool>,
    /// By region.
    pub(crate) regions: Vec<RegionControl>,
    /// By region.
    pub(crate) kernels: Vec<KernelSlot>,
    pub(crate) queue: QueueControl,
    /// Longest time of a command of the queue, unless its user sets another one.
    pub(crate) command_timeout: Duration,
    pub(crate) polling: PollPolicy,
    /// Wakes the lease controller.
    pub(crate) controller_wake: Arc<EventFd>,
}

impl RegionContext {
    /// The banks of the card, one bit each.
    pub(crate) fn all_banks(&self) -> u64 {
        // A mask with banks that do not exist is refused by kernels that map their banks.
        1u64.checked_shl(self.bank_count).map_or(u64::MAX, |end| end - 1)
    }
}

impl fmt::Debug for RegionContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionContext({} regions)", self.regions.len())
    }
}
