//! Self-describing values: each begins with its key, its writer and a count, which determine all
//! its bytes. So a test recognizes a value of another key, and a mixture of two values.

/// Returns a value of `bytes` bytes for a key, the `count`-th that `writer` makes. It has at least
/// [`HEADER_BYTES`] bytes.
pub fn value(key: u64, writer: u64, count: u64, bytes: usize) -> Vec<u8> {
    let mut value: Vec<u8> = [key, writer, count].into_iter().flat_map(u64::to_le_bytes).collect();
    let mut state = seed(key, writer, count);
    while value.len() < bytes {
        state = step(state);
        value.extend_from_slice(&(state ^ state >> 32).to_le_bytes());
    }
    value.truncate(bytes.max(HEADER_BYTES));
    value
}

/// The length of the key, writer and count at the start of a value.
pub const HEADER_BYTES: usize = 24;

/// Returns the count in a value that some writer made for this key; `None` if no writer did.
pub fn count_in(key: u64, bytes: &[u8]) -> Option<u64> {
    let count = bytes.get(16..HEADER_BYTES)?.try_into().ok()?;
    holds(key, bytes).then(|| u64::from_le_bytes(count))
}

/// Whether the bytes are exactly a value that some writer made for this key.
pub fn holds(key: u64, bytes: &[u8]) -> bool {
    let (numbers, _) = bytes.as_chunks::<8>();
    let [found_key, writer, count] =
        [0, 1, 2].map(|at| numbers.get(at).map(|n| u64::from_le_bytes(*n)));
    let (Some(found_key), Some(writer), Some(count)) = (found_key, writer, count) else {
        return false;
    };
    found_key == key && bytes == value(key, writer, count, bytes.len())
}

fn seed(key: u64, writer: u64, count: u64) -> u64 {
    [key, writer, count].into_iter().fold(1, |state, n| step(state ^ n))
}

fn step(state: u64) -> u64 {
    state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_holds_for_its_key_only_and_unchanged() {
        let good = value(7, 1, 2, 100);
        assert!(holds(7, &good));
        assert_eq!(
            (count_in(7, &good), count_in(8, &good), count_in(7, b"")),
            (Some(2), None, None)
        );
        assert!(!holds(8, &good));
        assert!(!holds(7, &good[..20]));
        for at in 0..good.len() {
            let mut torn = good.clone();
            torn[at] ^= 1;
            assert!(!holds(7, &torn), "byte {at}");
        }
    }
}
