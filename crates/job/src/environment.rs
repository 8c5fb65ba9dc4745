//! Rank, number of ranks and meeting point of a job.

use std::path::PathBuf;

use crate::error::JobError;
use crate::nodelist::first_host;

/// Part of the key, if it is set: a secret of the job.
pub(crate) const ENV_SECRET: &str = "MILLSTREAM_JOB_SECRET";
/// The meeting point, as `--at`.
const ENV_RENDEZVOUS: &str = "MILLSTREAM_RENDEZVOUS";

/// First port and number of ports of meeting points; below the ports that systems choose themselves.
const PORTS: (u16, u16) = (20_000, 12_000);

/// Where the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// Rank 0 listens at this address.
    Address {
        /// Host name or address.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// Rank 0 writes its address to this file, which all ranks can read.
    File(PathBuf),
}

/// This process as a rank of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Identifies the job: ranks with another key are refused.
    pub key: String,
    /// Where the ranks meet.
    pub rendezvous: Rendezvous,
}

/// Variables of one launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The first one that is set counts.
    ranks: &'static [&'static str],
    /// Identify the job; they are the same in all ranks, and differ from those of any other job.
    key: &'static [&'static str],
}

/// In this order: `mpirun` inside of a Slurm allocation sets its own variables beside those of Slurm.
const LAUNCHERS: [Launcher; 3] = [
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: &["OMPI_COMM_WORLD_SIZE"],
        key: &["PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"],
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        ranks: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        key: &["SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
    // Hydra, MPICH's launcher, sets no variable with a name of the job.
    Launcher { name: "PMI", rank: "PMI_RANK", ranks: &["PMI_SIZE"], key: &["PMI_JOBID"] },
];

impl Job {
    /// The job from options, and what they leave open from the environment.
    ///
    /// # Errors
    /// [`JobError`] if this process is not a rank of a job, or a value is invalid.
    pub fn from_environment(
        rank: Option<usize>,
        ranks: Option<usize>,
        at: Option<&str>,
    ) -> Result<Job, JobError> {
        Job::from_lookup(rank, ranks, at, |name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_lookup(
        rank: Option<usize>,
        ranks: Option<usize>,
        at: Option<&str>,
        get: impl Fn(&str) -> Option<String>,
    ) -> Result<Job, JobError> {
        let launcher = LAUNCHERS.iter().find(|launcher| get(launcher.rank).is_some());
        let rank = match (rank, launcher) {
            (Some(rank), _) => rank,
            (None, Some(launcher)) => number(launcher.rank, &get)?,
            (None, None) => return Err(JobError::NotAJob),
        };
        let ranks = match (ranks, launcher) {
            (Some(ranks), _) => ranks,
            (None, Some(launcher)) => {
                let set = launcher.ranks.iter().find(|name| get(name).is_some());
                number(set.unwrap_or(&launcher.ranks[0]), &get)?
            }
            (None, None) => return Err(JobError::NotAJob),
        };
        if rank >= ranks {
            let reason = format!("the job has {ranks} ranks, 0 to {}", ranks.saturating_sub(1));
            return Err(JobError::Value { name: "rank".to_owned(), value: rank.to_string(), reason });
        }
        let mut key: Vec<String> = match launcher {
            Some(launcher) => launcher.key.iter().filter_map(|name| get(name)).collect(),
            None => Vec::new(),
        };
        key.extend(get(ENV_SECRET));
        let key = key.join(".");
        let at = at.map(str::to_owned).or_else(|| get(ENV_RENDEZVOUS));
        let rendezvous = match (at, launcher) {
            (Some(at), _) => explicit(&at)?,
            (None, Some(launcher)) => derived(launcher, ranks, &key, &get)?,
            (None, None) => return Err(JobError::NotAJob),
        };
        Ok(Job { rank, ranks, key, rendezvous })
    }
}

fn number(name: &str, get: &impl Fn(&str) -> Option<String>) -> Result<usize, JobError> {
    let value = get(name).unwrap_or_default();
    value.parse().map_err(|_| JobError::Value {
        name: name.to_owned(),
        value,
        reason: "not a number; give --rank and --ranks".to_owned(),
    })
}

fn explicit(at: &str) -> Result<Rendezvous, JobError> {
    if let Some(path) = at.strip_prefix("file:") {
        return Ok(Rendezvous::File(path.into()));
    }
    let address = at.rsplit_once(':').and_then(|(host, port)| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        (!host.is_empty()).then_some(Rendezvous::Address { host: host.to_owned(), port: port.parse().ok()? })
    });
    address.ok_or_else(|| JobError::Value {
        name: "at".to_owned(),
        value: at.to_owned(),
        reason: "neither HOST:PORT nor file:PATH".to_owned(),
    })
}

/// The meeting point from the launcher's variables: this host if all ranks are here, else the first host of the step.
fn derived(
    launcher: &Launcher,
    ranks: usize,
    key: &str,
    get: &impl Fn(&str) -> Option<String>,
) -> Result<Rendezvous, JobError> {
    // Ranks of another job of the same kind would meet ours.
    if key.is_empty() {
        return Err(JobError::NoKey { launcher: launcher.name });
    }
    let port = PORTS.0 + (hash(key) % u64::from(PORTS.1)) as u16;
    let is = |name: &str, value: usize| get(name).is_some_and(|text| text == value.to_string());
    let is_local = match launcher.name {
        "Open MPI" => is("OMPI_COMM_WORLD_LOCAL_SIZE", ranks),
        "PMI" => is("MPI_LOCALNRANKS", ranks),
        _ => ranks == 1 || is("SLURM_STEP_NUM_NODES", 1),
    };
    if is_local {
        return Ok(Rendezvous::Address { host: "127.0.0.1".to_owned(), port });
    }
    let Some(list) = get("SLURM_STEP_NODELIST").filter(|_| launcher.name == "Slurm") else {
        return Err(JobError::NoMeetingPoint { launcher: launcher.name });
    };
    match first_host(&list) {
        Some(host) => Ok(Rendezvous::Address { host, port }),
        None => Err(JobError::Value {
            name: "SLURM_STEP_NODELIST".to_owned(),
            value: list,
            reason: "not a list of hosts; give --at HOST:PORT".to_owned(),
        }),
    }
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(variables: &[(&str, &str)], at: Option<&str>) -> Result<Job, JobError> {
        Job::from_lookup(None, None, at, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn each_launcher_is_understood() {
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_NTASKS", "9"),
            ("SLURM_JOB_ID", "17"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_NODELIST", "n[1-2]"),
        ];
        let found = job(&slurm, None).unwrap();
        assert_eq!((found.rank, found.ranks, found.key.as_str()), (3, 4, "17.0"));
        assert!(
            matches!(&found.rendezvous, Rendezvous::Address { host, port: 20_000..32_000 } if host == "n1")
        );

        // mpirun inside of the allocation: its variables count.
        let both: Vec<_> = slurm
            .into_iter()
            .chain([
                ("OMPI_COMM_WORLD_RANK", "1"),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                ("PMIX_NAMESPACE", "77"),
            ])
            .collect();
        let found = job(&both, None).unwrap();
        assert_eq!((found.rank, found.ranks, found.key.as_str()), (1, 2, "77"));
        assert!(matches!(&found.rendezvous, Rendezvous::Address { host, .. } if host == "127.0.0.1"));

        let hydra = [("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("MPI_LOCALNRANKS", "1")];
        assert_eq!(job(&hydra, Some("[::1]:80")).unwrap().rendezvous, explicit("[::1]:80").unwrap());
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let text = |variables: &[(&str, &str)], at| job(variables, at).unwrap_err().to_string();
        assert!(text(&[], None).contains("srun or mpirun"));
        let over = [("PMI_RANK", "4"), ("PMI_SIZE", "4")];
        assert!(text(&over, None).contains("4 ranks, 0 to 3"));
        let far = [
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("PMIX_NAMESPACE", "77"),
        ];
        assert!(text(&far, None).contains("Open MPI does not say where rank 0 runs"));
        assert!(text(&far, Some("nowhere")).contains("at=\"nowhere\""));
        assert!(text(&[("SLURM_PROCID", "x")], None).contains("SLURM_PROCID=\"x\""));
    }

    #[test]
    fn jobs_of_a_launcher_without_names_for_them_have_a_secret_or_an_address() {
        let hydra =
            [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2"), ("HYDI_CONTROL_FD", "7")];
        assert!(matches!(job(&hydra, None), Err(JobError::NoKey { launcher: "PMI" })));
        assert!(job(&hydra, Some("127.0.0.1:7000")).is_ok());
        let with = |secret| {
            let variables: Vec<_> = hydra.into_iter().chain([(ENV_SECRET, secret)]).collect();
            job(&variables, None).unwrap()
        };
        assert_eq!(with("a"), with("a"));
        assert_ne!(with("a").rendezvous, with("b").rendezvous);
    }
}
