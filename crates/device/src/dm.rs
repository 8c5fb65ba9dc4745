//! Device memory (`ibv_dm`): the application reaches it by copies and by memory keys only.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use millstream_shm::{Mapping, Memfd, PAGE};

use crate::caps::MAX_DM;
use crate::context::Context;
use crate::errno::{Errno, Result};

/// An allocation of device memory.
#[derive(Debug)]
pub struct Dm {
    context: Arc<Context>,
    id: u32,
    file: Memfd,
    view: Mapping,
    /// Bytes that were requested.
    len: u64,
    /// Memory regions that use it; None when it is freed.
    users: Mutex<Option<u32>>,
    freed: AtomicBool,
}

impl Dm {
    /// Granularity of copies, bytes.
    pub const WORD: u64 = 4;

    /// Allocates `len` bytes, zero at first, aligned to `1 << log_align` bytes.
    ///
    /// # Errors
    /// EINVAL for no bytes or an alignment beyond a page, ENOMEM when less than `len` is left of
    /// [`MAX_DM`].
    pub fn new(context: &Arc<Context>, len: u64, log_align: u32) -> Result<Arc<Self>> {
        if len == 0 || log_align > PAGE.ilog2() {
            return Err(Errno::INVAL);
        }
        let used = &context.adapter.device_memory;
        used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(len).filter(|sum| *sum <= MAX_DM)
        })
        .map_err(|_| Errno::NOMEM)?;
        let made = Memfd::new("millstream-dm", len as usize).and_then(|file| Ok((file.map()?, file)));
        let (view, file) = made.inspect_err(|_| {
            used.fetch_sub(len, Ordering::AcqRel);
        })?;
        let id = context.adapter.next_id();
        let dm = Arc::new(Self {
            context: context.clone(),
            id,
            file,
            view,
            len,
            users: Mutex::new(Some(0)),
            freed: AtomicBool::new(false),
        });
        context.add_object(id, &dm);
        Ok(dm)
    }

    /// The device memory with this id; None if the context has none.
    #[must_use]
    pub fn find(context: &Context, id: u32) -> Option<Arc<Self>> {
        context.object(id)
    }

    /// The id, unique among objects of its context.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Address of `len` bytes from `offset`, both multiples of [`Dm::WORD`].
    fn part(&self, offset: u64, len: usize) -> Result<*mut u8> {
        let whole = offset.is_multiple_of(Self::WORD) && (len as u64).is_multiple_of(Self::WORD);
        if !whole || offset > self.len || self.len - offset < len as u64 {
            return Err(Errno::INVAL);
        }
        Ok(self.view.base().wrapping_add(offset as usize))
    }

    /// Copies into the device memory.
    ///
    /// # Errors
    /// EINVAL for a range that leaves it or is not of whole words.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    pub unsafe fn store(&self, offset: u64, from: *const u8, len: usize) -> Result<()> {
        let to = self.part(offset, len)?;
        // SAFETY: the destination was just checked, the caller vouches for the source.
        unsafe { to.copy_from(from, len) };
        Ok(())
    }

    /// Copies out of the device memory.
    ///
    /// # Errors
    /// EINVAL for a range that leaves it or is not of whole words.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes.
    pub unsafe fn load(&self, offset: u64, to: *mut u8, len: usize) -> Result<()> {
        let from = self.part(offset, len)?;
        // SAFETY: the source was just checked, the caller vouches for the destination.
        unsafe { to.copy_from(from, len) };
        Ok(())
    }

    /// Bytes that were requested.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always false: device memory has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Counts a memory region that uses it; EINVAL when it is freed.
    pub(crate) fn attach(&self) -> Result<()> {
        let mut users = self.users.lock().expect("no panic under this lock");
        *users.as_mut().ok_or(Errno::INVAL)? += 1;
        Ok(())
    }

    pub(crate) fn detach(&self) {
        if let Some(users) = self.users.lock().expect("no panic under this lock").as_mut() {
            *users -= 1;
        }
    }

    /// Frees the memory. A second call does nothing.
    ///
    /// # Errors
    /// EBUSY while memory regions use it.
    ///
    /// # Panics
    /// Only if another thread panicked while it counted regions.
    pub fn free(&self) -> Result<()> {
        let mut users = self.users.lock().expect("no panic under this lock");
        if users.is_some_and(|count| count != 0) {
            return Err(Errno::BUSY);
        }
        *users = None;
        if !self.freed.swap(true, Ordering::AcqRel) {
            self.context.adapter.device_memory.fetch_sub(self.len, Ordering::AcqRel);
        }
        Ok(())
    }
}

impl Drop for Dm {
    fn drop(&mut self) {
        // Regions hold references to it, so none is left.
        let _ = self.free();
        self.context.remove_object(self.id);
    }
}

impl AsFd for Dm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
