//! The hash that places keys: 128 bits of SipHash-1-3, keyed per region. Without the key no
//! client can aim for one row. Frozen by the test vectors below: a region keeps its keys' places.

use siphasher::sip128::SipHasher13;

use crate::{HOME_ROWS, ROW_BYTES};

/// Hashes keys for one region.
#[derive(Clone, Copy, Debug)]
pub struct KeyHasher {
    keyed: SipHasher13,
}

impl KeyHasher {
    /// The hasher for regions with this key.
    pub fn new(hash_key: &[u8; 16]) -> Self {
        Self { keyed: SipHasher13::new_with_key(hash_key) }
    }

    /// The hash of a key.
    #[inline]
    pub fn hash(&self, key: &[u8]) -> KeyHash {
        let hash = self.keyed.hash(key);
        KeyHash { place: hash.h1, identity: hash.h2 }
    }
}

/// Where a key belongs and what tells it from its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyHash {
    place: u64,
    identity: u64,
}

/// The hint of a slot that was used and remembers no key. 0 is that of one that was never used.
pub const NO_HINT: u64 = u64::MAX;

impl KeyHash {
    /// The bits the directory goes by, leading bits first.
    pub const fn directory(self) -> u32 {
        (self.place >> 32) as u32
    }

    /// Which entry of a directory of this depth (at most 32) the key belongs to.
    pub const fn directory_index(self, depth: u8) -> u64 {
        crate::prefix_of(self.directory(), depth) as u64
    }

    /// The byte offset of the key's window from the start of its subtable.
    pub const fn window_offset(self) -> u64 {
        let row = ((self.place & 0xffff_ffff) * HOME_ROWS as u64) >> 32;
        row * ROW_BYTES
    }

    /// The eight bits of the hash in the slot word.
    pub const fn fingerprint(self) -> u8 {
        self.identity as u8
    }

    /// What the hint of this key's slot must be in the slot's given incarnation; never 0, nor
    /// [`NO_HINT`].
    ///
    /// For one incarnation a bijection of `identity`, so two keys of a window have the same hint
    /// only if 64 keyed bits of their hashes are the same.
    pub const fn hint(self, incarnation: u8) -> u64 {
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        // The finalizer of SplitMix64.
        let mut mixed = self.identity.wrapping_add((incarnation as u64).wrapping_mul(GOLDEN));
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        if matches!(mixed, 0 | NO_HINT) { 1 } else { mixed }
    }

    /// Of the bits that choose the window's row, those that hardly do: low ones come last.
    pub const fn low_place(self) -> u32 {
        self.place as u32
    }

    /// 64 bits that tell keys apart, for tables on the client.
    pub const fn tag(self) -> u64 {
        self.identity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    /// Frozen: a change here loses every key of every region. Computed by an independent
    /// implementation of SipHash-1-3 with 128 bits.
    #[test]
    fn test_vectors() {
        let hasher = KeyHasher::new(&KEY);
        let print = |key: &[u8]| {
            let hash = hasher.hash(key);
            format!("{:016x} {:016x} {:016x}", hash.place, hash.identity, hash.hint(5))
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
    fn hints_differ_by_incarnation_and_are_never_those_of_nobody() {
        let hash = KeyHasher::new(&KEY).hash(b"key");
        let hints: std::collections::HashSet<u64> = (0..64).map(|inc| hash.hint(inc)).collect();
        assert_eq!(hints.len(), 64);
        assert!(!hints.contains(&0) && !hints.contains(&NO_HINT));
        let zero = KeyHash { place: 0, identity: 0 };
        assert_eq!(zero.hint(0), 1);
    }

    #[test]
    fn windows_stay_inside_the_subtable() {
        let last = KeyHash { place: u64::MAX, identity: 0 };
        assert_eq!(last.window_offset(), (HOME_ROWS as u64 - 1) * ROW_BYTES);
        assert_eq!(KeyHash { place: 0, identity: 0 }.window_offset(), 0);
        assert_eq!(last.directory_index(0), 0);
        assert_eq!(last.directory_index(4), 15);
    }
}
