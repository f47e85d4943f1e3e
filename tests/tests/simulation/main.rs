//! The protocol under every interleaving: scenarios for the simulator, and twins of the protocol
//! that it has to catch.
#![allow(clippy::unwrap_used)]

mod pairs;
mod twins;
