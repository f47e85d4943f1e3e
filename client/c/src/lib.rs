//! The client library for C: `farside.h` describes it.
//!
//! Each function checks its arguments, calls the library, and converts the result to a status. A
//! panic becomes [`farside_status::FARSIDE_ERROR_INTERNAL`].

#![allow(non_camel_case_types, reason = "the names are those of C")]

mod fork;
mod memory;

// In the order of the header.
mod status;

mod error;

mod connect;

mod session;

mod operations;

mod many;

mod pipeline;

mod buffer;

pub use buffer::*;
pub use connect::*;
pub use error::*;
pub use many::*;
pub use operations::*;
pub use pipeline::*;
pub use session::*;
pub use status::*;
