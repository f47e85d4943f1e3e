//! Executions as people read them.

use farside_common::fabric::Nanos;
use farside_common::layout::{HeaderWord, SlotWord};

use super::ground::keys;
use super::world::World;

/// One event of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) now: Nanos,
    /// Whose; nobody's when time passes.
    pub(super) process: Option<usize>,
    pub(super) text: String,
}

/// A word of the region and what it holds.
pub(super) fn describe(world: &World, place: usize, value: u64) -> String {
    let offset = world.memory.offset(place);
    if let Some((slot, is_hint)) = world.ground.slot_at(offset) {
        return match is_hint {
            false => format!("slot {slot} = {}", word(world, value)),
            true => format!("hint {slot} = {}", hint(value)),
        };
    }
    match world.ground.block_at(offset) {
        Some((block, 0)) => {
            let header = HeaderWord::from_bits(value);
            let mark = if header.superseded { ", superseded" } else { "" };
            format!("block {block} header = generation {}{mark}", header.generation)
        }
        Some((block, word @ (4 | 5))) => {
            let text: String = value
                .to_le_bytes()
                .iter()
                .map(|byte| if byte.is_ascii_graphic() { char::from(*byte) } else { '.' })
                .collect();
            format!("block {block} {} = {text}", if word == 4 { "key" } else { "value" })
        }
        Some((block, word)) => format!("block {block} word {word} = {value:#x}"),
        None => format!("offset {offset:#x} = {value:#x}"),
    }
}

fn word(world: &World, bits: u64) -> String {
    let word = SlotWord::from_bits(bits);
    let incarnation = word.incarnation();
    let conditional = if word.is_conditional() { " cond" } else { "" };
    let block = word.block().ok();
    let block = block.and_then(|block| {
        let (number, _) = world.ground.block_at(block.address.offset())?;
        Some(format!(" block {number}.{}", block.generation_low))
    });
    let state = format!("{:?}", word.state()).to_uppercase();
    match word == word.emptied() {
        true => format!("EMPTY({incarnation})"),
        false => format!("{state}({incarnation}){conditional}{}", block.unwrap_or_default()),
    }
}

fn hint(value: u64) -> String {
    let found = keys().iter().enumerate().find_map(|(at, key)| {
        let hash = super::ground::hash(key);
        (0..64).find(|incarnation| hash.hint(*incarnation) == value).map(|inc| (at, inc))
    });
    match found {
        Some((key, incarnation)) => format!("H(k{key}, {incarnation})"),
        None => format!("{value}"),
    }
}
