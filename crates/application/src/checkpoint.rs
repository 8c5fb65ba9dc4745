//! Checkpoints: one part a node, and a manifest that names the parts of one step.
//!
//! ```text
//!   FOLDER/checkpoint.json           the manifest: application, parameters, shape, step, parts with length and CRC-32C
//!   FOLDER/part-STEP-NODE-CRC.bin    what a node had
//! ```
//! The CRC-32C in a part's name keeps the parts of two runs apart, so a new part never replaces one of the last checkpoint.
//! The first node replaces the manifest when all parts are complete, so a folder always has the last complete step. A run
//! may resume on another shape: each node takes what it needs from the parts that have it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use millstream_fabric::Fabric;
use millstream_report::{SaveError, replace, save};
use millstream_torus_core::{Dimensions, NodeNumber};
use serde::{Deserialize, Serialize};

use crate::{ApplicationError, NodeGroup};

/// Version of the format.
const VERSION: u32 = 1;
/// The manifest's name.
const MANIFEST: &str = "checkpoint.json";

/// A folder of checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointFolder {
    path: PathBuf,
}

/// A part: what one node had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The file's name.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// Its CRC-32C.
    pub crc32c: u32,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub version: u32,
    /// The application.
    pub application: String,
    /// What a run must have in common with this one to resume.
    pub parameters: serde_json::Value,
    /// Shape of the torus that wrote it.
    pub dimensions: String,
    /// Steps so far.
    pub step: u64,
    /// The parts, by node number.
    pub parts: Vec<Part>,
    /// Results so far.
    pub progress: serde_json::Value,
}

/// A checkpoint that cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file operation failed.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        cause: io::Error,
    },
    /// A part cannot be written, or the manifest cannot be replaced.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// There is no checkpoint.
    #[error("{}: no checkpoint here; start without --resume", .0.display())]
    None(PathBuf),
    /// The manifest is not valid.
    #[error("{}: {reason}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The checkpoint is of another run.
    #[error("{}: {field} is {found}, but this run has {wanted}; give the same parameters to resume", path.display())]
    OtherRun {
        /// The manifest.
        path: PathBuf,
        /// The parameter.
        field: String,
        /// Its value in the checkpoint.
        found: String,
        /// Its value here.
        wanted: String,
    },
    /// A part is damaged.
    #[error("{}: {reason}; delete the folder and start again, or restore the file", path.display())]
    Damaged {
        /// The part.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// What identifies a run.
#[derive(Clone, Debug)]
pub struct RunIdentity<'a> {
    /// The application.
    pub application: &'a str,
    /// What a run must have in common with another to resume it: an object of plain values.
    pub parameters: serde_json::Value,
}

