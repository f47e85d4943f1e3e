//! The records of a session's connection. All numbers are little-endian words of 8 bytes.
//!
//! | record | words |
//! |---|---|
//! | request | header, deadline if the chain changes the region, verbs, payloads of the WRITEs |
//! | reply | header, word that the last atomic verb found if there is one, payloads of the READs |
//! | clock | header, time of the server's clock |
//!
//! | word | bits |
//! |---|---|
//! | header | lane: 0-15, verbs or status: 16-23, deadline: 24, words after the header: 32-63 |
//! | first word of a verb | kind: 0-7, length in bytes or four bytes of payload: 32-63 |
//! | second word of a verb | offset in the region |
//! | further words | of a compare-and-swap: expected, desired; of `WriteWord`: the value |
//!
//! A request without verbs asks for the server's clock. The server begins every batch of replies
//! with a clock record, so it needs no other answer.

use crate::lane_state::NO_VERB;
use crate::{Buffer, CHAIN_VERBS_MAX, ChainError, LaneId, Nanos, Verb};

/// The length of a word, in bytes.
pub const WORD_BYTES: usize = size_of::<u64>();
/// Limit on the bytes that the WRITEs of a chain, or its READs, have together. The largest block
/// has 4 MiB and some.
pub(super) const PAYLOAD_BYTES_MAX: usize = 16 << 20;
/// Limit on the words of a request between its header and its payloads: deadline and verbs.
const VERBS_WORDS_MAX: usize = 1 + 4 * CHAIN_VERBS_MAX;
/// Limit on the words of a request after its header.
const REQUEST_WORDS_MAX: usize = VERBS_WORDS_MAX + PAYLOAD_BYTES_MAX / WORD_BYTES;
/// The lane in clock records.
const NO_LANE: u16 = u16::MAX;

const READ: u8 = 1;
const WRITE: u8 = 2;
const WRITE_U32: u8 = 3;
const WRITE_WORD: u8 = 4;
const COMPARE_SWAP: u8 = 5;

const OK: u8 = 0;
const OUTSIDE: u8 = 1;
const DENIED: u8 = 2;
const FENCED: u8 = 3;
const LATE: u8 = 4;
const CLOCK: u8 = 5;
const UNKNOWN: u8 = 6;

/// Why a record cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a malformed record")]
pub struct RecordError;

type Result<T> = std::result::Result<T, RecordError>;

/// The first word of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The lane of the chain.
    pub lane: u16,
    /// The number of verbs of a request, or the status of a reply.
    pub(super) kind: u8,
    /// Whether a deadline follows.
    has_deadline: bool,
    /// The number of words after the header.
    pub words: u32,
}

impl Header {
    #[inline]
    fn bits(self) -> u64 {
        u64::from(self.lane)
            | u64::from(self.kind) << 16
            | u64::from(self.has_deadline) << 24
            | u64::from(self.words) << 32
    }

    /// The header of a reply.
    #[inline]
    fn reply(lane: u16, status: u8, words: u32) -> u64 {
        Self { lane, kind: status, has_deadline: false, words }.bits()
    }

    /// Decodes the first word of a record.
    ///
    /// # Errors
    /// [`RecordError`] if an unused bit is set.
    #[inline]
    pub fn of(word: u64) -> Result<Self> {
        let (lane, kind, words) = (word as u16, (word >> 16) as u8, (word >> 32) as u32);
        let header = Self { lane, kind, has_deadline: word >> 24 & 1 == 1, words };
        if header.bits() == word { Ok(header) } else { Err(RecordError) }
    }

    /// The length of the whole record of a request, in words.
    ///
    /// # Errors
    /// [`RecordError`] if no request is so long.
    #[inline]
    pub fn request_words(self) -> Result<usize> {
        let words = self.words as usize;
        if words <= REQUEST_WORDS_MAX { Ok(words + 1) } else { Err(RecordError) }
    }
}

/// Whether a chain changes the region.
#[inline]
pub fn changes(chain: &[Verb]) -> bool {
    chain.iter().any(|verb| verb.changes_region())
}

/// The number of words in a reply to this chain, after the header.
#[inline]
pub fn reply_words(chain: &[Verb]) -> usize {
    let mut words = usize::from(has_atomic(chain));
    for verb in chain {
        if let Verb::Read { bytes, .. }
        | Verb::ReadPart { bytes, .. }
        | Verb::ReadSplit { bytes, .. } = verb
        {
            words += *bytes as usize / WORD_BYTES;
        }
    }
    words
}

/// Whether the reply to this chain has the word that an atomic verb found.
#[inline]
pub(super) fn has_atomic(chain: &[Verb]) -> bool {
    chain.iter().any(|verb| verb.is_atomic())
}

