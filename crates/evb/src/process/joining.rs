//! The manager's side of a unit that joins a run in progress.
//!
//! ```text
//! unit                                manager                          peers
//!  │ ── Join: unit, address ───────────► │
//!  │ ◄── Welcome, or Refused ─────────── │
//!  │ ── Prepared, or Failed ───────────► │
//!  │ ═══ control connection ════════════ │
//!  │                                     │ ── Connect: builder unit ─► │  if a builder unit joins
//!  │ ═══ readout to builder: data ═══════════════════════════════════  │
//!  │ ── Ready ─────────────────────────► │ ══ Joined ════════════════► │  if a readout unit joins
//!  │ ◄── Start: the units of the run ─── │
//! ```
//!
//! A standby manager joins at once: it is welcome, and gets a copy of the manager's state; the manager names it to all units.
//!
//! One unit joins at a time. If a unit is lost or joins meanwhile, the joining unit is refused and may be started again.
//! The run goes on all the while: the manager waits for a joining unit only while both make the control connection.

use super::admission::Admission;
use super::control::Control;
use super::rendezvous::{JoinRequest, Unidentified};
use super::startup::{self, Channel, FromManager, ToManager, TryReceive};
use crate::config::RunConfig;
use crate::core::manager::Manager;
use crate::core::recovery::Membership;
use crate::core::{RuIndex, Unit};
use millstream_rdma::connect::Listener;
use millstream_rdma::message::PreparedMessageChannel;
use millstream_rdma::{CompletionQueue, Deadline, Device, WaitFd};
use std::time::Duration;

/// Longest time that the manager waits for one control connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Units that want to join.
pub(super) struct Joining<'a> {
    listener: &'a Listener,
    unidentified: Unidentified,
    unit: Option<JoiningUnit>,
    /// A standby manager that is welcome, and where it listens.
    standby: Option<(Channel, String)>,
}

/// A unit that is joining.
struct JoiningUnit {
    /// Its index.
    unit: Unit,
    channel: Channel,
    /// Where a builder unit accepts data connections.
    data: Option<String>,
    /// The units of the run when it came.
    membership: Membership,
    /// Once it is prepared.
    control: Option<Control>,
    deadline: Deadline,
}

/// A unit that has joined, with its connections. It waits for its start.
pub(super) struct JoinedUnit {
    pub(super) unit: Unit,
    pub(super) channel: Channel,
    pub(super) control: Control,
    pub(super) data: Option<String>,
    pub(super) membership: Membership,
}

/// What happened to joining units.
pub(super) enum JoinEvent {
    /// The present readout units have to connect to this builder unit.
    Connect {
        /// Its index.
        unit: Unit,
        /// Where it accepts connections.
        address: String,
    },
    /// A standby manager has joined.
    Standby {
        /// Its stream.
        channel: Channel,
        /// Where it listens.
        address: String,
    },
    /// A unit has joined.
    Joined(Box<JoinedUnit>),
}

/// What a unit joins.
pub(super) struct Joinable<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) core: &'a mut Manager,
    pub(super) device: &'a Device,
    pub(super) queue: &'a CompletionQueue,
    /// Where the builder units accept data connections, by index; `None` for those that are not there.
    pub(super) builders: &'a [Option<String>],
    /// The stream of the standby manager, and where it listens.
    pub(super) standby: &'a mut Option<(Channel, String)>,
}

impl<'a> Joining<'a> {
    pub(super) fn new(listener: &'a Listener, admission: &Admission) -> Joining<'a> {
        Joining { listener, unidentified: Unidentified::new(admission), unit: None, standby: None }
    }

    /// Descriptors to wait for.
    pub(super) fn descriptors(&self) -> Vec<WaitFd<'_>> {
        let mut all = vec![WaitFd::readable(self.listener)];
        all.extend(self.unidentified.descriptors());
        all.extend(self.unit.iter().map(|unit| WaitFd::readable(&unit.channel)));
        all
    }

    /// Takes what has arrived; call it until it returns `None`.
    pub(super) fn progress(&mut self, run: &mut Joinable<'_>) -> Option<JoinEvent> {
        self.unidentified.accept(self.listener, Deadline::after(Duration::ZERO));
        for request in self.unidentified.take_requests(&run.config.plan) {
            self.admit(request, run);
        }
        if let Some((channel, address)) = self.standby.take() {
            return Some(JoinEvent::Standby { channel, address });
        }
        let joining = self.unit.as_mut()?;
        if joining.deadline.passed() {
            tracing::warn!(unit = %joining.unit, "a unit did not join in time");
            self.unit = None;
            return None;
        }
        match joining.channel.try_receive() {
            TryReceive::Pending => None,
            TryReceive::Frame(ToManager::Prepared) if joining.control.is_none() => self.connect(run),
            TryReceive::Frame(ToManager::Ready) if joining.control.is_some() => self.start(run),
            TryReceive::Frame(ToManager::Failed(why)) => {
                tracing::warn!(unit = %joining.unit, why, "a unit could not join");
                self.unit = None;
                None
            }
            TryReceive::Frame(_) | TryReceive::Closed => {
                tracing::warn!(unit = %joining.unit, "a unit ended before it joined");
                self.unit = None;
                None
            }
        }
    }

