//! Arguments of `millstream card`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use millstream_card_abi::lease::{MAX_DURATION, MIN_DURATION};
use millstream_card_server::backing::{BackingKind, ParseBackingError};
use millstream_report::Bytes;

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
    /// Serve a card: memory banks, registers and regions behind a verbs device
    ///
    /// Runs until it is interrupted. Other commands, on this or other hosts, reach the
    /// card at the printed address:
    ///
    ///     millstream card serve u280-0 --listen 127.0.0.1:7480 &
    ///     millstream card info 127.0.0.1:7480
    ///     millstream card serve bar --memory-kind pci:0000:01:00.0/bar4
    ///     millstream card serve gpu --memory-kind cuda:0 --memory 16GiB
    #[command(verbatim_doc_comment)]
    Serve(ServeOptions),
    /// Show the cards of the site, one line each
    ///
    ///     millstream card list --site sites/recipe-baseline.toml
    #[command(verbatim_doc_comment)]
    List,
    /// Show the state of a card
    ///
    ///     millstream card info 127.0.0.1:7480
    #[command(verbatim_doc_comment)]
    Info(CardName),
    /// Acquire the lease of a card for the following commands, release it, or revoke another client's
    ///
    /// Only the holder of the lease has keys for memory and control registers. Each
    /// wrong key ends the connection that tries it. The commands load, start, stop,
    /// put, get, checkpoint and restore use the lease. It expires when no command has
    /// used it for the given time; then the card is cleared.
    ///
    ///     millstream card lease u280-0 --for 600
    ///     millstream card load u280-0 0 mix
    ///     millstream card start u280-0 0 0 65536 1000 --wait 60
    ///     millstream card lease u280-0 --release
    #[command(verbatim_doc_comment)]
    Lease(LeaseOptions),
    /// Load a kernel into a region: a built-in one, WebAssembly, or PTX on a GPU
    ///
    ///     millstream card load 127.0.0.1:7480 0 mix
    ///     millstream card load 127.0.0.1:7480 1 histogram.wasm
    #[command(verbatim_doc_comment)]
    Load(LoadOptions),
    /// Start the kernel of a region
    ///
    ///     millstream card start 127.0.0.1:7480 0 0 65536 1000 --wait 60
    #[command(verbatim_doc_comment)]
    Start(StartOptions),
    /// Stop the kernel of a region at its next safe point
    ///
    ///     millstream card stop 127.0.0.1:7480 0
    #[command(verbatim_doc_comment)]
    Stop(RegionName),
    /// Monitor cards: state, lease, regions, traffic, sensors
    ///
    ///     millstream card watch 127.0.0.1:7480 --once
    #[command(verbatim_doc_comment)]
    Watch(WatchOptions),
    /// Copy a file into card memory
    ///
    ///     millstream card put 127.0.0.1:7480 0 input.bin
    #[command(verbatim_doc_comment)]
    Put(PutOptions),
    /// Copy card memory into a file
    ///
    ///     millstream card get 127.0.0.1:7480 64KiB 4096 output.bin
    #[command(verbatim_doc_comment)]
    Get(GetOptions),
    /// Save a card with its running kernels to a file; the kernels continue
    ///
    ///     millstream card checkpoint 127.0.0.1:7480 card.ckpt
    #[command(verbatim_doc_comment)]
    Checkpoint(CheckpointOptions),
    /// Restore a card from a checkpoint; saved kernels resume
    ///
    ///     millstream card restore 127.0.0.1:7480 card.ckpt
    #[command(verbatim_doc_comment)]
    Restore(CheckpointOptions),
    /// Test a card: windows, keys, kernels, interrupts, DMA
    ///
    /// Acquires the lease, so the card must be free. The card is cleared afterwards.
    ///
    ///     millstream card selftest 127.0.0.1:7480
    #[command(verbatim_doc_comment)]
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
    /// Name of the card on this host
    pub(crate) name: String,
    /// Kind of card memory: emulated, pci:DDDD:BB:DD.F (the largest BAR of a PCIe device), pci:DDDD:BB:DD.F/barN,
    /// cuda:N (GPU memory)
    #[arg(long, default_value = "emulated", value_parser = memory_kind)]
    pub(crate) memory_kind: BackingKind,
    /// Size of all banks [default: 8GiB; for a PCIe device the whole BAR]
    #[arg(long, value_parser = parse_bytes)]
    pub(crate) memory: Option<u64>,
    /// Number of memory banks
    #[arg(long, default_value_t = 32)]
    pub(crate) banks: u32,
    /// Number of regions
    #[arg(long, default_value_t = 2)]
    pub(crate) regions: usize,
    /// Size of BAR2, the DMA window
    #[arg(long, default_value = "16MiB", value_parser = parse_bytes)]
    pub(crate) bar2: u64,
    /// Address for clients; port 0 takes any free one
    #[arg(long, default_value = "[::]:7480", value_name = "HOST:PORT")]
    pub(crate) listen: String,
    /// Accept this node of the site only; may be repeated; needs MILLSTREAM_KEYS [default: all nodes of the site]
    #[arg(long = "node", value_name = "NODE")]
    pub(crate) nodes: Vec<String>,
    /// How long threads poll before they sleep: microseconds, or `always`
    #[arg(long, default_value = "20", value_parser = spin, value_name = "MICROSECONDS")]
    pub(crate) spin: Duration,
    /// Seconds from a heartbeat to the expiry of a lease, unless its holder sets another time
    #[arg(long, default_value = "5", value_parser = lease_seconds, value_name = "SECONDS")]
    pub(crate) lease: Duration,
    /// Longest time of one command of a local user, unless the user sets another time
    #[arg(long, default_value = "60", value_parser = seconds, value_name = "SECONDS")]
    pub(crate) command_timeout: Duration,
    /// Allocate all pages at the start instead of at their first touch
    #[arg(long)]
    pub(crate) prefault: bool,
    /// End the card when its standard input ends, as it does when the program that started the card ends
    #[arg(long)]
    pub(crate) end_with_input: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LeaseOptions {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// Seconds without a command until the lease expires
    #[arg(long = "for", default_value = "300", value_parser = lease_seconds, value_name = "SECONDS")]
    pub(crate) duration: Duration,
    /// Seconds to wait while another client holds the lease
    #[arg(long, default_value = "0", value_parser = seconds, value_name = "SECONDS")]
    pub(crate) wait: Duration,
    /// Release the lease
    #[arg(long, conflicts_with = "revoke")]
    pub(crate) release: bool,
    /// Revoke the lease of the current holder
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
    /// Name of a built-in kernel (`millstream card info` lists them), or a file
    pub(crate) kernel: String,
    /// Offset of the image in card memory [default: the end of the last bank]
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
    /// Mask of the banks that the kernel may use [default: all]
    #[arg(long, value_parser = word, default_value = "0", hide_default_value = true, value_name = "MASK")]
    pub(crate) banks: u64,
    /// Limit of the work, in units of the kernel
    #[arg(long)]
    pub(crate) fuel: Option<u64>,
    /// Longest time of the run
    #[arg(long, value_parser = seconds, value_name = "SECONDS")]
    pub(crate) timeout: Option<Duration>,
    /// Wait for the end of the run, at most this long, and show the results
    #[arg(long, value_parser = seconds, value_name = "SECONDS")]
    pub(crate) wait: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct WatchOptions {
    /// Cards of the site file, or host:port [default: all of the site]
    #[arg(value_name = "CARD")]
    pub(crate) cards: Vec<String>,
    /// Show the cards once and exit
    #[arg(long)]
    pub(crate) once: bool,
    /// Seconds between two updates
    #[arg(long, default_value = "0.5", value_parser = seconds, value_name = "SECONDS")]
    pub(crate) every: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct PutOptions {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// Offset in card memory
    #[arg(value_parser = parse_bytes)]
    pub(crate) offset: u64,
    /// The file
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct GetOptions {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// Offset in card memory
    #[arg(value_parser = parse_bytes)]
    pub(crate) offset: u64,
    /// Number of bytes
    #[arg(value_parser = parse_bytes)]
    pub(crate) bytes: u64,
    /// The file
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CheckpointOptions {
    #[command(flatten)]
    pub(crate) card: CardName,
    /// The checkpoint file
    pub(crate) file: PathBuf,
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    text.parse::<Bytes>().map(|size| size.0).map_err(|error| error.to_string())
}

pub(crate) fn memory_kind(text: &str) -> Result<BackingKind, String> {
    text.parse().map_err(|error: ParseBackingError| error.to_string())
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

fn lease_seconds(text: &str) -> Result<Duration, String> {
    let duration = seconds(text)?;
    if (MIN_DURATION..=MAX_DURATION).contains(&duration) {
        return Ok(duration);
    }
    Err(format!("a lease lasts {} to {} s", MIN_DURATION.as_secs_f64(), MAX_DURATION.as_secs()))
}

fn word(text: &str) -> Result<u64, String> {
    let hexadecimal = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
    match (text.parse(), hexadecimal) {
        (Ok(number), _) | (_, Some(Ok(number))) => Ok(number),
        _ => parse_bytes(text).map_err(|_| format!("{text:?} is not a number of 64 bits")),
    }
}
