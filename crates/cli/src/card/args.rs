//! The words of `millstream card`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use millstream_card::backing::Kind;
use millstream_evb::config::Size;

#[derive(Debug, Args)]
pub(crate) struct CardOptions {
    /// The site file that names cards [default: site.toml, or MILLSTREAM_SITE]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) site: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: CardCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CardCommand {
    /// Be a card: memory banks, registers and regions behind a verbs device of its own
    ///
    /// Runs until it is interrupted. Other commands, here or on other nodes, reach it at the address that it
    /// prints:
    ///
    ///     millstream card serve u280-0 --listen 127.0.0.1:7480 &
    ///     millstream card info 127.0.0.1:7480
    ///     millstream card serve bar --kind pci:0000:01:00.0/bar4
    ///     millstream card serve gpu --kind cuda:0 --memory 16GiB
    #[command(verbatim_doc_comment)]
    Serve(ServeOptions),
    /// Show the cards of the site, one line each
    List,
    /// Show all that a card says of itself
    Info(CardName),
    /// Take the lease of a card for the commands that follow; or give it back, or end somebody else's
    ///
    /// Whoever holds the lease uses the card: its keys open memory and control registers, nobody else's do.
    /// The commands load, start, stop, put, get, checkpoint and restore go on with the lease that this one
    /// took. It ends when no command has used it for the time given; then the card is cleared.
    ///
    ///     millstream card lease u280-0 --for 600
    ///     millstream card load u280-0 0 mix
    ///     millstream card start u280-0 0 0 65536 1000 --wait 60
    ///     millstream card lease u280-0 --release
    #[command(verbatim_doc_comment)]
    Lease(LeaseOptions),
    /// Load a kernel into a region: one that the card brings along, by name, or a WebAssembly file
    Load(LoadOptions),
    /// Start the kernel of a region
    Start(StartOptions),
    /// Stop the kernel of a region at its next safe point
    Stop(RegionName),
    /// Watch cards: state, lease, regions, traffic, sensors, several times a second
    Watch(WatchOptions),
    /// Copy a file into card memory
    Put(PutOptions),
    /// Copy card memory into a file
    Get(GetOptions),
    /// Save a card with its running kernels to a file; they go on afterwards
    Checkpoint(CheckpointOptions),
    /// Bring a card into the state of a checkpoint; kernels that ran go on
    Restore(CheckpointOptions),
    /// Try a card out, step by step, and say what works: windows, keys, kernels, interrupts, copies
    ///
    /// Takes the lease, so the card must be free; clears it before and afterwards.
    Selftest(CardName),
}

#[derive(Debug, Args)]
pub(crate) struct CardName {
    /// A card of the site file, or host:port
    #[arg(value_name = "CARD")]
    pub(crate) card: String,
}

