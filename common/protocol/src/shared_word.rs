//! A word of 32 bits that two threads of a session share. Generic, so that loom can run the same
//! code on its own atomics.

use std::sync::atomic::{AtomicU32, Ordering};

/// The memory of an address or a count.
pub(crate) trait SharedWord {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
}

/// Implements [`SharedWord`] for an atomic type.
macro_rules! impl_shared_word {
    ($word:ty) => {
        impl SharedWord for $word {
            #[inline]
            fn load(&self, order: Ordering) -> u32 {
                self.load(order)
            }

            #[inline]
            fn store(&self, value: u32, order: Ordering) {
                self.store(value, order);
            }
        }
    };
}

impl_shared_word!(AtomicU32);
#[cfg(test)]
impl_shared_word!(loom::sync::atomic::AtomicU32);
