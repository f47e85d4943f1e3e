//! The folder of a cluster's snapshot: a file for each shard, and a manifest.
//!
//! The folder gets its name once all of its files are complete. The manifest is for copies of the
//! folder: it says how many files there are, and which belong together. The files themselves have
//! the format of every snapshot (`common/snapshot`), so each can also be used without the others.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use crate::keys::read_at_most;
use crate::output::Usage;

/// The name of the manifest.
pub(crate) const MANIFEST: &str = "snapshot.json";
/// The number of the manifest's format.
const FORMAT: u32 = 1;
/// Limit on the length of a manifest, in bytes.
const MANIFEST_BYTES_MAX: usize = 1 << 20;

/// What is in a folder.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: u32,
    /// The id of the cluster.
    cluster: String,
    /// When the snapshot was begun, in seconds since 1970.
    created_at_s: u64,
    /// What identifies the file of each shard.
    shards: Vec<ShardFile>,
}

/// The file of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShardFile {
    pub(crate) keys: u64,
    /// The checksum at the end of the file.
    pub(crate) checksum: u32,
}

impl Manifest {
    pub(crate) fn new(cluster: String, created_at_s: u64, shards: Vec<ShardFile>) -> Self {
        Self { format: FORMAT, cluster, created_at_s, shards }
    }

    fn read(folder: &Path) -> anyhow::Result<Self> {
        let file = match File::open(folder.join(MANIFEST)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("it is no snapshot of a cluster: it has no {MANIFEST}")
            }
            file => file.with_context(|| format!("{MANIFEST} cannot be opened"))?,
        };
        let bytes = read_at_most(file, MANIFEST_BYTES_MAX)?;
        let bytes = bytes.with_context(|| format!("{MANIFEST} is too long"))?;
        let manifest: Self = serde_json::from_slice(&bytes)
            .with_context(|| format!("{MANIFEST} is not what `kv-cli snapshot` writes"))?;
        if manifest.format != FORMAT {
            let found = manifest.format;
            bail!("{MANIFEST} has format {found}, and this program reads format {FORMAT} only");
        }
        Ok(manifest)
    }
}

/// Returns the name of a shard's file.
pub(crate) fn file_name(shard: usize) -> String {
    format!("shard-{shard:04}.snap")
}

/// A file to restore.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SnapshotFile {
    pub(crate) path: PathBuf,
    /// What the manifest says of it.
    pub(crate) expected: Option<ShardFile>,
}

/// Returns the files of a snapshot: those of a folder, or the file of one server.
pub(crate) fn files_of(snapshot: &Path) -> anyhow::Result<Vec<SnapshotFile>> {
    if !snapshot.is_dir() {
        return Ok(vec![SnapshotFile { path: snapshot.to_owned(), expected: None }]);
    }
    let shards = Manifest::read(snapshot)?.shards.into_iter().enumerate();
    let file = |(shard, expected)| SnapshotFile {
        path: snapshot.join(file_name(shard)),
        expected: Some(expected),
    };
    Ok(shards.map(file).collect())
}

/// Fails if something has this name, unless it is the folder of a snapshot and nothing else.
pub(crate) fn check_replaceable(name: &Path) -> anyhow::Result<()> {
    let is_absent = fs::symlink_metadata(name).is_err();
    if is_absent || is_snapshot_only(name).unwrap_or(false) {
        return Ok(());
    }
    let name = name.display();
    Err(Usage::error(format!(
        "{name} is not the folder of a snapshot, or has other files in it, so that --force does \
         not replace it: choose another name"
    )))
}

fn is_snapshot_only(folder: &Path) -> anyhow::Result<bool> {
    if !fs::symlink_metadata(folder)?.is_dir() {
        return Ok(false);
    }
    let files = (0..Manifest::read(folder)?.shards.len()).map(file_name);
    let names: HashSet<String> = files.chain([MANIFEST.to_owned()]).collect();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_known = entry.file_name().to_str().is_some_and(|name| names.contains(name));
        if !is_known || !entry.file_type()?.is_file() {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_folder_of_a_snapshot_is_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("snapshot");
        check_replaceable(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        assert!(check_replaceable(&folder).is_err(), "an empty folder");
        let shards = [3, 4].map(|checksum| ShardFile { keys: 2, checksum });
        let manifest = Manifest::new("id".to_owned(), 7, shards.into());
        let text = serde_json::to_string(&manifest).unwrap();
        fs::write(folder.join(MANIFEST), &text).unwrap();
        fs::write(folder.join(file_name(1)), "").unwrap();
        check_replaceable(&folder).unwrap();
        let files = files_of(&folder).unwrap();
        assert_eq!(files[1].path, folder.join("shard-0001.snap"));
        assert_eq!([files[0].expected, files[1].expected], shards.map(Some));
        for other in ["shard-0002.snap", "notes"] {
            fs::write(folder.join(other), "").unwrap();
            assert!(check_replaceable(&folder).is_err(), "{other}");
            fs::remove_file(folder.join(other)).unwrap();
        }
        std::os::unix::fs::symlink(&folder, parent.path().join("link")).unwrap();
        assert!(check_replaceable(&parent.path().join("link")).is_err());
        for wrong in [text.replace("\"format\":1", "\"format\":2"), text.replace('}', "")] {
            fs::write(folder.join(MANIFEST), wrong).unwrap();
            assert!(files_of(&folder).is_err() && check_replaceable(&folder).is_err());
        }
    }
}
