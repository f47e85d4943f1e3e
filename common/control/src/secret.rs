//! Secrets of config files, which no message shows, and what messages carry of proofs: nonces, and
//! the proofs themselves.

use std::{fmt, io};

use serde::{Deserialize, Deserializer};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A random number that is used once.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct Nonce(pub [u8; 16]);

impl Nonce {
    /// Returns a new one.
    ///
    /// # Errors
    /// The system's error.
    pub fn random() -> io::Result<Self> {
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        Ok(Self(random))
    }
}

/// The first half of an HMAC-SHA256. Without the key it cannot be guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Proof(pub [u8; 16]);

impl Proof {
    /// The place of a proof where there is none.
    pub const NONE: Self = Self([0; 16]);
}

/// A secret of a config file: that of a client which connects, or a password. Neither its Debug
/// form nor the error for a secret that is no text shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Serde's error for a value of another type would quote the value.
        let quoted = |_| serde::de::Error::custom("write it in quotes, as a text");
        String::deserialize(deserializer).map(Self).map_err(quoted)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
