//! 2 MiB pages for a region without a pool of them: `madvise(MADV_COLLAPSE)`.
//!
//! Linux 6.1 and later make them of any shared memory that is asked for them, whatever
//! `shmem_enabled` says, except for `deny`. New memory gets them before it is reserved: that is
//! faster than to reserve it in 4 KiB pages. Memory that has content is copied, page by page, by
//! the kernel, while clients use it. The clients' mappings get the same pages.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::{RegionMemory, memfd, reserve};
use crate::shm::Region;
use crate::shm::mapping::HUGE_PAGE_BYTES;

const SMALL_PAGE_BYTES: u64 = 4 << 10;
/// How much is asked for at a time: each call interrupts all processors, and a server that stops
/// waits for the call.
const STEP_BYTES: u64 = 64 << 20;
/// How long new memory is filled with 2 MiB pages before the rest is reserved in small ones.
/// Exceeding it delays the start of the server.
const FILL_TIME_MAX: Duration = Duration::from_millis(250);

/// What a region's memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// 2 MiB pages from the system's pool.
    Pool,
    /// Pages of the system's choice: 4 KiB, as far as they were not made 2 MiB pages.
    Ordinary,
    /// 4 KiB pages, as asked.
    Small,
    /// A file that is not in memory: its pages are written back to a disk.
    Disk,
}

impl RegionMemory {
    /// How many bytes have 2 MiB pages, from the pool or since [`Collapse`] made them. Pages that
    /// the system made by itself, and those that it split to swap them out, are not counted.
    pub fn huge_bytes(&self) -> u64 {
        self.huge_bytes.load(Ordering::Relaxed)
    }

    /// The work that is left until all of the memory has 2 MiB pages; `None` if there is none, or
    /// no use in it. For memory that has content and is reserved, and before a device pins it.
    pub fn collapse(&self) -> Option<Collapse> {
        let is_left = self.huge_bytes() < whole_pages(self.region.bytes());
        let wants = self.pages == Pages::Ordinary && is_left;
        wants.then(|| Collapse::new(self.region.clone(), self.huge_bytes.clone()))
    }

    /// Which pages the memory has, for people to read.
    pub fn pages_text(&self) -> String {
        let percent = self.huge_bytes() * 100 / self.region.bytes().max(1);
        match (self.pages, percent) {
            (Pages::Pool, _) => "2 MiB pages from the pool".to_owned(),
            (Pages::Disk, _) => "pages that are written back to a disk".to_owned(),
            (_, 0) => "4 KiB pages".to_owned(),
            (_, 100) => "2 MiB pages".to_owned(),
            (_, percent) => format!("{percent} % in 2 MiB pages, the rest in 4 KiB pages"),
        }
    }

    /// What to do to get better pages; `None` if these are the best, or as asked.
    pub fn advice(&self) -> Option<String> {
        let bytes = self.region.bytes();
        match self.pages {
            Pages::Ordinary if self.huge_bytes() < whole_pages(bytes) => Some(format!(
                "for 2 MiB pages everywhere: sysctl vm.nr_hugepages={count} (and a region file on \
                 hugetlbfs)",
                count = bytes.div_ceil(HUGE_PAGE_BYTES)
            )),
            Pages::Disk => Some("put the region file on tmpfs, such as /dev/shm".to_owned()),
            _ => None,
        }
    }
}

/// The work of giving a region 2 MiB pages, which can be done in parts.
pub struct Collapse {
    region: Arc<Region>,
    /// Where the next step begins. Before it every page is as good as it gets.
    next: u64,
    huge_bytes: Arc<AtomicU64>,
    refusal: Option<io::Error>,
}

impl Collapse {
    /// The work that is left after the first `huge_bytes` of the region.
    pub(super) fn new(region: Arc<Region>, huge_bytes: Arc<AtomicU64>) -> Self {
        let next = huge_bytes.load(Ordering::Relaxed);
        Self { region, next, huge_bytes, refusal: None }
    }

