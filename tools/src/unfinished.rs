//! Files that get their name once they are complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{fchmod, lstat};

use crate::below::mode_to_keep;
use crate::output::Usage;

/// Who may read what is written here: the values are only for the user.
const FILE_MODE: u32 = 0o600;

/// A file under another name than its own until it is finished.
pub(crate) struct Unfinished {
    pub(crate) writer: BufWriter<File>,
    path: PathBuf,
    name: PathBuf,
}

impl Unfinished {
    /// Fails if the name is that of a device, a link or a folder, which would be replaced.
    pub(crate) fn create(name: &Path) -> io::Result<Self> {
        let mode = mode_to_keep(lstat(name))?;
        let mut path = name.as_os_str().to_owned();
        path.push(format!(".{}.unfinished", std::process::id()));
        let path = PathBuf::from(path);
        let file = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&path);
        let file = file.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                let why = "is there already, of a kv-cli that was killed: remove it";
                io::Error::new(error.kind(), format!("{} {why}", path.display()))
            }
            _ => error,
        })?;
        if let Some(mode) = mode {
            fchmod(&file, mode)?;
        }
        Ok(Self { writer: BufWriter::new(file), path, name: name.to_owned() })
    }

    /// The name stands for the whole content, also after a crash of the machine.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.writer.flush()?;
        self.writer.get_ref().sync_all()?;
        fs::rename(&self.path, &self.name)
    }
}

/// Fails if there is something of this name, and it is not to be replaced.
pub(crate) fn check_free(name: &Path, may_replace: bool) -> anyhow::Result<()> {
    if !may_replace && fs::symlink_metadata(name).is_ok() {
        let name = name.display();
        return Err(Usage::error(format!(
            "{name} is there already: choose another name, or use --force to replace it"
        )));
    }
    Ok(())
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Under this name it is there only if it was not finished.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_gets_its_name_only_when_finished() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join("out.jsonl");
        let mut file = Unfinished::create(&name).unwrap();
        file.writer.write_all(b"{}\n").unwrap();
        drop(file);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let mut file = Unfinished::create(&name).unwrap();
        file.writer.write_all(b"{}\n").unwrap();
        file.finish().unwrap();
        assert_eq!(fs::read(&name).unwrap(), b"{}\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_is_for_its_user_alone_unless_it_replaces_another() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join("snap");
        let mode = || fs::metadata(&name).unwrap().permissions().mode() & 0o777;
        Unfinished::create(&name).unwrap().finish().unwrap();
        assert_eq!(mode(), 0o600);
        fs::set_permissions(&name, Permissions::from_mode(0o664)).unwrap();
        Unfinished::create(&name).unwrap().finish().unwrap();
        assert_eq!(mode(), 0o664);
        let _under_way = Unfinished::create(&name).unwrap();
        let error = Unfinished::create(&name).err().unwrap().to_string();
        assert!(error.contains(".unfinished is there already"), "{error}");
    }

    #[test]
    fn what_is_no_file_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join("null");
        std::os::unix::fs::symlink("/dev/null", &name).unwrap();
        let error = Unfinished::create(&name).err().unwrap().to_string();
        assert!(error.contains("no regular file"), "{error}");
        assert_eq!(fs::read_link(&name).unwrap(), Path::new("/dev/null"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