    /// Welcomes a unit, or refuses it.
    fn admit(&mut self, request: JoinRequest, run: &mut Joinable<'_>) {
        let JoinRequest { mut channel, version, unit, data, .. } = request;
        let mut refuse = |why: String, try_again| {
            tracing::warn!(%unit, why, "a unit was refused");
            // Errors are ignored: the unit sees the end of the stream.
            let _ = channel.send(&FromManager::Refused { why, try_again });
        };
        if !startup::is_our_version(&version) {
            return refuse(format!("it has version {version:?}; start all units from one build"), false);
        }
        if self.unit.is_some() || self.standby.is_some() {
            return refuse("another unit joins at the moment".to_owned(), true);
        }
        if unit == Unit::Manager {
            return match refusal_of_standby(run) {
                Some((why, try_again)) => refuse(why.to_owned(), try_again),
                None => self.admit_standby(channel, data, run.config),
            };
        }
        let Some(member) = run.core.join_candidate(unit) else {
            let has_restart = run.core.has_restart(unit);
            let why = match has_restart {
                true => "it is in the run",
                false => "it may not join again (recovery.restarts), or the run ends",
            };
            return refuse(why.to_owned(), has_restart);
        };
        let membership = run.core.membership();
        let is_present = |bu: usize| !membership.absent_builders.iter().any(|absent| absent.index() == bu);
        let builders = run.builders.iter().enumerate();
        let welcome = FromManager::Welcome {
            config: Box::new(run.config.clone()),
            unit: member,
            builders: builders.map(|(bu, address)| address.clone().filter(|_| is_present(bu))).collect(),
            readouts: present_readouts(&membership),
            standby: run.standby.as_ref().map(|(_, address)| address.clone()),
        };
        if channel.send(&welcome).is_ok() {
            let deadline = Deadline::after(startup::timeout(run.config));
            self.unit =
                Some(JoiningUnit { unit: member, channel, data, membership, control: None, deadline });
        }
    }

    /// Welcomes a standby manager. The manager waits no longer for it than for the one at the start.
    fn admit_standby(&mut self, mut channel: Channel, address: Option<String>, config: &RunConfig) {
        let welcome = FromManager::welcome_standby(config);
        let is_welcome =
            channel.set_send_timeout(config.plan.timeout / 4).and_then(|()| channel.send(&welcome)).is_ok();
        self.standby = address.filter(|_| is_welcome).map(|address| (channel, address));
    }

    /// Makes the control connection.
    fn connect(&mut self, run: &Joinable<'_>) -> Option<JoinEvent> {
        let mut joining = self.unit.take()?;
        let deadline = Deadline::after(CONNECT_TIMEOUT.min(run.config.plan.timeout / 4));
        let options = super::control_options(run.config);
        let prepared = PreparedMessageChannel::new(run.device, run.queue, &options).ok()?;
        let messages = prepared.connect(joining.channel.stream().ok()?, &[], deadline);
        let (messages, _) = match messages {
            Ok(connected) => connected,
            Err(error) => {
                tracing::warn!(unit = %joining.unit, %error, "no control connection to a joining unit");
                return None;
            }
        };
        joining.control = Some(Control::new(messages, run.core.term()));
        let connect = joining.data.clone().map(|address| JoinEvent::Connect { unit: joining.unit, address });
        self.unit = Some(joining);
        connect
    }

    /// The unit joins, if the run has not changed.
    fn start(&mut self, run: &mut Joinable<'_>) -> Option<JoinEvent> {
        let JoiningUnit { unit, mut channel, data, membership, control, .. } = self.unit.take()?;
        let now = run.core.membership();
        let is_same =
            now.readouts == membership.readouts && now.absent_builders == membership.absent_builders;
        let joined = if is_same { run.core.handle_joined(unit) } else { None };
        let Some(membership) = joined else {
            let why = "the units of the run have changed meanwhile".to_owned();
            let _ = channel.send(&FromManager::Refused { why, try_again: false });
            return None;
        };
        let control = control?;
        Some(JoinEvent::Joined(Box::new(JoinedUnit { unit, channel, control, data, membership })))
    }
}

/// Why a standby manager cannot join, and whether it may come again soon.
fn refusal_of_standby(run: &mut Joinable<'_>) -> Option<(&'static str, bool)> {
    // It sends nothing.
    let is_open = |(channel, _): &mut (Channel, String)| {
        matches!(channel.try_receive::<ToManager>(), TryReceive::Pending)
    };
    match run.core.admits_standby() {
        false => Some(("the run has no standby manager (recovery.standby), or it ends", false)),
        true => run.standby.as_mut().is_some_and(is_open).then_some(("the run has a standby manager", true)),
    }
}

/// The readout units that are there.
fn present_readouts(membership: &Membership) -> Vec<RuIndex> {
    membership.readouts.iter().filter(|member| !member.is_lost).map(|member| member.index).collect()
}
