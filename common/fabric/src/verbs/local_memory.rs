//! Registered memory of this process.

use std::sync::Arc;

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::ffi::ibv_access_flags;
use super::ffi::system;
use super::handles::{MemoryRegion, ProtectionDomain};
use crate::rdma::VerbsError;

const HUGE_PAGE_BYTES: usize = 2 << 20;
const HUGE_PAGE_BITS: u8 = 21;
/// The length from which memory is put on huge pages. For shorter memory a huge page is a waste.
const HUGE_BYTES_MIN: usize = 256 << 10;

/// Memory that only this process and its own device use.
pub(super) struct Registered {
    /// Declared before the memory, so that it is dropped first.
    region: MemoryRegion,
    memory: MmapRaw,
}

impl Registered {
    /// At least `bytes` zeroed bytes, on huge pages if the system has any.
    pub(super) fn new(domain: &Arc<ProtectionDomain>, bytes: usize) -> Result<Self, VerbsError> {
        let huge = || {
            let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
            MmapOptions::new().len(bytes).huge(Some(HUGE_PAGE_BITS)).map_anon().ok()
        };
        let memory = match if bytes >= HUGE_BYTES_MIN { huge() } else { None } {
            Some(memory) => memory,
            None => MmapOptions::new()
                .len(bytes.max(1))
                .map_anon()
                .map_err(system("allocating memory for RDMA"))?,
        };
        let memory = MmapRaw::from(memory);
        // Without this, a write after a fork could move this process to a copy of a page, while the
        // device uses the original.
        let _ = memory.advise(Advice::DontFork);
        let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        // SAFETY: `memory` is dropped after the region, and its users hold no references into it
        // while work requests that name it are in flight.
        let region =
            unsafe { MemoryRegion::register(domain, memory.as_mut_ptr(), memory.len(), access)? };
        Ok(Self { region, memory })
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.memory.as_mut_ptr()
    }

    /// The key for local work requests.
    pub(super) fn lkey(&self) -> u32 {
        self.region.lkey()
    }
}
