//! `millstream model calibrate --measurements`.

use std::error::Error;
use std::path::{Path, PathBuf};

use millstream_model::fit_site::{DeviceFile, Places, SiteFitReport, fit_site};
use millstream_model::measurements;

use super::output::{save, takes_standard_output};
use super::parameters_of;
use crate::args::model::Settings;

pub(super) fn run(
    settings: &Settings,
    files: &[PathBuf],
    site: &Path,
    (client, server, disk): (Option<&str>, Option<&str>, Option<&str>),
    out: Option<&Path>,
) -> Result<(), Box<dyn Error>> {
    let site_name = site.display();
    let site = millstream_site::load(site)?;
    let host = |i: usize| site.hosts.get(i).map(|host| host.name.as_str());
    // Disks need no second host.
    let between = client.or(host(0)).zip(server.or(host(1)));
    let mut all = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        all.extend(measurements::parse(&file.display().to_string(), &text)?);
    }
    let parameters = parameters_of(settings, &site)?;
    let fit = fit_site(&site, &parameters, &all, Places { between, disk })
        .map_err(|error| format!("{site_name}: {error}"))?;
    let has_text = !takes_standard_output(out);
    if has_text {
        print!("{}", SiteFitReport(&fit));
    }
    if let Some(out) = out {
        let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let devices = DeviceFile { fit: &fit, site: &site, source: &names.join(", ") }.to_string();
        save(out, &devices)?;
        if has_text {
            println!("\nfitted devices: {}", out.display());
        }
    }
    Ok(())
}
