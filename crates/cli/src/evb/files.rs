//! The event files of a run: their names, what they hold, and what a builder unit that ended early left.

use std::borrow::Cow;
use std::collections::HashSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use millstream_evb::config::RunConfig;
use millstream_evb::core::BuIndex;
use millstream_fragment::file::IoError;
use millstream_store::{
    FileError, FileState, INDEX_SUFFIX, IndexEntry, Recovered, WriteOptions, append_to_index,
    committed_numbers, event_numbers, file_state, index_path, partials, read_index, recover_partials,
    refuse_earlier_events, remove_earlier_sequence, unpack,
};

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
fn all_event_files(config: &RunConfig) -> impl Iterator<Item = PathBuf> {
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

/// `millstream evb files`: verifies the files of all indexes in a directory, and names partial files.
pub(crate) fn list(directory: &Path, recover_partials: bool) -> Result<ExitCode, Box<dyn Error>> {
    if recover_partials {
        for path in recover(directory)?.into_iter().filter_map(|recovered| recovered.path) {
            if let Some(index) = index_of(directory, &path)? {
                append_to_index(&index, &IndexEntry::of_file(&path, true)?)?;
            }
        }
    }
    let mut problems = 0;
    for index in indexes(directory)? {
        for path in unlisted(&index, SystemTime::UNIX_EPOCH)? {
            if recover_partials {
                append_to_index(&index, &IndexEntry::of_file(&path, false)?)?;
            } else {
                eprintln!("{}: complete, but not in the index; --recover adds it", path.display());
                problems += 1;
            }
        }
        for entry in read_index(&index)? {
            let numbers = entry.first_event.zip(entry.last_event);
            let numbers = numbers.map_or_else(String::new, |(first, last)| format!(" {first} to {last}"));
            let recovered = if entry.recovered { ", recovered" } else { "" };
            println!("{}: {} events{numbers}, {} B{recovered}", entry.file, entry.events, entry.bytes.0);
            if let Err(error) = entry.verify(directory) {
                eprintln!("error: {error}");
                problems += 1;
            }
        }
    }
    for path in partials(directory)? {
        eprintln!(
            "{}: partial; it is being written, or --recover completes it: {}",
            path.display(),
            committed_numbers(&path)
                .map_or_else(|error| error.to_string(), |numbers| format!("{} events", numbers.len()))
        );
        problems += 1;
    }
    Ok(if problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `millstream evb unpack`: writes the stored events of a batch file into an event file.
pub(crate) fn unpack_batches(batches: &Path, to: &Path, replace: bool) -> Result<ExitCode, Box<dyn Error>> {
    let stored = unpack(batches, to, &WriteOptions { replace, ..WriteOptions::default() })?;
    println!(
        "{}: {} events, {} fragments, {} B of payload, {} fragments missing, {} corrupt",
        stored.path.display(),
        stored.events,
        stored.fragments,
        stored.payload_bytes,
        stored.missing,
        stored.corrupt
    );
    Ok(ExitCode::SUCCESS)
}

/// The indexes in a directory, by name.
fn indexes(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let unreadable = IoError::of(directory, "list");
    let mut indexes = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.to_string_lossy().ends_with(INDEX_SUFFIX) {
            indexes.push(path);
        }
    }
    indexes.sort();
    Ok(indexes)
}

/// The index of the sequence that a file belongs to, if there is one.
fn index_of(directory: &Path, file: &Path) -> Result<Option<PathBuf>, FileError> {
    let belongs = |index: &PathBuf| {
        name_of(index)
            .strip_suffix(INDEX_SUFFIX)
            .is_some_and(|base| file_state(base, &name_of(file)).is_some())
    };
    Ok(indexes(directory)?.into_iter().find(belongs))
}

/// Completes the partial files of dead builder units in the output directory, and tells about them on standard error.
pub(crate) fn recover(directory: &Path) -> Result<Vec<Recovered>, FileError> {
    let mut all = Vec::new();
    for recovered in recover_partials(directory)? {
        match recovered {
            Ok(recovered) => {
                if let Some(path) = &recovered.path {
                    let partial = recovered.partial.display();
                    eprintln!("{partial}: recovered {} events as {}", recovered.events, path.display());
                }
                all.push(recovered);
            }
            Err(error) => eprintln!("warning: {error}; the partial file is kept"),
        }
    }
    Ok(all)
}

/// Complete files of a sequence that its index lacks: the process was killed after it had renamed the file, and before it wrote
/// the entry. Files that were last changed before `since` are of an earlier run.
fn unlisted(index: &Path, since: SystemTime) -> Result<Vec<PathBuf>, FileError> {
    let name = name_of(index);
    let base = name.strip_suffix(INDEX_SUFFIX).unwrap_or(&name);
    let entries = read_index(index)?;
    let directory = &super::folder(index);
    let unreadable = IoError::of(directory, "list");
    let mut found = Vec::new();
    for file in std::fs::read_dir(directory).map_err(unreadable)? {
        let file = file.map_err(unreadable)?;
        let path = file.path();
        let name = name_of(&path);
        let is_complete = file_state(base, &name) == Some(FileState::Complete);
        let is_listed = entries.iter().any(|entry| entry.file == name) || is_unpacked(&path, &entries);
        let changed = file.metadata().and_then(|metadata| metadata.modified()).map_err(unreadable)?;
        if is_complete && !is_listed && changed >= since {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Whether an event file was unpacked beside its batch file, which has the same events.
fn is_unpacked(path: &Path, entries: &[IndexEntry]) -> bool {
    let batches = path.with_extension("batches");
    batches != path && (batches.exists() || entries.iter().any(|entry| entry.file == name_of(&batches)))
}

/// Completes the partial files of a run that began at `since`, and adds them to the indexes of its builder units, with complete
/// files that killed units have not added. Returns what it could not do, as on a full disk: the run has a report nevertheless.
pub(crate) fn complete(config: &RunConfig, since: SystemTime) -> Vec<String> {
    let Some(output) = &config.output else { return Vec::new() };
    let mut problems = Vec::new();
    let recovered = recover(&output.directory).unwrap_or_else(|error| {
        problems.push(error.to_string());
        Vec::new()
    });
    for base in (0..config.builders.len()).filter_map(|bu| event_files(config, BuIndex(bu as u16))) {
        if let Err(error) = add_to_index(&base, &recovered, since) {
            problems.push(error.to_string());
        }
    }
    problems
}

/// Adds recovered files and unlisted ones of the sequence with this base name to its index.
fn add_to_index(base: &Path, recovered: &[Recovered], since: SystemTime) -> Result<(), FileError> {
    let of_base = |path: &&PathBuf| file_state(&name_of(base), &name_of(path)).is_some();
    for path in recovered.iter().filter_map(|recovered| recovered.path.as_ref()).filter(of_base) {
        append_to_index(&index_path(base), &IndexEntry::of_file(path, true)?)?;
    }
    for path in unlisted(&index_path(base), since)? {
        append_to_index(&index_path(base), &IndexEntry::of_file(&path, false)?)?;
    }
    Ok(())
}