#[inline]
fn verb_word(kind: u8, high: u32) -> u64 {
    u64::from(kind) | u64::from(high) << 32
}

/// Appends the record of a chain without the payloads of its WRITEs, which follow it. `deadline` is
/// a time of the server's clock.
#[inline]
pub fn encode_request(lane: LaneId, chain: &[Verb], deadline: Nanos, into: &mut Vec<u64>) {
    let at = into.len();
    let mut payload_words = 0;
    into.push(0);
    let has_deadline = changes(chain);
    if has_deadline {
        into.push(deadline);
    }
    for verb in chain {
        match *verb {
            Verb::Read { remote, bytes, .. }
            | Verb::ReadPart { remote, bytes, .. }
            | Verb::ReadSplit { remote, bytes, .. } => {
                into.extend([verb_word(READ, bytes), remote]);
            }
            Verb::Write { remote, bytes, .. }
            | Verb::WritePart { remote, bytes, .. }
            | Verb::WriteSplit { remote, bytes, .. } => {
                payload_words += bytes as usize / WORD_BYTES;
                into.extend([verb_word(WRITE, bytes), remote]);
            }
            Verb::WriteU32 { remote, value } => into.extend([verb_word(WRITE_U32, value), remote]),
            Verb::WriteWord { remote, value } => {
                into.extend([verb_word(WRITE_WORD, 0), remote, value]);
            }
            Verb::CompareSwap { remote, expected, desired } => {
                into.extend([verb_word(COMPARE_SWAP, 0), remote, expected, desired]);
            }
        }
    }
    let words = (into.len() - at - 1 + payload_words) as u32;
    into[at] = Header { lane: lane.0, kind: chain.len() as u8, has_deadline, words }.bits();
}

/// Appends a request for the server's clock.
pub fn encode_clock_request(into: &mut Vec<u64>) {
    into.push(Header { lane: NO_LANE, kind: 0, has_deadline: false, words: 0 }.bits());
}

/// A request, as the server decodes it.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'r> {
    verbs: [Verb; CHAIN_VERBS_MAX],
    count: usize,
    /// A time of the server's clock.
    pub deadline: Nanos,
    /// The payloads of the WRITEs, one after the other.
    pub payload: &'r [u64],
    /// The bytes that its READs and its WRITEs have.
    pub(super) payload_bytes: usize,
}

impl Request<'_> {
    /// The chain; empty in a request for the clock.
    #[inline]
    pub fn chain(&self) -> &[Verb] {
        &self.verbs[..self.count]
    }
}

/// Takes words from the front of a record.
struct Words<'r>(&'r [u64]);

impl Words<'_> {
    #[inline]
    fn take<const N: usize>(&mut self) -> Result<[u64; N]> {
        let (first, rest) = self.0.split_first_chunk().ok_or(RecordError)?;
        self.0 = rest;
        Ok(*first)
    }
}

/// Decodes the request whose header this is, from the words after the header. The buffers of its
/// verbs have no meaning.
///
/// # Errors
/// [`RecordError`] for words that are no request.
#[inline]
pub fn decode_request(header: Header, body: &[u64]) -> Result<Request<'_>> {
    decode(header, body, body.len())
}

/// As [`decode_request`], for a request of whose payload only the beginning has arrived. `None` if
/// more is missing.
///
/// # Errors
/// [`RecordError`] for words that do not begin a request.
pub fn decode_begun_request(header: Header, arrived: &[u64]) -> Result<Option<Request<'_>>> {
    match decode(header, arrived, header.words as usize) {
        Err(error) if arrived.len() >= VERBS_WORDS_MAX => Err(error),
        begun => Ok(begun.ok()),
    }
}

