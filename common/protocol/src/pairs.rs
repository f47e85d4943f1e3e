//! Memory that threads share, as pairs of words. A pair is loaded and stored atomically.

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;

use memmap2::{Advice, MmapMut, MmapRaw};
use portable_atomic::AtomicU128;

/// Fewer pairs than this are on the heap: a page of 4 KiB holds as many.
const MAPPED_MIN: usize = 256;

/// An array of pairs, all zero at first. The system provides each page when it is first used, and
/// huge pages if it has some.
pub(crate) struct Pairs {
    pairs: NonNull<[AtomicU128]>,
    /// `None` if the pairs are on the heap.
    map: Option<MmapRaw>,
}

// SAFETY: the pairs belong to `self`, and threads may share atomics.
unsafe impl Send for Pairs {}
// SAFETY: likewise.
unsafe impl Sync for Pairs {}

impl Pairs {
    /// Returns memory for `count` pairs.
    ///
    /// # Errors
    /// The system's error, usually because there is not enough memory.
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        if count < MAPPED_MIN {
            let pairs: Box<[_]> = (0..count).map(|_| AtomicU128::new(0)).collect();
            return Ok(Self { pairs: NonNull::from(Box::leak(pairs)), map: None });
        }
        let map = MmapMut::map_anon(count.saturating_mul(size_of::<AtomicU128>()))?;
        // Without huge pages the location cache works too, a little slower.
        let _ = map.advise(Advice::HugePage);
        let map = MmapRaw::from(map);
        let start = NonNull::new(map.as_mut_ptr().cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { pairs: NonNull::slice_from_raw_parts(start, count), map: Some(map) })
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        if self.map.is_none() {
            // SAFETY: `new` leaked this box, and nothing uses it any more.
            drop(unsafe { Box::from_raw(self.pairs.as_ptr()) });
        }
    }
}

impl Deref for Pairs {
    type Target = [AtomicU128];

    #[inline]
    fn deref(&self) -> &[AtomicU128] {
        // SAFETY: the mapping is aligned to a page and has this length, or it is a box of pairs. It
        // lives as long as `self`. It is private to `self` and accessed only as these atomics, for
        // which all bits are valid.
        unsafe { self.pairs.as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn pairs_start_as_zeros_in_the_requested_number() {
        let pairs = Pairs::new(1000).unwrap();
        assert_eq!(pairs.len(), 1000);
        assert!(pairs.iter().all(|pair| pair.swap(u128::MAX, Ordering::Relaxed) == 0));
        assert_eq!(pairs[999].load(Ordering::Relaxed), u128::MAX);
        assert_eq!(Pairs::new(10).unwrap()[9].load(Ordering::Relaxed), 0);
        assert!(Pairs::new(0).unwrap().is_empty() && Pairs::new(usize::MAX).is_err());
    }
}
