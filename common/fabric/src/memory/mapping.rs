//! Maps a file at an address where the processor can use its huge pages.
//!
//! The processor uses a file's 2 MiB page only if the mapping starts at a multiple of 2 MiB.
//! Otherwise the page table refers to it in pieces of 4 KiB. By default the system maps a file at
//! any 4 KiB page.

use std::fs::File;
use std::io;

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::mm::{MapFlags, ProtFlags};

pub(super) const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// The length of a huge page, in bytes.
pub(super) const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// A file in a shared mapping, which is unmapped when this is dropped.
pub(super) struct Mapping {
    /// The mapping of the file, or a reservation of addresses into which the file is mapped. The
    /// rest of a reservation is never accessed.
    map: MmapRaw,
    /// The offset of the file in `map`.
    skipped: usize,
    bytes: usize,
}

impl Mapping {
    /// Maps the whole file.
    ///
    /// # Errors
    /// The system's error: `PermissionDenied` for a descriptor that does not allow it.
    pub(super) fn new(file: &File, writable: bool) -> io::Result<Self> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        // hugetlbfs aligns its mappings, and rounds their lengths up to pages of 2 MiB or 1 GiB.
        let aligns_itself = rustix::fs::fstatfs(file)?.f_type as u64 == HUGETLBFS_MAGIC;
        if bytes as u64 >= HUGE_PAGE_BYTES
            && !aligns_itself
            && let Some((reserved, skipped)) = reserve_aligned(bytes)
        {
            map_into(&reserved, skipped, file, bytes, writable)?;
            return Ok(Self { map: reserved, skipped, bytes });
        }
        let mut options = MmapOptions::new();
        options.len(bytes);
        let map = match writable {
            true => options.map_raw(file)?,
            false => options.map_raw_read_only(file)?,
        };
        Ok(Self { map, skipped: 0, bytes })
    }

    /// The address of the file's first byte.
    #[inline]
    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.skipped)
    }

    /// The length of the file, in bytes.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Advises the system about all of the mapping.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn advise(&self, advice: Advice) -> io::Result<()> {
        self.map.advise_range(advice, self.skipped, self.bytes)
    }

    /// Turns a part of the file into 2 MiB pages. The content stays, and other processes may read
    /// and change it meanwhile.
    ///
    /// # Errors
    /// The system's error, if not all of the part has 2 MiB pages afterwards. `UnexpectedEof` if
    /// the part is not inside the file.
    pub(super) fn collapse(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes as u64) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let start = self.as_mut_ptr().wrapping_add(offset as usize);
        // SAFETY: the range is inside the mapping. The advice changes which pages hold the bytes,
        // and neither the bytes nor their addresses. The kernel checks the alignment.
        let outcome = unsafe { libc::madvise(start.cast(), bytes as usize, libc::MADV_COLLAPSE) };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Reserves addresses for `bytes` bytes from a multiple of 2 MiB on. Returns the offset of this
/// multiple, too. `None` if the system refuses: with `overcommit_memory` 2 it limits addresses.
fn reserve_aligned(bytes: usize) -> Option<(MmapRaw, usize)> {
    let huge_page = HUGE_PAGE_BYTES as usize;
    let room = bytes.checked_add(huge_page)?;
    let reserved: MmapRaw = MmapOptions::new().len(room).no_reserve_swap().map_anon().ok()?.into();
    let address = reserved.as_ptr().addr();
    Some((reserved, address.next_multiple_of(huge_page) - address))
}

/// Maps `bytes` of a file into a reservation, at the offset `skipped`.
fn map_into(
    reserved: &MmapRaw,
    skipped: usize,
    file: &File,
    bytes: usize,
    writable: bool,
) -> io::Result<()> {
    assert!(skipped + bytes <= reserved.len(), "the file fits into the reservation");
    let access = match writable {
        true => ProtFlags::READ | ProtFlags::WRITE,
        false => ProtFlags::READ,
    };
    let start = reserved.as_mut_ptr().wrapping_add(skipped).cast();
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the mapping replaces a part of the reservation, into which no pointer exists yet. The
    // reservation unmaps the file when it is dropped.
    unsafe { rustix::mm::mmap(start, bytes, access, flags, file, 0) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;

    fn file(bytes: u64) -> File {
        let file = File::from(rustix::fs::memfd_create("mapped", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        file
    }

    #[test]
    fn a_mapping_starts_at_a_multiple_of_a_huge_page() {
        let mut mapped = Vec::new();
        for n in 1..=50u64 {
            // A small mapping before each, so that none is aligned by chance.
            let between = MmapOptions::new().len(n as usize * 4096).map_anon().unwrap();
            // The lengths are no multiples of a huge page.
            let file = file(HUGE_PAGE_BYTES + n * 4096);
            for writable in [true, false] {
                let region = match writable {
                    true => crate::memory::Region::map(&file).unwrap(),
                    false => crate::memory::Region::map_read_only(&file).unwrap(),
                };
                assert_eq!(region.bytes(), HUGE_PAGE_BYTES + n * 4096);
                assert_eq!(region.start().addr() as u64 % HUGE_PAGE_BYTES, 0);
                mapped.push(region);
            }
            drop(between);
        }
    }

    #[test]
    fn collapsing_a_part_outside_of_the_file_is_refused() {
        let mapping = Mapping::new(&file(HUGE_PAGE_BYTES), true).unwrap();
        for (offset, bytes) in [(0, 2 * HUGE_PAGE_BYTES), (HUGE_PAGE_BYTES, 1), (u64::MAX, 2)] {
            let error = mapping.collapse(offset, bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