/// Decodes a request of `body_words` words after its header, from those that have arrived.
#[inline(always)]
fn decode(header: Header, body: &[u64], body_words: usize) -> Result<Request<'_>> {
    let count = usize::from(header.kind);
    if count > CHAIN_VERBS_MAX {
        return Err(RecordError);
    }
    let mut words = Words(body);
    let mut verbs = [NO_VERB; CHAIN_VERBS_MAX];
    let deadline = if header.has_deadline { words.take::<1>()?[0] } else { Nanos::MAX };
    let (mut written, mut read, mut has_change) = (0, 0, false);
    for verb in &mut verbs[..count] {
        let [first, remote] = words.take()?;
        let (kind, high) = (first as u8, (first >> 32) as u32);
        if first >> 8 & 0x00ff_ffff != 0 {
            return Err(RecordError);
        }
        *verb = match kind {
            READ => {
                read += high as usize;
                Verb::Read { remote, into: Buffer::ReadBlock, bytes: high }
            }
            WRITE => {
                written += high as usize;
                Verb::Write { remote, from: Buffer::NewBlock, bytes: high }
            }
            WRITE_U32 => Verb::WriteU32 { remote, value: high },
            WRITE_WORD => Verb::WriteWord { remote, value: words.take::<1>()?[0] },
            COMPARE_SWAP => {
                let [expected, desired] = words.take()?;
                Verb::CompareSwap { remote, expected, desired }
            }
            _ => return Err(RecordError),
        };
        if !matches!(kind, READ | WRITE | WRITE_U32) && high != 0
            || matches!(kind, READ | WRITE) && !(high as usize).is_multiple_of(WORD_BYTES)
        {
            return Err(RecordError);
        }
        has_change |= verb.changes_region();
    }
    let payload = words.0;
    let before_payload = body.len() - payload.len();
    let is_whole = body_words == before_payload + written / WORD_BYTES;
    if !is_whole || read.max(written) > PAYLOAD_BYTES_MAX || has_change != header.has_deadline {
        return Err(RecordError);
    }
    Ok(Request { verbs, count, deadline, payload, payload_bytes: read + written })
}

/// A reply that is being written: where its header is.
pub struct PendingReply {
    at: usize,
}

impl PendingReply {
    /// Begins a reply to this chain. The payloads of its READs are appended after it.
    #[inline]
    pub fn begin(chain: &[Verb], into: &mut Vec<u64>) -> Self {
        let at = into.len();
        into.push(0);
        if has_atomic(chain) {
            into.push(0);
        }
        Self { at }
    }

    /// Completes the reply with the chain's result. `more_words` words follow it that are not in
    /// `into`.
    #[inline]
    pub fn finish(
        self,
        lane: u16,
        chain: &[Verb],
        result: &std::result::Result<u64, ChainError>,
        more_words: usize,
        into: &mut Vec<u64>,
    ) {
        let kind = match result {
            Ok(found) => {
                if has_atomic(chain) {
                    into[self.at + 1] = *found;
                }
                OK
            }
            Err(error) => {
                into.truncate(self.at + 1);
                match error {
                    ChainError::Outside { remote, bytes } => {
                        into.extend([*remote, *bytes]);
                        OUTSIDE
                    }
                    ChainError::Denied => DENIED,
                    ChainError::Late => LATE,
                    ChainError::Unknown => UNKNOWN,
                    // The other errors do not come from the execution of a chain.
                    _ => FENCED,
                }
            }
        };
        let words = (into.len() - self.at - 1 + more_words) as u32;
        into[self.at] = Header::reply(lane, kind, words);
    }
}

/// Appends a clock record.
#[inline]
pub fn encode_clock(now: Nanos, into: &mut Vec<u64>) {
    into.extend([Header::reply(NO_LANE, CLOCK, 1), now]);
}

/// The length of a clock record, in words.
pub(super) const CLOCK_WORDS: usize = 2;

/// A record from a server, by its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyKind {
    /// The time of the server's clock.
    Clock,
    /// A chain was executed. The words after the header are its results.
    Executed(LaneId),
    /// A chain failed.
    Failed(LaneId),
}

/// Returns what follows this header.
///
/// # Errors
/// [`RecordError`] if no reply begins like this.
#[inline]
pub fn reply_kind(header: Header) -> Result<ReplyKind> {
    match (header.kind, header.words) {
        _ if header.has_deadline => Err(RecordError),
        (OK, _) => Ok(ReplyKind::Executed(LaneId(header.lane))),
        (OUTSIDE, 2) | (DENIED | FENCED | LATE | UNKNOWN, 0) => {
            Ok(ReplyKind::Failed(LaneId(header.lane)))
        }
        (CLOCK, 1) if header.lane == NO_LANE => Ok(ReplyKind::Clock),
        _ => Err(RecordError),
    }
}

