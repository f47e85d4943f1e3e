//! The walk through chunk table and directory, down to the headers of rows.

use std::collections::HashSet;

use zerocopy::FromBytes;

use farside_fabric::{Buffer, Fabric};
use farside_layout::{
    CHUNK_BYTES, ChunkEntry, ChunkUse, DirectoryEntry, LayoutError, ROW_BYTES, ROWS_PER_SUBTABLE,
    Row, RowHeader, SUBTABLE_BYTES, SlotState, slot_in_subtable,
};

use super::slots::Subtable;
use super::{CheckError, LOOKS_MAX, Observer, Problem, Walk, links};

/// What one look at a directory entry found.
#[derive(PartialEq, Eq)]
struct Look {
    /// How many entries it stands for.
    entries: u64,
    /// Where it leads; `None` when that cannot be said.
    subtable: Option<Subtable>,
    problems: Vec<Problem>,
}

impl<F: Fabric> Walk<'_, F> {
    /// That every chunk's entry says something and goes with the one before it.
    pub(super) async fn check_chunks(&mut self) -> Result<(), CheckError> {
        let Some(table) = self.geometry.chunk_entry(0) else { return Ok(()) };
        self.reads.words(table, &mut self.chunks).await?;
        for chunk in 0..self.geometry.chunks() {
            if let Some(problem) = self.settled_chunk_problem(chunk).await? {
                self.report.add_problem(problem);
            }
        }
        Ok(())
    }

    async fn settled_chunk_problem(&mut self, chunk: u32) -> Result<Option<Problem>, CheckError> {
        let mut problem = self.chunk_problem(chunk);
        for _ in 0..LOOKS_MAX {
            if problem.is_none() {
                return Ok(None);
            }
            self.pause().await;
            self.reload_chunk(chunk.checked_sub(1)).await?;
            self.reload_chunk(Some(chunk)).await?;
            let again = self.chunk_problem(chunk);
            if again == problem {
                return Ok(problem);
            }
            problem = again;
        }
        self.report.unsettled += 1;
        Ok(None)
    }

    fn chunk_problem(&self, chunk: u32) -> Option<Problem> {
        let offset = self.geometry.chunk_entry(chunk)?;
        let says = match self.chunk_use(chunk) {
            Ok(says) => says,
            Err(error) => return Some(Problem::ChunkEntry { offset, error }),
        };
        let is_second = |before| self.chunk_use(before).is_ok_and(spans_two);
        let after_large = chunk.checked_sub(1).is_some_and(is_second);
        let fits = match says {
            ChunkUse::Continued => after_large,
            // The last chunk has no room for the second half.
            _ => !(after_large || spans_two(says) && chunk + 1 == self.geometry.chunks()),
        };
        (!fits).then_some(Problem::ChunkSpan { offset, says })
    }

    /// What a chunk is used for, as last read.
    pub(super) fn chunk_use(&self, chunk: u32) -> Result<ChunkUse, LayoutError> {
        ChunkEntry::from_bits(self.chunks[chunk as usize]).chunk_use()
    }

    /// Reads a chunk's entry again; whether it changed.
    pub(super) async fn reload_chunk(&mut self, chunk: Option<u32>) -> Result<bool, CheckError> {
        let Some(chunk) = chunk else { return Ok(false) };
        let Some(offset) = self.geometry.chunk_entry(chunk) else { return Ok(false) };
        let bits = self.reads.word(offset).await?;
        let before = std::mem::replace(&mut self.chunks[chunk as usize], bits);
        Ok(before != bits)
    }

    /// Walks the directory and everything it leads to.
    pub(super) async fn check_directory(
        &mut self,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        let total = self.directory.len() as u64;
        self.reads.words(self.entry_offset(0), &mut self.directory).await?;
        let mut index = 0;
        while index < total {
            observer.progress(index, total);
            let look = self.settled_look(index).await?;
            for problem in look.problems {
                self.report.add_problem(problem);
            }
            if let Some(subtable) = look.subtable {
                self.visit_once(subtable, observer).await?;
            }
            index += look.entries;
        }
        observer.progress(total, total);
        Ok(())
    }

    /// That no word leads to a block in a place that neither the directory nor a split leads to.
    pub(super) async fn check_free_places(&mut self) -> Result<(), CheckError> {
        let used: HashSet<u64> = self.subtables.iter().map(|used| used.offset).collect();
        for chunk in 0..self.geometry.chunks() {
            let Some(start) = self.geometry.chunk_offset(chunk) else { break };
            if self.chunk_use(chunk) != Ok(ChunkUse::Subtables) {
                continue;
            }
            let places = (start..start + CHUNK_BYTES).step_by(SUBTABLE_BYTES as usize);
            for place in places.filter(|place| !used.contains(place)) {
                self.reads.read(place, Buffer::NewBlock, SUBTABLE_BYTES).await?;
                for row in 0..ROWS_PER_SUBTABLE {
                    for (n, slot) in self.row(row)?.slots.iter().enumerate() {
                        if links(slot.word().state()) || slot.word().state() == SlotState::Copy {
                            let offset = place + slot_in_subtable(row, n);
                            self.report.add_problem(Problem::FreePlace { offset });
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// A place may have been seen as another subtable before: a split made it free, and another one
    /// used it since.
    async fn visit_once(
        &mut self,
        subtable: Subtable,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        if self.subtables.insert(subtable) {
            self.keys.clear();
            self.visit_subtable(subtable, observer).await?;
            self.visit_new_ones(subtable, observer).await?;
        }
        Ok(())
    }

    /// Visits the subtables to which a split takes the keys of the one that was visited last, and
    /// so on, should those be split already.
    async fn visit_new_ones(
        &mut self,
        old: Subtable,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        let mut left = self.new_ones(old)?;
        while let Some((old, new)) = left.pop() {
            let (mut problems, mut is_current) = (Vec::new(), true);
            for look in 0..LOOKS_MAX {
                self.reads.read(new.offset, Buffer::NewBlock, SUBTABLE_BYTES).await?;
                problems = self.row_problems(new, true)?;
                // A split that has ended meanwhile leaves nothing to find here.
                is_current = problems.is_empty() || self.still_leads(old, new).await?;
                if problems.is_empty() || !is_current {
                    break;
                }
                if look + 1 < LOOKS_MAX {
                    self.pause().await;
                }
            }
            if !is_current {
                self.report.unsettled += 1;
                continue;
            }
            problems.into_iter().for_each(|problem| self.report.add_problem(problem));
            if self.subtables.insert(new) {
                self.visit_subtable(new, observer).await?;
                left.extend(self.new_ones(new)?);
            }
        }
        Ok(())
    }

    /// Where the subtable that was read last sends its keys.
    fn new_ones(&self, old: Subtable) -> Result<Vec<(Subtable, Subtable)>, LayoutError> {
        let Some(forward) = self.forward()? else { return Ok(Vec::new()) };
        let new = |side: usize| Subtable {
            offset: forward[side],
            prefix: old.prefix << 1 | side as u32,
            local_depth: old.local_depth + 1,
        };
        let leads = |new: &Subtable| self.is_subtable(new.offset);
        Ok([new(0), new(1)].into_iter().filter(leads).map(|new| (old, new)).collect())
    }

    /// Whether a row of the old subtable still sends its keys to the new one.
    async fn still_leads(&self, old: Subtable, new: Subtable) -> Result<bool, CheckError> {
        let bytes = size_of::<RowHeader>() as u64;
        self.reads.read(old.offset, Buffer::Window, bytes).await?;
        let header: [u8; size_of::<RowHeader>()] = self.reads.bytes(Buffer::Window)?;
        let header: RowHeader = zerocopy::transmute!(header);
        Ok((header.prefix.get(), header.local_depth) == (old.prefix, old.local_depth)
            && header.forward().is_some_and(|forward| forward.contains(&new.offset)))
    }

    /// Where a split sends the keys of the subtable that was read last, by any of its rows: it says
    /// so in one after the other.
    fn forward(&self) -> Result<Option<[u64; 2]>, LayoutError> {
        for row in 0..ROWS_PER_SUBTABLE {
            if let Some(forward) = self.row(row)?.header.forward() {
                return Ok(Some(forward));
            }
        }
        Ok(None)
    }

    fn entry_offset(&self, index: u64) -> u64 {
        let directory = self.geometry.directory_offset(self.depth).unwrap_or(0);
        directory + index * size_of::<DirectoryEntry>() as u64
    }

    async fn settled_look(&mut self, index: u64) -> Result<Look, CheckError> {
        let mut look = self.look(index).await?;
        for _ in 0..LOOKS_MAX {
            if look.problems.is_empty() {
                return Ok(look);
            }
            self.pause().await;
            self.reload_group(index).await?;
            let again = self.look(index).await?;
            if again == look {
                return Ok(look);
            }
            look = again;
        }
        self.report.unsettled += 1;
        look.problems.clear();
        Ok(look)
    }

    /// Reads an entry again, all that share its subtable, and what the subtable's chunk is for.
    async fn reload_group(&mut self, index: u64) -> Result<(), CheckError> {
        let bits = self.reads.word(self.entry_offset(index)).await?;
        let entry = DirectoryEntry::from_bits(bits);
        let first = index as usize;
        let end = first + (1 << self.depth.saturating_sub(entry.local_depth()));
        let remote = self.entry_offset(index);
        let end = end.min(self.directory.len());
        self.reads.words(remote, &mut self.directory[first..end]).await?;
        if let Ok(subtable) = entry.subtable(&self.geometry) {
            self.reload_chunk(self.geometry.chunk_of(subtable)).await?;
        }
        Ok(())
    }

    /// Looks at a directory entry as last read, and at the subtable behind it.
    async fn look(&mut self, index: u64) -> Result<Look, CheckError> {
        let nowhere = |problem| Look { entries: 1, subtable: None, problems: vec![problem] };
        let (entries, subtable) = match self.entry(index) {
            Ok(entry) => entry,
            Err(problem) => return Ok(nowhere(problem)),
        };
        self.reads.read(subtable.offset, Buffer::NewBlock, SUBTABLE_BYTES).await?;
        if let Some(problem) = self.group_problem(index, entries)? {
            return Ok(nowhere(problem));
        }
        let problems = self.row_problems(subtable, false)?;
        Ok(Look { entries, subtable: Some(subtable), problems })
    }

    /// How many entries belong to the subtable of this one, and what it is.
    fn entry(&self, index: u64) -> Result<(u64, Subtable), Problem> {
        let entry = DirectoryEntry::from_bits(self.directory[index as usize]);
        let (offset, depth, local_depth) =
            (self.entry_offset(index), self.depth, entry.local_depth());
        if local_depth > depth {
            return Err(Problem::DirectoryDepth { offset, local_depth, depth });
        }
        let subtable = entry
            .subtable(&self.geometry)
            .map_err(|error| Problem::DirectoryEntry { offset, error })?;
        if !self.is_subtable(subtable) {
            return Err(Problem::SubtableChunk { subtable });
        }
        let shift = depth - local_depth;
        let entries = 1u64 << shift;
        if !index.is_multiple_of(entries) || index + entries > self.directory.len() as u64 {
            return Err(Problem::DirectoryGroup { offset, local_depth });
        }
        let prefix = (index >> shift) as u32;
        Ok((entries, Subtable { offset: subtable, prefix, local_depth }))
    }

    /// That all entries for the subtable that was read last lead to it, or to where a split took
    /// its keys: a split changes them from the last to the first.
    fn group_problem(&self, index: u64, entries: u64) -> Result<Option<Problem>, LayoutError> {
        let group = &self.directory[index as usize..(index + entries) as usize];
        let first = DirectoryEntry::from_bits(group[0]);
        let local_depth = first.local_depth();
        let forward = self.forward()?;
        let fits = |(at, bits): (usize, &u64)| {
            let side = usize::from(2 * at >= group.len());
            let moved = forward.map(|new| DirectoryEntry::new(new[side], local_depth + 1).bits());
            *bits == first.bits() || moved == Some(*bits)
        };
        let offset = self.entry_offset(index);
        let problem = Problem::DirectoryGroup { offset, local_depth };
        Ok((!group.iter().enumerate().all(fits)).then_some(problem))
    }

    fn is_subtable(&self, offset: u64) -> bool {
        let chunk = self.geometry.chunk_of(offset);
        self.geometry.check_subtable(offset).is_ok()
            && chunk.is_some_and(|chunk| self.chunk_use(chunk) == Ok(ChunkUse::Subtables))
    }

    /// A row of the subtable that was read last.
    pub(super) fn row(&self, row: usize) -> Result<Row, LayoutError> {
        let buffer = self.reads.endpoint.buffer(self.reads.lane, Buffer::NewBlock);
        let short = LayoutError::Truncated { what: "subtable", bytes: buffer.len() as u64 };
        let bytes = buffer.get(row * size_of::<Row>()..).ok_or(short.clone())?;
        Ok(Row::read_from_prefix(bytes).map_err(|_| short)?.0)
    }

    /// Only a subtable that a split leads to may still be filled.
    fn row_problems(
        &self,
        subtable: Subtable,
        may_fill: bool,
    ) -> Result<Vec<Problem>, LayoutError> {
        let mut problems = Vec::new();
        let forward_of_all = self.forward()?;
        for row in 0..ROWS_PER_SUBTABLE {
            let Row { header, slots } = self.row(row)?;
            let offset = subtable.offset + row as u64 * ROW_BYTES;
            let (prefix, local_depth) = (header.prefix.get(), header.local_depth);
            let forward = header.forward();
            let leads = |forward: [u64; 2]| forward.into_iter().all(|to| self.is_subtable(to));
            let has_moved = || slots.iter().any(|slot| slot.word().state() == SlotState::Moved);
            if !header.is_valid() || header.is_filling() && !may_fill {
                problems.push(Problem::RowHeader { offset });
            } else if (prefix, local_depth) != (subtable.prefix, subtable.local_depth) {
                problems.push(Problem::RowPrefix { offset, prefix, local_depth });
            } else if let Some(forward) = forward {
                if Some(forward) != forward_of_all || !leads(forward) {
                    problems.push(Problem::RowForward { offset, forward });
                }
            } else if has_moved() && !header.is_filling() && forward_of_all.is_none() {
                problems.push(Problem::MovedNowhere { offset });
            }
        }
        Ok(problems)
    }
}

fn spans_two(chunk_use: ChunkUse) -> bool {
    matches!(chunk_use, ChunkUse::Blocks(class) if class.chunks_per_span() > 1)
}
