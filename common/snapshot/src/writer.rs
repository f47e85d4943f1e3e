//! Writes snapshot files.

use std::io::Write;

use zerocopy::IntoBytes;
use zstd::Encoder;

use crate::{
    FileHeader, FrameHeader, Limits, MAGIC, PINNED, RECORD_BYTES_MAX, Record, RecordHeader,
    SnapshotError, VERSION, WINDOW_LOG,
};

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
