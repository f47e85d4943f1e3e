//! The walk through the chunk table and the directory, down to the headers of rows.

use std::collections::HashSet;

use zerocopy::FromBytes;

use farside_fabric::{Buffer, Fabric};
use farside_layout::{
    CHUNK_BYTES, ChunkEntry, ChunkUse, DirectoryEntry, LayoutError, ROW_BYTES, ROWS_PER_SUBTABLE,
    Row, RowHeader, SUBTABLE_BYTES, SlotState, slot_in_subtable,
};

use super::slots::Subtable;
use super::{CheckError, Observer, Problem, REREADS_MAX, Walk, links_block};

/// The result of checking a directory entry and its subtable.
#[derive(PartialEq, Eq)]
struct EntryCheck {
    /// How many directory entries lead to the same subtable.
    entries: u64,
    /// The subtable; `None` if the entry is too damaged to lead to one.
    subtable: Option<Subtable>,
    problems: Vec<Problem>,
}

impl<F: Fabric> Walk<'_, F> {
    /// Checks that every chunk's entry is valid and fits the one before it.
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

    /// Returns a chunk's problem if it was the same in two READs, with a pause between them.
    async fn settled_chunk_problem(&mut self, chunk: u32) -> Result<Option<Problem>, CheckError> {
        let mut problem = self.chunk_problem(chunk);
        for _ in 0..REREADS_MAX {
            if problem.is_none() {
                return Ok(None);
            }
            self.pause().await;
            self.reload_chunk(chunk.checked_sub(1)).await?;
            self.reload_chunk(Some(chunk)).await?;
            let reread = self.chunk_problem(chunk);
            if reread == problem {
                return Ok(problem);
            }
            problem = reread;
        }
        self.report.unsettled += 1;
        Ok(None)
    }

    /// Checks a chunk's entry, as last read.
    fn chunk_problem(&self, chunk: u32) -> Option<Problem> {
        let offset = self.geometry.chunk_entry(chunk)?;
        let chunk_use = match self.chunk_use(chunk) {
            Ok(chunk_use) => chunk_use,
            Err(error) => return Some(Problem::ChunkEntry { offset, error }),
        };
        let is_large = |chunk| self.chunk_use(chunk).is_ok_and(spans_two_chunks);
        let after_large = chunk.checked_sub(1).is_some_and(is_large);
        let fits = match chunk_use {
            ChunkUse::Continued => after_large,
            // A block of two chunks cannot start in the last one.
            _ => {
                !(after_large || spans_two_chunks(chunk_use) && chunk + 1 == self.geometry.chunks())
            }
        };
        (!fits).then_some(Problem::ChunkSpan { offset, chunk_use })
    }

    /// Returns the use of a chunk, as last read.
    pub(super) fn chunk_use(&self, chunk: u32) -> Result<ChunkUse, LayoutError> {
        ChunkEntry::from_bits(self.chunks[chunk as usize]).chunk_use()
    }

    /// Reads a chunk's entry again. Returns whether it changed.
    pub(super) async fn reload_chunk(&mut self, chunk: Option<u32>) -> Result<bool, CheckError> {
        let Some(chunk) = chunk else { return Ok(false) };
        let Some(offset) = self.geometry.chunk_entry(chunk) else { return Ok(false) };
        let bits = self.reads.word(offset).await?;
        let old_bits = std::mem::replace(&mut self.chunks[chunk as usize], bits);
        Ok(old_bits != bits)
    }

    /// Walks the directory and all subtables that it leads to.
    pub(super) async fn check_directory(
        &mut self,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        let total = self.directory.len() as u64;
        self.reads.words(self.entry_offset(0), &mut self.directory).await?;
        let mut index = 0;
        while index < total {
            observer.progress(index, total);
            let check = self.settled_entry_check(index).await?;
            for problem in check.problems {
                self.report.add_problem(problem);
            }
            if let Some(subtable) = check.subtable {
                self.visit_once(subtable, observer).await?;
            }
            index += check.entries;
        }
        observer.progress(total, total);
        Ok(())
    }

    /// Checks that no slot of a free place leads to a block. A place for a subtable is free if
    /// neither the directory nor a split leads to it.
    pub(super) async fn check_free_places(&mut self) -> Result<(), CheckError> {
        let used: HashSet<u64> = self.subtables.iter().map(|subtable| subtable.offset).collect();
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
                        if links_block(slot.word().state())
                            || slot.word().state() == SlotState::Copy
                        {
                            let offset = place + slot_in_subtable(row, n);
                            self.report.add_problem(Problem::FreePlace { offset });
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Visits a subtable, unless it was visited before. The same offset with another prefix is
    /// another subtable: a split has freed its place meanwhile, and another split has used it.
    async fn visit_once(
        &mut self,
        subtable: Subtable,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        if self.subtables.insert(subtable) {
            self.keys.clear();
            self.visit_subtable(subtable, observer).await?;
            self.visit_split_targets(subtable, observer).await?;
        }
        Ok(())
    }

    /// Visits the targets of a split: the subtables to which it moves the keys of the subtable that
    /// was visited last. If a split of a target has begun too, also visits the targets of that
    /// split, and so on.
    async fn visit_split_targets(
        &mut self,
        old: Subtable,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        let mut unvisited = self.split_targets(old)?;
        while let Some((old, new)) = unvisited.pop() {
            let (mut problems, mut is_current) = (Vec::new(), true);
            for reread in 0..REREADS_MAX {
                self.reads.read(new.offset, Buffer::NewBlock, SUBTABLE_BYTES).await?;
                problems = self.row_problems(new, true)?;
                // If the old subtable does not forward here any more, the split has ended, and the
                // problems do not count: the place may have another use by now.
                is_current = problems.is_empty() || self.still_forwards(old, new).await?;
                if problems.is_empty() || !is_current {
                    break;
                }
                if reread + 1 < REREADS_MAX {
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
                unvisited.extend(self.split_targets(new)?);
            }
        }
        Ok(())
    }

    /// Returns the subtables to which the subtable that was read last forwards, each as a pair
    /// (old, new).
    fn split_targets(&self, old: Subtable) -> Result<Vec<(Subtable, Subtable)>, LayoutError> {
        let Some(forward) = self.forward()? else { return Ok(Vec::new()) };
        let new = |side: usize| Subtable {
            offset: forward[side],
            prefix: old.prefix << 1 | side as u32,
            local_depth: old.local_depth + 1,
        };
        let is_valid = |new: &Subtable| self.is_subtable(new.offset);
        Ok([new(0), new(1)].into_iter().filter(is_valid).map(|new| (old, new)).collect())
    }

    /// Whether the first row of the old subtable still forwards to the new one.
    async fn still_forwards(&self, old: Subtable, new: Subtable) -> Result<bool, CheckError> {
        let bytes = size_of::<RowHeader>() as u64;
        self.reads.read(old.offset, Buffer::Window, bytes).await?;
        let header: [u8; size_of::<RowHeader>()] = self.reads.bytes(Buffer::Window)?;
        let header: RowHeader = zerocopy::transmute!(header);
        Ok((header.prefix.get(), header.local_depth) == (old.prefix, old.local_depth)
            && header.forward().is_some_and(|forward| forward.contains(&new.offset)))
    }

    /// Returns the two offsets to which the subtable that was read last forwards. Any row may have
    /// them, because a split writes them into one row after another.
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

    /// Checks a directory entry. Problems must be the same in two checks, with a pause between
    /// them.
    async fn settled_entry_check(&mut self, index: u64) -> Result<EntryCheck, CheckError> {
        let mut check = self.check_entry(index).await?;
        for _ in 0..REREADS_MAX {
            if check.problems.is_empty() {
                return Ok(check);
            }
            self.pause().await;
            self.reload_group(index).await?;
            let recheck = self.check_entry(index).await?;
            if recheck == check {
                return Ok(check);
            }
            check = recheck;
        }
        self.report.unsettled += 1;
        check.problems.clear();
        Ok(check)
    }

    /// Reads again a directory entry, the entries of the same subtable, and the entry of the
    /// subtable's chunk.
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

    /// Checks a directory entry, as last read, and READs and checks its subtable.
    async fn check_entry(&mut self, index: u64) -> Result<EntryCheck, CheckError> {
        let without_subtable =
            |problem| EntryCheck { entries: 1, subtable: None, problems: vec![problem] };
        let (entries, subtable) = match self.entry(index) {
            Ok(entry) => entry,
            Err(problem) => return Ok(without_subtable(problem)),
        };
        self.reads.read(subtable.offset, Buffer::NewBlock, SUBTABLE_BYTES).await?;
        if let Some(problem) = self.group_problem(index, entries)? {
            return Ok(without_subtable(problem));
        }
        let problems = self.row_problems(subtable, false)?;
        Ok(EntryCheck { entries, subtable: Some(subtable), problems })
    }

    /// Decodes a directory entry. Returns how many entries lead to its subtable, and the subtable.
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

    /// Checks that all directory entries for the subtable that was read last lead to it, or to the
    /// subtables to which a split moved its keys. A split changes the entries one by one, from the
    /// last to the first.
    fn group_problem(&self, index: u64, entries: u64) -> Result<Option<Problem>, LayoutError> {
        let group = &self.directory[index as usize..(index + entries) as usize];
        let first = DirectoryEntry::from_bits(group[0]);
        let local_depth = first.local_depth();
        let forward = self.forward()?;
        let fits = |(index, bits): (usize, &u64)| {
            let side = usize::from(2 * index >= group.len());
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

    /// Returns a row of the subtable that was read last.
    pub(super) fn row(&self, row: usize) -> Result<Row, LayoutError> {
        let buffer = self.reads.endpoint.buffer(self.reads.lane, Buffer::NewBlock);
        let short = LayoutError::Truncated { what: "subtable", bytes: buffer.len() as u64 };
        let bytes = buffer.get(row * size_of::<Row>()..).ok_or(short.clone())?;
        Ok(Row::read_from_prefix(bytes).map_err(|_| short)?.0)
    }

    /// Checks the rows of the subtable that was read last. `may_fill` is true if a split leads to
    /// the subtable, so that its rows may still be marked as filling.
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
            let is_valid = |forward: [u64; 2]| forward.into_iter().all(|new| self.is_subtable(new));
            let has_moved = || slots.iter().any(|slot| slot.word().has_moved());
            if !header.is_valid() || header.is_filling() && !may_fill {
                problems.push(Problem::RowHeader { offset });
            } else if (prefix, local_depth) != (subtable.prefix, subtable.local_depth) {
                problems.push(Problem::RowPrefix { offset, prefix, local_depth });
            } else if let Some(forward) = forward {
                if Some(forward) != forward_of_all || !is_valid(forward) {
                    problems.push(Problem::RowForward { offset, forward });
                }
            } else if has_moved() && !header.is_filling() && forward_of_all.is_none() {
                problems.push(Problem::MovedNowhere { offset });
            }
        }
        Ok(problems)
    }
}

fn spans_two_chunks(chunk_use: ChunkUse) -> bool {
    matches!(chunk_use, ChunkUse::Blocks(class) if class.chunks_per_span() > 1)
}
