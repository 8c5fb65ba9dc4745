//! A subnet in ibsim: a switch and a channel adapter for each live node, managed by OpenSM.
//!
//! ```text
//!   port 1 to 6 of a switch: the six directions, in the order of Direction::ALL
//!   port 7:                  the node's channel adapter
//! ```

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_torus_core::{Axis, DeadSet, Dimensions, Direction, NodeNumber, Sign};

/// Port of a switch that leads to the node's channel adapter.
pub(crate) const ADAPTER_PORT: u8 = 7;
/// GUIDs that ibsim gives to the first switch and to the first adapter.
const FIRST_SWITCH: u64 = 0x20_0000;
const FIRST_ADAPTER: u64 = 0x10_0000;
/// Longest wait for a program. A sweep of 64 switches takes about 0.1 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Port of a switch for a direction.
pub(crate) fn port(direction: Direction) -> u8 {
    direction.index() as u8 + 1
}

/// The torus as OpenSM sees it: dead nodes and links do not exist.
pub(crate) struct Fabric<'f> {
    pub(crate) torus: &'f Dimensions,
    pub(crate) dead: &'f DeadSet,
}

impl Fabric<'_> {
    /// The live nodes in order.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeNumber> + '_ {
        self.torus.all().filter(|&node| self.dead.node_lives(node))
    }

    /// All ordered pairs of live nodes.
    pub(crate) fn pairs(&self) -> Vec<(NodeNumber, NodeNumber)> {
        self.nodes()
            .flat_map(|from| self.nodes().filter(move |&to| to != from).map(move |to| (from, to)))
            .collect()
    }

    fn place(&self, node: NodeNumber) -> u64 {
        self.nodes().position(|live| live == node).expect("a live node") as u64
    }

    pub(crate) fn switch_guid(&self, node: NodeNumber) -> u64 {
        FIRST_SWITCH + self.place(node)
    }

    /// An adapter of one port takes two GUIDs: its own and its port's.
    pub(crate) fn adapter_guid(&self, node: NodeNumber) -> u64 {
        FIRST_ADAPTER + 2 * self.place(node)
    }

    fn netlist(&self) -> String {
        let mut text = String::new();
        for node in self.nodes() {
            let _ = writeln!(text, "Switch {ADAPTER_PORT} \"S{}\"", node.0);
            for direction in Direction::ALL {
                if let Some(other) = self.dead.live_neighbour(self.torus, node, direction) {
                    let (here, there) = (port(direction), port(direction.reversed()));
                    let _ = writeln!(text, "[{here}] \"S{}\"[{there}]", other.0);
                }
            }
            let _ = writeln!(text, "[{ADAPTER_PORT}] \"H{}\"[1]\n", node.0);
        }
        for node in self.nodes() {
            let _ = writeln!(text, "Hca 1 \"H{0}\"\n[1] \"S{0}\"[{ADAPTER_PORT}]\n", node.0);
        }
        text
    }

    /// torus-2QoS.conf: dimensions, a switch whose six links live, and the datelines between the last place and place 0.
    fn torus_conf(&self) -> String {
        let neighbour = |node, direction| self.dead.live_neighbour(self.torus, node, direction);
        let seed = (self.nodes())
            .find(|&node| Direction::ALL.into_iter().all(|direction| neighbour(node, direction).is_some()))
            .expect("a live node with six live links");
        let [x, y, z] = self.torus.sizes();
        let mut text = format!("torus {x} {y} {z}\n");
        for direction in Direction::ALL {
            let other = neighbour(seed, direction).expect("found above");
            let name = ["x", "y", "z"][direction.axis.index()];
            let sense = if direction.sign == Sign::Plus { "p" } else { "m" };
            let (from, to) = (self.switch_guid(seed), self.switch_guid(other));
            let _ = writeln!(text, "{name}{sense}_link {from:#x} {to:#x}");
        }
        for axis in Axis::ALL {
            let place = self.torus.coordinates(seed).on(axis);
            let _ = writeln!(text, "{}_dateline -{place}", ["x", "y", "z"][axis.index()]);
        }
        text
    }
}

/// Running ibsim and OpenSM; dropping it ends them.
pub(crate) struct Subnet {
    folder: PathBuf,
    socket: String,
    /// A program of Debian's ibsim attaches to this adapter.
    attached: String,
    running: Vec<Child>,
}

