//! Routes between hosts over network switches.
//!
//! Packets take a shortest route over links that work. Of several next links, the destination selects one (D-mod-k routing of
//! fat trees: Zahavi, "Fat-tree routing and node ordering providing contention free traffic for MPI global collectives",
//! JPDC 72, 2012): flows to different destinations spread over the spines, and all flows to one destination take one way down.

use millstream_site::validate::LinkEnd;
use millstream_site::{DeviceId, HostId, Site};
use std::collections::{HashMap, VecDeque};

/// A link of a route in its direction of travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteLink {
    /// Index in [`Site::links`].
    pub link: usize,
    /// Whether the route leads from the link's `from` to its `to`.
    pub forward: bool,
}

impl RouteLink {
    /// The end at which the link is entered.
    #[must_use]
    pub fn source(self, site: &Site) -> LinkEnd {
        let link = &site.links[self.link];
        if self.forward { link.from } else { link.to }
    }

    /// The end at which the link is left.
    #[must_use]
    pub fn target(self, site: &Site) -> LinkEnd {
        let link = &site.links[self.link];
        if self.forward { link.to } else { link.from }
    }
}

/// A route between adapters of two hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Links from the first host to the second.
    pub links: Vec<RouteLink>,
    /// Adapters of the first and the second host.
    pub adapters: [DeviceId; 2],
}

/// Links by the end that they lead from, without failed ones and those of tori.
#[derive(Debug)]
pub struct Network<'a> {
    site: &'a Site,
    from_switch: Vec<Vec<RouteLink>>,
    from_host: HashMap<usize, Vec<RouteLink>>,
}

/// Largest number of routes that [`Network::all_routes`] returns.
pub const MAX_ROUTES: usize = 256;

impl<'a> Network<'a> {
    /// The links of a site.
    #[must_use]
    pub fn new(site: &'a Site) -> Network<'a> {
        let mut network =
            Network { site, from_switch: vec![Vec::new(); site.switches.len()], from_host: HashMap::new() };
        for (i, link) in site.links.iter().enumerate() {
            if link.failed || link.dimension.is_some() {
                continue;
            }
            for (end, forward) in [(link.from, true), (link.to, false)] {
                let here = RouteLink { link: i, forward };
                match end {
                    LinkEnd::Switch(switch) => network.from_switch[switch].push(here),
                    LinkEnd::Adapter(host, _) => network.from_host.entry(host.0).or_default().push(here),
                }
            }
        }
        network
    }

    fn links_of(&self, host: HostId) -> &[RouteLink] {
        self.from_host.get(&host.0).map_or(&[], Vec::as_slice)
    }

    fn leads_to(&self, link: RouteLink, host: HostId) -> bool {
        matches!(link.target(self.site), LinkEnd::Adapter(h, _) if h == host)
    }

    /// Links from each switch to a host; `u32::MAX` if there is no way.
    fn distances(&self, to: HostId) -> Vec<u32> {
        let mut distances = vec![u32::MAX; self.from_switch.len()];
        let mut queue = VecDeque::new();
        let visit = |end: LinkEnd, at: u32, distances: &mut Vec<u32>, queue: &mut VecDeque<usize>| {
            if let LinkEnd::Switch(switch) = end
                && distances[switch] == u32::MAX
            {
                distances[switch] = at;
                queue.push_back(switch);
            }
        };
        for link in self.links_of(to) {
            visit(link.target(self.site), 1, &mut distances, &mut queue);
        }
        while let Some(switch) = queue.pop_front() {
            let next = distances[switch] + 1;
            for link in &self.from_switch[switch] {
                visit(link.target(self.site), next, &mut distances, &mut queue);
            }
        }
        distances
    }

    /// Links of shortest routes from here on.
    fn candidates(&self, links: &[RouteLink], to: HostId, distances: &[u32]) -> Vec<RouteLink> {
        let length = |link: &RouteLink| match link.target(self.site) {
            LinkEnd::Adapter(host, _) if host == to => 0,
            LinkEnd::Adapter(..) => u32::MAX,
            LinkEnd::Switch(switch) => distances[switch],
        };
        let least = links.iter().map(length).min().unwrap_or(u32::MAX);
        links.iter().copied().filter(|link| least != u32::MAX && length(link) == least).collect()
    }

    fn finished(&self, links: Vec<RouteLink>) -> Option<Route> {
        let ends = [links.first()?.source(self.site), links.last()?.target(self.site)];
        let [LinkEnd::Adapter(_, first), LinkEnd::Adapter(_, last)] = ends else { return None };
        Some(Route { links, adapters: [first, last] })
    }

    /// The route of a flow; none if no working links connect the hosts.
    #[must_use]
    pub fn route(&self, from: HostId, to: HostId) -> Option<Route> {
        let distances = self.distances(to);
        // The first adapter with a shortest route, as programs take the first device.
        let mut links = vec![*self.candidates(self.links_of(from), to, &distances).first()?];
        let mut destination = to.0;
        while let LinkEnd::Switch(switch) = links.last()?.target(self.site) {
            let next = self.candidates(&self.from_switch[switch], to, &distances);
            let first = next.first()?.target(self.site);
            let chosen = if self.leads_to(next[0], to) {
                0
            } else if next.iter().all(|link| link.target(self.site) == first) {
                // Parallel links to one switch: on the way down, the same ones as on the way up.
                to.0 % next.len()
            } else {
                let chosen = destination % next.len();
                destination /= next.len();
                chosen
            };
            links.push(next[chosen]);
        }
        self.finished(links)
    }

    /// All shortest routes from the first adapter, at most [`MAX_ROUTES`].
    #[must_use]
    pub fn all_routes(&self, from: HostId, to: HostId) -> Vec<Route> {
        let distances = self.distances(to);
        let first = self.candidates(self.links_of(from), to, &distances);
        let mut partial: Vec<Vec<RouteLink>> = first.first().map(|&link| vec![link]).into_iter().collect();
        let mut done = Vec::new();
        while let Some(links) = partial.pop() {
            let last = links.last().map(|link| link.target(self.site));
            let Some(LinkEnd::Switch(switch)) = last else {
                done.extend(self.finished(links));
                if done.len() == MAX_ROUTES {
                    break;
                }
                continue;
            };
            let mut next = self.candidates(&self.from_switch[switch], to, &distances);
            if next.first().is_some_and(|&link| self.leads_to(link, to)) {
                next.truncate(1);
            }
            partial.extend(next.into_iter().map(|link| [links.clone(), vec![link]].concat()));
        }
        done
    }
}
