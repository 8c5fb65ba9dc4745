//! The files of a sequence: their names, and the events of an earlier sequence with the same base name.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use millstream_fragment::file::IoError;

use crate::index::{IndexEntry, append_to_index, event_numbers, index_path, read_index};
use crate::recover::{Recovered, recover_partial};
use crate::{FileError, batches, partial};

/// What the name of a sequence's file says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileState {
    /// `BASE.h5`, `BASE.0001.h5`, `BASE.recovered.h5`, …; likewise for batch files.
    Complete,
    /// `BASE.h5.partial`: its writer has not completed it.
    Partial,
    /// `BASE.h5.not-synced`: its events may be lost.
    NotSynced,
}

/// The state of the file `name` if it belongs to the sequence with the base name `base`. A base name may start with another one.
pub fn file_state(base: &str, name: &str) -> Option<FileState> {
    let mut words = name.strip_prefix(base)?.strip_prefix('.')?.split('.').peekable();
    words.next_if(|word| is_rotation(word));
    words.next_if(|word| is_numbered(word, "recovered"));
    words.next().filter(|word| [partial::EXTENSION, batches::EXTENSION].contains(word))?;
    let state = match words.next() {
        None => FileState::Complete,
        Some("partial") => FileState::Partial,
        Some(word) if is_numbered(word, "not-synced") => FileState::NotSynced,
        Some(_) => return None,
    };
    words.next().is_none().then_some(state)
}

/// Whether a file is one that could not be synced, of any sequence.
pub fn is_not_synced(name: &str) -> bool {
    let words: Vec<&str> = name.rsplit('.').take(2).collect();
    matches!(words[..], [word, extension]
        if is_numbered(word, "not-synced") && [partial::EXTENSION, batches::EXTENSION].contains(&extension))
}

/// The base name of the sequence that a complete file of this name belongs to. If a base name ends as a number of rotation does, this
/// is the one without the number.
pub fn base_of_complete(name: &str) -> Option<&str> {
    let (rest, extension) = name.rsplit_once('.')?;
    let base = match rest.rsplit_once('.') {
        Some((before, word)) if is_numbered(word, "recovered") => before,
        _ => rest,
    };
    let base = match base.rsplit_once('.') {
        Some((before, word)) if is_rotation(word) => before,
        _ => base,
    };
    ([partial::EXTENSION, batches::EXTENSION].contains(&extension) && !base.is_empty()).then_some(base)
}

/// Whether a word is a number of rotation: `0001`, `0002`, ….
fn is_rotation(word: &str) -> bool {
    word.len() >= 4 && word.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether a word is `WORD`, or `WORD-2`, `WORD-3`, ….
fn is_numbered(found: &str, word: &str) -> bool {
    found.strip_prefix(word).is_some_and(|rest| {
        rest.is_empty() || rest.strip_prefix('-').is_some_and(|number| number.parse::<u32>().is_ok())
    })
}

/// Refuses a base name whose complete files or index have events, as a sequence without `replace` does.
///
/// # Errors
/// [`FileError::EarlierEvents`]; also if a file cannot be read.
pub fn refuse_earlier_events(base: &Path) -> Result<(), FileError> {
    let refuse = |path: PathBuf, events: u64| match events {
        0 => Ok(()),
        _ => Err(FileError::EarlierEvents { path, base: base.to_owned(), events }),
    };
    for path in files(base, FileState::Complete)? {
        let events = event_numbers(&path)?.len();
        refuse(path, events as u64)?;
    }
    let index = index_path(base);
    let events = read_index(&index)?.iter().map(|entry| entry.events).sum();
    refuse(index, events)
}

/// Removes the files and the index of an earlier sequence with this base name. Without `replace` they must have no events.
///
/// # Errors
/// [`FileError::EarlierEvents`] without `replace`, [`FileError::Busy`] if the sequence is being written; also if a file cannot be
/// read or removed.
pub fn remove_earlier_sequence(base: &Path, replace: bool) -> Result<(), FileError> {
    for path in files(base, FileState::Partial)? {
        if let Some(Recovered { path: Some(path), .. }) = recover_partial(&path)? {
            append_to_index(&index_path(base), &IndexEntry::of_file(&path)?)?;
        }
    }
    if !replace {
        refuse_earlier_events(base)?;
    }
    // The index goes first: it names no file that is gone.
    for path in [index_path(base)].into_iter().chain(files(base, FileState::Complete)?) {
        match fs::remove_file(&path) {
            Err(cause) if cause.kind() != ErrorKind::NotFound => {
                return Err(IoError::of(&path, "remove")(cause).into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Files of the sequence in this state, by name. An empty file is no complete one: an interrupted recovery can leave it.
fn files(base: &Path, state: FileState) -> Result<Vec<PathBuf>, FileError> {
    let name = base.file_name().unwrap_or_default().to_string_lossy();
    let folder = match base.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let unreadable = IoError::of(folder, "list");
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let file = entry.file_name();
        if file_state(&name, &file.to_string_lossy()) == Some(state)
            && (state != FileState::Complete || entry.metadata().is_ok_and(|found| found.len() > 0))
        {
            found.push(base.with_file_name(file));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_has_the_files_with_its_base_name_only() {
        let state = |name| file_state("run.bu0", name);
        for name in
            ["run.bu0.h5", "run.bu0.0001.batches", "run.bu0.12345.recovered-2.h5", "run.bu0.recovered.h5"]
        {
            assert_eq!(state(name), Some(FileState::Complete), "{name}");
            assert_eq!(base_of_complete(name), Some("run.bu0"), "{name}");
        }
        assert_eq!(state("run.bu0.0001.h5.partial"), Some(FileState::Partial));
        assert_eq!(state("run.bu0.batches.not-synced-3"), Some(FileState::NotSynced));
        assert!(is_not_synced("run.bu0.h5.not-synced") && is_not_synced("run.batches.not-synced-3"));
        assert!(!is_not_synced("run.txt.not-synced") && !is_not_synced("run.not-synced.h5"));
        for name in [
            "run.bu0",
            "run.bu0.index.jsonl",
            "run.bu0.1.h5",
            "run.bu0.east.h5",
            "run.bu0.h5.east.h5",
            "run.bu0.recovered.0001.h5",
            "run.bu0+1.h5",
            "run.bu0.h5.partial.old",
            "run.bu0.recovered-.h5",
        ] {
            assert_eq!(state(name), None, "{name}");
            assert_ne!(base_of_complete(name), Some("run.bu0"), "{name}");
        }
        assert_eq!(base_of_complete("run.bu0.h5.partial"), None);
    }
}
