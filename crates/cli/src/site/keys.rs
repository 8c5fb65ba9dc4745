//! `millstream site keys`: the authority of a site and the keys of its nodes.

use std::error::Error;
use std::time::Duration;

use millstream_report::eprint_line;
use millstream_site::load;
use millstream_tls::KeyFiles;
use millstream_tls::authority::{AUTHORITY_DIRECTORY, Authority, AuthorityError, Validity};

use crate::args::SiteKeysOptions;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Validity of an authority, in days.
const AUTHORITY_DAYS: u32 = 3650;

pub(super) fn run(options: &SiteKeysOptions) -> Result<(), Box<dyn Error>> {
    let SiteKeysOptions { file, out, days, names, renew } = options;
    let site = load(file)?;
    let nodes: Vec<&str> = site.hosts.iter().map(|host| host.name.as_str()).collect();
    if nodes.is_empty() {
        return Err(format!("{}: the site has no hosts", file.display()).into());
    }
    if let Some((node, _)) = names.iter().find(|(node, _)| !nodes.contains(&node.as_str())) {
        return Err(format!("--name {node}: {} has no host of this name", file.display()).into());
    }
    // Nothing is written before all keys are made.
    let (authority, authority_end) = if *renew {
        (Authority::load(out)?, None)
    } else {
        if let Some(taken) = nodes.iter().map(|node| out.join(node)).find(|folder| folder.exists()) {
            return Err(AuthorityError::Exists(taken).into());
        }
        let validity = Validity::starting_now(DAY * AUTHORITY_DAYS.max(*days));
        let name = format!("Millstream authority of {}", site.name);
        (Authority::new(&name, validity)?, Some(validity.end()))
    };
    let validity = Validity::starting_now(DAY * *days);
    let mut made = Vec::new();
    for node in nodes {
        let folder = out.join(node);
        let mut further: Vec<String> =
            names.iter().filter(|(of, _)| of == node).map(|(_, name)| name.clone()).collect();
        if *renew {
            // Run control is reached by names that were given when the present keys were made.
            match KeyFiles::in_directory(&folder).names() {
                Ok(present) => further.extend(present),
                Err(error) => eprint_line!("warning: {error}; {node} keeps no names of this certificate"),
            }
        }
        made.push((node, folder, authority.issue(node, &further, validity)?));
    }
    // The authority comes first: with it, --renew completes what is missing.
    if let Some(end) = authority_end {
        authority.save(out)?;
        println!("authority: {}, valid until {end}", out.join(AUTHORITY_DIRECTORY).display());
    }
    for (node, folder, keys) in made {
        if *renew { keys.replace(&folder) } else { keys.create(&folder) }?;
        println!("{node}: {}, valid until {}", folder.display(), validity.end());
    }
    Ok(())
}
