//! Errors of jobs.

use std::io;

/// Why a rank cannot take part in a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// No launcher has started this process.
    #[error(
        "this process is not a rank of a job: start it by srun or mpirun, or give --rank, --ranks and --at HOST:PORT"
    )]
    NotAJob,
    /// A variable of the launcher, or an option, has an invalid value.
    #[error("{name}={value:?}: {reason}")]
    Value {
        /// The variable or option.
        name: String,
        /// Its value.
        value: String,
        /// What is wrong.
        reason: String,
    },
    /// The environment does not say where rank 0 is.
    #[error(
        "{launcher} does not say where rank 0 runs; give --at HOST:PORT, or --at file:PATH on a shared file system"
    )]
    NoMeetingPoint {
        /// The launcher.
        launcher: &'static str,
    },
    /// The environment has nothing that tells this job from another one.
    #[error(
        "{launcher} gives the job no name, so its ranks could meet those of another job: set {} to a random value \
         for all ranks, or give --at HOST:PORT",
        crate::environment::ENV_SECRET
    )]
    NoKey {
        /// The launcher.
        launcher: &'static str,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen at {address}: {cause}; --at HOST:PORT chooses another address")]
    Listen {
        /// The address.
        address: String,
        /// The cause.
        cause: io::Error,
    },
    /// Rank 0 cannot be reached.
    #[error("rank 0 cannot be reached at {address}: {cause}")]
    Unreachable {
        /// The address.
        address: String,
        /// The cause.
        cause: io::Error,
    },
    /// What listens at the meeting point does not know the key of the job.
    #[error(
        "{address} is not rank 0 of this job: it does not know the key. Another program has taken the port, or the ranks \
         have different values of MILLSTREAM_JOB_SECRET; --at HOST:PORT chooses another address"
    )]
    OtherJob {
        /// The address.
        address: String,
    },
    /// Ranks did not come.
    #[error("{} of {ranks} ranks did not come within {seconds} s: {}", missing.len(), list(missing))]
    Missing {
        /// Their numbers.
        missing: Vec<usize>,
        /// Ranks of the job.
        ranks: usize,
        /// Time that they had.
        seconds: u64,
    },
    /// The hub ended.
    #[error("rank 0 has ended or was lost")]
    HubLost,
    /// An operation of the system failed.
    #[error("{what}: {cause}")]
    Os {
        /// The operation.
        what: String,
        /// The cause.
        cause: io::Error,
    },
}

impl JobError {
    pub(crate) fn os(what: impl Into<String>) -> impl FnOnce(io::Error) -> JobError {
        let what = what.into();
        move |cause| JobError::Os { what, cause }
    }
}

fn list(ranks: &[usize]) -> String {
    let shown: Vec<String> = ranks.iter().take(16).map(usize::to_string).collect();
    let rest = if ranks.len() > 16 { ", …" } else { "" };
    shown.join(", ") + rest
}
