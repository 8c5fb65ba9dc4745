//! What a card shows of itself, in the words of its registers: for people, and as JSON.

use serde::Serialize;

use super::remote::Snapshot;
use crate::command::{CAPABILITIES, CAUSES, Cause, Code};
use crate::region::codes::{
    CARD_STATES, LEASE_STATES, MEMORY_KINDS, PEER_STATES, REGION_STATES, SENSOR_OF_HOST, SENSOR_POWER,
    SENSOR_TEMPERATURE,
};
use crate::registers::{
    KERNEL_DIRECTORY, KERNEL_ENTRY_BYTES, MAX_KERNELS, MAX_PEERS, MAX_REGIONS, REGION_CONTROL, REGION_STRIDE,
    at, region_at,
};

/// A card at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct CardInfo {
    /// `card_id`, in hexadecimal.
    pub card: String,
    /// Process id of an emulated card.
    pub process: u32,
    /// What card memory is made of.
    pub memory_kind: String,
    /// Size of card memory [bytes].
    pub memory_bytes: u64,
    /// Banks.
    pub bank_count: u32,
    /// Size of one [bytes].
    pub bank_bytes: u64,
    /// Names of the capability bits.
    pub capabilities: Vec<String>,
    /// Kernels that can be loaded by name.
    pub kernels: Vec<String>,
    /// What the card as a whole does.
    pub state: String,
    /// Grows while the card is alive.
    pub heartbeat: u64,
    /// Time of the card [s].
    pub clock_s: f64,
    /// The lease.
    pub lease: LeaseInfo,
    /// Its regions.
    pub regions: Vec<RegionInfo>,
    /// Temperature [°C], if known.
    pub temperature_c: Option<f64>,
    /// Power [W], if known.
    pub power_w: Option<f64>,
    /// Energy since the card started [J], if known.
    pub energy_j: Option<f64>,
    /// Whether these were measured on the host, not on a card.
    pub sensors_of_host: bool,
    /// Bytes written through the windows by nodes, by bank, as they report.
    pub window_written: Vec<u64>,
    /// Bytes read through the windows by nodes, by bank, as they report.
    pub window_read: Vec<u64>,
    /// Bytes written by kernels that count and copies, by bank.
    pub bank_written: Vec<u64>,
    /// Bytes read by kernels that count and copies, by bank.
    pub bank_read: Vec<u64>,
    /// Bytes written and read through the DMA window by nodes, as they report.
    pub dma_window: (u64, u64),
    /// Bytes written to and read from the DMA window by copies.
    pub dma: (u64, u64),
    /// Kernels that were given up because they did not end.
    pub regions_lost: u64,
    /// Copies.
    pub copies: CopyInfo,
    /// Messages sent and lost.
    pub messages: (u64, u64),
    /// Doorbells that came with immediate data.
    pub doorbells: u64,
}

/// The lease of a card.
#[derive(Clone, Debug, Serialize)]
pub struct LeaseInfo {
    /// Free, held, clearing.
    pub state: String,
    /// Epoch that runs, or the next one.
    pub epoch: u64,
    /// Number of the holder, 0: nobody.
    pub holder: u32,
    /// Time to its end without a heartbeat [s].
    pub left_s: Option<f64>,
    /// Leases so far.
    pub leases: u64,
    /// Why the latest one ended; nothing if it was given back.
    pub latest_end: Option<String>,
    /// Nodes connected.
    pub nodes: u32,
}

/// A region of a card.
#[derive(Clone, Debug, Serialize)]
pub struct RegionInfo {
    /// What it does.
    pub state: String,
    /// The kernel loaded.
    pub kernel: Option<String>,
    /// Its hash, in hexadecimal.
    pub hash: Option<String>,
    /// What was wrong with the latest command or run, and the offending value.
    pub cause: Option<(String, u64)>,
    /// Runs that have ended.
    pub runs: u64,
    /// Of them, with an error.
    pub failed: u64,
    /// Time that they took [s].
    pub busy_s: f64,
    /// What the run has done so far, in the kernel's measure.
    pub progress: u64,
    /// Fuel of the latest run.
    pub fuel_used: u64,
    /// The first result words.
    pub results: [u64; 4],
}

/// The copy engine of a card.
#[derive(Clone, Debug, Serialize)]
pub struct CopyInfo {
    /// Descriptors completed.
    pub completed: u64,
    /// Of them, with an error.
    pub failed: u64,
    /// Bytes.
    pub bytes: u64,
    /// Time with a copy outstanding [s].
    pub busy_s: f64,
    /// Peers that are not in the state `None`: number and state.
    pub peers: Vec<(usize, String)>,
}

