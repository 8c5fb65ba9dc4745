//! Small messages over a reliable connection.
//!
//! A [`Messenger`] is for what the parties of a run tell each other beside the data: many small messages, in
//! order, none lost, none ever waiting at a peer without a buffer. Messages that are sent in one go travel in
//! one transfer (a frame). Memory is bounded on both sides; when it is used up, [`Messenger::send`] says so
//! and the sender has to wait.
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
//!         println!("{} says {message:?}", message.len());
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
