//! The region that a server keeps: how it is made, opened and read.
//!
//! | file | what it has |
//! |---|---|
//! | `formatting.rs` | a new region in zeroed memory |
//! | `restore.rs` | a new region from a snapshot |
//! | `recovery.rs` | the start: opens a region, and waits until its former clients are gone |
//! | `served.rs` | what is served: the region with its index and its depot |
//! | `index.rs` | the subtables and their slots, and the walk over them |
//! | `content.rs` | the blocks of slots, read and checked |
//! | `own_endpoint.rs` | the endpoint with which the server changes slots |
//! | `huge_pages.rs` | its pages of 2 MiB |

pub(crate) mod content;
pub(crate) mod formatting;
pub(crate) mod huge_pages;
pub(crate) mod index;
pub(crate) mod own_endpoint;
pub(crate) mod recovery;
pub(crate) mod restore;
pub(crate) mod served;
