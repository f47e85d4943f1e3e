//! Versions, which identify the writes that values come from.

use farside_layout::BlockAddress;

/// Identifies the write of a key that a value comes from.
///
/// Two reads of a key return the same version only if the same write stored both values, over the
/// whole life of a region. A version is the address and generation of the value's block. Versions
/// are not ordered.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Version(u64);

impl Version {
    /// The version of the value in the block at this address, with this generation.
    pub const fn of(address: BlockAddress, generation: u32) -> Self {
        Self((address.0 as u64) << 32 | generation as u64)
    }

    /// The generation of the value's block.
    pub(crate) const fn generation(self) -> u32 {
        self.0 as u32
    }

    /// The version as a number, to be stored.
    pub const fn to_u64(self) -> u64 {
        self.0
    }

    /// The version with this number.
    pub const fn from_u64(number: u64) -> Self {
        Self(number)
    }
}

/// Prints sixteen hexadecimal digits.
impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl std::fmt::Debug for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Version({self})")
    }
}

/// A value and its version. It derefs to the value's bytes, and compares with bytes and texts.
#[derive(Clone, PartialEq, Eq)]
pub struct Value {
    /// The bytes.
    pub data: Vec<u8>,
    /// The write that they come from.
    pub version: Version,
}

/// The number of bytes that a value's debug output shows.
const DEBUG_BYTES_MAX: usize = 32;

impl Value {
    /// Returns the bytes.
    pub fn into_vec(self) -> Vec<u8> {
        self.data
    }
}

impl std::ops::Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.data
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl From<Value> for Vec<u8> {
    fn from(value: Value) -> Self {
        value.data
    }
}

/// Compares the bytes with those of another type.
macro_rules! equals_bytes_of {
    ($([$($generics:tt)*] $type:ty),+) => {$(
        impl<$($generics)*> PartialEq<$type> for Value {
            fn eq(&self, other: &$type) -> bool {
                let bytes: &[u8] = other.as_ref();
                self.data == bytes
            }
        }
    )+};
}
equals_bytes_of!([] [u8], [] &[u8], [const N: usize] [u8; N], [const N: usize] &[u8; N]);
equals_bytes_of!([] Vec<u8>, [] str, [] &str);

/// Shows the length, and the first bytes as text.
impl std::fmt::Debug for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { data, version } = self;
        let shown = data[..data.len().min(DEBUG_BYTES_MAX)].escape_ascii();
        let rest = if data.len() > DEBUG_BYTES_MAX { "..." } else { "" };
        write!(f, "Value {{ {} bytes: \"{shown}{rest}\", {version:?} }}", data.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_compares_and_prints_as_its_bytes() {
        let value = |data: &[u8]| Value { data: data.to_vec(), version: Version::from_u64(7) };
        let hello = value(b"hello");
        assert!(hello == *b"hello" && hello == b"hello" && hello == b"hello".to_vec());
        assert!(hello == "hello" && hello == b"hello"[..] && hello != "hello!");
        let printed = "Value { 5 bytes: \"hello\", Version(0000000000000007) }";
        assert_eq!(format!("{hello:?}"), printed);
        assert!(format!("{:?}", value(&[0; 1 << 20])).len() < 200);
        assert_eq!(hello.into_vec(), b"hello");
    }
}
