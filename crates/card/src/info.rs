//! The state of a card, decoded from its registers, for display and as JSON.

use serde::Serialize;

use crate::remote::Snapshot;
use millstream_card_abi::codes::{
    CARD_STATES, LEASE_STATES, MEMORY_KINDS, PEER_STATES, REGION_STATES, SENSOR_OF_HOST, SENSOR_POWER,
    SENSOR_TEMPERATURE,
};
use millstream_card_abi::command::{CAPABILITIES, CAUSES, Cause, Code};
use millstream_card_abi::registers::{
    KERNEL_DIRECTORY, KERNEL_ENTRY_BYTES, MAX_KERNELS, MAX_PEERS, MAX_REGIONS, REGION_CONTROL, REGION_STRIDE,
    at, region_at,
};

/// A card at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct CardInfo {
    /// `card_id`, in hexadecimal.
    pub card: String,
    /// Process id of the card process.
    pub pid: u32,
    /// Kind of card memory.
    pub memory_kind: String,
    /// Size of card memory (bytes).
    pub memory_bytes: u64,
    /// Number of banks.
    pub bank_count: u32,
    /// Size of a bank (bytes).
    pub bank_bytes: u64,
    /// Names of the capability bits.
    pub capabilities: Vec<String>,
    /// Kernels that can be loaded by name.
    pub kernels: Vec<String>,
    /// State of the card as a whole.
    pub state: String,
    /// Changes while the card is alive.
    pub heartbeat: u64,
    /// Time since the start of the card (s).
    pub clock_s: f64,
    /// The lease.
    pub lease: LeaseInfo,
    /// Its regions.
    pub regions: Vec<RegionInfo>,
    /// Temperature [°C], if known.
    pub temperature_c: Option<f64>,
    /// Power (W), if known.
    pub power_w: Option<f64>,
    /// Energy since the card started (J), if known.
    pub energy_j: Option<f64>,
    /// Whether temperature, power and energy are those of the host.
    pub sensors_of_host: bool,
    /// Bytes written by clients through BAR4, by bank, as they report.
    pub bank_rdma_written: Vec<u64>,
    /// Bytes read by clients through BAR4, by bank, as they report.
    pub bank_rdma_read: Vec<u64>,
    /// Bytes written by kernels that count traffic and by the DMA engine, by bank.
    pub bank_written: Vec<u64>,
    /// Bytes read by kernels that count traffic and by the DMA engine, by bank.
    pub bank_read: Vec<u64>,
    /// Bytes written and read through BAR2 by clients, as they report.
    pub bar2_rdma: (u64, u64),
    /// Bytes written to and read from BAR2 by the DMA engine.
    pub bar2: (u64, u64),
    /// Kernels declared hung.
    pub hung_kernels: u64,
    /// The DMA engine.
    pub dma: DmaInfo,
    /// Messages sent and dropped.
    pub messages: (u64, u64),
    /// Doorbells received as immediate data.
    pub immediate_doorbells: u64,
}

/// The lease of a card.
#[derive(Clone, Debug, Serialize)]
pub struct LeaseInfo {
    /// State of the lease.
    pub state: String,
    /// Epoch of the current lease, or of the next one.
    pub epoch: u64,
    /// Id of the holder, 0: none.
    pub holder: u32,
    /// Time to its expiry without a heartbeat (s).
    pub expires_in_s: Option<f64>,
    /// Leases granted.
    pub grants: u64,
    /// Why the latest lease ended; none if it was released.
    pub end_cause: Option<String>,
    /// Connected clients.
    pub clients: u32,
}

/// A region of a card.
#[derive(Clone, Debug, Serialize)]
pub struct RegionInfo {
    /// Its state.
    pub state: String,
    /// Name of the loaded kernel.
    pub kernel: Option<String>,
    /// Its hash, in hexadecimal.
    pub hash: Option<String>,
    /// Cause and offending value of the latest failed command or run.
    pub cause: Option<(String, u64)>,
    /// Completed runs.
    pub runs: u64,
    /// Failed ones.
    pub failed: u64,
    /// Time of all runs (s).
    pub busy_s: f64,
    /// Progress of the run, in units of the kernel.
    pub progress: u64,
    /// Fuel of the latest run.
    pub fuel_used: u64,
    /// The first result words.
    pub results: [u64; 4],
}

/// The DMA engine of a card.
#[derive(Clone, Debug, Serialize)]
pub struct DmaInfo {
    /// Completed transfers.
    pub completed: u64,
    /// Failed ones.
    pub failed: u64,
    /// Bytes transferred.
    pub bytes: u64,
    /// Time with a transfer outstanding (s).
    pub busy_s: f64,
    /// Peers that are not in the state `None`: number and state.
    pub peers: Vec<(usize, String)>,
}

