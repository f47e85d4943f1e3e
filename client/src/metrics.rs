//! The metrics of a client: all its sessions together, as a text for Prometheus.

use std::array;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farside_metrics::{
    Collector, DescriptorEncoder, Families, MetricType, MetricsFormat, Unit, encode_count, render,
};
use farside_protocol::{
    CacheStatistics, Latencies, Lookups, OpenRegion, OperationError, OperationKind,
    OperationMetrics, OperationTotals, RetryReason,
};

use crate::Error;

/// The powers of two of nanoseconds that are bounds of buckets: from 128 ns to 8.6 s.
const BOUNDS: std::ops::Range<u32> = 7..34;

/// The counts of a client's sessions, those that have ended included.
#[derive(Default)]
pub(crate) struct ClientMetrics {
    counts: Mutex<SessionsCounts>,
    /// By [`ErrorCause`].
    errors: [AtomicU64; ErrorCause::ALL.len()],
}

#[derive(Default)]
struct SessionsCounts {
    sessions: Vec<Arc<OperationMetrics>>,
    /// The counts of sessions that have ended.
    ended: OperationTotals,
    /// The lookups of sessions, for each region that they have opened.
    lookups: Vec<Arc<Lookups>>,
    /// The lookups in regions that are closed.
    former_lookups: CacheStatistics,
}

impl SessionsCounts {
    /// Adds the counts of sessions and regions that have ended to the sums, and forgets these.
    fn add_up(&mut self) {
        let Self { sessions, ended, lookups, former_lookups } = self;
        sessions.retain_mut(|session| {
            // Looked at first: a session that has ended counts no more.
            let goes_on = Arc::get_mut(session).is_none();
            if !goes_on {
                *ended += &session.totals();
            }
            goes_on
        });
        lookups.retain(|lookups| {
            let goes_on = !lookups.has_ended();
            if !goes_on {
                *former_lookups = sum(*former_lookups, lookups.statistics());
            }
            goes_on
        });
    }
}

fn sum(one: CacheStatistics, other: CacheStatistics) -> CacheStatistics {
    CacheStatistics { hits: one.hits + other.hits, misses: one.misses + other.misses }
}

impl ClientMetrics {
    fn lock(&self) -> MutexGuard<'_, SessionsCounts> {
        // Poisoning is ignored: the counts are right after each step.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counts of a session that begins.
    pub(crate) fn add_session(self: &Arc<Self>) -> SessionMetrics {
        let operations = Arc::<OperationMetrics>::default();
        let mut counts = self.lock();
        counts.add_up();
        counts.sessions.push(operations.clone());
        SessionMetrics { operations, client: self.clone() }
    }

    /// Counts an operation that failed before a session could run it.
    #[cold]
    pub(crate) fn add_error(&self, kind: OperationKind, error: &Error) {
        self.lock().ended.kinds[kind as usize].errors += 1;
        self.count_cause(error);
    }

