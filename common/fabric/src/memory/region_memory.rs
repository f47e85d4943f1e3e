//! The memory of a region, which the server allocates.
//!
//! All pages are allocated at the start. Otherwise a client could be killed by an access to a page
//! that the system cannot provide.

mod huge_pages;
mod region_file;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytesize::ByteSize;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use serde::Deserialize;

use super::mapping::{HUGE_PAGE_BYTES, HUGETLBFS_MAGIC};
use super::region::Region;
use crate::resources::{self, Meminfo, Room};

use huge_pages::fill;
pub use huge_pages::{Collapse, Pages, collapse_refusal};
use region_file::{RegionFile, Unfinished};

/// The memory of a server beside its region, which counts against the limit of a cgroup, too.
const OWN_BYTES: u64 = 32 << 20;
/// The tables of 4 KiB pages take such a part of the region, 8 bytes a page, in the server and in
/// one client on its host.
const PAGE_TABLES_PART: u64 = 256;
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Only the server's user may open a region by its path. Clients get descriptors.
const REGION_MODE: u32 = 0o600;

/// Whether a region gets huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// From the pool if it has enough, otherwise by MADV_COLLAPSE as far as the system does it.
    #[default]
    Auto,
    /// Never: the server asks for no huge pages.
    Never,
    /// From the pool. If it has too few, the region is not made.
    Require,
}

impl FromStr for HugePages {
    type Err = MemoryError;

    fn from_str(text: &str) -> Result<Self, MemoryError> {
        match text {
            "auto" => Ok(Self::Auto),
            "never" => Ok(Self::Never),
            "require" => Ok(Self::Require),
            _ => Err(MemoryError::HugePagesChoice { text: text.to_owned() }),
        }
    }
}

/// The reason why a region gets no memory. Its message tells what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum MemoryError {
    #[error("`{text}` is not a setting for huge pages: write auto, never or require")]
    HugePagesChoice { text: String },
    #[error(
        "{asked} are more than the {available} of memory available: ask for less memory or stop \
         other programs",
        asked = ByteSize(*asked), available = ByteSize(*available)
    )]
    TooMuch { asked: u64, available: u64 },
    #[error(
        "{asked}, and {own} for the server itself, are more than the {left} that the limit in {} \
         leaves: ask for less memory, or raise the limit of the container or service",
        .room.limit.display(),
        asked = ByteSize(*asked), own = ByteSize(*own), left = ByteSize(room.left)
    )]
    OverLimit { asked: u64, own: u64, room: Room },
    #[error(
        "no {size} of huge pages, which are required ({source}): try sysctl \
         vm.nr_hugepages={count}, or allow small ones with huge_pages = \"auto\"",
        size = ByteSize(*asked), count = .asked.div_ceil(HUGE_PAGE_BYTES)
    )]
    NoHugePages { asked: u64, source: io::Error },
    #[error(
        "{} is not on hugetlbfs, but huge pages are required: move it there or write huge_pages \
         = \"auto\"", .path.display()
    )]
    NotHugetlbfs { path: PathBuf },
    #[error("the folder of {} does not exist: create it first", .path.display())]
    NoFolder { path: PathBuf },
    #[error(
        "{} is not writable for this user: change its permissions or the path", .path.display()
    )]
    NotWritable { path: PathBuf },
    #[error(
        "{} is not a regular file: name one, or a path where there is none", .path.display()
    )]
    NotAFile { path: PathBuf },
    #[error(
        "{} belongs to another user: chown it, start the server as that user, or name another \
         file", .path.display()
    )]
    OtherOwner { path: PathBuf },
    #[error(
        "{} is empty: a region was there, and its memory is gone; remove the file to start with a \
         new and empty region, or with a snapshot (--restore)", .path.display()
    )]
    Empty { path: PathBuf },
    #[error(
        "{} is no regular file of this user, or it has another name (a hard link), and the server \
         would make its region there: remove it", .path.display()
    )]
    NotOwn { path: PathBuf },
    #[error("{} is too short to hold a region: name another file", .path.display())]
    TooShort { path: PathBuf },
    #[error(
        "another server uses the region file {}, or a client has locked it: stop it or name \
         another file", .path.display()
    )]
    Locked { path: PathBuf },
    #[error(
        "the file system of {} has no room for {size}: make room or ask for less memory",
        .path.display(), size = ByteSize(*asked)
    )]
    NoRoom { path: PathBuf, asked: u64 },
    #[error("cannot {what} the region's memory: {source}")]
    System { what: &'static str, source: io::Error },
}

pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> MemoryError {
    move |source| MemoryError::System { what, source: source.into() }
}

/// A region's memory, mapped for reading and writing.
pub struct RegionMemory {
    /// The descriptor of the memory, which writers get.
    pub file: File,
    /// The mapping.
    pub region: Arc<Region>,
    /// The kind of the memory's pages.
    pub pages: Pages,
    /// Whether the memory is new and all zeros.
    pub is_new: bool,
    /// How much of the memory has 2 MiB pages.
    pub(super) huge_bytes: Arc<AtomicU64>,
    /// The region file, locked against other servers.
    region_file: Option<RegionFile>,
}

impl RegionMemory {
    /// New memory without a name, freed with the last process that has it.
    ///
    /// # Errors
    /// [`MemoryError::TooMuch`], [`MemoryError::OverLimit`], [`MemoryError::NoHugePages`],
    /// [`MemoryError::System`].
    pub fn anonymous(bytes: u64, huge_pages: HugePages) -> Result<Self, MemoryError> {
        if huge_pages != HugePages::Never {
            match Self::anonymous_huge(bytes) {
                Ok(memory) => return Ok(memory),
                Err(source) if huge_pages == HugePages::Require => {
                    return Err(MemoryError::NoHugePages { asked: bytes, source });
                }
                Err(_) => {}
            }
        }
        check_available(bytes)?;
        let file = memfd(MemfdFlags::CLOEXEC).map_err(system("create"))?;
        rustix::fs::ftruncate(&file, bytes).map_err(system("size"))?;
        seal_size(&file).map_err(system("seal"))?;
        let region = Region::map(&file).map_err(system("map"))?;
        let mut memory = Self::new(file, region, Pages::Small, true);
        if huge_pages != HugePages::Never {
            memory.pages = Pages::Ordinary;
            memory.region.advise_huge_pages();
            let filled = fill(&memory.file, &memory.region);
            memory.huge_bytes.store(filled, Ordering::Relaxed);
        }
        memory.reserve()?;
        Ok(memory)
    }

