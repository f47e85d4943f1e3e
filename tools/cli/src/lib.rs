//! The formats that kv-cli reads and writes (lines of JSON, bytes as text, keys as paths), and the
//! checker of regions.
#![deny(unsafe_code)]

pub mod check;
pub mod formats;
