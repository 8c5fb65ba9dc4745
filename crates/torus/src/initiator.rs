//! Puts, gets and atomics of an initiator whose data pass through staging memory: an application of a node, or a host outside
//! of the torus.

use std::time::Duration;

use millstream_fabric::{FabricError, Notification, RegionId, check};
use millstream_torus_core::NodeNumber;

use crate::control::{Command, CommandKind};
use crate::outstanding::{Outstanding, Pending};

/// Most bytes of one command with data in the staging memory.
const CHUNK: usize = 512 << 10;
/// How long an operation without a deadline of its own waits.
pub(crate) const NEVER: Duration = Duration::from_secs(3600);

/// What posts commands and takes their completions.
pub(crate) trait Initiator: Sized {
    fn outstanding(&mut self) -> &mut Outstanding;

    /// Copies to an allocated place in the staging memory.
    fn store_staged(&self, at: u64, data: &[u8]);

    /// Copies from an allocated place in the staging memory.
    fn load_staged(&self, at: u64, into: &mut [u8]);

    /// Posts a command, after there is a place for its completion. Staged data of `pending` go before it.
    fn post(&mut self, command: Command, pending: Pending) -> Result<u32, FabricError>;

    /// Waits until `check` has a result, for `timeout` at most.
    fn wait<R>(
        &mut self,
        timeout: Duration,
        check: impl FnMut(&mut Self) -> Option<Result<R, FabricError>>,
    ) -> Result<R, FabricError>;

    /// Allocates staging memory, after earlier operations have freed some.
    fn stage(&mut self, length: usize) -> Result<u64, FabricError> {
        self.wait(NEVER, |initiator| initiator.outstanding().stage(length).map(Ok))
    }

    /// The result of an operation that is awaited.
    fn result(&mut self, cookie: u32) -> Result<u64, FabricError> {
        self.wait(NEVER, |initiator| initiator.outstanding().take_result(cookie))
    }

    fn atomic(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        kind: CommandKind,
    ) -> Result<u64, FabricError> {
        check::word(offset)?;
        let pending = Pending { target: at, region, offset, length: 8, staged: None, awaited: true };
        let cookie = self.post(Command { kind, target: at, cookie: 0, region, offset }, pending)?;
        self.result(cookie)
    }

    /// A put of some bytes, with a notification of any counter.
    fn put_bytes(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        mut offset: u64,
        data: &[u8],
        notification: Notification,
    ) -> Result<(), FabricError> {
        let mut rest = data;
        loop {
            let (part, more) = rest.split_at(rest.len().min(CHUNK));
            let (at, length) = (self.stage(part.len())?, part.len() as u32);
            self.store_staged(at, part);
            let notification = if more.is_empty() { notification } else { Notification::None };
            let kind = CommandKind::Put { local: RegionId(0), at, length, notification };
            let staged = Some(at);
            let pending =
                Pending { target: to, region, offset, length: length.into(), staged, awaited: false };
            self.post(Command { kind, target: to, cookie: 0, region, offset }, pending)?;
            if more.is_empty() {
                return Ok(());
            }
            offset = offset.wrapping_add(part.len() as u64);
            rest = more;
        }
    }

    fn get_bytes(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        mut offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError> {
        for part in into.chunks_mut(CHUNK) {
            let (at, length) = (self.stage(part.len())?, part.len() as u32);
            let kind = CommandKind::Get { local: RegionId(0), at, length };
            // Freed below, after the data were copied.
            let staged = None;
            let pending =
                Pending { target: from, region, offset, length: length.into(), staged, awaited: true };
            let command = Command { kind, target: from, cookie: 0, region, offset };
            let result = self.post(command, pending).and_then(|cookie| self.result(cookie));
            if result.is_ok() {
                self.load_staged(at, part);
            }
            self.outstanding().free(at);
            result?;
            offset = offset.wrapping_add(part.len() as u64);
        }
        Ok(())
    }
}
