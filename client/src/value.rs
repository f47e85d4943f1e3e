//! What an exchange came to.

use farside_protocol::Value;

/// The outcome of [`Session::compare_exchange`](crate::Session::compare_exchange).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// The key had the expected value (or was absent, as expected) and now has the new one.
    Exchanged,
    /// It had this instead; `None` when it was absent. Nothing was changed.
    Mismatch(Option<Value>),
}
