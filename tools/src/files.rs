//! Keys as files below a folder, both ways.

use std::collections::HashSet;
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use farside_tools::paths::path_of;

use crate::unfinished::create_beside;

/// Who may look into a folder that is made here, where names are keys: its user.
const FOLDER_MODE: u32 = 0o700;

/// What stands below a folder.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Regular files, by name.
    pub(crate) files: Vec<PathBuf>,
    /// Symbolic links, which are not followed.
    pub(crate) links: u64,
    /// Sockets, pipes and devices.
    pub(crate) others: u64,
    /// Folders that cannot be read, and why.
    pub(crate) failures: Vec<(PathBuf, io::Error)>,
}

impl Tree {
    /// Looks at everything below a folder.
    pub(crate) fn below(root: &Path) -> Self {
        let mut tree = Self::default();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            if let Err(error) = tree.look_into(&folder, &mut folders) {
                tree.failures.push((folder, error));
            }
        }
        tree.files.sort();
        tree
    }

    fn look_into(&mut self, folder: &Path, folders: &mut Vec<PathBuf>) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                self.files.push(entry.path());
            } else if kind.is_symlink() {
                self.links += 1;
            } else {
                self.others += 1;
            }
        }
        Ok(())
    }
}

/// A folder that files are written into.
pub(crate) struct Target {
    root: PathBuf,
    /// Where each file is written before it gets its name.
    unfinished: PathBuf,
    /// Folders known to be there.
    folders: HashSet<PathBuf>,
}

impl Target {
    /// Makes the folder if it is not there.
    pub(crate) fn open(root: &Path, may_hold_files: bool) -> anyhow::Result<Self> {
        let name = root.display();
        let made = DirBuilder::new().mode(FOLDER_MODE).recursive(true).create(root);
        made.with_context(|| format!("cannot make the folder {name}"))?;
        let mut entries = fs::read_dir(root).with_context(|| format!("cannot read {name}"))?;
        if !may_hold_files && entries.next().is_some() {
            bail!("{name} is not empty: choose another folder, or use --force to write into it");
        }
        let unfinished = root.join(format!(".kv-cli-{}.unfinished", std::process::id()));
        let folders = HashSet::from([root.to_owned()]);
        Ok(Self { root: root.to_owned(), unfinished, folders })
    }

    /// Writes a key's file, whole or not at all.
    pub(crate) fn write(&mut self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        let path = self.root.join(path_of(key)?);
        if path == self.unfinished {
            bail!("kv-cli itself uses a file of this name just now");
        }
        if let Some(folder) = path.parent() {
            self.make_folder(folder)?;
        }
        // What is left of a write that failed.
        let _ = fs::remove_file(&self.unfinished);
        create_beside(&self.unfinished, &path)?.write_all(value)?;
        fs::rename(&self.unfinished, &path)?;
        Ok(())
    }

    /// Makes a folder below the root, with its parents. A symbolic link on the way could lead out
    /// of the root, so it is refused.
    fn make_folder(&mut self, folder: &Path) -> anyhow::Result<()> {
        if self.folders.contains(folder) {
            return Ok(());
        }
        if let Some(parent) = folder.parent() {
            self.make_folder(parent)?;
        }
        match DirBuilder::new().mode(FOLDER_MODE).create(folder) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if !fs::symlink_metadata(folder)?.is_dir() {
                    bail!("{} is there and not a folder", folder.display());
                }
            }
            Err(error) => return Err(error.into()),
        }
        self.folders.insert(folder.to_owned());
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It is there only if a write failed half-way.
        let _ = fs::remove_file(&self.unfinished);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use farside_tools::paths::key_of;

    use super::*;

    #[test]
    fn a_tree_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("out");
        let mut target = Target::open(&root, false).unwrap();
        for (key, value) in [("a", "1"), ("b/c/d", ""), ("b/e", "2")] {
            target.write(key.as_bytes(), value.as_bytes()).unwrap();
        }
        std::os::unix::fs::symlink("a", root.join("link")).unwrap();
        drop(target);
        let mode = |of: &str| fs::metadata(root.join(of)).unwrap().permissions().mode() & 0o777;
        assert_eq!([mode(""), mode("b"), mode("b/e")], [0o700, 0o700, 0o600]);
        let tree = Tree::below(&root);
        let keys: Vec<_> = tree.files.iter().map(|file| key_of(file, &root)).collect();
        assert_eq!(keys, [&b"a"[..], b"b/c/d", b"b/e"]);
        assert_eq!((tree.links, tree.others, tree.failures.len()), (1, 0, 0));
        assert_eq!(fs::read(root.join("b/e")).unwrap(), b"2");
        let error = Target::open(&root, false).err().unwrap().to_string();
        assert!(error.contains("--force"), "{error}");
        assert!(Target::open(&root, true).is_ok());
    }

    #[test]
    fn files_in_the_way_and_links_out_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("out");
        let mut target = Target::open(&root, false).unwrap();
        target.write(b"a", b"").unwrap();
        assert!(target.write(b"a/b", b"").is_err());
        target.write(b"c/d", b"").unwrap();
        assert!(target.write(b"c", b"").is_err());
        std::os::unix::fs::symlink(folder.path(), root.join("out")).unwrap();
        assert!(target.write(b"out/escaped", b"").is_err());
        assert!(!folder.path().join("escaped").exists());
        drop(target);
        assert_eq!(Tree::below(&root).files.len(), 2);
    }
}
