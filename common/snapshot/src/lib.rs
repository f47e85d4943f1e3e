//! Snapshot files: keys, values and their times of expiry, compressed and checksummed.
//!
//! `kv-cli snapshot` writes them, `kv-cli restore` and `kv-server --restore` read them. They are
//! independent of the size and the format of the region that they came from.
//!
//! # The bytes
//! All integers are little-endian.
//! ```text
//! file          magic "farsnap\0", version u32, one zstd frame with a checksum of its content
//! frame         frame header, records
//! frame header  time of the snapshot u64 in seconds since 1970, the region's limits:
//!               key_bytes_max u32 and value_bytes_max u32, both 0 if unknown
//! record        key_bytes u16, flags u8, 1 reserved byte, value_bytes u32, expires_at_ms u64 in
//!               milliseconds since 1970 or 0 for never, key, value
//! flags         1 if the value is pinned
//! ```
//! The first programs with format 3 know no flags, and refuse a record that has one.
//!
//! zstd's checksum covers every byte of the content. It is at the end of the file, so a reader must
//! not trust any record before it has read the last one.
#![deny(unsafe_code)]

#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, little_endian as le};
use zstd::{Decoder, Encoder};

const MAGIC: [u8; 8] = *b"farsnap\0";
const VERSION: u32 = 4;
/// The oldest version that this program reads. It differs in the length of the longest record only.
const VERSION_MIN: u32 = 3;
/// The length of zstd's checksum, at the end of the file.
const CHECKSUM_BYTES: usize = 4;
/// Limit on the length of a key and its value together, in bytes. A region holds no longer ones.
const RECORD_BYTES_MAX: usize = 257 << 20;
/// The base 2 logarithm of zstd's window, in bytes. A reader allocates the window, and refuses a
/// file with a larger one.
const WINDOW_LOG: u32 = 21;
/// The flag of a record whose value is pinned.
const PINNED: u8 = 1;

/// The start of the file; the frame follows.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FileHeader {
    magic: [u8; 8],
    version: le::U32,
}
const _: () = assert!(size_of::<FileHeader>() == 12);

/// The start of the frame; records follow.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FrameHeader {
    created_at_s: le::U64,
    key_bytes_max: le::U32,
    value_bytes_max: le::U32,
}
const _: () = assert!(size_of::<FrameHeader>() == 16);

/// The start of a record; key and value follow.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RecordHeader {
    key_bytes: le::U16,
    flags: u8,
    reserved: u8,
    value_bytes: le::U32,
    expires_at_ms: le::U64,
}
const _: () = assert!(size_of::<RecordHeader>() == 16);

/// The limits of the region from which a snapshot was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The longest key, in bytes.
    pub key_bytes_max: u32,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
}

/// A key with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The key, 1 to 65535 bytes.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// When the value expires, in milliseconds since 1970; 0 for never.
    pub expires_at_ms: u64,
    /// Whether the value is pinned: a server never evicts it.
    pub is_pinned: bool,
}

impl Record<'_> {
    /// Returns when the value expires; `None` for never.
    pub fn expires_at(&self) -> Option<SystemTime> {
        let after_epoch = Duration::from_millis(self.expires_at_ms);
        (self.expires_at_ms > 0).then(|| UNIX_EPOCH + after_epoch)
    }
}

/// Why a snapshot cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file cannot be opened.
    #[error("the file cannot be opened: {0}")]
    Open(#[source] io::Error),
    /// It is a folder, a pipe or a device.
    #[error("it is no regular file: name a file that `kv-cli snapshot` wrote")]
    NotAFile,
    /// The file does not start like a snapshot.
    #[error("it is no snapshot: make one with `kv-cli snapshot FILE`")]
    NotASnapshot,
    /// The file was made by a version of Farside with another format.
    #[error(
        "it has snapshot format {found}, and this program reads formats {known_min} to {known}: \
         restore it with the version that made it"
    )]
    Version {
        /// The number of the file's format.
        found: u32,
        /// The oldest format that this program reads.
        known_min: u32,
        /// The latest one.
        known: u32,
    },
    /// The file is incomplete.
    #[error("it is truncated after {records} records: take the snapshot again, or another copy")]
    Truncated {
        /// How many records are complete.
        records: u64,
    },
    /// The file's bytes are not those that were written.
    #[error("it is corrupted ({what}, after {records} records): take another copy of it")]
    Corrupt {
        /// The part that is invalid, or the decoder's error.
        what: String,
        /// How many records were read before it.
        records: u64,
    },
    /// The key is empty or too long, or the record is too long for a snapshot.
    #[error("a key of {key_bytes} and a value of {value_bytes} bytes do not fit into a snapshot")]
    TooLarge {
        /// The key's length, in bytes.
        key_bytes: usize,
        /// The value's length, in bytes.
        value_bytes: usize,
    },
}

