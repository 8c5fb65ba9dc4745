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
        *fork::get_or_init(&POLICY, || {
            let Ok(text) = std::env::var("MILLSTREAM_MOVE") else { return Self::OnceUsed };
            Self::parse(&text).unwrap_or_else(|| {
                tracing::warn!(
                    "MILLSTREAM_MOVE={text} is none of 0, used, register and always; used is taken"
                );
                Self::OnceUsed
            })
        })
    }

    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "0" => Self::Never,
            "used" => Self::OnceUsed,
            "register" => Self::AtRegistration,
            "always" => Self::Always,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::MovePolicy;

    #[test]
    fn every_documented_word_is_a_policy_and_no_other() {
        let words = ["0", "used", "register", "always"];
        let policies: Vec<_> = words.into_iter().map(MovePolicy::parse).collect();
        use MovePolicy::{Always, AtRegistration, Never, OnceUsed};
        assert_eq!(policies, [Never, OnceUsed, AtRegistration, Always].map(Some));
        assert_eq!(["", "1", "Register", "never"].map(MovePolicy::parse), [None; 4]);
    }
}
