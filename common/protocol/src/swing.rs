//! The sealing of new blocks, and the chain that swings a slot from one block to another.

use std::cell::Cell;

use farside_fabric::{Buffer, ChainError, Fabric, InFlight, Nanos, Verb};
use farside_layout::{
    BLOCK_HEADER_BYTES, BlockHeader, BlockRef, BlockStamp, FreeBlock, HeaderWord, Mark, NamedBlock,
    SizeClass, SlotState, SlotWord, WINDOW_BYTES, WORD_GENERATIONS, class_for, seal, seal_again,
};
use zerocopy::FromBytes;

use super::{Operation, ProtocolResult, ProvenSlot};
use crate::allocator::TakeResult;
use crate::failure::Failure;
use crate::image::Image;
use crate::location_cache::Location;
use crate::new_block::{BlockFate, NewBlock};
use crate::{Lifetime, OperationError};

/// The number of bytes of a slot, and of an old block, that a swing changes.
const WORD_BYTES: u32 = 8;

/// A free block that this operation has taken.
pub(super) struct TakenBlock {
    free: FreeBlock,
    class: SizeClass,
    /// Whether the class is larger than necessary.
    is_larger: bool,
    taken_at: Nanos,
}

/// The result of a swing.
#[derive(Clone, Copy, Debug)]
pub enum SwingResult {
    /// The slot leads to the new block.
    Done,
    /// The slot had this word instead.
    Lost(SlotWord),
    /// The compare-and-swap was not executed, because it would have been too late.
    Late,
}

impl<'e, F: Fabric> Operation<'e, F> {
    /// Takes a free block of the class for key and value. `None` if there is none at this time.
    #[inline(always)]
    pub(super) fn try_take_block(&self, now: Nanos) -> Option<TakenBlock> {
        let class = class_for(self.key_bytes, self.value_bytes)?;
        if class > self.region.extent_shape.class_max {
            return None;
        }
        match self.handle().try_take_block(self.lane, class, now) {
            TakeResult::Block(free) => {
                Some(TakenBlock { free, class, is_larger: false, taken_at: now })
            }
            _ => None,
        }
    }

    /// Takes a free block for this image. If the value is too long for a block, WRITEs its extents
    /// first. Also returns the image to seal: that of the head, if there is one.
    pub(super) async fn take_block(
        &self,
        image: Image,
        lifetime: Lifetime,
    ) -> ProtocolResult<(TakenBlock, Image)> {
        let class = self.class_in_slot(image.value_bytes)?;
        let image = match class.is_head() {
            true => self.write_extents(image, lifetime).await?,
            false => image,
        };
        self.take_block_of(class, image).await
    }

    /// Takes a free block of this class. If there is none, puts back the extents that are written.
    pub(super) async fn take_block_of(
        &self,
        class: SizeClass,
        image: Image,
    ) -> ProtocolResult<(TakenBlock, Image)> {
        let taken = self.handle().take_block(self.lane, class).await;
        if taken.is_err() && class.is_head() {
            self.region.allocator().put_back_extents(self.lane);
        }
        let (free, found, taken_at) = taken?;
        Ok((TakenBlock { free, class: found, is_larger: found > class, taken_at }, image))
    }

    /// Seals an image for a block that was taken: writes its header, and zeros behind its value.
    #[inline(always)]
    pub(super) fn seal_block(
        &self,
        taken: TakenBlock,
        image: Image,
        lifetime: Lifetime,
    ) -> ProtocolResult<NewBlock> {
        let Image { at, value_bytes } = image;
        let value_field = match taken.is_larger {
            true => taken.class.value_field(self.key_bytes, value_bytes),
            false => value_bytes as u32,
        };
        let (new, stamp) = self.stamp_block(taken, image, lifetime)?;
        let total = BLOCK_HEADER_BYTES as usize + self.key_bytes + value_bytes;
        let write_bytes = new.write_bytes as usize;
        let mut fabric = self.engine.endpoint.fabric_mut();
        // Also if the buffer is longer: it may have to move back into registered memory.
        fabric.reserve(self.lane, Buffer::NewBlock, at + write_bytes);
        let image = &mut fabric.buffer_mut(self.lane, Buffer::NewBlock)[at..];
        if total < write_bytes {
            image[total..write_bytes].fill(0);
        }
        seal(image, self.key_bytes as u16, value_field, stamp)?;
        Ok(new)
    }

