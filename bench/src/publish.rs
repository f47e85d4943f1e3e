//! Where results go.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::Serialize;

use crate::{Error, Result};

/// Writes JSON to the file, complete or not at all, and the table to stdout; with `-` for the file
/// the JSON to stdout and no table.
///
/// # Errors
/// [`Error::System`].
pub fn publish(report: &impl Serialize, table: &str, json: Option<&Path>) -> Result<()> {
    let written = match json {
        None => print(table),
        Some(path) => match serde_json::to_string_pretty(report).map_err(io::Error::from) {
            Err(error) => Err(error),
            Ok(text) if path == Path::new("-") => print(&(text + "\n")),
            Ok(text) => write_whole(path, &(text + "\n")).and_then(|()| print(table)),
        },
    };
    written.map_err(Error::system("writing the result"))
}

fn print(text: &str) -> io::Result<()> {
    io::stdout().write_all(text.as_bytes())
}

fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    // Readable by all whom the umask allows, as a file that a shell makes.
    let permissions = fs::Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new().permissions(permissions).tempfile_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(())
}