    fn anonymous_huge(bytes: u64) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = memfd(flags)?;
        rustix::fs::ftruncate(&file, bytes)?;
        seal_size(&file)?;
        // Mapping reserves the pages. This fails if the pool has too few.
        let region = Region::map(&file)?;
        reserve(&file, 0..bytes)?;
        Ok(Self::new(file, region, Pages::Pool, true))
    }

    fn new(file: File, region: Region, pages: Pages, is_new: bool) -> Self {
        let huge_bytes = if pages == Pages::Pool { region.bytes() } else { 0 };
        let huge_bytes = Arc::new(AtomicU64::new(huge_bytes));
        Self { file, region: Arc::new(region), pages, is_new, huge_bytes, region_file: None }
    }

    /// The memory in a file, which is locked against other servers. Without a file a new one of
    /// `bytes_if_new` is made. [`RegionMemory::name_file`] gives the file its name. If the memory
    /// is dropped before that, the file is removed. An existing file is only mapped, because its
    /// content may be anything. Call [`RegionMemory::reserve`] after its content was recognised.
    ///
    /// # Errors
    /// Any [`MemoryError`].
    pub fn file(
        path: &Path,
        bytes_if_new: u64,
        huge_pages: HugePages,
    ) -> Result<Self, MemoryError> {
        let path_buf = || path.to_owned();
        let opened = RegionFile::open(path)?;
        let file = opened.file.try_clone().map_err(system("open"))?;
        let kind = rustix::fs::fstatfs(&file).map_err(system("look at"))?.f_type as u64;
        if huge_pages == HugePages::Require && kind != HUGETLBFS_MAGIC {
            return Err(MemoryError::NotHugetlbfs { path: path_buf() });
        }
        let is_new = opened.unfinished.is_some();
        if is_new {
            // hugetlbfs has a pool of its own, and refuses to map the file if the pool is too
            // small.
            if kind != HUGETLBFS_MAGIC {
                check_available(bytes_if_new)?;
            }
            reserve(&file, 0..bytes_if_new).map_err(|error| match error {
                rustix::io::Errno::NOSPC | rustix::io::Errno::NOMEM => {
                    MemoryError::NoRoom { path: path_buf(), asked: bytes_if_new }
                }
                other => system("reserve")(other),
            })?;
        }
        let region = Region::map(&file).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => MemoryError::TooShort { path: path_buf() },
            _ => system("map")(source),
        })?;
        let pages = match kind {
            HUGETLBFS_MAGIC => Pages::Pool,
            TMPFS_MAGIC if huge_pages == HugePages::Never => Pages::Small,
            TMPFS_MAGIC => Pages::Ordinary,
            _ => Pages::Disk,
        };
        if pages == Pages::Ordinary {
            region.advise_huge_pages();
        }
        Ok(Self { region_file: Some(opened), ..Self::new(file, region, pages, is_new) })
    }

    /// Gives a new region file its name, after the region in it is complete.
    ///
    /// # Errors
    /// [`MemoryError::System`].
    pub fn name_file(&mut self) -> Result<(), MemoryError> {
        let unfinished = self.region_file.as_mut().and_then(|file| file.unfinished.take());
        unfinished.map_or(Ok(()), Unfinished::name)
    }

    /// Whether this is a new file that replaces one which a killed server did not complete.
    pub fn replaces_unfinished(&self) -> bool {
        let unfinished = self.region_file.as_ref().and_then(|file| file.unfinished.as_ref());
        unfinished.is_some_and(|unfinished| unfinished.replaced)
    }

    /// Makes the system allocate every page now. New memory has its pages already.
    ///
    /// # Errors
    /// [`MemoryError::System`].
    pub fn reserve(&self) -> Result<(), MemoryError> {
        reserve(&self.file, 0..self.region.bytes()).map_err(system("reserve"))
    }

    /// A second open file description of the memory, which readers get: it cannot be mapped for
    /// writing, because rights belong to the description. Only the server's own user could reopen
    /// the memory for writing through /proc.
    ///
    /// # Errors
    /// [`MemoryError::System`].
    pub fn reader_descriptor(&self) -> Result<File, MemoryError> {
        rustix::fs::fchmod(&self.file, Mode::from_raw_mode(REGION_MODE))
            .map_err(system("protect"))?;
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        File::open(path).map_err(system("open for readers"))
    }
}

pub(super) fn memfd(flags: MemfdFlags) -> io::Result<File> {
    let flags = flags | MemfdFlags::ALLOW_SEALING;
    Ok(File::from(rustix::fs::memfd_create("farside-region", flags)?))
}

/// Forbids clients to truncate the memory, because that would kill the other processes that use it.
fn seal_size(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?)
}

pub(super) fn reserve(file: &File, range: Range<u64>) -> rustix::io::Result<()> {
    loop {
        // A large region takes long. If a signal interrupts the call, this repeats it.
        let (flags, bytes) = (FallocateFlags::empty(), range.end - range.start);
        match rustix::fs::fallocate(file, flags, range.start, bytes) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Refuses memory that the system could only provide by killing processes.
fn check_available(asked: u64) -> Result<(), MemoryError> {
    let available = Meminfo::read().map_err(system("measure"))?.bytes("MemAvailable");
    if let Some(available) = available.filter(|available| asked > *available) {
        return Err(MemoryError::TooMuch { asked, available });
    }
    check_room(asked, resources::memory_room())
}

/// As [`check_available`], of the memory that a cgroup leaves, if one limits it.
fn check_room(asked: u64, room: Option<Room>) -> Result<(), MemoryError> {
    let own = OWN_BYTES + asked / PAGE_TABLES_PART;
    match room {
        Some(room) if asked.saturating_add(own) > room.left => {
            Err(MemoryError::OverLimit { asked, own, room })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
