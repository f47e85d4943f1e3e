//! A region in memory that processes share, word by word.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::Advice;

use super::mapping::Mapping;
use super::words;
use crate::ChainError;

/// A mapped region. Every access is to whole words through [`AtomicU64`], so nothing here is a data
/// race, whatever other processes do; every access is checked against the region's end.
pub struct Region {
    map: Mapping,
    writable: bool,
}

/// The unit of every access, in bytes.
const WORD_BYTES: u64 = size_of::<u64>() as u64;
const CACHE_LINE_WORDS: usize = 8;

impl Region {
    /// Maps the whole file for reading and writing.
    ///
    /// # Errors
    /// What the system says: `PermissionDenied` for a read-only descriptor.
    pub fn map(file: &File) -> io::Result<Self> {
        Self::checked(Mapping::new(file, true)?, true)
    }

    /// Maps the whole file for reading: the memory itself refuses stores.
    ///
    /// # Errors
    /// What the system says.
    pub fn map_read_only(file: &File) -> io::Result<Self> {
        Self::checked(Mapping::new(file, false)?, false)
    }

    fn checked(map: Mapping, writable: bool) -> io::Result<Self> {
        if map.len() < WORD_BYTES as usize {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the region is empty"));
        }
        // A forked child would share free blocks with its parent; it has to connect by itself.
        // Where the system does not know the advice, the documentation has to do.
        let _ = map.advise(Advice::DontFork);
        Ok(Self { map, writable })
    }

    /// Tells the system that huge pages are welcome, whenever it has some.
    pub(super) fn advise_huge_pages(&self) {
        // Without them the region is only slower.
        let _ = self.map.advise(Advice::HugePage);
    }

    /// Makes 2 MiB pages of a part of the region, which may be in use.
    ///
    /// # Errors
    /// What the system says, if the part does not have 2 MiB pages everywhere.
    pub(super) fn collapse(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.map.collapse(offset, bytes)
    }

    /// The length, in bytes.
    pub fn bytes(&self) -> u64 {
        self.words().len() as u64 * WORD_BYTES
    }

    /// Where it is mapped, for devices.
    #[cfg(any(test, feature = "verbs"))]
    pub(crate) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Whether stores are possible at all.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        let first = self.map.as_mut_ptr().cast::<AtomicU64>();
        // SAFETY: the mapping lives as long as `self`, is page-aligned and this many words long.
        // This process accesses it only as atomics. Other processes and devices change it at any
        // time, which is outside of the language: to it they are like another thread's relaxed
        // atomics, because nothing here is of a type that some bytes would make invalid. A file
        // that was cut short raises SIGBUS, and no access returns. A read-only mapping is only
        // loaded from: the methods that store check `writable`.
        unsafe { std::slice::from_raw_parts(first, self.map.len() / WORD_BYTES as usize) }
    }

    #[inline]
    fn range(&self, offset: u64, words: usize) -> Result<&[AtomicU64], ChainError> {
        let start = (offset / WORD_BYTES) as usize;
        match start.checked_add(words).and_then(|end| self.words().get(start..end)) {
            Some(range) if offset.is_multiple_of(WORD_BYTES) => Ok(range),
            _ => Err(ChainError::Outside { remote: offset, bytes: words as u64 * WORD_BYTES }),
        }
    }

    #[inline]
    fn word(&self, offset: u64) -> Result<&AtomicU64, ChainError> {
        Ok(&self.range(offset, 1)?[0])
    }

    #[inline]
    fn word_to_change(&self, offset: u64) -> Result<&AtomicU64, ChainError> {
        if self.writable { self.word(offset) } else { Err(ChainError::Denied) }
    }

    /// Copies words out, in no particular order.
    ///
    /// # Errors
    /// [`ChainError::Outside`].
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u64]) -> Result<(), ChainError> {
        words::read(self.range(offset, into.len())?, into);
        Ok(())
    }

    /// Copies words in, in no particular order; a later compare-and-swap publishes them.
    ///
    /// # Errors
    /// [`ChainError::Outside`], [`ChainError::Denied`].
    #[inline]
    pub fn write(&self, offset: u64, from: &[u64]) -> Result<(), ChainError> {
        if !self.writable {
            return Err(ChainError::Denied);
        }
        words::write(self.range(offset, from.len())?, from);
        Ok(())
    }

    /// One word.
    ///
    /// # Errors
    /// [`ChainError::Outside`].
    #[inline]
    pub fn load(&self, offset: u64) -> Result<u64, ChainError> {
        let mut value = [0];
        self.read(offset, &mut value)?;
        Ok(value[0])
    }

    /// Replaces one word.
    ///
    /// # Errors
    /// [`ChainError::Outside`], [`ChainError::Denied`].
    #[inline]
    pub fn store(&self, offset: u64, value: u64) -> Result<(), ChainError> {
        self.word_to_change(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Replaces four bytes and leaves the other half of their word as it is, even if it changes
    /// meanwhile.
    ///
    /// # Errors
    /// [`ChainError::Outside`], [`ChainError::Denied`].
    #[inline]
    pub fn store_half(&self, offset: u64, value: u32) -> Result<(), ChainError> {
        if !offset.is_multiple_of(4) {
            return Err(ChainError::Outside { remote: offset, bytes: 4 });
        }
        let word = self.word_to_change(offset & !(WORD_BYTES - 1))?;
        words::write_half(word, offset % WORD_BYTES * 8, value);
        Ok(())
    }

    /// Replaces the word if it is `expected`; returns the word found.
    ///
    /// # Errors
    /// [`ChainError::Outside`], [`ChainError::Denied`].
    #[inline]
    pub fn compare_swap(
        &self,
        offset: u64,
        expected: u64,
        desired: u64,
    ) -> Result<u64, ChainError> {
        let word = self.word_to_change(offset)?;
        Ok(words::swap(word, expected, desired))
    }

    /// Tells the processor that these bytes will be read; any offset will do.
    #[inline]
    pub fn prefetch(&self, offset: u64, bytes: u32) {
        self.lines(offset, bytes).for_each(prefetch);
    }

    /// Tells the processor that these bytes will be changed; any offset will do.
    #[inline]
    pub fn prefetch_to_change(&self, offset: u64, bytes: u32) {
        if self.writable {
            self.lines(offset, bytes).for_each(prefetch_to_change);
        }
    }

    /// The first word of each cache line of these bytes, if they are inside.
    #[inline]
    fn lines(&self, offset: u64, bytes: u32) -> impl Iterator<Item = &AtomicU64> {
        let words = self.range(offset, (u64::from(bytes) / WORD_BYTES) as usize);
        words.unwrap_or_default().iter().step_by(CACHE_LINE_WORDS)
    }
}

/// Tells the processor that this will be wanted soon: the cache line it starts in.
#[inline]
pub fn prefetch<T>(wanted: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint about memory that is mapped, by the reference.
        unsafe { _mm_prefetch(std::ptr::from_ref(wanted).cast::<i8>(), _MM_HINT_T0) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = wanted;
}

/// As [`prefetch`], taking the cache line from other processors: a thread that changes what it
/// fetched as a reader waits for it a second time.
#[inline]
fn prefetch_to_change<T>(wanted: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint about memory that is mapped, by the reference; without effect on processors
    // that do not know it. Not an intrinsic, which becomes another hint unless every processor
    // that runs the program is said to know it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) wanted, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    prefetch(wanted);
}
