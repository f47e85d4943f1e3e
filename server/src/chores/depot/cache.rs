//! What a cache needs of its depot: a reserve of free chunks, blocks to choose from, and spans that
//! drain.
//!
//! A span that *drains* offers no block. Its keys are evicted, and the blocks that clients return
//! stay. Once the depot has all of them, its chunks rest like those of any other empty span
//! (invariant I13), and then become free.

use farside_control::FreeBlock;
use farside_fabric::Nanos;
use farside_layout::{BlockAddress, CHUNK_BYTES, SizeClass};

use super::{BlockError, Depot};

/// The largest number of bytes that the index takes for a key, as an estimate: 54 bytes when all
/// subtables have just been split, and a few for emptied places that rest for GRACE.
const INDEX_BYTES_PER_KEY: u64 = 60;
/// The reserve is this share of the chunks, within the two limits below. A larger one would leave
/// less for keys; a smaller one would serve fewer new sizes until other chunks have become empty.
const RESERVE_DIVISOR: u64 = 16;
/// A class of large blocks needs two chunks.
const RESERVE_MIN: u64 = 2;
const RESERVE_MAX: u64 = 64;
/// The reserve of a small region is this share of its chunks at most.
const RESERVE_SHARE_DIVISOR: u64 = 4;
/// The span of last resort is this share of the chunks at most.
const LAST_RESORT_DIVISOR: u64 = 12;

impl Depot {
    /// Makes this the depot of a cache. It then leaves room for an index with a key for each block,
    /// because a cache uses all of its blocks. It also keeps a reserve of chunks, because a chunk
    /// waits for long before it can serve another class.
    ///
    /// Room for one span of the largest class that it can spare is kept beside the reserve. Values
    /// whose class and all larger ones have no chunk are stored there. So there is room for each
    /// size, however many sizes came before it. `largest` is the class of the largest values.
    pub(crate) fn keep_reserve(&mut self, largest: SizeClass) {
        let chunks = self.chunks.len() as u64;
        let reserve = (chunks / RESERVE_DIVISOR).clamp(RESERVE_MIN, RESERVE_MAX);
        self.reserve = Some(reserve.min(chunks / RESERVE_SHARE_DIVISOR));
        let spared = |class: &SizeClass| {
            *class <= largest && class.chunks_per_span() <= chunks / LAST_RESORT_DIVISOR
        };
        self.last_resort = SizeClass::of_values().filter(spared).last();
    }

    /// Whether values of this class can be stored in free chunks that are kept for them.
    pub(crate) fn is_last_resort(&self, class: SizeClass) -> bool {
        self.last_resort == Some(class)
    }

    /// Returns how many free chunks are left if there are `more` blocks, without those that the
    /// index needs, and those that are kept as the last resort of other classes than `class`.
    fn chunks_left(&self, class: Option<SizeClass>, more: u64) -> u64 {
        let lasting = self.pools.iter().map(|pool| pool.blocks - pool.blocks_draining);
        let blocks = lasting.sum::<u64>() + more;
        let needed = (blocks * INDEX_BYTES_PER_KEY).div_ceil(CHUNK_BYTES);
        let kept =
            self.last_resort.filter(|last| Some(*last) != class && self.spans(*last).is_empty());
        let kept = kept.map_or(0, SizeClass::chunks_per_span);
        self.chunks_free().saturating_sub(needed.saturating_sub(self.chunks_index) + kept)
    }

