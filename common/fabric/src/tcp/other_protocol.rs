//! Programs that answer at the address of a server, and are none.

use std::io;

/// What a program speaks instead of Farside's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OtherProtocol {
    /// RESP, as kv-resp does.
    #[error("the protocol of redis")]
    Redis,
    /// HTTP, as a server does where it serves metrics.
    #[error("HTTP")]
    Http,
    /// Anything else.
    #[error("another protocol")]
    Unknown,
}

impl OtherProtocol {
    /// The protocol whose answers begin with these bytes, if it is a known one.
    pub(super) fn of_answer(bytes: &[u8]) -> Option<Self> {
        match bytes.first_chunk()? {
            b"HTTP" => Some(Self::Http),
            // Such as -ERR and +PONG. No length of a message is like that.
            [b'-' | b'+', rest @ ..] if rest.iter().all(u8::is_ascii_uppercase) => {
                Some(Self::Redis)
            }
            _ => None,
        }
    }

    /// The error of a connection to such a program.
    pub(super) fn into_io_error(self) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, self)
    }

    /// What a program speaks by the error of its connection, which is `InvalidData`.
    pub fn of(error: &io::Error) -> Self {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
        inner.copied().unwrap_or(Self::Unknown)
    }

    /// The protocol, and what to do.
    pub fn advice(self) -> impl std::fmt::Display {
        let advice = match self {
            Self::Redis => {
                "give the address of the kv-server behind a kv-resp, or use redis-cli there"
            }
            Self::Http => "give the address at which kv-server listens, not that of its metrics",
            Self::Unknown => "give the address at which kv-server listens (--listen)",
        };
        std::fmt::from_fn(move |f| write!(f, "{self}; {advice}"))
    }
}
