//! The memory of a region on this host, and the execution of verbs on it. It is beneath all
//! transports: clients on shared memory and the threads of a TCP server execute verbs here, and
//! RDMA devices access the same mapping.
//!
//! - A mapped region: [`Region`], whose words processes and devices share.
//! - Where a server's region is: [`RegionMemory`], anonymous or in a file, and its huge pages.
//! - Verbs: `Executor` executes a client's chains, and checks the client's [`Lease`].

mod chain_memory;
mod executor;
#[allow(unsafe_code, reason = "maps a file into addresses that the module has reserved")]
mod mapping;
pub(crate) mod own_file;
#[allow(unsafe_code, reason = "the mapping is shared with other processes")]
mod region;
mod region_memory;
mod words;

pub(crate) use chain_memory::{Buffers, ChainMemory, part_mut, words_mut};
pub use executor::Lease;
pub(crate) use executor::{Executor, PREFETCH_BYTES_MAX, PutChain};
pub use region::{Region, prefetch};
pub use region_memory::{Collapse, HugePages, MemoryError, Pages, RegionMemory, collapse_refusal};
