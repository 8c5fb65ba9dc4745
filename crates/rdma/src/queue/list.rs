//! Lists of work requests, posted by one call.

use std::mem::MaybeUninit;

use rdma_mummy_sys::{ibv_recv_wr, ibv_send_wr, ibv_sge};

use super::request::{Operation, Signal, WrId, put_send_request, recv_request};
use crate::memory::{OutOfBounds, Region, RemoteAddress, RemoteMemory, Sge};

/// The list is full; post it first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the list of work requests is full")]
pub struct ListFull;

/// A reusable list of send work requests. Filling and posting do not allocate.
///
/// Posting a list is one call, and one doorbell on an adapter.
pub type SendList = List<ibv_send_wr>;

/// A reusable list of receives.
pub type RecvList = List<ibv_recv_wr>;

/// A work request aligned to a cache line. The fields of most operations are in its first line.
#[repr(C, align(64))]
struct CacheAligned<R>(R);

/// A segment of a transfer: local and remote range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Offset in the local region, in bytes.
    pub local: u64,
    /// Offset in the remote memory, in bytes.
    pub remote: u64,
    /// Length, in bytes.
    pub length: u32,
}

/// A list of work requests: [`SendList`] or [`RecvList`].
pub struct List<R> {
    /// Neither vector grows beyond its first capacity, so pointers into them stay valid.
    requests: Vec<CacheAligned<R>>,
    elements: Vec<Sge>,
    max_requests: usize,
    max_elements: usize,
}

// SAFETY: the pointers within the requests point into the list itself, and are only followed under an exclusive
// borrow.
unsafe impl<R> Send for List<R> {}
// SAFETY: a shared borrow only gives access to lengths.
unsafe impl<R> Sync for List<R> {}

/// A send or receive work request.
pub trait WorkRequest {
    /// Sets the successor.
    fn set_next(&mut self, next: *mut Self);

    /// Sets the scatter/gather list.
    fn set_elements(&mut self, elements: *mut ibv_sge);
}

impl WorkRequest for ibv_send_wr {
    #[inline]
    fn set_next(&mut self, next: *mut Self) {
        self.next = next;
    }

    #[inline]
    fn set_elements(&mut self, elements: *mut ibv_sge) {
        self.sg_list = elements;
    }
}

impl WorkRequest for ibv_recv_wr {
    #[inline]
    fn set_next(&mut self, next: *mut Self) {
        self.next = next;
    }

    #[inline]
    fn set_elements(&mut self, elements: *mut ibv_sge) {
        self.sg_list = elements;
    }
}

impl<R: WorkRequest> List<R> {
    /// Creates a list for `max_requests` work requests with `max_sges` elements in total.
    pub fn new(max_requests: usize, max_sges: usize) -> List<R> {
        List {
            requests: Vec::with_capacity(max_requests),
            elements: Vec::with_capacity(max_sges),
            max_requests,
            max_elements: max_sges,
        }
    }

    /// Number of work requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Removes all work requests.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.elements.clear();
    }

    /// Appends the work request that `put` builds, linked to the next place.
    #[inline(always)]
    fn push(&mut self, elements: &[Sge], put: impl FnOnce(&mut MaybeUninit<R>)) -> Result<(), ListFull> {
        let (count, first) = (self.requests.len(), self.elements.len());
        if count == self.max_requests || elements.len() > self.max_elements - first {
            return Err(ListFull);
        }
        self.elements.extend_from_slice(elements);
        // SAFETY: the vectors have unused room within `max_requests` and `max_elements`, and `put` builds a
        // work request. The place behind the last one is linked, not accessed.
        unsafe {
            let place = self.requests.as_mut_ptr().add(count);
            put(&mut *place.cast());
            (*place).0.set_elements(self.elements.as_mut_ptr().add(first).cast());
            (*place).0.set_next(place.wrapping_add(1).cast());
            self.requests.set_len(count + 1);
        }
        Ok(())
    }

    /// Terminates the list and returns its first work request; null if it is empty.
    pub(super) fn link(&mut self) -> *mut R {
        let first = self.requests.as_mut_ptr();
        match self.requests.len() {
            0 => std::ptr::null_mut(),
            // SAFETY: the last work request. By pointer, as everywhere: a borrow of the vector's slice would invalidate the
            // pointers between work requests.
            count => unsafe {
                (*first.add(count - 1)).0.set_next(std::ptr::null_mut());
                first.cast()
            },
        }
    }

    /// Index of `request`, which is in the list.
    pub(super) fn position(&self, request: *const R) -> usize {
        self.requests.iter().position(|each| std::ptr::eq(&raw const each.0, request)).unwrap_or(0)
    }
}

