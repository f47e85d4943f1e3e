//! The state that a session has for each region: format and constants, the hash of keys, the copy
//! of the directory, the location cache and free blocks.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::sync::Arc;

use farside_fabric::{Nanos, RegionIndex, Timing, Trust};
use farside_layout::hash::{KeyHash, KeyHasher};
use farside_layout::{
    DirectoryEntry, ExtentShape, Format, Geometry, INCARNATIONS, Slot, WINDOW_SLOTS,
    proof_age_max_ns,
};

use crate::OperationError;
use crate::allocator::{Allocator, BlockSource};
use crate::directory::{Directory, Subtable};
use crate::extents::ExtentTables;
use crate::failure::Failure;
use crate::location_cache::{ConnectionCache, LocationCache};
use crate::lookups::{METRICS_WATCH, SessionLookups};
use crate::operation_metrics::OperationMetrics;

/// The value of [`OpenRegion::unused_share`] if no slot of the windows was ever used.
pub(crate) const UNUSED_SHARE_MAX: u32 = 1 << 10;
/// [`OpenRegion::unused_share`] is a moving average over about this many windows.
const SHARE_WINDOWS: u32 = 8;

/// The least and the greatest [`Constants::backoff_ns`]. No pause is longer than 1024 times the
/// greatest.
const BACKOFF_NS_MIN: Nanos = 250;
const BACKOFF_NS_MAX: Nanos = 20_000;

/// The constants of `docs/protocol.md`, for one region over one fabric.
#[derive(Clone, Copy, Debug)]
pub struct Constants {
    /// GRACE: how long an unlinked block stays unchanged.
    pub grace_ns: Nanos,
    /// How long an operation relies on the data of a READ: 7/8 GRACE, because clocks drift.
    pub patience_ns: Nanos,
    /// T_hint: the longest READ whose hints are exact (invariant I7).
    pub exact_hint_read_ns_max: Nanos,
    /// T_word: the greatest age of a proof of a word on which a compare-and-swap relies (invariant
    /// I4).
    pub proof_age_ns_max: Nanos,
    /// The longest time after its post at which a chain can take effect.
    pub lateness_ns: Nanos,
    /// The longest random pause before the second attempt of an operation that other clients
    /// disturbed: a usual round trip, which is several times the shortest one. Many clients that
    /// change the same key need pauses of many round trips.
    pub backoff_ns: Nanos,
}

impl Constants {
    pub(crate) fn new(format: &Format, timing: Timing) -> Self {
        let grace_ns = format.grace_ns();
        Self {
            grace_ns,
            patience_ns: grace_ns / 8 * 7,
            exact_hint_read_ns_max: (INCARNATIONS - 1) * timing.round_trip_min_ns,
            proof_age_ns_max: proof_age_max_ns(grace_ns, timing.lateness_max_ns),
            lateness_ns: timing.lateness_max_ns,
            backoff_ns: (4 * timing.round_trip_min_ns).clamp(BACKOFF_NS_MIN, BACKOFF_NS_MAX),
        }
    }
}

/// The region that a session opens, and its settings there.
#[derive(Clone, Debug)]
pub struct RegionOptions {
    /// The id in the region's superblock. A region with another id is refused.
    pub region_id: [u8; 16],
    /// The region's length, in bytes.
    pub region_bytes: u64,
    /// The number that the server assigned to the client.
    pub client_id: u16,
    /// The size of the client's location cache, in bytes.
    pub cache_bytes: usize,
    /// The time until which the client trusts the region's server.
    pub trust: Trust,
}

