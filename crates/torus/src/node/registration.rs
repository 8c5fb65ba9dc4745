//! Registers and frees applications' memory beside the loop that moves packets: both take longer than neighbours wait for a
//! frame, for memory of gigabytes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use millstream_rdma::{Access, Device};
use millstream_shm::EventFd;

use crate::memory::Memory;

/// Interval of looks for memory that nobody uses any more.
const SWEEP: Duration = Duration::from_millis(50);

/// A thread that frees memory: it holds all of it, and lets go of what only it holds.
#[derive(Clone, Debug)]
pub(super) struct MemoryKeeper(Sender<Arc<Memory>>);

impl MemoryKeeper {
    pub(super) fn start() -> io::Result<MemoryKeeper> {
        let (sender, kept) = mpsc::channel();
        std::thread::Builder::new().spawn(move || keep_all(&kept))?;
        Ok(MemoryKeeper(sender))
    }

    /// Memory that this thread frees when it is used no more.
    pub(super) fn keep(&self, memory: Memory) -> Arc<Memory> {
        let memory = Arc::new(memory);
        let _ = self.0.send(Arc::clone(&memory));
        memory
    }
}

fn keep_all(arriving: &Receiver<Arc<Memory>>) {
    let mut kept = Vec::new();
    loop {
        let next = if kept.is_empty() {
            arriving.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            arriving.recv_timeout(SWEEP)
        };
        match next {
            Ok(memory) => kept.push(memory),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        kept.retain(|memory| Arc::strong_count(memory) > 1);
    }
}

/// Memory that is being registered, each on a thread of its own.
#[derive(Debug)]
pub(super) struct Registrations {
    device: Device,
    wake: Arc<EventFd>,
    sender: Sender<(u64, io::Result<Memory>)>,
    results: Receiver<(u64, io::Result<Memory>)>,
}

impl Registrations {
    /// `wake` is signalled when a registration has ended.
    pub(super) fn new(device: &Device, wake: &Arc<EventFd>) -> Registrations {
        let (sender, results) = mpsc::channel();
        Registrations { device: device.clone(), wake: Arc::clone(wake), sender, results }
    }

    /// Begins to register memory of this length behind a descriptor.
    pub(super) fn begin(&self, descriptor: Option<OwnedFd>, length: u64) -> io::Result<()> {
        let (device, wake, sender) = (self.device.clone(), Arc::clone(&self.wake), self.sender.clone());
        let work = move || {
            let _ = sender.send((length, register(&device, descriptor, length)));
            wake.signal();
        };
        std::thread::Builder::new().spawn(work).map(drop)
    }

    /// The next registration that has ended, and its length.
    pub(super) fn poll(&self) -> Option<(u64, io::Result<Memory>)> {
        self.results.try_recv().ok()
    }
}

fn register(device: &Device, descriptor: Option<OwnedFd>, length: u64) -> io::Result<Memory> {
    let invalid = |cause: String| io::Error::new(io::ErrorKind::InvalidInput, cause);
    let descriptor = descriptor.ok_or_else(|| invalid("no memory came with the request".to_owned()))?;
    let memory = Memory::from_peer(descriptor, Some((device, Access::LOCAL_WRITE)))?;
    memory.check(0, length).map_err(|error| invalid(error.to_string()))?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// The last user of memory frees nothing: it goes on at once.
    #[test]
    fn memory_is_freed_by_its_keeper_and_not_before_its_last_use() {
        let keeper = MemoryKeeper::start().unwrap();
        let kept = [(); 2].map(|()| keeper.keep(Memory::allocate("test", 4096, None).unwrap().0));
        let [used, unused] = kept;
        let (used_after, freed) = (Arc::downgrade(&used), Arc::downgrade(&unused));
        assert_eq!(Arc::strong_count(&unused), 2, "the keeper holds it, too");
        drop(unused);
        let start = Instant::now();
        while freed.strong_count() > 0 {
            assert!(start.elapsed() < LONG, "it is not freed");
            std::thread::sleep(SWEEP / 10);
        }
        assert_eq!(used_after.strong_count(), 2);
        // What the keeper holds at its end goes, too.
        drop((keeper, used));
        while used_after.strong_count() > 0 {
            assert!(start.elapsed() < LONG, "it is not freed");
            std::thread::sleep(SWEEP / 10);
        }
    }
}