    /// Returns how many spans the class may get of the free chunks, as far as the index and the
    /// reserve allow.
    ///
    /// A class with few spans may use a part of the reserve: the fewer it has, the more it leaves
    /// for others. So each new size gets a span at once, and a busy one gets some more. Spans that
    /// drain count. Otherwise a busy class would take a chunk for each one that it gives.
    pub(super) fn spans_max(&self, class: SizeClass) -> u64 {
        let Some(reserve) = self.reserve else { return u64::MAX };
        let (chunks, blocks) = (class.chunks_per_span(), class.blocks_per_span());
        let left = self.chunks_left(Some(class), blocks);
        let span_bytes = chunks * CHUNK_BYTES + blocks * INDEX_BYTES_PER_KEY;
        let beside_reserve = left.saturating_sub(reserve);
        let spans = self.pools[usize::from(class.index())].blocks / blocks;
        let has_one = beside_reserve >= chunks || left / chunks > 2 * spans;
        (beside_reserve * CHUNK_BYTES / span_bytes).max(u64::from(has_one))
    }

    /// Returns how many more free chunks a cache should have: the reserve and the room for the
    /// index, without those that it has and those of spans that drain.
    pub(crate) fn chunks_missing(&self) -> u64 {
        let reserve = self.reserve.unwrap_or(0);
        reserve.saturating_sub(self.chunks_left(None, 0) + self.chunks_draining())
    }

    /// Returns how many chunks classes can still take, or will be able to take once the spans that
    /// drain are empty.
    pub(crate) fn chunks_coming(&self) -> u64 {
        let reserve = self.reserve.unwrap_or(0);
        (self.chunks_left(None, 0) + self.chunks_draining()).saturating_sub(reserve)
    }

    /// Returns the number of chunks of spans that drain.
    pub(crate) fn chunks_draining(&self) -> u64 {
        self.chunks_draining
    }

    /// Returns how many chunks the span that begins at this chunk has.
    pub(crate) fn chunks_of_span(&self, chunk: u32) -> u64 {
        self.span(chunk).map_or(0, |span| span.class.chunks_per_span())
    }

    /// Returns how many blocks the class could give now, and how many more once they have rested.
    pub(crate) fn blocks_to_give(&self, class: SizeClass) -> (u64, u64) {
        (self.available(class), self.pools[usize::from(class.index())].resting_count)
    }

    /// Returns the number of blocks of a class, without those of spans that drain.
    pub(crate) fn blocks_lasting(&self, class: SizeClass) -> u64 {
        let pool = &self.pools[usize::from(class.index())];
        pool.blocks - pool.blocks_draining
    }

    /// Returns the first chunks of the class's spans that do not drain, in no order.
    pub(crate) fn spans(&self, class: SizeClass) -> &[u32] {
        &self.pools[usize::from(class.index())].spans
    }

    /// Returns the class of the span that begins at this chunk, if it does not drain.
    pub(crate) fn class_of_span(&self, chunk: u32) -> Option<SizeClass> {
        self.span(chunk).filter(|span| !span.is_draining).map(|span| span.class)
    }

    /// Returns the first chunk and the class of the span of this block; `None` for a block of the
    /// second chunk of a span, and outside of spans.
    pub(crate) fn span_of(&self, address: BlockAddress) -> Option<(u32, SizeClass)> {
        let chunk = self.geometry.chunk_of_block(address)?;
        Some((chunk, self.span(chunk)?.class))
    }

    /// Returns how long a chunk rests before it can serve another class.
    pub(crate) fn chunk_rest(&self) -> Nanos {
        self.options.chunk_rest
    }

    /// Whether this chunk is free, or is the first one of a span that drains.
    pub(crate) fn is_coming(&self, chunk: u32) -> bool {
        self.free_chunks.contains(&chunk) || self.draining.contains(&chunk)
    }

    /// Whether two neighbouring chunks are free or drain.
    pub(crate) fn has_pair_coming(&self) -> bool {
        let mut chunks = self.free_chunks.iter().chain(&self.draining);
        chunks.any(|chunk| self.chunks_of_span(*chunk) > 1 || self.is_coming(chunk + 1))
    }