    /// The new block that gets this image, and the fields of its header.
    #[inline(always)]
    pub(super) fn stamp_block(
        &self,
        taken: TakenBlock,
        Image { at, value_bytes }: Image,
        lifetime: Lifetime,
    ) -> ProtocolResult<(NewBlock, BlockStamp)> {
        let TakenBlock { free, class, taken_at, .. } = taken;
        let generation_low = (u64::from(free.generation) % WORD_GENERATIONS) as u8;
        let block = NamedBlock { address: free.address, class, generation_low };
        let block = self.region.geometry.check_free_block(block)?;
        let expires_at_ms = if lifetime.never_expires() {
            0
        } else {
            self.region.allocator().announce_expiry();
            lifetime.expires_at_ms(self.engine.endpoint.fabric().wall_clock_ns())
        };
        let stamp = BlockStamp {
            address: free.address,
            generation: free.generation,
            writer: self.region.client_id,
            written_at_ms: self.engine.estimated_wall_clock_ns(taken_at) / 1_000_000,
            expires_at_ms,
            is_pinned: lifetime.is_pinned,
        };
        let total = BLOCK_HEADER_BYTES as usize + self.key_bytes + value_bytes;
        let (write_bytes, written) = (total.next_multiple_of(8) as u32, Cell::new(false));
        Ok((NewBlock { free, block, expires_at_ms, at: at as u32, write_bytes, written }, stamp))
    }

    /// Makes the image of a new block whole again, for a chain that WRITEs all of it: the last
    /// chain may have taken the value from the caller's memory.
    #[cold]
    pub(super) fn restage(&self, new: &NewBlock, key: &[u8], value: &[u8]) -> ProtocolResult<()> {
        Self::fill(self.engine, self.lane, key, value);
        let total = BLOCK_HEADER_BYTES as usize + key.len() + value.len();
        let mut fabric = self.engine.endpoint.fabric_mut();
        fabric.reserve(self.lane, Buffer::NewBlock, new.write_bytes as usize);
        let image = fabric.buffer_mut(self.lane, Buffer::NewBlock);
        image[total..new.write_bytes as usize].fill(0);
        Ok(seal_again(image, new.free.address)?)
    }

    /// Puts a new block back into the lists if no slot leads to it. Sets it aside if that is
    /// unknown: the chain may have linked it, or a lost connection may have left a PENDING word.
    #[inline]
    pub(super) fn release_new_block(
        &self,
        new: &NewBlock,
        outcome: ProtocolResult<BlockFate>,
    ) -> ProtocolResult<BlockFate> {
        match &outcome {
            Ok(BlockFate::Linked) => {
                let allocator = self.region.allocator();
                allocator.held_blocks.drop_new(self.lane);
                if new.block.class.is_head() {
                    allocator.held_blocks.drop_new_extents(self.lane);
                    drop(allocator);
                    self.note_own_head(new.free, new.at as usize);
                }
            }
            Ok(BlockFate::Unused) => self.release_unlinked(new, None),
            Err(failure) => self.release_unlinked(new, Some(failure)),
        }
        outcome
    }

    #[cold]
    pub(super) fn release_unlinked(&self, new: &NewBlock, failure: Option<&Failure>) {
        let mut allocator = self.region.allocator();
        let is_unknown = match failure {
            None | Some(Failure::NoAnswer(_)) => false,
            Some(Failure::Lost(_)) => true,
            Some(Failure::Error(error)) => matches!(**error, OperationError::Indeterminate),
        };
        let has_extents = new.block.class.is_head();
        if is_unknown {
            allocator.held_blocks.set_aside_new(self.lane);
            if has_extents {
                allocator.held_blocks.set_aside_new_extents(self.lane);
            }
        } else {
            allocator.put_back(self.lane, new.block.class, new.free);
            if has_extents {
                allocator.put_back_extents(self.lane);
            }
        }
    }

