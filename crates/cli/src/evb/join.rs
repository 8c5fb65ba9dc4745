//! `millstream evb join`: a run on the ranks of a job.

use std::error::Error;
use std::net::SocketAddr;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use millstream_evb::config::{LandingTarget, RunConfig};
use millstream_evb::process::child::Child;
use millstream_evb::process::launcher::Launcher;
use millstream_job::agent::{MakeCommand, RankAddress};
use millstream_job::{Inherited, StartRequest};

use super::{check, exit_code, launch, read, write_results};
use crate::args::EvbJoinOptions;
use crate::job;

pub(super) fn join(options: &EvbJoinOptions) -> Result<ExitCode, Box<dyn Error>> {
    if options.run.launcher.is_some() {
        return Err("--launcher and a job exclude each other: the ranks run the processes".into());
    }
    let rank = options.job.job()?;
    if rank.rank != 0 {
        let own = check(read(&options.run.config, options.run.replay)?, true)?;
        return job::serve(&rank, make_units(&own)?);
    }
    let mut config = check(read(&options.run.config, options.run.replay)?, true)?;
    let make = make_units(&config)?;
    let placement = Placement::of(&config, rank.ranks);
    let hub = job::gather(&rank, move |request| placement.rank(&request.arguments), make)?;
    if let Some(own) = hub.own_address()
        && config.listen.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback())
    {
        // Units of other hosts cannot reach the default address.
        config.listen = SocketAddr::new(own, 0).to_string();
    }
    let launcher = Launcher { program: std::env::current_exe()?, arguments: job::relay_arguments(&hub) };
    let report = launch(&config, &launcher);
    // The other ranks end in order, also after a failure.
    hub.finish();
    let report = report?;
    write_results(&report, &options.run)?;
    Ok(exit_code(&report))
}

/// Starts units that run this configuration and no other one.
fn make_units(own: &RunConfig) -> Result<Arc<MakeCommand>, Box<dyn Error>> {
    // A copy: the file may change during the run, before a unit is started again.
    let own = Inherited::new(&serde_json::to_vec(own)?)?;
    Ok(Arc::new(move |request: &StartRequest, _: RankAddress| unit_command(&own, request)))
}

/// A process of a run; this rank starts nothing else.
fn unit_command(own: &Inherited, request: &StartRequest) -> Option<Command> {
    Child::from_arguments(&request.arguments).ok()?;
    let mut command = Command::new(std::env::current_exe().ok()?);
    // No word of the request is an option.
    command.args(["evb", "unit", "--own"]).arg(own.path()).arg("--").args(&request.arguments);
    job::set_environment(&mut command, request);
    Some(command)
}

/// Which rank runs which process.
#[derive(Debug)]
struct Placement {
    ranks: usize,
    readouts: usize,
    /// Names of the builder units' cards, by index.
    cards: Vec<Option<String>>,
}

impl Placement {
    fn of(config: &RunConfig, ranks: usize) -> Placement {
        let cards = config.initial_builders().iter().map(|unit| match &unit.landing {
            LandingTarget::Card(card) => Some(card.name.clone()),
            LandingTarget::Host => None,
        });
        Placement { ranks, readouts: config.plan.readouts(), cards: cards.collect() }
    }

    /// The manager is at rank 0. Readout units, then builder units take the other ranks in turn. A card is at the rank of
    /// its builder unit, which maps its memory.
    fn rank(&self, arguments: &[String]) -> usize {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let position = match words[..] {
            // At the last rank, so that the host of the manager is not its own.
            ["standby", ..] => Some(self.ranks.saturating_sub(2)),
            ["readout", index, ..] => index.parse().ok(),
            ["builder", index, ..] => index.parse().ok().map(|index: usize| self.readouts + index),
            // The card of a run is named INSTANCE.CARD.
            ["card", name, ..] => self
                .cards
                .iter()
                .position(|card| card.as_ref().is_some_and(|card| name.ends_with(&format!(".{card}"))))
                .map(|index| self.readouts + index),
            _ => None,
        };
        match (position, self.ranks) {
            (None, _) | (_, 0 | 1) => 0,
            (Some(position), ranks) => 1 + position % (ranks - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_take_the_ranks_in_turn_and_cards_follow_their_units() {
        let cards = vec![None, Some("card1".to_owned())];
        let rank = |ranks, words: &str| {
            let placement = Placement { ranks, readouts: 2, cards: cards.clone() };
            placement.rank(&words.split(' ').map(str::to_owned).collect::<Vec<_>>())
        };
        assert_eq!([rank(5, "manager"), rank(5, "standby a:1"), rank(1, "standby a:1")], [0, 4, 0]);
        assert_eq!([rank(5, "readout 0 a:1"), rank(5, "readout 1 a:1")], [1, 2]);
        assert_eq!([rank(5, "builder 0 a:1"), rank(5, "builder 1 a:1")], [3, 4]);
        assert_eq!(rank(5, "card camera-77.card1 4096 20"), 4);
        assert_eq!([rank(3, "builder 0 a:1"), rank(3, "builder 1 a:1")], [1, 2]);
        assert_eq!(rank(1, "builder 1 a:1"), 0);
        assert_eq!(rank(3, "card unknown 4096 20"), 0);
    }
}
