//! Keys as files below a folder: reads them for `load`, writes them for `dump`. Also writes single
//! files, and folders, which get their name once they are complete.

use std::fs::{self, DirBuilder, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use farside_cli::formats::{PATH_BYTES_MAX, path_of};
use rustix::fs::{CWD, FileType, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::confined_paths::{Folder, unfinished_names};
use crate::output::Usage;

/// The mode of the folder that a dump creates: only its user has access.
const FOLDER_MODE: u32 = 0o700;

/// The files below a folder.
pub(crate) struct Tree {
    root: Folder,
    /// The paths of regular files, relative to the root, sorted.
    pub(crate) files: Vec<PathBuf>,
    /// The number of symbolic links, which are not followed.
    pub(crate) links: u64,
    /// The number of sockets, pipes and devices.
    pub(crate) others: u64,
    /// The folders that cannot be read, with their errors.
    pub(crate) failures: Vec<(PathBuf, io::Error)>,
}

impl Tree {
    /// Lists all files below a folder.
    pub(crate) fn list(root: &Path) -> io::Result<Self> {
        let (root, files, failures) = (Folder::open(root)?, Vec::new(), Vec::new());
        let mut tree = Self { root, files, links: 0, others: 0, failures };
        let mut folders = vec![PathBuf::new()];
        while let Some(folder) = folders.pop() {
            if let Err(error) = tree.list_folder(&folder, &mut folders) {
                tree.failures.push((folder, error));
            }
        }
        tree.files.sort();
        Ok(tree)
    }

    /// Lists one folder, and appends its subfolders to `folders`.
    fn list_folder(&mut self, folder: &Path, folders: &mut Vec<PathBuf>) -> io::Result<()> {
        if folder.as_os_str().len() > PATH_BYTES_MAX {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        for child in self.root.descend(folder)?.children()? {
            let path = folder.join(child.name);
            match child.kind {
                FileType::Directory => folders.push(path),
                FileType::RegularFile => self.files.push(path),
                FileType::Symlink => self.links += 1,
                _ => self.others += 1,
            }
        }
        Ok(())
    }

    /// Opens one of the files. Fails if it is not a regular file any more.
    pub(crate) fn open(&self, file: &Path) -> io::Result<File> {
        let (folder, name) = split(file)?;
        self.root.descend(folder)?.file(name)
    }
}

/// The folder that a dump writes files into.
pub(crate) struct DumpFolder {
    root: Folder,
}

impl DumpFolder {
    /// Opens the folder, after creating it if it does not exist.
    pub(crate) fn open(root: &Path, may_hold_files: bool) -> anyhow::Result<Self> {
        let name = root.display();
        let made = DirBuilder::new().mode(FOLDER_MODE).recursive(true).create(root);
        made.with_context(|| format!("cannot create the folder {name}"))?;
        let reading = || format!("cannot read {name}");
        let root = Folder::open(root).with_context(reading)?;
        if !may_hold_files && !root.children().with_context(reading)?.is_empty() {
            return Err(Usage::error(format!(
                "{name} is not empty: choose another folder, or use --force to write into it"
            )));
        }
        Ok(Self { root })
    }

    /// Writes a key's file, completely or not at all.
    pub(crate) fn write(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        let (folder, name) = split(path_of(key)?)?;
        let folder = self.root.descend_or_make(folder)?;
        let mut new = folder.create(name)?;
        new.file.write_all(value)?;
        Ok(new.finish()?)
    }
}

/// Writes a file, which gets its name once it is complete and on the disk. A failure leaves no
/// file.
pub(crate) fn write_whole<T>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&File>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let (folder, name) = split(path)?;
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let folder = Folder::open(folder)?;
    let new = folder.create(name)?;
    let mut writer = BufWriter::new(&new.file);
    let written = write(&mut writer)?;
    writer.flush()?;
    drop(writer);
    new.file.sync_all()?;
    new.finish()?;
    Ok(written)
}

/// A folder that has a temporary name beside its final one until it is finished. It is removed if
/// it is dropped before.
pub(crate) struct NewFolder {
    /// The temporary name. Once the folder is finished, a former folder has it, or nothing.
    unfinished: PathBuf,
    name: PathBuf,
}

impl NewFolder {
    /// Creates the folder.
    pub(crate) fn create(name: &Path) -> io::Result<Self> {
        let (parent, _) = split(name)?;
        for unfinished in unfinished_names() {
            let unfinished = parent.join(unfinished);
            match DirBuilder::new().mode(FOLDER_MODE).create(&unfinished) {
                Ok(()) => return Ok(Self { unfinished, name: name.to_owned() }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Returns the path of a file in the folder.
    pub(crate) fn path_of(&self, file: &str) -> PathBuf {
        self.unfinished.join(file)
    }

    /// Gives the folder its final name, once its entries are on the disk. Removes what had this
    /// name before.
    pub(crate) fn finish(self) -> io::Result<()> {
        File::open(&self.unfinished)?.sync_all()?;
        if fs::symlink_metadata(&self.name).is_err() {
            return fs::rename(&self.unfinished, &self.name);
        }
        let swapped = renameat_with(CWD, &self.unfinished, CWD, &self.name, RenameFlags::EXCHANGE);
        match swapped {
            // Some file systems, such as NFS, cannot swap two names.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                let former = Self::create(&self.name)?;
                fs::rename(&self.name, &former.unfinished)?;
                fs::rename(&self.unfinished, &self.name).inspect_err(|_| {
                    // If this fails, too, the former folder stays under its temporary name.
                    let _ = fs::rename(&former.unfinished, &self.name);
                })
            }
            swapped => Ok(swapped?),
        }
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.unfinished);
    }
}

/// Fails if a file has this name and must not be replaced.
pub(crate) fn check_free(name: &Path, may_replace: bool) -> anyhow::Result<()> {
    if !may_replace && fs::symlink_metadata(name).is_ok() {
        let name = name.display();
        return Err(Usage::error(format!(
            "{name} exists already: choose another name, or use --force to replace it"
        )));
    }
    Ok(())
}

/// Splits a path into folder and file name.
fn split(path: &Path) -> io::Result<(&Path, &std::ffi::OsStr)> {
    path.parent().zip(path.file_name()).ok_or_else(|| io::ErrorKind::InvalidFilename.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};

    use super::*;

    #[test]
    fn dumped_files_are_listed_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("out");
        let target = DumpFolder::open(&root, false).unwrap();
        for (key, value) in [("a", "1"), ("b/c/d", ""), ("b/e", "2")] {
            target.write(key.as_bytes(), value.as_bytes()).unwrap();
        }
        symlink("a", root.join("link")).unwrap();
        drop(target);
        let mode = |file: &str| fs::metadata(root.join(file)).unwrap().permissions().mode() & 0o777;
        assert_eq!([mode(""), mode("b"), mode("b/e")], [0o700, 0o700, 0o600]);
        let tree = Tree::list(&root).unwrap();
        assert_eq!(tree.files, ["a", "b/c/d", "b/e"].map(PathBuf::from));
        assert_eq!((tree.links, tree.others, tree.failures.len()), (1, 0, 0));
        assert_eq!(fs::read(root.join("b/e")).unwrap(), b"2");
        let error = DumpFolder::open(&root, false).err().unwrap().to_string();
        assert!(error.contains("--force"), "{error}");
        assert!(DumpFolder::open(&root, true).is_ok());
    }

    #[test]
    fn keys_that_need_a_file_as_a_folder_or_lead_through_a_link_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("out");
        let target = DumpFolder::open(&root, false).unwrap();
        target.write(b"a", b"").unwrap();
        assert!(target.write(b"a/b", b"").is_err());
        target.write(b"c/d", b"").unwrap();
        assert!(target.write(b"c", b"").is_err());
        symlink(folder.path(), root.join("out")).unwrap();
        assert!(target.write(b"out/escaped", b"").is_err());
        assert!(!folder.path().join("escaped").exists());
        drop(target);
        assert_eq!(Tree::list(&root).unwrap().files.len(), 2);
    }

    /// A root with a file `d/f`, and a folder outside of it with a file `f`. Returns the temporary
    /// folder of both, the root and the outside.
    fn root_and_outside() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let [root, outside] = ["root", "outside"].map(|name| folder.path().join(name));
        fs::create_dir_all(root.join("d")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(root.join("d/f"), "inside").unwrap();
        fs::write(outside.join("f"), "secret").unwrap();
        (folder, root, outside)
    }

    fn replace_by_link(folder: &Path, to: &Path) {
        fs::rename(folder, folder.with_extension("away")).unwrap();
        symlink(to, folder).unwrap();
    }

    #[test]
    fn a_folder_that_becomes_a_link_during_a_dump_is_not_followed() {
        let (_folder, root, outside) = root_and_outside();
        let target = DumpFolder::open(&root, true).unwrap();
        target.write(b"d/1", b"value").unwrap();
        replace_by_link(&root.join("d"), &outside);
        let error = target.write(b"d/2", b"value").unwrap_err().to_string();
        assert!(error.contains("`d` is a symbolic link"), "{error}");
        assert!(target.write(b"d/f", b"value").is_err());
        assert_eq!(fs::read(outside.join("f")).unwrap(), b"secret");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    }

    #[test]
    fn files_that_become_links_or_pipes_during_a_load_are_refused() {
        let (_folder, root, outside) = root_and_outside();
        fs::write(root.join("link"), "").unwrap();
        fs::write(root.join("pipe"), "").unwrap();
        let tree = Tree::list(&root).unwrap();
        assert_eq!(tree.files, ["d/f", "link", "pipe"].map(PathBuf::from));
        replace_by_link(&root.join("d"), &outside);
        for name in ["link", "pipe"] {
            fs::remove_file(root.join(name)).unwrap();
        }
        symlink(outside.join("f"), root.join("link")).unwrap();
        mknodat(CWD, root.join("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        let error = |file: &str| tree.open(Path::new(file)).unwrap_err().to_string();
        assert!(error("d/f").contains("`d` is a symbolic link"), "{}", error("d/f"));
        assert!(error("link").contains("`link` is a symbolic link"), "{}", error("link"));
        assert!(error("pipe").contains("no regular file"), "{}", error("pipe"));
    }

    #[test]
    fn no_access_leaves_a_folder_that_keeps_turning_into_a_link() {
        const ROUNDS: u64 = 2000;
        let (_folder, root, outside) = root_and_outside();
        symlink(&outside, root.join("link")).unwrap();
        let (link, d) = (root.join("link"), root.join("d"));
        let target = DumpFolder::open(&root, true).unwrap();
        let use_d = || {
            let tree = Tree { files: Vec::new(), ..Tree::list(&root).unwrap() };
            for round in 0..ROUNDS {
                let _ = target.write(format!("d/{round}").as_bytes(), b"value");
                if let Ok(file) = tree.open(Path::new("d/f")) {
                    assert_eq!(io::read_to_string(file).unwrap(), "inside");
                }
            }
        };
        std::thread::scope(|scope| {
            // The swaps also stop if the worker fails.
            let worker = scope.spawn(use_d);
            while !worker.is_finished() {
                renameat_with(CWD, &link, CWD, &d, RenameFlags::EXCHANGE).unwrap();
            }
        });
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(fs::read(outside.join("f")).unwrap(), b"secret");
    }

    #[test]
    fn keys_may_have_the_names_of_unfinished_files() {
        let folder = tempfile::tempdir().unwrap();
        let target = DumpFolder::open(folder.path(), false).unwrap();
        let name = format!(".kv-cli-{}", std::process::id());
        let keys = ["unfinished/x", "0.unfinished/x", "1.unfinished", "2.unfinished", "plain"];
        let keys = keys.map(|end| format!("{name}.{end}"));
        for key in &keys {
            target.write(key.as_bytes(), key.as_bytes()).unwrap();
        }
        for key in &keys {
            assert_eq!(fs::read_to_string(folder.path().join(key)).unwrap(), *key);
        }
        assert_eq!(Tree::list(folder.path()).unwrap().files.len(), keys.len());
    }

    #[test]
    fn a_file_keeps_the_mode_of_the_regular_file_it_replaces() {
        let folder = tempfile::tempdir().unwrap();
        let target = DumpFolder::open(folder.path(), false).unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("own"), "").unwrap();
        fs::set_permissions(path("own"), fs::Permissions::from_mode(0o640)).unwrap();
        // A link has the mode 0777, which the new file must not get.
        symlink("nowhere", path("link")).unwrap();
        target.write(b"own", b"value").unwrap();
        assert_eq!(fs::metadata(path("own")).unwrap().permissions().mode() & 0o777, 0o640);
        let error = target.write(b"link", b"value").unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
        assert!(path("link").is_symlink() && !path("nowhere").exists());
    }

    #[test]
    fn a_key_that_is_too_long_for_a_path_creates_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let target = DumpFolder::open(folder.path(), false).unwrap();
        let key = |parts: usize| vec!["a"; parts].join("/");
        let error = target.write(key(32_768).as_bytes(), b"").unwrap_err().to_string();
        assert!(error.contains("65535 bytes"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        target.write(key(200).as_bytes(), b"deep").unwrap();
        let tree = Tree::list(folder.path()).unwrap();
        assert_eq!(tree.files, [PathBuf::from(key(200))]);
        assert_eq!(io::read_to_string(tree.open(&tree.files[0]).unwrap()).unwrap(), "deep");
    }

    #[test]
    fn a_file_gets_its_name_and_its_mode_only_when_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join("snap");
        let count = || fs::read_dir(folder.path()).unwrap().count();
        let write = |text: &str| {
            write_whole(&name, |file| {
                file.write_all(text.as_bytes())?;
                assert_ne!(fs::read(&name).unwrap_or_default(), text.as_bytes());
                if text == "bad" { Err(anyhow::anyhow!("failed")) } else { Ok(()) }
            })
        };
        let mode = || fs::metadata(&name).unwrap().permissions().mode() & 0o777;
        assert!(write("bad").is_err() && count() == 0);
        write("one").unwrap();
        assert_eq!((mode(), count()), (0o600, 1));
        fs::set_permissions(&name, fs::Permissions::from_mode(0o664)).unwrap();
        assert!(write("bad").is_err());
        assert_eq!(fs::read(&name).unwrap(), b"one");
        write("two").unwrap();
        assert_eq!((mode(), count()), (0o664, 1));
        assert_eq!(fs::read(&name).unwrap(), b"two");
    }

    #[test]
    fn a_folder_gets_its_name_only_when_it_is_complete() {
        let parent = tempfile::tempdir().unwrap();
        let name = parent.path().join("snap");
        let count = || fs::read_dir(parent.path()).unwrap().count();
        let write = |text: &str| {
            let new = NewFolder::create(&name).unwrap();
            fs::write(new.path_of("file"), text).unwrap();
            assert_ne!(fs::read(name.join("file")).unwrap_or_default(), text.as_bytes());
            new
        };
        drop(write("dropped"));
        assert_eq!(count(), 0);
        write("one").finish().unwrap();
        drop(write("dropped"));
        assert_eq!(fs::read(name.join("file")).unwrap(), b"one");
        write("two").finish().unwrap();
        assert_eq!((fs::read(name.join("file")).unwrap(), count()), (b"two".to_vec(), 1));
        assert_eq!(fs::metadata(&name).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_device_or_link_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join("null");
        symlink("/dev/null", &name).unwrap();
        let error = write_whole(&name, |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
        assert_eq!(fs::read_link(&name).unwrap(), Path::new("/dev/null"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
