//! `millstream run` and `millstream env`: run unmodified verbs programs on the soft device.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum as _;
use millstream_rdma::{DeviceSelector, loader};

use crate::args::{EnvOptions, LinkOptions, PathArgument, RunOptions};
use millstream_link::config::{Faults, LINK_VARIABLE, PCAP_VARIABLE};

/// Preload library that emulates the device's files in sysfs and /dev (docs/rdma-cm.md).
const PRELOAD: &str = "libmillstream_preload.so";

pub(crate) fn run(options: &RunOptions, device: Option<&DeviceSelector>) -> Result<ExitCode, Box<dyn Error>> {
    let (program, arguments) = options.program.split_first().ok_or("no program given")?;
    let mut command = std::process::Command::new(program);
    command.args(arguments).envs(environment(options.no_preload, &options.link, device)?);
    // `exec` returns only if the program cannot be started.
    let cause = command.exec();
    Err(format!("cannot start {}: {cause}", program.display()).into())
}

pub(crate) fn print_environment(
    options: &EnvOptions,
    device: Option<&DeviceSelector>,
) -> Result<ExitCode, Box<dyn Error>> {
    for (name, value) in environment(options.no_preload, &options.link, device)? {
        let value = value.to_str().ok_or_else(|| format!("the value of {name} is not UTF-8"))?;
        println!("export {name}='{}'", value.replace('\'', "'\\''"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Environment variables for running a program on the soft device.
fn environment(
    no_preload: bool,
    link: &LinkOptions,
    device: Option<&DeviceSelector>,
) -> Result<Vec<(&'static str, OsString)>, Box<dyn Error>> {
    if let Some(other @ (DeviceSelector::Hardware | DeviceSelector::Named(_))) = device {
        return Err(format!("--device {other}: run and env are for programs on the soft device").into());
    }
    let libraries = library_dir()?;
    let mut variables = link_variables(link)?;
    if !no_preload {
        let preload = libraries.join(PRELOAD);
        if !preload.is_file() {
            return Err(format!("{} is missing (`make lib` builds it)", preload.display()).into());
        }
        // The dynamic linker knows no escape for its separators (ld.so(8)).
        if preload.as_os_str().as_bytes().iter().any(|byte| byte.is_ascii_whitespace() || *byte == b':') {
            return Err(format!(
                "{}: a path with a space or a colon cannot be preloaded; install the libraries elsewhere, or give --no-preload",
                preload.display()
            )
            .into());
        }
        // Last, because some libraries must be first.
        variables.push(("LD_PRELOAD", joined(std::env::var_os("LD_PRELOAD"), Some(preload.into()))));
    }
    variables.push(("LD_LIBRARY_PATH", joined(Some(libraries.into()), std::env::var_os("LD_LIBRARY_PATH"))));
    Ok(variables)
}

/// Variables for the path, polling, faults and captures. Faults are checked here, because the program ignores invalid ones.
fn link_variables(link: &LinkOptions) -> Result<Vec<(&'static str, OsString)>, Box<dyn Error>> {
    let fields = [
        ("drop", &link.drop),
        ("duplicate", &link.duplicate),
        ("reorder", &link.reorder),
        ("corrupt", &link.corrupt),
        ("mark", &link.mark),
        ("delay", &link.delay),
        ("seed", &link.seed),
        ("side", &link.side),
    ];
    let given: Vec<_> =
        fields.iter().filter_map(|(field, value)| Some(format!("{field}={}", value.as_ref()?))).collect();
    let mut variables = Vec::new();
    if !given.is_empty() {
        let text = given.join(",");
        text.parse::<Faults>()
            .map_err(|error| format!("--{}={:?}: {}", error.field, error.value, error.reason))?;
        variables.push((LINK_VARIABLE, text.into()));
    }
    let of_packets = if given.is_empty() { link.pcap.as_ref().map(|_| "--pcap") } else { Some("faults") };
    let path = match (&link.path, of_packets) {
        (Some(PathArgument::Shm), Some(option)) => {
            return Err(format!("--path shm has no packets, which {option} are for; use --path wire").into());
        }
        // Processes of one host would exchange no packets.
        (None, Some(_)) => Some(&PathArgument::Wire),
        (path, _) => path.as_ref(),
    };
    if let Some(word) = path.and_then(PathArgument::to_possible_value) {
        variables.push((loader::ENV_PATH, word.get_name().to_owned().into()));
    }
    if let Some(microseconds) = link.spin {
        variables.push(("MILLSTREAM_SPIN", microseconds.to_string().into()));
    }
    if let Some(path) = &link.pcap {
        // An absolute path, because the program may change its directory.
        variables.push((PCAP_VARIABLE, std::path::absolute(path)?.into()));
    }
    Ok(variables)
}

pub(crate) fn library_dir() -> Result<PathBuf, Box<dyn Error>> {
    loader::library_dir().ok_or_else(|| {
        let tried: Vec<_> = loader::search_path().iter().map(|p| p.display().to_string()).collect();
        format!(
            "the soft device's libibverbs.so.1 was not found (`make lib` builds it) in {}",
            tried.join(", ")
        )
        .into()
    })
}

/// Joins two search paths.
fn joined(first: Option<OsString>, second: Option<OsString>) -> OsString {
    let parts: Vec<_> = [first, second].into_iter().flatten().filter(|part| !part.is_empty()).collect();
    parts.join(OsStr::new(":"))
}