    /// Swings a slot to the new block: `[WRITE new][WRITE mark of the old][CAS slot]`, one round
    /// trip. The mark comes before the CAS: invariant I2. Without `new` it only unlinks the old
    /// block. `posted` is the present time.
    ///
    /// Posts nothing if the proof of the word is older than T_word. When the chain takes effect,
    /// the same word could be another key's (invariant I4).
    pub(super) async fn swing(
        &self,
        target: &ProvenSlot,
        new: Option<&NewBlock>,
        desired: SlotWord,
        posted: Nanos,
    ) -> ProtocolResult<SwingResult> {
        if target.word.block()?.class.is_head() {
            return self.swing_from_head(target, new, desired).await;
        }
        self.swing_from(target, new, desired, posted).await
    }

    /// Swings a slot whose block is a head: learns its extents before, and retires them after
    /// (invariant I27).
    async fn swing_from_head(
        &self,
        target: &ProvenSlot,
        new: Option<&NewBlock>,
        desired: SlotWord,
    ) -> ProtocolResult<SwingResult> {
        let target = self.hold_old_extents(target).await?;
        let now = self.now();
        let swung = self.swing_from(&target, new, desired, now).await;
        let held_blocks = || self.region.allocator().held_blocks.clone();
        match &swung {
            Ok(SwingResult::Done) => self.free_old_head(target.word.block()?),
            Ok(SwingResult::Lost(_) | SwingResult::Late) => {
                held_blocks().drop_old_extents(self.lane);
            }
            Err(_) => held_blocks().set_aside_old_extents(self.lane),
        }
        swung
    }

    async fn swing_from(
        &self,
        target: &ProvenSlot,
        new: Option<&NewBlock>,
        desired: SlotWord,
        posted: Nanos,
    ) -> ProtocolResult<SwingResult> {
        if !self.is_proved(target, posted) {
            return Ok(SwingResult::Late);
        }
        self.handle().check_trust(posted)?;
        let swing = self.post_swing(target, new, desired, posted)?;
        let result = swing.await;
        if let Err(swung) = self.finish_swing(target, new, result)? {
            return Ok(swung);
        }
        match new {
            Some(new) => self.remember(target.slot, desired, new, posted),
            None => self.region.cache.forget_word(self.hash, target.word),
        }
        Ok(SwingResult::Done)
    }

