//! Checkpoint and restore of a remote card by the holder of its lease.
//!
//! A checkpoint pauses all regions at a safe point. It holds dirty memory and, for each region, the kernel with its
//! arguments and state words. A restore writes the memory to another card, loads the kernels, and resumes those that
//! were running. The file gets its name by a rename when it is complete.
//!
//! ```text
//! header   72 B   magic, version, CRC-32 of header and regions, memory, banks, regions, chunks
//! regions  each   state, kernel name and hash, image place, banks, fuel, deadline, arguments, state words
//! chunks   each   offset, length, CRC-32 of the bytes; the bytes
//! ```
//!
//! Not saved: BAR2, results of completed runs, connections to peers, and incomplete DMA transfers. RDMA writes are not
//! paused; only the holder has the keys, so it has to stop writing.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::control::{KernelSource, RunRequest, region_register};
use super::info::text;
use crate::remote::{RemoteCard, RemoteError, Snapshot};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::codes::RegionState;
use millstream_card_abi::image::{MAX_IMAGE_BYTES, image_hash};
use millstream_card_abi::layout;
use millstream_card_abi::registers::KernelWords;
use millstream_card_abi::registers::{KERNEL_WORDS, MAX_CHUNKS, MAX_REGIONS, at, region_at};

const MAGIC: u64 = u64::from_le_bytes(*b"MSCHKPT\n");
const VERSION: u32 = 1;

layout! {
    /// Start of a checkpoint file.
    struct Header[72] {
        0 magic: u64 = "the bytes `MSCHKPT` and a line feed";
        8 version: u32 = "of this format";
        12 crc: u32 = "CRC-32 (IEEE 802.3) of the header, with this field zero, and the regions";
        16 card: u64 = "`card_id` of the card";
        24 memory_bytes: u64 = "size of its memory";
        32 bank_bytes: u64 = "size of a bank";
        40 bank_count: u32 = "banks";
        44 region_count: u32 = "regions that follow";
        48 chunk_count: u64 = "chunks that follow";
        56 data_bytes: u64 = "bytes in all chunks";
        64 reserved: u64 = "zero";
    }
}

layout! {
    /// One region in a checkpoint.
    struct RegionRecord[360] {
        0 running: u32 = "1: its kernel ran";
        4 loaded: u32 = "1: it has a kernel";
        8 name: [u64; 4] = "name of the kernel, text, padded with zeros";
        40 hash: u64 = "its hash";
        48 image_base: u64 = "offset of its image; a built-in kernel has length zero";
        56 image_bytes: u64 = "length of the image";
        64 banks: u64 = "banks of the run";
        72 fuel: u64 = "fuel of the run";
        80 timeout_ns: u64 = "timeout of the run, which starts again";
        88 arguments: [u64; 16] = "argument words";
        216 state: [u64; 16] = "state words";
        344 progress: u64 = "progress";
        352 reserved: u64 = "zero";
    }
}

layout! {
    /// One chunk in a checkpoint.
    struct Chunk[24] {
        0 offset: u64 = "place in card memory";
        8 len: u64 = "bytes that follow";
        16 crc: u32 = "their CRC-32";
        20 reserved: u32 = "zero";
    }
}

/// Why a checkpoint or restore failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file cannot be read or written.
    #[error("checkpoint {file}: {cause}")]
    Io {
        /// The file.
        file: PathBuf,
        /// The operating system's error.
        cause: io::Error,
    },
    /// A field of the file is invalid.
    #[error("checkpoint {file}: {field} = {value:#x}: {must}")]
    Field {
        /// The file.
        file: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        value: u64,
        /// The requirement.
        must: String,
    },
    /// The image of a kernel was overwritten, so that it could not be loaded again.
    #[error(
        "region {region}: the image of kernel {kernel:?} at {place} of card memory was overwritten; do not write to \
         an image while its kernel is loaded"
    )]
    ImageOverwritten {
        /// The region.
        region: u32,
        /// The kernel.
        kernel: String,
        /// Range of the image.
        place: MemoryRange,
    },
    /// An operation on the card failed.
    #[error(transparent)]
    Card(#[from] RemoteError),
}

/// Content of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct CheckpointSummary {
    /// Memory in the checkpoint (bytes).
    pub memory_bytes: u64,
    /// Regions with a running kernel: its name and progress.
    pub running: Vec<(u32, String, u64)>,
    /// Regions with an idle kernel.
    pub loaded: Vec<(u32, String)>,
}

