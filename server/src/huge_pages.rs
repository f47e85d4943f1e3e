//! 2 MiB pages where no pool has them: made before clients come, or while they are served.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use farside_config::size::ByteSize;
use farside_fabric::shm::{Collapse, RegionMemory};

/// How long the start of a server waits for pages. What is left then is done in the background.
const WAIT_MAX: Duration = Duration::from_millis(100);

/// Makes pages until they are complete, or, if the rest can be done in the background, until the
/// start has waited for long enough. A device pins pages, and pinned pages stay as they are, so
/// over RDMA there is no background. Returns the work that is left.
pub(crate) fn make(memory: &RegionMemory, is_rdma: bool, stop: &AtomicBool) -> Option<Collapse> {
    let mut work = memory.collapse()?;
    if is_rdma {
        tracing::info!("making 2 MiB pages before the device pins the memory");
    }
    let started = Instant::now();
    let may_go_on = || !stop.load(Ordering::Relaxed) && (is_rdma || started.elapsed() < WAIT_MAX);
    match work.run(may_go_on) {
        true => {
            log_refusal(&work);
            None
        }
        // It was told to stop: what is left has no use.
        false if is_rdma => None,
        false => {
            tracing::info!("making 2 MiB pages of the rest of the region in the background");
            Some(work)
        }
    }
}

/// Says how the region would get better pages, if it could.
pub(crate) fn advise(memory: &RegionMemory) {
    if let Some(advice) = memory.advice() {
        tracing::info!("{advice}");
    }
}

fn log_refusal(work: &Collapse) {
    if let Some(refusal) = work.refusal() {
        tracing::info!("not all of the region has 2 MiB pages: {refusal}");
    }
}

/// A thread that makes pages while clients are served. It ends when there is no more to make, or
/// when this is dropped.
#[derive(Debug)]
pub(crate) struct Background {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
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
                "the rest of the region keeps its pages: cannot start a thread: {error}"
            );
        }
        Self { stop, thread: thread.ok() }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The pages are no part of what the server promises; the panic was reported already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
