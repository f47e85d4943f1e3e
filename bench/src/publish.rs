//! Writes results: a table to stdout, JSON and a log of HDR histograms to files.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::ValueHint;
use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{
    IntervalLogWriterBuilder, IntervalLogWriterError, Tag,
};
use indicatif::HumanCount;
use rustix::fs::{Access, access};
use serde::Serialize;

use crate::{Error, Result};

/// The files that a result is written to, besides the table on stdout.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Output {
    /// Write the result to this file as JSON, which `kv-bench report` reads; - writes it to stdout
    /// instead of the table
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
    /// Write all latencies to this file, in nanoseconds, as an interval log for HdrHistogram's
    /// tools, with a tag for each kind of operation
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub hdr: Option<PathBuf>,
}

impl Output {
    /// Checks that the files can be written. Call it before anything is measured.
    ///
    /// # Errors
    /// [`Error::Usage`] or [`Error::Output`], with the first file that cannot be written.
    pub fn check(&self) -> Result<()> {
        let json = self.json.as_ref().filter(|path| !is_stdout(path));
        for path in [json, self.hdr.as_ref()].into_iter().flatten() {
            check_file(path)?;
        }
        match json.zip(self.hdr.as_ref()) {
            Some((json, hdr)) if is_same_file(json, hdr) => {
                let path = hdr.display();
                Err(Error::Usage(format!("two results cannot be written to {path}")))
            }
            _ => Ok(()),
        }
    }

    /// Writes the files, and then the table to stdout. With `-` for the JSON, the JSON replaces the
    /// table on stdout. A file is written whole, or stays as it was. An output that cannot be
    /// written does not prevent the other outputs.
    pub fn publish(&self, json: &impl Serialize, table: &str, log: &IntervalLog<'_>) -> Result<()> {
        let hdr = self.hdr.as_ref().map_or(Ok(()), |path| {
            let log = log.encode().map_err(Error::output(path))?;
            write_whole(path, &log)
        });
        result(json, table, self.json.as_deref()).and(hdr)
    }
}

/// Checks that a file can be written; `-` is stdout.
pub fn check_file_or_stdout(path: Option<&Path>) -> Result<()> {
    path.filter(|path| !is_stdout(path)).map_or(Ok(()), check_file)
}

/// Checks that a file that is not the JSON can be written; `-` is a mistake.
pub fn check_file(path: &Path) -> Result<()> {
    if is_stdout(path) {
        let advice = "- is stdout for --json only; a file of that name is ./-";
        return Err(Error::Usage(advice.to_owned()));
    }
    let folder = folder_of(path);
    if !folder.is_dir() {
        let (path, folder) = (path.display(), folder.display());
        return Err(Error::Usage(format!("cannot write {path}: {folder} is no folder")));
    }
    if path.is_dir() {
        return Err(Error::output(path)(io::ErrorKind::IsADirectory.into()));
    }
    // write_whole replaces a file in its folder, and writes to a device itself.
    let (written, how) = if is_no_file(path) {
        (path, Access::WRITE_OK)
    } else {
        (folder, Access::WRITE_OK | Access::EXEC_OK)
    };
    access(written, how).map_err(|error| Error::output(path)(error.into()))
}

/// Whether writing one replaces the other. Several results can be written to a device, like
/// `/dev/null`.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    let entry = |path: &Path| Some(folder_of(path).canonicalize().ok()?.join(path.file_name()?));
    !is_no_file(one) && entry(one).is_some_and(|one| Some(one) == entry(other))
}

fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Writes the JSON to a file, and then the table to stdout, also if the file cannot be written.
/// With `-` for the file, the JSON replaces the table on stdout. The file is written whole, or
/// stays as it was.
pub fn result(json: &impl Serialize, table: &str, path: Option<&Path>) -> Result<()> {
    let json = serde_json::to_string(json).map_err(io::Error::from);
    let json = json.map_err(Error::system("writing the result"))? + "\n";
    let print = |text| print(text).map_err(Error::system("writing the result"));
    let Some(path) = path else { return print(table) };
    if is_stdout(path) {
        return print(&json);
    }
    let written = write_whole(path, json.as_bytes());
    let printed = print(table);
    written.and(printed)
}

/// Formats 1234567 as 1,234,567.
pub fn grouped(number: u64) -> String {
    HumanCount(number).to_string()
}

/// The log gives an interval's maximum in milliseconds, as HdrHistogram's writer for Java does.
const NS_PER_MAXIMUM: f64 = 1e6;

/// All latencies of a run, as a log with one interval for each kind: the whole measurement.
pub struct IntervalLog<'a> {
    /// The latencies of each kind of operation, with its name.
    pub latencies: &'a [(&'a str, Histogram<u64>)],
    /// How long the measurement took.
    pub seconds: f64,
    /// The end of the measurement.
    pub ended: SystemTime,
}

