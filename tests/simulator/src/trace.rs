//! The readable trace of an execution.

use farside_fabric::Nanos;
use farside_layout::{DirectoryEntry, HeaderWord, RowHeader, SlotWord};

use crate::region::{SimRegion, hash, keys};

/// One event of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) now: Nanos,
    /// The process that caused it; `None` if the clock jumped.
    pub(crate) process: Option<usize>,
    pub(crate) text: String,
}

/// Describes the word at this offset of the region, with this value.
pub(crate) fn describe(region: &SimRegion, offset: u64, value: u64) -> String {
    let subtable = if region.splits() { region.name_of(offset) } else { "" };
    if let Some((_, slot, is_hint)) = region.slot_at(offset) {
        return match is_hint {
            false => format!("slot {subtable}{slot} = {}", word(region, value)),
            true => format!("hint {subtable}{slot} = {}", hint(value)),
        };
    }
    if let Some((_, row, at)) = region.header_at(offset) {
        let mut words = [0; 2];
        words[at as usize] = value;
        let header: RowHeader = zerocopy::transmute!(words);
        return match (at, header.forward()) {
            (0, _) if !header.is_valid() => format!("place {subtable}{row} = none"),
            (0, _) => {
                let (bits, prefix) = (header.local_depth, header.prefix.get());
                let filling = if header.is_filling() { ", filling" } else { "" };
                format!("place {subtable}{row} = prefix {prefix:b} of {bits} bits{filling}")
            }
            (_, None) => format!("forward {subtable}{row} = none"),
            (_, Some(to)) => {
                let [one, other] = to.map(|offset| region.name_of(offset));
                format!("forward {subtable}{row} = {one}, {other}")
            }
        };
    }
    if let Some(entry) = region.directory_at(offset) {
        let leads = DirectoryEntry::from_bits(value);
        let (to, bits) = (region.name_of(leads.offset()), leads.local_depth());
        return format!("directory {entry} = {to}, {bits} bits");
    }
    match region.block_at(offset) {
        Some((block, 0)) => {
            let header = HeaderWord::from_bits(value);
            let mark = if header.mark.is_set() { ", superseded" } else { "" };
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

fn word(region: &SimRegion, bits: u64) -> String {
    let word = SlotWord::from_bits(bits);
    let incarnation = word.incarnation();
    let conditional = if word.is_conditional() { " cond" } else { "" };
    let block = word.block().ok();
    let block = block.and_then(|block| {
        let (number, _) = region.block_at(block.address.offset())?;
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
        let hash = hash(key);
        (0..64).find(|incarnation| hash.hint(*incarnation) == value).map(|inc| (at, inc))
    });
    match found {
        Some((key, incarnation)) => format!("H(k{key}, {incarnation})"),
        None => format!("{value}"),
    }
}
