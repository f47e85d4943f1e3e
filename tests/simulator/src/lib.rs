//! A simulator of the fabric. It runs the production code of all operations over a region in
//! memory. A scheduler decides which process accesses a word next.
//!
//! A [`Scenario`] holds the content of the region at the start, and the operations of each client.
//! [`Scenario::explore`] tries every execution of a small scenario, [`Scenario::run_seed`] a random
//! execution of any. Both pass each answer at once to the checker, [`farside_linearizability`].
//! `docs/simulator.md` says how to add a scenario, and how to repeat a seed.
//!
//! The simulated fabric guarantees the contract of [`farside_fabric::Fabric`] and no more. It
//! accesses the words of a READ or WRITE in any order, with any other accesses between two of them.
//! Chains stay in flight up to their deadline, and the clock jumps.
//!
//! The simulator does not use the client library. Its sessions use `farside_protocol`, and its free
//! blocks [`farside_server::depot`].
#![deny(unsafe_code)]

mod cluster;
mod execution;
mod explore;
mod fabric;
mod memory;
mod monitor;
mod mutant;
mod mutant_fabric;
mod prepared;
mod process;
mod region;
mod scenario;
mod script;
mod server;
mod session;
mod world;

pub use cluster::TRUST_NS;
pub use explore::{Bounds, Explored, Failure};
pub use memory::TTL_NS;
pub use monitor::Violation;
pub use mutant::Mutant;
pub use region::{GRACE_MS, KEYS, Key};
pub use scenario::Scenario;
pub use script::{Op, Script, client};
