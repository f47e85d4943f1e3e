//! A region that processes share, and the accesses to its words.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::Advice;

use super::mapping::Mapping;
use super::words;
use crate::ChainError;
use crate::lent::PART_BYTES;

/// A mapped region. Every access is to whole words through [`AtomicU64`], so no access of any
/// process is a data race. Every access is checked against the region's end.
pub struct Region {
    pub(super) map: Mapping,
    writable: bool,
}

/// The unit of every access, in bytes.
const WORD_BYTES: u64 = size_of::<u64>() as u64;
const CACHE_LINE_WORDS: usize = 8;
const PART_WORDS: usize = PART_BYTES / WORD_BYTES as usize;
/// The first words of a part, which are prefetched one part earlier than its rest. A processor
/// stalls if many more cache lines are in flight.
const AHEAD_WORDS: usize = 16 * CACHE_LINE_WORDS;

impl Region {
    /// Maps the whole file for reading and writing.
    ///
    /// # Errors
    /// The system's error: `PermissionDenied` for a read-only descriptor.
    pub fn map(file: &File) -> io::Result<Self> {
        Self::mapped(file, true)
    }

    /// Maps the whole file for reading. The memory itself refuses stores.
    ///
    /// # Errors
    /// The system's error.
    pub fn map_read_only(file: &File) -> io::Result<Self> {
        Self::mapped(file, false)
    }

    fn mapped(file: &File, writable: bool) -> io::Result<Self> {
        let map = Mapping::new(file, writable)?;
        if map.len() < WORD_BYTES as usize {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the region is empty"));
        }
        // A forked child must make a connection of its own: with this mapping it would use its
        // parent's free blocks. On a system without this advice the child keeps the mapping.
        let _ = map.advise(Advice::DontFork);
        Ok(Self { map, writable })
    }

    /// Asks the system to use huge pages when it has some.
    pub(super) fn advise_huge_pages(&self) {
        // Without huge pages the region is only slower.
        let _ = self.map.advise(Advice::HugePage);
    }

    /// The length, in bytes.
    pub fn bytes(&self) -> u64 {
        self.words().len() as u64 * WORD_BYTES
    }

    /// The address of the mapping, for devices.
    #[cfg(any(test, feature = "verbs"))]
    pub(crate) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// The address of these words, for the system to copy from.
    ///
    /// # Errors
    /// [`ChainError::Outside`].
    pub(crate) fn address_of(&self, offset: u64, words: usize) -> Result<*const u64, ChainError> {
        Ok(self.range(offset, words)?.as_ptr().cast())
    }

    /// The address of these words, for the system to copy to.
    ///
    /// # Errors
    /// [`ChainError::Outside`], [`ChainError::Denied`].
    pub(crate) fn address_to_change(
        &self,
        offset: u64,
        words: usize,
    ) -> Result<*mut u64, ChainError> {
        if !self.writable {
            return Err(ChainError::Denied);
        }
        let at = self.range(offset, words)?.as_ptr().cast::<u64>();
        Ok(at.cast_mut())
    }

