//! Row headers during a split.

use std::ops::Range;

use farside_fabric::{Buffer, ChainError, Fabric, Nanos, Verb};
use farside_layout::{
    FORWARD_OFFSET, ROW_BYTES, ROWS_PER_SUBTABLE, Row, RowHeader, SLOTS_PER_ROW, SUBTABLE_BYTES,
    slot_in_subtable,
};
use zerocopy::FromBytes;

use super::chains::Chain;
use super::{LANE, Split, SubtableSplitter};

impl<F: Fabric> SubtableSplitter<'_, F> {
    /// Restricts splits to these rows and slots, for a simulation in which clients access no
    /// others.
    pub fn with_part(self, rows: Range<usize>, slots: Range<usize>) -> Self {
        Self { rows, slots, ..self }
    }

    /// The byte offsets of the rows whose headers are written: all rows, except in a simulation.
    fn rows_of(&self, subtable: u64) -> impl Iterator<Item = u64> {
        self.rows.clone().map(move |row| subtable + row as u64 * ROW_BYTES)
    }

    /// READs all rows of a subtable.
    pub(super) async fn read_rows(&self, subtable: u64) -> Result<Vec<Row>, ChainError> {
        let bytes = SUBTABLE_BYTES as u32;
        let read = [Verb::Read { remote: subtable, into: Buffer::ReadBlock, bytes }];
        self.endpoint.chain(LANE, self.region, &read, Nanos::MAX).await?;
        let buffer = self.endpoint.buffer(LANE, Buffer::ReadBlock);
        let rows = <[Row]>::ref_from_bytes(&buffer[..SUBTABLE_BYTES as usize]).unwrap_or_default();
        Ok(rows.to_vec())
    }

    /// Whether an earlier call has moved all entries: then a row of a new subtable is not `filling`
    /// any more. No earlier use of the place left such a header, because a prefix and local depth
    /// belong to one subtable forever (invariant I17).
    pub(super) async fn is_released(&self, split: &Split) -> Result<bool, ChainError> {
        for (side, subtable) in split.new.into_iter().enumerate() {
            let [prefix_word, _] = split.header(side).words();
            let rows = self.read_rows(subtable).await?;
            if rows[self.rows.clone()].iter().any(|row| row.header.words()[0] == prefix_word) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Writes the headers of the new subtables, then the forward pointers of the old one. This
    /// comes before the first word moves, so that a client that finds a MOVED word also finds a
    /// forward pointer (invariant I14).
    pub(super) async fn open(&self, split: &Split) -> Result<(), ChainError> {
        self.write_headers(split, [0, 1].map(|side| split.header(side).filling())).await?;
        let [_, forward] = split.header(0).with_forward(split.new).words();
        let verb = |row| Verb::WriteWord { remote: row + FORWARD_OFFSET, value: forward };
        self.execute_all(self.rows_of(split.old).map(|row| Chain::of(&[verb(row)]))).await?;
        // On shared memory a processor may execute later loads before its stores are visible to
        // others. A compare-and-swap, here one that changes nothing, prevents this. So a client
        // that fills a slot after the splitter has read it sees the forward pointer (invariant
        // I16).
        self.execute_batch(&[Chain::of(&[Verb::CompareSwap {
            remote: split.new[1] + slot_in_subtable(ROWS_PER_SUBTABLE - 1, SLOTS_PER_ROW - 1),
            expected: 0,
            desired: 0,
        }])])
        .await
        .map(drop)
    }

    /// Clears the headers of the old subtable, to which the directory does not lead any more. A
    /// client with an old directory copy then notices that it is old. The word with the prefix goes
    /// first: as long as a row belongs to the subtable, it has its forward pointers.
    ///
    /// # Errors
    /// [`ChainError`] if the endpoint cannot reach the region.
    pub async fn disown(&self, split: &Split) -> Result<(), ChainError> {
        self.execute_all(self.rows_of(split.old).map(|row| {
            Chain::of(&[
                Verb::WriteWord { remote: row, value: 0 },
                Verb::WriteWord { remote: row + FORWARD_OFFSET, value: 0 },
            ])
        }))
        .await
    }

    /// Writes the headers of the new subtables, in each row the forward pointers first. So a row
    /// never has a new prefix beside the forward pointers of an earlier use.
    pub(super) async fn write_headers(
        &self,
        split: &Split,
        headers: [RowHeader; 2],
    ) -> Result<(), ChainError> {
        for (subtable, header) in split.new.into_iter().zip(headers) {
            let [prefix_word, forward] = header.words();
            self.execute_all(self.rows_of(subtable).map(|row| {
                Chain::of(&[
                    Verb::WriteWord { remote: row + FORWARD_OFFSET, value: forward },
                    Verb::WriteWord { remote: row, value: prefix_word },
                ])
            }))
            .await?;
        }
        Ok(())
    }
}