/// Saves a card to a file. Calls `progress` with bytes done and bytes to do.
pub fn save(
    card: &RemoteCard,
    file: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<CheckpointSummary, CheckpointError> {
    card.pause()?;
    let saved = save_paused(card, file, &mut progress);
    card.resume()?;
    saved
}

fn save_paused(
    card: &RemoteCard,
    file: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<CheckpointSummary, CheckpointError> {
    let bar0 = card.snapshot()?;
    let hello = *card.hello();
    let mut summary = CheckpointSummary::default();
    let mut regions = Vec::new();
    for region in 0..hello.region_count.min(MAX_REGIONS as u32) {
        let saved = RegionRecord::of(&bar0, region);
        saved.check_image(card, region)?;
        saved.add_to(region, &mut summary);
        regions.push(saved);
    }
    let chunks = dirty_chunks(&bar0, hello.memory_bytes);
    let to_do = chunks.iter().map(|span| span.len).sum();

    let failed = |cause| CheckpointError::Io { file: file.to_owned(), cause };
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let partial = file.with_file_name(format!(".{name}.partial-{}", std::process::id()));
    let mut write = || -> Result<u64, CheckpointError> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&partial).map_err(failed)?);
        // The header is overwritten when the chunks are known.
        let mut head = vec![0; Header::BYTES];
        regions.iter().for_each(|region| head.extend(region.to_bytes()));
        out.write_all(&head).map_err(failed)?;
        let (mut count, mut bytes, mut done) = (0, 0, 0);
        let mut buffer = Vec::new();
        for span in &chunks {
            buffer.resize(span.len as usize, 0);
            card.read(span.offset, &mut buffer)?;
            done += span.len;
            progress(done, to_do);
            if buffer.iter().all(|byte| *byte == 0) {
                continue;
            }
            let crc = crc32fast::hash(&buffer);
            let chunk = Chunk { offset: span.offset, len: span.len, crc, reserved: 0 };
            out.write_all(&chunk.to_bytes()).and_then(|()| out.write_all(&buffer)).map_err(failed)?;
            count += 1;
            bytes += span.len;
        }
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            crc: 0,
            card: hello.card,
            memory_bytes: hello.memory_bytes,
            bank_bytes: hello.bank_bytes,
            bank_count: hello.bank_count,
            region_count: regions.len() as u32,
            chunk_count: count,
            data_bytes: bytes,
            reserved: 0,
        };
        head[..Header::BYTES].copy_from_slice(&header.to_bytes());
        let header = Header { crc: crc32fast::hash(&head), ..header };
        let out = out.into_inner().map_err(|error| failed(error.into_error()))?;
        use std::os::unix::fs::FileExt as _;
        out.write_all_at(&header.to_bytes(), 0).map_err(failed)?;
        out.sync_all().map_err(failed)?;
        fs::rename(&partial, file).map_err(failed)?;
        Ok(bytes)
    };
    let written = write();
    if written.is_err() {
        // The first error is the one to return.
        let _ = fs::remove_file(&partial);
    }
    summary.memory_bytes = written?;
    Ok(summary)
}

