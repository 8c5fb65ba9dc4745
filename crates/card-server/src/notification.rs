//! Notifications from the parts of a card to the holder of its lease.

use millstream_card_abi::codes::MessageKind;
use millstream_card_abi::command::Cause;

/// Delivers notifications to the holder of the lease.
pub(crate) trait NotificationSink: Send + Sync {
    /// Notifies the holder of the lease; must not block.
    fn notify(&self, notification: Notification);
}

/// An event that is reported to the holder; the content of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notification {
    pub(crate) kind: MessageKind,
    pub(crate) region: u32,
    pub(crate) cause: Option<Cause>,
    pub(crate) sequence: u64,
    pub(crate) values: [u64; 4],
}

impl Notification {
    /// A notification about the card as a whole.
    pub(crate) fn of_card(kind: MessageKind, sequence: u64, values: [u64; 4]) -> Notification {
        Notification { kind, region: 0, cause: None, sequence, values }
    }
}
