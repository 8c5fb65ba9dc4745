//! Writing events.

use std::path::{Path, PathBuf};

use hdf5_metno::{File, Group};
use millstream_fragment::{Fragment, SourceId};

use crate::column::{Column, Meaning, Rows, create_rows};
use crate::error::{AppendError, FileError, said};
use crate::metadata;
use crate::partial::Partial;
use crate::plan::{Place, Plan};
use crate::schema::{Compression, Decisions, Options, Schema};

/// Bytes that are collected at most before they are written, if fragments without an array are large.
const MAX_BUFFERED: usize = 64 << 20;

/// An event to be stored.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// Its number.
    pub number: u64,
    /// The batch in which it was built.
    pub batch: u64,
    /// Its fragments, in any order; quickest in ascending order of their sources.
    pub fragments: &'a [(SourceId, Fragment<'a>)],
    /// The decision map as the card wrote it; empty if the schema has no decisions.
    pub decisions: &'a [u8],
}

/// What `/events/fragment_state` says about the fragment of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FragmentState {
    /// The event has no fragment of the source.
    Missing = 0,
    /// The fragment is as it was recorded.
    Intact = 1,
    /// The fragment does not have its checksum. It is stored as it was found.
    Corrupt = 2,
}

/// What became of a writer's events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The file.
    pub path: PathBuf,
    /// Events in the file.
    pub events: u64,
    /// Fragments in the file.
    pub fragments: u64,
    /// Their payload, in bytes.
    pub payload_bytes: u64,
    /// Fragments that events did not have.
    pub missing: u64,
    /// Fragments without their checksum.
    pub corrupt: u64,
}

/// Writes a file of events.
///
/// The file appears under its name in [`finish`](Self::finish) and not before; a writer that is dropped
/// leaves nothing behind.
#[derive(Debug)]
pub struct EventWriter {
    // Closed in this order; the partial file is removed last.
    columns: Columns,
    file: File,
    partial: Partial,
    plan: Plan,
    block: usize,
    stored: Stored,
    /// Index into an event's fragments, for each source; kept for its memory.
    seats: Vec<Option<usize>>,
    failed: bool,
}

/// All datasets with one row per event, and the flat ones.
#[derive(Debug)]
struct Columns {
    number: Column<u64>,
    batch: Column<u64>,
    status: Column<u8>,
    fragment_state: Column<u8>,
    fragment_length: Column<u32>,
    fragment_crc32: Column<u32>,
    arrays: Vec<Box<dyn Rows>>,
    flats: Vec<Flat>,
    trigger: Option<Trigger>,
}

/// Fragments of one source behind one another.
#[derive(Debug)]
struct Flat {
    data: Column<u8>,
    offset: Column<u64>,
    length: Column<u32>,
}

/// The decision map and what follows from it.
#[derive(Debug)]
struct Trigger {
    decisions: Column<u8>,
    bits_set: Column<u32>,
    first_sample: Column<i32>,
    first_bit: Column<i32>,
    first_patch: Column<i32>,
    /// Bytes of one sample's map.
    map: usize,
    patch_of_bit: Vec<u16>,
}

impl EventWriter {
    /// Starts the file that will be `path`, which ends in `.h5`.
    pub fn create(path: impl AsRef<Path>, schema: &Schema, options: &Options) -> Result<Self, FileError> {
        let path = path.as_ref();
        let plan = Plan::check(schema, options)
            .map_err(|cause| FileError::Schema { path: path.to_owned(), cause })?;
        let partial = Partial::create(path, options.replace)?;
        let create = |(object, cause)| hdf5_error(&partial, "create", object, &cause);
        // The partial file has a lock of its own.
        let file = File::with_options().with_fapl(|access| access.file_locking(false)).create(partial.path());
        let file = file.map_err(|cause| create(("file".into(), cause)))?;
        metadata::write(&file, schema, &plan).map_err(create)?;
        let columns = Columns::create(&file, schema, &plan, options.compression).map_err(create)?;
        Ok(Self {
            columns,
            file,
            partial,
            plan,
            block: options.block.get(),
            stored: Stored::default(),
            seats: Vec::new(),
            failed: false,
        })
    }

