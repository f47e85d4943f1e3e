//! PUT, UPDATE and INSERT: the choice of the chain that stores a value.

use farside_fabric::{ChainError, Fabric, InFlight, Nanos, Verb};
use farside_layout::SlotWord;

use super::insert::{BlindInsert, Condition, Inserted};
use super::swing::{SwingResult, TakenBlock};
use super::window::{BlockRead, KeyLookup, ObservedWindow};
use super::{Answer, ExaminedBlock, Operation, ProtocolResult, ProvenSlot, RetryState, is_moving};
use crate::image::Image;
use crate::location_cache::FoundEntry;
use crate::lookups::METRICS_WATCH;
use crate::new_block::{BlockFate, NewBlock};
use crate::operation::LONG_VALUE_BYTES;
use crate::operation_metrics::cached_put_traffic;
use crate::{Lifetime, Version};

/// The number of attempts in which an INSERT waits for unfinished INSERTs to leave slots of a full
/// window. After these attempts it requests a split of the subtable.
const UNDECIDED_ATTEMPTS: u32 = 8;

/// The result of a store at the cached location.
enum CachedSwing {
    Done,
    /// Another session has replaced the value: this slot has the key.
    Replaced(ProvenSlot),
    /// The location was not cached, or is not the key's any more.
    Unknown,
}

/// A PUT whose chain swings the slot of the cached location.
pub struct CachedPut<'c> {
    /// The cached location.
    entry: FoundEntry<'c>,
    target: ProvenSlot,
    new: NewBlock,
    desired: SlotWord,
    posted: Nanos,
}

/// A PUT whose chain at the cached location did not swing the slot: [`Operation::put_after`]
/// continues with it.
pub struct DisplacedPut {
    target: ProvenSlot,
    new: NewBlock,
    posted: Nanos,
    swung: SwingResult,
}

impl DisplacedPut {
    /// When its first chain was posted.
    pub fn posted(&self) -> Nanos {
        self.posted
    }

    /// Its block.
    pub(super) fn new_block(&self) -> &NewBlock {
        &self.new
    }
}

impl CachedPut<'_> {
    /// When its chain was posted.
    pub fn posted(&self) -> Nanos {
        self.posted
    }

    /// The version of its value.
    #[inline]
    pub fn version(&self) -> Version {
        self.new.version()
    }

    /// This PUT, after [`Operation::complete_cached_put`] returned `swung`.
    pub fn displaced(self, swung: SwingResult) -> DisplacedPut {
        let Self { target, new, posted, .. } = self;
        DisplacedPut { target, new, posted, swung }
    }
}

/// A PUT at a cached location is a future that is written by hand, in two halves as a GET:
/// `docs/decisions/0016-cached-gets-without-a-task.md`. Its parts are those of
/// [`Operation::put`], and [`Operation::put_after`] continues one that did not succeed.
impl<'e, F: Fabric> Operation<'e, F> {
    /// Runs a PUT to its end. No other operation may be in flight. Returns the version of the
    /// value; `None` if another PUT has already overwritten it.
    #[inline]
    pub(crate) fn put_alone(&self, lifetime: Lifetime) -> ProtocolResult<Option<Version>> {
        let endpoint = &self.engine.endpoint;
        let done = endpoint.alone(|| {
            let Some(put) = self.cached_put(lifetime)? else { return Ok(None) };
            self.post_cached_put(&put).map(drop)?;
            let result = endpoint.take_result(self.lane).unwrap_or(Err(ChainError::Unknown));
            Ok(Some(match self.complete_cached_put(&put, result)? {
                None => Ok(put.version()),
                Some(swung) => Err(put.displaced(swung)),
            }))
        });
        match done {
            Ok(Some(Ok(version))) => Ok(Some(version)),
            Ok(Some(Err(displaced))) => self.put_displaced(displaced),
            Ok(None) => self.put_by_future(lifetime),
            Err(failure) => Err(failure),
        }
    }

    #[cold]
    pub(super) fn put_displaced(&self, displaced: DisplacedPut) -> ProtocolResult<Option<Version>> {
        self.count_displaced(&displaced);
        let since = Some(displaced.posted);
        let put = || self.engine.endpoint.drive(self.put_after(displaced));
        Ok(self.handle().measure_put(since, put)?.version)
    }

    #[cold]
    pub(super) fn put_by_future(&self, lifetime: Lifetime) -> ProtocolResult<Option<Version>> {
        let put = || self.engine.endpoint.drive(self.put(lifetime));
        Ok(self.handle().measure_put(None, put)?.version)
    }

    /// Counts what the chain of a PUT transferred that did not swing the slot.
    #[cold]
    pub fn count_displaced(&self, displaced: &DisplacedPut) {
        if let Some(metrics) = self.handle().metrics() {
            metrics.add_traffic(&cached_put_traffic(displaced.new.write_bytes()));
        }
    }

