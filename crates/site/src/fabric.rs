//! Fat trees and dragonflies: their switches and links, and links that have failed.
//!
//! ```text
//!   two levels   leaf ─ every spine                     leaves ≤ ports of a spine / links to a leaf
//!   three levels leaf ─ every aggregation switch of its pod ─ the cores of that switch
//!   dragonfly    router ─ every router of its group; a group ─ every other group
//! ```
//! Read: Leiserson, "Fat-trees", IEEE Trans. Comput. 34 (1985); Kim et al., "Technology-Driven, Highly-Scalable Dragonfly
//! Topology", ISCA 2008.

use crate::SiteError;
use crate::schema::{self, Encoding, Lanes, Loss, Mtu, Protocol, Signalling, data_rate};
use crate::validate::{Fabric, LinkEnd, NetworkLink, NetworkSwitch, Site, Validator, link_end_name};
use millstream_quantity::{Metres, Seconds};
use std::num::NonZeroU32;
use std::ops::Range;
use toml::Spanned;

/// Largest number of switches of one fabric.
const MAX_SWITCHES: u64 = 100_000;

/// What all links of a fabric have in common.
struct LinkFormat {
    rate: Signalling,
    encoding: Encoding,
    lanes: Lanes,
    mtu: Mtu,
    protocol: Protocol,
    loss: Loss,
}

impl LinkFormat {
    fn link(&self, from: LinkEnd, to: LinkEnd, length: Option<Metres>) -> NetworkLink {
        NetworkLink {
            from,
            to,
            rate: data_rate(self.rate, self.encoding, self.lanes),
            mtu: self.mtu,
            length,
            protocol: self.protocol,
            buffer: None,
            dimension: None,
            loss: self.loss.0,
            failed: false,
        }
    }
}

/// A fabric under construction.
struct Builder<'a> {
    site: &'a mut Site,
    model: SwitchModel,
    latency: Seconds,
}

/// Model of a fabric's switches: its name in the file, and its library id.
struct SwitchModel {
    name: String,
    id: String,
}

impl Builder<'_> {
    /// Adds switches with names by index; returns their indices.
    fn switches(&mut self, count: usize, ports: u32, name: impl Fn(usize) -> String) -> Range<usize> {
        let first = self.site.switches.len();
        let fabric = Some(self.site.fabrics.len());
        let switches = (0..count).map(|i| NetworkSwitch {
            name: name(i),
            model: self.model.name.clone(),
            id: self.model.id.clone(),
            ports,
            latency: self.latency,
            fabric,
        });
        self.site.switches.extend(switches);
        first..self.site.switches.len()
    }
}

fn count(value: &Spanned<NonZeroU32>) -> usize {
    value.get_ref().get() as usize
}

/// Adapters of a fabric, none of which has a link already, with its checked name and switch model.
fn members(
    validator: &Validator<'_>,
    (field, name): (&str, &Spanned<String>),
    adapters: &Spanned<String>,
    model: Option<&Spanned<String>>,
    site: &Site,
) -> Result<(Vec<LinkEnd>, SwitchModel), SiteError> {
    validator.name(&format!("{field}.name"), name)?;
    let prefix = format!("{}-", name.get_ref());
    let is_taken = site.fabrics.iter().any(|fabric| fabric.name == *name.get_ref())
        || site.switches.iter().any(|switch| switch.name.starts_with(&prefix));
    if is_taken {
        let message =
            format!("{field}.name {:?}: another switch or fabric has this name or prefix", name.get_ref());
        return validator.fail(&name.span(), message);
    }
    let id = validator.switch_id(model)?;
    let ends = validator.ends(&format!("{field}.adapters"), adapters, site)?;
    if let Some(LinkEnd::Switch(_)) = ends.first() {
        let message = format!("{field}.adapters {:?} is a switch, not an adapter", adapters.get_ref());
        return validator.fail(&adapters.span(), message);
    }
    Ok((ends, SwitchModel { name: model.map(|model| model.get_ref().clone()).unwrap_or_default(), id }))
}

fn ratio(down: usize, up: usize) -> String {
    if down == up { "non-blocking".to_owned() } else { format!("{down}:{up}") }
}