impl CheckpointFolder {
    /// A folder, which is made if it does not exist.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn create(path: &Path) -> Result<CheckpointFolder, CheckpointError> {
        fs::create_dir_all(path).map_err(|cause| CheckpointError::Io { path: path.to_owned(), cause })?;
        Ok(CheckpointFolder { path: path.to_owned() })
    }

    /// The last complete checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError`] if there is none, or if it is not of this run.
    pub fn load(&self, identity: &RunIdentity<'_>) -> Result<(Manifest, Dimensions), CheckpointError> {
        let path = self.path.join(MANIFEST);
        let text = fs::read_to_string(&path).map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => CheckpointError::None(self.path.clone()),
            _ => CheckpointError::Io { path: path.clone(), cause },
        })?;
        let wrong = |reason: String| CheckpointError::Manifest { path: path.clone(), reason };
        let manifest: Manifest = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        if manifest.version != VERSION {
            return Err(wrong(format!("version is {}, this program writes {VERSION}", manifest.version)));
        }
        let torus: Dimensions =
            manifest.dimensions.parse().map_err(|error| wrong(format!("dimensions: {error}")))?;
        if manifest.parts.len() != torus.nodes() {
            return Err(wrong(format!("{} parts for {torus}", manifest.parts.len())));
        }
        self.compare(&manifest, identity, &path)?;
        Ok((manifest, torus))
    }

    fn compare(
        &self,
        manifest: &Manifest,
        identity: &RunIdentity<'_>,
        path: &Path,
    ) -> Result<(), CheckpointError> {
        let other = |field: &str, found: String, wanted: String| CheckpointError::OtherRun {
            path: path.to_owned(),
            field: field.to_owned(),
            found,
            wanted,
        };
        if manifest.application != identity.application {
            let wanted = identity.application.to_owned();
            return Err(other("application", manifest.application.clone(), wanted));
        }
        let none = serde_json::Map::new();
        let (found, wanted) = (&manifest.parameters, &identity.parameters);
        let (found, wanted) = (found.as_object().unwrap_or(&none), wanted.as_object().unwrap_or(&none));
        for name in wanted.keys().chain(found.keys()) {
            let value = |map: &serde_json::Map<String, serde_json::Value>| {
                map.get(name).map_or_else(|| "absent".to_owned(), ToString::to_string)
            };
            let (found, wanted) = (value(found), value(wanted));
            if found != wanted {
                return Err(other(name, found, wanted));
            }
        }
        Ok(())
    }

    /// The content of a part.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] if it is not what was written.
    pub fn read_part(&self, part: &Part) -> Result<Vec<u8>, CheckpointError> {
        let path = self.part_path(part)?;
        let bytes = fs::read(&path).map_err(|cause| CheckpointError::Io { path: path.clone(), cause })?;
        let damaged = |reason| CheckpointError::Damaged { path, reason };
        if bytes.len() as u64 != part.bytes {
            return Err(damaged(format!("{} bytes, {} were written", bytes.len(), part.bytes)));
        }
        let crc = crc32c::crc32c(&bytes);
        if crc != part.crc32c {
            return Err(damaged(format!("CRC-32C is {crc:08x}, {:08x} was written", part.crc32c)));
        }
        Ok(bytes)
    }

    /// An error for a part whose content is not what its manifest says.
    #[must_use]
    pub fn damaged(&self, part: &Part, reason: &str) -> CheckpointError {
        CheckpointError::Damaged { path: self.path.join(&part.file), reason: reason.to_owned() }
    }

    fn part_path(&self, part: &Part) -> Result<PathBuf, CheckpointError> {
        // The manifest is input: it may not lead outside of the folder.
        let is_name = Path::new(&part.file).file_name().is_some_and(|name| name == part.file.as_str());
        if !is_name {
            let reason = format!("{:?} is not the name of a file", part.file);
            return Err(CheckpointError::Manifest { path: self.path.join(MANIFEST), reason });
        }
        Ok(self.path.join(&part.file))
    }

    fn part_name(step: u64, node: NodeNumber, crc32c: u32) -> String {
        format!("part-{step:012}-{:05}-{crc32c:08x}.bin", node.0)
    }

    fn write_part(&self, step: u64, node: NodeNumber, bytes: &[u8]) -> Result<Part, CheckpointError> {
        let crc32c = crc32c::crc32c(bytes);
        let file = CheckpointFolder::part_name(step, node, crc32c);
        replace(&self.path.join(&file), bytes)?;
        Ok(Part { file, bytes: bytes.len() as u64, crc32c })
    }

    /// Writes a checkpoint; all nodes call this. It is complete when this returns.
    ///
    /// # Errors
    /// [`CheckpointError`] of this node, or [`FabricError`](millstream_fabric::FabricError) if another one fails.
    pub fn save<F: Fabric>(
        &self,
        group: &mut NodeGroup<F>,
        identity: &RunIdentity<'_>,
        step: u64,
        bytes: &[u8],
        progress: impl FnOnce() -> serde_json::Value,
    ) -> Result<(), ApplicationError> {
        let part = self.write_part(step, group.here(), bytes)?;
        let mut description = [0; 12];
        description[..8].copy_from_slice(&part.bytes.to_le_bytes());
        description[8..].copy_from_slice(&part.crc32c.to_le_bytes());
        let all = group.all_blocks(&description)?;
        if group.is_first() {
            let parts = group.dimensions().all().zip(&all).map(|(node, description)| {
                let (bytes, crc) = description.split_at(8);
                let bytes = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
                let crc32c = crc.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
                Part { file: CheckpointFolder::part_name(step, node, crc32c), bytes, crc32c }
            });
            let manifest = Manifest {
                version: VERSION,
                application: identity.application.to_owned(),
                parameters: identity.parameters.clone(),
                dimensions: group.dimensions().to_string(),
                step,
                parts: parts.collect(),
                progress: progress(),
            };
            self.commit(&manifest)?;
        }
        // No node goes on before the checkpoint is complete, so that none can be lost meanwhile.
        Ok(group.barrier()?)
    }

    fn commit(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        let path = self.path.join(MANIFEST);
        let before = fs::read_to_string(&path).ok();
        // A manifest is plain data.
        let text = serde_json::to_string_pretty(manifest)
            .map_err(|error| CheckpointError::Manifest { path: path.clone(), reason: error.to_string() })?;
        save(&path, &text)?;
        let before = before.and_then(|text| serde_json::from_str::<Manifest>(&text).ok());
        for part in before.iter().flat_map(|manifest| &manifest.parts) {
            if !manifest.parts.iter().any(|new| new.file == part.file)
                && let Ok(path) = self.part_path(part)
            {
                // A part that stays takes space only.
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::run_on_threads;

    fn identity(seed: u64) -> RunIdentity<'static> {
        RunIdentity { application: "test", parameters: serde_json::json!({ "seed": seed }) }
    }

    fn save_on(folder: &CheckpointFolder, torus: &str, step: u64) {
        run_on_threads(torus.parse().unwrap(), |node| {
            let mut group = NodeGroup::new(node, Duration::from_secs(60)).unwrap();
            let bytes = vec![group.here().0 as u8; 100 + usize::from(group.here().0)];
            folder.save(&mut group, &identity(1), step, &bytes, || step.into()).unwrap();
        });
    }

    #[test]
    fn the_last_complete_checkpoint_is_read() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::create(&temporary.path().join("new")).unwrap();
        assert!(matches!(folder.load(&identity(1)), Err(CheckpointError::None(_))));
        save_on(&folder, "2x2x1", 5);
        save_on(&folder, "3x1x1", 10);
        // A part of a step that was not finished.
        folder.write_part(15, NodeNumber(0), &[1]).unwrap();
        let (manifest, torus) = folder.load(&identity(1)).unwrap();
        assert_eq!((manifest.step, torus.nodes()), (10, 3));
        for (node, part) in manifest.parts.iter().enumerate() {
            assert_eq!(folder.read_part(part).unwrap(), vec![node as u8; 100 + node]);
        }
        let names = fs::read_dir(temporary.path().join("new")).unwrap().count();
        assert_eq!(names, 1 + 3 + 1, "old parts are removed");
    }

    #[test]
    fn runs_with_the_same_steps_do_not_touch_each_others_parts() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::create(temporary.path()).unwrap();
        let save = |seed: u8| {
            run_on_threads("2x1x1".parse().unwrap(), |node| {
                let mut group = NodeGroup::new(node, Duration::from_secs(60)).unwrap();
                let identity = identity(seed.into());
                folder.save(&mut group, &identity, 5, &[seed; 10], || seed.into()).unwrap();
            });
        };
        save(1);
        // The next run writes a part and is lost before its manifest is complete.
        folder.write_part(5, NodeNumber(0), &[2; 10]).unwrap();
        let (manifest, _) = folder.load(&identity(1)).unwrap();
        assert_eq!(folder.read_part(&manifest.parts[0]).unwrap(), [1; 10]);
        for seed in [2, 2] {
            save(seed);
            let (manifest, _) = folder.load(&identity(seed.into())).unwrap();
            for part in &manifest.parts {
                assert_eq!(folder.read_part(part).unwrap(), [seed; 10]);
            }
        }
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1 + 2, "old parts are removed");
    }

    #[test]
    fn damage_and_other_runs_are_refused_by_name() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::create(temporary.path()).unwrap();
        save_on(&folder, "2x1x1", 5);
        let error = folder.load(&identity(2)).unwrap_err().to_string();
        assert!(error.contains("seed is 1, but this run has 2"), "{error}");
        let (manifest, _) = folder.load(&identity(1)).unwrap();
        let path = temporary.path().join(&manifest.parts[1].file);
        let mut bytes = fs::read(&path).unwrap();
        bytes[7] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let error = folder.read_part(&manifest.parts[1]).unwrap_err().to_string();
        assert!(error.contains(&manifest.parts[1].file) && error.contains("CRC-32C"), "{error}");
        fs::write(&path, &bytes[..50]).unwrap();
        assert!(matches!(folder.read_part(&manifest.parts[1]), Err(CheckpointError::Damaged { .. })));
        let outside = Part { file: "../secret".into(), bytes: 0, crc32c: 0 };
        assert!(matches!(folder.read_part(&outside), Err(CheckpointError::Manifest { .. })));

        let manifest_path = temporary.path().join(MANIFEST);
        let text = fs::read_to_string(&manifest_path).unwrap();
        for (from, to, expected) in [
            ("\"version\": 1", "\"version\": 9", "version is 9"),
            ("\"2x1x1\"", "\"2x0x1\"", "dimensions"),
            ("\"2x1x1\"", "\"4x1x1\"", "2 parts for 4x1x1"),
            ("{", "[", "checkpoint.json"),
        ] {
            assert!(text.contains(from));
            fs::write(&manifest_path, text.replacen(from, to, 1)).unwrap();
            let error = folder.load(&identity(1)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
