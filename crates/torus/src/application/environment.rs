//! How the environment names a process's node.

use super::{AttachError, ENV_SOCKET, ENV_SOCKETS};

/// Variables in which process launchers give a process its rank: Open MPI, PMI and PMIx, Slurm, MVAPICH.
const RANKS: [&str; 6] = [
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "MV2_COMM_WORLD_RANK",
    "MILLSTREAM_TORUS_RANK",
];

/// Whether the environment names a node process.
#[must_use]
pub fn environment_names_a_node() -> bool {
    socket().is_ok()
}

/// The node process's address: given, or the one of the rank that a launcher such as `mpirun` gave to this process.
pub(super) fn socket() -> Result<String, AttachError> {
    if let Ok(socket) = std::env::var(ENV_SOCKET) {
        return Ok(socket);
    }
    let sockets = std::env::var(ENV_SOCKETS).map_err(|_| AttachError::NoEnvironment)?;
    let rank = RANKS.iter().find_map(|name| std::env::var(name).ok()).ok_or(AttachError::NoRank)?;
    Ok(of_rank(&sockets, &rank))
}

fn of_rank(sockets: &str, rank: &str) -> String {
    sockets.replace("{rank}", rank)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_rank_has_the_socket_of_its_node() {
        assert_eq!(super::of_rank("torus-00c0-{rank}", "7"), "torus-00c0-7");
    }
}
