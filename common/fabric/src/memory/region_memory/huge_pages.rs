//! 2 MiB pages for a region, without a pool of them, by `madvise(MADV_COLLAPSE)`.
//!
//! Linux 6.1 and later do this for any shared memory, unless `shmem_enabled` is `deny`. New memory
//! gets 2 MiB pages before it is reserved, which is faster than to reserve it in 4 KiB pages. If
//! the memory has content, the kernel copies it page by page, while clients use it. The clients'
//! mappings get the same pages.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::{RegionMemory, memfd, reserve};
use crate::memory::mapping::HUGE_PAGE_BYTES;
use crate::memory::region::Region;

const SMALL_PAGE_BYTES: u64 = 4 << 10;
/// The memory of one call. Each call interrupts all processors, so smaller steps cost more. A
/// server that stops waits for the end of a call, so larger steps take longer.
const STEP_BYTES: u64 = 64 << 20;
/// Limit on the time to fill new memory with 2 MiB pages, which delays the start of the server.
/// Afterwards the rest is reserved in 4 KiB pages.
const FILL_TIME_MAX: Duration = Duration::from_millis(250);

/// The kind of pages of a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// 2 MiB pages from the system's pool.
    Pool,
    /// 4 KiB pages, and 2 MiB pages as far as the system makes them.
    Ordinary,
    /// 4 KiB pages, as configured.
    Small,
    /// Pages of a file on a disk, to which the system writes them back.
    Disk,
}

impl RegionMemory {
    /// How many bytes have 2 MiB pages, from the pool or by [`Collapse`]. 2 MiB pages that the
    /// system has made without [`Collapse`] are not counted. Pages that it has split to swap them
    /// out are still counted.
    pub fn huge_bytes(&self) -> u64 {
        self.huge_bytes.load(Ordering::Relaxed)
    }

    /// The work that remains until all of the memory has 2 MiB pages; `None` if nothing remains, or
    /// if the kind of pages does not allow it. The memory must have been reserved, and no device
    /// may have pinned it yet.
    pub fn collapse(&self) -> Option<Collapse> {
        let is_left = self.huge_bytes() < whole_pages(self.region.bytes());
        let wants = self.pages == Pages::Ordinary && is_left;
        wants.then(|| Collapse::new(self.region.clone(), self.huge_bytes.clone()))
    }

    /// The pages of the memory, for people to read.
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

    /// Advice on how to get better pages; `None` if the pages are the best, or as configured.
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
    /// The offset of the next step.
    next: u64,
    huge_bytes: Arc<AtomicU64>,
    refusal: Option<io::Error>,
}

impl Collapse {
    /// The work that remains after the first `huge_bytes` of the region.
    pub(super) fn new(region: Arc<Region>, huge_bytes: Arc<AtomicU64>) -> Self {
        let next = huge_bytes.load(Ordering::Relaxed);
        Self { region, next, huge_bytes, refusal: None }
    }

    /// Works while `may_continue` returns true. Returns whether the work is complete.
    pub fn run(&mut self, may_continue: impl Fn() -> bool) -> bool {
        let end = whole_pages(self.region.bytes());
        while self.next < end {
            if !may_continue() {
                return false;
            }
            let step = (end - self.next).min(STEP_BYTES);
            let huge_bytes = self.collapse(step);
            self.huge_bytes.fetch_add(huge_bytes, Ordering::Relaxed);
            self.next += step;
        }
        true
    }

    /// Collapses the next bytes. Returns how many of them have 2 MiB pages now.
    fn collapse(&mut self, bytes: u64) -> u64 {
        if self.region.map.collapse(self.next, bytes).is_ok() {
            return bytes;
        }
        // The kernel reports the failure of one page, and may have stopped at it.
        let mut huge_bytes = 0;
        for page in (self.next..self.next + bytes).step_by(HUGE_PAGE_BYTES as usize) {
            match self.region.map.collapse(page, HUGE_PAGE_BYTES) {
                Ok(()) => huge_bytes += HUGE_PAGE_BYTES,
                Err(error) => self.refusal = Some(error),
            }
        }
        huge_bytes
    }

    /// The reason why a part of the region has no 2 MiB pages, for people to read.
    pub fn refusal(&self) -> Option<String> {
        self.refusal.as_ref().map(explain)
    }
}

/// How many bytes of a region can have 2 MiB pages.
pub(super) fn whole_pages(bytes: u64) -> u64 {
    bytes - bytes % HUGE_PAGE_BYTES
}

/// Fills a file without content with 2 MiB pages, from its start on. Returns how many bytes have
/// them. The rest was refused, or there was no time for it.
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
    // The kernel collapses only a range that has at least one small page.
    for page in (offset..offset + bytes).step_by(HUGE_PAGE_BYTES as usize) {
        reserve(file, page..page + SMALL_PAGE_BYTES)?;
    }
    region.map.collapse(offset, bytes)
}

/// The reason why memory of this machine gets no 2 MiB pages without a pool, for people to read.
/// Returns `None` if it gets them. This call makes one such page and frees it.
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
    use crate::memory::HugePages;

    const BYTES: u64 = 16 << 20;

    /// How much of the mapping at this address has 2 MiB pages, by the kernel.
    fn huge_bytes_of(address: usize) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = format!("{address:x}-");
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&mapping));
        let kib = lines.find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
        kib.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    #[allow(clippy::print_stderr, reason = "reports a test that is left out")]
    fn left_out(why: &str) {
        eprintln!("left out: {why}");
    }

    /// Whether a test has to be left out on this machine. Prints the reason.
    fn is_left_out() -> bool {
        let refusal = collapse_refusal();
        if let Some(refusal) = &refusal {
            left_out(refusal);
        }
        refusal.is_some()
    }

    /// Memory as a machine without a pool makes it.
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
                // Each writer increments the first word of every small page, through its own
                // mapping.
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
    fn a_refusal_names_its_cause() {
        let text = |errno: Errno| explain(&errno.into());
        assert!(text(Errno::INVAL).contains("Linux 6.1"));
        assert!(text(Errno::NOMEM).contains("fragmented"));
        assert!(text(Errno::BUSY).contains("cgroup"));
        // Outside the region no page is counted, and the work ends.
        let memory = small_memory();
        let mut work = Collapse { next: BYTES, ..memory.collapse().unwrap() };
        assert_eq!(work.collapse(HUGE_PAGE_BYTES), 0);
        assert!(work.refusal().is_some() && work.run(|| true));
    }
}
