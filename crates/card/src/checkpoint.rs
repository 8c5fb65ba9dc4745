//! Checkpoint and restore of a card, over the network, by whoever holds its lease.
//!
//! All regions are brought to a safe point; then memory that was ever written, and what each region runs with
//! its state words, go to a file. On another card the memory is written back, the kernels are loaded, and those
//! that ran go on from their state words. The file is written under another name and renamed when it is
//! complete, so there is never half a checkpoint.
//!
//! ```text
//! header   72 B   magic, version, CRC-32 of header and regions, memory, banks, regions, chunks
//! regions  each   state, kernel name and hash, image place, banks, fuel, deadline, arguments, state words
//! chunks   each   offset, length, CRC-32 of the bytes; the bytes
//! ```
//!
//! The bytes of the DMA window (BAR2), results of runs that have ended, connections to peers and copies that
//! are not complete are not in it. What other nodes write by RDMA while the card is paused is the holder's
//! business: it is the only one who has the keys.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::control::{KernelSource, Start, control_of};
use super::info::text;
use super::remote::{RemoteCard, RemoteError, Snapshot};
use crate::layout::layout;
use crate::memory::Span;
use crate::region::codes::RegionState;
use crate::region::image_hash;
use crate::region::kernel::Words;
use crate::registers::{MAX_CHUNKS, MAX_REGIONS, WORDS, at, region_at};

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
    struct SavedRegion[360] {
        0 running: u32 = "1: its kernel ran";
        4 loaded: u32 = "1: it has a kernel";
        8 name: [u64; 4] = "name of the kernel, text, padded with zeros";
        40 hash: u64 = "its hash";
        48 image_base: u64 = "place of its image; length zero: it is one that cards bring along";
        56 image_bytes: u64 = "length of the image";
        64 banks: u64 = "banks of the run";
        72 fuel: u64 = "fuel of the run";
        80 deadline_ns: u64 = "deadline of the run, which starts anew";
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

/// Why a card was not checkpointed or restored.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file cannot be read or written.
    #[error("checkpoint {file}: {cause}")]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The file is not what it must be.
    #[error("checkpoint {file}: {field} = {value:#x}: {must}")]
    Field {
        /// The file.
        file: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        value: u64,
        /// What it must be.
        must: String,
    },
    /// The image of a kernel was overwritten, so that it could not be loaded again.
    #[error(
        "region {region}: the image of kernel {kernel:?} at {place} of card memory was overwritten; keep images \
         in place while their kernels are loaded"
    )]
    ImageOverwritten {
        /// The region.
        region: u32,
        /// The kernel.
        kernel: String,
        /// Where the image should be.
        place: Span,
    },
    /// The card.
    #[error(transparent)]
    Card(#[from] RemoteError),
}

/// What was saved or restored.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Memory in the checkpoint [bytes].
    pub memory_bytes: u64,
    /// Regions whose kernel ran, with its name and progress.
    pub running: Vec<(u32, String, u64)>,
    /// Regions with a kernel that did not run.
    pub loaded: Vec<(u32, String)>,
}

/// Saves a card to a file. `progress` is told bytes done and bytes to do.
pub fn save(
    card: &RemoteCard,
    file: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<Summary, CheckpointError> {
    card.pause()?;
    let saved = save_paused(card, file, &mut progress);
    card.resume()?;
    saved
}

fn save_paused(
    card: &RemoteCard,
    file: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Summary, CheckpointError> {
    let bar0 = card.snapshot()?;
    let greeting = *card.greeting();
    let mut summary = Summary::default();
    let mut regions = Vec::new();
    for region in 0..greeting.region_count.min(MAX_REGIONS as u32) {
        let saved = SavedRegion::of(&bar0, region);
        saved.check_image(card, region)?;
        saved.note(region, &mut summary);
        regions.push(saved);
    }
    let chunks = written(&bar0, greeting.memory_bytes);
    let to_do = chunks.iter().map(|span| span.len).sum();

    let failed = |cause| CheckpointError::Io { file: file.to_owned(), cause };
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let partial = file.with_file_name(format!(".{name}.partial-{}", std::process::id()));
    let mut write = || -> Result<u64, CheckpointError> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&partial).map_err(failed)?);
        // The header is written again when the chunks are known.
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
            card: greeting.card,
            memory_bytes: greeting.memory_bytes,
            bank_bytes: greeting.bank_bytes,
            bank_count: greeting.bank_count,
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
        // Whatever became of it, the error at hand is the one to tell.
        let _ = fs::remove_file(&partial);
    }
    summary.memory_bytes = written?;
    Ok(summary)
}

