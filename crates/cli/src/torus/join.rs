//! `millstream torus join`: a torus on the ranks of a job.

use std::error::Error;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use millstream_job::StartRequest;
use millstream_job::agent::RankAddress;
use millstream_rdma::device::DeviceSelector;
use millstream_torus::application::ENV_RANK;
use millstream_torus::key::ENV_KEY;

use super::{Network, TorusJoinOptions, run};
use crate::job;

/// Role of an application; the other roles are subcommands of `millstream torus`.
const APPLICATION: &str = "application";

pub(super) fn join(
    options: &TorusJoinOptions,
    device: Option<&DeviceSelector>,
) -> Result<ExitCode, Box<dyn Error>> {
    if options.run.launcher.is_some() {
        return Err("--launcher and a job exclude each other: the ranks run the processes".into());
    }
    if options.run.network == Network::Direct {
        return Err("--network direct runs on one host; a job has a torus of node processes".into());
    }
    let rank = options.job.job()?;
    let program = options.run.program.clone();
    let make =
        Arc::new(move |request: &StartRequest, address: RankAddress| command(&program, request, address));
    if rank.rank != 0 {
        return job::serve(&rank, make);
    }
    let ranks = rank.ranks;
    let hub = job::gather(&rank, move |request| node(request).unwrap_or(0) % ranks, make)?;
    let exe = std::env::current_exe()?;
    let relay = job::relay_arguments(&hub);
    let mut application: Vec<OsString> = vec![exe.clone().into()];
    application.extend(relay.iter().cloned());
    application.push(APPLICATION.into());
    let code = run::launcher(&options.run, device, exe, relay)
        .and_then(|launcher| run::run_with(&options.run, &launcher, &application));
    // The other ranks end in order, also after a failure.
    hub.finish();
    code
}

/// The node of a process; none of a supervisor.
fn node(request: &StartRequest) -> Option<usize> {
    let words = &request.arguments;
    if words.first().is_some_and(|role| role == APPLICATION) {
        let variable = request.environment.iter().find(|(name, _)| name == ENV_RANK)?;
        return variable.1.parse().ok();
    }
    let option = words.iter().position(|word| word == "--node")?;
    words.get(option + 1)?.parse().ok()
}

/// The program of this rank's own command line, or a process of the torus; nothing else.
fn command(program: &[OsString], request: &StartRequest, address: RankAddress) -> Option<Command> {
    let words = &request.arguments;
    let mut command = match words.first()?.as_str() {
        APPLICATION => {
            let (name, arguments) = program.split_first()?;
            let mut command = Command::new(name);
            command.args(arguments);
            command
        }
        role @ ("node" | "monitor" | "supervise") if has_keys_of_the_job(words) => {
            let mut command = Command::new(std::env::current_exe().ok()?);
            command.arg("torus").args(words).env_remove(ENV_KEY);
            let listens = words.iter().any(|word| word == "--listen");
            if role != "monitor" && !listens && !address.own.is_loopback() {
                command.args(["--listen", &SocketAddr::new(address.own, 0).to_string()]);
            }
            command
        }
        _ => return None,
    };
    job::set_environment(&mut command, request);
    Some(command)
}

/// Whether keys come at standard input: a false rank 0 names neither a file with a key of this user, nor a site file.
fn has_keys_of_the_job(words: &[String]) -> bool {
    let mut has_key = false;
    for (at, word) in words.iter().enumerate() {
        let (option, value) =
            word.split_once('=').map_or((&word[..], None), |(option, value)| (option, Some(value)));
        match option {
            "--key-file" | "--seventh-key-file" => {
                if value.or_else(|| words.get(at + 1).map(String::as_str)) != Some("-") {
                    return false;
                }
                has_key |= option == "--key-file";
            }
            "--site" => return false,
            _ => {}
        }
    }
    has_key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_starts_its_own_program_and_torus_processes_only() {
        let request = |words: &str, rank: &str| StartRequest {
            arguments: words.split(' ').map(str::to_owned).collect(),
            environment: vec![
                (ENV_RANK.to_owned(), rank.to_owned()),
                ("LD_PRELOAD".to_owned(), "x.so".to_owned()),
            ],
        };
        let address = RankAddress { own: [10, 0, 0, 7].into() };
        let program = ["./neighbours".into(), "8".into()];
        let made =
            |words: &str| command(&program, &request(words, "3"), address).map(|made| format!("{made:?}"));
        let application = made("application").unwrap();
        assert!(
            application.contains("\"./neighbours\" \"8\"") && !application.contains("x.so"),
            "{application}"
        );
        assert!(
            made("node --dimensions 2x1x1 --node 1 --key-file -")
                .unwrap()
                .contains("\"--listen\" \"10.0.0.7:0\"")
        );
        assert_eq!(made("run --dimensions 2x1x1 -- reboot"), None);
        for of_this_user in ["", "--key-file x", "--key-file=x", "--key-file - --seventh-key-file x"] {
            assert_eq!(
                made(&format!("node --dimensions 2x1x1 --node 1 {of_this_user}")),
                None,
                "{of_this_user}"
            );
        }
        assert_eq!(made("node --site site.toml --node 1 --key-file -"), None);
        assert_eq!(node(&request("node --node 5", "3")), Some(5));
        assert_eq!(node(&request("application", "3")), Some(3));
        assert_eq!(node(&request("supervise", "3")), None);
    }
}
