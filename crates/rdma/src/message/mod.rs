//! Small messages over a reliable connection.
//!
//! A [`Messenger`] transfers control messages: small, in order, without loss. Messages that are flushed together travel
//! in one SEND (a frame). Credits ensure that the peer has a posted receive for each frame. Memory is bounded on both
//! sides; [`Messenger::send`] returns an error if it is used up.
//!
//! ```no_run
//! # use millstream_rdma::message::{Messenger, MessengerOptions, PreparedMessenger};
//! # fn f(device: &millstream_rdma::Device, stream: &mut std::net::TcpStream) -> Result<(), Box<dyn std::error::Error>> {
//! # let deadline = millstream_rdma::Deadline::NEVER;
//! let options = MessengerOptions::default();
//! let queue = millstream_rdma::CompletionQueue::new(device, options.completions())?;
//! let (mut messenger, _) = PreparedMessenger::new(device, &queue, &options)?.connect(stream, &[], deadline)?;
//! messenger.send(b"ready")?;
//! messenger.flush()?;
//! loop {
//!     messenger.progress()?;
//!     while let Some(message) = messenger.receive()? {
//!         println!("received {} bytes", message.len());
//!     }
//! }
//! # }
//! ```

mod credits;
mod frame;
mod messenger;
mod options;

pub use frame::FrameError;
pub use messenger::{MessageError, Messenger};
pub use options::{MessengerOptions, PrepareError, PreparedMessenger};