/// Adds the switches and links of a fat tree.
pub(crate) fn add_fat_tree(
    validator: &Validator<'_>,
    tree: &schema::FatTree,
    site: &mut Site,
) -> Result<(), SiteError> {
    let (adapters, model) =
        members(validator, ("fat-tree", &tree.name), &tree.adapters, tree.model.as_ref(), site)?;
    let name = tree.name.get_ref();
    let ports = count(&tree.ports);
    let levels = tree.levels.as_ref().map_or(2, |levels| *levels.get_ref());
    if !(2..=4096).contains(&ports) {
        let message = format!("fat-tree {name:?}: ports = {ports}: must be 2 to 4096");
        return validator.fail(&tree.ports.span(), message);
    }
    let down = tree.down.as_ref().map_or(ports / 2, count);
    if down >= ports {
        let message = format!(
            "fat-tree {name:?}: down = {down}: a leaf of {ports} ports needs one to a spine; at most {}",
            ports - 1
        );
        let span = tree.down.as_ref().map_or(tree.ports.span(), Spanned::span);
        return validator.fail(&span, message);
    }
    let up = ports - down;
    let leaves = adapters.len().div_ceil(down);
    let format = LinkFormat {
        rate: tree.rate,
        encoding: tree.encoding,
        lanes: tree.lanes,
        mtu: tree.mtu,
        protocol: validator.protocol(tree.rate, tree.mtu, tree.protocol.as_ref(), &tree.name.span())?,
        loss: tree.loss,
    };
    let too_many = |most: usize| {
        let message = format!(
            "fat-tree {name:?}: {} adapters need {leaves} leaves; {levels} levels of {ports} ports have at most {most}. Use more \
             ports, levels = 3, or a larger `down`",
            adapters.len()
        );
        validator.fail(&tree.adapters.span(), message)
    };
    let mut builder = Builder { site, model, latency: tree.latency };
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    let leaf;
    match levels {
        2 => {
            let spines = tree.spines.as_ref().map_or(up, count);
            if !up.is_multiple_of(spines) {
                let message =
                    format!("fat-tree {name:?}: spines = {spines}: must divide the {up} uplinks of a leaf");
                let span = tree.spines.as_ref().map_or(tree.ports.span(), Spanned::span);
                return validator.fail(&span, message);
            }
            let parallel = up / spines;
            if leaves * parallel > ports {
                return too_many(ports / parallel);
            }
            leaf = builder.switches(leaves, ports as u32, |i| format!("{name}-leaf{i}"));
            let spine = builder.switches(spines, ports as u32, |i| format!("{name}-spine{i}"));
            for l in leaf.clone() {
                for s in spine.clone() {
                    pairs.extend((0..parallel).map(|_| (l, s)));
                }
            }
        }
        3 => {
            if let Some(spines) = &tree.spines {
                let message = format!("fat-tree {name:?}: field `spines` is for two levels");
                return validator.fail(&spines.span(), message);
            }
            let half = ports / 2;
            let pods = leaves.div_ceil(half);
            if pods > ports {
                return too_many(ports * half);
            }
            let all = leaves as u64 + (pods * up) as u64 + (up * half) as u64;
            if all > MAX_SWITCHES {
                let message = format!("fat-tree {name:?}: {all} switches: at most {MAX_SWITCHES}");
                return validator.fail(&tree.ports.span(), message);
            }
            leaf = builder.switches(leaves, ports as u32, |i| format!("{name}-leaf{i}"));
            let aggregation =
                builder.switches(pods * up, ports as u32, |i| format!("{name}-pod{}-agg{}", i / up, i % up));
            let core = builder.switches(up * half, ports as u32, |i| format!("{name}-core{i}"));
            for (i, l) in leaf.clone().enumerate() {
                pairs.extend((0..up).map(|a| (l, aggregation.start + i / half * up + a)));
            }
            for pod in 0..pods {
                for a in 0..up {
                    let cores = (0..half).map(|c| core.start + a * half + c);
                    pairs.extend(cores.map(|c| (aggregation.start + pod * up + a, c)));
                }
            }
        }
        other => {
            let message = format!("fat-tree {name:?}: levels = {other}: must be 2 or 3");
            let span = tree.levels.as_ref().map_or(0..0, Spanned::span);
            return validator.fail(&span, message);
        }
    }
    let hosts = adapters.iter().enumerate().map(|(i, &end)| (end, LinkEnd::Switch(leaf.start + i / down)));
    let between = pairs.into_iter().map(|(a, b)| (LinkEnd::Switch(a), LinkEnd::Switch(b)));
    site.links.extend(hosts.chain(between).map(|(from, to)| format.link(from, to, tree.length)));
    let shape = format!("fat tree, {levels} levels, {leaves} leaves, {}", ratio(down, up));
    site.fabrics.push(Fabric { name: name.clone(), shape });
    Ok(())
}

