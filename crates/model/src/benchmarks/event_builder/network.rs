//! What the units ask of a network with simulated time: transfers, control messages and timers.

use crate::engine::Picos;
use millstream_evb_core::{BuIndex, Immediate, RuIndex, Unit};

/// A batch on its way from a readout unit to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) from: u16,
    pub(super) to: u16,
    pub(super) immediate: Immediate,
}

impl Transfer {
    /// As a packet tag.
    pub(super) fn tag(self) -> u64 {
        u64::from(self.from) << 48 | u64::from(self.to) << 32 | u64::from(self.immediate.encode())
    }

    pub(super) fn from_tag(tag: u64) -> Transfer {
        let immediate = Immediate::decode(tag as u32);
        Transfer { from: (tag >> 48) as u16, to: (tag >> 32) as u16, immediate }
    }

    /// Whether source and target are the same node.
    pub(super) fn is_local(self) -> bool {
        self.from == self.to
    }
}

/// Sender or receiver of control messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlEndpoint {
    Manager,
    Node(u16),
}

/// The network between the units, with simulated time.
pub(super) trait NetworkModel {
    /// Simulated time.
    fn now(&self) -> Picos;
    /// Sends a transfer; calls [`super::units::Units::arrived`], then [`super::units::Units::completed`].
    fn transfer(&mut self, transfer: Transfer, bytes: u32);
    /// Sends a batch of control messages after a delay; calls [`super::units::Units::control_received`].
    fn control(
        &mut self,
        from: ControlEndpoint,
        to: ControlEndpoint,
        after: Picos,
        bytes: u32,
        control_batch: u32,
    );
    /// Calls [`super::units::Units::timer_expired`] after a delay.
    fn set_timer(&mut self, after: Picos, event: TimerEvent);
}

/// Timers of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimerEvent {
    /// The manager's turn ends, or the next one begins.
    ManagerTurn,
    /// The events of one more batch are taken.
    Taken,
    /// A builder unit's kernel has processed the batch of a slot.
    Built(u16, u16),
    /// A unit's deadline; the unit may have moved it meanwhile.
    Deadline(Unit),
    /// The accepted events of a slot's batch are stored.
    Stored(u16, u16),
    /// The operator requests a stop.
    Stop,
}

impl TimerEvent {
    /// As a timer token.
    pub(super) fn token(self) -> u64 {
        let (kind, a, b) = match self {
            TimerEvent::ManagerTurn => (0u64, 0, 0),
            TimerEvent::Taken => (1, 0, 0),
            TimerEvent::Built(builder, slot) => (2, builder, slot),
            TimerEvent::Deadline(Unit::Manager) => (3, 0, 0),
            TimerEvent::Deadline(Unit::Readout(ru)) => (4, ru.0, 0),
            TimerEvent::Deadline(Unit::Builder(bu)) => (5, bu.0, 0),
            TimerEvent::Stop => (6, 0, 0),
            TimerEvent::Stored(builder, slot) => (7, builder, slot),
        };
        kind << 32 | u64::from(a) << 16 | u64::from(b)
    }

    pub(super) fn from_token(token: u64) -> TimerEvent {
        let (a, b) = ((token >> 16) as u16, token as u16);
        match token >> 32 {
            0 => TimerEvent::ManagerTurn,
            1 => TimerEvent::Taken,
            2 => TimerEvent::Built(a, b),
            3 => TimerEvent::Deadline(Unit::Manager),
            4 => TimerEvent::Deadline(Unit::Readout(RuIndex(a))),
            5 => TimerEvent::Deadline(Unit::Builder(BuIndex(a))),
            7 => TimerEvent::Stored(a, b),
            _ => TimerEvent::Stop,
        }
    }
}