    /// Works until it is complete, and returns true, or until `may_go_on` does not hold.
    pub fn run(&mut self, may_go_on: impl Fn() -> bool) -> bool {
        let end = whole_pages(self.region.bytes());
        while self.next < end {
            if !may_go_on() {
                return false;
            }
            let step = (end - self.next).min(STEP_BYTES);
            let huge_bytes = self.collapse(step);
            self.huge_bytes.fetch_add(huge_bytes, Ordering::Relaxed);
            self.next += step;
        }
        true
    }

    /// Returns how many of the next bytes have 2 MiB pages now.
    fn collapse(&mut self, bytes: u64) -> u64 {
        if self.region.collapse(self.next, bytes).is_ok() {
            return bytes;
        }
        // The kernel tells of one page that it refused, and may have stopped there.
        let mut huge_bytes = 0;
        for page in (self.next..self.next + bytes).step_by(HUGE_PAGE_BYTES as usize) {
            match self.region.collapse(page, HUGE_PAGE_BYTES) {
                Ok(()) => huge_bytes += HUGE_PAGE_BYTES,
                Err(error) => self.refusal = Some(error),
            }
        }
        huge_bytes
    }

    /// Why a part of the region has no 2 MiB pages, for people to read.
    pub fn refusal(&self) -> Option<String> {
        self.refusal.as_ref().map(explain)
    }
}

/// How many bytes of a region can have 2 MiB pages.
pub(super) fn whole_pages(bytes: u64) -> u64 {
    bytes - bytes % HUGE_PAGE_BYTES
}

/// Takes 2 MiB pages for a file without content, from its start on. Returns how many bytes have
/// them: the rest was refused, or there was no time for it.
pub(super) fn fill(file: &File, region: &Region) -> u64 {
    let (mut filled, end) = (0, whole_pages(region.bytes()));
    let started = Instant::now();
    while filled < end && started.elapsed() < FILL_TIME_MAX {
        let step = (end - filled).min(STEP_BYTES);
        if fill_part(file, region, filled, step).is_err() {
            break;
        }
        filled += step;
    }
    filled
}

fn fill_part(file: &File, region: &Region, offset: u64, bytes: u64) -> io::Result<()> {
    // The kernel refuses a huge page without a single small one in its place.
    for page in (offset..offset + bytes).step_by(HUGE_PAGE_BYTES as usize) {
        reserve(file, page..page + SMALL_PAGE_BYTES)?;
    }
    region.collapse(offset, bytes)
}

/// Why memory here gets no 2 MiB pages without a pool, for people to read. `None` if it does: this
/// makes one, and lets it go.
pub fn collapse_refusal() -> Option<String> {
    let attempt = || {
        let file = memfd(MemfdFlags::CLOEXEC)?;
        file.set_len(HUGE_PAGE_BYTES)?;
        fill_part(&file, &Region::map(&file)?, 0, HUGE_PAGE_BYTES)
    };
    attempt().err().as_ref().map(explain)
}

