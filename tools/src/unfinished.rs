//! Files that get their name once they are complete.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// A file under another name than its own until it is finished.
pub(crate) struct Unfinished {
    pub(crate) writer: BufWriter<File>,
    path: PathBuf,
    name: PathBuf,
}

impl Unfinished {
    /// Fails if the name is that of a device, a link or a folder, which would be replaced.
    pub(crate) fn create(name: &Path) -> std::io::Result<Self> {
        if fs::symlink_metadata(name).is_ok_and(|metadata| !metadata.is_file()) {
            let why = "it is no regular file: write to another name";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
        }
        let mut path = name.as_os_str().to_owned();
        path.push(format!(".{}.unfinished", std::process::id()));
        let path = PathBuf::from(path);
        let writer = BufWriter::new(File::create(&path)?);
        Ok(Self { writer, path, name: name.to_owned() })
    }

    /// The name stands for the whole content, also after a crash of the machine.
    pub(crate) fn finish(mut self) -> std::io::Result<()> {
        self.writer.flush()?;
        self.writer.get_ref().sync_all()?;
        fs::rename(&self.path, &self.name)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Under this name it is there only if it was not finished.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
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