    fn count_cause(&self, error: &Error) {
        self.errors[ErrorCause::of(error) as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The median and the 99th percentile of the latencies of all GETs so far, in nanoseconds.
    /// `None` if there were none.
    pub(crate) fn get_latency(&self) -> Option<(u64, u64)> {
        let (totals, ..) = self.totals();
        let latencies = &totals.kinds[OperationKind::Get as usize].latencies;
        latencies.quantile(0.5).zip(latencies.quantile(0.99))
    }

    /// Renders all counts in this format, together with those of the connections: how often one
    /// took the place of a lost one, and how often it led to another region.
    pub(crate) fn render(
        &self,
        format: MetricsFormat,
        reconnects: u64,
        regions_replaced: u64,
    ) -> Option<String> {
        let (operations, lookups, sessions) = self.totals();
        let errors = array::from_fn(|cause| self.errors[cause].load(Ordering::Relaxed));
        let sessions = sessions as u64;
        let figures =
            Figures { operations, lookups, errors, sessions, reconnects, regions_replaced };
        render(format, figures)
    }

    /// All counts, the lookups, and the number of sessions.
    fn totals(&self) -> (OperationTotals, CacheStatistics, usize) {
        let mut counts = self.lock();
        counts.add_up();
        let mut totals = counts.ended.clone();
        counts.sessions.iter().for_each(|session| totals += &session.totals());
        let present = counts.lookups.iter().map(|lookups| lookups.statistics());
        (totals, present.fold(counts.former_lookups, sum), counts.sessions.len())
    }
}

/// The counts of one session.
#[derive(Clone)]
pub(crate) struct SessionMetrics {
    pub(crate) operations: Arc<OperationMetrics>,
    pub(crate) client: Arc<ClientMetrics>,
}

impl SessionMetrics {
    /// Counts the operations on a region that the session has opened.
    pub(crate) fn add_region(&self, region: &mut OpenRegion) {
        let mut counts = self.client.lock();
        counts.add_up();
        counts.lookups.push(region.lookups.share());
        region.set_metrics(self.operations.clone());
    }

    /// Counts an operation that failed.
    #[cold]
    pub(crate) fn add_error(&self, kind: OperationKind, error: &Error) {
        // The value was found, so the operation is counted already.
        if !matches!(error, Error::Operation(OperationError::TargetTooShort { .. })) {
            self.operations.add_error(kind);
            self.client.count_cause(error);
        }
    }
}

/// Why operations fail, as the metrics name it.
#[derive(Clone, Copy)]
enum ErrorCause {
    Contended,
    OutOfSpace,
    Unreachable,
    Disconnected,
    Indeterminate,
    Denied,
    Invalid,
    Damaged,
    Other,
}

impl ErrorCause {
    /// All of them with their labels, in their order.
    const ALL: [(Self, &'static str); 9] = [
        (Self::Contended, "contended"),
        (Self::OutOfSpace, "out_of_space"),
        (Self::Unreachable, "unreachable"),
        (Self::Disconnected, "disconnected"),
        (Self::Indeterminate, "indeterminate"),
        (Self::Denied, "denied"),
        (Self::Invalid, "invalid"),
        (Self::Damaged, "damaged"),
        (Self::Other, "other"),
    ];

    fn of(error: &Error) -> Self {
        use OperationError::{
            ExpiryTooLate, KeyEmpty, KeyTooLong, NotANumber, NumberOverflow, ValueTooLong,
        };
        match error {
            Error::Operation(OperationError::Contended { .. }) => Self::Contended,
            Error::Operation(OperationError::OutOfSpace { .. }) => Self::OutOfSpace,
            Error::Operation(OperationError::Indeterminate) => Self::Indeterminate,
            Error::Operation(OperationError::Denied) => Self::Denied,
            Error::Operation(OperationError::Layout(_)) => Self::Damaged,
            Error::Operation(
                KeyEmpty
                | KeyTooLong { .. }
                | ValueTooLong { .. }
                | ExpiryTooLate
                | NotANumber
                | NumberOverflow,
            ) => Self::Invalid,
            Error::Connect(_) | Error::Unavailable { .. } => Self::Unreachable,
            Error::Disconnected { .. } => Self::Disconnected,
            _ => Self::Other,
        }
    }
}

/// All numbers of one text.
#[derive(Debug)]
struct Figures {
    operations: OperationTotals,
    lookups: CacheStatistics,
    errors: [u64; ErrorCause::ALL.len()],
    sessions: u64,
    reconnects: u64,
    regions_replaced: u64,
}

impl Figures {
    fn operations(&self, to: &mut Families<'_>) -> fmt::Result {
        let name = "farside_client_operations";
        let help = "Operations that have ended, by their kind and result.";
        let mut metric = to.family(name, help, None, MetricType::Counter)?;
        for ((kind, label), totals) in OperationKind::ALL.iter().zip(&self.operations.kinds) {
            let [positive, negative] = kind.results();
            let results = [
                (positive, totals.positive),
                (negative, totals.negative),
                ("error", totals.errors),
            ];
            for (result, count) in results {
                let labels = [("operation", *label), ("result", result)];
                encode_count(&mut metric.encode_family(&labels)?, count)?;
            }
        }
        let used = OperationKind::ALL.iter().zip(&self.operations.kinds);
        let used = used.filter(|(_, totals)| totals.latencies.count() > 0);
        to.histograms(
            "farside_client_operation_duration",
            "Duration of operations that did not fail, from the post of the first verb to the end \
             of the last. Kinds without operations are left out.",
            "operation",
            used.map(|((_, label), totals)| {
                let latencies = &totals.latencies;
                (*label, seconds(latencies.sum_ns as f64), buckets(latencies))
            }),
        )
    }

    fn traffic(&self, to: &mut Families<'_>) -> fmt::Result {
        let traffic = &self.operations.traffic;
        let help = "Chains of verbs. Each takes its operation one round trip.";
        to.counter("farside_client_round_trips", help, traffic.round_trips)?;
        to.counts(
            "farside_client_verbs",
            "Verbs, by their kind.",
            "verb",
            [
                ("read", traffic.reads),
                ("write", traffic.writes),
                ("compare_swap", traffic.compare_swaps),
            ],
        )?;
        let help = "The payload of READs.";
        let bytes = Some(&Unit::Bytes);
        let mut metric = to.family("farside_client_read", help, bytes, MetricType::Counter)?;
        encode_count(&mut metric, traffic.read_bytes)?;
        let help = "The payload of WRITEs and compare-and-swaps.";
        let mut metric = to.family("farside_client_written", help, bytes, MetricType::Counter)?;
        encode_count(&mut metric, traffic.written_bytes)
    }
}

fn seconds(ns: f64) -> f64 {
    ns / 1e9
}

/// The buckets of a histogram: the greatest latency of each, in seconds, and its count.
fn buckets(latencies: &Latencies) -> Vec<(f64, u64)> {
    let bounds = BOUNDS.map(|power| seconds((1_u64 << power) as f64)).chain([f64::INFINITY]);
    // The bound of a bucket is where the next one begins.
    bounds.zip(latencies.by_powers_of_two(BOUNDS.start - 1..BOUNDS.end - 1)).collect()
}

impl Collector for Figures {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let to = &mut Families::new(encoder);
        let version = ("version", env!("CARGO_PKG_VERSION"));
        to.info("farside_client_build", "The version of the client library.", version)?;
        self.operations(to)?;
        self.traffic(to)?;
        to.counts(
            "farside_client_cache_lookups",
            "Lookups of keys in the location cache, by their result.",
            "result",
            [("hit", self.lookups.hits), ("miss", self.lookups.misses)],
        )?;
        let retries = RetryReason::ALL.iter().zip(self.operations.retries);
        to.counts(
            "farside_client_retries",
            "How often an operation was tried again or had to wait, by the reason.",
            "reason",
            retries.map(|((_, label), count)| (*label, count)),
        )?;
        to.counts(
            "farside_client_errors",
            "Operations that failed, by the cause.",
            "cause",
            ErrorCause::ALL.iter().zip(self.errors).map(|((_, label), count)| (*label, count)),
        )?;
        let help = "How often the client connected again after it had lost a connection.";
        to.counter("farside_client_reconnects", help, self.reconnects)?;
        let help = "How often a new connection led to another region, which lacks the keys.";
        to.counter("farside_client_regions_replaced", help, self.regions_replaced)?;
        to.gauge("farside_client_sessions", "Open sessions.", self.sessions)
    }
}

#[cfg(test)]
mod tests {
    use farside_protocol::SessionLookups;

    use super::*;

    #[test]
    fn the_causes_are_in_the_order_of_their_numbers() {
        assert!(ErrorCause::ALL.iter().enumerate().all(|(at, (cause, _))| *cause as usize == at));
    }

    #[test]
    fn what_has_ended_still_counts() {
        let metrics = Arc::<ClientMetrics>::default();
        let (first, second) = (metrics.add_session(), metrics.add_session());
        let lookups = SessionLookups::default();
        metrics.lock().lookups.push(lookups.share());
        lookups.note_hit();
        assert_eq!(metrics.get_latency(), None);
        first.operations.add(OperationKind::Get, true, 1000);
        second.operations.add(OperationKind::Get, false, 1000);
        drop((first, lookups));
        for _ in 0..2 {
            let (totals, lookups, sessions) = metrics.totals();
            let gets = &totals.kinds[OperationKind::Get as usize];
            assert_eq!((gets.positive, gets.negative, sessions), (1, 1, 1));
            assert_eq!(lookups, CacheStatistics { hits: 1, misses: 0 });
        }
        let (median, most) = metrics.get_latency().unwrap();
        assert!((896..1024).contains(&median) && median == most, "{median} {most}");
    }
}
