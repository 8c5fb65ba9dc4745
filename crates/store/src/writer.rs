//! Writing events.

use std::path::{Path, PathBuf};

use hdf5_metno::plist::file_create::FileSpaceStrategy;
use hdf5_metno::{File, Group};
use millstream_fragment::{Fragment, SourceId};
use millstream_quantity::Bytes;

use crate::column::{AnyColumn, Column, DatasetDescription, create_column};
use crate::commit_record;
use crate::error::{AppendError, FileError, error_text};
use crate::index::checksum;
use crate::layout::{FileLayout, SourceTarget};
use crate::metadata;
use crate::partial::PartialFile;
use crate::schema::{Compression, DecisionSchema, Schema, WriteOptions};

/// Maximum payload of buffered events, and maximum length of their rows in arrays \[bytes\].
const MAX_BUFFERED: u64 = 16 << 20;

/// An event to store.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// Its number.
    pub number: u64,
    /// Its batch.
    pub batch: u64,
    /// Its fragments, in any order; ascending order of the sources is fastest.
    pub fragments: &'a [(SourceId, Fragment<'a>)],
    /// The decision map in the card's format; empty if the schema has no decisions.
    pub decisions: &'a [u8],
    /// Whether it was built without the sources of a lost readout unit.
    pub readout_lost: bool,
}

/// State of a source's fragment, as in `/events/fragment_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FragmentState {
    /// The event has no fragment of the source.
    Missing = 0,
    /// The checksum of the fragment is correct.
    Intact = 1,
    /// The checksum of the fragment is wrong; it is stored unchanged. Or its length is not that of its part of an array; it is not
    /// stored.
    Corrupt = 2,
}

/// Counts of a finished event file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreSummary {
    /// The file.
    pub path: PathBuf,
    /// Events in the file.
    pub events: u64,
    /// Fragments in the file.
    pub fragments: u64,
    /// Payload of these fragments \[bytes\].
    pub payload_bytes: u64,
    /// Missing fragments.
    pub missing: u64,
    /// Fragments with a wrong checksum.
    pub corrupt: u64,
    /// The lowest event number.
    pub first_event: Option<u64>,
    /// The highest event number.
    pub last_event: Option<u64>,
}

/// Writes an event file.
///
/// [`flush`](Self::flush) makes the events readable in the partial file, where they survive the writer. With
/// [`commit_on_sync`](Self::commit_on_sync), [`sync`](Self::sync) does so.
/// [`finish`](Self::finish) gives the file its final name. A dropped writer leaves its partial file if it has
/// committed events.
#[derive(Debug)]
pub struct EventWriter {
    // Dropped in this order: the partial file is removed last.
    columns: Columns,
    file: File,
    partial: PartialFile,
    layout: FileLayout,
    events_per_write: usize,
    stored: StoreSummary,
    /// Events in the partial file, readable by others.
    flushed: u64,
    /// Their payload.
    flushed_bytes: u64,
    /// Events that are durable.
    synced: u64,
    /// Index of each source's fragment in the current event; a reused buffer.
    fragment_of_slot: Vec<Option<usize>>,
    failed: bool,
    commit: Commit,
}

/// When events count as stored: others read them, and a recovery keeps them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Commit {
    /// Once they are in the partial file.
    Flushed,
    /// Once they are durable.
    Synced,
    /// With the whole file.
    Finished,
}

/// The datasets of the file.
#[derive(Debug)]
struct Columns {
    number: Column<u64>,
    batch: Column<u64>,
    status: Column<u8>,
    fragment_state: Column<u8>,
    fragment_length: Column<u32>,
    fragment_crc32: Column<u32>,
    arrays: Vec<Box<dyn AnyColumn>>,
    bytes: Vec<FragmentBytes>,
    trigger: Option<TriggerColumns>,
}

/// Concatenated fragments of one source outside arrays.
#[derive(Debug)]
struct FragmentBytes {
    data: Column<u8>,
    offset: Column<u64>,
    length: Column<u32>,
}