impl IntervalLog<'_> {
    fn encode(&self) -> io::Result<Vec<u8>> {
        let (mut bytes, mut serializer) = (Vec::new(), V2DeflateSerializer::new());
        let duration = Duration::from_secs_f64(self.seconds);
        let mut builder = IntervalLogWriterBuilder::new();
        builder
            .add_comment("[Histogram log format version 1.3]")
            .add_comment("[latencies in nanoseconds, by kv-bench]")
            .with_base_time(self.ended - duration)
            .with_max_value_divisor(NS_PER_MAXIMUM);
        let mut writer = builder.begin_log_with(&mut bytes, &mut serializer)?;
        for (name, latencies) in self.latencies {
            let tag = Tag::new(name);
            let written = writer.write_histogram(latencies, Duration::ZERO, duration, tag);
            written.map_err(|error| match error {
                IntervalLogWriterError::IoError(error) => error,
                IntervalLogWriterError::SerializeError(error) => io::Error::other(error),
            })?;
        }
        Ok(bytes)
    }
}

fn print(text: &str) -> io::Result<()> {
    io::stdout().write_all(text.as_bytes())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Whether something exists at this path that is no regular file, like a pipe.
fn is_no_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.is_file())
}

/// Writes a text to a file, as [`write_whole`]; `-` is stdout.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<()> {
    match is_stdout(path) {
        true => print(text).map_err(Error::system("writing the result")),
        false => write_whole(path, text.as_bytes()),
    }
}

/// Writes a file whole, or leaves it as it was. A pipe or device is written to directly.
pub fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    let write = || {
        if is_no_file(path) {
            return fs::File::options().write(true).open(path)?.write_all(content);
        }
        // The umask sets the permissions, as for a file that a shell makes.
        let permissions = fs::Permissions::from_mode(0o666);
        let mut builder = tempfile::Builder::new();
        let mut file = builder.permissions(permissions).tempfile_in(folder_of(path))?;
        file.write_all(content)?;
        file.persist(path)?;
        Ok(())
    };
    write().map_err(Error::output(path))
}

#[cfg(test)]
mod tests {
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    use super::*;
    use crate::recorder::latency_histogram;

    #[test]
    fn the_log_has_every_latency() {
        let mut gets = latency_histogram();
        (0..1000).for_each(|n| gets.record(300 + n).unwrap());
        let mut puts = latency_histogram();
        puts.record(7_000_000).unwrap();
        let ended = SystemTime::UNIX_EPOCH + Duration::from_secs(9);
        let latencies = &[("get", gets.clone()), ("put", puts.clone())];
        let log = IntervalLog { latencies, seconds: 2.0, ended }.encode().unwrap();
        let found: Vec<(String, Histogram<u64>)> = IntervalLogIterator::new(&log)
            .filter_map(|entry| match entry.unwrap() {
                LogEntry::Interval(interval) => {
                    assert_eq!(interval.duration(), Duration::from_secs(2));
                    let encoded = interval.encoded_histogram().as_bytes();
                    let bytes = data_encoding::BASE64.decode(encoded).unwrap();
                    let histogram = Deserializer::new().deserialize(&mut &bytes[..]).unwrap();
                    Some((interval.tag().unwrap().as_str().to_owned(), histogram))
                }
                LogEntry::BaseTime(started) => {
                    assert_eq!(started, Duration::from_secs(7));
                    None
                }
                _ => None,
            })
            .collect();
        let expected = [("get".to_owned(), gets), ("put".to_owned(), puts)];
        assert!(found == expected, "{}", String::from_utf8_lossy(&log));
    }

    #[test]
    fn devices_are_written_to_and_never_replaced() {
        write_whole(Path::new("/dev/null"), b"text").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        let error = write_whole(Path::new("/dev/full"), b"text").unwrap_err();
        assert!(error.to_string().starts_with("cannot write /dev/full: "), "{error}");
    }

    #[test]
    fn an_output_that_cannot_be_written_is_reported_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let is_folder = format!("cannot write {folder}: is a directory");
        for (json, hdr, error) in [
            ("-", "./-", None),
            ("src/x", "x", None),
            ("/dev/null", "/dev/null", None),
            ("-", "/nowhere/x.hdr", Some("cannot write /nowhere/x.hdr: /nowhere is no folder")),
            ("-", folder, Some(&is_folder)),
            // Not even root can create files in this folder.
            ("/proc/self/x.json", "x", Some("cannot write /proc/self/x.json: ")),
            ("-", "-", Some("- is stdout for --json only")),
            ("src/x", "./src/../src/x", Some("two results cannot be written to ./src/../src/x")),
        ] {
            let [json, hdr] = [json, hdr].map(|path| Some(path.into()));
            let checked = Output { json, hdr }.check().map_err(|error| error.to_string());
            match error {
                Some(error) => {
                    assert!(checked.as_ref().unwrap_err().starts_with(error), "{checked:?}")
                }
                None => assert_eq!(checked, Ok(())),
            }
        }
    }

    #[test]
    fn one_output_that_fails_does_not_stop_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let hdr = folder.path().join("x.hdr");
        let output = Output { json: Some("/dev/full".into()), hdr: Some(hdr.clone()) };
        let gets = latency_histogram();
        let (latencies, seconds, ended) = (&[("get", gets)][..], 1.0, SystemTime::now());
        let log = IntervalLog { latencies, seconds, ended };
        let error = output.publish(&(), "", &log).unwrap_err().to_string();
        assert!(error.starts_with("cannot write /dev/full: "), "{error}");
        assert!(fs::read_to_string(hdr).unwrap().contains("Tag=get,"));
    }
}
