//! The server's work on the region: its free memory, and the chores that clients leave to it.
//!
//! | file | what it has |
//! |---|---|
//! | `keeper.rs` | serves requests for memory, and does the chores that are due |
//! | `depot.rs` | the free blocks and chunks |
//! | `splits.rs` | the growth of the index |
//! | `sweep.rs` | the unfinished inserts of fenced clients |
//! | `collect.rs` | the blocks that fenced clients held |
//! | `expiry.rs` | values that have expired |
//! | `eviction.rs` | room in a full cache |

pub(crate) mod collect;
pub mod depot;
pub(crate) mod eviction;
pub(crate) mod expiry;
pub(crate) mod keeper;
pub(crate) mod splits;
pub(crate) mod sweep;