/// The decision map and values derived from it.
#[derive(Debug)]
struct TriggerColumns {
    decisions: Column<u8>,
    bits_set: Column<u32>,
    first_sample: Column<i32>,
    first_bit: Column<i32>,
    first_patch: Column<i32>,
    /// Length of one sample's map \[bytes\].
    sample_bytes: usize,
    patch_of_bit: Vec<u16>,
}

impl EventWriter {
    /// Creates the partial file of `path`, which must end in `.h5`.
    pub fn create(
        path: impl AsRef<Path>,
        schema: &Schema,
        options: &WriteOptions,
    ) -> Result<Self, FileError> {
        let path = path.as_ref();
        let layout = FileLayout::check(schema, options)
            .map_err(|cause| FileError::Schema { path: path.to_owned(), cause })?;
        let partial = PartialFile::create(path, options.replace)?;
        let create = |(object, cause)| hdf5_error(&partial, "create", object, &cause);
        // The partial file has its own lock.
        let file = File::with_options()
            .with_fapl(|access| access.file_locking(false).libver_v110())
            .with_fcpl(|create| {
                create.userblock(commit_record::USER_BLOCK);
                create.file_space_strategy(paged()).file_space_page_size(commit_record::PAGE)
            })
            .create(partial.path());
        let file = file.map_err(|cause| create(("file".into(), cause)))?;
        metadata::write(&file, schema, &layout).map_err(create)?;
        let columns = Columns::create(&file, schema, &layout, options.compression).map_err(create)?;
        // From here on, a killed writer leaves a readable file (single-writer multiple-reader mode).
        file.start_swmr().map_err(|cause| create(("file".into(), cause)))?;
        Ok(Self {
            columns,
            file,
            partial,
            layout,
            events_per_write: options.events_per_write.get(),
            stored: StoreSummary::default(),
            flushed: 0,
            flushed_bytes: 0,
            synced: 0,
            fragment_of_slot: Vec::new(),
            failed: false,
            commit: Commit::Flushed,
        })
    }

    /// The partial file is removed, and recovered as one without events, if the writer ends early.
    pub(crate) fn without_recovery(self) -> Self {
        Self { commit: Commit::Finished, ..self }
    }

    /// A flush commits no events, only a sync does: nobody takes events for stored that the disk then fails to take.
    pub fn commit_on_sync(self) -> Self {
        Self { commit: Commit::Synced, ..self }
    }

    /// Whether only a sync commits events.
    pub(crate) fn commits_on_sync(&self) -> bool {
        self.commit == Commit::Synced
    }

    /// Appends an event. Its bytes are copied before this returns.
    pub fn append(&mut self, event: &Event<'_>) -> Result<(), AppendError> {
        if self.failed {
            return Err(FileError::Incomplete(self.partial.path().to_owned()).into());
        }
        self.layout.assign_fragments(event, &mut self.fragment_of_slot)?;
        self.columns.add(event, &self.layout, &self.fragment_of_slot, &mut self.stored);
        let buffered = self.columns.number.buffer.len();
        if buffered >= self.events_per_write
            || self.stored.payload_bytes - self.flushed_bytes > MAX_BUFFERED
            || (buffered as u64).saturating_mul(self.layout.row_bytes) > MAX_BUFFERED
        {
            self.flush()?;
        }
        Ok(())
    }

    /// Events appended so far.
    pub fn events(&self) -> u64 {
        self.stored.events
    }

    /// Writes the buffered events into the partial file, where they survive the end of this process. They survive a
    /// crash of the host after [`sync`](Self::sync).
    pub fn flush(&mut self) -> Result<(), FileError> {
        if self.failed {
            return Err(FileError::Incomplete(self.partial.path().to_owned()));
        }
        if self.flushed == self.stored.events {
            return Ok(());
        }
        self.write_block()?;
        self.file.flush().map_err(|cause| {
            self.failed = true;
            hdf5_error(&self.partial, "write", "file".into(), &cause)
        })?;
        (self.flushed, self.flushed_bytes) = (self.stored.events, self.stored.payload_bytes);
        match self.commit {
            Commit::Flushed => self.partial.record_events(self.flushed),
            Commit::Synced | Commit::Finished => Ok(()),
        }
    }

