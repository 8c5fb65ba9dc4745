//! The program `messages` (`conformance/mpi/messages.c`) as ranks of Open MPI.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::card::CardServer;
use crate::mpi::Outcome;

/// Source of the program; a link to the conformance client.
const SOURCE: &str = include_str!("messages.c");

/// A size in bytes, with its name.
pub(super) type Size = (usize, &'static str);

/// Measured message sizes.
const SIZES: [Size; 5] =
    [(8, "8 B"), (1024, "1 KiB"), (8192, "8 KiB"), (65536, "64 KiB"), (1 << 20, "1 MiB")];
/// Measured blocks of `MPI_Alltoall`.
const BLOCKS: [Size; 3] = [(8, "8 B"), (4096, "4 KiB"), (65536, "64 KiB")];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    Latency,
    Bandwidth,
    Bidirectional,
    PutLatency,
    PutBandwidth,
    GetLatency,
    GetBandwidth,
    /// `MPI_Alltoall` of this number of ranks.
    Alltoall(usize),
}

impl Test {
    pub(super) const ALL: [Test; 9] = [
        Test::Latency,
        Test::Bandwidth,
        Test::Bidirectional,
        Test::PutLatency,
        Test::PutBandwidth,
        Test::GetLatency,
        Test::GetBandwidth,
        Test::Alltoall(2),
        Test::Alltoall(4),
    ];

    fn word(self) -> &'static str {
        match self {
            Test::Latency => "latency",
            Test::Bandwidth => "bw",
            Test::Bidirectional => "bibw",
            Test::PutLatency => "put-latency",
            Test::PutBandwidth => "put-bw",
            Test::GetLatency => "get-latency",
            Test::GetBandwidth => "get-bw",
            Test::Alltoall(_) => "alltoall",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Test::Latency => "latency",
            Test::Bandwidth => "bandwidth",
            Test::Bidirectional => "bidirectional bandwidth",
            Test::PutLatency => "put latency",
            Test::PutBandwidth => "put bandwidth",
            Test::GetLatency => "get latency",
            Test::GetBandwidth => "get bandwidth",
            Test::Alltoall(_) => "alltoall",
        }
    }

    /// The name of the figure of a size.
    pub(super) fn figure(self, size: &str, buffers: Buffers) -> String {
        match self {
            Test::Alltoall(ranks) => format!("MPI {} {size}, {ranks} ranks", self.title()),
            _ => format!("MPI {} {size}, {}", self.title(), buffers.title()),
        }
    }

    /// Whether the other rank takes no part in a transfer.
    fn one_sided(self) -> bool {
        matches!(self, Test::PutLatency | Test::PutBandwidth | Test::GetLatency | Test::GetBandwidth)
    }

    /// Whether its messages come in windows, whose messages can share a buffer.
    pub(super) fn has_windows(self) -> bool {
        matches!(self, Test::Bandwidth | Test::Bidirectional)
    }

    /// Whether host buffers can stage its transfers.
    pub(super) fn stages(self) -> bool {
        matches!(self, Test::Latency | Test::Bandwidth | Test::Bidirectional)
    }

    fn ranks(self) -> usize {
        match self {
            Test::Alltoall(ranks) => ranks,
            _ => 2,
        }
    }

    pub(super) fn sizes(self) -> &'static [Size] {
        match self {
            Test::Alltoall(_) => &BLOCKS,
            _ => &SIZES,
        }
    }

    /// The buffers it is measured with.
    pub(super) fn buffers(self) -> &'static [Buffers] {
        match self {
            Test::Alltoall(_) => &[Buffers::HostHost],
            _ => &[Buffers::HostHost, Buffers::HostCard, Buffers::CardCard],
        }
    }

    pub(super) fn unit(self) -> &'static str {
        match self {
            Test::Latency | Test::PutLatency | Test::GetLatency | Test::Alltoall(_) => "µs",
            _ => "MB/s",
        }
    }
}

/// Memory of the buffers of ranks 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Buffers {
    HostHost,
    HostCard,
    CardCard,
}

impl Buffers {
    fn word(self) -> &'static str {
        match self {
            Buffers::HostHost => "HH",
            Buffers::HostCard => "HD",
            Buffers::CardCard => "DD",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Buffers::HostHost => "host to host",
            Buffers::HostCard => "host to card",
            Buffers::CardCard => "card to card",
        }
    }
}

/// How messages travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// UCX over its own shared memory, host buffers.
    SharedMemory,
    /// UCX over the soft device.
    Device(Buffers),
    /// UCX over the soft device, with a buffer for each message of a window.
    Separate(Buffers),
    /// UCX over the soft device with a buffer for each message of a window, from host buffers, with copies from and to card memory.
    Staged(Buffers),
}

/// The compiled program and two cards.
pub(super) struct Ranks<'a> {
    messages: PathBuf,
    library_dir: &'a Path,
    cards: [CardServer; 2],
    seconds: f64,
}

