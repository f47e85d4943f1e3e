//! GET.

use farside_fabric::{Buffer, Fabric, InFlight, LaneId, Nanos, Verb};
use farside_layout::hash::KeyHash;
use farside_layout::{Block, BlockRef, HeaderWord, NamedBlock, Slot, SlotState, SlotWord};

use super::window::{BlockRead, ENTRY_STATES, ForwardWindow, ObservedWindow};
use super::{ExaminedBlock, Found, Operation, ProtocolResult, RetryState, read_block};
use crate::Version;
use crate::engine::{LANE, has_expired};
use crate::location_cache::{Location, PackedLocation, Successor};
use crate::operation_metrics::read_traffic;
use crate::region_handle::RegionHandle;

/// Limit on the READs of a block that seems damaged, before a GET reports the damage.
const DAMAGE_ATTEMPTS_MAX: u32 = 3;
/// The largest block that is READ by a guess, in bytes. If the guess is wrong, a larger one would
/// take longer than the round trip that it can save.
const SUCCESSOR_BYTES_MAX: u64 = 4096;
const SLOT_BYTES: u32 = size_of::<Slot>() as u32;

/// A READ of the block at the key's cached location.
#[derive(Clone, Copy, Default)]
pub struct CachedRead {
    location: PackedLocation,
    posted: Nanos,
}

impl CachedRead {
    pub(crate) fn location(&self) -> PackedLocation {
        self.location
    }

    /// When it was posted.
    pub fn posted(&self) -> Nanos {
        self.posted
    }

    /// This READ, after another one that was posted at this time has shown that the block is still
    /// linked.
    pub(crate) fn proved_at(&self, posted: Nanos) -> Self {
        Self { posted, ..*self }
    }

    /// The block, if the READ of it is all that has to be posted.
    #[inline]
    pub(crate) fn only_block(&self) -> Option<BlockRef> {
        if self.location.has_stale_mark() { None } else { self.location.block().ok() }
    }

    /// The length of the READ of this block, in bytes.
    #[inline]
    pub(crate) fn bytes(&self, block: BlockRef) -> u64 {
        block.class.unpadded_bytes(self.location.padding())
    }
}

/// Why a READ of the cached location has not answered a GET.
pub(crate) enum CachedMiss {
    /// There was none, because no block is cached that could answer it.
    Unread,
    /// It was in vain.
    InVain(CachedRead),
    /// There was none, because this block is long.
    Long(CachedRead, BlockRef),
}

/// The result of a search of a window for the key.
enum WindowSearch {
    Found(Found),
    Absent,
    Retry,
}

/// A GET of a cached location is a future that is written by hand. It has two halves, before and
/// after its READ, and these callers: [`RegionHandle::get`], the lanes of a pipeline, and
/// [`Operation::get`] (`docs/decisions/0016-cached-gets-without-a-task.md`).
impl<'e, F: Fabric> RegionHandle<'e, F> {
    /// Runs a GET of a key with this hash to its end. No other operation may be in flight.
    #[inline]
    pub fn get(self, (hash, key): (KeyHash, &[u8])) -> ProtocolResult<Option<Found>> {
        self.region.check_key(key)?;
        match self.run_cached(hash, key, u32::MAX)? {
            Ok(found) => Ok(found),
            Err(missed) => self.get_by_future(hash, key, missed),
        }
    }

    /// Runs a GET to its end if a READ of the cached location answers it. Otherwise returns `None`:
    /// the key's location is not cached, its value was replaced or has expired, the READ has
    /// `long_bytes` or more, or it failed. No other operation may be in flight.
    #[inline]
    pub fn get_cached(self, (hash, key): (KeyHash, &[u8]), long_bytes: u32) -> Option<Found> {
        self.region.check_key(key).ok()?;
        match self.run_cached(hash, key, long_bytes).ok()? {
            Ok(found) => found,
            Err(missed) => {
                self.count_missed(&missed);
                None
            }
        }
    }