impl CardInfo {
    /// Reads a snapshot.
    pub fn of(bar0: &Snapshot) -> CardInfo {
        let seconds = |nanos: u64| nanos as f64 / 1e9;
        let capabilities = bar0.word(at::capabilities);
        let banks = (bar0.half(at::bank_count) as usize).min(64);
        let table = |at: usize| (0..banks).map(|bank| bar0.word(at + 8 * bank)).collect();
        let sensors = bar0.half(at::sensors);
        let known = |bit: u32, value: f64| (sensors & bit != 0).then_some(value);
        let held = bar0.half(at::lease_holder) != 0;
        let left = bar0.word(at::lease_expires_ns).saturating_sub(bar0.word(at::clock_ns));
        let end = bar0.half(at::lease_end_cause);
        CardInfo {
            card: format!("{:016x}", bar0.word(at::card_id)),
            process: bar0.half(at::process),
            memory_kind: name(MEMORY_KINDS, bar0.half(at::memory_kind)),
            memory_bytes: bar0.word(at::memory_bytes),
            bank_count: bar0.half(at::bank_count),
            bank_bytes: bar0.word(at::bank_bytes),
            capabilities: CAPABILITIES
                .iter()
                .filter(|bit| capabilities & bit.code != 0)
                .map(|bit| bit.name.trim_start_matches("CAPABILITY_").to_lowercase())
                .collect(),
            kernels: kernels(bar0),
            state: name(CARD_STATES, bar0.half(at::card_state)),
            heartbeat: bar0.word(at::heartbeat),
            clock_s: seconds(bar0.word(at::clock_ns)),
            lease: LeaseInfo {
                state: name(LEASE_STATES, bar0.half(at::lease_state)),
                epoch: bar0.word(at::lease_epoch),
                holder: bar0.half(at::lease_holder),
                left_s: held.then(|| seconds(left)),
                leases: bar0.word(at::leases),
                latest_end: (end != 0).then(|| Cause::from_code(end).to_string()),
                nodes: bar0.half(at::lease_nodes),
            },
            regions: (0..(bar0.half(at::region_count) as usize).min(MAX_REGIONS))
                .map(|region| RegionInfo::of(bar0, region))
                .collect(),
            temperature_c: known(SENSOR_TEMPERATURE, f64::from(bar0.half(at::temperature_mdeg)) / 1e3),
            power_w: known(SENSOR_POWER, f64::from(bar0.half(at::power_mw)) / 1e3),
            energy_j: known(SENSOR_POWER, bar0.word(at::energy_uj) as f64 / 1e6),
            sensors_of_host: sensors & SENSOR_OF_HOST != 0,
            window_written: table(at::window_written),
            window_read: table(at::window_read),
            bank_written: table(at::bank_written),
            bank_read: table(at::bank_read),
            dma_window: (bar0.word(at::dma_window_written), bar0.word(at::dma_window_read)),
            dma: (bar0.word(at::dma_written), bar0.word(at::dma_read)),
            regions_lost: bar0.word(at::regions_lost),
            copies: CopyInfo {
                completed: bar0.word(at::copy_completed),
                failed: bar0.word(at::copies_failed),
                bytes: bar0.word(at::copy_bytes),
                busy_s: seconds(bar0.word(at::copy_busy_ns)),
                peers: (0..MAX_PEERS)
                    .map(|peer| (peer, bar0.half(at::peer_state + 4 * peer)))
                    .filter(|(_, state)| *state != 0)
                    .map(|(peer, state)| (peer, name(PEER_STATES, state)))
                    .collect(),
            },
            messages: (bar0.word(at::messages_sent), bar0.word(at::messages_lost)),
            doorbells: bar0.word(at::doorbells_by_message),
        }
    }
}

impl RegionInfo {
    fn of(bar0: &Snapshot, region: usize) -> RegionInfo {
        let base = REGION_CONTROL + region * REGION_STRIDE;
        let word = |register: usize| bar0.word(base + register);
        let cause = bar0.half(base + region_at::cause);
        let kernel = text(bar0.bytes(base + region_at::name, 32));
        let loaded = !kernel.is_empty();
        RegionInfo {
            state: name(REGION_STATES, bar0.half(base + region_at::status)),
            hash: loaded.then(|| format!("{:016x}", word(region_at::loaded_hash))),
            kernel: loaded.then_some(kernel),
            cause: (cause != 0).then(|| (name(CAUSES, cause), word(region_at::detail))),
            runs: word(region_at::runs),
            failed: word(region_at::failed_runs),
            busy_s: word(region_at::busy_ns) as f64 / 1e9,
            progress: word(region_at::progress),
            fuel_used: word(region_at::fuel_used),
            results: std::array::from_fn(|index| word(region_at::results + 8 * index)),
        }
    }
}

fn kernels(bar0: &Snapshot) -> Vec<String> {
    let count = (bar0.half(at::kernel_count) as usize).min(MAX_KERNELS);
    (0..count)
        .map(|index| {
            text(&bar0.bytes(KERNEL_DIRECTORY + index * KERNEL_ENTRY_BYTES, KERNEL_ENTRY_BYTES)[4..])
        })
        .collect()
}

/// Text that is padded with zeros.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn name(codes: &[Code], code: u32) -> String {
    let known = codes.iter().find(|known| known.code == u64::from(code));
    known.map_or_else(|| format!("unknown ({code})"), |known| known.name.to_owned())
}