/// Restores a card from a file, after it has checked the whole file. The caller holds the lease of a clear card.
pub fn restore(
    card: &RemoteCard,
    file: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<CheckpointSummary, CheckpointError> {
    let mut reader = Reader::open(file)?;
    let header = reader.header;
    let hello = *card.hello();
    let misfit = |field: &str, value: u64, must: String| reader.bad(field, value, must);
    if header.memory_bytes > hello.memory_bytes {
        let must = format!("at most {:#x}, the memory of card {}", hello.memory_bytes, card.address());
        return Err(misfit("memory_bytes", header.memory_bytes, must));
    }
    if header.bank_bytes != hello.bank_bytes {
        let must = format!("{:#x}, as of card {}", hello.bank_bytes, card.address());
        return Err(misfit("bank_bytes", header.bank_bytes, must));
    }
    if header.region_count > hello.region_count {
        let must = format!("at most {}, the regions of card {}", hello.region_count, card.address());
        return Err(misfit("region_count", header.region_count.into(), must));
    }
    // The first pass checks, the second one restores, so a damaged file leaves the card unchanged.
    let to_do = 2 * header.data_bytes;
    let mut done = 0;
    reader.chunks(&mut |_, bytes| {
        done += bytes.len() as u64;
        progress(done, to_do);
        Ok(())
    })?;
    let mut reader = Reader::open(file)?;
    reader.chunks(&mut |offset, bytes| {
        card.write(offset, bytes)?;
        done += bytes.len() as u64;
        progress(done, to_do);
        Ok(())
    })?;
    let mut summary = CheckpointSummary { memory_bytes: header.data_bytes, ..CheckpointSummary::default() };
    for (region, saved) in (0..).zip(&reader.regions) {
        if saved.loaded == 0 {
            continue;
        }
        let name = saved.name();
        let source = match saved.image_bytes {
            0 => KernelSource::Builtin(&name),
            len => KernelSource::InMemory { span: MemoryRange::new(saved.image_base, len), hash: saved.hash },
        };
        let hash = card.load(region, source)?;
        if hash != saved.hash {
            let must = format!("{hash:#x}, as of kernel {name:?} of card {}", card.address());
            return Err(reader.bad(&format!("region {region}: hash"), saved.hash, must));
        }
        if saved.running != 0 {
            let start = RunRequest {
                arguments: saved.arguments,
                banks: saved.banks,
                fuel: Some(saved.fuel).filter(|fuel| *fuel != 0),
                timeout: Some(saved.timeout_ns)
                    .filter(|nanos| *nanos != 0)
                    .map(std::time::Duration::from_nanos),
                resume: Some(saved.state),
            };
            card.start(region, &start)?;
        }
        saved.add_to(region, &mut summary);
    }
    Ok(summary)
}

/// The dirty chunks of memory.
fn dirty_chunks(bar0: &Snapshot, memory: u64) -> Vec<MemoryRange> {
    let chunk = bar0.u64_at(at::dirty_chunk_bytes).max(4096);
    (0..MAX_CHUNKS as u64)
        .filter(|index| bar0.u64_at(at::dirty_bitmap + 8 * (*index as usize / 64)) >> (index % 64) & 1 == 1)
        .map(|index| index * chunk)
        .filter(|offset| *offset < memory)
        .map(|offset| MemoryRange::new(offset, chunk.min(memory - offset)))
        .collect()
}

impl RegionRecord {
    fn of(bar0: &Snapshot, region: u32) -> RegionRecord {
        let word = |register: usize| bar0.u64_at(region_register(region, register));
        let words =
            |register: usize| -> KernelWords { std::array::from_fn(|index| word(register + 8 * index)) };
        let running = matches!(bar0.region_state(region), Some(RegionState::Paused | RegionState::Running));
        let name: [u64; 4] = std::array::from_fn(|index| word(region_at::kernel_name + 8 * index));
        let of_image = name != [0; 4] && word(region_at::loaded_kernel) == 0;
        let when = |condition: bool, value: u64| if condition { value } else { 0 };
        RegionRecord {
            running: running.into(),
            loaded: (name != [0; 4]).into(),
            name,
            hash: word(region_at::loaded_hash),
            image_base: when(of_image, word(region_at::image_base)),
            image_bytes: when(of_image, word(region_at::image_bytes)),
            banks: word(region_at::banks),
            fuel: word(region_at::fuel),
            timeout_ns: word(region_at::run_timeout_ns),
            arguments: words(region_at::arguments),
            state: words(region_at::safe_point_state),
            progress: word(region_at::progress),
            reserved: 0,
        }
    }

    fn name(&self) -> String {
        let bytes: Vec<u8> = self.name.iter().flat_map(|word| word.to_le_bytes()).collect();
        text(&bytes)
    }

    fn add_to(&self, region: u32, summary: &mut CheckpointSummary) {
        match (self.running, self.loaded) {
            (0, 0) => {}
            (0, _) => summary.loaded.push((region, self.name())),
            _ => summary.running.push((region, self.name(), self.progress)),
        }
    }

    fn check_image(&self, card: &RemoteCard, region: u32) -> Result<(), CheckpointError> {
        if self.image_bytes == 0 {
            return Ok(());
        }
        let place = MemoryRange::new(self.image_base, self.image_bytes);
        let overwritten = CheckpointError::ImageOverwritten { region, kernel: self.name(), place };
        if self.image_bytes > MAX_IMAGE_BYTES {
            return Err(overwritten);
        }
        let mut image = vec![0; self.image_bytes as usize];
        card.read(self.image_base, &mut image)?;
        if image_hash(&image) == self.hash { Ok(()) } else { Err(overwritten) }
    }
}

/// Receives the offset and the bytes of a chunk.
type ChunkSink<'a> = dyn FnMut(u64, &[u8]) -> Result<(), CheckpointError> + 'a;

/// A checkpoint file with checked header and regions.
/// Reads the next `len` bytes of a checkpoint. A file that ends in them breaks the format.
fn read_part(input: &mut impl Read, len: usize, part: &str, path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let mut bytes = Vec::with_capacity(len);
    let read = input.take(len as u64).read_to_end(&mut bytes);
    let read = read.map_err(|cause| CheckpointError::Io { file: path.to_owned(), cause })?;
    if read < len {
        return Err(CheckpointError::Field {
            file: path.to_owned(),
            field: part.to_owned(),
            value: read as u64,
            must: format!("the file ends after so many bytes, not {len}"),
        });
    }
    Ok(bytes)
}

struct Reader {
    path: PathBuf,
    input: BufReader<File>,
    header: Header,
    regions: Vec<RegionRecord>,
}

impl Reader {
    fn open(path: &Path) -> Result<Reader, CheckpointError> {
        let io = |cause| CheckpointError::Io { file: path.to_owned(), cause };
        let bad = |field: &str, value: u64, must: &str| CheckpointError::Field {
            file: path.to_owned(),
            field: field.to_owned(),
            value,
            must: must.to_owned(),
        };
        let mut input = BufReader::with_capacity(1 << 20, File::open(path).map_err(io)?);
        let mut head = read_part(&mut input, Header::BYTES, "header", path)?;
        let header = Header::from_bytes(head.first_chunk().expect("as long as a header"));
        if header.magic != MAGIC {
            return Err(bad("magic", header.magic, "the file is not a checkpoint of a card"));
        }
        if header.version != VERSION {
            return Err(bad("version", header.version.into(), "this program knows version 1"));
        }
        if header.region_count as usize > MAX_REGIONS {
            return Err(bad("region_count", header.region_count.into(), "at most 8"));
        }
        let len = header.region_count as usize * RegionRecord::BYTES;
        let records = read_part(&mut input, len, "regions", path)?;
        let (regions, _) = records.as_chunks::<{ RegionRecord::BYTES }>();
        let regions = regions.iter().map(RegionRecord::from_bytes).collect();
        head.extend_from_slice(&records);
        head[12..16].fill(0);
        if crc32fast::hash(&head) != header.crc {
            return Err(bad(
                "crc",
                header.crc.into(),
                "header and regions have another checksum; the file is damaged",
            ));
        }
        if header.bank_bytes.checked_mul(header.bank_count.into()) != Some(header.memory_bytes) {
            return Err(bad("memory_bytes", header.memory_bytes, "must be bank_bytes × bank_count"));
        }
        Ok(Reader { path: path.to_owned(), input, header, regions })
    }

    fn bad(&self, field: &str, value: u64, must: impl Into<String>) -> CheckpointError {
        CheckpointError::Field { file: self.path.clone(), field: field.to_owned(), value, must: must.into() }
    }

    /// Reads and checks all chunks, with bounded memory for any file.
    fn chunks(&mut self, take: &mut ChunkSink<'_>) -> Result<(), CheckpointError> {
        const LONGEST: u64 = 1 << 31;
        let mut buffer = Vec::new();
        let mut total = 0u64;
        for index in 0..self.header.chunk_count {
            let io = |cause| CheckpointError::Io { file: self.path.clone(), cause };
            let bytes = read_part(&mut self.input, Chunk::BYTES, &format!("chunk {index}"), &self.path)?;
            let chunk = Chunk::from_bytes(bytes.first_chunk().expect("as long as a chunk's head"));
            let field = |name: &str| format!("chunk {index}: {name}");
            if !MemoryRange::new(chunk.offset, chunk.len).fits(self.header.memory_bytes) {
                return Err(self.bad(&field("offset"), chunk.offset, "chunk is outside the card's memory"));
            }
            if chunk.len > LONGEST {
                return Err(self.bad(&field("len"), chunk.len, "at most 2 GiB"));
            }
            buffer.clear();
            let read = (&mut self.input).take(chunk.len).read_to_end(&mut buffer).map_err(io)?;
            if read as u64 != chunk.len {
                return Err(self.bad(&field("len"), chunk.len, format!("the file ends after {read} bytes")));
            }
            let crc = crc32fast::hash(&buffer);
            if crc != chunk.crc {
                return Err(self.bad(&field("crc"), chunk.crc.into(), format!("the bytes have {crc:#x}")));
            }
            total = total.saturating_add(chunk.len);
            take(chunk.offset, &buffer)?;
        }
        if total != self.header.data_bytes {
            let must = format!("the chunks have {total:#x}");
            return Err(self.bad("data_bytes", self.header.data_bytes, must));
        }
        Ok(())
    }
}

const _: () = assert!(KERNEL_WORDS == 16);
