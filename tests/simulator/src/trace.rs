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

/// Returns the name of the word at this offset of the region, and what this value of it means.
pub(crate) fn describe(region: &SimRegion, offset: u64, value: u64) -> [String; 2] {
    let subtable = if region.has_splits() { region.name_of(offset) } else { "" };
    if let Some((_, slot, is_hint)) = region.slot_at(offset) {
        return match is_hint {
            false => [format!("slot {subtable}{slot}"), word(region, value)],
            true => [format!("hint {subtable}{slot}"), hint(value)],
        };
    }
    if let Some((_, row, at)) = region.header_at(offset) {
        let mut words = [0; 2];
        words[at as usize] = value;
        let header: RowHeader = zerocopy::transmute!(words);
        return match (at, header.forward()) {
            (0, _) => [format!("header {subtable}{row}"), prefix(&header)],
            (_, forward) => {
                let forward = forward.map(|to| to.map(|offset| region.name_of(offset)).join(", "));
                [format!("forward {subtable}{row}"), forward.unwrap_or("none".to_owned())]
            }
        };
    }
    if let Some(entry) = region.directory_at(offset) {
        let leads = DirectoryEntry::from_bits(value);
        let (to, bits) = (region.name_of(leads.offset()), leads.local_depth());
        return [format!("directory {entry}"), format!("{to}, {bits} bits")];
    }
    match region.block_at(offset) {
        Some((block, 0)) => {
            let header = HeaderWord::from_bits(value);
            let mark = if header.mark.is_set() { ", superseded" } else { "" };
            [format!("block {block} header"), format!("generation {}{mark}", header.generation)]
        }
        Some((block, word @ (4 | 5))) => {
            let printable = |byte: u8| if byte.is_ascii_graphic() { char::from(byte) } else { '.' };
            let part = if word == 4 { "key" } else { "value" };
            [format!("block {block} {part}"), value.to_le_bytes().map(printable).iter().collect()]
        }
        Some((block, word)) => [format!("block {block} word {word}"), format!("{value:#x}")],
        None => [format!("offset {offset:#x}"), format!("{value:#x}")],
    }
}

fn prefix(header: &RowHeader) -> String {
    if !header.is_valid() {
        return "none".to_owned();
    }
    let (bits, prefix) = (header.local_depth, header.prefix.get());
    let filling = if header.is_filling() { ", filling" } else { "" };
    format!("prefix {prefix:b} of {bits} bits{filling}")
}

fn word(region: &SimRegion, bits: u64) -> String {
    let word = SlotWord::from_bits(bits);
    let incarnation = word.incarnation();
    let conditional = if word.is_conditional() { " cond" } else { "" };
    let block = word.block().ok().and_then(|block| {
        let (number, _) = region.block_at(block.address.claimed_offset())?;
        Some(format!(" block {number}.{}", block.generation_low))
    });
    let state = format!("{:?}", word.state()).to_uppercase();
    match word == word.emptied() {
        true => format!("EMPTY({incarnation})"),
        false => format!("{state}({incarnation}){conditional}{}", block.unwrap_or_default()),
    }
}

fn hint(value: u64) -> String {
    let mut hints = (0..keys().len()).flat_map(|key| (0..64).map(move |number| (key, number)));
    match hints.find(|(key, incarnation)| hash(&keys()[*key]).hint(*incarnation) == value) {
        Some((key, incarnation)) => format!("H(k{key}, {incarnation})"),
        None => format!("{value}"),
    }
}
