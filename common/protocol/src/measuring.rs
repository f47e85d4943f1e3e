//! Measures operations as a whole, if the client has metrics. An operation that its cached location
//! answers is counted elsewhere (`operation_metrics.rs`).

use std::ops::Range;

use farside_fabric::{Fabric, Nanos};

use crate::extents::LANES_MAX;
use crate::failure::Failure;
use crate::get::{CachedMiss, CachedRead};
use crate::operation_metrics::{
    Measurement, OperationKind, OperationMetrics, RetryReason, read_traffic,
};
use crate::region_handle::RegionHandle;
use crate::{OperationError, ProtocolResult};

impl<'e, F: Fabric> RegionHandle<'e, F> {
    /// The counts for the metrics of the client, if it has any.
    #[inline]
    pub fn metrics(self) -> Option<&'e OperationMetrics> {
        self.region.has_metrics.then_some(&*self.region.metrics)
    }

    /// Begins to measure an operation on these lanes, which began at this time. `None` without
    /// metrics.
    #[inline]
    pub fn begin_measuring(
        self,
        lanes: Range<u16>,
        since: impl FnOnce() -> Nanos,
    ) -> Option<Measurement> {
        self.metrics()?;
        Some(Measurement { since: since(), before: self.engine.counters_of(lanes) })
    }

    /// Counts what these lanes transferred since the beginning of the measurement.
    #[cold]
    pub fn end_measuring(self, begun: &Measurement, lanes: Range<u16>) {
        if let Some(metrics) = self.metrics() {
            metrics.add_traffic(&self.engine.counters_of(lanes).since(&begun.before));
        }
    }

    /// Runs an operation of a synchronous call, which has begun earlier if `since` says so. With
    /// metrics this counts it, except if it fails: then the caller decides whether to try again.
    #[inline]
    pub(crate) fn measure<T>(
        self,
        kind: OperationKind,
        since: Option<Nanos>,
        is_positive: impl FnOnce(&T) -> bool,
        run: impl FnOnce() -> ProtocolResult<T>,
    ) -> ProtocolResult<T> {
        let lanes = 0..self.engine.lanes.min(LANES_MAX as u16);
        // No future is in progress, so the endpoint would not read the clock.
        let now = || self.engine.endpoint.fabric().now();
        let begun = self.begin_measuring(lanes.clone(), || since.unwrap_or_else(now));
        let result = run();
        if let (Some(begun), Some(metrics)) = (&begun, self.metrics()) {
            self.end_measuring(begun, lanes);
            let is_positive = match &result {
                Ok(result) => Some(is_positive(result)),
                // The value was found.
                Err(Failure::Error(error)) => {
                    matches!(**error, OperationError::TargetTooShort { .. }).then_some(true)
                }
                Err(_) => None,
            };
            if let Some(is_positive) = is_positive {
                metrics.add(kind, is_positive, now().saturating_sub(begun.since));
            }
        }
        result
    }

    /// [`RegionHandle::measure`] for a PUT.
    #[inline]
    pub(crate) fn measure_put<T>(
        self,
        since: Option<Nanos>,
        run: impl FnOnce() -> ProtocolResult<T>,
    ) -> ProtocolResult<T> {
        self.measure(OperationKind::Put, since, |_| true, run)
    }

    /// Counts another attempt of an operation.
    #[cold]
    pub fn count_retry(self, reason: RetryReason) {
        if let Some(metrics) = self.metrics() {
            metrics.add_retry(reason);
        }
    }

    /// Runs and counts the rest of a GET that a READ of the cached location has not answered.
    #[inline]
    pub(crate) fn measure_missed<T>(
        self,
        missed: CachedMiss,
        is_found: impl FnOnce(&Option<T>) -> bool,
        run: impl FnOnce(CachedMiss) -> ProtocolResult<Option<T>>,
    ) -> ProtocolResult<Option<T>> {
        let since = match &missed {
            CachedMiss::Unread => None,
            CachedMiss::InVain(read) | CachedMiss::Long(read, _) => Some(read.posted()),
        };
        self.count_missed(&missed);
        self.measure(OperationKind::Get, since, is_found, || run(missed))
    }

    /// Counts what a READ of the cached location has transferred in vain, if there was one.
    #[cold]
    pub(crate) fn count_missed(self, missed: &CachedMiss) {
        if let CachedMiss::InVain(read) = missed {
            self.count_wasted_read(read);
        }
    }

    /// Counts what a READ of the cached location has transferred that did not answer its GET.
    #[cold]
    pub fn count_wasted_read(self, read: &CachedRead) {
        if let (Some(metrics), Ok(block)) = (self.metrics(), read.location().block()) {
            metrics.add_traffic(&read_traffic(1, read.bytes(block)));
        }
    }
}
