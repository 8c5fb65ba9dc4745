//! OpenSM's dumps: forwarding tables and maps of service levels to virtual lanes.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::fs;

use millstream_torus_core::route::ChannelName;
use millstream_torus_core::{Direction, NodeNumber, VirtualChannel};

use crate::simulation::{ADAPTER_PORT, Fabric, Subnet, port};

/// Programs that attach to ibsim at a time; it admits ten, and OpenSM is one.
const QUERIES: usize = 6;

type Ports = (NodeNumber, u8, u8);

/// What decides on the way of a packet.
pub(crate) struct Tables {
    /// Output port by switch and destination.
    forwarding: HashMap<(NodeNumber, NodeNumber), u8>,
    /// Virtual lane by service level, for switch, input port and output port.
    lanes: HashMap<Ports, [u8; 16]>,
    /// Service level by source and destination.
    levels: HashMap<(NodeNumber, NodeNumber), u8>,
    lids: HashMap<NodeNumber, u16>,
}

fn number(text: &str, prefix: char) -> Option<NodeNumber> {
    text.trim_matches(['\'', '"', ':', '(', ')']).strip_prefix(prefix)?.parse().ok().map(NodeNumber)
}

impl Tables {
    /// Reads the dumps, and asks OpenSM for the service level of each pair.
    pub(crate) fn read(subnet: &Subnet, fabric: &Fabric) -> Tables {
        let mut tables = Tables {
            forwarding: HashMap::new(),
            lanes: HashMap::new(),
            levels: HashMap::new(),
            lids: HashMap::new(),
        };
        tables.read_forwarding(&fs::read_to_string(subnet.file("opensm-lfts.dump")).unwrap());
        tables.read_lanes(&fs::read_to_string(subnet.file("opensm-sl2vl.dump")).unwrap());
        assert_eq!(tables.lids.len(), fabric.nodes().count(), "a LID for each adapter");
        tables.ask_levels(subnet, &fabric.pairs());
        tables
    }

    /// `Unicast lids [0-54] of switch Lid 2 guid 0x0000000000200000 ('S0'):`, then
    /// `0x0001 007 # Channel Adapter portguid 0x0000000000100001: 'H0'`.
    fn read_forwarding(&mut self, dump: &str) {
        let mut switch = None;
        for line in dump.lines() {
            let last = line.split_whitespace().last().unwrap_or_default();
            if line.starts_with("Unicast lids") {
                switch = number(last, 'S');
                continue;
            }
            let (Some(switch), Some(adapter)) = (switch, number(last, 'H')) else { continue };
            let mut words = line.split_whitespace();
            let lid = words.next().and_then(|word| u16::from_str_radix(word.strip_prefix("0x")?, 16).ok());
            self.lids.insert(adapter, lid.unwrap_or_else(|| panic!("no LID in {line:?}")));
            if let Some(port) = words.next().and_then(|word| word.parse().ok()) {
                self.forwarding.insert((switch, adapter), port);
            }
        }
    }

    /// `Switch 0x0000000000200000, base LID 2, "S0"`, then rows `7   1   : 0  1  0  1 …` of input and output port.
    fn read_lanes(&mut self, dump: &str) {
        let mut switch = None;
        for line in dump.lines().filter(|line| !line.starts_with('#')) {
            let Some((ports, levels)) = line.split_once(" : ") else {
                switch = line
                    .starts_with("Switch")
                    .then(|| number(line.split_whitespace().last()?, 'S'))
                    .flatten();
                continue;
            };
            let Some(switch) = switch else { continue };
            let numbers =
                |text: &str| text.split_whitespace().map(|word| word.parse().unwrap()).collect::<Vec<u8>>();
            let [input, output] = numbers(ports)[..] else { panic!("no two ports in {line:?}") };
            let lanes = numbers(levels).try_into().unwrap_or_else(|_| panic!("not 16 levels in {line:?}"));
            self.lanes.insert((switch, input, output), lanes);
        }
    }