    /// READs the block at the cached location, and evaluates it. READs nothing if it is as long as
    /// `long_bytes`, or a head.
    #[inline(always)]
    pub(crate) fn run_cached(
        self,
        hash: KeyHash,
        key: &[u8],
        long_bytes: u32,
    ) -> ProtocolResult<Result<Option<Found>, CachedMiss>> {
        let mut fabric = self.engine.endpoint.fabric_mut();
        let read = self.cached_read_of_any(hash, || fabric.now());
        let Some((read, block)) = read.and_then(|read| Some((read, read.only_block()?))) else {
            return Ok(Err(CachedMiss::Unread));
        };
        let (remote, bytes) = (block.offset(), read.bytes(block) as u32);
        // Heads are that long.
        if bytes >= long_bytes || long_bytes == u32::MAX && block.class.is_head() {
            return Ok(Err(CachedMiss::Long(read, block)));
        }
        let done = fabric.run_read(LANE, self.region.index, remote, Buffer::ReadBlock, bytes);
        done.map_err(|error| self.failed(error))?;
        let now = fabric.now();
        let found = self.complete_cached_read::<true>(&*fabric, now, LANE, (hash, key), &read);
        Ok(found.ok_or(CachedMiss::InVain(read)))
    }

    #[cold]
    pub(crate) fn get_by_future(
        self,
        hash: KeyHash,
        key: &[u8],
        missed: CachedMiss,
    ) -> ProtocolResult<Option<Found>> {
        self.measure_missed(missed, Option::is_some, |missed| {
            let operation = self.stage_missed(hash, key, missed);
            self.engine.endpoint.drive(operation.get())
        })
    }

