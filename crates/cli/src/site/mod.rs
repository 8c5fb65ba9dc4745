//! `millstream site`: validation, drawings, keys and processes of sites.

mod keys;
#[cfg(feature = "torus")]
mod live;
mod manifests;
#[cfg(feature = "torus")]
mod up;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use millstream_rdma::device::DeviceSelector;
use millstream_site::{Site, draw, load};

use crate::args::SiteCommand;

#[cfg_attr(not(feature = "torus"), allow(unused_variables, unused_mut, reason = "for live sites only"))]
pub(crate) fn run(
    command: &SiteCommand,
    device: Option<&DeviceSelector>,
) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        SiteCommand::Check {
            files,
            #[cfg(feature = "torus")]
            live,
        } => {
            let mut agree = true;
            for file in files {
                let site = load(file)?;
                describe(&file.display().to_string(), &site);
                #[cfg(feature = "torus")]
                if *live {
                    agree &= live::check(&site, file, device)?;
                }
            }
            return Ok(if agree { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        SiteCommand::Show { file, out } => {
            let picture = draw::draw(&load(file)?);
            let default = || PathBuf::from(file.file_stem().unwrap_or_default()).with_extension("svg");
            let out = out.clone().unwrap_or_else(default);
            millstream_report::save(&out, &picture)?;
            println!("{}", out.display());
        }
        #[cfg(feature = "torus")]
        SiteCommand::Up { file } => return up::run(&load(file)?, file, device),
        SiteCommand::Keys(options) => keys::run(options)?,
        SiteCommand::Manifests(options) => manifests::run(options)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn describe(file: &str, site: &Site) {
    let devices: usize = site.hosts.iter().map(|host| host.devices.len()).sum();
    println!(
        "{file}: {}: {} hosts, {devices} devices in PCIe trees, {} switches, {} links, {} tori, {} network cards, \
         {} event builders",
        site.name,
        site.hosts.len(),
        site.switches.len(),
        site.links.len(),
        site.tori.len(),
        site.cards.len(),
        site.event_builders.len(),
    );
}
