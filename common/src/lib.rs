//! What Farside's server and client have in common.
//!
//! - [`layout`]: the bytes of a region, the only place that knows them.
//! - [`hash`]: where a key belongs.
//! - [`fabric`]: how verbs reach a region.
//! - [`control`]: the messages between client and server.
//! - [`check`]: walks a region and reports what is wrong with it.
//! - [`address`] and [`config`]: what users write.
#![deny(unsafe_code)]

pub mod address;
pub mod check;
pub mod config;
pub mod control;
pub mod fabric;
pub mod hash;
pub mod layout;
