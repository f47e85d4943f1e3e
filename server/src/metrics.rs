//! Metrics over HTTP, for Prometheus: `GET /metrics`.
//!
//! A thread of its own answers requests. It sleeps until one comes, and then asks the serving
//! thread for its numbers, as `kv-cli stat` does. So metrics cost nothing while no one reads them,
//! and no GET, PUT or DELETE wakes either thread.

mod families;
mod index_sample;
mod process;
mod snapshot;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use farside_fabric::memory::Region;
use farside_layout::Geometry;
use farside_metrics::{MetricsFormat, MetricsListener, MetricsServer, render, why_not_bound};

use crate::error::{ServerError, system};
use families::Figures;
use process::ProcessFigures;
use snapshot::ServiceLink;

pub(crate) use snapshot::{LabelledCounts, MetricsQuestions, ServiceSnapshot};

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
    let mut source = Source { link, region, started_at: process::started_at() };
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
            keys: index_sample::estimate_keys(region, geometry, depth).ok(),
        };
        render(format, figures)
    }
}