/// A session's state for one region. Its methods do not access the region.
pub struct OpenRegion {
    /// The region's number in the fabric.
    pub index: RegionIndex,
    /// The constants in its superblock.
    pub format: Format,
    /// The offsets of its parts.
    pub geometry: Geometry,
    /// Its constants of time.
    pub constants: Constants,
    /// Its hash of keys.
    pub hasher: KeyHasher,
    /// The number that its server assigned to the client.
    pub client_id: u16,
    pub(crate) directory: RefCell<Directory>,
    /// The locations of keys, shared by the sessions of a client.
    pub cache: Arc<LocationCache>,
    /// Counts of this session's lookups in the location cache and of its reads, and the blocks that
    /// it read lately.
    pub lookups: SessionLookups,
    pub(crate) allocator: RefCell<Allocator>,
    /// How values are divided into extents.
    pub extent_shape: ExtentShape,
    /// The tables of extents that the session has seen.
    pub(crate) extent_tables: RefCell<ExtentTables>,
    /// The time until which the client trusts the server. No chain is posted later (invariant I24).
    pub trust: Trust,
    /// The counts for the metrics of the client. Without metrics, counts that are not used: an
    /// `Option` would take two instructions more where the metrics count.
    pub(crate) metrics: Arc<OperationMetrics>,
    pub(crate) has_metrics: bool,
    /// A GET's READ of a cached location that took less than this is fresh, and needs no count.
    uncounted_read_ns: Nanos,
    /// The share of slots that were never used, in the windows of recent INSERTs: from 0 to
    /// [`UNUSED_SHARE_MAX`], which stands for all.
    pub(crate) unused_share: Cell<u32>,
}

impl OpenRegion {
    pub(crate) fn new(
        index: RegionIndex,
        (format, constants): (Format, Constants),
        blocks: Box<dyn BlockSource + Send>,
        (options, lanes): (&RegionOptions, u16),
        cache: &ConnectionCache,
        now: Nanos,
    ) -> Self {
        Self {
            index,
            geometry: format.geometry(),
            constants,
            hasher: KeyHasher::new(&format.hash_key),
            client_id: options.client_id,
            directory: RefCell::default(),
            cache: cache.get(options.cache_bytes, constants.proof_age_ns_max, now),
            lookups: SessionLookups::default(),
            allocator: RefCell::new(Allocator::new(blocks, constants.grace_ns, lanes)),
            extent_shape: ExtentShape::OF_REGIONS,
            extent_tables: RefCell::new(ExtentTables::new(lanes)),
            trust: options.trust.clone(),
            metrics: OperationMetrics::unused(),
            has_metrics: false,
            uncounted_read_ns: constants.patience_ns + 1,
            unused_share: Cell::new(0),
            format,
        }
    }

    /// Counts the operations of this session here.
    pub fn set_metrics(&mut self, metrics: Arc<OperationMetrics>) {
        (self.metrics, self.has_metrics) = (metrics, true);
        // Both send cached operations to the parts that count them.
        self.uncounted_read_ns = 0;
        self.lookups.watch_puts(METRICS_WATCH);
    }