/// `mpirun` of Open MPI over UCX with the transports `tls`, and `ranks` ranks with the soft device.
pub(super) fn mpirun(ranks: usize, tls: &str, library_dir: &Path) -> Command {
    let mut command = Command::new("mpirun.openmpi");
    command.args(["-n", &ranks.to_string()]);
    command
        .env("LD_LIBRARY_PATH", library_dir)
        .env("UCX_TLS", tls)
        .env("OMPI_MCA_pml", "ucx")
        .env("OMPI_MCA_osc", "ucx")
        // Open MPI would refuse UCX over shared memory only.
        .env("OMPI_MCA_opal_common_ucx_tls", "any")
        .env("OMPI_MCA_opal_common_ucx_devices", "any")
        .env("OMPI_MCA_btl", "self")
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        // Ranks beyond the number of processors must not wait for each other in vain.
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    if tls.contains("rc_verbs") {
        command
            .env("LD_PRELOAD", library_dir.join("libmillstream_preload.so"))
            .env("UCX_NET_DEVICES", "mill0:1")
            // As docs/mpi.md recommends.
            .env("UCX_RC_RX_QUEUE_LEN", "512")
            .env("UCX_RNDV_THRESH", "32k");
    }
    command
}

/// Transports of UCX on the soft device: reliable connections, addressed through datagrams.
pub(super) const DEVICE: &str = "rc_verbs,ud_verbs:aux,self";
/// UCX's own shared memory.
pub(super) const SHARED_MEMORY: &str = "posix,self";

/// Runs a command. Returns its standard output.
pub(super) fn output(command: &mut Command, package: &str) -> Outcome<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command
        .output()
        .map_err(|cause| format!("cannot start {program}: {cause}; apt-get install {package}"))?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    if done.status.success() {
        return Ok(text);
    }
    Err(format!("{command:?}: {}\n{text}{}", done.status, String::from_utf8_lossy(&done.stderr)).into())
}

impl<'a> Ranks<'a> {
    pub(super) fn start(
        program: &Path,
        library_dir: &'a Path,
        folder: &Path,
        seconds: f64,
    ) -> Outcome<Ranks<'a>> {
        let folder = folder.join("mpi");
        std::fs::create_dir_all(&folder)?;
        let (source, messages) = (folder.join("messages.c"), folder.join("messages"));
        std::fs::write(&source, SOURCE)?;
        let include = library_dir.with_file_name("include");
        if !include.join("millstream_memory.h").is_file() {
            return Err(format!("{} has no millstream_memory.h; run `make lib`", include.display()).into());
        }
        let mut mpicc = Command::new("mpicc.openmpi");
        mpicc.args(["-O2", "-o"]).args([&messages, &source]).arg("-I").arg(include);
        output(mpicc.arg("-L").arg(library_dir).arg("-lmillstream_memory"), "libopenmpi-dev")?;
        let cards = [CardServer::start(program, "0")?, CardServer::start(program, "0")?];
        Ok(Ranks { messages, library_dir, cards, seconds })
    }

    /// Sends messages with known bytes. Returns their number.
    pub(super) fn verify(&self, test: Test, way: Way) -> Outcome<u64> {
        let text = output(self.command(test, way).arg("--verify"), "openmpi-bin")?;
        let words = text.strip_prefix(test.word()).and_then(|rest| rest.strip_prefix(": "));
        let count = words.and_then(|rest| rest.split(' ').next()?.parse().ok());
        Ok(count.ok_or_else(|| format!("messages {} --verify printed {text:?}", test.word()))?)
    }

    /// The values of all sizes of the test.
    pub(super) fn measure(&self, test: Test, way: Way) -> Outcome<Vec<f64>> {
        let seconds = self.seconds.to_string();
        let text = output(self.command(test, way).args(["--seconds", &seconds]), "openmpi-bin")?;
        let values: Vec<f64> = text
            .lines()
            .filter_map(|line| line.strip_prefix(test.word())?.split_whitespace().nth(1)?.parse().ok())
            .collect();
        if values.len() == test.sizes().len() {
            return Ok(values);
        }
        Err(format!("messages {} printed {text:?}", test.word()).into())
    }

    fn command(&self, test: Test, way: Way) -> Command {
        let (tls, buffers) = match way {
            Way::SharedMemory => (SHARED_MEMORY, Buffers::HostHost),
            Way::Device(buffers) | Way::Separate(buffers) | Way::Staged(buffers) => (DEVICE, buffers),
        };
        let sizes: Vec<String> = test.sizes().iter().map(|(bytes, _)| bytes.to_string()).collect();
        let mut command = mpirun(test.ranks(), tls, self.library_dir);
        command.arg(&self.messages).args([test.word(), "--buffers", buffers.word()]);
        command.args(["--sizes", &sizes.join(","), "--cards"]);
        command.arg(format!("{},{}", self.cards[0].name, self.cards[1].name));
        match way {
            Way::SharedMemory | Way::Device(_) => {}
            Way::Separate(_) => drop(command.arg("--separate")),
            Way::Staged(_) => drop(command.arg("--stage")),
        }
        if way == Way::SharedMemory && test.one_sided() {
            command.arg("--allocate");
        }
        command
    }
}
