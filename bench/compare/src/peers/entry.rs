//! A key and its value in one piece of memory, with a checksum: what FUSEE and RACE keep.

use farside_bench::keys::{KEY_BYTES, Key};
use farside_layout::checksum::checksum;

/// The checksum, and the length of the value.
const HEADER_BYTES: usize = 8;
const LENGTH_OFFSET: usize = 4;
const VALUE_OFFSET: usize = HEADER_BYTES + KEY_BYTES;

/// How many bytes an entry takes, in whole words.
pub const fn entry_bytes(value_bytes: usize) -> u64 {
    (VALUE_OFFSET + value_bytes).next_multiple_of(8) as u64
}

/// Writes an entry to the start of the buffer.
#[inline]
pub fn encode(buffer: &mut [u8], key: &Key, value: &[u8]) {
    let entry = &mut buffer[..VALUE_OFFSET + value.len()];
    entry[LENGTH_OFFSET..HEADER_BYTES].copy_from_slice(&(value.len() as u32).to_le_bytes());
    entry[HEADER_BYTES..VALUE_OFFSET].copy_from_slice(key);
    entry[VALUE_OFFSET..].copy_from_slice(value);
    let checksum = checksum(&entry[LENGTH_OFFSET..], 0);
    entry[..LENGTH_OFFSET].copy_from_slice(&checksum.to_le_bytes());
}

/// The value, if the buffer starts with an entry of this key that is whole.
#[inline]
pub fn decode<'b>(buffer: &'b [u8], key: &Key) -> Option<&'b [u8]> {
    let (expected, rest) = buffer.split_first_chunk::<LENGTH_OFFSET>()?;
    let (length, rest) = rest.split_first_chunk::<LENGTH_OFFSET>()?;
    let value_bytes = u32::from_le_bytes(*length) as usize;
    let value = rest.strip_prefix(key)?.get(..value_bytes)?;
    let covered = &buffer[LENGTH_OFFSET..VALUE_OFFSET + value_bytes];
    (checksum(covered, 0) == u32::from_le_bytes(*expected)).then_some(value)
}

#[cfg(test)]
mod tests {
    use farside_bench::keys;

    use super::*;

    #[test]
    fn entries_come_back_and_damaged_ones_do_not() {
        for value in [&b""[..], b"seven b", b"much more than that"] {
            let mut buffer = vec![0; entry_bytes(value.len()) as usize];
            encode(&mut buffer, &keys::encode(3), value);
            assert_eq!(decode(&buffer, &keys::encode(3)), Some(value));
            assert_eq!(decode(&buffer, &keys::encode(4)), None);
            for at in 0..VALUE_OFFSET + value.len() {
                buffer[at] ^= 1;
                assert_eq!(decode(&buffer, &keys::encode(3)), None, "{at}");
                buffer[at] ^= 1;
            }
        }
    }
}
