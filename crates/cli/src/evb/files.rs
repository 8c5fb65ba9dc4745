//! The event files of a run: their names, what they hold, and what a builder unit that ended early left.

use std::borrow::Cow;
use std::collections::HashSet;
use std::error::Error;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use millstream_evb::config::RunConfig;
use millstream_evb::core::BuIndex;
use millstream_fragment::file::IoError;
use millstream_report::eprint_line;
use millstream_store::{
    FileError, FileState, INDEX_SUFFIX, IndexEntry, Recovered, WriteOptions, append_to_index,
    base_of_complete, committed_numbers, event_numbers, file_state, index_path, is_not_synced, partials,
    read_index, recover_partials, refuse_earlier_events, remove_earlier_sequence, unpack,
};

use crate::output::print_line;

/// The event files of a builder unit, without the ends of their names: `RUN.BUILDER` in the output directory.
pub(crate) fn event_files(config: &RunConfig, bu: BuIndex) -> Option<PathBuf> {
    let builder = config.builders.get(bu.index())?;
    Some(config.output.as_ref()?.directory.join(format!("{}.{}", config.name, builder.name)))
}

/// The last component of a path.
fn name_of(path: &Path) -> Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

/// Refuses the events of an earlier run with the same name, or removes its files if the configuration says so. Units on other hosts
/// do so in their own directories, but a unit that is not started again does not.
pub(crate) fn remove_earlier_run(config: &RunConfig) -> Result<(), FileError> {
    let Some(output) = &config.output else { return Ok(()) };
    all_event_files(config).try_for_each(|base| remove_earlier_sequence(&base, output.replace))
}

/// Why a run would not start now: its output has the events of an earlier run with the same name.
pub(crate) fn check_earlier_run(config: &RunConfig) -> Result<(), FileError> {
    match &config.output {
        Some(output) if !output.replace && output.directory.exists() => {
            all_event_files(config).try_for_each(|base| refuse_earlier_events(&base))
        }
        _ => Ok(()),
    }
}

/// Base names of the event files of all builder units.
pub(crate) fn all_event_files(config: &RunConfig) -> impl Iterator<Item = PathBuf> {
    (0..config.builders.len()).filter_map(|bu| event_files(config, BuIndex(bu as u16)))
}

/// What the files of a builder unit hold.
#[derive(Debug, Default)]
pub(crate) struct StoredFiles {
    pub(crate) paths: Vec<PathBuf>,
    /// Different events in these files.
    pub(crate) events: u64,
    /// Their numbers.
    pub(crate) numbers: HashSet<u64>,
    /// Contradictions between files and index, and files that cannot be read.
    pub(crate) problems: Vec<String>,
}

/// Opens the files that the index of a builder unit lists, and counts their events.
pub(crate) fn stored(config: &RunConfig, bu: BuIndex) -> StoredFiles {
    let mut stored = StoredFiles::default();
    let Some(base) = event_files(config, bu) else { return stored };
    let entries = match read_index(&index_path(&base)) {
        Ok(entries) => entries,
        Err(error) => {
            stored.problems.push(error.to_string());
            return stored;
        }
    };
    for entry in entries {
        let path = base.with_file_name(&entry.file);
        match event_numbers(&path) {
            Ok(numbers) => {
                stored.check(&entry, &numbers);
                stored.paths.push(path);
            }
            Err(error) => stored.problems.push(error.to_string()),
        }
    }
    stored.events = stored.numbers.len() as u64;
    stored
}

impl StoredFiles {
    fn check(&mut self, entry: &IndexEntry, found: &[u64]) {
        let file = &entry.file;
        if found.len() as u64 != entry.events {
            self.problems.push(format!("{file}: {} events, {} in the index", found.len(), entry.events));
        }
        let before = self.numbers.len();
        self.numbers.extend(found);
        let repeated = before + found.len() - self.numbers.len();
        if repeated > 0 {
            self.problems.push(format!("{file}: {repeated} events stored twice"));
        }
    }
}

