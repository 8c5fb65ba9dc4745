//! A unit's TCP streams to the manager and to the standby manager.
//!
//! ```text
//! unit                              standby manager
//!  │ ── Join ───────────────────────► │   at the start, or when the manager names it; the stream stays open
//!  │             ...                  │
//!  │ ◄── NewTerm: the units, term ─── │   the manager is lost
//!  │ ── state of the unit ──────────► │
//!  │ ═══ control connection ═════════ │   takes the place of the one to the lost manager
//! ```

use super::ProcessError;
use super::control::Control;
use super::error::IoContext;
use super::startup::{self, Channel, FromManager, JoinedRun, ToManager, TryReceive};
use crate::core::Unit;
use crate::core::recovery::Membership;
use millstream_rdma::message::{MessageChannelOptions, PreparedMessageChannel};
use millstream_rdma::wait::CompletionWaiter;
use millstream_rdma::{CompletionQueue, Deadline, Device, WaitFd};
use millstream_tls::Security;
use std::time::Duration;

/// Longest time for the control connection to a manager of a new term. The unit does nothing else meanwhile.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest time for the connection to a standby manager that has joined the run.
const STANDBY_TIMEOUT: Duration = Duration::from_secs(1);

/// The streams.
#[derive(Debug)]
pub(super) struct ManagerLink {
    manager: Channel,
    is_open: bool,
    standby: Option<Channel>,
    /// The unit, and where it accepts data connections.
    unit: (Unit, Option<String>),
    security: Security,
    standby_timeout: Duration,
}

/// What arrived, or happened.
#[derive(Debug)]
pub(super) enum LinkEvent {
    /// A frame of the manager.
    Frame(FromManager),
    /// The manager ended.
    ManagerLost,
    /// The unit has connected to a standby manager that has joined the run.
    StandbyJoined,
    /// The standby manager ended.
    StandbyLost,
    /// The standby manager takes over.
    NewTerm(Membership),
}

impl ManagerLink {
    /// The streams of a unit that has joined.
    pub(super) fn new(joined: JoinedRun) -> ManagerLink {
        let JoinedRun { channel, config, unit, data, standby, security, .. } = joined;
        ManagerLink {
            manager: channel,
            is_open: true,
            standby,
            unit: (unit, data),
            security,
            standby_timeout: STANDBY_TIMEOUT.min(config.plan.timeout / 4),
        }
    }

    /// Whether there is a standby manager.
    pub(super) fn has_standby(&self) -> bool {
        self.standby.is_some()
    }

    /// Descriptors to wait for.
    pub(super) fn descriptors(&self) -> Vec<WaitFd<'_>> {
        let manager = self.is_open.then_some(&self.manager);
        manager.into_iter().chain(&self.standby).map(WaitFd::readable).collect()
    }

    /// Sends a frame to the manager. A manager that is gone is noticed by the end of its stream.
    pub(super) fn send(&mut self, frame: &ToManager) {
        let _ = self.manager.send(frame);
    }

    /// The next event, without waiting.
    pub(super) fn poll(&mut self) -> Option<LinkEvent> {
        if let Some(standby) = &mut self.standby {
            match standby.try_receive() {
                TryReceive::Pending => {}
                TryReceive::Frame(FromManager::NewTerm { membership }) => {
                    return Some(LinkEvent::NewTerm(membership));
                }
                TryReceive::Frame(_) | TryReceive::Closed => {
                    self.standby = None;
                    return Some(LinkEvent::StandbyLost);
                }
            }
        }
        if !self.is_open {
            return None;
        }
        match self.manager.try_receive() {
            TryReceive::Pending => None,
            TryReceive::Frame(FromManager::Standby { address }) => Some(self.connect_to_standby(&address)),
            TryReceive::Frame(frame) => Some(LinkEvent::Frame(frame)),
            TryReceive::Closed => {
                self.is_open = false;
                Some(LinkEvent::ManagerLost)
            }
        }
    }

    /// Connects to a standby manager that has joined the run. It takes the place of one that was lost.
    fn connect_to_standby(&mut self, address: &str) -> LinkEvent {
        let (unit, data) = self.unit.clone();
        let deadline = Deadline::after(self.standby_timeout);
        self.standby = connect_to_standby(address, unit, data, &self.security, deadline);
        if self.standby.is_some() { LinkEvent::StandbyJoined } else { LinkEvent::StandbyLost }
    }

    /// The unit cannot follow the standby manager.
    pub(super) fn refuse(&mut self, why: &str) {
        if let Some(mut standby) = self.standby.take() {
            let _ = standby.send(&ToManager::Failed(why.to_owned()));
        }
    }

    /// Follows the standby manager: closes the stream to the manager, sends the state, and makes the control connection
    /// with a completion queue of its own.
    ///
    /// # Errors
    /// There is no connection; the stream counts as closed.
    pub(super) fn follow(
        &mut self,
        membership: &Membership,
        state: &ToManager,
        (device, waiter, options): (&Device, &CompletionWaiter, &MessageChannelOptions),
    ) -> Result<(Control, CompletionQueue), ProcessError> {
        self.is_open = false;
        self.manager = self.standby.take().ok_or_else(|| startup::unexpected_frame(Unit::Manager))?;
        self.manager.send(state).context("send the state to the standby manager")?;
        let queue = waiter.completion_queue(options.completions())?;
        let prepared = PreparedMessageChannel::new(device, &queue, options)?;
        let stream = self.manager.stream().context("use the standby manager's TCP stream")?;
        let (messages, _) = prepared.connect(stream, &[], Deadline::after(CONNECT_TIMEOUT))?;
        self.is_open = true;
        Ok((Control::new(messages, membership.term), queue))
    }
}

/// Connects to the standby manager. A unit without it works, but cannot follow it.
pub(super) fn connect_to_standby(
    address: &str,
    unit: Unit,
    data: Option<String>,
    security: &Security,
    deadline: Deadline,
) -> Option<Channel> {
    let connect = || -> Result<Channel, ProcessError> {
        let stream = startup::connect_to_unit(Unit::Manager, address, security, deadline)?;
        let mut channel = Channel::new(stream);
        channel.send(&ToManager::join(unit, data)).context("join the standby manager")?;
        Ok(channel)
    };
    connect().inspect_err(|error| tracing::warn!(%unit, %error, "no connection to the standby manager")).ok()
}