/// Reads a snapshot, record by record. The input may be any bytes: they cannot make the reader use
/// more memory than zstd's window and the largest record.
pub struct Reader<R: BufRead> {
    input: BufReader<Decoder<'static, R>>,
    frame_header: FrameHeader,
    /// The key and value of the record that was read last.
    content: Vec<u8>,
    records: u64,
}

impl Reader<BufReader<File>> {
    /// Opens a snapshot file. Refuses a pipe, because opening it could block without end.
    ///
    /// # Errors
    /// [`SnapshotError::Open`], [`SnapshotError::NotAFile`], and those of [`Reader::open`].
    pub fn open_file(path: &Path) -> Result<Self, SnapshotError> {
        if !fs::metadata(path).map_err(SnapshotError::Open)?.is_file() {
            return Err(SnapshotError::NotAFile);
        }
        Self::open(BufReader::new(File::open(path).map_err(SnapshotError::Open)?))
    }
}

/// Returns the checksum at the end of a file, which a [`Reader`] compares with the content. So it
/// identifies a snapshot that was read completely. It proves nothing about one that was not.
///
/// # Errors
/// [`SnapshotError::Open`] if the file cannot be read, or is shorter than a checksum.
pub fn stored_checksum(path: &Path) -> Result<u32, SnapshotError> {
    let mut checksum = [0; CHECKSUM_BYTES];
    let read = File::open(path).and_then(|file| {
        let end = file.metadata()?.len();
        file.read_exact_at(&mut checksum, end.saturating_sub(CHECKSUM_BYTES as u64))
    });
    read.map_err(SnapshotError::Open)?;
    Ok(u32::from_le_bytes(checksum))
}

impl<R: BufRead> Reader<R> {
    /// Reads the headers of the file and of the frame.
    ///
    /// # Errors
    /// [`SnapshotError`] if this is not the start of a snapshot.
    pub fn open(mut file: R) -> Result<Self, SnapshotError> {
        let mut header = FileHeader::new_zeroed();
        match file.read_exact(header.as_mut_bytes()) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(SnapshotError::NotASnapshot);
            }
            Err(error) => return Err(error.into()),
        }
        if header.magic != MAGIC {
            return Err(SnapshotError::NotASnapshot);
        }
        let found = header.version.get();
        let (known_min, known) = (VERSION_MIN, VERSION);
        if !(known_min..=known).contains(&found) {
            return Err(SnapshotError::Version { found, known_min, known });
        }
        let mut decoder = Decoder::with_buffer(file)?.single_frame();
        decoder.window_log_max(WINDOW_LOG)?;
        let (input, frame_header) = (BufReader::new(decoder), FrameHeader::new_zeroed());
        let mut reader = Self { input, frame_header, content: Vec::new(), records: 0 };
        let read = reader.input.read_exact(reader.frame_header.as_mut_bytes());
        read.map_err(|error| reader.convert(error))?;
        Ok(reader)
    }

    /// Returns when the snapshot was started, in seconds since 1970.
    pub fn created_at_s(&self) -> u64 {
        self.frame_header.created_at_s.get()
    }

    /// Returns the limits of the snapshot's region; `None` if the file does not have them.
    pub fn limits(&self) -> Option<Limits> {
        let (key_bytes_max, value_bytes_max) =
            (self.frame_header.key_bytes_max.get(), self.frame_header.value_bytes_max.get());
        (key_bytes_max > 0).then_some(Limits { key_bytes_max, value_bytes_max })
    }

    /// Returns how many records were read.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Reads the next record. Returns `None` after the last one; then the file is complete and
    /// valid.
    ///
    /// # Errors
    /// [`SnapshotError`]. After an error no further record can be read.
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, SnapshotError> {
        match self.input.fill_buf() {
            Ok([]) => return self.check_end().map(|()| None),
            Ok(_) => {}
            Err(error) => return Err(self.convert(error)),
        }
        let mut header = RecordHeader::new_zeroed();
        let read = self.input.read_exact(header.as_mut_bytes());
        read.map_err(|error| self.convert(error))?;
        let key_bytes = usize::from(header.key_bytes.get());
        let bytes = key_bytes + header.value_bytes.get() as usize;
        let is_unknown = header.flags & !PINNED != 0 || header.reserved != 0;
        if key_bytes == 0 || is_unknown || bytes > RECORD_BYTES_MAX {
            return Err(self.corrupt("record"));
        }
        self.content.clear();
        // The buffer grows only as far as the file has bytes.
        let read = self.input.by_ref().take(bytes as u64).read_to_end(&mut self.content);
        match read {
            Ok(read) if read < bytes => {
                return Err(SnapshotError::Truncated { records: self.records });
            }
            Ok(_) => {}
            Err(error) => return Err(self.convert(error)),
        }
        self.records += 1;
        let (key, value) = self.content.split_at(key_bytes);
        let is_pinned = header.flags & PINNED != 0;
        Ok(Some(Record { key, value, expires_at_ms: header.expires_at_ms.get(), is_pinned }))
    }

    /// Checks that nothing follows the frame.
    fn check_end(&mut self) -> Result<(), SnapshotError> {
        match self.input.get_mut().get_mut().fill_buf()? {
            [] => Ok(()),
            _ => Err(self.corrupt("bytes after the end")),
        }
    }

    fn corrupt(&self, what: impl Into<String>) -> SnapshotError {
        SnapshotError::Corrupt { what: what.into(), records: self.records }
    }

    /// Converts an error of the decoder. Its own errors, unlike the system's, mean a corrupt file.
    fn convert(&self, error: io::Error) -> SnapshotError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => SnapshotError::Truncated { records: self.records },
            io::ErrorKind::Other if error.raw_os_error().is_none() => {
                self.corrupt(error.to_string())
            }
            _ => error.into(),
        }
    }
}

