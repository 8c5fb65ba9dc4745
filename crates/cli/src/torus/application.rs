//! Running applications: alone with threads as nodes, or as the program of `millstream torus run`.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, ValueEnum};
use millstream_application::{ApplicationError, FailAt, TorusApplication};
use millstream_fabric::{Fabric, OnCard};
use millstream_report::{eprint_line, save};
use millstream_torus::application::ENV_SOCKET;
use millstream_torus::direct::ENV_RENDEZVOUS;
use millstream_torus::{DirectNode, TorusNode};
use millstream_torus_core::{Dimensions, NodeNumber};
use serde::Serialize;

use crate::output::{print, print_line};

/// Memory of an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NodeMemory {
    /// The program's memory; its threads compute
    Host,
    /// Messages go from card to card; the program's threads compute
    CardMessages,
    /// All data are in card memory; a kernel of the card computes, if the application has one
    Card,
}

impl NodeMemory {
    /// Whether messages go from card to card.
    pub(super) fn has_card(self) -> bool {
        self != NodeMemory::Host
    }
}

pub(super) const NO_CARD: &str =
    "--memory card and card-messages need a node with a card: torus run --card NAME";

/// Options that all applications have.
#[derive(Debug, Args)]
pub(crate) struct ApplicationArguments {
    /// Nodes on each axis, as threads of this process; under `torus run` its dimensions apply [default: 1x1x1]
    #[arg(long, value_name = "XxYxZ")]
    pub(super) dimensions: Option<Dimensions>,
    /// Where the node's data are; cards need `torus run --card`
    #[arg(long, value_enum, default_value_t = NodeMemory::Host)]
    pub(super) memory: NodeMemory,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Also draw the result
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,
    /// Write checkpoints to this folder, which all nodes share
    #[arg(long, value_name = "FOLDER")]
    pub(super) checkpoint: Option<PathBuf>,
    /// Begin with the folder's checkpoint, written on any shape
    #[arg(long, requires = "checkpoint")]
    pub(super) resume: bool,
    /// Let a node fail at a step, to see what its loss does; a process kills itself
    #[arg(long, value_name = "NODE@STEP", value_parser = fail_at)]
    pub(super) fail: Option<FailAt>,
}

/// Reads a node and a step.
pub(super) fn fail_at(text: &str) -> Result<FailAt, String> {
    let expected = || format!("{text:?}: expected NODE@STEP, for example 3@20");
    let (node, step) = text.split_once('@').ok_or_else(expected)?;
    let number = |text: &str| u64::from_str(text).ok();
    let node = number(node).and_then(|node| u16::try_from(node).ok()).ok_or_else(expected)?;
    Ok(FailAt { node: NodeNumber(node), step: number(step).ok_or_else(expected)? })
}

/// Refuses a node that the torus does not have.
pub(super) fn check_fail(fail: Option<FailAt>, torus: Dimensions) -> Result<(), String> {
    match fail {
        Some(fail) if !torus.contains(fail.node) => {
            Err(format!("--fail {}@{}: a torus of {torus} has no {}", fail.node.0, fail.step, fail.node))
        }
        _ => Ok(()),
    }
}

/// Runs an application on the node of `torus run`, or on threads. Only one process of a torus gets the report.
pub(super) fn run<A: TorusApplication>(
    arguments: &ApplicationArguments,
    application: &A,
) -> Result<Option<A::Report>, Box<dyn Error>> {
    if std::env::var_os(ENV_SOCKET).is_some() {
        let node = TorusNode::from_environment()?;
        if arguments.memory.has_card() {
            let node = OnCard::new(node, 0).map_err(|error| format!("{error}; {NO_CARD}"))?;
            return on_this_node(arguments, application, node);
        }
        return on_this_node(arguments, application, node);
    }
    if arguments.memory.has_card() {
        return Err(NO_CARD.into());
    }
    if std::env::var_os(ENV_RENDEZVOUS).is_some() {
        return on_this_node(arguments, application, DirectNode::from_environment()?);
    }
    let torus = match arguments.dimensions {
        Some(torus) => torus,
        None => "1x1x1".parse()?,
    };
    check_fail(arguments.fail, torus)?;
    Ok(Some(application.run_on_threads(torus)?))
}

/// Runs an application on the node of this process.
fn on_this_node<A: TorusApplication>(
    arguments: &ApplicationArguments,
    application: &A,
    node: impl Fabric,
) -> Result<Option<A::Report>, Box<dyn Error>> {
    let torus = node.dimensions();
    if let Some(wanted) = arguments.dimensions.filter(|&wanted| wanted != torus) {
        return Err(
            format!("--dimensions {wanted}, but `torus run` has {torus}: leave the option out").into()
        );
    }
    check_fail(arguments.fail, torus)?;
    let is_first = node.here() == NodeNumber(0);
    match application.run(node) {
        Ok(report) => Ok(is_first.then_some(report)),
        Err(error @ ApplicationError::ToldToFail { .. }) => Err(fail(error)),
        Err(error) => Err(error.into()),
    }
}

/// Ends this process as a fault would if it is a node of a torus: it kills itself.
pub(super) fn fail(error: impl Error + 'static) -> Box<dyn Error> {
    if [ENV_SOCKET, ENV_RENDEZVOUS].into_iter().any(|name| std::env::var_os(name).is_some()) {
        eprint_line!("millstream: {error}");
        let this = rustix::process::getpid();
        if let Err(error) = rustix::process::kill_process(this, rustix::process::Signal::KILL) {
            return error.into();
        }
    }
    error.into()
}

/// Prints a report as JSON or as a table, and saves its picture.
pub(super) fn show(
    (json, svg): (bool, Option<&Path>),
    report: &impl Serialize,
    table: impl FnOnce() -> String,
    picture: impl FnOnce() -> String,
) -> Result<(), Box<dyn Error>> {
    let printed = match json {
        true => print_line!("{}", serde_json::to_string_pretty(report)?),
        false => print(format_args!("{}", table())),
    };
    if let Some(path) = svg {
        save(path, &picture())?;
    }
    Ok(printed?)
}
