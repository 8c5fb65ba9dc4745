//! Linux guests with the kernel's software RoCE adapter (rxe), for programs that want a peer which nobody here
//! wrote.
//!
//! `run` builds a guest from Debian packages ([`packages`], [`image`]), makes a network namespace with a bridge
//! ([`network`]), boots the guests on it ([`guest`]) and starts a command in that namespace; `exec`, called by
//! that command, runs programs inside a guest ([`exec`]). Everything ends with the command. conformance/rxe/
//! is the main user.
#![forbid(unsafe_code)]

mod cpio;
mod error;
mod exec;
mod guest;
mod image;
mod network;
mod packages;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::error::Error;
use crate::packages::Kernel;

/// Run a command beside Linux guests that have an rxe adapter
#[derive(Debug, Parser)]
#[command(name = "millstream-guest", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Build the guest's kernel and file system, or find them built
    Build(Of),
    /// Boot guests, run a command in their network, and end them with it
    ///
    /// The command runs in a network namespace of its own, at 10.77.0.1 and fd77::1. The guests are 10.77.0.2,
    /// 10.77.0.3 … and fd77::2, fd77::3 …, with an Ethernet MTU of 4500, so a path MTU of 4096. The exit status
    /// is the command's. Needs root, or user namespaces that anybody may make.
    Run {
        #[command(flatten)]
        of: Of,
        /// How many guests
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
        guests: u8,
        /// Write the packets on the bridge to this file (with tcpdump)
        #[arg(long, value_name = "FILE")]
        pcap: Option<PathBuf>,
        /// The command
        #[arg(required = true, last = true)]
        command: Vec<String>,
    },
    /// Put a program into all guests' /bin; for use inside of `run`
    Put {
        /// The program
        file: PathBuf,
        /// How many guests there are
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
        guests: u8,
    },
    /// Run a program in a guest; for use inside of `run`
    ///
    /// What it prints is printed here and its exit status is this one's. It is killed when this process ends.
    Exec {
        /// Which guest
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
        guest: u8,
        /// The program and its arguments, as the guest's shell reads them
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

#[derive(Debug, Args)]
struct Of {
    /// The guest's kernel, of Debian's packages for this release
    #[arg(long, value_enum, default_value_t = Kernel::V6_12, env = "MILLSTREAM_GUEST_KERNEL")]
    kernel: Kernel,
    /// Where packages and images are kept for the next time
    #[arg(long, default_value = "target/guest", env = "MILLSTREAM_GUEST_CACHE", value_name = "FOLDER")]
    cache: PathBuf,
}

fn main() -> ExitCode {
    match run(Arguments::parse().action) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("millstream-guest: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(action: Action) -> Result<ExitCode, Error> {
    match action {
        Action::Build(of) => {
            let image = image::ready(of.kernel, &of.cache)?;
            println!("{}\n{}", image.kernel.display(), image.initramfs.display());
            Ok(ExitCode::SUCCESS)
        }
        Action::Run { of, guests, pcap, command } => {
            if !network::is_own() {
                // Packages come over the network that there is outside.
                image::ready(of.kernel, &of.cache)?;
                return network::enter();
            }
            let image = image::ready(of.kernel, &of.cache)?;
            let network = network::build(guests)?;
            let _capture = pcap.as_deref().map(network::capture).transpose()?;
            let mut all = Vec::new();
            for tap in &network {
                all.push(guest::Guest::start(&image, tap)?);
            }
            for guest in &mut all {
                guest.wait_until_ready()?;
            }
            guest::run(&command, &mut all)
        }
        Action::Put { file, guests } => exec::put(&file, guests),
        Action::Exec { guest, command } => exec::run(guest, &command),
    }
}
