//! Memory of the host in place of a card's: a memfd, sparse until it is written.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::{Mapping, Memfd};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::{Backing, Wanted, register_descriptor};
use crate::memory::{AccessError, Span, zero};
use crate::os::{Doing, OsError};

/// A sealed memfd and its mapping.
#[derive(Debug)]
pub(crate) struct Emulated {
    fd: Memfd,
    mapping: Arc<Mapping>,
    name: &'static str,
    wanted: Wanted,
}

impl Emulated {
    pub(crate) fn new(name: &'static str, wanted: Wanted) -> Result<Emulated, OsError> {
        let len = usize::try_from(wanted.bytes).unwrap_or(usize::MAX);
        let fd = Memfd::sealed(name, len).doing("make card memory")?;
        let mapping = fd.map().doing("map card memory")?;
        if wanted.huge_pages {
            mapping.advise_huge_pages();
        }
        if wanted.prefault {
            mapping.prefault(0, mapping.len()).doing("give memory to the pages of a card")?;
        }
        Ok(Emulated { fd, mapping: Arc::new(mapping), name, wanted })
    }

    /// Memory that somebody else made and gave us.
    pub(crate) fn of_peer(fd: Memfd, mapping: Mapping) -> Emulated {
        let wanted = Wanted { bytes: fd.len() as u64, prefault: false, huge_pages: false };
        Emulated { fd, mapping: Arc::new(mapping), name: "millstream-card-memory", wanted }
    }

    /// Registers a part of it. Addresses are offsets.
    pub(crate) fn register_part(
        &self,
        device: &Device,
        offset: u64,
        len: usize,
        access: Access,
    ) -> Result<Region, MemoryError> {
        // A memfd is no dma-buf: only the soft device takes it for one. An adapter pins the pages.
        if !device.is_soft() {
            return Region::mapped(device, self.mapping.clone(), offset, len, access);
        }
        register_descriptor(device, self.fd(), offset, len, access)
    }

    /// A mapping of one's own.
    pub(crate) fn map_again(&self) -> Result<Mapping, OsError> {
        self.fd.map().doing("map card memory")
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Backing for Emulated {
    fn size(&self) -> u64 {
        self.fd.len() as u64
    }

    fn mapping(&self) -> Option<&Mapping> {
        Some(&self.mapping)
    }

    fn clear(&self) -> Result<(), AccessError> {
        if !self.wanted.prefault {
            // Memory that was never written costs nothing.
            self.fd.punch_hole(0, self.fd.len());
        }
        // Pages that were asked for stay, and so does what the system did not take back.
        self.written().into_iter().for_each(|range| zero(&self.mapping, range));
        Ok(())
    }

    fn written(&self) -> Vec<Span> {
        data(&self.fd).unwrap_or_else(|_| vec![Span::new(0, self.size())])
    }

    fn register(&self, device: &Device, access: Access) -> Result<Region, MemoryError> {
        self.register_part(device, 0, self.fd.len(), access)
    }

    fn shared(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd())
    }

    fn another(&self) -> Option<io::Result<Box<dyn Backing>>> {
        let made = Emulated::new(self.name, self.wanted);
        Some(made.map(|made| Box::new(made) as Box<dyn Backing>).map_err(io::Error::other))
    }
}

/// The ranges that have pages: everything else reads as zeros.
fn data(fd: &Memfd) -> io::Result<Vec<Span>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    loop {
        let start = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(ranges),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(fd, SeekFrom::Hole(start))?;
        ranges.push(Span::new(start, end - start));
        at = end;
    }
}
