//! 2 MiB pages for a region without pages of a huge page pool. The kernel makes them, before the
//! server accepts clients or while it serves them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use farside_config::size::ByteSize;
use farside_fabric::memory::{Collapse, RegionMemory};

/// How long a server makes pages before it starts to serve. The rest are made in the background.
const WAIT_MAX: Duration = Duration::from_millis(100);

/// Makes pages for at most `WAIT_MAX`, and returns the remaining work for the background.
///
/// Over RDMA it makes all of them, because a device pins the pages of a region, and the kernel
/// cannot replace pinned pages later.
pub(crate) fn make(memory: &RegionMemory, is_rdma: bool, stop: &AtomicBool) -> Option<Collapse> {
    let mut work = memory.collapse()?;
    if is_rdma {
        tracing::info!("making 2 MiB pages before the device pins the memory");
    }
    let started = Instant::now();
    let may_continue =
        || !stop.load(Ordering::Relaxed) && (is_rdma || started.elapsed() < WAIT_MAX);
    match work.run(may_continue) {
        true => {
            log_refusal(&work);
            None
        }
        // The server is to stop, so it needs no more pages.
        false if is_rdma => None,
        false => {
            tracing::info!("making 2 MiB pages of the rest of the region in the background");
            Some(work)
        }
    }
}

/// Logs how the region could get larger pages, if there is a way.
pub(crate) fn advise(memory: &RegionMemory) {
    if let Some(advice) = memory.advice() {
        tracing::info!("{advice}");
    }
}

fn log_refusal(work: &Collapse) {
    if let Some(refusal) = work.refusal() {
        tracing::info!("FS-008 not all of the region has 2 MiB pages: {refusal}");
    }
}

/// A thread that makes pages while clients are served. It ends when it has made all pages, or when
/// this handle is dropped.
#[derive(Debug)]
pub(crate) struct BackgroundCollapse {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundCollapse {
    /// Starts the thread.
    pub(crate) fn start(mut work: Collapse, memory: Arc<RegionMemory>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let make = move || {
            if !work.run(|| !stopped.load(Ordering::Relaxed)) {
                return;
            }
            let huge_pages = ByteSize(memory.huge_bytes());
            tracing::info!(%huge_pages, "the region has {}", memory.pages_text());
            log_refusal(&work);
            advise(&memory);
        };
        let thread = thread::Builder::new().name("farside-pages".to_owned()).spawn(make);
        if let Err(error) = &thread {
            tracing::warn!(
                "FS-007 cannot start the thread that makes 2 MiB pages of the rest of the region: \
                 {error}"
            );
        }
        Self { stop, thread: thread.ok() }
    }
}

impl Drop for BackgroundCollapse {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A panic of the thread has been reported, and the server works without these pages.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
