//! Reads snapshot files.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use zerocopy::{FromZeros, IntoBytes};
use zstd::Decoder;

use crate::{
    CHECKSUM_BYTES, FileHeader, FrameHeader, Limits, MAGIC, PINNED, RECORD_BYTES_MAX, Record,
    RecordHeader, SnapshotError, VERSION, VERSION_MIN, WINDOW_LOG,
};

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