    /// Posts the chain of [`Operation::swing`]. The word must be proved at this time.
    #[inline(always)]
    pub(super) fn post_swing(
        &self,
        target: &ProvenSlot,
        new: Option<&NewBlock>,
        desired: SlotWord,
        posted: Nanos,
    ) -> ProtocolResult<InFlight<'e>> {
        let (old, [mark, cas]) = self.unlink_verbs(target, new, desired)?;
        let write = new.filter(|new| !new.written.replace(true)).map(NewBlock::write);
        // The block's next content has its generation plus one, so an unknown generation is READ
        // along, with the key, which proves that the block is the word's. A DELETE also has to
        // report whether the value had expired.
        let reads_header =
            target.generation.is_none() || new.is_none() && target.expires_at_ms.is_none();
        self.region.allocator().held_blocks.hold_old(self.lane, old.address);
        match write {
            Some(write) if !reads_header => Ok(self.post(&[write, mark, cas], posted)),
            _ => {
                let key_end = (BLOCK_HEADER_BYTES as usize + self.key_bytes).next_multiple_of(8);
                let bytes = (key_end as u64).min(old.class.block_bytes()) as u32;
                let remote = old.offset();
                let header = Verb::Read { remote, into: Buffer::ReadBlock, bytes };
                let chain = [write.unwrap_or(mark), mark, cas, header];
                let chain = &chain[usize::from(write.is_none())..3 + usize::from(reads_header)];
                Ok(self.post(chain, posted))
            }
        }
    }

    /// The block that a swing unlinks, and the last two verbs of its chain.
    #[inline(always)]
    fn unlink_verbs(
        &self,
        target: &ProvenSlot,
        new: Option<&NewBlock>,
        desired: SlotWord,
    ) -> ProtocolResult<(BlockRef, [Verb; 2])> {
        let old = match target.generation {
            // Known only of a block that was checked, and READ.
            Some(_) => BlockRef::unpacked(target.word.block()?),
            None => self.region.geometry.block_of(target.word)?,
        };
        let cas = Verb::CompareSwap {
            remote: target.slot,
            expected: target.word.bits(),
            desired: desired.bits(),
        };
        let mark_of = |new: &NewBlock| Mark::superseded_by(new.free.address);
        let value = new.map_or(Mark::SUPERSEDED, mark_of).bits();
        let mark = Verb::WriteU32 { remote: old.offset(), value };
        Ok((old, [mark, cas]))
    }

    /// What follows the WRITE of a block in the chain of [`Operation::post_swing`], for a target
    /// whose generation is known and a block that was not written yet. It must be posted now.
    pub(super) fn unlinking_chain(
        &self,
        target: &ProvenSlot,
        new: &NewBlock,
        desired: SlotWord,
    ) -> ProtocolResult<[Verb; 2]> {
        let (old, unlink) = self.unlink_verbs(target, Some(new), desired)?;
        self.region.allocator().held_blocks.hold_old(self.lane, old.address);
        new.written.set(true);
        Ok(unlink)
    }

    /// Evaluates the result of the chain of [`Operation::post_swing`]. Returns the time if it swung
    /// the slot, and otherwise why not, which is never `Done`. After a swing the caller changes the
    /// location cache.
    #[inline(always)]
    pub(super) fn finish_swing(
        &self,
        target: &ProvenSlot,
        new: Option<&NewBlock>,
        result: Result<u64, ChainError>,
    ) -> ProtocolResult<Result<Nanos, SwingResult>> {
        if !matches!(result, Ok(found) if found == target.word.bits()) {
            return self.swing_failed(target, new, result).map(Err);
        }
        Ok(Ok(self.retire(target.word.block()?, target.generation)))
    }

    #[cold]
    fn swing_failed(
        &self,
        target: &ProvenSlot,
        new: Option<&NewBlock>,
        result: Result<u64, ChainError>,
    ) -> ProtocolResult<SwingResult> {
        let allocator = self.region.allocator();
        match result {
            Ok(found) => {
                allocator.held_blocks.drop_old(self.lane);
                self.region.cache.forget_word(self.hash, target.word);
                Ok(SwingResult::Lost(SlotWord::from_bits(found)))
            }
            Err(ChainError::Late) => {
                allocator.held_blocks.drop_old(self.lane);
                new.inspect(|new| new.written.set(false));
                Ok(SwingResult::Late)
            }
            Err(error) => {
                // With these errors nothing of the chain was executed.
                if matches!(error, ChainError::Unregistered { .. } | ChainError::Denied) {
                    allocator.held_blocks.drop_old(self.lane);
                } else {
                    allocator.held_blocks.set_aside_old(self.lane);
                }
                Err(self.failed(error))
            }
        }
    }

    /// Whether an unconditional PUT replaced the value of `word`, which was READ at `seen_at`, and
    /// left the word `found`.
    ///
    /// None of these counts: a split, which replaces no value; a conditional operation, which
    /// depended on the value before it; a DELETE, which may have reported an expired value as
    /// absent. After T_hint the same incarnation number proves nothing, because numbers recur.
    pub(super) fn was_replaced(&self, word: SlotWord, found: SlotWord, seen_at: Nanos) -> bool {
        self.can_absorb(found, seen_at)
            && found.incarnation() == word.incarnation()
            && self.is_hint_exact(seen_at)
    }

    /// Whether a PUT that lost the slot of a target READ at `seen_at` counts as overwritten.
    ///
    /// It counts if the value was replaced: see [`Self::was_replaced`]. It also counts if the
    /// location cache has `found` as the key's word. That word was not in the slot at the READ, so
    /// its PUT came later, however long ago the READ was (invariant I23).
    pub(super) fn was_overwritten(
        &self,
        target: &ProvenSlot,
        found: SlotWord,
        seen_at: Nanos,
    ) -> bool {
        let is_its = |known: ProvenSlot| {
            (known.slot, known.word) == (target.slot, found) && self.is_proved(&known, self.now())
        };
        self.was_replaced(target.word, found, seen_at)
            || self.can_absorb(found, seen_at) && self.cached_target().is_some_and(is_its)
    }

    /// Whether the word, if it is the key's, is that of a PUT, and a READ posted at `seen_at` is
    /// still valid.
    fn can_absorb(&self, found: SlotWord, seen_at: Nanos) -> bool {
        found.state() == SlotState::Live && !found.is_conditional() && self.is_fresh(seen_at)
    }

    /// Whether the target's word, if it is in the slot at this time, is still the key's (invariant
    /// I4).
    #[inline]
    pub(super) fn is_proved(&self, target: &ProvenSlot, at: Nanos) -> bool {
        at.saturating_sub(target.proved_at) <= self.region.constants.proof_age_ns_max
    }

    /// Prefetches the memory that a swing of this target accesses.
    #[inline(always)]
    pub(super) fn prefetch(&self, target: &ProvenSlot) {
        if let Ok(old) = target.word.block() {
            let fabric = self.engine.endpoint.fabric();
            let region = self.region.index;
            fabric.prefetch(region, target.slot, WORD_BYTES);
            fabric.prefetch(region, old.address.claimed_offset(), WORD_BYTES);
        }
    }

    /// Adds the block that this operation has unlinked to this session's lists. No LIVE word points
    /// to it, and it is in no other list (invariant I1). Returns the time.
    #[inline(always)]
    fn retire(&self, old: NamedBlock, generation: Option<u32>) -> Nanos {
        let now = self.now();
        let read = || self.read_header(old).map(|(generation, _)| generation);
        let Some(generation) = generation.or_else(read) else {
            // Damage: the owner of the block is unknown. If no slot links it, the server finds it.
            self.region.allocator().held_blocks.drop_old(self.lane);
            return now;
        };
        let free = FreeBlock { address: old.address, generation: generation.wrapping_add(1) };
        self.region.allocator().retire(self.lane, old.class, free, now);
        now
    }

    /// Whether the value that a chain unlinked had not expired when the chain was posted, at
    /// `posted`. No round trip: the chain READ the header if the expiry was unknown.
    pub(super) fn was_present(&self, target: &ProvenSlot, posted: Nanos) -> bool {
        let read =
            || self.read_header(target.word.block().ok()?).map(|(_, expires_at_ms)| expires_at_ms);
        // A damaged block counts as present.
        let expires_at_ms = target.expires_at_ms.or_else(read).unwrap_or_default();
        !self.has_expired(expires_at_ms, posted)
    }

    /// Generation and expiry of the word's block, whose header and key were READ. `None` if the
    /// block does not fit the word: a damaged word may lead to another key's block, or into one.
    pub(super) fn read_header(&self, old: NamedBlock) -> Option<(u32, u64)> {
        let fabric = self.engine.endpoint.fabric();
        let block = fabric.buffer(self.lane, Buffer::ReadBlock);
        let image = fabric.buffer(self.lane, Buffer::NewBlock);
        let (header, rest) = BlockHeader::ref_from_prefix(block).ok()?;
        let start = BLOCK_HEADER_BYTES as usize;
        let key = &image[start..start + self.key_bytes];
        // If the header fits, the READ went as far as the end of the key.
        let is_ours = header.fits(old.class, self.key_bytes) && rest.starts_with(key);
        let (words, _) = block.as_chunks();
        let generation = HeaderWord::from_bits(u64::from_le_bytes(words[0])).generation;
        let is_ours = is_ours && old.has_generation(generation);
        is_ours.then(|| (generation, header.expires_at_ms()))
    }

    /// Caches the location of the new block.
    #[inline(always)]
    pub(super) fn remember(&self, slot: u64, word: SlotWord, new: &NewBlock, posted: Nanos) {
        let window = self.window();
        let Some(in_window) = slot.checked_sub(window).filter(|at| *at < WINDOW_BYTES) else {
            // A split moved the window meanwhile.
            return self.region.cache.forget(self.hash);
        };
        let location = Location {
            in_window: in_window as u16,
            word,
            generation: new.free.generation,
            has_stale_mark: false,
            expires: new.expires(),
            padding: new.block.class.padding(new.write_bytes.into()),
            proved_at: self.region.proof_by_store(posted),
        };
        self.region.cache.put(self.hash, location);
    }
}