    /// Whether the region is mapped for writing.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        let first = self.map.as_mut_ptr().cast::<AtomicU64>();
        // SAFETY: the mapping lives as long as `self`, is page-aligned and has this number of
        // words. This process accesses it only as atomics. Other processes and devices change it at
        // any time. The language does not define such changes; they have the effect of another
        // thread's relaxed atomics, because all bytes are valid words. If the file is truncated, an
        // access raises SIGBUS and does not return. A read-only mapping is only read: methods that
        // store check `writable`.
        unsafe { std::slice::from_raw_parts(first, self.map.len() / WORD_BYTES as usize) }
    }

    #[inline]
    fn range(&self, offset: u64, words: usize) -> Result<&[AtomicU64], ChainError> {
        let start = (offset / WORD_BYTES) as usize;
        match start.checked_add(words).and_then(|end| self.words().get(start..end)) {
            Some(range) if offset.is_multiple_of(WORD_BYTES) => Ok(range),
            _ => Err(outside(offset, words)),
        }
    }

    /// Checks that these words are inside the region.
    ///
    /// # Errors
    /// [`ChainError::Outside`].
    pub(crate) fn check_range(&self, offset: u64, words: usize) -> Result<(), ChainError> {
        self.range(offset, words).map(drop)
    }

    #[inline]
    pub(super) fn word(&self, offset: u64) -> Result<&AtomicU64, ChainError> {
        Ok(&self.range(offset, 1)?[0])
    }

    #[inline]
    fn word_to_change(&self, offset: u64) -> Result<&AtomicU64, ChainError> {
        if self.writable { self.word(offset) } else { Err(ChainError::Denied) }
    }

    /// Copies words from the region, in no particular order.
    ///
    /// # Errors
    /// [`ChainError::Outside`].
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u64]) -> Result<(), ChainError> {
        words::read(self.range(offset, into.len())?, into);
        Ok(())
    }

    /// Copies bytes from the region, in no particular order. Returns their CRC-32 after that of
    /// others, computed in the same pass.
    ///
    /// # Errors
    /// [`ChainError::Outside`].
    pub(crate) fn read_summed(
        &self,
        offset: u64,
        into: &mut [u8],
        before: u32,
    ) -> Result<u32, ChainError> {
        let words = self.range(offset, into.len().div_ceil(WORD_BYTES as usize))?;
        let mut sum = crc32fast::Hasher::new_with_initial(before);
        for (part, target) in parts_to_read(words).zip(into.chunks_mut(PART_BYTES)) {
            part.copy_to(target);
            sum.update(target);
        }
        Ok(sum.finalize())
    }

    /// Copies bytes to the region, part by part, and pads the last word with zeros. Calls `before`
    /// with each part before it is copied; an error ends the copying. Meanwhile the memory of the
    /// next part is prefetched.
    ///
    /// # Errors
    /// [`ChainError::Outside`], [`ChainError::Denied`], before any part is copied.
    pub(crate) fn write_parts(
        &self,
        offset: u64,
        from: &[u8],
        mut before: impl FnMut(&[u8]) -> Result<(), ChainError>,
    ) -> Result<(), ChainError> {
        if !self.writable {
            return Err(ChainError::Denied);
        }
        let words = self.range(offset, from.len().div_ceil(WORD_BYTES as usize))?;
        let mut targets = words.chunks(PART_WORDS).peekable();
        for part in from.chunks(PART_BYTES) {
            let target = targets.next().unwrap_or_default();
            before(part)?;
            copy_in(target, part);
            lines_of(targets.peek().copied().unwrap_or_default()).for_each(prefetch_to_change);
        }
        Ok(())
    }

    /// Copies words to the region, in no particular order. A later compare-and-swap publishes them.
    ///
    /// # Errors
    /// [`ChainError::Outside`], [`ChainError::Denied`].
    // Without `always` the compiler makes a call of it, in every PUT.
    #[inline(always)]
    pub fn write(&self, offset: u64, from: &[u64]) -> Result<(), ChainError> {
        if !self.writable {
            return Err(ChainError::Denied);
        }
        words::write(self.range(offset, from.len())?, from);
        Ok(())
    }

    /// Returns one word.
    ///
    /// # Errors
    /// [`ChainError::Outside`].
    #[inline]
    pub fn load(&self, offset: u64) -> Result<u64, ChainError> {
        Ok(words::load(self.word(offset)?))
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

    /// Replaces four bytes. The other half of their word is unchanged, even if another process
    /// writes it meanwhile.
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

    /// Prefetches these bytes to read them. Any offset is allowed.
    #[inline]
    pub fn prefetch(&self, offset: u64, bytes: u32) {
        self.lines(offset, bytes).for_each(prefetch);
    }

    /// Prefetches these bytes to change them. Any offset is allowed.
    #[inline]
    pub fn prefetch_to_change(&self, offset: u64, bytes: u32) {
        if self.writable {
            self.lines(offset, bytes).for_each(prefetch_to_change);
        }
    }

    /// Prefetches one word to change it. Any offset is allowed.
    #[inline]
    pub fn prefetch_word_to_change(&self, offset: u64) {
        if let Ok(word) = self.word_to_change(offset) {
            prefetch_to_change(word);
        }
    }

    /// The first word of each cache line of these bytes; none if they are outside the region.
    #[inline]
    fn lines(&self, offset: u64, bytes: u32) -> impl Iterator<Item = &AtomicU64> {
        let words = self.range(offset, (u64::from(bytes) / WORD_BYTES) as usize);
        lines_of(words.unwrap_or_default())
    }
}

