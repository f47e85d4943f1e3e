//! Keys as YCSB makes them: "user" and the hash of the record's number, so that neighbouring
//! records are not neighbouring keys.

/// The length of every key, in bytes, as in YCSB with `zeropadding=20`.
pub const KEY_BYTES: usize = PREFIX.len() + DIGITS;

/// A record's key.
pub type Key = [u8; KEY_BYTES];

const PREFIX: [u8; 4] = *b"user";
const DIGITS: usize = 20;
/// Digits are written in pairs, and in two halves.
const HALF_PAIRS: usize = DIGITS / 4;
/// The number of values that half of the digits can show.
const HALF_RANGE: u64 = 100u64.pow(HALF_PAIRS as u32);
/// The texts 00, 01, 02 and so on up to 99.
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[0; 2]; 100];
    let mut number = 0;
    while number < 100 {
        pairs[number] = [b'0' + number as u8 / 10, b'0' + number as u8 % 10];
        number += 1;
    }
    pairs
};
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 1_099_511_628_211;

/// YCSB's `Utils.fnvhash64`: FNV-1a over the number's eight bytes, and the absolute value of this
/// as a signed number.
#[inline]
pub const fn hash(number: u64) -> u64 {
    let mut hash = FNV_OFFSET;
    let mut byte = 0;
    while byte < 8 {
        hash = (hash ^ (number >> (byte * 8) & 0xff)).wrapping_mul(FNV_PRIME);
        byte += 1;
    }
    (hash as i64).unsigned_abs()
}

/// The key of a record.
#[inline]
pub fn encode(record: u64) -> Key {
    let hash = hash(record);
    let mut key = [b'0'; KEY_BYTES];
    key[..PREFIX.len()].copy_from_slice(&PREFIX);
    let (pairs, _) = key[PREFIX.len()..].as_chunks_mut::<2>();
    // Two halves, which the processor computes in parallel: within a half, each division waits for
    // the one before it.
    let (mut high, mut low) = (hash / HALF_RANGE, hash % HALF_RANGE);
    for pair in (0..HALF_PAIRS).rev() {
        pairs[pair] = PAIRS[(high % 100) as usize];
        pairs[HALF_PAIRS + pair] = PAIRS[(low % 100) as usize];
        high /= 100;
        low /= 100;
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_keys_are_those_of_ycsb() {
        // The keys that upstream loads first. Many of its bug reports show them.
        assert_eq!(&encode(0), b"user06284781860667377211");
        assert_eq!(&encode(1), b"user08517097267634966620");
        assert_eq!(&encode(2), b"user01820151046732198393");
    }

    #[test]
    fn keys_are_distinct_and_of_one_length() {
        let mut keys: Vec<Key> = (0..200_000).map(encode).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 200_000);
        assert!(keys.iter().all(|key| key[4..].iter().all(u8::is_ascii_digit)));
        assert_eq!(encode(u64::MAX).len(), KEY_BYTES);
    }
}