impl CardInfo {
    /// Decodes a snapshot.
    pub fn of(bar0: &Snapshot) -> CardInfo {
        let seconds = |nanos: u64| nanos as f64 / 1e9;
        let capabilities = bar0.u64_at(at::capabilities);
        let banks = (bar0.u32_at(at::bank_count) as usize).min(64);
        let table = |at: usize| (0..banks).map(|bank| bar0.u64_at(at + 8 * bank)).collect();
        let sensors = bar0.u32_at(at::sensors);
        let known = |bit: u32, value: f64| (sensors & bit != 0).then_some(value);
        let held = bar0.u32_at(at::lease_holder) != 0;
        let left = bar0.u64_at(at::lease_expires_ns).saturating_sub(bar0.u64_at(at::clock_ns));
        let end = bar0.u32_at(at::lease_end_cause);
        CardInfo {
            card: format!("{:016x}", bar0.u64_at(at::card_id)),
            pid: bar0.u32_at(at::pid),
            memory_kind: name(MEMORY_KINDS, bar0.u32_at(at::memory_kind)),
            memory_bytes: bar0.u64_at(at::memory_bytes),
            bank_count: bar0.u32_at(at::bank_count),
            bank_bytes: bar0.u64_at(at::bank_bytes),
            capabilities: CAPABILITIES
                .iter()
                .filter(|bit| capabilities & bit.code != 0)
                .map(|bit| bit.name.trim_start_matches("CAPABILITY_").to_lowercase())
                .collect(),
            kernels: kernels(bar0),
            state: name(CARD_STATES, bar0.u32_at(at::card_state)),
            heartbeat: bar0.u64_at(at::heartbeat),
            clock_s: seconds(bar0.u64_at(at::clock_ns)),
            lease: LeaseInfo {
                state: name(LEASE_STATES, bar0.u32_at(at::lease_state)),
                epoch: bar0.u64_at(at::lease_epoch),
                holder: bar0.u32_at(at::lease_holder),
                expires_in_s: held.then(|| seconds(left)),
                grants: bar0.u64_at(at::lease_grants),
                end_cause: (end != 0).then(|| Cause::from_code(end).to_string()),
                clients: bar0.u32_at(at::client_count),
            },
            regions: (0..(bar0.u32_at(at::region_count) as usize).min(MAX_REGIONS))
                .map(|region| RegionInfo::of(bar0, region))
                .collect(),
            temperature_c: known(SENSOR_TEMPERATURE, f64::from(bar0.u32_at(at::temperature_mdeg)) / 1e3),
            power_w: known(SENSOR_POWER, f64::from(bar0.u32_at(at::power_mw)) / 1e3),
            energy_j: known(SENSOR_POWER, bar0.u64_at(at::energy_uj) as f64 / 1e6),
            sensors_of_host: sensors & SENSOR_OF_HOST != 0,
            bank_rdma_written: table(at::bank_rdma_written),
            bank_rdma_read: table(at::bank_rdma_read),
            bank_written: table(at::bank_written),
            bank_read: table(at::bank_read),
            bar2_rdma: (bar0.u64_at(at::bar2_rdma_written), bar0.u64_at(at::bar2_rdma_read)),
            bar2: (bar0.u64_at(at::bar2_written), bar0.u64_at(at::bar2_read)),
            hung_kernels: bar0.u64_at(at::hung_kernels),
            dma: DmaInfo {
                completed: bar0.u64_at(at::dma_completed),
                failed: bar0.u64_at(at::dma_failed),
                bytes: bar0.u64_at(at::dma_bytes),
                busy_s: seconds(bar0.u64_at(at::dma_busy_ns)),
                peers: (0..MAX_PEERS)
                    .map(|peer| (peer, bar0.u32_at(at::peer_state + 4 * peer)))
                    .filter(|(_, state)| *state != 0)
                    .map(|(peer, state)| (peer, name(PEER_STATES, state)))
                    .collect(),
            },
            messages: (bar0.u64_at(at::messages_sent), bar0.u64_at(at::messages_dropped)),
            immediate_doorbells: bar0.u64_at(at::immediate_doorbells),
        }
    }
}

impl RegionInfo {
    fn of(bar0: &Snapshot, region: usize) -> RegionInfo {
        let base = REGION_CONTROL + region * REGION_STRIDE;
        let word = |register: usize| bar0.u64_at(base + register);
        let cause = bar0.u32_at(base + region_at::cause);
        let kernel = text(bar0.bytes(base + region_at::kernel_name, 32));
        let loaded = !kernel.is_empty();
        RegionInfo {
            state: name(REGION_STATES, bar0.u32_at(base + region_at::status)),
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
    let count = (bar0.u32_at(at::kernel_count) as usize).min(MAX_KERNELS);
    (0..count)
        .map(|index| {
            text(&bar0.bytes(KERNEL_DIRECTORY + index * KERNEL_ENTRY_BYTES, KERNEL_ENTRY_BYTES)[4..])
        })
        .collect()
}

/// Decodes text that is padded with zeros.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn name(codes: &[Code], code: u32) -> String {
    let known = codes.iter().find(|known| known.code == u64::from(code));
    known.map_or_else(|| format!("unknown ({code})"), |known| known.name.to_owned())
}