    /// When the store of a PUT at a cached location, which has completed, counts as a proof of the
    /// location. Counts the PUT if there are metrics.
    #[inline(always)]
    fn proof_by_cached_put(&self, new: &NewBlock, posted: Nanos, now: Nanos) -> Nanos {
        if self.region.lookups.put_watchers() == 0 {
            return posted;
        }
        // With metrics this is the usual case, so it makes no call.
        if self.region.lookups.put_watchers() == METRICS_WATCH {
            self.region.metrics.add_cached_put(now.wrapping_sub(posted), new.write_bytes());
            return posted;
        }
        self.proof_by_watched_put(new, posted, now)
    }

    #[cold]
    fn proof_by_watched_put(&self, new: &NewBlock, posted: Nanos, now: Nanos) -> Nanos {
        if let Some(metrics) = self.handle().metrics() {
            metrics.add_cached_put(now.wrapping_sub(posted), new.write_bytes());
        }
        self.region.proof_by_store(posted)
    }

    /// Takes and seals a block for a PUT at the cached location, to be posted now. `None` if no
    /// location is cached or proved, or if no block is free at once. An error if the client does
    /// not trust the server any more (invariant I24).
    #[inline]
    pub fn cached_put(&self, lifetime: Lifetime) -> ProtocolResult<Option<CachedPut<'e>>> {
        self.cached_put_by(|taken| self.seal_block(taken, self.input(), lifetime))
    }

    /// As [`Operation::cached_put`]. `seal` fills in the block.
    #[inline(always)]
    pub(super) fn cached_put_by(
        &self,
        seal: impl FnOnce(TakenBlock) -> ProtocolResult<NewBlock>,
    ) -> ProtocolResult<Option<CachedPut<'e>>> {
        let (located, posted) = (self.cached_location(), self.now());
        let Some((entry, target)) = located else { return Ok(None) };
        self.handle().check_trust(posted)?;
        if !self.is_proved(&target, posted) || entry.1.is_head() {
            return Ok(None);
        }
        if self.engine.endpoint.is_alone() || self.value_bytes >= LONG_VALUE_BYTES {
            // Otherwise the chain is executed later than posted, and the post prefetches. Behind
            // the memory of a long block it would do so too late.
            self.prefetch(&target);
        }
        let Some(taken) = self.try_take_block(posted) else { return Ok(None) };
        let new = seal(taken)?;
        let desired = target.word.live(*new.block, new.expires());
        Ok(Some(CachedPut { entry, target, new, desired, posted }))
    }

    /// Posts the chain of [`Operation::cached_put`].
    #[inline]
    pub fn post_cached_put(&self, put: &CachedPut<'_>) -> ProtocolResult<InFlight<'e>> {
        let CachedPut { target, new, desired, posted, .. } = put;
        let post = self.post_swing(target, Some(new), *desired, *posted);
        post.inspect_err(|failure| self.release_unlinked(new, Some(failure)))
    }

    /// The chain of [`Operation::cached_put`], to be posted now, and its deadline. All of the block
    /// but a head of so many bytes is in lent memory.
    pub(super) fn split_chain_of(
        &self,
        CachedPut { target, new, desired, posted, .. }: &CachedPut<'_>,
        head_bytes: u32,
    ) -> ProtocolResult<([Verb; 3], Nanos)> {
        let unlink = self.unlinking_chain(target, new, *desired);
        let [mark, cas] =
            unlink.inspect_err(|failure| self.release_unlinked(new, Some(failure)))?;
        let chain = [new.write_split(head_bytes), mark, cas];
        Ok((chain, posted.saturating_add(self.region.constants.lateness_ns)))
    }

    /// Evaluates the result of a chain of [`Operation::post_cached_put`]. Returns `None` if the
    /// value is stored.
    #[inline]
    pub fn complete_cached_put(
        &self,
        put: &CachedPut<'_>,
        result: Result<u64, ChainError>,
    ) -> ProtocolResult<Option<SwingResult>> {
        let CachedPut { entry, target, new, posted, .. } = put;
        match self.finish_swing(target, Some(new), result) {
            Ok(Ok(now)) => {
                self.region.lookups.note_hit();
                let proved_at = self.proof_by_cached_put(new, *posted, now);
                self.region.cache.replace(self.hash, *entry, new.replacement(entry.1), proved_at);
                self.region.allocator().held_blocks.drop_new(self.lane);
                Ok(None)
            }
            Ok(Err(swung)) => Ok(Some(swung)),
            Err(failure) => {
                self.release_unlinked(new, Some(&failure));
                Err(failure)
            }
        }
    }
}

