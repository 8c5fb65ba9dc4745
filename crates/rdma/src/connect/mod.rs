//! Two parties become the two ends of one reliable connection.
//!
//! A TCP stream carries what the ends must know of each other ([`Hello`]), and a confirmation that the other
//! end is ready to receive, so that nothing is sent too early. The stream stays open: further connections can
//! be made over it, and its end tells of a peer's death sooner than a retry counter.
//!
//! ```text
//! PreparedQueuePair::new   RESET → INIT; receives may be posted from here on
//! connect         Hello ⇄ Hello, INIT → RTR → RTS, ready ⇄ ready
//! ```

mod error;
mod hello;
mod options;
mod prepared;
mod tcp;

pub use error::{ConnectError, ConnectErrorKind};
pub use hello::{Hello, HelloError, MAX_PRIVATE_DATA};
pub use options::{AckTimeout, RcOptions, RnrTimer};
pub use prepared::{ConnectedQueuePair, PreparedQueuePair};
pub use tcp::{Listener, dial, listen};
