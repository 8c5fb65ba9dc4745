//! Device memory: memory that the application reaches through copies and through keys only.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use millstream_shm::{Mapping, Memfd, PAGE};

use crate::caps::MAX_DM;
use crate::context::Context;
use crate::errno::{Errno, Result};

/// A piece of device memory.
#[derive(Debug)]
pub struct Dm {
    context: Arc<Context>,
    id: u32,
    file: Memfd,
    view: Mapping,
    /// Bytes that were asked for.
    len: u64,
    /// Regions that it is registered as; None when it is freed.
    users: Mutex<Option<u32>>,
    given_back: AtomicBool,
}

/// Bytes of device memory that a process has allocated.
#[derive(Debug, Default)]
pub(crate) struct Allocated(AtomicU64);

impl Dm {
    /// The application copies whole words of so many bytes, as with other devices.
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
        let Allocated(used) = &context.host.device_memory;
        used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(len).filter(|sum| *sum <= MAX_DM)
        })
        .map_err(|_| Errno::NOMEM)?;
        let made = Memfd::new("millstream-dm", len as usize).and_then(|file| Ok((file.map()?, file)));
        let (view, file) = made.inspect_err(|_| {
            used.fetch_sub(len, Ordering::AcqRel);
        })?;
        let id = context.host.next_id();
        let dm = Arc::new(Self {
            context: context.clone(),
            id,
            file,
            view,
            len,
            users: Mutex::new(Some(0)),
            given_back: AtomicBool::new(false),
        });
        context.dms.lock().expect("no panic under this lock").insert(id, Arc::downgrade(&dm));
        Ok(dm)
    }

    /// The device memory that has this number; None if the context has none.
    ///
    /// # Panics
    /// Only if another thread panicked while it looked.
    #[must_use]
    pub fn find(context: &Context, id: u32) -> Option<Arc<Self>> {
        context.dms.lock().expect("no panic under this lock").get(&id)?.upgrade()
    }

    /// A number that nothing else of its context has.
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

    /// Copies into it.
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

    /// Copies out of it.
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

    /// Bytes that were asked for.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Notes a region made of it; EINVAL when it is freed.
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

    /// Gives the memory back. A second call does nothing.
    ///
    /// # Errors
    /// EBUSY while regions are made of it.
    ///
    /// # Panics
    /// Only if another thread panicked while it counted regions.
    pub fn free(&self) -> Result<()> {
        let mut users = self.users.lock().expect("no panic under this lock");
        if users.is_some_and(|count| count != 0) {
            return Err(Errno::BUSY);
        }
        *users = None;
        if !self.given_back.swap(true, Ordering::AcqRel) {
            self.context.host.device_memory.0.fetch_sub(self.len, Ordering::AcqRel);
        }
        Ok(())
    }
}

impl Drop for Dm {
    fn drop(&mut self) {
        // Regions hold references to it, so none is left.
        let _ = self.free();
        self.context.dms.lock().expect("no panic under this lock").remove(&self.id);
    }
}

impl AsFd for Dm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