impl SendList {
    /// Adds a SEND.
    ///
    /// # Errors
    /// [`ListFull`].
    #[inline]
    pub fn send(&mut self, from: &[Sge], signal: Signal, wr_id: WrId) -> Result<(), ListFull> {
        self.operation(Operation::Send, from, signal, wr_id)
    }

    /// Adds an RDMA WRITE.
    ///
    /// # Errors
    /// [`ListFull`].
    #[inline]
    pub fn write(
        &mut self,
        from: &[Sge],
        to: RemoteAddress,
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), ListFull> {
        self.operation(Operation::Write(to), from, signal, wr_id)
    }

    /// Adds an RDMA WRITE with immediate data, which consumes a receive of the peer.
    ///
    /// # Errors
    /// [`ListFull`].
    #[inline]
    pub fn write_imm(
        &mut self,
        from: &[Sge],
        to: RemoteAddress,
        imm: u32,
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), ListFull> {
        self.operation(Operation::WriteImm(to, imm), from, signal, wr_id)
    }

    /// Adds an RDMA READ.
    ///
    /// # Errors
    /// [`ListFull`].
    #[inline]
    pub fn read(
        &mut self,
        to: &[Sge],
        from: RemoteAddress,
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), ListFull> {
        self.operation(Operation::Read(from), to, signal, wr_id)
    }

    /// Adds an RDMA WRITE for each segment, as many as fit, and returns their number. They are unsignaled; a
    /// failed one reports its index in the list. This costs half as much as separate calls.
    ///
    /// # Errors
    /// [`OutOfBounds`] for the first segment that exceeds its memory; those before it were added.
    pub fn write_segments(
        &mut self,
        from: &Region,
        to: &RemoteMemory,
        parts: impl IntoIterator<Item = Segment>,
    ) -> Result<usize, OutOfBounds> {
        self.parts(Operation::Write, from, to, parts.into_iter())
    }

    /// Adds an RDMA READ for each segment; see [`write_segments`](SendList::write_segments).
    ///
    /// # Errors
    /// As [`write_segments`](SendList::write_segments).
    pub fn read_segments(
        &mut self,
        to: &Region,
        from: &RemoteMemory,
        parts: impl IntoIterator<Item = Segment>,
    ) -> Result<usize, OutOfBounds> {
        self.parts(Operation::Read, to, from, parts.into_iter())
    }

    #[inline(always)]
    fn parts(
        &mut self,
        operation: impl Fn(RemoteAddress) -> Operation,
        local: &Region,
        remote: &RemoteMemory,
        parts: impl Iterator<Item = Segment>,
    ) -> Result<usize, OutOfBounds> {
        let (count, first) = (self.requests.len(), self.elements.len());
        let room = (self.max_requests - count).min(self.max_elements - first);
        let mut added = 0;
        let mut outcome = Ok(());
        // SAFETY: the vectors have room for these; each place is filled before it counts. The place behind
        // the last one is linked, not accessed.
        unsafe {
            let places = self.requests.as_mut_ptr().add(count);
            let elements = self.elements.as_mut_ptr().add(first);
            for part in parts.take(room) {
                let places_of = |part: Segment| {
                    Ok((local.sge(part.local, part.length)?, remote.at(part.remote, part.length.into())?))
                };
                let (here, there) = match places_of(part) {
                    Ok(both) => both,
                    Err(outside) => {
                        outcome = Err(outside);
                        break;
                    }
                };
                let (place, element) = (places.add(added), elements.add(added));
                element.write(here);
                let element = std::slice::from_ref(&*element);
                let wr_id = WrId((count + added) as u64);
                put_send_request(&mut *place.cast(), operation(there), element, wr_id, Signal::No);
                (*place).0.set_elements(elements.add(added).cast());
                (*place).0.set_next(place.wrapping_add(1).cast());
                added += 1;
            }
            self.requests.set_len(count + added);
            self.elements.set_len(first + added);
        }
        outcome.map(|()| added)
    }

