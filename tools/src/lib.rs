//! The formats that kv-cli reads and writes, without what it does with them: lines of JSON, bytes
//! as text, keys as paths.
#![deny(unsafe_code)]

pub mod encoding;
pub mod paths;
pub mod records;