/// Adds the switches and links of a dragonfly.
pub(crate) fn add_dragonfly(
    validator: &Validator<'_>,
    dragonfly: &schema::Dragonfly,
    site: &mut Site,
) -> Result<(), SiteError> {
    let header = ("dragonfly", &dragonfly.name);
    let (adapters, model) = members(validator, header, &dragonfly.adapters, dragonfly.model.as_ref(), site)?;
    let name = dragonfly.name.get_ref();
    let (routers, hosts, global) =
        (count(&dragonfly.routers), count(&dragonfly.hosts), count(&dragonfly.global));
    for (field, value, span) in [
        ("routers", routers, dragonfly.routers.span()),
        ("hosts", hosts, dragonfly.hosts.span()),
        ("global", global, dragonfly.global.span()),
    ] {
        if value > 1024 {
            return validator
                .fail(&span, format!("dragonfly {name:?}: {field} = {value}: must be 1 to 1024"));
        }
    }
    let groups = adapters.len().div_ceil(routers * hosts);
    let most = routers * global + 1;
    if groups > most {
        let message = format!(
            "dragonfly {name:?}: {} adapters need {groups} groups of {routers} × {hosts}; {routers} routers with {global} global links \
             connect at most {most}",
            adapters.len()
        );
        return validator.fail(&dragonfly.adapters.span(), message);
    }
    if (groups * routers) as u64 > MAX_SWITCHES {
        let message = format!("dragonfly {name:?}: {} routers: at most {MAX_SWITCHES}", groups * routers);
        return validator.fail(&dragonfly.routers.span(), message);
    }
    let format = LinkFormat {
        rate: dragonfly.rate,
        encoding: dragonfly.encoding,
        lanes: dragonfly.lanes,
        mtu: dragonfly.mtu,
        protocol: validator.protocol(
            dragonfly.rate,
            dragonfly.mtu,
            dragonfly.protocol.as_ref(),
            &dragonfly.name.span(),
        )?,
        loss: dragonfly.loss,
    };
    let ports = (hosts + routers - 1 + global) as u32;
    let mut builder = Builder { site, model, latency: dragonfly.latency };
    let all = builder
        .switches(groups * routers, ports, |i| format!("{name}-group{}-router{}", i / routers, i % routers));
    let router = |group: usize, i: usize| LinkEnd::Switch(all.start + group * routers + i);
    let near = dragonfly.length;
    let far = dragonfly.global_length.or(near);
    let mut links: Vec<NetworkLink> = (adapters.iter().enumerate())
        .map(|(i, &end)| format.link(end, LinkEnd::Switch(all.start + i / hosts), near))
        .collect();
    for group in 0..groups {
        for a in 0..routers {
            links.extend((a + 1..routers).map(|b| format.link(router(group, a), router(group, b), near)));
        }
    }
    // Port j of group g leads to group g + j + 1, whose port to group g is the j-th from the end. Ports that are left over
    // form further rounds.
    let others = groups - 1;
    let rounds = (routers * global).checked_div(others).unwrap_or(0);
    for round in 0..rounds {
        for group in 0..groups {
            for j in 0..others {
                let other = (group + j + 1) % groups;
                if group < other {
                    let (mine, theirs) = (round * others + j, round * others + (others - 1 - j));
                    links.push(format.link(
                        router(group, mine / global),
                        router(other, theirs / global),
                        far,
                    ));
                }
            }
        }
    }
    site.links.extend(links);
    let shape = format!("dragonfly, {groups} groups of {routers} routers");
    site.fabrics.push(Fabric { name: name.clone(), shape });
    Ok(())
}

/// Marks all links between two ends as failed.
pub(crate) fn fail_links(
    validator: &Validator<'_>,
    failed: &schema::FailedLink,
    site: &mut Site,
) -> Result<(), SiteError> {
    let from = validator.ends("failed-link.from", &failed.from, site)?;
    let to = validator.ends("failed-link.to", &failed.to, site)?;
    let is_between = |link: &NetworkLink| {
        (from.contains(&link.from) && to.contains(&link.to))
            || (from.contains(&link.to) && to.contains(&link.from))
    };
    if !site.links.iter().any(is_between) {
        let mut linked: Vec<String> = (site.links.iter())
            .filter_map(|link| match link {
                _ if from.contains(&link.from) => Some(link_end_name(site, link.to)),
                _ if from.contains(&link.to) => Some(link_end_name(site, link.from)),
                _ => None,
            })
            .collect();
        linked.truncate(5);
        let near = if linked.is_empty() { "nothing".to_owned() } else { linked.join(", ") };
        let (from, to) = (failed.from.get_ref(), failed.to.get_ref());
        let message =
            format!("failed-link: no link connects {from:?} and {to:?}; {from:?} has links to {near}");
        return validator.fail(&failed.to.span(), message);
    }
    for link in site.links.iter_mut().filter(|link| is_between(link)) {
        link.failed = true;
    }
    Ok(())
}
