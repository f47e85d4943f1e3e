//! The hash that decides where keys are: 128 bits of SipHash-1-3, with a random hash key for each
//! region. Without the hash key no user can choose keys that all fall into one row. A region
//! outlives programs, so the test vectors below freeze the hash.

/// Hashes keys for one region.
#[derive(Clone, Copy, Debug)]
pub struct KeyHasher {
    /// The state before the first word of a key.
    keyed: SipState,
}

impl KeyHasher {
    /// The hasher for a region with this hash key.
    pub fn new(hash_key: &[u8; 16]) -> Self {
        let key = u128::from_le_bytes(*hash_key);
        let (low, high) = (key as u64, (key >> 64) as u64);
        let keyed = SipState([
            low ^ u64::from_be_bytes(*b"somepseu"),
            high ^ u64::from_be_bytes(*b"dorandom") ^ 0xee,
            low ^ u64::from_be_bytes(*b"lygenera"),
            high ^ u64::from_be_bytes(*b"tedbytes"),
        ]);
        Self { keyed }
    }

    /// The hash of a key.
    // Written here because the crate siphasher takes more instructions. A test compares the two.
    #[inline(always)]
    pub fn hash(&self, key: &[u8]) -> KeyHash {
        let mut state = self.keyed;
        let (words, rest) = key.as_chunks();
        for word in words {
            state.absorb(u64::from_le_bytes(*word));
        }
        let last_word = rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        state.absorb((key.len() as u64) << 56 | last_word);
        state.0[2] ^= 0xee;
        let position = state.finished();
        state.0[1] ^= 0xdd;
        let identity = state.finished();
        KeyHash { position, identity }
    }
}

/// The four words of SipHash.
#[derive(Clone, Copy, Debug)]
struct SipState([u64; 4]);

impl SipState {
    #[inline(always)]
    fn round(&mut self) {
        let [v0, v1, v2, v3] = &mut self.0;
        *v0 = v0.wrapping_add(*v1);
        *v2 = v2.wrapping_add(*v3);
        *v1 = v1.rotate_left(13) ^ *v0;
        *v3 = v3.rotate_left(16) ^ *v2;
        *v0 = v0.rotate_left(32);
        *v2 = v2.wrapping_add(*v1);
        *v0 = v0.wrapping_add(*v3);
        *v1 = v1.rotate_left(17) ^ *v2;
        *v3 = v3.rotate_left(21) ^ *v0;
        *v2 = v2.rotate_left(32);
    }

    /// Mixes a word of the key in: one round.
    #[inline(always)]
    fn absorb(&mut self, word: u64) {
        self.0[3] ^= word;
        self.round();
        self.0[0] ^= word;
    }

    /// Runs the last three rounds of one half of the hash, and returns this half.
    #[inline(always)]
    fn finished(&mut self) -> u64 {
        (0..3).for_each(|_| self.round());
        let [v0, v1, v2, v3] = self.0;
        v0 ^ v1 ^ v2 ^ v3
    }
}

/// A key's hash: one half decides where the key is, the other distinguishes it from other keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyHash {
    position: u64,
    identity: u64,
}

/// The leading `depth` bits of a directory hash, right-aligned.
pub const fn prefix_of(directory_hash: u32, depth: u8) -> u32 {
    match depth {
        0 => 0,
        1..=32 => directory_hash >> (32 - depth as u32),
        _ => u32::MAX,
    }
}

/// The hint of a slot that was used and now belongs to no key. A slot that was never used has 0,
/// and no slot has 0 again (invariant I21).
pub const NO_HINT: u64 = u64::MAX;

impl KeyHash {
    /// The bits that choose the directory entry, leading bits first.
    pub const fn directory(self) -> u32 {
        (self.position >> 32) as u32
    }

    /// The index of the key's entry in a directory of this depth, at most 32.
    pub const fn directory_index(self, depth: u8) -> u64 {
        prefix_of(self.directory(), depth) as u64
    }

    /// The eight bits of the hash in the slot word.
    pub const fn fingerprint(self) -> u8 {
        self.identity as u8
    }

    /// The hint of this key in this incarnation of its slot; never 0 or [`NO_HINT`].
    ///
    /// Within one incarnation the hint is a bijection of `identity`, except that the two excluded
    /// values become 1. So two keys have the same hint only if 64 bits of their hashes agree.
    pub const fn hint(self, incarnation: u8) -> u64 {
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        // The finalizer of SplitMix64.
        let mut mixed = self.identity.wrapping_add((incarnation as u64).wrapping_mul(GOLDEN));
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        if matches!(mixed, 0 | NO_HINT) { 1 } else { mixed }
    }

    /// The 32 bits that choose the window's row. The low ones hardly influence the choice, so keys
    /// of one row differ in them.
    pub const fn row_bits(self) -> u32 {
        self.position as u32
    }

    /// 64 bits that distinguish keys. They do not influence where a key is.
    pub const fn identity(self) -> u64 {
        self.identity
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HOME_ROWS, ROW_BYTES};

    const KEY: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    /// If a hash changes, no key of an existing region can be found. The expected values come from
    /// an independent implementation of SipHash-1-3 with 128 bits.
    #[test]
    fn hashes_are_frozen() {
        let hasher = KeyHasher::new(&KEY);
        let print = |key: &[u8]| {
            let hash = hasher.hash(key);
            format!("{:016x} {:016x} {:016x}", hash.position, hash.identity, hash.hint(5))
        };
        let long: Vec<u8> = (0..=255).collect();
        let expected = "bea58827b2bc7ee7 013030dd6adb62fd b48832c2f67d9d77";
        assert_eq!(print(b""), expected);
        let expected = "a84f7c63de373c08 678aae375dd72f49 894d5b14b775520c";
        assert_eq!(print(b"a"), expected);
        let expected = "61fbeac102e8fb0f d85c148001e8e0a8 3701fc88c2fa2766";
        assert_eq!(print(b"farside"), expected);
        let expected = "5a020c3a248b6cf5 7a709cb9a27a686a 6ba95ff8aa2ce9c3";
        assert_eq!(print(&long), expected);
    }

    #[test]
    fn hashes_are_those_of_an_independent_implementation() {
        let independent = siphasher::sip128::SipHasher13::new_with_key(&KEY);
        let hasher = KeyHasher::new(&KEY);
        let bytes: Vec<u8> = (0..600).map(|at| (at * 37) as u8).collect();
        for key in (0..bytes.len()).map(|end| &bytes[end / 3..end]) {
            let (hash, expected) = (hasher.hash(key), independent.hash(key));
            assert_eq!((hash.position, hash.identity), (expected.h1, expected.h2));
        }
    }

    #[test]
    fn hints_differ_by_incarnation_and_never_mean_no_key() {
        let hash = KeyHasher::new(&KEY).hash(b"key");
        let hints: std::collections::HashSet<u64> = (0..64).map(|inc| hash.hint(inc)).collect();
        assert_eq!(hints.len(), 64);
        assert!(!hints.contains(&0) && !hints.contains(&NO_HINT));
        let zero = KeyHash { position: 0, identity: 0 };
        assert_eq!(zero.hint(0), 1);
    }

    #[test]
    fn windows_stay_inside_the_subtable() {
        let last = KeyHash { position: u64::MAX, identity: 0 };
        assert_eq!(last.window_offset(), (HOME_ROWS as u64 - 1) * ROW_BYTES);
        assert_eq!(KeyHash { position: 0, identity: 0 }.window_offset(), 0);
        assert_eq!(last.directory_index(0), 0);
        assert_eq!(last.directory_index(4), 15);
    }
}