/// Restores a card from a file, after all of the file was checked. The card must be clear and its lease held.
pub fn restore(
    card: &RemoteCard,
    file: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<Summary, CheckpointError> {
    let mut reader = Reader::open(file)?;
    let header = reader.header;
    let greeting = *card.greeting();
    let misfit = |field: &str, value: u64, must: String| reader.bad(field, value, must);
    if header.memory_bytes > greeting.memory_bytes {
        let must = format!("at most {:#x}, the memory of card {}", greeting.memory_bytes, card.address());
        return Err(misfit("memory_bytes", header.memory_bytes, must));
    }
    if header.bank_bytes != greeting.bank_bytes {
        let must = format!("{:#x}, as of card {}", greeting.bank_bytes, card.address());
        return Err(misfit("bank_bytes", header.bank_bytes, must));
    }
    if header.region_count > greeting.region_count {
        let must = format!("at most {}, the regions of card {}", greeting.region_count, card.address());
        return Err(misfit("region_count", header.region_count.into(), must));
    }
    // Once to check, once to restore: a card is never left with half of it.
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
    let mut summary = Summary { memory_bytes: header.data_bytes, ..Summary::default() };
    for (region, saved) in (0..).zip(&reader.regions) {
        if saved.loaded == 0 {
            continue;
        }
        let name = saved.name();
        let source = match saved.image_bytes {
            0 => KernelSource::Named(&name),
            len => KernelSource::InPlace { span: Span::new(saved.image_base, len), hash: saved.hash },
        };
        let hash = card.load(region, source)?;
        if hash != saved.hash {
            let must = format!("{hash:#x}, as of kernel {name:?} of card {}", card.address());
            return Err(reader.bad(&format!("region {region}: hash"), saved.hash, must));
        }
        if saved.running != 0 {
            let start = Start {
                arguments: saved.arguments,
                banks: saved.banks,
                fuel: Some(saved.fuel).filter(|fuel| *fuel != 0),
                deadline: Some(saved.deadline_ns)
                    .filter(|nanos| *nanos != 0)
                    .map(std::time::Duration::from_nanos),
                resume: Some(saved.state),
            };
            card.start(region, &start)?;
        }
        saved.note(region, &mut summary);
    }
    Ok(summary)
}

/// The chunks of memory that were ever written.
fn written(bar0: &Snapshot, memory: u64) -> Vec<Span> {
    let chunk = bar0.word(at::chunk_bytes).max(4096);
    (0..MAX_CHUNKS as u64)
        .filter(|index| bar0.word(at::written_chunks + 8 * (*index as usize / 64)) >> (index % 64) & 1 == 1)
        .map(|index| index * chunk)
        .filter(|offset| *offset < memory)
        .map(|offset| Span::new(offset, chunk.min(memory - offset)))
        .collect()
}

impl SavedRegion {
    fn of(bar0: &Snapshot, region: u32) -> SavedRegion {
        let word = |register: usize| bar0.word(control_of(region, register));
        let words = |register: usize| -> Words { std::array::from_fn(|index| word(register + 8 * index)) };
        let status = RegionState::from_code(bar0.half(control_of(region, region_at::status)));
        let running = matches!(status, Some(RegionState::Parked | RegionState::Running));
        let name: [u64; 4] = std::array::from_fn(|index| word(region_at::name + 8 * index));
        let of_image = name != [0; 4] && word(region_at::loaded_kernel) == 0;
        let when = |condition: bool, value: u64| if condition { value } else { 0 };
        SavedRegion {
            running: running.into(),
            loaded: (name != [0; 4]).into(),
            name,
            hash: word(region_at::loaded_hash),
            image_base: when(of_image, word(region_at::image_base)),
            image_bytes: when(of_image, word(region_at::image_bytes)),
            banks: word(region_at::banks),
            fuel: word(region_at::fuel),
            deadline_ns: word(region_at::deadline_ns),
            arguments: words(region_at::arguments),
            state: words(region_at::state),
            progress: word(region_at::progress),
            reserved: 0,
        }
    }

    fn name(&self) -> String {
        let bytes: Vec<u8> = self.name.iter().flat_map(|word| word.to_le_bytes()).collect();
        text(&bytes)
    }

    fn note(&self, region: u32, summary: &mut Summary) {
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
        let place = Span::new(self.image_base, self.image_bytes);
        let overwritten = CheckpointError::ImageOverwritten { region, kernel: self.name(), place };
        if self.image_bytes > crate::region::MAX_IMAGE_BYTES {
            return Err(overwritten);
        }
        let mut image = vec![0; self.image_bytes as usize];
        card.read(self.image_base, &mut image)?;
        if image_hash(&image) == self.hash { Ok(()) } else { Err(overwritten) }
    }
}

/// Takes the offset and the bytes of a chunk.
type Take<'a> = dyn FnMut(u64, &[u8]) -> Result<(), CheckpointError> + 'a;

/// A checkpoint file of which header and regions are checked.
struct Reader {
    path: PathBuf,
    input: BufReader<File>,
    header: Header,
    regions: Vec<SavedRegion>,
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
        let mut head = vec![0; Header::BYTES];
        input.read_exact(&mut head).map_err(io)?;
        let header = Header::from_bytes(head.first_chunk().expect("as long as a header"));
        if header.magic != MAGIC {
            return Err(bad("magic", header.magic, "the file is no checkpoint of a card"));
        }
        if header.version != VERSION {
            return Err(bad("version", header.version.into(), "this program knows version 1"));
        }
        if header.region_count as usize > MAX_REGIONS {
            return Err(bad("region_count", header.region_count.into(), "at most 8"));
        }
        head.resize(Header::BYTES + header.region_count as usize * SavedRegion::BYTES, 0);
        input.read_exact(&mut head[Header::BYTES..]).map_err(io)?;
        let regions = head[Header::BYTES..]
            .as_chunks::<{ SavedRegion::BYTES }>()
            .0
            .iter()
            .map(SavedRegion::from_bytes)
            .collect();
        head[12..16].fill(0);
        if crc32fast::hash(&head) != header.crc {
            return Err(bad(
                "crc",
                header.crc.into(),
                "header and regions have another one; the file is damaged",
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

    /// Reads and checks all chunks, in pieces of bounded size whatever the file says.
    fn chunks(&mut self, take: &mut Take<'_>) -> Result<(), CheckpointError> {
        const LONGEST: u64 = 1 << 31;
        let mut buffer = Vec::new();
        let mut total = 0u64;
        for index in 0..self.header.chunk_count {
            let mut bytes = [0; Chunk::BYTES];
            let io = |cause| CheckpointError::Io { file: self.path.clone(), cause };
            self.input.read_exact(&mut bytes).map_err(io)?;
            let chunk = Chunk::from_bytes(&bytes);
            let field = |name: &str| format!("chunk {index}: {name}");
            if !Span::new(chunk.offset, chunk.len).fits(self.header.memory_bytes) {
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

const _: () = assert!(WORDS == 16);
