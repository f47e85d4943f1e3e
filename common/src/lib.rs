//! What Farside's server and client have in common.
//!
//! - [`layout`]: the bytes of a region, the only place that knows them.
//! - [`hash`]: where a key belongs. [`checksum`]: whether bytes are whole.
//! - [`fabric`]: how verbs reach a region.
//! - [`control`]: the messages between client and server.
//! - [`attach`]: how a client gets to both.
//! - [`check`]: walks a region and reports what is wrong with it.
//! - [`address`], [`size`] and [`config`]: what users write.
//! - [`waiting`]: how long, for who may have been stopped meanwhile.
//! - [`pairs`]: memory that threads share, in words of 16 bytes.
//! - [`command_line`]: what the commands answer to mistakes and errors.
//! - [`signals`]: which ones end a process.
#![deny(unsafe_code)]

pub mod address;
pub mod attach;
pub mod check;
pub mod checksum;
pub mod command_line;
pub mod config;
pub mod control;
pub mod fabric;
pub mod hash;
pub mod layout;
#[allow(unsafe_code, reason = "the mapping is shared by threads")]
pub mod pairs;
pub mod signals;
pub mod size;
mod trust;
pub mod waiting;
