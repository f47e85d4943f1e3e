//! Memory for threads to share, in pairs of words that are loaded and stored as one.

use std::io;
use std::ops::Deref;

use memmap2::{Advice, MmapMut, MmapRaw};
use portable_atomic::AtomicU128;

/// So many pairs, all zero at first. The system provides pages only as they are used, huge ones if
/// it has some.
pub(crate) struct Pairs {
    map: MmapRaw,
}

impl Pairs {
    /// Room for `count` pairs.
    ///
    /// # Errors
    /// What the system says, mostly that there is not so much memory.
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let map = MmapMut::map_anon(count.saturating_mul(size_of::<AtomicU128>()))?;
        // Small pages do as well, a little slower.
        let _ = map.advise(Advice::HugePage);
        Ok(Self { map: map.into() })
    }
}

impl Deref for Pairs {
    type Target = [AtomicU128];

    #[inline]
    fn deref(&self) -> &[AtomicU128] {
        let count = self.map.len() / size_of::<AtomicU128>();
        // SAFETY: the mapping has this length, starts at a page and lives as long as `self`; it is
        // this value's own, and reached as such atomics only, for which all bits are good.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), count) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn pairs_are_zero_and_as_many_as_were_asked_for() {
        let pairs = Pairs::new(1000).unwrap();
        assert_eq!(pairs.len(), 1000);
        assert!(pairs.iter().all(|pair| pair.swap(u128::MAX, Ordering::Relaxed) == 0));
        assert_eq!(pairs[999].load(Ordering::Relaxed), u128::MAX);
        assert!(Pairs::new(0).unwrap().is_empty() && Pairs::new(usize::MAX).is_err());
    }
}
