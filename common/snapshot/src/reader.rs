use std::io::{self, Read};

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::format::{
    ChunkHeader, EndFormat, Header, MAGIC, PACKED_BYTES_MAX, RAW_BYTES_MAX, RecordHeader, VERSION,
};
use crate::{Limits, Record, SnapshotError};

/// Reads a snapshot, record by record. Any bytes are a snapshot or an error, and never take more
/// memory than the largest chunk.
pub struct Reader<R> {
    from: R,
    decompressor: zstd::bulk::Decompressor<'static>,
    created_at_s: u64,
    limits: Option<Limits>,
    end_format: EndFormat,
    packed: Vec<u8>,
    /// The chunk that was read last, how much of it was taken, and how many records are left in it.
    raw: Vec<u8>,
    at: usize,
    left: u32,
    records: u64,
    crc32: u32,
    is_over: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`SnapshotError`] if it is none.
    pub fn open(mut from: R) -> Result<Self, SnapshotError> {
        let mut header = Header::new_zeroed();
        match from.read_exact(header.as_mut_bytes()) {
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
        let Some(end_format) = EndFormat::of_version(found) else {
            return Err(SnapshotError::Version { found, known: VERSION });
        };
        if header.checksum() != header.crc32.get() {
            return Err(SnapshotError::Corrupt { what: "header", records: 0 });
        }
        let limits = Limits {
            key_bytes_max: header.key_bytes_max.get(),
            value_bytes_max: header.value_bytes_max.get(),
        };
        Ok(Self {
            from,
            decompressor: zstd::bulk::Decompressor::new()?,
            created_at_s: header.created_at_s.get(),
            limits: (limits.key_bytes_max > 0).then_some(limits),
            end_format,
            packed: Vec::new(),
            raw: Vec::new(),
            at: 0,
            left: 0,
            records: 0,
            crc32: header.crc32.get(),
            is_over: false,
        })
    }

    /// When it was made, in seconds since 1970.
    pub fn created_at_s(&self) -> u64 {
        self.created_at_s
    }

    /// The limits of the region that it was taken of; `None` if the file does not say.
    pub fn limits(&self) -> Option<Limits> {
        self.limits
    }

    /// How many records were taken.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// The next record; `None` after the last, and then the file is known to be whole.
    ///
    /// # Errors
    /// [`SnapshotError`]. After one there is nothing more to be had.
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, SnapshotError> {
        while self.left == 0 {
            if self.is_over || !self.read_chunk()? {
                self.is_over = true;
                return Ok(None);
            }
        }
        self.left -= 1;
        let start = self.at;
        let bytes = self.record_bytes().ok_or(self.corrupt("record"))?;
        self.at += bytes;
        if self.left == 0 && self.at != self.raw.len() {
            return Err(self.corrupt("chunk"));
        }
        self.records += 1;
        // What `record_bytes` found there.
        let record = &self.raw[start..self.at];
        let Ok((header, content)) = RecordHeader::ref_from_prefix(record) else { return Ok(None) };
        let (end, content) = content.split_at(self.end_format.bytes);
        let (key, value) = content.split_at(usize::from(header.key_bytes.get()));
        Ok(Some(Record { key, value, expires_at_ms: self.end_format.decode_ms(end) }))
    }

    fn corrupt(&self, what: &'static str) -> SnapshotError {
        SnapshotError::Corrupt { what, records: self.records }
    }

    /// How long the next record in the chunk is; `None` if there is none.
    fn record_bytes(&self) -> Option<usize> {
        let (header, content) = RecordHeader::ref_from_prefix(&self.raw[self.at..]).ok()?;
        let key_bytes = usize::from(header.key_bytes.get());
        let bytes = self.end_format.bytes + key_bytes + header.value_bytes.get() as usize;
        let is_one = key_bytes > 0 && header.reserved == [0; 2] && bytes <= content.len();
        is_one.then_some(size_of::<RecordHeader>() + bytes)
    }

    /// Reads a chunk into `raw`; false if it is the end.
    fn read_chunk(&mut self) -> Result<bool, SnapshotError> {
        let mut header = ChunkHeader::new_zeroed();
        self.read_exact(|from| from.read_exact(header.as_mut_bytes()))?;
        let (packed_bytes, raw_bytes) = (header.packed_bytes.get(), header.raw_bytes.get());
        if packed_bytes as usize > PACKED_BYTES_MAX || raw_bytes as usize > RAW_BYTES_MAX {
            return Err(self.corrupt("length of a chunk"));
        }
        let mut packed = std::mem::take(&mut self.packed);
        packed.resize(packed_bytes as usize, 0);
        let read = self.read_exact(|from| from.read_exact(&mut packed));
        self.packed = packed;
        read?;
        self.crc32 = header.checksum(self.crc32, &self.packed);
        if self.crc32 != header.crc32.get() {
            return Err(self.corrupt("checksum"));
        }
        (self.at, self.left) = (0, header.records.get());
        if raw_bytes == 0 {
            return self.read_end(&header).map(|()| false);
        }
        self.raw.resize(raw_bytes as usize, 0);
        let unpacked = self.decompressor.decompress_to_buffer(&self.packed, &mut self.raw[..]);
        match unpacked {
            Ok(bytes) if bytes == raw_bytes as usize && self.left > 0 => Ok(true),
            _ => Err(self.corrupt("compressed data")),
        }
    }

    fn read_end(&mut self, header: &ChunkHeader) -> Result<(), SnapshotError> {
        let counted = self.packed == self.records.to_le_bytes();
        if !counted || header.records.get() != 0 {
            return Err(self.corrupt("number of records"));
        }
        match self.from.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(self.corrupt("something behind the end")),
            Err(error) => Err(error.into()),
        }
    }

    fn read_exact(
        &mut self,
        read: impl FnOnce(&mut R) -> io::Result<()>,
    ) -> Result<(), SnapshotError> {
        let records = self.records;
        read(&mut self.from).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => SnapshotError::Truncated { records },
            _ => error.into(),
        })
    }
}
