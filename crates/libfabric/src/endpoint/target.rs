//! Operations of other nodes on the memory regions of an endpoint.

use millstream_fabric::Fabric;
use millstream_torus_core::NodeNumber;

use super::{Completion, Endpoint, Side, lock};
use crate::atomic::{self, AtomicKind};
use crate::header::{Header, Kind};
use crate::memory::Refused;
use crate::ring::{PAYLOAD, SLOTS};
use crate::sys;

/// A read of another node, while its data are copied. Its later messages wait until then, so that they change nothing before.
#[derive(Debug)]
pub(super) struct Reading {
    request: u64,
    key: u64,
    start: u64,
    total: u64,
    bytes: Vec<u8>,
}

/// A write of another node, whose slots are carried out one by one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Writing {
    /// Number of the region's registration when it began.
    registration: u64,
    /// The error of the first slot that was refused; nothing of the write is carried out behind it.
    error: u32,
}

/// Most bytes of a read that one call copies.
pub(super) const READ_STEP: u64 = SLOTS * PAYLOAD as u64;

fn error_of(refused: Refused) -> u32 {
    match refused {
        Refused::Key => sys::FI_EKEYREJECTED,
        Refused::Access => sys::FI_EACCES,
        Refused::Bounds => sys::FI_EINVAL,
    }
}

impl<F: Fabric> Endpoint<F> {
    pub(super) fn handle_write(&mut self, node: NodeNumber, header: &Header, data: &[u8]) {
        let regions = lock(&self.regions);
        let writing = &mut self.writes[node.index()];
        if header.offset == 0 {
            *writing = Writing::default();
        }
        if writing.error == 0 {
            match regions.range(header.key, header.tag, header.total, true) {
                Ok(mut target) if header.offset == 0 || target.registration() == writing.registration => {
                    writing.registration = target.registration();
                    target.write(header.offset, data);
                }
                // Another region has the key meanwhile.
                Ok(_) => writing.error = error_of(Refused::Key),
                Err(refused) => writing.error = error_of(refused),
            }
        }
        let error = writing.error;
        drop(regions);
        if !header.is_last() {
            return;
        }
        if header.wants_acknowledgement {
            self.acknowledge(node, header.request, error);
        }
        if error == 0 && header.has_data {
            let flags = sys::MS_FI_REMOTE_WRITE | sys::MS_FI_RMA | sys::MS_FI_REMOTE_CQ_DATA;
            let completion = Completion::new(Side::Receive, 0, flags);
            let (length, data) = (header.total, header.data);
            self.completions.push_back(Completion { length, data, source: Some(node), ..completion });
        }
    }

    pub(super) fn handle_read(&mut self, node: NodeNumber, header: &Header) {
        let Header { key, tag: start, data: total, request, .. } = *header;
        let refused = lock(&self.regions).range(key, start, total, false).err();
        if let Some(refused) = refused {
            return self.acknowledge(node, request, error_of(refused));
        }
        // As many bytes as the region has, at most.
        let bytes = Vec::with_capacity(total as usize);
        self.readings[node.index()] = Some(Reading { request, key, start, total, bytes });
        self.continue_reading(node);
    }

    /// Copies a part of what a node reads. The reply begins when all is copied.
    pub(super) fn continue_reading(&mut self, node: NodeNumber) {
        let Some(mut reading) = self.readings[node.index()].take() else { return };
        let Reading { request, key, start, total, ref mut bytes } = reading;
        let done = bytes.len() as u64;
        let length = (total - done).min(READ_STEP);
        let regions = lock(&self.regions);
        let range = regions.range(key, start + done, length, false);
        let read = range.map(|target| target.read(0, length as usize, bytes));
        drop(regions);
        match read {
            // The application has closed the region.
            Err(refused) => self.acknowledge(node, request, error_of(refused)),
            Ok(()) if done + length == total => {
                self.reply(node, Header { request, ..Header::new(Kind::Reply) }, reading.bytes);
            }
            Ok(()) => self.readings[node.index()] = Some(reading),
        }
    }

    pub(super) fn handle_atomic(&mut self, node: NodeNumber, header: &Header, data: &[u8]) {
        let kind = match header.data {
            0 => AtomicKind::Write,
            1 => AtomicKind::Fetch,
            _ => AtomicKind::Compare,
        };
        match self.apply_atomic(header, data, kind) {
            Ok(_) if kind == AtomicKind::Write => self.acknowledge(node, header.request, 0),
            Ok(old) => self.reply(node, Header { request: header.request, ..Header::new(Kind::Reply) }, old),
            Err(error) => self.acknowledge(node, header.request, error),
        }
    }

    /// Carries out an atomic operation. The data are operands, then values to compare with. Returns the previous values.
    fn apply_atomic(&self, header: &Header, data: &[u8], kind: AtomicKind) -> Result<Vec<u8>, u32> {
        let (datatype, operation) = (header.datatype.into(), header.operation.into());
        if !atomic::is_supported(datatype, operation, kind) {
            return Err(sys::FI_EOPNOTSUPP);
        }
        let size = atomic::size_of(datatype).ok_or(sys::FI_EOPNOTSUPP)?;
        let operands = if kind == AtomicKind::Compare { data.len() / 2 } else { data.len() };
        if header.total != data.len() as u64 || operands % size != 0 {
            return Err(sys::FI_EINVAL);
        }
        let regions = lock(&self.regions);
        let mut target = regions.range(header.key, header.tag, operands as u64, true).map_err(error_of)?;
        let mut old = Vec::new();
        target.read(0, operands, &mut old);
        let mut new = old.clone();
        let compare = if kind == AtomicKind::Compare { &data[operands..] } else { data };
        let values = new.chunks_exact_mut(size).zip(data.chunks_exact(size)).zip(compare.chunks_exact(size));
        for ((value, operand), compare) in values {
            atomic::apply(datatype, operation, value, operand, compare).ok_or(sys::FI_EOPNOTSUPP)?;
        }
        target.write(0, &new);
        Ok(old)
    }
}