    /// Adds an event. Its bytes are copied before this returns.
    pub fn append(&mut self, event: &Event<'_>) -> Result<(), AppendError> {
        if self.failed {
            return Err(FileError::Incomplete(self.partial.path().to_owned()).into());
        }
        self.plan.seat(event, &mut self.seats)?;
        self.columns.add(event, &self.plan, &self.seats, &mut self.stored);
        if self.columns.number.buffer.len() >= self.block || self.columns.buffered() > MAX_BUFFERED {
            self.write_block()?;
        }
        Ok(())
    }

    /// Events added so far.
    pub fn events(&self) -> u64 {
        self.stored.events
    }

    /// Writes the rest, waits until the file is on the disk, and gives it its name.
    pub fn finish(mut self) -> Result<Stored, FileError> {
        if self.failed {
            return Err(FileError::Incomplete(self.partial.path().to_owned()));
        }
        self.write_block()?;
        let Self { columns, file, partial, mut stored, .. } = self;
        let closed = file.flush().and_then(|()| {
            drop(columns);
            file.close()
        });
        closed.map_err(|cause| hdf5_error(&partial, "complete", "file".into(), &cause))?;
        stored.path = partial.commit()?;
        Ok(stored)
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

fn hdf5_error(
    partial: &Partial,
    doing: &'static str,
    object: String,
    cause: &hdf5_metno::Error,
) -> FileError {
    FileError::Hdf5 { path: partial.path().to_owned(), doing, object, cause: said(cause) }
}

impl Columns {
    fn create(
        root: &Group,
        schema: &Schema,
        plan: &Plan,
        compression: Compression,
    ) -> Result<Self, metadata::Failure> {
        let maker = Maker { root, compression };
        let sources = [("source".to_owned(), plan.slots.len())];
        let mut arrays = Vec::with_capacity(schema.arrays.len());
        for array in &schema.arrays {
            let meaning = Meaning {
                path: &array.dataset,
                rows: "event",
                dims: &array.dims,
                unit: &array.unit,
                description: &array.description,
            };
            let rows = create_rows(root, meaning, array.element, compression);
            arrays.push(rows.map_err(|cause| (array.dataset.clone(), cause))?);
        }
        let mut flats = Vec::new();
        for slot in &plan.slots {
            if let Place::Flat { group, .. } = &slot.place {
                flats.push(Flat::create(maker, group)?);
            }
        }
        let trigger = schema.decisions.as_ref().map(|decisions| Trigger::create(maker, decisions));
        Ok(Self {
            number: maker.column("events/number", &[], "", "number of the event")?,
            batch: maker.column("events/batch", &[], "", "batch in which the event was built")?,
            status: maker.column(
                "events/status",
                &[],
                "",
                "0: complete; bit 0: a fragment is missing; bit 1: a fragment is corrupt",
            )?,
            fragment_state: maker.column(
                "events/fragment_state",
                &sources,
                "",
                "0: missing; 1: intact; 2: corrupt",
            )?,
            fragment_length: maker.column(
                "events/fragment_length",
                &sources,
                "B",
                "length of the fragment",
            )?,
            fragment_crc32: maker.column(
                "events/fragment_crc32",
                &sources,
                "",
                "CRC-32 (IEEE) of the fragment as it was recorded",
            )?,
            arrays,
            flats,
            trigger: trigger.transpose()?,
        })
    }

    /// Adds an event whose fragments have been seated.
    fn add(&mut self, event: &Event<'_>, plan: &Plan, seats: &[Option<usize>], stored: &mut Stored) {
        for array in &mut self.arrays {
            array.add_row();
        }
        let mut status = 0;
        for (slot, seat) in plan.slots.iter().zip(seats) {
            let fragment = seat.map(|index| &event.fragments[index].1);
            let payload = fragment.map_or(&[][..], |fragment| fragment.payload);
            match &slot.place {
                // An empty fragment leaves the zeros.
                Place::Part { .. } if payload.is_empty() => {}
                Place::Part { array, part, .. } => self.arrays[*array].fill(*part, payload),
                Place::Flat { flat, .. } => self.flats[*flat].add(payload),
            }
            let state = match fragment {
                None => FragmentState::Missing,
                Some(fragment) if fragment.is_intact() => FragmentState::Intact,
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
            stored.payload_bytes += payload.len() as u64;
            self.fragment_state.buffer.push(state as u8);
            // Packets have 32 bits for the length of a fragment.
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
    }

    fn all(&mut self) -> impl Iterator<Item = &mut dyn Rows> {
        let own: [&mut dyn Rows; 6] = [
            &mut self.number,
            &mut self.batch,
            &mut self.status,
            &mut self.fragment_state,
            &mut self.fragment_length,
            &mut self.fragment_crc32,
        ];
        let flats = self
            .flats
            .iter_mut()
            .flat_map(|flat| -> [&mut dyn Rows; 3] { [&mut flat.data, &mut flat.offset, &mut flat.length] });
        let trigger = self.trigger.iter_mut().flat_map(|trigger| -> [&mut dyn Rows; 5] {
            [
                &mut trigger.decisions,
                &mut trigger.bits_set,
                &mut trigger.first_sample,
                &mut trigger.first_bit,
                &mut trigger.first_patch,
            ]
        });
        let arrays = self.arrays.iter_mut().map(|array| -> &mut dyn Rows { array.as_mut() });
        own.into_iter().chain(arrays).chain(flats).chain(trigger)
    }

    /// Bytes to come in the flat datasets, whose blocks have no length of their own.
    fn buffered(&self) -> usize {
        self.flats.iter().map(|flat| flat.data.buffered()).sum()
    }
}

/// Creates columns in a file.
#[derive(Clone, Copy)]
struct Maker<'a> {
    root: &'a Group,
    compression: Compression,
}

impl Maker<'_> {
    fn column<T: crate::column::Number>(
        self,
        path: &str,
        dims: &[(String, usize)],
        unit: &str,
        description: &str,
    ) -> Result<Column<T>, metadata::Failure> {
        let meaning = Meaning { path, rows: "event", dims, unit, description };
        Column::create(self.root, meaning, self.compression).map_err(|cause| (path.to_owned(), cause))
    }
}

impl Flat {
    fn create(maker: Maker<'_>, group: &str) -> Result<Self, metadata::Failure> {
        let path = |name| format!("fragments/{group}/{name}");
        let data = path("data");
        let meaning = Meaning {
            path: &data,
            rows: "byte",
            dims: &[],
            unit: "",
            description: "fragments of the source behind one another",
        };
        Ok(Self {
            data: Column::create(maker.root, meaning, maker.compression)
                .map_err(|cause| (data.clone(), cause))?,
            offset: maker.column(&path("offset"), &[], "B", "where the event's fragment starts in data")?,
            length: maker.column(&path("length"), &[], "B", "length of the event's fragment")?,
        })
    }

    fn add(&mut self, payload: &[u8]) {
        self.offset.buffer.push(self.data.rows() as u64);
        self.length.buffer.push(payload.len() as u32);
        self.data.extend(payload);
    }
}

impl Trigger {
    fn create(maker: Maker<'_>, decisions: &Decisions) -> Result<Self, metadata::Failure> {
        let mut dims = vec![("sample".to_owned(), decisions.samples)];
        dims.extend(decisions.dims.iter().cloned());
        Ok(Self {
            decisions: maker.column(
                "trigger/decisions",
                &dims,
                "",
                "decision of each patch and sample, one bit each, least significant first",
            )?,
            bits_set: maker.column("trigger/bits_set", &[], "", "number of bits set in the event")?,
            first_sample: maker.column(
                "trigger/first_sample",
                &[],
                "sample",
                "first sample with a bit set; -1: none",
            )?,
            first_bit: maker.column(
                "trigger/first_bit",
                &[],
                "",
                "lowest bit set in the first sample; -1: none",
            )?,
            first_patch: maker.column("trigger/first_patch", &[], "", "patch of the first bit; -1: none")?,
            map: decisions.dims.iter().map(|&(_, len)| len).product(),
            patch_of_bit: decisions.patch_of_bit.clone(),
        })
    }

    fn add(&mut self, decisions: &[u8]) {
        self.decisions.extend(decisions);
        self.bits_set.buffer.push(decisions.iter().map(|byte| byte.count_ones()).sum());
        let first = decisions.iter().position(|&byte| byte != 0);
        let (sample, bit, patch) = first.map_or((-1, -1, -1), |at| {
            let bit = 8 * (at % self.map) + decisions[at].trailing_zeros() as usize;
            // Rows are at most 1 GiB, so both fit.
            ((at / self.map) as i32, bit as i32, i32::from(self.patch_of_bit[bit]))
        });
        self.first_sample.buffer.push(sample);
        self.first_bit.buffer.push(bit);
        self.first_patch.buffer.push(patch);
    }
}
