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

/// A value and its version. Derefs to the value's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// The bytes.
    pub data: Vec<u8>,
    /// The write that they come from.
    pub version: Version,
}

impl std::ops::Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.data
    }
}