    /// Makes flushed events durable.
    ///
    /// # Errors
    /// The file cannot be synced. It keeps the events of the syncs before, and takes no other.
    pub fn sync(&mut self) -> Result<(), FileError> {
        if self.failed {
            return Err(FileError::Incomplete(self.partial.path().to_owned()));
        }
        if self.synced == self.flushed {
            return Ok(());
        }
        self.partial.sync().inspect_err(|_| {
            self.failed = true;
            // The next sync would succeed: the kernel reports a failed write-back once.
            let _ = self.partial.record_events(self.synced);
        })?;
        if self.commits_on_sync() {
            // The record of durable events stays if it cannot be synced itself: others may have read it.
            let recorded = self.partial.record_events(self.flushed).and_then(|()| self.partial.sync());
            recorded.inspect_err(|_| self.failed = true)?;
        }
        self.synced = self.flushed;
        Ok(())
    }

    /// Length of the partial file \[bytes\].
    pub fn file_bytes(&self) -> Result<u64, FileError> {
        self.partial.len()
    }

    /// Writes the buffered events, syncs the file, and gives it its final name.
    pub fn finish(self) -> Result<StoreSummary, FileError> {
        self.close()?.commit()
    }

    /// Writes the buffered events and closes the file, which keeps its partial name until the commit.
    pub(crate) fn close(mut self) -> Result<ClosedFile, FileError> {
        self.flush()?;
        if self.commits_on_sync() {
            self.sync()?;
        }
        let Self { columns, file, partial, stored, commit, .. } = self;
        let closed = file.flush().and_then(|()| {
            drop(columns);
            file.close()
        });
        closed.map_err(|cause| hdf5_error(&partial, "complete", "file".into(), &cause))?;
        Ok(ClosedFile { partial, stored, commit })
    }

    fn write_block(&mut self) -> Result<(), FileError> {
        for rows in self.columns.all() {
            if let Err(cause) = rows.flush() {
                self.failed = true;
                return Err(hdf5_error(&self.partial, "write", rows.path().to_owned(), &cause));
            }
        }
        Ok(())
    }
}

/// A complete file that has its partial name.
#[derive(Debug)]
pub struct ClosedFile {
    partial: PartialFile,
    stored: StoreSummary,
    commit: Commit,
}

impl ClosedFile {
    /// Its length and checksum.
    pub(crate) fn checksum(&self) -> Result<(Bytes, String), FileError> {
        checksum(self.partial.path())
    }

    /// Syncs the file and gives it its final name.
    pub(crate) fn commit(mut self) -> Result<StoreSummary, FileError> {
        // Before it has its final name, a file that is committed as a whole counts as one without events.
        let record = (self.commit == Commit::Finished).then_some(self.stored.events);
        self.stored.path = self.partial.commit_then_record(record)?;
        Ok(self.stored)
    }
}

/// Allocates metadata and small data in pages of their own.
fn paged() -> FileSpaceStrategy {
    FileSpaceStrategy::FreeSpaceManager { paged: true, persist: false, threshold: 1 }
}

fn hdf5_error(
    partial: &PartialFile,
    operation: &'static str,
    object: String,
    cause: &hdf5_metno::Error,
) -> FileError {
    FileError::Hdf5 { path: partial.path().to_owned(), operation, object, cause: error_text(cause) }
}

