//! What the system says about itself.

use std::fs;
use std::path::Path;

use farside_fabric::shm::collapse_refusal;
use rustix::process::{Resource, getrlimit};

/// What a machine has. `None` for what could not be found out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Machine {
    /// That this process may run on.
    pub(crate) processors: u64,
    pub(crate) memory_available_bytes: Option<u64>,
    /// Total and free bytes of `/dev/shm`.
    pub(crate) shm: Option<(u64, u64)>,
    pub(crate) huge_pages: Option<HugePages>,
    /// Why kv-server cannot make huge pages without a pool; `None` if it can.
    pub(crate) collapse_refusal: Option<String>,
    /// How much this process may lock; `None` for no limit.
    pub(crate) locked_bytes_max: Option<u64>,
    pub(crate) rdma_devices: Vec<String>,
    pub(crate) verbs_devices: Vec<String>,
    /// Whether this process may open the first of them.
    pub(crate) verbs_devices_open: bool,
}

/// The pool of huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HugePages {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) page_bytes: u64,
}

/// Looks at this machine.
pub(crate) fn look() -> Machine {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let verbs = Path::new("/dev/infiniband");
    let verbs_devices: Vec<String> =
        names(verbs).into_iter().filter(|name| name.starts_with("uverbs")).collect();
    let opens = |name: &String| {
        fs::OpenOptions::new().read(true).write(true).open(verbs.join(name)).is_ok()
    };
    Machine {
        processors: std::thread::available_parallelism().map_or(0, |count| count.get() as u64),
        memory_available_bytes: kib(&meminfo, "MemAvailable"),
        shm: shm(),
        huge_pages: huge_pages(&meminfo),
        collapse_refusal: collapse_refusal(),
        locked_bytes_max: getrlimit(Resource::Memlock).current,
        rdma_devices: names(Path::new("/sys/class/infiniband")),
        verbs_devices_open: verbs_devices.first().is_some_and(opens),
        verbs_devices,
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn shm() -> Option<(u64, u64)> {
    let folder = Path::new("/dev/shm");
    if !folder.is_dir() {
        return None;
    }
    let space = rustix::fs::statvfs(folder).ok()?;
    Some((space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize))
}

fn huge_pages(meminfo: &str) -> Option<HugePages> {
    Some(HugePages {
        total: number(meminfo, "HugePages_Total")?,
        free: number(meminfo, "HugePages_Free")?,
        page_bytes: kib(meminfo, "Hugepagesize")?,
    })
}

/// A number of `/proc/meminfo`.
fn number(meminfo: &str, name: &str) -> Option<u64> {
    let value = |line: &str| {
        let value = line.strip_prefix(name)?.strip_prefix(':')?.trim_start();
        value.split(' ').next()?.parse().ok()
    };
    meminfo.lines().find_map(value)
}

fn kib(meminfo: &str, name: &str) -> Option<u64> {
    number(meminfo, name)?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_understood() {
        let meminfo = "MemTotal:       100 kB\nMemAvailable:    50 kB\n\
            HugePages_Total:       4\nHugePages_Free:        3\nHugepagesize:       2048 kB\n";
        assert_eq!(kib(meminfo, "MemAvailable"), Some(50 << 10));
        let pool = HugePages { total: 4, free: 3, page_bytes: 2 << 20 };
        assert_eq!(huge_pages(meminfo), Some(pool));
        assert_eq!(huge_pages("MemTotal: x kB"), None);
    }

    #[test]
    fn looking_at_any_machine_works() {
        assert!(look().processors > 0);
    }
}
