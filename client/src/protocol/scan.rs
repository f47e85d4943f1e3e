//! Reading a subtable and its blocks, slot by slot.

use std::num::NonZeroU32;

use farside_common::fabric::{Buffer, Fabric, LaneId, Verb};
use farside_common::layout::{
    Block, BlockAddress, BlockRef, Row, SLOTS_PER_ROW, SUBTABLE_BYTES, Slot, SlotState, SlotWord,
    slot_in_subtable,
};
use zerocopy::FromBytes;

use super::{Outcome, read_block};
use crate::allocator::Depot;
use crate::engine::Engine;
use crate::{Entry, Error, Value, Version};

/// A LIVE slot as a scan saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScannedSlot {
    slot: u64,
    word: SlotWord,
}

impl ScannedSlot {
    /// The block it linked; `None` if the word is damaged.
    pub(crate) fn block(&self) -> Option<BlockRef> {
        self.word.block().ok()
    }
}

/// How often a scan follows a slot whose value is replaced under its eyes.
const FOLLOWS_MAX: u32 = 64;
/// How often a scan READs a block that seems damaged under a word that stays, before it says so.
const DAMAGE_READS_MAX: u32 = 3;

/// READs a subtable; appends its LIVE slots. One round trip.
pub(crate) async fn read_subtable<F: Fabric, D: Depot>(
    engine: &Engine<F, D>,
    lane: LaneId,
    subtable: u64,
    slots: &mut Vec<ScannedSlot>,
) -> Outcome<()> {
    let bytes = SUBTABLE_BYTES as u32;
    let read = Verb::Read { remote: subtable, into: Buffer::Block, bytes };
    engine.endpoint.chain(lane, &[read], u64::MAX).await?;
    let block = engine.endpoint.buffer(lane, Buffer::Block);
    let rows = <[Row]>::ref_from_bytes(&block[..SUBTABLE_BYTES as usize]).unwrap_or_default();
    for (row, content) in rows.iter().enumerate() {
        for at in 0..SLOTS_PER_ROW {
            let word = content.slots[at].word();
            if matches!(word.state(), SlotState::Live | SlotState::Frozen) {
                slots.push(ScannedSlot { slot: subtable + slot_in_subtable(row, at), word });
            }
        }
    }
    Ok(())
}

/// READs the entry of a slot; `None` if it has none any more. One round trip, one more for each
/// time the value was replaced meanwhile.
pub(crate) async fn read_entry<F: Fabric, D: Depot>(
    engine: &Engine<F, D>,
    lane: LaneId,
    ScannedSlot { slot, mut word }: ScannedSlot,
) -> Outcome<Option<Entry>> {
    let mut damaged = 0;
    for _ in 0..FOLLOWS_MAX {
        let reference = word.block()?;
        engine.geometry.check_block(reference)?;
        let posted = engine.endpoint.now();
        // The word in the same round trip, before the block: it was linked when the block was READ.
        let read_slot = Verb::Read { remote: slot, into: Buffer::Window, bytes: 16 };
        let chain = [read_slot, read_block(reference)];
        engine.endpoint.chain(lane, &chain, u64::MAX).await?;
        let took = engine.endpoint.now().saturating_sub(posted);
        let fabric = engine.endpoint.fabric();
        let Ok((now, _)) = Slot::read_from_prefix(fabric.buffer(lane, Buffer::Window)) else {
            return Ok(None);
        };
        if !matches!(now.word().state(), SlotState::Live | SlotState::Frozen) {
            return Ok(None);
        }
        if now.word() != word || took > engine.constants.patience_ns {
            (word, damaged) = (now.word(), 0);
            continue;
        }
        let bytes = &fabric.buffer(lane, Buffer::Block)[..reference.class.block_bytes() as usize];
        match Block::decode(bytes, reference.address) {
            Ok(block) => {
                let wall_s = fabric.wall_clock_ns() / 1_000_000_000;
                let expires_at_s = NonZeroU32::new(block.expires_at_s()).map(NonZeroU32::get);
                if expires_at_s.is_some_and(|end| u64::from(end) <= wall_s) {
                    return Ok(None);
                }
                return Ok(Some(entry(&block, reference.address, expires_at_s)));
            }
            Err(error) => {
                damaged += 1;
                if damaged == DAMAGE_READS_MAX {
                    return Err(error.into());
                }
            }
        }
    }
    Err(Error::Contended { attempts: FOLLOWS_MAX }.into())
}

fn entry(block: &Block<'_>, address: BlockAddress, expires_at_s: Option<u32>) -> Entry {
    let version = Version::of(address, block.header_word().generation);
    let value = Value { data: block.value().to_vec(), version };
    Entry { key: block.key().to_vec(), value, expires_at_s }
}
