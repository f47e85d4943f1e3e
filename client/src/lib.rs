//! The client library of Farside, a one-sided RDMA key-value store.
mod client;
mod error;
mod session;
mod value;

pub use client::*;
pub use error::{Error, Exhausted, Result};
pub use farside_common::control::Role;
pub use farside_common::fabric::Counters;
pub use session::*;
pub use value::{Exchange, Value, Version};
