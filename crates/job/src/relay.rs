//! A process that stands for a process of another rank.

use std::io::{self, Read as _, Write as _};

use crate::agent::ignore_signals;
use crate::frame::{Frame, Peer, StartRequest};
use crate::proof::dial;

/// Exit status after the rank was lost.
const LOST: i32 = 1;

/// Runs the process of `request` through the hub at `hub`, with the standard streams of this one. `key` is that of
/// [`Hub::relay_key`](crate::Hub::relay_key). Returns its exit status.
///
/// # Errors
/// The hub cannot be reached, or a standard stream fails.
pub fn run(hub: &str, key: &[u8], request: StartRequest) -> io::Result<i32> {
    // The launcher of the run gets the same signal, and ends the process in order.
    ignore_signals();
    let role = request.arguments.join(" ");
    let mut stream = dial(hub, key, &Peer::Relay(request))?;
    let mut input = stream.try_clone()?;
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = io::stdin().read(&mut buffer) {
            if Frame::Data(buffer[..read].to_vec()).send(&mut input).is_err() {
                return;
            }
        }
        let _ = Frame::EndOfInput.send(&mut input);
    });
    let (mut out, mut errors) = (io::stdout(), io::stderr());
    loop {
        match Frame::receive(&mut stream)? {
            Some(Frame::Data(bytes)) => out.write_all(&bytes).and_then(|()| out.flush())?,
            Some(Frame::Error(bytes)) => errors.write_all(&bytes)?,
            Some(Frame::Exit(code)) => return Ok(code),
            Some(_) => {}
            None => {
                writeln!(errors, "the rank of {role:?} was lost")?;
                return Ok(LOST);
            }
        }
    }
}
