//! Memory of the caller that RDMA devices can access directly.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::{Advice, MmapOptions, MmapRaw};

/// The length from which memory is worth huge pages, in bytes.
const HUGE_BYTES_MIN: usize = 2 << 20;

/// Memory for values, between which and a region an RDMA device transfers without a copy. Each
/// session registers it with its device when it first uses it; until the buffer is dropped its
/// pages are pinned. Over shared memory and TCP it is memory as any other.
///
/// A GET of a value leaves undefined what follows the value in the buffer.
pub struct RegisteredBuffer {
    pages: Arc<Pages>,
}

/// The pages of a buffer. A session that has registered them keeps them mapped.
pub(crate) struct Pages {
    map: MmapRaw,
    bytes: usize,
}

/// The pages of all buffers of this process.
static ALL: Mutex<Vec<Weak<Pages>>> = Mutex::new(Vec::new());

impl Pages {
    /// The pages of the buffer in which this memory is.
    #[cfg(feature = "verbs")]
    pub(crate) fn of(memory: &[u8]) -> Option<Arc<Self>> {
        let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).find(|pages| pages.has(memory))
    }

    /// Whether this memory is among the pages.
    #[cfg(feature = "verbs")]
    pub(crate) fn has(&self, memory: &[u8]) -> bool {
        let (pages, memory) = (self.map.as_mut_ptr() as usize, memory.as_ptr_range());
        pages <= memory.start as usize && memory.end as usize <= pages + self.bytes
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.map.as_ptr() as usize, other.map.as_ptr() as usize);
        a < b + other.map.len() && b < a + self.map.len()
    }

    #[cfg(feature = "verbs")]
    pub(crate) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    #[cfg(feature = "verbs")]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl RegisteredBuffer {
    /// A buffer of so many bytes, which are zero.
    ///
    /// # Errors
    /// The system's error: it has no such memory.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let map = MmapRaw::from(MmapOptions::new().len(bytes.max(1)).map_anon()?);
        // Without this, a write after a fork could move this process to a copy of a page, while the
        // device uses the original.
        let _ = map.advise(Advice::DontFork);
        if bytes >= HUGE_BYTES_MIN {
            // Without huge pages it is only slower.
            let _ = map.advise(Advice::HugePage);
        }
        let pages = Arc::new(Pages { map, bytes });
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        // What overlaps belongs to the parent of a fork, whose pages are not mapped here.
        all.retain(|known| known.upgrade().is_some_and(|known| !known.overlaps(&pages)));
        all.push(Arc::downgrade(&pages));
        Ok(Self { pages })
    }
}

impl Deref for RegisteredBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Pages { map, bytes } = &*self.pages;
        // SAFETY: the pages are mapped as long as `self`. Only calls that borrow them mutably have
        // them changed, by this process or by a device.
        unsafe { std::slice::from_raw_parts(map.as_ptr(), *bytes) }
    }
}

impl DerefMut for RegisteredBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let Pages { map, bytes } = &*self.pages;
        // SAFETY: likewise. No other buffer has these pages, and sessions only keep them mapped.
        unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr(), *bytes) }
    }
}

impl AsRef<[u8]> for RegisteredBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for RegisteredBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegisteredBuffer").field("bytes", &self.pages.bytes).finish()
    }
}