impl Columns {
    fn create(
        root: &Group,
        schema: &Schema,
        layout: &FileLayout,
        compression: Compression,
    ) -> Result<Self, metadata::ObjectError> {
        let factory = ColumnFactory { root, compression };
        let sources = [("source".to_owned(), layout.slots.len())];
        let mut arrays = Vec::with_capacity(schema.arrays.len());
        for array in &schema.arrays {
            let about = DatasetDescription {
                path: &array.dataset,
                row_dim: "event",
                dims: &array.dims,
                unit: &array.unit,
                description: &array.description,
            };
            let rows = create_column(root, about, array.element, compression);
            arrays.push(rows.map_err(|cause| (array.dataset.clone(), cause))?);
        }
        let mut bytes = Vec::new();
        for slot in &layout.slots {
            if let SourceTarget::Bytes { group, .. } = &slot.target {
                bytes.push(FragmentBytes::create(factory, group)?);
            }
        }
        let trigger = schema.decisions.as_ref().map(|decisions| TriggerColumns::create(factory, decisions));
        Ok(Self {
            number: factory.column("events/number", &[], "", "number of the event")?,
            batch: factory.column("events/batch", &[], "", "batch in which the event was built")?,
            status: factory.column(
                "events/status",
                &[],
                "",
                "0: complete; bit 0: a fragment is missing; bit 1: a fragment is corrupt; bit 2: a readout unit was lost",
            )?,
            fragment_state: factory.column(
                "events/fragment_state",
                &sources,
                "",
                "0: missing; 1: intact; 2: corrupt, or of the wrong length for its array and not stored",
            )?,
            fragment_length: factory.column(
                "events/fragment_length",
                &sources,
                "B",
                "length of the fragment",
            )?,
            fragment_crc32: factory.column(
                "events/fragment_crc32",
                &sources,
                "",
                "CRC-32 (IEEE) of the fragment as it was recorded",
            )?,
            arrays,
            bytes,
            trigger: trigger.transpose()?,
        })
    }

    /// Adds an event with assigned fragments.
    fn add(
        &mut self,
        event: &Event<'_>,
        layout: &FileLayout,
        fragment_of_slot: &[Option<usize>],
        stored: &mut StoreSummary,
    ) {
        for array in &mut self.arrays {
            array.add_row();
        }
        let mut status = if event.readout_lost { 4 } else { 0 };
        for (slot, fragment_index) in layout.slots.iter().zip(fragment_of_slot) {
            let fragment = fragment_index.map(|index| &event.fragments[index].1);
            let payload = fragment.map_or(&[][..], |fragment| fragment.payload);
            let fits = match &slot.target {
                // The part of an empty fragment stays zero, and that of a fragment with another length.
                SourceTarget::ArrayPart { .. } if payload.is_empty() => true,
                SourceTarget::ArrayPart { bytes, .. } if payload.len() != *bytes => false,
                SourceTarget::ArrayPart { array, part, .. } => {
                    self.arrays[*array].fill(*part, payload);
                    true
                }
                SourceTarget::Bytes { index, .. } => {
                    self.bytes[*index].add(payload);
                    true
                }
            };
            let state = match fragment {
                None => FragmentState::Missing,
                Some(fragment) if fits && fragment.is_intact() => FragmentState::Intact,
                Some(_) => FragmentState::Corrupt,
            };
            match state {
                FragmentState::Missing => {
                    stored.missing += 1;
                    status |= 1;
                }
                FragmentState::Intact => {}
                FragmentState::Corrupt => {
                    stored.corrupt += 1;
                    status |= 2;
                }
            }
            stored.fragments += u64::from(fragment.is_some());
            stored.payload_bytes += if fits { payload.len() as u64 } else { 0 };
            self.fragment_state.buffer.push(state as u8);
            // The packet format has 32 bits for the length of a fragment.
            self.fragment_length.buffer.push(payload.len() as u32);
            self.fragment_crc32.buffer.push(fragment.map_or(0, |fragment| fragment.crc));
        }
        if let Some(trigger) = &mut self.trigger {
            trigger.add(event.decisions);
        }
        self.status.buffer.push(status);
        self.number.buffer.push(event.number);
        self.batch.buffer.push(event.batch);
        stored.events += 1;
        stored.first_event = Some(stored.first_event.map_or(event.number, |first| first.min(event.number)));
        stored.last_event = stored.last_event.max(Some(event.number));
    }

