//! Writes the fragments of a raw data file to a stream file.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use millstream_fragment::file::IoError;
use millstream_fragment::stream::{ReadError, StreamWriter, WriteError};
use millstream_fragment::{Alignment, SourceId, SourceKind};

use crate::format::pcapng::is_pcap;
use crate::index::Total;
use crate::{Format, FormatOption, FormatOptions, Index, Structure, recognise};

/// How a file becomes a stream file.
#[derive(Clone, Debug)]
pub struct Import<'a> {
    /// The raw data file.
    pub input: &'a Path,
    /// The stream file.
    pub output: &'a Path,
    /// The events to write; all if none.
    pub events: Option<Range<u64>>,
    /// Alignment of the fragments.
    pub alignment: Alignment,
    /// Options of the format.
    pub options: FormatOptions,
}

/// Why a file was not imported. No file appears under the output's name.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The operating system refused to read the input.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The input is a pipe, a device or a folder.
    #[error("{}: not a regular file, so it cannot be mapped", .0.display())]
    NotAFile(PathBuf),
    /// The output would replace the input.
    #[error("{}: the output is the raw data file itself", .0.display())]
    SameFile(PathBuf),
    /// The input is a capture in the older format.
    #[error("{0}: a capture in the format pcap; convert it first: editcap -F pcapng {0} OUT", path.display())]
    Pcap {
        /// The file.
        path: PathBuf,
    },
    /// The format does not have a given option.
    #[error("{}: {format} files have no {}", path.display(), option.name())]
    NoSuchOption {
        /// The file.
        path: PathBuf,
        /// Name of the format.
        format: &'static str,
        /// The option.
        option: FormatOption,
    },
    /// No format has such a start.
    #[error("{}: not the start of a known format ({known}); name the format with --format", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// Names of the formats.
        known: String,
    },
    /// The input breaks its format.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The input has no fragments, or none of the selected events.
    #[error("{}: no fragment{}", path.display(), selected.as_ref().map_or(String::new(), |events| format!(" of events {} to {}", events.start, events.end.saturating_sub(1))))]
    Empty {
        /// The file.
        path: PathBuf,
        /// The selected events.
        selected: Option<Range<u64>>,
    },
    /// The output was not written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// What an import read and wrote. Every byte of the input is in `fragment_bytes`, `outside` or `structure`.
#[derive(Clone, Debug)]
pub struct Imported {
    /// Name of the format.
    pub format: &'static str,
    /// Events of the stream file.
    pub events: Range<u64>,
    /// Sources in the stream file.
    pub sources: u64,
    /// Fragments written.
    pub fragments: u64,
    /// Their bytes.
    pub fragment_bytes: u64,
    /// Fragments of events that were not selected.
    pub outside: Total,
    /// Bytes of the input that belong to no fragment.
    pub structure: BTreeMap<Structure, Total>,
    /// What the format says about the events, a line each.
    pub notes: Vec<String>,
}

impl Import<'_> {
    /// Reads the input in `format`, or in the format that its start shows, and writes the output.
    ///
    /// # Errors
    /// The input cannot be read, breaks its format or has no fragment; the output cannot be written.
    pub fn run(&self, format: Option<&dyn Format>) -> Result<Imported, ImportError> {
        let file = self.open()?;
        if is_pcap(&file) && format.is_none_or(|format| format.name() == "pcapng") {
            return Err(ImportError::Pcap { path: self.input.to_owned() });
        }
        let format = match format {
            Some(format) => format,
            None => recognise(&file).ok_or_else(|| ImportError::UnknownFormat {
                path: self.input.to_owned(),
                known: crate::all().iter().map(|format| format.name()).collect::<Vec<_>>().join(", "),
            })?,
        };
        if let Some(option) = self.options.given().find(|option| !format.options().contains(option)) {
            let (path, format) = (self.input.to_owned(), format.name());
            return Err(ImportError::NoSuchOption { path, format, option });
        }
        let index = Index::read_with(format, &file, self.options)
            .map_err(|what| ReadError::Malformed { path: self.input.to_owned(), what })?;
        self.write(format, &file, index)
    }

    /// Maps the input.
    fn open(&self) -> Result<Mmap, ImportError> {
        // Before the file is opened: that of a pipe waits for a writer.
        let input = std::fs::metadata(self.input).map_err(IoError::of(self.input, "open"))?;
        if !input.is_file() {
            return Err(ImportError::NotAFile(self.input.to_owned()));
        }
        let is_input = |output: std::fs::Metadata| (output.dev(), output.ino()) == (input.dev(), input.ino());
        if std::fs::metadata(self.output).is_ok_and(is_input) {
            return Err(ImportError::SameFile(self.output.to_owned()));
        }
        Ok(map(self.input)?)
    }

    fn write(&self, format: &dyn Format, file: &[u8], index: Index) -> Result<Imported, ImportError> {
        let empty = || ImportError::Empty { path: self.input.to_owned(), selected: self.events.clone() };
        let events = self.events.clone().or_else(|| index.events()).ok_or_else(empty)?;
        let mut imported = Imported {
            format: format.name(),
            events: events.clone(),
            sources: 0,
            fragments: 0,
            fragment_bytes: 0,
            outside: Total::default(),
            structure: index.structure,
            notes: index.notes,
        };
        let mut writer = StreamWriter::create(self.output, events.clone(), self.alignment)?;
        let mut joined = Vec::new();
        for (id, source) in &index.sources {
            let mut out =
                writer.source(SourceId(*id), SourceKind(format.kind(*id)), &format.source_name(*id))?;
            imported.sources += 1;
            for pieces in source.events() {
                let bytes: u64 = pieces.iter().map(|piece| piece.len).sum();
                if !events.contains(&pieces[0].event) {
                    imported.outside.count += 1;
                    imported.outside.bytes += bytes;
                    continue;
                }
                imported.fragments += 1;
                imported.fragment_bytes += bytes;
                let payload = match pieces {
                    [piece] => &file[piece.range()],
                    pieces => {
                        joined.clear();
                        pieces.iter().for_each(|piece| joined.extend_from_slice(&file[piece.range()]));
                        &joined
                    }
                };
                out.push(pieces[0].event, payload)?;
            }
        }
        if imported.fragments == 0 {
            return Err(empty());
        }
        writer.finish()?;
        Ok(imported)
    }
}

fn map(path: &Path) -> Result<Mmap, IoError> {
    let file = File::open(path).map_err(IoError::of(path, "open"))?;
    // SAFETY: the mapping is read-only. A file that is truncated meanwhile ends the process by SIGBUS, as documented.
    unsafe { Mmap::map(&file) }.map_err(IoError::of(path, "map"))
}
