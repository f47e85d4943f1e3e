//! A server as a part of a cluster: which shard it serves, and whether it knows so.
//!
//! Two threads share the work. The watcher owns the store of the records: it reads them, commits
//! changes and keeps the server's announcement. The serving thread owns the [`Membership`], and
//! never waits for the store. They exchange commands and news.
//!
//! | file | what it has |
//! |---|---|
//! | `joining.rs` | the start: reads the records, and finds the shard of a region file |
//! | `membership.rs` | the serving thread's part |
//! | `watcher.rs` | the thread that reads the records and takes a shard |
//! | `serving.rs` | what tells a region file from its copies, and continues a shard |
//! | `identity.rs` | names of processes and files, which tell whether a region is lost |

mod error;
mod identity;
mod joining;
mod membership;
mod serving;
mod watcher;

pub use error::ClusterError;
pub(crate) use identity::own_start;
pub(crate) use joining::{Joining, join};
pub(crate) use membership::{Changes, Membership, OwnView};
pub(crate) use watcher::Watcher;