/// `millstream evb files`: verifies the files of all indexes in a directory, and names partial files and files that no index has.
pub(crate) fn list(directory: &Path, completes: bool) -> Result<ExitCode, Box<dyn Error>> {
    let mut problems = 0;
    let mut problem = |text: &dyn Display| {
        eprint_line!("{text}");
        problems += 1;
    };
    if completes {
        recover(directory, &[])?.iter().for_each(|error| problem(&format_args!("error: {error}")));
    }
    for path in without_index(directory)? {
        if !completes {
            problem(&format_args!(
                "{}: complete, but there is no index; --recover writes it",
                path.display()
            ));
        } else if let Err(error) = add_file(directory, &[], &path) {
            problem(&format_args!("error: {error}"));
        }
    }
    for index in indexes(directory)? {
        for path in unlisted(&index)? {
            if completes {
                append_to_index(&index, &IndexEntry::of_file(&path)?)?;
            } else {
                problem(&format_args!(
                    "{}: complete, but not in the index; --recover adds it",
                    path.display()
                ));
            }
        }
        for entry in read_index(&index)? {
            let numbers = entry.first_event.zip(entry.last_event);
            let numbers = numbers.map_or_else(String::new, |(first, last)| format!(" {first} to {last}"));
            let recovered = if entry.recovered { ", recovered" } else { "" };
            let (file, events, bytes) = (&entry.file, entry.events, entry.bytes.0);
            print_line!("{file}: {events} events{numbers}, {bytes} B{recovered}")?;
            if let Err(error) = entry.verify(directory) {
                problem(&format_args!("error: {error}"));
            }
        }
    }
    for path in named(directory, is_not_synced)? {
        problem(&format_args!(
            "{}: could not be synced, and its events may be lost (docs/output.md, Durability)",
            path.display()
        ));
    }
    for path in partials(directory)? {
        let contents = committed_numbers(&path)
            .map_or_else(|error| error.to_string(), |numbers| format!("{} events", numbers.len()));
        problem(&format_args!(
            "{}: partial; it is being written, or --recover completes it: {contents}",
            path.display()
        ));
    }
    Ok(if problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `millstream evb unpack`: writes the stored events of a batch file into an event file.
pub(crate) fn unpack_batches(batches: &Path, to: &Path, replace: bool) -> Result<ExitCode, Box<dyn Error>> {
    let stored = unpack(batches, to, &WriteOptions { replace, ..WriteOptions::default() })?;
    print_line!(
        "{}: {} events, {} fragments, {} B of payload, {} fragments missing, {} corrupt",
        stored.path.display(),
        stored.events,
        stored.fragments,
        stored.payload_bytes,
        stored.missing,
        stored.corrupt
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Files in a directory whose names are `wanted`, by name.
fn named(directory: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, FileError> {
    let unreadable = IoError::of(directory, "list");
    let mut found = Vec::new();
    for file in std::fs::read_dir(directory).map_err(unreadable)? {
        let path = file.map_err(unreadable)?.path();
        if wanted(&name_of(&path)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The indexes in a directory, by name.
fn indexes(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    named(directory, |name| name.ends_with(INDEX_SUFFIX))
}

/// The index of the sequence that a complete file belongs to: that of one of these base names, one that exists, or the one that the
/// name of the file tells.
fn index_of(directory: &Path, bases: &[PathBuf], file: &Path) -> Result<Option<PathBuf>, FileError> {
    let name = &name_of(file);
    if let Some(base) = bases.iter().find(|base| file_state(&name_of(base), name).is_some()) {
        return Ok(Some(index_path(base)));
    }
    let existing = indexes(directory)?.into_iter().find(|index| is_of_index(index, name));
    Ok(existing.or_else(|| Some(index_path(&file.with_file_name(base_of_complete(name)?)))))
}

/// Whether a file is of the sequence of an index.
fn is_of_index(index: &Path, name: &str) -> bool {
    name_of(index).strip_suffix(INDEX_SUFFIX).is_some_and(|base| file_state(base, name).is_some())
}

/// Adds a complete file to its index.
fn add_file(directory: &Path, bases: &[PathBuf], file: &Path) -> Result<(), FileError> {
    let Some(index) = index_of(directory, bases, file)? else { return Ok(()) };
    append_to_index(&index, &IndexEntry::of_file(file)?)
}

/// Completes the partial files of dead builder units in a directory, adds them to their indexes, and tells about them on standard
/// error. `bases` are base names of the run's own files. Returns the files that it could not complete or add, with the causes.
pub(crate) fn recover(directory: &Path, bases: &[PathBuf]) -> Result<Vec<FileError>, FileError> {
    let mut problems = Vec::new();
    for recovered in recover_partials(directory)? {
        match recovered {
            Ok(Recovered { path: Some(path), partial, events }) => {
                eprint_line!("{}: recovered {events} events as {}", partial.display(), path.display());
                problems.extend(add_file(directory, bases, &path).err());
            }
            Ok(Recovered { path: None, partial, .. }) => {
                eprint_line!("{}: has no event and is removed", partial.display());
            }
            Err(error) => problems.push(error),
        }
    }
    Ok(problems)
}

/// Recovers what earlier runs left in a directory, with a warning for each file that stays as it is.
pub(crate) fn recover_earlier(directory: &Path, bases: &[PathBuf]) -> Result<(), FileError> {
    recover(directory, bases)?.iter().for_each(|error| eprint_line!("warning: {error}"));
    Ok(())
}

/// Complete event files of builder units, `RUN.BUILDER.h5` for example, whose sequences have no index: the launcher and its units were
/// killed before they wrote it.
fn without_index(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let indexes = indexes(directory)?;
    let is_of_unit = |path: &PathBuf| {
        let name = &name_of(path);
        base_of_complete(name).is_some_and(|base| base.contains('.'))
            && !indexes.iter().any(|index| is_of_index(index, name))
    };
    let mut found = complete_files(directory)?;
    found.retain(|path| is_of_unit(path) && !is_unpacked(path, &[]) && is_event_file(path));
    Ok(found)
}

/// Whether a file is one of this program, even if it is damaged.
fn is_event_file(path: &Path) -> bool {
    !matches!(event_numbers(path), Err(FileError::WrongFormat { field, .. }) if field == "attribute format")
}

/// Files in a directory with the extension of a complete file, by name. An empty one counts as absent.
fn complete_files(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let mut found = named(directory, |name| base_of_complete(name).is_some())?;
    // A file that is gone by now is none.
    found.retain(|path| path.symlink_metadata().is_ok_and(|found| found.is_file() && found.len() > 0));
    Ok(found)
}

/// Complete files of a sequence that its index lacks: the process was killed after it had renamed the file, and before it wrote
/// the entry.
fn unlisted(index: &Path) -> Result<Vec<PathBuf>, FileError> {
    let name = name_of(index);
    let base = name.strip_suffix(INDEX_SUFFIX).unwrap_or(&name);
    let entries = read_index(index)?;
    let mut found = complete_files(&super::folder(index))?;
    found.retain(|path| {
        let name = name_of(path);
        let is_listed = entries.iter().any(|entry| entry.file == name) || is_unpacked(path, &entries);
        file_state(base, &name) == Some(FileState::Complete) && !is_listed
    });
    Ok(found)
}

/// Whether an event file was unpacked beside its batch file, which has the same events.
fn is_unpacked(path: &Path, entries: &[IndexEntry]) -> bool {
    let batches = path.with_extension("batches");
    batches != path && (batches.exists() || entries.iter().any(|entry| entry.file == name_of(&batches)))
}

/// Completes the partial files of a run, and adds them to the indexes of its builder units, with complete files that killed units have
/// not added: those of earlier runs were removed at its start. Returns what it could not do, as on a full disk: the run has a report
/// nevertheless.
pub(crate) fn complete(config: &RunConfig) -> Vec<String> {
    let Some(output) = &config.output else { return Vec::new() };
    let bases: Vec<PathBuf> = all_event_files(config).collect();
    let mut errors = recover(&output.directory, &bases).unwrap_or_else(|error| vec![error]);
    errors.extend(bases.iter().filter_map(|base| add_unlisted(base).err()));
    errors.iter().map(ToString::to_string).collect()
}

/// Adds complete files of the sequence with this base name to its index.
fn add_unlisted(base: &Path) -> Result<(), FileError> {
    let index = index_path(base);
    unlisted(&index)?.iter().try_for_each(|path| append_to_index(&index, &IndexEntry::of_file(path)?))
}
