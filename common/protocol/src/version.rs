//! Which write a value comes from.

use farside_layout::BlockAddress;

/// Which write of a key a value comes from.
///
/// Two reads of a key return the same version only if they return the same write, over the whole
/// life of a region: a version is the place and generation of the block that holds the value.
/// Versions are not ordered.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Version(u64);

impl Version {
    /// The version of the value in the block at this address, with this generation.
    pub const fn of(address: BlockAddress, generation: u32) -> Self {
        Self((address.0 as u64) << 32 | generation as u64)
    }

    /// The version as a number, for storing it somewhere.
    pub const fn to_u64(self) -> u64 {
        self.0
    }

    /// The version with this number.
    pub const fn from_u64(number: u64) -> Self {
        Self(number)
    }
}

/// As sixteen hexadecimal digits.
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

/// A value and the write it comes from. Derefs to its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// The bytes.
    pub data: Vec<u8>,
    /// Which write they come from.
    pub version: Version,
}

impl std::ops::Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.data
    }
}
