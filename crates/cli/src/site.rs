//! `millstream site`: validation and drawings of site files.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use millstream_site::{draw, load};

use crate::args::SiteCommand;

pub(crate) fn run(command: &SiteCommand) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        SiteCommand::Check { files } => {
            for file in files {
                let site = load(file)?;
                let devices: usize = site.hosts.iter().map(|host| host.devices.len()).sum();
                println!(
                    "{}: {}: {} hosts, {devices} devices in PCIe trees, {} switches, {} links, {} tori, \
                     {} network cards",
                    file.display(),
                    site.name,
                    site.hosts.len(),
                    site.switches.len(),
                    site.links.len(),
                    site.tori.len(),
                    site.cards.len(),
                );
            }
        }
        SiteCommand::Show { file, out } => {
            let picture = draw::draw(&load(file)?);
            let default = || PathBuf::from(file.file_stem().unwrap_or_default()).with_extension("svg");
            let out = out.clone().unwrap_or_else(default);
            millstream_report::save(&out, &picture)?;
            println!("{}", out.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}
