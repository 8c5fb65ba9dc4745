//! Error numbers, and the text of a thread's last error.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use millstream_fabric::FabricError;

use crate::sys;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::new(CString::default());
}

/// An error of a function of the interface.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u32,
    message: String,
}

impl Failure {
    pub(crate) fn invalid(message: impl Into<String>) -> Failure {
        Failure { code: sys::MS_FABRIC_INVALID, message: message.into() }
    }

    pub(crate) fn no_region(message: String) -> Failure {
        Failure { code: sys::MS_FABRIC_NO_REGION, message }
    }

    pub(crate) fn no_counter(index: u16) -> Failure {
        let message = format!("there is no counter {index}: an application has {}", sys::MS_FABRIC_COUNTERS);
        Failure { code: sys::MS_FABRIC_NO_COUNTER, message }
    }

    pub(crate) fn system(message: impl ToString) -> Failure {
        Failure { code: sys::MS_FABRIC_SYSTEM, message: message.to_string() }
    }
}

impl From<FabricError> for Failure {
    fn from(error: FabricError) -> Failure {
        let code = match error {
            FabricError::NoRegion { .. } => sys::MS_FABRIC_NO_REGION,
            FabricError::Bounds { .. } => sys::MS_FABRIC_BOUNDS,
            FabricError::Unaligned { .. } => sys::MS_FABRIC_UNALIGNED,
            FabricError::NoCounter { .. } => sys::MS_FABRIC_NO_COUNTER,
            FabricError::Gone { .. } => sys::MS_FABRIC_GONE,
            FabricError::Access { .. } => sys::MS_FABRIC_ACCESS,
            FabricError::NoRoute { .. } => sys::MS_FABRIC_NO_ROUTE,
            FabricError::NodeLost { .. } => sys::MS_FABRIC_NODE_LOST,
            FabricError::TimedOut { .. } => sys::MS_FABRIC_TIMED_OUT,
            FabricError::NoCard { .. } => sys::MS_FABRIC_NO_CARD,
            FabricError::NotANode => sys::MS_FABRIC_NOT_A_NODE,
            // Errors that the header does not know yet.
            _ => sys::MS_FABRIC_SYSTEM,
        };
        Failure { code, message: error.to_string() }
    }
}

/// Runs a function of the interface. A panic must not unwind into C: it becomes an error.
pub(crate) fn call(work: impl FnOnce() -> Result<(), Failure>) -> c_int {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    match result.unwrap_or_else(|_| Err(Failure::system("a panic in the library: please report it"))) {
        Ok(()) => sys::MS_FABRIC_OK as c_int,
        Err(failure) => {
            remember(&failure);
            failure.code as c_int
        }
    }
}

fn remember(failure: &Failure) {
    // The texts of this library have no zero bytes; a region of an application cannot bring one in.
    let message = CString::new(failure.message.as_str()).unwrap_or_default();
    MESSAGE.with(|slot| *slot.borrow_mut() = message);
}

/// Text of the last error of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ms_fabric_error_message() -> *const c_char {
    MESSAGE.with(|slot| slot.borrow().as_ptr())
}
