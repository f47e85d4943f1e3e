//! What the system says about the server's process. What it does not say is left out.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside_fabric::boot_time_ns;
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::cluster::own_start;

/// The process at one moment.
#[derive(Clone, Debug)]
pub(super) struct ProcessFigures {
    /// The time of all threads on processors, in user mode and in the kernel.
    pub(super) cpu: Duration,
    pub(super) memory: Option<Memory>,
    pub(super) open_fds: Option<u64>,
    /// `None` also if there is no limit.
    pub(super) max_fds: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) virtual_bytes: u64,
    /// Pages in memory, those of the region included.
    pub(super) resident_bytes: u64,
}

impl ProcessFigures {
    pub(super) fn now() -> Self {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        Self {
            cpu: Duration::new(cpu.tv_sec as u64, cpu.tv_nsec as u32),
            memory: memory(),
            // Without the descriptor that reads the folder.
            open_fds: fs::read_dir("/proc/self/fd")
                .ok()
                .map(|all| (all.count() as u64).saturating_sub(1)),
            max_fds: getrlimit(Resource::Nofile).current,
        }
    }
}

fn memory() -> Option<Memory> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = text.split(' ').map_while(|number| number.parse::<u64>().ok());
    let page = page_size() as u64;
    Some(Memory { virtual_bytes: pages.next()? * page, resident_bytes: pages.next()? * page })
}

/// Returns when the process started, since the epoch of Unix.
pub(super) fn started_at() -> Option<Duration> {
    let ticks = own_start().ok()?;
    let after_boot = Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64);
    let up = Duration::from_nanos(boot_time_ns());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    now.checked_sub(up.checked_sub(after_boot)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_this_process_are_plausible() {
        let figures = ProcessFigures::now();
        assert!(figures.cpu > Duration::ZERO);
        let memory = figures.memory.unwrap();
        assert!(memory.resident_bytes >= 1 << 20 && memory.virtual_bytes > memory.resident_bytes);
        assert!(figures.open_fds.unwrap() >= 3);
        assert!(figures.max_fds.is_none_or(|max| max >= figures.open_fds.unwrap()));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let age = now.checked_sub(started_at().unwrap()).unwrap();
        assert!(age < Duration::from_secs(3600), "{age:?}");
    }
}