    /// Returns the blocks of a span that the depot does not have, each with its index in the span:
    /// from the index `from` on, up to but without `end`.
    pub(crate) fn blocks_outside(
        &self,
        chunk: u32,
        from: u64,
        end: u64,
    ) -> impl Iterator<Item = (u64, BlockAddress)> + '_ {
        self.span(chunk).into_iter().flat_map(move |span| {
            let indices = from..end.min(span.class.blocks_per_span());
            let outside = indices.filter(move |index| !span.in_depot.has(*index));
            let block_at = move |index| self.geometry.block_at(chunk, span.class, index);
            outside.filter_map(move |index| Some((index, block_at(index)?.address)))
        })
    }

    /// Whether the span at this chunk drains, and clients or slots still have blocks of it.
    pub(crate) fn is_draining(&self, chunk: u32) -> bool {
        self.span(chunk).is_some_and(|span| span.is_draining && span.whole_since.is_none())
    }

    /// Begins to drain a span.
    pub(crate) fn begin_drain(&mut self, chunk: u32) {
        let begins = self.change_span(chunk, 0, |span, pool| {
            if std::mem::replace(&mut span.is_draining, true) {
                return false;
            }
            pool.blocks_draining += span.class.blocks_per_span();
            pool.remove_lasting(chunk);
            true
        });
        if begins == Some(true) {
            self.draining.insert(chunk);
            self.chunks_draining += self.chunks_of_span(chunk);
        }
    }

    /// Lets a span that drains offer its blocks again. Returns false if it is too early: some of
    /// them have not rested.
    pub(crate) fn end_drain(&mut self, chunk: u32, now: Nanos) -> bool {
        let Some(span) = self.span(chunk) else { return true };
        if span.changed_at > now {
            return false;
        }
        let chunks = span.class.chunks_per_span();
        if self.draining.remove(&chunk) {
            self.chunks_draining -= chunks;
            self.change_span(chunk, 0, |span, pool| {
                span.is_draining = false;
                pool.blocks_draining -= span.class.blocks_per_span();
                pool.spans.push(chunk);
            });
        }
        true
    }

    /// Puts blocks that were just unlinked back into spans that drain.
    ///
    /// They take no place in a list: the next generation of each follows from its header. They need
    /// not be listed as resting either. The span offers no block, and `changed_at` says from when
    /// it may.
    pub(crate) fn give_drained(
        &mut self,
        class: SizeClass,
        blocks: &[FreeBlock],
        now: Nanos,
    ) -> Result<(), BlockError> {
        let ready_at = now.saturating_add(self.options.grace);
        let mut result = Ok(());
        for block in blocks {
            if let Err(error) = self.accept(*block, class) {
                result = Err(error);
                continue;
            }
            let (chunk, index) = self.locate(block.address, class)?;
            self.change_span(chunk, ready_at, |span, _| span.add_uncarved([index].into_iter()));
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{FakeMemory, class, depot, take_all};
    use super::*;

    const BYTES: u64 = 64 << 20;

    fn cache() -> Depot {
        let mut depot = depot(BYTES);
        depot.keep_reserve(SizeClass::LARGEST_OF_VALUES);
        depot
    }

    #[test]
    fn a_full_cache_keeps_a_reserve_of_which_each_new_class_gets_a_part() {
        let mut depot = cache();
        let chunks = depot.chunks_free();
        take_all(&mut depot, class(4096), 0);
        let kept = SizeClass::LARGEST_OF_VALUES.chunks_per_span();
        let reserve = depot.chunks_free() - kept;
        assert!((RESERVE_MIN..=chunks / 4).contains(&reserve), "{reserve} of {chunks}");
        assert_eq!(depot.chunks_missing(), 0);
        assert_eq!(depot.blocks_to_give(class(4096)), (0, 0));
        // Each new class gets a span as long as there is one.
        for bytes in [1 << 10, 1 << 11].into_iter().take(reserve as usize) {
            let left = depot.chunks_free();
            assert!(!take_all(&mut depot, class(bytes), 0).is_empty());
            assert_eq!(depot.chunks_free(), left - 1);
        }
        assert!(depot.chunks_missing() > 0);
        // The largest class has its span even when no other class gets one any more.
        for class in SizeClass::of_values().filter(|class| *class < SizeClass::LARGEST_OF_VALUES) {
            take_all(&mut depot, class, 0);
        }
        assert_eq!(depot.blocks_to_give(class(4096)).0, 0);
        assert_eq!(take_all(&mut depot, SizeClass::LARGEST_OF_VALUES, 0).len(), 1);
    }

    #[test]
    fn a_class_of_small_blocks_leaves_room_for_the_index() {
        let mut depot = cache();
        let chunks = depot.chunks_free();
        take_all(&mut depot, class(64), 0);
        assert!(depot.chunks_free() > chunks * 2 / 5, "{} of {chunks}", depot.chunks_free());
    }

    #[test]
    fn a_span_that_drains_offers_nothing_and_then_serves_another_class() {
        let (mut depot, memory) = (cache(), FakeMemory::default());
        let (small, large) = (class(256 << 10), class(512 << 10));
        let blocks = take_all(&mut depot, small, 0);
        let chunk = depot.spans(small)[0];
        let lasting = depot.blocks_lasting(small);
        depot.begin_drain(chunk);
        assert_eq!(depot.blocks_lasting(small), lasting - 8);
        let is_of_span =
            |block: &FreeBlock| depot.geometry.chunk_of_block(block.address) == Some(chunk);
        let (inside, outside): (Vec<_>, Vec<_>) = blocks.into_iter().partition(is_of_span);
        assert_eq!(depot.blocks_outside(chunk, 0, u64::MAX).count(), inside.len());
        // A client returns one block, and the keys of the others are evicted.
        depot.give(small, vec![inside[0]], true, 1000).unwrap();
        inside[1..].iter().for_each(|block| memory.write(*block, true));
        assert!(depot.is_draining(chunk));
        depot.give_drained(small, &inside[1..], 1000).unwrap();
        assert!(!depot.is_draining(chunk), "all blocks are there");
        assert_eq!(depot.blocks_outside(chunk, 0, u64::MAX).count(), 0);
        assert_eq!(depot.take(small, 1, 5000, &memory).unwrap(), []);
        // Blocks of other spans are offered as ever.
        depot.give(small, outside[..1].to_vec(), true, 5000).unwrap();
        assert_eq!(depot.take(small, 1, 5000, &memory).unwrap(), outside[..1]);
        let free = depot.chunks_free();
        let rested_at = 1000 + depot.options.grace + depot.chunk_rest();
        depot.refresh(rested_at - 1, &memory).unwrap();
        assert_eq!((depot.chunks_free(), depot.chunks_draining()), (free, 1));
        depot.refresh(rested_at, &memory).unwrap();
        assert_eq!((depot.chunks_free(), depot.chunks_draining()), (free + 1, 0));
        assert!(!depot.take(large, 1, rested_at, &memory).unwrap().is_empty());
    }

    #[test]
    fn a_span_that_cannot_be_emptied_offers_its_blocks_again() {
        let (mut depot, memory) = (cache(), FakeMemory::default());
        let small = class(256 << 10);
        take_all(&mut depot, small, 0);
        let chunk = depot.spans(small)[0];
        depot.begin_drain(chunk);
        let (_, address) = depot.blocks_outside(chunk, 3, 4).next().unwrap();
        let block = FreeBlock { address, generation: 8 };
        memory.write(FreeBlock { generation: 7, ..block }, true);
        depot.give_drained(small, &[block], 1000).unwrap();
        let rested_at = 1000 + depot.options.grace;
        assert!(!depot.end_drain(chunk, rested_at - 1) && depot.end_drain(chunk, rested_at));
        assert_eq!(depot.take(small, 1, rested_at, &memory).unwrap(), [block]);
        assert_eq!(depot.chunks_draining(), 0);
        assert!(depot.spans(small).contains(&chunk));
    }
}
