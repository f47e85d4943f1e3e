//! What messages carry of proofs: nonces, and the proofs themselves.

use std::io;

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
