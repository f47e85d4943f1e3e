//! Metrics over HTTP, for Prometheus: `GET /metrics`.
//!
//! A thread of its own answers requests. It sleeps until one comes, and then asks the serving
//! thread for its numbers, as `kv-cli stat` does. So metrics cost nothing while no one reads them,
//! and no GET, PUT or DELETE wakes either thread.

mod connections;
mod exposition;
mod families;
mod http;
mod index_sample;
mod process;
mod snapshot;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use farside_fabric::shm::Region;
use farside_layout::Geometry;

use crate::error::{ServerError, system};
use crate::event::{new_event, signal};
use connections::MetricsConnections;
use exposition::Format;
use families::Figures;
use http::PATH;
use process::ProcessFigures;
use snapshot::ServiceLink;

pub(crate) use snapshot::{LabelledCounts, MetricsQuestions, ServiceSnapshot};

/// A bound listener. Requests that come before the server serves wait.
pub(crate) struct MetricsListener {
    listener: TcpListener,
    address: SocketAddr,
    link: ServiceLink,
}

/// Binds a listener. Returns also the serving thread's end of the questions.
///
/// # Errors
/// [`ServerError::Metrics`].
pub(crate) fn bind(
    address: SocketAddr,
) -> Result<(MetricsListener, MetricsQuestions), ServerError> {
    let failed = |error: io::Error| {
        let why = match error.kind() {
            io::ErrorKind::AddrInUse => {
                "another program listens there: stop it or take another port".to_owned()
            }
            io::ErrorKind::AddrNotAvailable => {
                "it is no address of this host: `ip address` shows its addresses".to_owned()
            }
            _ => error.to_string(),
        };
        ServerError::Metrics { address, why }
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let (questions, link) = snapshot::link().map_err(failed)?;
    Ok((MetricsListener { listener, address, link }, questions))
}

/// What the metrics thread knows of the region.
pub(crate) struct MetricsRegion {
    pub(crate) region: Arc<Region>,
    pub(crate) geometry: Geometry,
    /// How long it took to open it.
    pub(crate) recovery: Duration,
}

/// The thread that answers requests for metrics. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    address: SocketAddr,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`ServerError::System`] if the system makes no thread.
    pub(crate) fn start(
        listener: MetricsListener,
        region: MetricsRegion,
    ) -> Result<Self, ServerError> {
        let MetricsListener { listener, address, link } = listener;
        let what = "start the thread for metrics";
        let stop = new_event().map_err(system(what))?;
        let stopped = stop.try_clone().map_err(system(what))?;
        let mut source = Source { link, region, started_at: process::started_at() };
        let mut connections = MetricsConnections::new(listener);
        let serve = move || loop {
            match connections.step(&stopped, &mut |format| source.text(format)) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::error!("FS-009 there are no metrics any more: {error}");
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("farside-metrics".to_owned()).spawn(serve);
        let thread = Some(thread.map_err(system(what))?);
        tracing::info!("metrics are at http://{address}{PATH}");
        Ok(Self { address, stop, thread })
    }

    /// Returns the address at which requests are answered.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        signal(&self.stop);
        // A panic of the thread has been reported, and the server works without metrics.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The source of the metrics.
struct Source {
    link: ServiceLink,
    region: MetricsRegion,
    started_at: Option<Duration>,
}

impl Source {
    /// Returns all metrics in this format. `None` if the serving thread does not answer.
    fn text(&mut self, format: Format) -> Option<String> {
        let service = self.link.snapshot()?.clone();
        let MetricsRegion { region, geometry, recovery } = &self.region;
        let depth = u8::try_from(service.statistics.directory_depth).unwrap_or_default();
        let figures = Figures {
            service,
            process: ProcessFigures::now(),
            started_at: self.started_at,
            region_bytes: region.bytes(),
            recovery: *recovery,
            keys: index_sample::estimate_keys(region, geometry, depth).ok(),
        };
        let text = format.text(figures);
        if text.is_err() {
            tracing::error!(
                "FS-010 the metrics cannot be written: this is a bug, please report it"
            );
        }
        text.ok()
    }
}
