use std::io::{self, Write};

use zerocopy::IntoBytes;

use crate::format::{CHUNK_RAW_BYTES, ChunkHeader, Header, RECORD_BYTES_MAX, RecordHeader};
use crate::{Limits, Record, SnapshotError};

/// Writes a snapshot, record by record. Without [`Writer::finish`] it has no end and is refused.
pub struct Writer<W> {
    to: W,
    compressor: zstd::bulk::Compressor<'static>,
    /// The records of the chunk that is not full yet.
    raw: Vec<u8>,
    raw_records: u32,
    records: u64,
    crc32: u32,
}

impl<W: Write> Writer<W> {
    /// Starts a snapshot made now, in seconds since 1970, of a region with these limits.
    ///
    /// # Errors
    /// [`SnapshotError::Io`].
    pub fn create(
        mut to: W,
        created_at_s: u64,
        limits: Option<Limits>,
    ) -> Result<Self, SnapshotError> {
        let header = Header::new(created_at_s, limits);
        to.write_all(header.as_bytes())?;
        let compressor = zstd::bulk::Compressor::new(zstd::DEFAULT_COMPRESSION_LEVEL)?;
        let (raw, crc32) = (Vec::new(), header.crc32.get());
        Ok(Self { to, compressor, raw, raw_records: 0, records: 0, crc32 })
    }

    /// Adds a record.
    ///
    /// # Errors
    /// [`SnapshotError::Io`], and [`SnapshotError::TooLarge`] for what no block can hold.
    pub fn push(&mut self, record: &Record<'_>) -> Result<(), SnapshotError> {
        let Record { key, value, expires_at_ms } = record;
        let bytes = size_of::<RecordHeader>() + key.len() + value.len();
        let key_bytes = u16::try_from(key.len()).unwrap_or_default();
        if key_bytes == 0 || bytes > RECORD_BYTES_MAX {
            let (key_bytes, value_bytes) = (key.len(), value.len());
            return Err(SnapshotError::TooLarge { key_bytes, value_bytes });
        }
        let header = RecordHeader {
            key_bytes: key_bytes.into(),
            reserved: [0; 2],
            value_bytes: (value.len() as u32).into(),
        };
        for part in [header.as_bytes(), &expires_at_ms.to_le_bytes(), key, value] {
            self.raw.extend_from_slice(part);
        }
        self.raw_records += 1;
        self.records += 1;
        if self.raw.len() >= CHUNK_RAW_BYTES {
            self.write_chunk()?;
        }
        Ok(())
    }

    /// How many records there are.
    pub fn records(&self) -> u64 {
        self.records
    }

    fn write_chunk(&mut self) -> io::Result<()> {
        if self.raw.is_empty() {
            return Ok(());
        }
        let packed = self.compressor.compress(&self.raw)?;
        self.write(self.raw.len() as u32, self.raw_records, &packed)?;
        self.raw.clear();
        self.raw_records = 0;
        Ok(())
    }

    fn write(&mut self, raw_bytes: u32, records: u32, packed: &[u8]) -> io::Result<()> {
        let mut header = ChunkHeader {
            packed_bytes: (packed.len() as u32).into(),
            raw_bytes: raw_bytes.into(),
            records: records.into(),
            crc32: 0.into(),
        };
        self.crc32 = header.checksum(self.crc32, packed);
        header.crc32 = self.crc32.into();
        self.to.write_all(header.as_bytes())?;
        self.to.write_all(packed)
    }

    /// Writes the end; what the snapshot was written to, for flushing.
    ///
    /// # Errors
    /// [`SnapshotError::Io`].
    pub fn finish(mut self) -> Result<W, SnapshotError> {
        self.write_chunk()?;
        let records = self.records.to_le_bytes();
        self.write(0, 0, &records)?;
        Ok(self.to)
    }
}