#[derive(Debug, Args)]
pub(crate) struct ServeOptions {
    /// Name for users of this host
    pub(crate) name: String,
    /// What its memory is: emulated, pci:DDDD:BB:DD.F or pci:DDDD:BB:DD.F/barN (a BAR of a PCIe device, else its
    /// largest), cuda:N (memory of a GPU)
    #[arg(long, default_value = "emulated", value_parser = kind)]
    pub(crate) kind: Kind,
    /// All banks together [default: 8GiB; of a PCIe device the whole BAR]
    #[arg(long, value_parser = parse_bytes)]
    pub(crate) memory: Option<u64>,
    /// Memory banks; the U280 has 32
    #[arg(long, default_value_t = 32)]
    pub(crate) banks: u32,
    /// Regions for kernels
    #[arg(long, default_value_t = 2)]
    pub(crate) regions: usize,
    /// The DMA window, BAR2
    #[arg(long, default_value = "16MiB", value_parser = parse_bytes)]
    pub(crate) dma: u64,
    /// Where to listen for nodes; port 0 takes any free one
    #[arg(long, default_value = "[::]:7480", value_name = "HOST:PORT")]
    pub(crate) listen: String,
    /// How long a region looks for its next doorbell before it sleeps: microseconds, or `always`
    #[arg(long, default_value = "20", value_parser = spin, value_name = "MICROSECONDS")]
    pub(crate) spin: Duration,
    /// Seconds from a heartbeat to the end of a lease, unless its holder asks for another time
    #[arg(long, default_value = "5", value_parser = seconds, value_name = "SECONDS")]
    pub(crate) lease: Duration,
    /// Longest time of one command of the rings that users of this host have, unless they set another
    #[arg(long, default_value = "60", value_parser = seconds, value_name = "SECONDS")]
    pub(crate) command_limit: Duration,
    /// Give memory to all banks now instead of at their first touch
    #[arg(long)]
    pub(crate) prefault: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LeaseOptions {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// Seconds without a command after which the lease ends
    #[arg(long = "for", default_value = "300", value_parser = seconds, value_name = "SECONDS")]
    pub(crate) duration: Duration,
    /// Seconds to wait while another node holds the card
    #[arg(long, default_value = "0", value_parser = seconds, value_name = "SECONDS")]
    pub(crate) wait: Duration,
    /// Give the lease back
    #[arg(long, conflicts_with = "revoke")]
    pub(crate) release: bool,
    /// End the lease of whoever holds the card
    #[arg(long)]
    pub(crate) revoke: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RegionName {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// The region, from 0
    pub(crate) region: u32,
}

#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    #[command(flatten)]
    pub(crate) region: RegionName,
    /// Name of a kernel (`millstream card info` lists them), or a file
    pub(crate) kernel: String,
    /// Where the image of a file goes in card memory, and stays [default: the end of the last bank]
    #[arg(long, value_parser = parse_bytes, value_name = "OFFSET")]
    pub(crate) at: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct StartOptions {
    #[command(flatten)]
    pub(crate) region: RegionName,
    /// Up to 16 argument words: decimal, hexadecimal (0x…) or a size (64KiB)
    #[arg(value_parser = word, num_args = 0..=16, value_name = "ARGUMENT")]
    pub(crate) arguments: Vec<u64>,
    /// Banks that the kernel may use, a bit each [default: all]
    #[arg(long, value_parser = word, default_value = "0", hide_default_value = true, value_name = "MASK")]
    pub(crate) banks: u64,
    /// Most units of work, for kernels that count
    #[arg(long)]
    pub(crate) fuel: Option<u64>,
    /// Longest time of the run
    #[arg(long, value_parser = seconds, value_name = "SECONDS")]
    pub(crate) deadline: Option<Duration>,
    /// Wait so long for its end, and show the results
    #[arg(long, value_parser = seconds, value_name = "SECONDS")]
    pub(crate) wait: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct WatchOptions {
    /// Cards of the site file, or host:port [default: all of the site]
    #[arg(value_name = "CARD")]
    pub(crate) cards: Vec<String>,
    /// Show them once and end
    #[arg(long)]
    pub(crate) once: bool,
    /// Seconds between two looks
    #[arg(long, default_value = "0.5", value_parser = seconds, value_name = "SECONDS")]
    pub(crate) every: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct PutOptions {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// Where in card memory
    #[arg(value_parser = parse_bytes)]
    pub(crate) offset: u64,
    /// The file
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct GetOptions {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// Where in card memory
    #[arg(value_parser = parse_bytes)]
    pub(crate) offset: u64,
    /// How much
    #[arg(value_parser = parse_bytes)]
    pub(crate) bytes: u64,
    /// The file
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CheckpointOptions {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// The checkpoint
    pub(crate) file: PathBuf,
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    text.parse::<Size>().map(|size| size.0).map_err(|error| error.to_string())
}

fn kind(text: &str) -> Result<Kind, String> {
    text.parse().map_err(|error: millstream_card::backing::BadKind| error.to_string())
}

fn spin(text: &str) -> Result<Duration, String> {
    match text {
        "always" => Ok(Duration::from_secs(365 * 24 * 3600)),
        text => text
            .parse()
            .map(Duration::from_micros)
            .map_err(|_| format!("{text:?} is neither a number of microseconds nor `always`")),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a number of seconds");
    let seconds: f64 = text.parse().map_err(|_| bad())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| bad())
}

fn word(text: &str) -> Result<u64, String> {
    let hexadecimal = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
    match (text.parse(), hexadecimal) {
        (Ok(number), _) | (_, Some(Ok(number))) => Ok(number),
        _ => parse_bytes(text).map_err(|_| format!("{text:?} is not a number of 64 bits")),
    }
}
