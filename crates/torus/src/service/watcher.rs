//! A watcher of the torus: it follows the states of a supervisor.

use std::io;
use std::ops::ControlFlow;
use std::time::Duration;

use super::lines::Lines;
use super::{FromSupervisor, TorusState, Who};
use crate::proof::{Call, Purpose};

/// A supervisor that says nothing for so long is given up. Its heartbeat is far shorter.
const SILENCE: Duration = Duration::from_secs(5);

/// Shows states of the first supervisor that answers until `show` breaks, or the supervisor ends.
///
/// # Errors
/// No supervisor can be reached, or it ended.
pub fn watch(
    addresses: &[String],
    key: u64,
    mut show: impl FnMut(&TorusState) -> ControlFlow<()>,
) -> io::Result<()> {
    let mut last = io::Error::new(io::ErrorKind::InvalidInput, "no supervisor was named");
    for address in addresses {
        match follow(address, key, &mut show) {
            Ok(()) => return Ok(()),
            Err(cause) => last = io::Error::new(cause.kind(), format!("supervisor at {address}: {cause}")),
        }
    }
    Err(last)
}

fn follow(address: &str, key: u64, show: &mut impl FnMut(&TorusState) -> ControlFlow<()>) -> io::Result<()> {
    let call = Call { key, purpose: Purpose::Watcher, to: 0 };
    let mut lines = Lines::dial(address, call, Who::Watcher, SILENCE)?;
    lines.set_read_timeout(Some(SILENCE))?;
    loop {
        for message in lines.read::<FromSupervisor>()? {
            if let FromSupervisor::State(state) = message
                && show(&state).is_break()
            {
                return Ok(());
            }
        }
    }
}