    /// Prepares a GET that a READ of the cached location has not answered.
    #[cold]
    pub(crate) fn stage_missed(
        self,
        hash: KeyHash,
        key: &[u8],
        missed: CachedMiss,
    ) -> Operation<'e, F> {
        let successor = match missed {
            CachedMiss::InVain(read) => self.successor_by_mark(LANE, &read),
            CachedMiss::Unread | CachedMiss::Long(..) => None,
        };
        Operation::<F>::fill(self.engine, LANE, key, &[]);
        Operation::staged(self, LANE, hash, (key.len(), 0), successor)
    }

    /// The READ of the block at the cached location, to be posted now. `None` if none is cached, if
    /// the block is a head, or if the client does not trust the server any more (invariant I24).
    // Always, because a call takes more instructions than the READ of shared memory itself.
    #[inline(always)]
    pub fn cached_read(self, hash: KeyHash, now: impl FnOnce() -> Nanos) -> Option<CachedRead> {
        self.cached_read_of_any(hash, now).filter(|read| !read.location.is_head())
    }

    /// As [`RegionHandle::cached_read`]. The block may be a head.
    #[inline(always)]
    pub(crate) fn cached_read_of_any(
        self,
        hash: KeyHash,
        now: impl FnOnce() -> Nanos,
    ) -> Option<CachedRead> {
        let location = self.region.cache.get_packed(hash)?;
        let posted = now();
        self.region.trust.holds_at(posted).then_some(CachedRead { location, posted })
    }

    /// As [`RegionHandle::cached_read`], if the block is a head.
    pub(crate) fn cached_head(self, hash: KeyHash, posted: Nanos) -> Option<CachedRead> {
        let read = self.cached_read_of_any(hash, || posted);
        read.filter(|read| read.location.is_head() && !read.location.has_stale_mark())
    }

    /// Posts the READ of [`RegionHandle::cached_read`]. It needs no deadline, because late data
    /// counts as too old (invariant I3).
    #[inline(always)]
    pub fn post_cached(
        self,
        lane: LaneId,
        hash: KeyHash,
        read: &CachedRead,
    ) -> ProtocolResult<InFlight<'e>> {
        let block = read.location.block()?;
        let bytes = read.bytes(block);
        if read.location.has_stale_mark() {
            return Ok(self.post_with_word(lane, hash, read, read_block(block, bytes)));
        }
        let (endpoint, remote) = (&self.engine.endpoint, block.offset());
        Ok(endpoint.read(lane, self.region.index, remote, Buffer::ReadBlock, bytes as u32))
    }

    /// A block with a stale mark does not prove that it is linked, so the READ of its slot's word
    /// goes along.
    #[cold]
    fn post_with_word(
        self,
        lane: LaneId,
        hash: KeyHash,
        read: &CachedRead,
        read_block: Verb,
    ) -> InFlight<'e> {
        let remote = self.region.directory().window(hash).0 + u64::from(read.location.in_window());
        let read_word = Verb::Read { remote, into: Buffer::Window, bytes: 8 };
        self.post(lane, &[read_word, read_block], Nanos::MAX)
    }

    /// Returns the value that a READ of [`RegionHandle::post_cached`] found, or `Some(None)` if it
    /// has expired. Returns `None`, and forgets the location, if the block does not prove that it
    /// is the key's. `fabric` is that of the endpoint, and `now` the time. `IS_GET` tells whether
    /// this is the first READ of a GET, which is counted if there are metrics and the READ answers.
    // Always, because it is the larger part of a GET, and has several callers.
    #[inline(always)]
    pub fn complete_cached_read<const IS_GET: bool>(
        self,
        fabric: &F,
        now: Nanos,
        lane: LaneId,
        (hash, key): (KeyHash, &[u8]),
        read: &CachedRead,
    ) -> Option<Option<Found>> {
        let proved = self.prove_cached::<IS_GET>(fabric, now, lane, (hash, key), read);
        let Some(found) = proved else {
            self.forget_cached(hash, read.location);
            return None;
        };
        let is_present = found.expires_at_ms == 0
            || self.is_cached_present::<IS_GET>(fabric, found.expires_at_ms, read.posted);
        Some(is_present.then_some(found))
    }

    /// Whether a value that expires had not expired at `posted`, when the cached location was READ.
    /// Corrects the counts if it had.
    #[cold]
    fn is_cached_present<const IS_GET: bool>(
        self,
        fabric: &F,
        expires_at_ms: u64,
        posted: Nanos,
    ) -> bool {
        let is_present = !has_expired(fabric, expires_at_ms, posted);
        if !is_present {
            self.region.lookups.note_expired();
        }
        if !is_present
            && IS_GET
            && let Some(metrics) = self.metrics()
        {
            metrics.correct_expired();
        }
        is_present
    }

    #[cold]
    fn forget_cached(self, hash: KeyHash, location: PackedLocation) {
        if let Ok(word) = location.word(hash) {
            self.region.cache.forget_word(hash, word);
        }
    }

    /// The cached generation with a clear mark proves that the block is linked at the moment of the
    /// READ (invariants I2, I10).
    #[inline(always)]
    fn prove_cached<const IS_GET: bool>(
        self,
        fabric: &F,
        now: Nanos,
        lane: LaneId,
        (hash, key): (KeyHash, &[u8]),
        read: &CachedRead,
    ) -> Option<Found> {
        let CachedRead { location, posted } = *read;
        let block = location.block().ok()?;
        let bytes = read.bytes(block) as usize;
        let read_bytes = fabric.buffer(lane, Buffer::ReadBlock).get(..bytes)?;
        let found = Block::of_key(read_bytes, block, key)?;
        let HeaderWord { mark, generation } = found.header_word();
        let is_linked = if location.has_stale_mark() {
            location.word(hash).is_ok_and(|word| self.has_word::<IS_GET>(fabric, lane, word))
        } else {
            !mark.is_set()
        };
        let is_fresh = || match IS_GET {
            true => self.region.is_fresh_get(posted, now, bytes),
            false => self.region.is_fresh(posted, now),
        };
        if generation != location.generation() || !is_linked || !is_fresh() {
            return None;
        }
        self.note_cached_read(hash, read);
        Some(Found::new(block.address, &found))
    }

    /// Notes that a READ proved the cached location.
    #[inline(always)]
    fn note_cached_read(self, hash: KeyHash, read: &CachedRead) {
        let lookups = &self.region.lookups;
        lookups.note_cached_read(|| Some(read.location.block().ok()?.address));
        self.region.cache.prove(hash, read.location, read.posted, &lookups.reads);
    }

    /// As [`RegionHandle::complete_cached_read`], for a whole long block with this header and
    /// expiry.
    #[cold]
    pub(crate) fn complete_long_read(
        self,
        fabric: &F,
        hash: KeyHash,
        read: &CachedRead,
        arrived: Option<(HeaderWord, u64)>,
    ) -> Option<bool> {
        let CachedRead { location, posted } = *read;
        let Some((_, expires_at_ms)) = arrived.filter(|(header, _)| {
            header.generation == location.generation()
                && !header.mark.is_set()
                && self.region.is_fresh(posted, fabric.now())
        }) else {
            self.forget_cached(hash, location);
            return None;
        };
        self.note_cached_read(hash, read);
        Some(expires_at_ms == 0 || self.is_cached_present::<false>(fabric, expires_at_ms, posted))
    }

    /// Whether the READ of [`RegionHandle::post_with_word`] found this word.
    #[cold]
    fn has_word<const IS_GET: bool>(self, fabric: &F, lane: LaneId, word: SlotWord) -> bool {
        if IS_GET && let Some(metrics) = self.metrics() {
            metrics.add_traffic(&read_traffic(0, 8));
        }
        let (words, _) = fabric.buffer(lane, Buffer::Window).as_chunks();
        words.first().is_some_and(|found| u64::from_le_bytes(*found) == word.bits())
    }

    /// Returns the block that replaced the one that was READ, which its mark names.
    #[cold]
    pub fn successor_by_mark(self, lane: LaneId, read: &CachedRead) -> Option<Successor> {
        let (generation, in_window) = (read.location.generation(), read.location.in_window());
        let fabric = self.engine.endpoint.fabric();
        let (words, _) = fabric.buffer(lane, Buffer::ReadBlock).as_chunks();
        let header = HeaderWord::from_bits(u64::from_le_bytes(*words.first()?));
        let class = read.location.block().ok()?.class;
        if header.generation != generation || class.block_bytes() > SUCCESSOR_BYTES_MAX {
            return None;
        }
        Some(Successor { in_window, address: header.mark.successor()?, class })
    }
}

