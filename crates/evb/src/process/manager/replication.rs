//! The manager's side of its standby manager: the copy of what only the manager knows.

use super::{ManagerProcess, WaitSet};
use crate::core::Instant;
use crate::core::takeover::{ManagerReplica, ReplicaUpdate};
use crate::process::startup::{Channel, FromManager, ManagerCopy};

impl ManagerProcess {
    /// A standby manager has joined: it gets a copy, and the units of the run connect to it.
    pub(super) fn standby_joined(&mut self, channel: Channel, address: &str, queues: &mut WaitSet) {
        self.standby = Some((channel, address.to_owned()));
        self.core.handle_standby_joined();
        self.replicate();
        let standby = FromManager::Standby { address: address.to_owned() };
        for ((unit, control), channel) in self.units.iter().zip(&self.controls).zip(&mut queues.channels) {
            if let Some(channel) = channel
                && control.is_some()
                && !self.core.is_recovered(*unit)
            {
                // A unit that has ended is noticed by the end of its stream.
                let _ = channel.send(&standby);
            }
        }
    }

    /// Sends to the standby manager what has changed.
    pub(super) fn replicate(&mut self) {
        match self.core.poll_replica() {
            Some(ReplicaUpdate::Whole(replica)) => self.copy_to_standby(*replica),
            Some(ReplicaUpdate::Done(done)) => self.send_to_standby(&FromManager::Done(done)),
            None => {}
        }
    }

    /// Sends a whole copy to the standby manager.
    pub(super) fn copy_to_standby(&mut self, replica: ManagerReplica) {
        let first_assigned = self.first_assigned.map(|at| at.since(Instant::default()));
        let elapsed = self.clock.now().since(Instant::default());
        let copy = ManagerCopy { replica, elapsed, first_assigned };
        self.send_to_standby(&FromManager::Copy(Box::new(copy)));
    }

    /// The standby manager gets the frame before the units are told: what a killed process has sent arrives.
    fn send_to_standby(&mut self, frame: &FromManager) {
        if let Some((channel, _)) = &mut self.standby
            && let Err(error) = channel.send(frame)
        {
            tracing::warn!(%error, "the standby manager is lost");
            self.lost_standby = self.standby.take().map(|(_, address)| address);
        }
    }
}
