//! Pictures of events that builder units write during a run.

use std::path::{Path, PathBuf};

const PREFIX: &str = ".event-display-";
/// Limit of a picture, in bytes.
const MAX_PICTURE: u64 = 4 << 20;

/// The picture of a builder unit's latest stored event, in the output directory of the run.
pub fn file(directory: &Path, builder: &str) -> PathBuf {
    directory.join(format!("{PREFIX}{builder}.svg"))
}

fn files(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let all = std::fs::read_dir(directory).into_iter().flatten().flatten();
    all.filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX)).map(|entry| entry.path())
}

/// The newest picture of a run.
pub(crate) fn newest(directory: &Path) -> Option<String> {
    let dated = files(directory).filter_map(|path| {
        let meta = path.metadata().ok().filter(|meta| meta.len() <= MAX_PICTURE)?;
        Some((meta.modified().ok()?, path))
    });
    std::fs::read_to_string(dated.max()?.1).ok()
}

/// Removes the pictures of killed builder units.
pub(crate) fn remove(directory: &Path) {
    files(directory).for_each(|path| _ = std::fs::remove_file(path));
}
