//! Memory that threads share, as pairs of words. A pair is loaded and stored atomically.

use std::io;
use std::ops::Deref;

use memmap2::{Advice, MmapMut, MmapRaw};
use portable_atomic::AtomicU128;

/// An array of pairs, all zero at first. The system provides each page when it is first used, and
/// huge pages if it has some.
pub(crate) struct Pairs {
    map: MmapRaw,
}

impl Pairs {
    /// Maps memory for `count` pairs.
    ///
    /// # Errors
    /// The system's error, usually because there is not enough memory.
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let map = MmapMut::map_anon(count.saturating_mul(size_of::<AtomicU128>()))?;
        // Without huge pages the location cache works too, a little slower.
        let _ = map.advise(Advice::HugePage);
        Ok(Self { map: map.into() })
    }
}

impl Deref for Pairs {
    type Target = [AtomicU128];

    #[inline]
    fn deref(&self) -> &[AtomicU128] {
        let count = self.map.len() / size_of::<AtomicU128>();
        // SAFETY: the mapping is aligned to a page, has this length and lives as long as `self`.
        // It is private to `self` and accessed only as these atomics, for which all bits are valid.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), count) }
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
        assert!(Pairs::new(0).unwrap().is_empty() && Pairs::new(usize::MAX).is_err());
    }
}
