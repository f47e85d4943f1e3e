//! The commands: what they ask of the store, and what they reply.

pub(crate) mod arguments;
pub(crate) mod client_state;
pub(crate) mod connection;
pub(crate) mod error;
pub(crate) mod expiry;
pub(crate) mod info;
pub(crate) mod introspection;
pub(crate) mod modify;
pub(crate) mod operation;
pub(crate) mod plan;
pub(crate) mod table;
pub(crate) mod task;
pub(crate) mod transaction;
pub(crate) mod whole;
