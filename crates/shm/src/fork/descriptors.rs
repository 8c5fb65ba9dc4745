//! Descriptors that a forked child must not keep.
//!
//! A child would keep the sockets of its parent open after the parent's exit: names stay taken, peers see no hang-up, and the
//! kernel steers packets to a socket that nobody reads. So these descriptors refer to `/dev/null` in a child. Their numbers stay
//! in use, because copies of the parent's objects hold them. All of them close on `execve`.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use millstream_lockfree::SpinLock;
use rustix::fs::{Mode, OFlags};
use rustix::io::{DupFlags, dup3};

use crate::{Mapping, PAGE};

/// All descriptors of this kind in the process.
static CLOSE_ON_FORK: SpinLock<Numbers> = SpinLock::new(Numbers { memory: None, len: 0 });

/// The numbers of descriptors. They lie in memory of their own, because a child may get no pages of the heap
/// (see [`hide_from_children`](crate::relocate::hide_from_children)).
struct Numbers {
    memory: Option<Mapping>,
    len: usize,
}

impl Numbers {
    fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len() / size_of::<RawFd>())
    }

    fn as_mut_slice(&mut self) -> &mut [RawFd] {
        match &self.memory {
            // SAFETY: the first `len` numbers were stored, in memory that nobody else uses.
            Some(memory) => unsafe { std::slice::from_raw_parts_mut(memory.base().cast(), self.len) },
            None => &mut [],
        }
    }

    /// Makes room for `more` numbers.
    fn reserve(&mut self, more: usize) -> io::Result<()> {
        if self.len + more > self.capacity() {
            let mut larger = Self {
                memory: Some(Mapping::anonymous((2 * self.capacity() * size_of::<RawFd>()).max(PAGE))?),
                len: self.len,
            };
            larger.as_mut_slice().copy_from_slice(self.as_mut_slice());
            *self = larger;
        }
        Ok(())
    }

    /// Adds a number, for which there is room.
    fn push(&mut self, number: RawFd) {
        assert!(self.len < self.capacity(), "reserved");
        self.len += 1;
        *self.as_mut_slice().last_mut().expect("just added") = number;
    }

    fn remove(&mut self, number: RawFd) {
        let numbers = self.as_mut_slice();
        if let (Some(at), Some(last)) = (numbers.iter().rposition(|other| *other == number), numbers.last()) {
            numbers[at] = *last;
            self.len -= 1;
        }
    }
}

/// A descriptor that a forked child does not keep.
#[derive(Debug)]
pub struct CloseOnForkFd(ManuallyDrop<OwnedFd>);

impl CloseOnForkFd {
    /// Opens a descriptor. No fork comes between, so `open` must not wait.
    ///
    /// # Errors
    /// Those of `open`; ENOMEM.
    pub fn open<E: Into<io::Error>>(open: impl FnOnce() -> Result<OwnedFd, E>) -> io::Result<Self> {
        let mut numbers = CLOSE_ON_FORK.lock();
        numbers.reserve(1)?;
        let fd = open().map_err(Into::into)?;
        numbers.push(fd.as_raw_fd());
        Ok(Self(ManuallyDrop::new(fd)))
    }

    /// Opens or receives `most` descriptors at most, together with something else. No fork comes between, so `open` must not wait.
    ///
    /// # Errors
    /// Those of `open`; ENOMEM.
    pub fn open_several<T, E: Into<io::Error>>(
        most: usize,
        open: impl FnOnce() -> Result<(T, Vec<OwnedFd>), E>,
    ) -> io::Result<(T, Vec<Self>)> {
        let mut numbers = CLOSE_ON_FORK.lock();
        numbers.reserve(most)?;
        let (other, mut fds) = open().map_err(Into::into)?;
        fds.truncate(most);
        let fds = fds.into_iter().map(|fd| {
            numbers.push(fd.as_raw_fd());
            Self(ManuallyDrop::new(fd))
        });
        Ok((other, fds.collect()))
    }

    /// The descriptor, which later children keep.
    #[must_use]
    pub fn into_inner(self) -> OwnedFd {
        CLOSE_ON_FORK.lock().remove(self.as_raw_fd());
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped afterwards.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }
}

impl Drop for CloseOnForkFd {
    fn drop(&mut self) {
        let mut numbers = CLOSE_ON_FORK.lock();
        numbers.remove(self.as_raw_fd());
        // SAFETY: not used afterwards. It is closed under the lock: a fork must not come between, and the number may be reused at
        // once.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl AsFd for CloseOnForkFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for CloseOnForkFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

crate::lock_at_fork!(Descriptors, CLOSE_ON_FORK, |numbers| {
    replace_all(numbers.as_mut_slice());
    numbers.len = 0;
});

/// Lets descriptors refer to `/dev/null`.
fn replace_all(numbers: &[RawFd]) {
    let Some(&first) = numbers.first() else { return };
    // SAFETY: nobody in the child uses the parent's descriptors.
    let close = |number| unsafe { rustix::io::close(number) };
    // Plain system calls, which a child may make.
    let open = || rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let null = open().or_else(|_| {
        // All numbers may be taken.
        close(first);
        open()
    });
    let Ok(null) = null else {
        return numbers[1..].iter().for_each(|number| close(*number));
    };
    let null = ManuallyDrop::new(null);
    let mut is_one_of_them = false;
    for &number in numbers {
        if number == null.as_raw_fd() {
            is_one_of_them = true;
            continue;
        }
        // SAFETY: the number is taken by the parent's descriptor, or free. Its owner closes it.
        let mut fd = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        if dup3(&*null, &mut fd, DupFlags::CLOEXEC).is_err() {
            close(number);
        }
    }
    if !is_one_of_them {
        drop(ManuallyDrop::into_inner(null));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_kept() {
        let mut numbers = Numbers { memory: None, len: 0 };
        for number in 0..5000 {
            numbers.reserve(1).unwrap();
            numbers.push(number);
        }
        (0..5000).filter(|number| number % 3 != 0).for_each(|number| numbers.remove(number));
        numbers.remove(-1);
        numbers.as_mut_slice().sort_unstable();
        assert!(numbers.as_mut_slice().iter().copied().eq((0..5000).step_by(3)));
    }

    #[test]
    fn a_child_does_not_keep_the_descriptor_but_its_number() {
        let ((), ends) = CloseOnForkFd::open_several(2, || {
            std::io::pipe().map(|(reader, writer)| ((), vec![reader.into(), writer.into()]))
        })
        .unwrap();
        let [reader, writer] = <[CloseOnForkFd; 2]>::try_from(ends).unwrap();
        let (gate_reader, gate) = std::io::pipe().unwrap();
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let number = writer.as_raw_fd();
            // SAFETY: as above. The parent's exit ends the wait as well.
            unsafe {
                let mut stat: libc::stat = std::mem::zeroed();
                let is_null = libc::fstat(number, &raw mut stat) == 0
                    && stat.st_mode & libc::S_IFMT == libc::S_IFCHR
                    && libc::fcntl(number, libc::F_GETFD) == libc::FD_CLOEXEC;
                libc::close(gate.as_raw_fd());
                libc::read(gate_reader.as_raw_fd(), (&raw mut stat).cast(), 1);
                libc::_exit(i32::from(!is_null));
            }
        }
        assert!(child > 0);
        drop(writer);
        // The child lives, and holds no other end.
        assert_eq!(rustix::io::read(&reader, &mut [0]).unwrap(), 0, "end of file");
        drop(gate);
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
