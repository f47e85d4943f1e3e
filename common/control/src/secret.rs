//! Texts of config files that no message shows.

use std::fmt;

use serde::{Deserialize, Deserializer};

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
