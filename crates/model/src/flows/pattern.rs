//! Traffic patterns over all hosts of a site.

use crate::explain::Flow;
use crate::path::Verb;
use millstream_site::Site;
use millstream_site::validate::LinkEnd;
use std::collections::BTreeSet;
use std::str::FromStr;

/// A traffic pattern of RDMA WRITEs between all hosts with a network link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Every host to every other.
    AllToAll,
    /// Host i to host i + n, modulo their number.
    Shift(usize),
    /// All hosts to one.
    Incast(String),
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Pattern, String> {
        let known = || format!("pattern {text:?}: one of all-to-all, shift:N (N from 1), incast:HOST");
        match text.split_once(':') {
            None if text == "all-to-all" => Ok(Pattern::AllToAll),
            Some(("shift", count)) => {
                let count = count.parse().ok().filter(|&count| count > 0);
                count.map(Pattern::Shift).ok_or_else(known)
            }
            Some(("incast", host)) if !host.is_empty() => Ok(Pattern::Incast(host.to_owned())),
            _ => Err(known()),
        }
    }
}

impl Pattern {
    /// The pattern's flows with messages of this size.
    ///
    /// # Errors
    /// The site has no such host, or too few of them.
    pub fn flows(&self, site: &Site, size: u32) -> Result<Vec<Flow>, String> {
        let linked: BTreeSet<usize> = (site.links.iter().flat_map(|link| [link.from, link.to]))
            .filter_map(|end| if let LinkEnd::Adapter(host, _) = end { Some(host.0) } else { None })
            .collect();
        let names: Vec<&str> = linked.into_iter().map(|host| site.hosts[host].name.as_str()).collect();
        if names.len() < 2 {
            return Err(format!(
                "a pattern needs two hosts with network links; the site has {}",
                names.len()
            ));
        }
        let flow = |client: &str, server: &str| Flow {
            verb: Verb::Write,
            client: client.to_owned(),
            server: server.to_owned(),
            size,
        };
        let count = names.len();
        Ok(match self {
            Pattern::AllToAll => (0..count)
                .flat_map(|from| (1..count).map(move |k| (from, (from + k) % count)))
                .map(|(from, to)| flow(names[from], names[to]))
                .collect(),
            Pattern::Shift(by) if by % count == 0 => {
                return Err(format!("shift:{by}: a multiple of the {count} hosts sends to itself"));
            }
            Pattern::Shift(by) => {
                (0..count).map(|from| flow(names[from], names[(from + by % count) % count])).collect()
            }
            Pattern::Incast(host) => {
                if !names.contains(&host.as_str()) {
                    let some = names[..count.min(5)].join(", ");
                    return Err(format!(
                        "incast:{host}: no host of this name with a network link; hosts: {some}"
                    ));
                }
                names.iter().filter(|name| *name != host).map(|name| flow(name, host)).collect()
            }
        })
    }
}
