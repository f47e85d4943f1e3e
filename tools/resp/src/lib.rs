//! The redis protocol (RESP2 and RESP3): requests, replies, numbers and patterns. None of it does
//! I/O, and none panics on any bytes.
#![deny(unsafe_code)]

mod parser;
mod pattern;
mod reply;

pub use parser::{ParserLimits, Progress, ProtocolError, RequestParser};
pub use pattern::matches;
pub use reply::{Decimal, Protocol, ReplyWriter, parse_integer};