impl Drop for Subnet {
    fn drop(&mut self) {
        for child in self.running.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("the files of this subnet are in {}", self.folder.display());
        } else {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// What OpenSM did with a fabric.
pub(crate) enum Outcome {
    /// The engine wrote the tables of all switches.
    Routed(Subnet),
    /// The engine refused; the line of OpenSM's log that says why.
    Refused(String),
}

/// Runs OpenSM with one routing engine, and no other if that one refuses.
pub(crate) fn manage(name: &str, fabric: &Fabric, engine: &str) -> Outcome {
    // Each program that attaches to ibsim writes a tree of some 200 files into its folder, so the folder is in memory.
    let folder = Path::new("/dev/shm").join(format!("millstream-opensm-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("netlist"), fabric.netlist()).unwrap();
    fs::write(folder.join("torus-2QoS.conf"), fabric.torus_conf()).unwrap();
    // Otherwise the log's end stays in a buffer while OpenSM runs.
    fs::write(folder.join("opensm.conf"), "force_log_flush TRUE\n").unwrap();
    let first = fabric.nodes().next().expect("a live node");
    // Only updn reads it.
    fs::write(folder.join("roots"), format!("{:#x}\n", fabric.switch_guid(first))).unwrap();
    let mut subnet = Subnet {
        socket: format!("millstream-{}-{name}", std::process::id()),
        attached: format!("H{}", first.0),
        running: Vec::new(),
        folder,
    };
    let simulator = subnet.command("ibsim").args(["-s", "-n", "netlist"]).spawn().expect("ibsim starts");
    subnet.running.push(simulator);
    let control = format!("@{}:ctl", subnet.socket);
    wait_for("ibsim to listen", || fs::read_to_string("/proc/net/unix").unwrap().contains(&control));
    let manager = (subnet.command("ibsim-run"))
        .args([
            "opensm",
            "-F",
            "opensm.conf",
            "-f",
            "opensm.log",
            "--dump_files_dir",
            ".",
            "-D",
            "0x43",
            "-Q",
        ])
        .args(["-R", &format!("{engine},no_fallback"), "--torus_config", "torus-2QoS.conf", "-a", "roots"])
        .spawn()
        .expect("ibsim-run starts");
    subnet.running.push(manager);
    let mut refusal = None;
    wait_for("OpenSM's first sweep", || {
        let log = fs::read_to_string(subnet.folder.join("opensm.log")).unwrap_or_default();
        let line = |words: &str| log.lines().find(|line| line.contains(words)).map(str::to_owned);
        if line("No routing engine able to").is_some() {
            refusal = Some(line("ERR 4E").or_else(|| line("cannot build")).unwrap_or(log.clone()));
        }
        if line("SUBNET UP").is_some() {
            assert!(
                line(&format!("{engine} tables configured")).is_some(),
                "{engine} wrote no tables:\n{log}"
            );
            return true;
        }
        refusal.is_some()
    });
    match refusal {
        Some(line) => Outcome::Refused(line),
        None => Outcome::Routed(subnet),
    }
}

impl Subnet {
    /// A command in the subnet's folder; what it prints goes to a file there.
    fn command(&self, program: &str) -> Command {
        let output = fs::File::create(self.folder.join(format!("{program}.out"))).unwrap();
        let mut command = Command::new(program);
        command
            .current_dir(&self.folder)
            .env("IBSIM_SOCKNAME", &self.socket)
            .env("SIM_HOST", &self.attached)
            .env("OSM_CACHE_DIR", &self.folder)
            .env("OSM_TMP_DIR", &self.folder)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        command
    }

    /// A file that OpenSM wrote.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The service level that OpenSM's subnet administration gives to a path.
    pub(crate) fn service_level(&self, from_lid: u16, to_lid: u16) -> u8 {
        let output = Command::new("ibsim-run")
            .args(["saquery", "--src-to-dst", &format!("{from_lid}:{to_lid}")])
            .current_dir(&self.folder)
            .env("IBSIM_SOCKNAME", &self.socket)
            .env("SIM_HOST", &self.attached)
            .stdin(Stdio::null())
            .output()
            .expect("ibsim-run starts");
        let text = String::from_utf8_lossy(&output.stdout);
        let level = (text.lines())
            .filter_map(|line| line.trim().strip_prefix("sl."))
            .find_map(|rest| u8::from_str_radix(rest.trim_start_matches('.').strip_prefix("0x")?, 16).ok());
        level.unwrap_or_else(|| panic!("saquery {from_lid}:{to_lid} shows no sl:\n{text}{output:?}"))
    }
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