impl<F: Fabric> Operation<'_, F> {
    /// Returns the key's value, as [`Operation::get`]; of one with extents, the head.
    pub(crate) async fn find(&self) -> ProtocolResult<Option<Found>> {
        let (handle, lane, hash) = (self.handle(), self.lane, self.hash);
        let cached =
            if self.successor.is_none() { handle.cached_read(hash, || self.now()) } else { None };
        let successor = match &cached {
            Some(cached) => {
                let posted = handle.post_cached(lane, hash, cached)?;
                posted.await.map_err(|error| self.failed(error))?;
                if let Some(found) = self.complete_cached_read(cached) {
                    return Ok(found);
                }
                handle.successor_by_mark(lane, cached)
            }
            None => self.successor,
        };
        self.get_missed(successor).await
    }

    /// Returns the version of the key's value. One READ of 8 bytes and one round trip if its
    /// location is cached, its slot still has the cached word, and the value does not expire.
    /// Otherwise the round trips of a GET, and one more if the word has changed.
    ///
    /// The word is still the key's, because its proof is at most T_word old (invariant I4).
    pub async fn version(&self) -> ProtocolResult<Option<Version>> {
        if let Some(((_, location), target)) = self.cached_location()
            && !location.expires()
        {
            let posted = self.now();
            let word = Verb::Read { remote: target.slot, into: Buffer::Window, bytes: 8 };
            self.handle().read(self.lane, &[word]).await?;
            let is_linked = self.first_words(Buffer::Window) == [target.word.bits()];
            if is_linked && self.is_fresh(posted) && self.is_proved(&target, self.now()) {
                let lookups = &self.region.lookups;
                lookups.note_cached_read(|| Some(location.block().ok()?.address));
                self.region.cache.prove(self.hash, location, posted, &lookups.reads);
                let address = target.word.block()?.address;
                return Ok(Some(Version::of(address, location.generation())));
            }
        }
        Ok(self.find().await?.map(|found| found.version))
    }

    /// Returns `None` for an expired value.
    #[inline]
    fn unless_expired(&self, found: Found, posted: Nanos) -> Option<Found> {
        (!self.has_expired(found.expires_at_ms, posted)).then_some(found)
    }

    /// As [`RegionHandle::complete_cached_read`]. Notes where the key is for the rest of the
    /// operation.
    pub(crate) fn complete_cached_read(&self, read: &CachedRead) -> Option<Option<Found>> {
        let (fabric, now) = (self.engine.endpoint.fabric(), self.now());
        let key = (self.hash, self.key_in(&fabric));
        let handle = self.handle();
        let completed = handle.complete_cached_read::<false>(&*fabric, now, self.lane, key, read);
        if completed.is_some() {
            let location = read.location.location(self.hash, read.posted).ok()?;
            self.located.set(Some((location, None)));
        }
        completed
    }

    /// Returns the key's value if the cached location, if any, did not lead to it.
    async fn get_missed(&self, successor: Option<Successor>) -> ProtocolResult<Option<Found>> {
        self.region.lookups.note_miss();
        let by_successor = match successor {
            Some(successor) => self.read_successor(successor).await?,
            None => None,
        };
        let found = match by_successor {
            Some((found, posted)) => self.unless_expired(found, posted),
            None => self.get_uncached().await?,
        };
        self.region.lookups.note_uncached_read(found.is_some());
        Ok(found)
    }

    /// READs the slot and, in the same round trip, the block to which it probably leads. One more
    /// round trip if it leads to another block. Only the slot decides, and then the block to which
    /// it leads (invariant I22). Returns `None` if that block is not the key's.
    async fn read_successor(&self, successor: Successor) -> ProtocolResult<Option<(Found, Nanos)>> {
        let Successor { in_window, address, class } = successor;
        let expected = NamedBlock { address, class, generation_low: 0 };
        let Ok(expected) = self.region.geometry.check_block(expected) else { return Ok(None) };
        let (base, posted) = (self.window(), self.now());
        let remote = base + u64::from(in_window);
        let read_slot = Verb::Read { remote, into: Buffer::Window, bytes: SLOT_BYTES };
        let read_block = read_block(expected, expected.class.block_bytes());
        self.handle().read(self.lane, &[read_slot, read_block]).await?;
        let [word, hint] = self.first_words(Buffer::Window);
        let word = SlotWord::from_bits(word);
        if !matches!(word.state(), SlotState::Live | SlotState::Frozen)
            || !Slot::new(word, hint).is_of(self.hash)
            || !self.is_fresh(posted)
        {
            return Ok(None);
        }
        let block = self.region.geometry.block_of(word)?;
        let examined = if (block.address, block.class) == (address, class) {
            self.examine(block, class.block_bytes())
        } else {
            match self.read_and_examine(word, posted).await? {
                BlockRead::Examined(examined) => examined,
                BlockRead::Stale => return Ok(None),
            }
        };
        let ExaminedBlock::Ours(found, header) = examined else { return Ok(None) };
        self.note_found((base, in_window), word, &found, header, posted);
        Ok(Some((found, posted)))
    }

    /// Caches the location of the key, and reports the read: a READ that was posted at this time
    /// found the key in this slot, by the byte offsets of its window and in it.
    fn note_found(
        &self,
        (base, in_window): (u64, u16),
        word: SlotWord,
        found: &Found,
        header: HeaderWord,
        posted: Nanos,
    ) {
        let location = Location {
            in_window,
            word,
            generation: header.generation,
            has_stale_mark: header.mark.is_set(),
            expires: found.expires_at_ms != 0,
            padding: word.block().map_or(0, |block| found.padding(block.class)),
            proved_at: posted,
        };
        // The directory does not lead to a subtable that a split is still filling. The cached entry
        // would then name a slot of the old subtable.
        if self.window() == base {
            self.region.cache.put(self.hash, location);
        }
        self.located.set(Some((location, Some(base))));
        if let Ok(block) = word.block() {
            self.region.lookups.note_found(block.address);
        }
    }

    /// The first `N` words of a buffer.
    fn first_words<const N: usize>(&self, buffer: Buffer) -> [u64; N] {
        let fabric = self.engine.endpoint.fabric();
        let (words, _) = fabric.buffer(self.lane, buffer).as_chunks();
        std::array::from_fn(|at| u64::from_le_bytes(words[at]))
    }

    /// Returns the key's value by its window, without the location cache.
    pub(super) async fn get_uncached(&self) -> ProtocolResult<Option<Found>> {
        let (mut damaged, mut tries) = (0, RetryState::default());
        let mut seen = ObservedWindow::unread();
        loop {
            self.read_window(&mut seen).await?;
            // One pass for each split under way: a new subtable may be split again.
            loop {
                match self.search(&seen, &mut damaged).await? {
                    WindowSearch::Found(found) => {
                        return Ok(self.unless_expired(found, seen.posted));
                    }
                    WindowSearch::Retry => break,
                    WindowSearch::Absent => match self.read_forward_window(&mut seen).await? {
                        ForwardWindow::NoSplit => return Ok(None),
                        ForwardWindow::Window => {}
                        ForwardWindow::Unknown => break,
                    },
                }
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// Searches the window: READs the block of each slot with a matching hint. A slot with another
    /// hint has another key (invariant I12).
    ///
    /// The block's mark does not count here, because the word was LIVE during this operation. COPY
    /// is seen only in a new subtable, after the entry was gone from the old one. Its block is that
    /// of the FROZEN word (invariant I15).
    async fn search(
        &self,
        seen: &ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<WindowSearch> {
        for (at, slot) in seen.matching(&ENTRY_STATES) {
            if !self.hint_matches(slot) {
                continue;
            }
            match self.read_and_examine(slot.word(), seen.posted).await? {
                BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                    let location = (seen.base, ObservedWindow::in_window(at) as u16);
                    self.note_found(location, slot.word(), &found, header, seen.posted);
                    return Ok(WindowSearch::Found(found));
                }
                BlockRead::Examined(ExaminedBlock::Other) => {}
                BlockRead::Stale => return Ok(WindowSearch::Retry),
                BlockRead::Examined(ExaminedBlock::Damaged(error)) => {
                    *damaged += 1;
                    if *damaged < DAMAGE_ATTEMPTS_MAX {
                        return Ok(WindowSearch::Retry);
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(WindowSearch::Absent)
    }
}