impl<F: Fabric> Operation<'_, F> {
    /// Stores the value, whether or not the key is present. One round trip if the key's location is
    /// cached; two if not; three for a new key, or if another session replaced a cached value.
    pub async fn put(&self, lifetime: Lifetime) -> ProtocolResult<Answer> {
        self.store(Condition::None, lifetime, self.input()).await
    }

    /// Stores the value if the key is present. Round trips as for
    /// `put`, and one more if the old value may expire.
    pub async fn update(&self, lifetime: Lifetime) -> ProtocolResult<Answer> {
        self.store(Condition::Present, lifetime, self.input()).await
    }

    /// Stores the value if the key is absent. Three round trips, or two
    /// where the index has much room. One if the key is present, and one more if its value may
    /// expire.
    pub async fn insert(&self, lifetime: Lifetime) -> ProtocolResult<Answer> {
        self.store(Condition::Absent, lifetime, self.input()).await
    }

    /// Stores the value of this image, if the condition holds. A store also counts if another PUT
    /// has overwritten it at once; then it has no version.
    pub(super) async fn store(
        &self,
        condition: Condition,
        lifetime: Lifetime,
        image: Image,
    ) -> ProtocolResult<Answer> {
        let (taken, image) = self.take_block(image, lifetime).await?;
        self.store_taken(condition, lifetime, taken, image).await
    }

    /// As [`Operation::store`], in a block that was taken for this image.
    pub(super) async fn store_taken(
        &self,
        condition: Condition,
        lifetime: Lifetime,
        taken: TakenBlock,
        image: Image,
    ) -> ProtocolResult<Answer> {
        // Only after the wait for a block, during which other lanes may change the cached location.
        let cached = if condition == Condition::Absent { None } else { self.cached_target() };
        if let Some(target) = &cached {
            self.prefetch(target);
        }
        let new = self.seal_block(taken, image, lifetime)?;
        let mut condition_held = true;
        let swung = self.swing_cached(&new, condition, cached).await;
        let outcome = self.store_block(&new, condition, swung, &mut condition_held).await;
        let fate = self.release_new_block(&new, outcome)?;
        Ok(Answer::of_store(fate, &new, condition_held))
    }

    /// Continues a PUT from the result of its chain at the cached location.
    pub async fn put_after(&self, displaced: DisplacedPut) -> ProtocolResult<Answer> {
        let DisplacedPut { target, new, posted, swung } = displaced;
        let swung = self.after_swing(&target, posted, swung).await;
        let outcome = self.store_block(&new, Condition::None, swung, &mut true).await;
        Ok(Answer::of_store(self.release_new_block(&new, outcome)?, &new, true))
    }

    /// Stores the value from the result of [`Operation::swing_cached`] on.
    async fn store_block(
        &self,
        new: &NewBlock,
        condition: Condition,
        swung: ProtocolResult<CachedSwing>,
        condition_held: &mut bool,
    ) -> ProtocolResult<BlockFate> {
        let mut first_lookup = match swung? {
            CachedSwing::Done => return Ok(BlockFate::Linked),
            CachedSwing::Replaced(target) => Some((target.proved_at, KeyLookup::Present(target))),
            CachedSwing::Unknown => None,
        };
        let (mut damaged, mut tries) = (0, RetryState::default());
        let mut seen = ObservedWindow::unread();
        if condition == Condition::Absent && self.region.may_claim_blindly(self.hash) {
            match self.insert_blindly(new, &mut seen, &mut damaged).await? {
                BlindInsert::Done => return Ok(BlockFate::Linked),
                BlindInsert::LookedUp(lookup) => first_lookup = Some((seen.posted, lookup)),
                BlindInsert::Retry => {}
            }
        }
        loop {
            let (mut seen_at, mut lookup) = match first_lookup.take() {
                Some(first_lookup) => first_lookup,
                None => {
                    let lookup = self.locate(&mut seen, &mut damaged).await?;
                    (seen.posted, lookup)
                }
            };
            if let (KeyLookup::Absent, Condition::None | Condition::Absent) = (&lookup, condition) {
                match self.insert_block(&seen, new, condition).await? {
                    Inserted::Done => return Ok(BlockFate::Linked),
                    Inserted::Present(target, posted) => {
                        (lookup, seen_at) = (KeyLookup::Present(target), posted);
                    }
                    // Look again: an unfinished INSERT may leave its slot EMPTY. The attempts are
                    // limited, because its client may be stopped.
                    Inserted::Undecided if tries.attempts < UNDECIDED_ATTEMPTS => {
                        lookup = KeyLookup::Retry
                    }
                    Inserted::Undecided | Inserted::Full => {
                        if !self.grow(&seen, &mut tries).await? {
                            continue;
                        }
                        lookup = KeyLookup::Retry;
                    }
                    Inserted::Retry => lookup = KeyLookup::Retry,
                    Inserted::Filling => {
                        self.wait_or_grow(&seen, &mut tries).await?;
                        continue;
                    }
                }
            }
            if let KeyLookup::Present(target) = &mut lookup
                && condition != Condition::None
            {
                match self.target_has_expired(target, seen_at).await? {
                    None => lookup = KeyLookup::Retry,
                    // An INSERT found a value, or an UPDATE found an expired one.
                    Some(expired) if expired == (condition == Condition::Present) => {
                        if condition == Condition::Absent {
                            // Blind claims would be in vain for such keys. So the next INSERTs
                            // READ first.
                            self.region.unused_share.set(0);
                        }
                        *condition_held = false;
                        return Ok(BlockFate::Unused);
                    }
                    Some(_) => {}
                }
            }
            match (lookup, condition) {
                (KeyLookup::Absent, _) => {
                    *condition_held = false;
                    return Ok(BlockFate::Unused);
                }
                (KeyLookup::Present(target), _) => {
                    match self.swing_to(&target, new, condition, self.now()).await? {
                        SwingResult::Done => return Ok(BlockFate::Linked),
                        // Overwritten before any GET could see it: this PUT is linearized just
                        // before the one that overwrote it.
                        SwingResult::Lost(found)
                            if condition == Condition::None
                                && self.was_overwritten(&target, found, seen_at) =>
                        {
                            return Ok(BlockFate::Unused);
                        }
                        SwingResult::Lost(_) | SwingResult::Late => {}
                    }
                }
                (KeyLookup::Moving, _) => {
                    self.wait_for_split(&mut tries).await?;
                    continue;
                }
                (KeyLookup::Retry, _) => {}
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// Whether the value of a word from a READ posted at `seen_at` had expired. One round trip if
    /// the word leaves it open, none otherwise. `None` if the READ took too long.
    async fn target_has_expired(
        &self,
        target: &mut ProvenSlot,
        seen_at: Nanos,
    ) -> ProtocolResult<Option<bool>> {
        if target.expires_at_ms.is_none() {
            match self.read_and_examine(target.word, seen_at).await? {
                BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                    *target = target.read(&found, header);
                }
                // The hint was exact, so the slot is the key's. A damaged block counts as one
                // without an expiry.
                BlockRead::Examined(_) => {}
                BlockRead::Stale => return Ok(None),
            }
        }
        Ok(Some(self.has_expired(target.expires_at_ms.unwrap_or_default(), seen_at)))
    }

    /// Stores the value at the cached location. One round trip if the location is right; one more
    /// if another session has replaced the value. An UPDATE must not replace an expired value: one
    /// more round trip if the value may expire.
    async fn swing_cached(
        &self,
        new: &NewBlock,
        condition: Condition,
        mut cached: Option<ProvenSlot>,
    ) -> ProtocolResult<CachedSwing> {
        if condition == Condition::Absent {
            return Ok(CachedSwing::Unknown);
        }
        let may_expire = |target: ProvenSlot| target.expires_at_ms.is_none();
        if condition == Condition::Present && cached.is_some_and(may_expire) {
            let located = self.find().await?.and(self.located_target());
            cached = located.filter(|target| !is_moving(target.word));
        }
        let Some(target) = &cached else {
            self.region.lookups.note_miss();
            return Ok(CachedSwing::Unknown);
        };
        let posted = self.now();
        let swung = self.swing_to(target, new, condition, posted).await?;
        self.after_swing(target, posted, swung).await
    }

    /// Evaluates the result of a swing at the cached location, which was posted at `posted`.
    async fn after_swing(
        &self,
        target: &ProvenSlot,
        posted: Nanos,
        swung: SwingResult,
    ) -> ProtocolResult<CachedSwing> {
        let replaced = match swung {
            SwingResult::Done => {
                self.region.lookups.note_hit();
                return Ok(CachedSwing::Done);
            }
            SwingResult::Lost(found) => self.adopt_replacement(target, found, posted).await?,
            SwingResult::Late => None,
        };
        self.region.lookups.note_miss();
        Ok(replaced.map_or(CachedSwing::Unknown, CachedSwing::Replaced))
    }

    /// Swings the slot to the new block.
    async fn swing_to(
        &self,
        target: &ProvenSlot,
        new: &NewBlock,
        condition: Condition,
        posted: Nanos,
    ) -> ProtocolResult<SwingResult> {
        // The word of a value with a TTL is conditional (invariant I19).
        let conditional = condition != Condition::None || new.expires();
        let desired = target.word.live(*new.block, conditional);
        self.swing(target, Some(new), desired, posted).await
    }
}
