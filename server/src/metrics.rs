//! Metrics over HTTP, for Prometheus: `GET /metrics`.
//!
//! A thread of its own answers requests. It sleeps until one comes, and then asks the serving
//! thread for its numbers, as `kv-cli stat` does. So metrics cost nothing while no one reads them,
//! and no GET, PUT or DELETE wakes either thread.
//!
//! Clients insert and delete keys without the server, so the server cannot count them. The metrics
//! thread estimates their number from a sample of the region's subtables. Hashes are uniform, so
//! equal shares of the directory have nearly the same number of keys. A subtable to which several
//! entries of the directory lead counts as much less in each of them.

mod families;
mod snapshot;

use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use families::Figures;
use farside_fabric::memory::Region;
use farside_fabric::{ChainError, boot_time_ns};
use farside_layout::{DirectoryEntry, Geometry, SlotState};
use farside_metrics::{MetricsFormat, MetricsListener, MetricsServer, render, why_not_bound};
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};
use snapshot::ServiceLink;
pub(crate) use snapshot::{LabelledCounts, MetricsQuestions, ServiceSnapshot};

use crate::cluster::own_start;
use crate::error::{ServerError, system};
use crate::region::index::SubtableImage;

/// A bound listener, and the questions to the serving thread.
pub(crate) struct BoundMetrics {
    listener: MetricsListener,
    link: ServiceLink,
}

/// Binds a listener. Returns also the serving thread's end of the questions.
///
/// # Errors
/// [`ServerError::Metrics`].
pub(crate) fn bind(address: SocketAddr) -> Result<(BoundMetrics, MetricsQuestions), ServerError> {
    let failed = |error| ServerError::Metrics { address, why: why_not_bound(&error) };
    let listener = MetricsListener::bind(address).map_err(failed)?;
    let (questions, link) = snapshot::link().map_err(failed)?;
    Ok((BoundMetrics { listener, link }, questions))
}

/// What the metrics thread knows of the region.
pub(crate) struct MetricsRegion {
    pub(crate) region: Arc<Region>,
    pub(crate) geometry: Geometry,
    /// How long it took to open it.
    pub(crate) recovery: Duration,
}

/// Starts the thread that answers requests for metrics.
///
/// # Errors
/// [`ServerError::System`] if the system makes no thread.
pub(crate) fn serve(
    bound: BoundMetrics,
    region: MetricsRegion,
) -> Result<MetricsServer, ServerError> {
    let BoundMetrics { listener, link } = bound;
    let mut source = Source { link, region, started_at: started_at() };
    let served = listener.serve(move |format| source.text(format));
    served.map_err(system("start the thread for metrics"))
}

/// The source of the metrics.
struct Source {
    link: ServiceLink,
    region: MetricsRegion,
    started_at: Option<Duration>,
}

impl Source {
    /// Returns all metrics in this format. `None` if the serving thread does not answer.
    fn text(&mut self, format: MetricsFormat) -> Option<String> {
        let service = self.link.snapshot()?.clone();
        let MetricsRegion { region, geometry, recovery } = &self.region;
        let depth = u8::try_from(service.statistics.directory_depth).unwrap_or_default();
        let figures = Figures {
            service,
            process: ProcessFigures::now(),
            started_at: self.started_at,
            region_bytes: region.bytes(),
            recovery: *recovery,
            keys: estimate_keys(region, geometry, depth).ok(),
        };
        render(format, figures)
    }
}

/// Limit on the entries of a sample, a power of two. The subtables of 64 entries are 512 KiB.
const ENTRIES_MAX: u64 = 64;

/// Returns an estimate of the number of keys in the index, whose directory has this depth. It is
/// exact if the directory has at most [`ENTRIES_MAX`] entries and no client changes the index.
fn estimate_keys(region: &Region, geometry: &Geometry, depth: u8) -> Result<u64, ChainError> {
    let Some(directory) = geometry.directory_offset(depth) else { return Ok(0) };
    let entries = 1u64 << depth;
    let step = entries.div_ceil(ENTRIES_MAX);
    let (mut keys, mut last) = (0.0, None);
    for entry in (0..entries).step_by(step as usize) {
        let entry = DirectoryEntry::from_bits(region.load(directory + entry * 8)?);
        // No subtable: the directory has changed since, or is damaged.
        let Ok(offset) = entry.subtable(geometry) else { continue };
        let live = match last {
            Some((place, live)) if place == offset => live,
            _ => live_slots(region, offset)?,
        };
        last = Some((offset, live));
        let sharing = depth.saturating_sub(entry.local_depth());
        keys += live as f64 / (1u64 << sharing) as f64;
    }
    Ok((keys * step as f64).round() as u64)
}

fn live_slots(region: &Region, offset: u64) -> Result<usize, ChainError> {
    let image = SubtableImage::read(region, offset)?;
    Ok(image.slots().filter(|(_, slot)| slot.word().state() == SlotState::Live).count())
}

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
fn started_at() -> Option<Duration> {
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
