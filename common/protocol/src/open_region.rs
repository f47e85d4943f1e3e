//! What a session has for one region: its format and constants, its hasher, its directory, the
//! location cache, the free blocks.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::sync::Arc;

use farside_fabric::{Nanos, RegionIndex, Timing};
use farside_layout::hash::{KeyHash, KeyHasher};
use farside_layout::{
    DirectoryEntry, Format, Geometry, INCARNATIONS, Slot, WINDOW_SLOTS, proof_age_max_ns,
};

use crate::OperationError;
use crate::allocator::{Allocator, BlockSource};
use crate::directory::{Directory, Subtable};
use crate::failure::Failure;
use crate::location_cache::{ConnectionCache, LocationCache, Lookups};

/// All slots, in [`OpenRegion::record_unused_slots`].
pub(crate) const ROOM_ALL: u32 = 1 << 10;
/// It is an average over so many windows.
const ROOM_WINDOWS: u32 = 8;

/// The constants of `docs/protocol.md`, for one region over one fabric.
#[derive(Clone, Copy, Debug)]
pub struct Constants {
    /// GRACE: how long an unlinked block stays untouched.
    pub grace_ns: Nanos,
    /// What an operation believes for: 7/8 GRACE, because clocks drift.
    pub patience_ns: Nanos,
    /// How long a READ may take for its hints to be exact (invariant I7).
    pub exact_hint_read_ns_max: Nanos,
    /// How old a proof of a word may be for a compare-and-swap to rely on (invariant I4).
    pub proof_age_ns_max: Nanos,
    /// How late a posted chain can take effect.
    pub lateness_ns: Nanos,
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
        }
    }
}

/// Which region a session is to find, and how it works there.
#[derive(Clone, Copy, Debug)]
pub struct RegionOptions {
    /// The region's own number: another one at the same place is refused.
    pub region_id: [u8; 16],
    /// The region's length, in bytes.
    pub region_bytes: u64,
    /// The number that the server gave the client.
    pub client_id: u16,
    /// How much memory the client's location cache takes, in bytes.
    pub cache_bytes: usize,
}

/// A region, as one session knows it. Nothing in it accesses the region.
pub struct OpenRegion {
    /// Which of the fabric's regions it is.
    pub index: RegionIndex,
    /// Its constants.
    pub format: Format,
    /// Where its parts are.
    pub geometry: Geometry,
    /// How long what was read counts.
    pub constants: Constants,
    /// Its hash of keys.
    pub hasher: KeyHasher,
    /// The number that its server gave the client.
    pub client_id: u16,
    pub(crate) directory: RefCell<Directory>,
    /// Where keys were found; shared by the sessions of a client.
    pub cache: Arc<LocationCache>,
    /// What the location cache did for this session.
    pub lookups: Lookups,
    pub(crate) allocator: RefCell<Allocator>,
    /// How many of [`ROOM_ALL`] slots where keys were inserted lately were never used before.
    pub(crate) room: Cell<u32>,
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
            lookups: Lookups::default(),
            allocator: RefCell::new(Allocator::new(blocks, constants.grace_ns, lanes)),
            room: Cell::new(0),
            format,
        }
    }

    /// The copy of the directory.
    pub fn directory(&self) -> Ref<'_, Directory> {
        self.directory.borrow()
    }

    /// A subtable that was seen complete is where keys with this directory hash are.
    pub fn update_directory(&self, directory_hash: u32, subtable: Subtable) -> Result<(), Failure> {
        let entry = DirectoryEntry::new(subtable.offset, subtable.local_depth);
        Ok(self.directory.borrow_mut().update(directory_hash, entry, &self.geometry)?)
    }

    /// The free blocks.
    #[inline]
    pub fn allocator(&self) -> RefMut<'_, Allocator> {
        self.allocator.borrow_mut()
    }

    /// Takes note of the slots of a window where a key is inserted.
    pub fn record_unused_slots(&self, slots: &[Slot; WINDOW_SLOTS]) {
        let unused = slots.iter().filter(|slot| slot.is_unused()).count() as u32;
        let seen = unused * ROOM_ALL / WINDOW_SLOTS as u32;
        self.room.set(self.room.get() * (ROOM_WINDOWS - 1) / ROOM_WINDOWS + seen / ROOM_WINDOWS);
    }

    /// Whether an INSERT need not look first: any slot of the key's window was probably never used,
    /// and there is a window where the directory leads.
    pub fn may_claim_blindly(&self, hash: KeyHash) -> bool {
        self.room.get() > ROOM_ALL / 2 && self.directory.borrow().is_confirmed(hash)
    }

    /// If the directory leads to this window, by this local depth, it is right: the rows said so.
    pub fn confirm_directory(&self, hash: KeyHash, window: (u64, u8)) {
        self.directory.borrow_mut().confirm(hash, window);
    }

    /// The key was there, so a claim would be for nothing: the next INSERTs look first.
    pub fn expect_no_room(&self) {
        self.room.set(0);
    }

    /// That the key may be looked up in this region.
    pub fn check_key(&self, key: &[u8]) -> Result<(), OperationError> {
        let max = self.format.key_bytes_max as usize;
        match key.len() {
            0 => Err(OperationError::KeyEmpty),
            bytes if bytes > max => Err(OperationError::KeyTooLong { bytes, max }),
            _ => Ok(()),
        }
    }

    /// That the value may be stored in this region.
    pub fn check_value(&self, value: &[u8]) -> Result<(), OperationError> {
        let max = self.format.value_bytes_max as usize;
        match value.len() {
            bytes if bytes > max => Err(OperationError::ValueTooLong { bytes, max }),
            _ => Ok(()),
        }
    }
}

impl Drop for OpenRegion {
    fn drop(&mut self) {
        self.allocator.get_mut().give_all();
    }
}
