//! Setup of reliable connections over TCP.
//!
//! Both ends exchange a [`Hello`] over a TCP stream, and then a confirmation that they are ready to receive. The stream
//! stays open. It can carry further connection setups, and its end shows a peer's death earlier than a retry counter.
//!
//! ```text
//! PreparedQueuePair::new       RESET → INIT; receives may be posted from here on
//! PreparedQueuePair::connect   Hello ⇄ Hello, INIT → RTR → RTS, ready ⇄ ready
//! ```

mod error;
mod hello;
mod options;
mod prepared;
mod tcp;

pub use error::{ConnectError, ConnectErrorKind};
pub use hello::{Hello, HelloError, MAX_PRIVATE_DATA, is_tls};
pub use options::{AckTimeout, RcOptions, RnrTimer};
pub use prepared::{ConnectedQueuePair, PreparedQueuePair};
pub use tcp::{
    ADDRESS_RESOLUTION, ControlStream, Listener, connect, dial, listen, set_peer_timeout, wait_readable,
};
