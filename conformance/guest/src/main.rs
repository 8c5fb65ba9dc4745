//! Linux guests with the kernel's software RoCE adapter (rxe), as independent peers over packets.
//!
//! `run` builds a guest from Debian packages ([`packages`], [`image`]) and creates a network namespace with a
//! bridge ([`network`]). It boots the guests on the bridge ([`guest`]) and starts a command in the namespace.
//! That command calls `exec` to run programs inside a guest ([`exec`]). Everything ends with the command. The
//! main user is conformance/rxe/.
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
    /// Build the guest's kernel and initramfs, unless they are cached
    Build(ImageOptions),
    /// Boot guests, run a command in their network, and end them with it
    ///
    /// The command runs in its own network namespace, at 10.77.0.1 and fd77::1. The guests are 10.77.0.2,
    /// 10.77.0.3 … and fd77::2, fd77::3 …, with an Ethernet MTU of 4500, so a path MTU of 4096. The exit
    /// status is the command's. Needs root or unprivileged user namespaces.
    Run {
        #[command(flatten)]
        image: ImageOptions,
        /// Number of guests
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
        guests: u8,
        /// Add the files of this folder at the root of the guests
        #[arg(long, value_name = "FOLDER")]
        root: Option<PathBuf>,
        /// Memory of a guest (MiB); it also holds all files
        #[arg(long, value_name = "MIB", default_value_t = 320, value_parser = clap::value_parser!(u32).range(256..=8192))]
        memory: u32,
        /// Write the packets on the bridge to this file (with tcpdump)
        #[arg(long, value_name = "FILE")]
        pcap: Option<PathBuf>,
        /// The command
        #[arg(required = true, last = true)]
        command: Vec<String>,
    },
    /// Copy a program to /bin of all guests; for use inside `run`
    Put {
        /// The program
        file: PathBuf,
        /// Number of guests
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
        guests: u8,
    },
    /// Run a program in a guest; for use inside `run`
    ///
    /// Prints the output of the program and exits with its status. The program is killed when this process ends.
    Exec {
        /// Number of the guest, from 1
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
        guest: u8,
        /// The program and its arguments, as the guest's shell reads them
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

#[derive(Debug, Args)]
struct ImageOptions {
    /// Release of the guest's kernel, from Debian's packages
    #[arg(long, value_enum, default_value_t = Kernel::V6_12, env = "MILLSTREAM_GUEST_KERNEL")]
    kernel: Kernel,
    /// Folder that caches images
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
        Action::Build(options) => {
            let image = image::load_or_build(options.kernel, &options.cache)?;
            println!("{}\n{}", image.kernel.display(), image.initramfs.display());
            Ok(ExitCode::SUCCESS)
        }
        Action::Run { image: options, guests, root, memory, pcap, command } => {
            if !network::is_own() {
                // Packages are downloaded before the namespace is entered.
                image::load_or_build(options.kernel, &options.cache)?;
                return network::enter();
            }
            let image = image::load_or_build(options.kernel, &options.cache)?;
            let extended = root.map(|root| image.with_files(&root, &options.cache)).transpose()?;
            let image = extended.as_ref().map_or(&image, |(image, _)| image);
            let network = network::build(guests)?;
            let _capture = pcap.as_deref().map(network::capture).transpose()?;
            let mut all = Vec::new();
            for tap in &network {
                all.push(guest::Guest::start(image, memory, tap)?);
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
