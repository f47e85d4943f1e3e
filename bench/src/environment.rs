//! The machine that a result comes from, and the command that made it.

use std::fmt;
use std::fs;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// The facts that are needed to repeat a measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Origin {
    /// The command line.
    pub command: String,
    /// The commit that the command was built from, with `-dirty` if something was not committed;
    /// null if the commit is not known.
    pub commit: Option<String>,
    /// The time at which the result was complete, in UTC.
    pub date: String,
    /// The machine that it was measured on.
    pub machine: Machine,
}

impl Origin {
    /// The origin of a result that this process, which runs the command of this name, completes
    /// now.
    pub fn of(command: &str, machine: Machine) -> Self {
        let words: Vec<_> =
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
        let words = std::iter::once(command).chain(words.iter().map(String::as_str));
        Self {
            // Joining fails only for a NUL, and no argument has one.
            command: shlex::try_join(words).unwrap_or_default(),
            commit: option_env!("FARSIDE_COMMIT").map(str::to_owned),
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            machine,
        }
    }
}

/// The machine, as far as it matters to the numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    kernel: String,
    pages: String,
}

impl Machine {
    /// Detects this machine, and the page size of the region that this process maps. Call it while
    /// connected: without a region the pages are unknown.
    pub fn detect() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let model = |line: &str| {
            Some(line.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned())
        };
        let processor = read("/proc/cpuinfo").lines().find_map(model);
        Self {
            processor: processor.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            pages: region_pages(&read("/proc/self/smaps")),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, cores, kernel, pages } = self;
        write!(f, "{processor}, {cores} cores, Linux {kernel}, region in {pages}")
    }
}

/// The page size of the largest shared mapping, which is the region.
fn region_pages(smaps: &str) -> String {
    let (mut largest_kib, mut pages) = (0, "unknown pages".to_owned());
    let (mut is_shared, mut size_kib, mut page_kib) = (false, 0, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), second) = (words.next(), words.next()) else { continue };
        let kib = || second.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        match first {
            "Size:" => size_kib = kib(),
            "KernelPageSize:" => page_kib = kib(),
            // With 4 KiB pages, the part of the mapping that the system keeps in larger ones.
            "ShmemPmdMapped:" if is_shared && size_kib > largest_kib => {
                largest_kib = size_kib;
                pages = match (page_kib, kib() * 100 / size_kib.max(1)) {
                    (4, 0) => "4 KiB pages".to_owned(),
                    (4, percent) => format!("{percent} % transparent huge pages"),
                    (kib, _) => format!("{} MiB huge pages", kib >> 10),
                };
            }
            _ if !first.ends_with(':') => {
                is_shared = second.is_some_and(|permissions| permissions.ends_with('s'));
            }
            _ => {}
        }
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_are_those_of_the_largest_shared_mapping() {
        let mapping = |permissions: &str, kib: u64, page: u64, huge: u64| {
            format!(
                "7f00-7f10 {permissions} 00000000 00:01 7 /memfd:region (deleted)\n\
                 Size: {kib} kB\nKernelPageSize: {page} kB\nShmemPmdMapped: {huge} kB\n"
            )
        };
        let small = mapping("rw-s", 4096, 4, 0) + &mapping("rw-p", 1 << 20, 2048, 0);
        assert_eq!(region_pages(&small), "4 KiB pages");
        assert_eq!(region_pages(&mapping("r--s", 4096, 2048, 0)), "2 MiB huge pages");
        assert_eq!(region_pages(&mapping("rw-s", 4096, 4, 2048)), "50 % transparent huge pages");
        assert_eq!(region_pages(""), "unknown pages");
    }

    #[test]
    fn a_result_says_where_it_comes_from() {
        let Origin { command, date, machine, .. } = Origin::of("kv-bench", Machine::detect());
        assert!(command.starts_with("kv-bench"), "{command}");
        assert!(humantime::parse_rfc3339(&date).is_ok(), "{date}");
        assert!(machine.cores > 0 && machine.to_string().contains("cores"), "{machine}");
    }
}
