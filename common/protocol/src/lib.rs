//! All operations, as async functions over the fabric: every `.await` is a round trip.
//!
//! An [`Engine`] is the state that a session has once: its endpoint, lanes and clock. An
//! [`OpenRegion`] is the state that it has for each region. An [`Operation`] borrows both for one
//! key on one lane, so one future can work on several regions, one after the other. The server
//! uses the same code for tasks of its own: [`split`] and [`sweep`]. `docs/protocol.md` has the
//! protocol, why it is right, and the numbered invariants cited here.
#![deny(unsafe_code)]
#![allow(missing_debug_implementations, reason = "engines and operations are not data")]

mod action;
pub mod allocator;
mod delete;
mod directory;
mod engine;
mod extents;
mod failure;
mod get;
pub mod held_blocks;
mod image;
mod insert;
mod key_at;
mod lifetime;
mod location_cache;
mod long_values;
mod lookups;
mod measuring;
mod modify;
mod new_block;
mod open_region;
mod operation;
mod operation_metrics;
#[allow(unsafe_code, reason = "the mapping is shared by threads")]
mod pairs;
mod put;
mod random;
mod read_reports;
mod read_samples;
mod region_handle;
pub mod removal;
mod request_split;
mod retry_state;
mod scan;
mod shared_word;
pub mod split;
mod split_requests;
pub mod sweep;
mod swing;
mod version;
mod waiting;
mod window;

pub use action::{Action, Change, Expected, Modification};
pub use directory::{Directory, Subtable};
pub use engine::{Engine, LANE};
pub use extents::{ExtentWriter, ReadRange};
pub use failure::{Exhausted, Failure, OperationError};
pub use get::CachedRead;
pub use key_at::read_key_at;
pub use lifetime::Lifetime;
pub use location_cache::{ConnectionCache, LocationCache, Successor};
pub use long_values::{PostedGet, PostedPut, ReadValue, ValueTarget};
pub use lookups::{CacheStatistics, Lookups, ReadCounts, SessionLookups};
pub use open_region::{Constants, OpenRegion, RegionOptions};
pub use operation::{Answer, Found, LONG_VALUE_BYTES, Operation, staged_key};
pub use operation_metrics::{
    KindTotals, Latencies, Measurement, OperationKind, OperationMetrics, OperationTotals,
    RetryReason,
};
pub use put::{CachedPut, DisplacedPut};
pub use random::Random;
pub use read_reports::{REPORTS_MAX, ReadReports};
pub use read_samples::ReadSamples;
pub use region_handle::RegionHandle;
pub use scan::{
    Entry, HASHES, KeyEntry, ScanCursor, ScannedSlot, count_part, next_entry, next_key, read_part,
    read_slot,
};
pub use split_requests::Prefix;
pub use swing::SwingResult;
pub use version::{Value, Version};

pub(crate) use failure::ProtocolResult;
pub(crate) use operation::{ATTEMPTS_MAX, ExaminedBlock, ProvenSlot, is_moving, read_block};
pub(crate) use retry_state::RetryState;
