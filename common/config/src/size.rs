//! Numbers of bytes, as people write and read them.
//!
//! The parser of the crate `bytesize` is too lenient. It also accepts `1GB`, `1gib` and `1`, rounds
//! `1.5B`, and saturates numbers that are too large.

use std::fmt;
use std::str::FromStr;

/// A number of bytes as people write it: `64MiB`, `1GiB`, `4096B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// The error for a text that is no number of bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no size; write a whole number and B, KiB, MiB, GiB or TiB, as in 1GiB")]
pub struct ByteSizeError {
    text: String,
}

const UNITS: [(&str, u32); 5] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)];

impl ByteSize {
    /// Returns this number of MiB.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// Formats the number for people, rounded: `17 B`, `4.2 MiB`.
    pub fn rounded(self) -> String {
        bytesize::ByteSize(self.0).display().iec().to_string()
    }
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let with_unit = |(unit, shift): (&str, u32)| {
            let digits = text.trim().strip_suffix(unit)?.trim_end();
            // `parse` alone would accept a sign.
            if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            digits.parse::<u64>().ok()?.checked_mul(1 << shift)
        };
        let size = UNITS.into_iter().find_map(with_unit);
        size.map(Self).ok_or_else(|| ByteSizeError { text: text.to_owned() })
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |shift: u32| self.0 >> shift > 0 && self.0 >> shift << shift == self.0;
        match UNITS.into_iter().find(|(_, shift)| whole(*shift)) {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => f.write_str("0B"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_for_people() {
        let rounded = |bytes| ByteSize(bytes).rounded();
        assert_eq!((rounded(0), rounded(1023)), ("0 B".into(), "1023 B".into()));
        assert_eq!((rounded(1 << 20), rounded(1 << 30)), ("1.0 MiB".into(), "1.0 GiB".into()));
        assert_eq!(rounded(u64::MAX), "16.0 EiB");
    }
}
