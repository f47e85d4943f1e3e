//! The redis protocol (RESP2 and RESP3): requests, replies, numbers and patterns. None of it does
//! I/O, and none panics on any bytes.
#![deny(unsafe_code)]

mod number;
mod parser;
mod pattern;
mod reply;

pub use number::{Decimal, parse_integer};
pub use parser::{ParserLimits, Progress, ProtocolError, RequestParser};
pub use pattern::matches;
pub use reply::{Protocol, ReplyWriter};