    fn ask_levels(&mut self, subnet: &Subnet, pairs: &[(NodeNumber, NodeNumber)]) {
        let lids = &self.lids;
        let levels = std::thread::scope(|scope| {
            let threads: Vec<_> = (pairs.chunks(pairs.len().div_ceil(QUERIES)))
                .map(|chunk| {
                    scope.spawn(move || {
                        (chunk.iter())
                            .map(|&(from, to)| ((from, to), subnet.service_level(lids[&from], lids[&to])))
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("queries succeed")).collect()
        });
        self.levels = levels;
    }

    /// Channels between switches that a packet takes, with OpenSM's virtual lane as the virtual channel. `None` if the
    /// tables lead nowhere, to a dead link or in a circle.
    pub(crate) fn route(
        &self,
        fabric: &Fabric,
        from: NodeNumber,
        to: NodeNumber,
    ) -> Option<Vec<ChannelName>> {
        let level = usize::from(*self.levels.get(&(from, to))?);
        let (mut here, mut input, mut route) = (from, ADAPTER_PORT, Vec::new());
        loop {
            let output = *self.forwarding.get(&(here, to))?;
            if output == ADAPTER_PORT {
                return (here == to).then_some(route);
            }
            let direction = Direction::from_index(usize::from(output.checked_sub(1)?))?;
            let lane = self.lanes.get(&(here, input, output))?[level];
            route.push(ChannelName { node: here, direction, vc: VirtualChannel(lane) });
            if route.len() > fabric.torus.nodes() {
                return None;
            }
            here = fabric.dead.live_neighbour(fabric.torus, here, direction)?;
            input = port(direction.reversed());
        }
    }

    /// The tables of switches that forward on the given routes. A service level says which datelines a route crosses, as in
    /// torus-2QoS. `None` if switches cannot do it: two routes to one target leave a switch by different ports, or packets of
    /// one level by different lanes.
    pub(crate) fn of_routes(
        &self,
        fabric: &Fabric<'_>,
        mut route: impl FnMut(NodeNumber, NodeNumber) -> Vec<ChannelName>,
    ) -> Option<Tables> {
        let mut tables = Tables {
            forwarding: HashMap::new(),
            lanes: HashMap::new(),
            levels: HashMap::new(),
            lids: self.lids.clone(),
        };
        let mut given = HashMap::new();
        for (from, to) in fabric.pairs() {
            let route = route(from, to);
            let level = (route.iter())
                .filter(|channel| {
                    let place = fabric.torus.coordinates(channel.node).on(channel.direction.axis);
                    fabric.torus.crosses_dateline(place, channel.direction)
                })
                .fold(0, |level, channel| level | (1 << channel.direction.axis.index()));
            tables.levels.insert((from, to), level);
            let mut input = ADAPTER_PORT;
            for channel in route {
                let output = port(channel.direction);
                if *tables.forwarding.entry((channel.node, to)).or_insert(output) != output
                    || *given.entry((channel.node, input, output, level)).or_insert(channel.vc) != channel.vc
                {
                    return None;
                }
                input = port(channel.direction.reversed());
            }
        }
        for node in fabric.nodes() {
            tables.forwarding.insert((node, node), ADAPTER_PORT);
            for (input, output) in
                (0..=ADAPTER_PORT).flat_map(|input| (1..=ADAPTER_PORT).map(move |output| (input, output)))
            {
                tables.lanes.insert((node, input, output), [0; 16]);
            }
        }
        for ((node, input, output, level), vc) in given {
            tables.lanes.get_mut(&(node, input, output)).expect("inserted above")[usize::from(level)] = vc.0;
        }
        Some(tables)
    }

    /// Forwarding tables in the form of opensm.fdbs.
    pub(crate) fn forwarding_tables(&self, fabric: &Fabric<'_>) -> String {
        let mut text = String::new();
        for switch in fabric.nodes() {
            let _ = writeln!(text, "dump_ucast_routes: Switch {:#018x}", fabric.switch_guid(switch));
            let _ = writeln!(text, "LID    : Port : Hops : Optimal");
            for to in fabric.nodes() {
                if let Some(port) = self.forwarding.get(&(switch, to)) {
                    let _ = writeln!(text, "{:#06x} : {port:03}  : 00   : yes", self.lids[&to]);
                }
            }
            text.push('\n');
        }
        text
    }

    /// Number of service levels of the paths, and of virtual lanes up to the highest of the maps.
    pub(crate) fn levels_and_lanes(&self) -> (usize, usize) {
        let levels: HashSet<_> = self.levels.values().collect();
        let highest = self.lanes.values().flatten().max().expect("a map");
        (levels.len(), usize::from(*highest) + 1)
    }

    /// Service levels in the form of ibdmchk: GUID of the source, LID of the destination, level.
    pub(crate) fn path_levels(&self, fabric: &Fabric) -> String {
        (self.levels.iter())
            .map(|(&(from, to), level)| {
                format!("{:#x} {} {level}\n", fabric.adapter_guid(from), self.lids[&to])
            })
            .collect()
    }

    /// Virtual lanes in the form of ibdmchk: GUID of the switch, input port, output port, two levels a byte.
    pub(crate) fn lane_maps(&self, fabric: &Fabric) -> String {
        (self.lanes.iter())
            .map(|(&(switch, input, output), lanes)| {
                let bytes: String =
                    lanes.chunks(2).map(|pair| format!(" 0x{:x}{:x}", pair[0], pair[1])).collect();
                format!("{:#x} {input} {output}{bytes}\n", fabric.switch_guid(switch))
            })
            .collect()
    }
}