/// Decodes the error in a [`ReplyKind::Failed`], from the words after its header.
#[cold]
pub(super) fn decode_failure(header: Header, body: &[u64]) -> ChainError {
    match (header.kind, body) {
        (OUTSIDE, [remote, bytes]) => ChainError::Outside { remote: *remote, bytes: *bytes },
        (DENIED, _) => ChainError::Denied,
        (LATE, _) => ChainError::Late,
        (UNKNOWN, _) => ChainError::Unknown,
        _ => ChainError::Fenced,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn verbs() -> impl Strategy<Value = Verb> {
        let words = 0u32..40;
        prop_oneof![
            (any::<u64>(), words.clone()).prop_map(|(remote, words)| {
                Verb::Read { remote, into: Buffer::ReadBlock, bytes: words * 8 }
            }),
            (any::<u64>(), words).prop_map(|(remote, words)| {
                Verb::Write { remote, from: Buffer::NewBlock, bytes: words * 8 }
            }),
            (any::<u64>(), any::<u32>())
                .prop_map(|(remote, value)| Verb::WriteU32 { remote, value }),
            (any::<u64>(), any::<u64>())
                .prop_map(|(remote, value)| Verb::WriteWord { remote, value }),
            any::<[u64; 3]>().prop_map(|[remote, expected, desired]| {
                Verb::CompareSwap { remote, expected, desired }
            }),
        ]
    }

    /// The words of all WRITEs of a chain.
    fn payload(chain: &[Verb]) -> Vec<u64> {
        let bytes = chain.iter().map(|verb| match verb {
            Verb::Write { bytes, .. } => *bytes as usize,
            _ => 0,
        });
        (0..bytes.sum::<usize>() as u64 / 8).collect()
    }

    proptest! {
        #[test]
        fn a_request_is_decoded_as_it_was_encoded(
            lane in 0u16..1024,
            chain in prop::collection::vec(verbs(), 1..=4),
            deadline in any::<u64>(),
        ) {
            let mut record = vec![7];
            encode_request(LaneId(lane), &chain, deadline, &mut record);
            let payload = payload(&chain);
            record.extend(&payload);
            let header = Header::of(record[1]).unwrap();
            prop_assert_eq!(header.request_words(), Ok(record.len() - 1));
            let request = decode_request(header, &record[2..]).unwrap();
            prop_assert_eq!(request.chain(), &chain);
            prop_assert_eq!(request.payload, &payload);
            prop_assert_eq!(request.deadline, if changes(&chain) { deadline } else { Nanos::MAX });
            prop_assert_eq!(header.lane, lane);
            // Not one word less.
            prop_assert!(decode_request(header, &record[2..record.len() - 1]).is_err());
        }

        /// Any words: an error or a request whose payload is whole.
        #[test]
        fn any_words_are_a_request_or_an_error(
            kind in 0u8..8,
            has_deadline in any::<bool>(),
            mut body in prop::collection::vec(any::<u64>(), 0..20),
            kinds in prop::collection::vec(0u64..7, 20),
        ) {
            // Half of the words look like the first word of a verb.
            for (at, word) in body.iter_mut().enumerate().step_by(2) {
                *word = kinds[at] | (*word & 0xff) << 32;
            }
            let header = Header { lane: 0, kind, has_deadline, words: body.len() as u32 };
            if let Ok(request) = decode_request(header, &body) {
                prop_assert_eq!(request.payload.len(), payload(request.chain()).len());
                prop_assert!(request.chain().len() == usize::from(kind));
            }
        }

        #[test]
        fn a_header_is_decoded_or_refused(word in any::<u64>()) {
            if let Ok(header) = Header::of(word) {
                prop_assert_eq!(header.bits(), word);
                let _ = reply_kind(header);
            }
        }

        #[test]
        fn a_reply_is_decoded_as_it_was_encoded(
            chain in prop::collection::vec(verbs(), 1..=4),
            found in any::<u64>(),
            error in prop_oneof![
                any::<[u64; 2]>().prop_map(|[remote, bytes]| ChainError::Outside { remote, bytes }),
                Just(ChainError::Denied), Just(ChainError::Fenced), Just(ChainError::Late),
                Just(ChainError::Unknown),
            ],
            fails in any::<bool>(),
        ) {
            let mut record = Vec::new();
            let reply = PendingReply::begin(&chain, &mut record);
            let words = reply_words(&chain) - usize::from(has_atomic(&chain));
            record.extend(0..words as u64);
            let result = if fails { Err(error) } else { Ok(found) };
            reply.finish(9, &chain, &result, 0, &mut record);
            let header = Header::of(record[0]).unwrap();
            prop_assert_eq!(header.words as usize, record.len() - 1);
            let with_deadline = Header { has_deadline: true, ..header };
            prop_assert_eq!(reply_kind(with_deadline), Err(RecordError));
            match result {
                Ok(found) => {
                    prop_assert_eq!(reply_kind(header), Ok(ReplyKind::Executed(LaneId(9))));
                    prop_assert_eq!(record.len() - 1, reply_words(&chain));
                    prop_assert!(!has_atomic(&chain) || record[1] == found);
                }
                Err(error) => {
                    prop_assert_eq!(reply_kind(header), Ok(ReplyKind::Failed(LaneId(9))));
                    prop_assert_eq!(decode_failure(header, &record[1..]), error);
                }
            }
        }
    }
}
