//! Small messages over a reliable connection.
//!
//! A [`MessageChannel`] transfers control messages: small, in order, without loss. Messages that are flushed together travel
//! in one SEND (a frame). Credits ensure that the peer has a posted receive for each frame. Memory is bounded on both
//! sides; [`MessageChannel::send`] returns an error if it is used up.
//!
//! ```no_run
//! # use millstream_rdma::message::{MessageChannel, MessageChannelOptions, PreparedMessageChannel};
//! # fn f(device: &millstream_rdma::Device, stream: &mut std::net::TcpStream) -> Result<(), Box<dyn std::error::Error>> {
//! # let deadline = millstream_rdma::Deadline::NEVER;
//! let options = MessageChannelOptions::default();
//! let queue = millstream_rdma::CompletionQueue::new(device, options.completions())?;
//! let (mut messages, _) = PreparedMessageChannel::new(device, &queue, &options)?.connect(stream, &[], deadline)?;
//! messages.send(b"ready")?;
//! messages.flush()?;
//! loop {
//!     messages.progress()?;
//!     while let Some(message) = messages.receive()? {
//!         println!("received {} bytes", message.len());
//!     }
//! }
//! # }
//! ```

mod channel;
mod credits;
mod frame;
mod options;

pub use channel::{MessageChannel, MessageError};
pub use frame::FrameError;
pub use options::{MessageChannelOptions, PrepareError, PreparedMessageChannel};