/// A part of the words that are copied from a region and summed, and the words that are prefetched
/// before it is summed.
struct PartToRead<'r> {
    words: &'r [AtomicU64],
    ahead: &'r [AtomicU64],
}

/// Splits words of a region into parts that are copied, then summed. While one part is copied, the
/// rest of the next one is prefetched. Before a part is summed, the first words of the part after
/// the next are prefetched: summing loads nothing from the region, so it hides this wait.
#[inline]
fn parts_to_read(words: &[AtomicU64]) -> impl Iterator<Item = PartToRead<'_>> {
    let at = |start: usize, count: usize| {
        &words[start.min(words.len())..(start + count).min(words.len())]
    };
    (0..words.len()).step_by(PART_WORDS).map(move |start| {
        let next = start + PART_WORDS;
        lines_of(at(next + AHEAD_WORDS, PART_WORDS - AHEAD_WORDS)).for_each(prefetch);
        PartToRead { words: at(start, PART_WORDS), ahead: at(next + PART_WORDS, AHEAD_WORDS) }
    })
}

impl PartToRead<'_> {
    #[inline]
    fn copy_to(&self, target: &mut [u8]) {
        copy_out(self.words, target);
        lines_of(self.ahead).for_each(prefetch);
    }
}

/// The first word of each cache line of these words.
#[inline]
fn lines_of(words: &[AtomicU64]) -> impl Iterator<Item = &AtomicU64> {
    words.chunks(CACHE_LINE_WORDS).filter_map(|line| line.first())
}

/// The error of an access outside the region, or to a part of a word.
#[cold]
fn outside(remote: u64, words: usize) -> ChainError {
    ChainError::Outside { remote, bytes: words as u64 * WORD_BYTES }
}

/// [`words::read_bytes`], with an instruction that copies whole cache lines.
#[inline]
fn copy_out(words: &[AtomicU64], into: &mut [u8]) {
    let whole = words.len().min(into.len() / WORD_BYTES as usize);
    // SAFETY: both ranges have this number of words, and those of the region are only loaded.
    let copied = unsafe { copy_words(words.as_ptr().cast(), into.as_mut_ptr().cast(), whole) };
    // Its fence orders all loads before later accesses.
    words::read_bytes(&words[copied..], &mut into[copied * WORD_BYTES as usize..]);
}

/// [`words::write_bytes`], with an instruction that copies whole cache lines.
#[inline]
fn copy_in(words: &[AtomicU64], from: &[u8]) {
    let whole = from.len() / WORD_BYTES as usize;
    fence(Ordering::Release);
    let target = words[..whole].as_ptr().cast_mut().cast();
    // SAFETY: both ranges have this number of words, and atomics may store to those of the region.
    let copied = unsafe { copy_words(from.as_ptr().cast(), target, whole) };
    words::write_bytes(&words[copied..], &from[copied * WORD_BYTES as usize..]);
}

/// Copies words by an instruction that moves whole cache lines, if the processor has one. Returns
/// how many it has copied: all or none.
///
/// The language does not see the accesses. Like a READ or a WRITE of a device, they have no
/// particular order.
///
/// # Safety
/// `from` has this number of words to load, and `into` has as many to store to. Neither need be
/// aligned. Those in a region are accessed by others at the same time, only as atomics.
#[inline]
unsafe fn copy_words(from: *const u64, into: *mut u64, count: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as the caller promises.
    unsafe {
        // Bytes, which processors copy faster this way than words.
        std::arch::asm!(
            "rep movsb",
            inout("rcx") count * WORD_BYTES as usize => _,
            inout("rdi") into => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let (_, _, count) = (from, into, 0);
    count
}

/// Prefetches the cache line in which a value starts.
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

/// Prefetches the cache line in which a value starts, and takes it from other processors. A thread
/// that changes a line which it fetched as a reader waits for it a second time.
#[inline]
fn prefetch_to_change<T>(wanted: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint about memory that is mapped, as there is a reference to it. Processors that do
    // not know the hint ignore it. The intrinsic would become another hint, unless the build
    // requires a processor that knows this one.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) wanted, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    prefetch(wanted);
}
