//! When pages may move.

use std::sync::OnceLock;

use crate::fork;

/// When pages may move (`MILLSTREAM_MOVE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MovePolicy {
    /// `0`: never.
    Never,
    /// The default, and `used`: when peers have used the region much, if no access can be lost.
    OnceUsed,
    /// `register`: likewise, but at registration.
    AtRegistration,
    /// `always`: at registration, also when system calls of other threads can fail with EFAULT.
    Always,
}

impl MovePolicy {
    /// The policy of this process. A forked child keeps it.
    pub(super) fn get() -> Self {
        static POLICY: OnceLock<MovePolicy> = OnceLock::new();
        *fork::get_or_init(&POLICY, || match std::env::var("MILLSTREAM_MOVE").as_deref() {
            Ok("0") => Self::Never,
            Ok("always") => Self::Always,
            Ok("register") => Self::AtRegistration,
            _ => Self::OnceUsed,
        })
    }
}
