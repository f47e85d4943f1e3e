//! A simulator of the fabric. It runs the production code of all operations over regions in memory,
//! under a scheduler that decides about every access to every word.
//!
//! A [`Scenario`] says what there is and what each client does. [`Scenario::explore`] tries every
//! execution of a small one, [`Scenario::run_seed`] a random one of any. Both hand each answer to
//! the checker of [`farside_linearizability`] as it is given. `docs/simulator.md` says how to add a
//! scenario, and how to repeat a seed.
//!
//! What the simulated fabric does is the contract of [`farside_fabric::Fabric`] and nothing kinder.
//! The words of a READ or WRITE come in any order, with any other accesses between two. Chains stay
//! under way for as long as their deadline allows, and the clock jumps.
//!
//! It does not use the client library: its sessions are over `farside_protocol`, its free blocks
//! over [`farside_server::depot`].
#![deny(unsafe_code)]

mod clock;
mod depot;
mod execution;
mod explore;
mod fabric;
mod failure;
mod lane;
mod losses;
mod memory;
mod monitor;
mod mutant;
mod mutant_fabric;
mod mutant_inserts;
mod mutant_splits;
mod mutant_times;
mod prepared;
mod process;
mod random;
mod region;
mod scenario;
mod script;
mod server;
mod session;
mod task;
mod trace;
mod turns;
mod verdict;
mod world;

pub use explore::{Bounds, Explored};
pub use failure::Failure;
pub use monitor::Violation;
pub use mutant::Mutant;
pub use region::{GRACE_MS, KEYS};
pub use scenario::{Key, Op, Scenario};
pub use script::{Script, client};