    /// All columns, in the order of writing.
    fn all(&mut self) -> impl Iterator<Item = &mut dyn AnyColumn> {
        let own: [&mut dyn AnyColumn; 5] = [
            &mut self.batch,
            &mut self.status,
            &mut self.fragment_state,
            &mut self.fragment_length,
            &mut self.fragment_crc32,
        ];
        let bytes = self.bytes.iter_mut().flat_map(|source| -> [&mut dyn AnyColumn; 3] {
            [&mut source.data, &mut source.offset, &mut source.length]
        });
        let trigger = self.trigger.iter_mut().flat_map(|trigger| -> [&mut dyn AnyColumn; 5] {
            [
                &mut trigger.decisions,
                &mut trigger.bits_set,
                &mut trigger.first_sample,
                &mut trigger.first_bit,
                &mut trigger.first_patch,
            ]
        });
        let arrays = self.arrays.iter_mut().map(|array| -> &mut dyn AnyColumn { array.as_mut() });
        // The number of an event is written last: its row is then complete in all other datasets.
        let number: [&mut dyn AnyColumn; 1] = [&mut self.number];
        own.into_iter().chain(arrays).chain(bytes).chain(trigger).chain(number)
    }
}

/// Creates columns with common options.
#[derive(Clone, Copy)]
struct ColumnFactory<'a> {
    root: &'a Group,
    compression: Compression,
}

impl ColumnFactory<'_> {
    fn column<T: crate::column::Scalar>(
        self,
        path: &str,
        dims: &[(String, usize)],
        unit: &str,
        description: &str,
    ) -> Result<Column<T>, metadata::ObjectError> {
        let about = DatasetDescription { path, row_dim: "event", dims, unit, description };
        Column::create(self.root, about, self.compression).map_err(|cause| (path.to_owned(), cause))
    }
}

impl FragmentBytes {
    fn create(factory: ColumnFactory<'_>, group: &str) -> Result<Self, metadata::ObjectError> {
        let path = |name| format!("fragments/{group}/{name}");
        let data = path("data");
        let about = DatasetDescription {
            path: &data,
            row_dim: "byte",
            dims: &[],
            unit: "",
            description: "concatenated fragments of the source",
        };
        Ok(Self {
            data: Column::create(factory.root, about, factory.compression)
                .map_err(|cause| (data.clone(), cause))?,
            offset: factory.column(&path("offset"), &[], "B", "start of the event's fragment in data")?,
            length: factory.column(&path("length"), &[], "B", "length of the event's fragment")?,
        })
    }

    fn add(&mut self, payload: &[u8]) {
        self.offset.buffer.push(self.data.rows() as u64);
        self.length.buffer.push(payload.len() as u32);
        self.data.extend(payload);
    }
}

impl TriggerColumns {
    fn create(factory: ColumnFactory<'_>, decisions: &DecisionSchema) -> Result<Self, metadata::ObjectError> {
        let mut dims = vec![("sample".to_owned(), decisions.samples)];
        dims.extend(decisions.dims.iter().cloned());
        Ok(Self {
            decisions: factory.column(
                "trigger/decisions",
                &dims,
                "",
                "decision of each patch and sample, one bit each, least significant bit first",
            )?,
            bits_set: factory.column("trigger/bits_set", &[], "", "number of bits set in the event")?,
            first_sample: factory.column(
                "trigger/first_sample",
                &[],
                "sample",
                "first sample with a bit set; -1: none",
            )?,
            first_bit: factory.column(
                "trigger/first_bit",
                &[],
                "",
                "lowest bit set in the first sample; -1: none",
            )?,
            first_patch: factory.column(
                "trigger/first_patch",
                &[],
                "",
                "patch of the first bit; -1: none",
            )?,
            sample_bytes: decisions.dims.iter().map(|&(_, len)| len).product(),
            patch_of_bit: decisions.patch_of_bit.clone(),
        })
    }

    fn add(&mut self, decisions: &[u8]) {
        self.decisions.extend(decisions);
        self.bits_set.buffer.push(decisions.iter().map(|byte| byte.count_ones()).sum());
        let first = decisions.iter().position(|&byte| byte != 0);
        let (sample, bit, patch) = first.map_or((-1, -1, -1), |at| {
            let bit = 8 * (at % self.sample_bytes) + decisions[at].trailing_zeros() as usize;
            // Rows are at most 1 GiB, so both fit.
            ((at / self.sample_bytes) as i32, bit as i32, i32::from(self.patch_of_bit[bit]))
        });
        self.first_sample.buffer.push(sample);
        self.first_bit.buffer.push(bit);
        self.first_patch.buffer.push(patch);
    }
}