    /// The key, with its hash.
    #[inline]
    pub fn hashed<'k>(&self, key: &'k [u8]) -> (KeyHash, &'k [u8]) {
        (self.hasher.hash(key), key)
    }

    /// The copy of the directory.
    pub fn directory(&self) -> Ref<'_, Directory> {
        self.directory.borrow()
    }

    /// Notes that keys with this directory hash are in this subtable, which a READ saw complete. So
    /// the client may rely on it from now on (invariant I17).
    pub fn update_directory(&self, directory_hash: u32, subtable: Subtable) -> Result<(), Failure> {
        let entry = DirectoryEntry::new(subtable.offset, subtable.local_depth);
        Ok(self.directory.borrow_mut().update(directory_hash, entry, &self.geometry)?)
    }

    /// The free blocks.
    #[inline]
    pub fn allocator(&self) -> RefMut<'_, Allocator> {
        self.allocator.borrow_mut()
    }

    /// Counts the unused slots of a window into which a key is inserted.
    pub fn record_unused_slots(&self, slots: &[Slot; WINDOW_SLOTS]) {
        let unused = slots.iter().filter(|slot| slot.is_unused()).count() as u32;
        let share = unused * UNUSED_SHARE_MAX / WINDOW_SLOTS as u32;
        let before = self.unused_share.get() * (SHARE_WINDOWS - 1) / SHARE_WINDOWS;
        self.unused_share.set(before + share / SHARE_WINDOWS);
    }

    /// Whether an INSERT claims a slot before it reads the window: a slot of the window was
    /// probably never used, and the directory entry is confirmed.
    pub fn may_claim_blindly(&self, hash: KeyHash) -> bool {
        self.unused_share.get() > UNUSED_SHARE_MAX / 2 && self.directory.borrow().is_confirmed(hash)
    }

    /// Notes that the rows of this window, with this local depth, belong to the key's subtable.
    pub fn confirm_directory(&self, hash: KeyHash, window: (u64, u8)) {
        self.directory.borrow_mut().confirm(hash, window);
    }

    /// Returns when a store, posted at this time, counts as a proof of its key's location. If the
    /// server asks for reads, that is a little earlier, so that the first cached GET proves the
    /// location again, and reports the read.
    #[inline]
    pub(crate) fn proof_by_store(&self, posted: Nanos) -> Nanos {
        if self.lookups.reads.are_wanted() { self.cache.earlier_stamp(posted) } else { posted }
    }

    /// Whether the data of a READ that was posted at this time is still valid (invariant I3).
    #[inline]
    pub(crate) fn is_fresh(&self, posted: Nanos, now: Nanos) -> bool {
        now.saturating_sub(posted) <= self.constants.patience_ns
    }

    /// As [`OpenRegion::is_fresh`], for a GET's READ of so many bytes at a cached location. Counts
    /// the GET if there are metrics.
    #[inline(always)]
    pub(crate) fn is_fresh_get(&self, posted: Nanos, now: Nanos, bytes: usize) -> bool {
        let latency = now.saturating_sub(posted);
        latency < self.uncounted_read_ns || self.count_get(latency, bytes)
    }

    /// Reached if the READ is too old, or if there are metrics. Then checks its age, and counts the
    /// GET if it is fresh.
    #[inline(always)]
    fn count_get(&self, latency: Nanos, bytes: usize) -> bool {
        let is_fresh = latency <= self.constants.patience_ns;
        if is_fresh {
            self.metrics.add_cached_get(latency, bytes as u64);
        }
        is_fresh
    }

    /// Checks the key's length against the region's limit.
    ///
    /// # Errors
    /// [`OperationError::KeyEmpty`], [`OperationError::KeyTooLong`].
    #[inline]
    pub fn check_key(&self, key: &[u8]) -> Result<(), OperationError> {
        let max = self.format.key_bytes_max as usize;
        match key.len() {
            0 => Err(OperationError::KeyEmpty),
            bytes if bytes > max => Err(OperationError::KeyTooLong { bytes, max }),
            _ => Ok(()),
        }
    }

    /// Checks the lengths of a key and a value, in bytes, against the region's limits.
    ///
    /// # Errors
    /// As [`OpenRegion::check_key`] and [`OpenRegion::check_value`].
    pub fn check_lengths(&self, (key, value): (usize, usize)) -> Result<(), OperationError> {
        let max = self.format.key_bytes_max as usize;
        if key > max {
            return Err(OperationError::KeyTooLong { bytes: key, max });
        }
        self.check_value_bytes(value)
    }

    /// Checks the value's length against the region's limit.
    ///
    /// # Errors
    /// [`OperationError::ValueTooLong`].
    #[inline]
    pub fn check_value(&self, value: &[u8]) -> Result<(), OperationError> {
        self.check_value_bytes(value.len())
    }

    /// [`OpenRegion::check_value`] by the value's length.
    pub(crate) fn check_value_bytes(&self, bytes: usize) -> Result<(), OperationError> {
        let max = self.format.value_bytes_max as usize;
        if bytes > max { Err(OperationError::ValueTooLong { bytes, max }) } else { Ok(()) }
    }
}

impl Drop for OpenRegion {
    fn drop(&mut self) {
        self.allocator.get_mut().give_all();
    }
}
