//! Applications of a mesh on this host: no node processes, all connected with all.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use millstream_rdma::Deadline;
use millstream_torus_core::Dimensions;

use super::LaunchError;
use super::applications::Applications;
use crate::application::{ENV_DIMENSIONS, ENV_RANK, ENV_SIZE};
use crate::direct::{ENV_KEY, ENV_RENDEZVOUS, MeshError, Rendezvous};
use crate::key;

/// Why a mesh did not end well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectError {
    /// The nodes could not meet.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A program could not be started, or failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

/// Runs a program for each node, connected by [`DirectNode`](crate::DirectNode), and waits until all have ended. Once `end` is
/// true, it ends them and fails.
///
/// # Errors
/// [`DirectError`] of the first that failed; the others are ended.
pub fn run_direct(
    dimensions: Dimensions,
    device: Option<&str>,
    program: &[OsString],
    end: &AtomicBool,
) -> Result<(), DirectError> {
    let key = millstream_shm::random_u64();
    let rendezvous = Rendezvous::listen(dimensions, key)?;
    let address = rendezvous.address();
    // Ends with this process if the programs do not use the fabric. They may also begin to use it late.
    std::thread::spawn(move || {
        if let Err(error) = rendezvous.run(Deadline::NEVER) {
            tracing::warn!("{error}");
        }
    });
    let Some((name, arguments)) = program.split_first() else { return Ok(()) };
    let mut applications = Applications::default();
    for node in dimensions.all() {
        let mut command = Command::new(name);
        command
            .args(arguments)
            .env(ENV_RENDEZVOUS, &address)
            .env(ENV_KEY, key::text(key))
            .env(ENV_RANK, node.0.to_string())
            .env(ENV_SIZE, dimensions.nodes().to_string())
            .env(ENV_DIMENSIONS, dimensions.to_string())
            .stdin(Stdio::null());
        if let Some(device) = device {
            command.env(millstream_rdma::loader::ENV_DEVICE, device);
        }
        applications.start(node, command)?;
    }
    while applications.is_running() {
        if let Some((node, status)) = applications.poll_ended(end)?
            && !status.success()
        {
            return Err(LaunchError::Application { node, status }.into());
        }
    }
    Ok(())
}