/// Writes a snapshot, record by record. Without [`Writer::finish`] the file has no end, and readers
/// refuse it.
pub struct Writer<W: Write> {
    to: Encoder<'static, W>,
}

impl<W: Write> Writer<W> {
    /// Starts a snapshot of a region with these limits. The time is in seconds since 1970.
    ///
    /// # Errors
    /// [`SnapshotError::Io`].
    pub fn create(
        mut to: W,
        created_at_s: u64,
        limits: Option<Limits>,
    ) -> Result<Self, SnapshotError> {
        to.write_all(FileHeader { magic: MAGIC, version: VERSION.into() }.as_bytes())?;
        let mut to = Encoder::new(to, zstd::DEFAULT_COMPRESSION_LEVEL)?;
        to.include_checksum(true)?;
        to.window_log(WINDOW_LOG)?;
        let Limits { key_bytes_max, value_bytes_max } = limits.unwrap_or_default();
        let frame_header = FrameHeader {
            created_at_s: created_at_s.into(),
            key_bytes_max: key_bytes_max.into(),
            value_bytes_max: value_bytes_max.into(),
        };
        to.write_all(frame_header.as_bytes())?;
        Ok(Self { to })
    }

    /// Adds a record.
    ///
    /// # Errors
    /// [`SnapshotError::Io`], and [`SnapshotError::TooLarge`] if no snapshot can hold the record.
    pub fn push(&mut self, record: &Record<'_>) -> Result<(), SnapshotError> {
        let Record { key, value, expires_at_ms, is_pinned } = record;
        let key_bytes = u16::try_from(key.len()).unwrap_or_default();
        if key_bytes == 0 || key.len() + value.len() > RECORD_BYTES_MAX {
            let (key_bytes, value_bytes) = (key.len(), value.len());
            return Err(SnapshotError::TooLarge { key_bytes, value_bytes });
        }
        let header = RecordHeader {
            key_bytes: key_bytes.into(),
            flags: if *is_pinned { PINNED } else { 0 },
            reserved: 0,
            value_bytes: (value.len() as u32).into(),
            expires_at_ms: (*expires_at_ms).into(),
        };
        for part in [header.as_bytes(), key, value] {
            self.to.write_all(part)?;
        }
        Ok(())
    }

    /// Writes the end. Returns the inner writer, which the caller must flush.
    ///
    /// # Errors
    /// [`SnapshotError::Io`].
    pub fn finish(self) -> Result<W, SnapshotError> {
        Ok(self.to.finish()?)
    }

    #[cfg(test)]
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        self.to.write_all(bytes).unwrap();
    }
}
