//! What the headers of rows say while a split goes on.

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
    /// Leaves out all rows and slots except these, for a simulation in which no client accesses
    /// others.
    pub fn with_part(self, rows: Range<usize>, slots: Range<usize>) -> Self {
        Self { rows, slots, ..self }
    }

    /// The byte offsets of a subtable's rows whose headers are to be written: all.
    fn rows_of(&self, subtable: u64) -> impl Iterator<Item = u64> {
        self.rows.clone().map(move |row| subtable + row as u64 * ROW_BYTES)
    }

    /// The rows of a subtable, as one READ brings them.
    pub(super) async fn read_rows(&self, subtable: u64) -> Result<Vec<Row>, ChainError> {
        let bytes = SUBTABLE_BYTES as u32;
        let read = [Verb::Read { remote: subtable, into: Buffer::ReadBlock, bytes }];
        self.endpoint.chain(LANE, self.region, &read, Nanos::MAX).await?;
        let buffer = self.endpoint.buffer(LANE, Buffer::ReadBlock);
        let rows = <[Row]>::ref_from_bytes(&buffer[..SUBTABLE_BYTES as usize]).unwrap_or_default();
        Ok(rows.to_vec())
    }

    /// Whether an earlier call moved everything, and a new subtable, or some of its rows, is not
    /// `filling` any more. A prefix and local depth name one subtable for ever (invariant I17), so
    /// no earlier use of the place left such a header.
    pub(super) async fn is_released(&self, split: &Split) -> Result<bool, ChainError> {
        for (side, subtable) in split.new.into_iter().enumerate() {
            let [place, _] = split.header(side).words();
            let rows = self.read_rows(subtable).await?;
            if rows[self.rows.clone()].iter().any(|row| row.header.words()[0] == place) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Says in the new subtables whose they will be, then in the old one where its keys go: before
    /// the first word moves, so that a client that finds a MOVED word finds the way.
    pub(super) async fn open(&self, split: &Split) -> Result<(), ChainError> {
        self.write_headers(split, [0, 1].map(|side| split.header(side).filling())).await?;
        let [_, forward] = split.header(0).with_forward(split.new).words();
        let verb = |row| Verb::WriteWord { remote: row + FORWARD_OFFSET, value: forward };
        self.all(self.rows_of(split.old).map(|row| Chain::of(&[verb(row)]))).await?;
        // Where a processor executes the verbs, its stores may still be on their way to the others
        // while it reads on; not past a compare-and-swap, here one that changes nothing. So a
        // client that fills a slot after this has read it will see the way (invariant I16).
        self.batch(&[Chain::of(&[Verb::CompareSwap {
            remote: split.new[1] + slot_in_subtable(ROWS_PER_SUBTABLE - 1, SLOTS_PER_ROW - 1),
            expected: 0,
            desired: 0,
        }])])
        .await
        .map(drop)
    }

    /// Takes the old subtable, to which nothing leads any more, out of use. Then an old directory
    /// is found to be old, whatever the place is used for next. In this order: where it says whose
    /// it is, it also says where the keys went.
    ///
    /// # Errors
    /// [`ChainError`] when the endpoint does not reach the region any more.
    pub async fn disown(&self, split: &Split) -> Result<(), ChainError> {
        self.all(self.rows_of(split.old).map(|row| {
            Chain::of(&[
                Verb::WriteWord { remote: row, value: 0 },
                Verb::WriteWord { remote: row + FORWARD_OFFSET, value: 0 },
            ])
        }))
        .await
    }

    /// The forward first: a header never sends readers where those of its subtable did not go.
    pub(super) async fn write_headers(
        &self,
        split: &Split,
        headers: [RowHeader; 2],
    ) -> Result<(), ChainError> {
        for (subtable, header) in split.new.into_iter().zip(headers) {
            let [place, forward] = header.words();
            self.all(self.rows_of(subtable).map(|row| {
                Chain::of(&[
                    Verb::WriteWord { remote: row + FORWARD_OFFSET, value: forward },
                    Verb::WriteWord { remote: row, value: place },
                ])
            }))
            .await?;
        }
        Ok(())
    }
}