fn explain(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::INVAL) => "the kernel refuses: MADV_COLLAPSE needs Linux 6.1 or later, and \
            shmem_enabled must not be `deny`"
            .to_owned(),
        Some(Errno::NOMEM) => "free memory is fragmented: no 2 MiB in one piece".to_owned(),
        Some(Errno::BUSY) => "the memory limit of the cgroup leaves no 2 MiB".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::shm::HugePages;

    const BYTES: u64 = 16 << 20;

    /// What the kernel says of the mapping at this address, in bytes.
    fn huge_bytes_of(address: usize) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = format!("{address:x}-");
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&mapping));
        let kib = lines.find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
        kib.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    #[allow(clippy::print_stderr, reason = "a test that is left out says so")]
    fn left_out(why: &str) {
        eprintln!("left out: {why}");
    }

    /// Whether a test has to be left out here; it prints why.
    fn is_left_out() -> bool {
        let refusal = collapse_refusal();
        if let Some(refusal) = &refusal {
            left_out(refusal);
        }
        refusal.is_some()
    }

    /// Memory without a pool: as a machine that has none makes it.
    fn small_memory() -> RegionMemory {
        let mut memory = RegionMemory::anonymous(BYTES, HugePages::Never).unwrap();
        memory.pages = Pages::Ordinary;
        memory
    }

    #[test]
    fn new_memory_is_filled_with_huge_pages_and_clients_get_them() {
        if is_left_out() {
            return;
        }
        let file = memfd(MemfdFlags::CLOEXEC).unwrap();
        file.set_len(BYTES).unwrap();
        let region = Region::map(&file).unwrap();
        let filled = fill(&file, &region);
        assert_eq!(filled, huge_bytes_of(region.start().addr()));
        if filled < BYTES {
            return left_out(&format!("memory is fragmented, {filled} bytes have huge pages"));
        }
        let client = Region::map_read_only(&file).unwrap();
        for page in (0..BYTES).step_by(HUGE_PAGE_BYTES as usize) {
            assert_eq!(client.load(page).unwrap(), 0);
        }
        assert_eq!(huge_bytes_of(client.start().addr()), BYTES);
    }

    #[test]
    fn pages_are_made_in_parts_and_counted() {
        if is_left_out() {
            return;
        }
        let memory = small_memory();
        let mut work = memory.collapse().unwrap();
        assert!(!work.run(|| false) && memory.huge_bytes() == 0);
        assert!(work.run(|| true));
        assert_eq!(memory.huge_bytes(), huge_bytes_of(memory.region.start().addr()));
        match work.refusal() {
            Some(refusal) => left_out(&refusal),
            None => assert!(memory.huge_bytes() == BYTES && memory.collapse().is_none()),
        }
    }

    #[test]
    fn data_survives_while_writers_change_it() {
        if is_left_out() {
            return;
        }
        const WRITERS: u64 = 2;
        for _ in 0..8 {
            let memory = small_memory();
            let words = BYTES / 8;
            for word in 0..words {
                memory.region.store(word * 8, word).unwrap();
            }
            let done = AtomicBool::new(false);
            let rounds: u64 = std::thread::scope(|scope| {
                // Each adds to the first word of every small page, through a mapping of its own.
                let write = || {
                    let region = Region::map(&memory.file).unwrap();
                    let mut rounds = 0;
                    while !done.load(Ordering::Relaxed) {
                        for page in (0..BYTES).step_by(SMALL_PAGE_BYTES as usize) {
                            let mut found = region.load(page).unwrap();
                            loop {
                                let now = region.compare_swap(page, found, found + 1).unwrap();
                                if now == found {
                                    break;
                                }
                                found = now;
                            }
                        }
                        rounds += 1;
                    }
                    rounds
                };
                let writers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(write)).collect();
                assert!(memory.collapse().unwrap().run(|| true));
                done.store(true, Ordering::Relaxed);
                writers.into_iter().map(|writer| writer.join().unwrap()).sum()
            });
            for word in 0..words {
                let is_first = (word * 8).is_multiple_of(SMALL_PAGE_BYTES);
                let expected = if is_first { word + rounds } else { word };
                assert_eq!(memory.region.load(word * 8).unwrap(), expected);
            }
        }
    }

    #[test]
    fn a_refusal_says_what_is_lacking() {
        let of = |errno: Errno| explain(&errno.into());
        assert!(of(Errno::INVAL).contains("Linux 6.1"));
        assert!(of(Errno::NOMEM).contains("fragmented"));
        assert!(of(Errno::BUSY).contains("cgroup"));
        // Beyond the end: nothing is counted, and the work ends.
        let memory = small_memory();
        let mut work = Collapse { next: BYTES, ..memory.collapse().unwrap() };
        assert_eq!(work.collapse(HUGE_PAGE_BYTES), 0);
        assert!(work.refusal().is_some() && work.run(|| true));
    }
}