    /// Makes the last work request of the list signaled, with this id.
    #[inline]
    pub fn signal_last(&mut self, wr_id: WrId) {
        if let Some(last) = self.requests.len().checked_sub(1) {
            // SAFETY: the last work request; by pointer, as in `link`.
            let last = unsafe { &mut (*self.requests.as_mut_ptr().add(last)).0 };
            last.wr_id = wr_id.0;
            last.send_flags |= Signal::Yes.flags();
        }
    }

    #[inline(always)]
    fn operation(
        &mut self,
        operation: Operation,
        sges: &[Sge],
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), ListFull> {
        self.push(sges, |place| put_send_request(place, operation, sges, wr_id, signal))
    }
}

impl RecvList {
    /// Adds a receive. Without elements it can only take immediate data.
    ///
    /// # Errors
    /// [`ListFull`].
    #[inline]
    pub fn recv(&mut self, to: &[Sge], wr_id: WrId) -> Result<(), ListFull> {
        self.push(to, |place| {
            place.write(recv_request(to, wr_id));
        })
    }
}

impl<R> std::fmt::Debug for List<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "List({} of {} requests)", self.requests.len(), self.max_requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_quantity::Rkey;
    use proptest::prelude::*;

    fn sges(count: usize) -> Vec<Sge> {
        // SAFETY: an element is plain data and is never posted here.
        vec![unsafe { std::mem::zeroed::<Sge>() }; count]
    }

    proptest! {
        #[test]
        fn linked_requests_come_in_order_and_share_nothing(counts in prop::collection::vec(0usize..4, 1..20)) {
            let total = counts.iter().sum::<usize>();
            let mut list = SendList::new(counts.len(), total);
            for (index, count) in counts.iter().enumerate() {
                let to = RemoteAddress { addr: index as u64, rkey: Rkey::new(1) };
                list.write(&sges(*count), to, Signal::No, WrId(index as u64)).unwrap();
            }
            prop_assert_eq!(list.send(&[], Signal::No, WrId(0)), Err(ListFull));
            let start = list.elements.as_mut_ptr();
            let mut request = list.link();
            let (mut seen, mut element) = (0, 0);
            while !request.is_null() {
                // SAFETY: `link` returns the first work request and has linked the others.
                let each = unsafe { &*request };
                prop_assert_eq!(each.wr_id, seen as u64);
                prop_assert_eq!(each.num_sge as usize, counts[seen]);
                prop_assert_eq!(each.sg_list.cast::<Sge>(), start.wrapping_add(element));
                prop_assert_eq!(list.position(request), seen);
                element += counts[seen];
                seen += 1;
                request = each.next;
            }
            prop_assert_eq!(seen, counts.len());
            list.clear();
            prop_assert!(list.is_empty() && list.link().is_null());
        }
    }

    #[test]
    fn a_list_is_full_at_either_limit() {
        let mut list = RecvList::new(3, 2);
        list.recv(&sges(2), WrId(0)).unwrap();
        assert_eq!(list.recv(&sges(1), WrId(1)), Err(ListFull));
        list.recv(&[], WrId(1)).unwrap();
        list.recv(&[], WrId(2)).unwrap();
        assert_eq!(list.recv(&[], WrId(3)), Err(ListFull));
        assert_eq!(list.len(), 3);
    }
}
