//! The records of a thread's operations, and the attribution of the fabric's counters to kinds of
//! operations.

use farside::Counters;

use crate::latencies::Latencies;
use crate::store::MeasuredStore;
use crate::workload::{Kind, Mix};

/// The record of all operations of one kind.
#[derive(Clone, Default)]
pub struct KindRecord {
    /// The latencies of the operations, in nanoseconds.
    pub latencies: Latencies,
    /// The service times, in nanoseconds, which count from the start of an operation. Only for a
    /// run with a schedule, whose latencies count from when an operation was due.
    pub service_times: Option<Latencies>,
    /// The verbs, bytes and round trips that the operations took.
    pub counters: Counters,
}

/// The record of all operations of one thread, or of several threads.
#[derive(Clone)]
pub struct Recorder {
    /// The records, by [`Kind::index`]; `None` for kinds that the workload does not have.
    kinds: [Option<KindRecord>; Kind::COUNT],
    /// Operations that succeeded but did not find what the workload had left: the key was absent,
    /// the value had another length, or an inserted key was already there.
    pub unexpected: u64,
    /// The time spent on generating and recording operations, in nanoseconds.
    pub driver_ns: u64,
    /// How far the slowest thread was behind its schedule when it ended, in nanoseconds.
    pub behind_ns: u64,
}

impl Recorder {
    /// An empty recorder for the kinds of a mix. It allocates nothing later.
    pub fn new(mix: Mix) -> Self {
        let mut kinds: [Option<KindRecord>; Kind::COUNT] = Default::default();
        for (kind, _) in mix.kinds() {
            kinds[kind.index()] = Some(KindRecord::default());
        }
        Self { kinds, unexpected: 0, driver_ns: 0, behind_ns: 0 }
    }

    /// Records service times too, for a run with a schedule.
    pub fn with_service_times(mut self) -> Self {
        for record in self.kinds.iter_mut().flatten() {
            record.service_times = Some(Latencies::default());
        }
        self
    }

    /// Records how long a finished operation took: from when it was due, and from its start.
    #[inline]
    pub fn record(&mut self, kind: Kind, latency_ns: u64, service_ns: u64) {
        let Some(record) = &mut self.kinds[kind.index()] else { return };
        record.latencies.record(latency_ns);
        if let Some(service_times) = &mut record.service_times {
            service_times.record(service_ns);
        }
    }

    /// Adds the fabric's counts of operations of this kind.
    #[inline]
    pub fn attribute(&mut self, kind: Kind, counters: &Counters) {
        if let Some(record) = &mut self.kinds[kind.index()] {
            record.counters += *counters;
        }
    }

    /// Adds the records of another thread.
    pub fn merge(&mut self, other: &Self) {
        for (kind, added) in other.kinds() {
            let Some(own) = &mut self.kinds[kind.index()] else {
                self.kinds[kind.index()] = Some(added.clone());
                continue;
            };
            own.latencies.add(&added.latencies);
            if let (Some(own), Some(added)) = (&mut own.service_times, &added.service_times) {
                own.add(added);
            }
            own.counters += added.counters;
        }
        self.unexpected += other.unexpected;
        self.driver_ns += other.driver_ns;
        self.behind_ns = self.behind_ns.max(other.behind_ns);
    }

    /// The kinds that the workload has, each with its record.
    pub fn kinds(&self) -> impl Iterator<Item = (Kind, &KindRecord)> {
        Kind::ALL
            .into_iter()
            .zip(&self.kinds)
            .filter_map(|(kind, record)| record.as_ref().map(|record| (kind, record)))
    }

    /// The number of all operations.
    pub fn operations(&self) -> u64 {
        self.kinds().map(|(_, record)| record.latencies.count()).sum()
    }
}

/// Attributes the fabric's counters to kinds of operations, where operations run one at a time.
/// Reads the counters only when the kind changes.
pub struct Attribution {
    kind: Option<Kind>,
    /// The counters when the present kind began.
    since: Counters,
}

impl Attribution {
    /// Starts with the present counters.
    pub fn new(store: &impl MeasuredStore) -> Self {
        Self { kind: None, since: store.counters() }
    }

    /// Call it before an operation of this kind. If the kind changes, attributes the counts so far
    /// to the former kind.
    #[inline]
    pub fn enter(&mut self, kind: Kind, store: &impl MeasuredStore, recorder: &mut Recorder) {
        if self.kind != Some(kind) {
            self.leave(store, recorder);
            self.kind = Some(kind);
        }
    }

    /// Ends the present kind, because no more operations follow: attributes the counts so far to
    /// it.
    pub fn leave(&mut self, store: &impl MeasuredStore, recorder: &mut Recorder) {
        let now = store.counters();
        if now.round_trips < self.since.round_trips {
            // The session reconnected and counts from 0 again.
            self.since = Counters::default();
        }
        if let Some(kind) = self.kind {
            recorder.attribute(kind, &(now - self.since));
        }
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latencies::LATENCY_NS_MAX;
    use crate::workload::Workload;

    #[test]
    fn threads_add_up_and_long_latencies_saturate() {
        let mut all = Recorder::new(Mix::NOTHING);
        for latency_ns in [100, u64::MAX] {
            let mut thread = Recorder::new(Workload::A.mix()).with_service_times();
            thread.record(Kind::Get, latency_ns, 50);
            thread.attribute(Kind::Put, &Counters { reads: 3, ..Default::default() });
            thread.unexpected = 2;
            thread.behind_ns = latency_ns;
            all.merge(&thread);
        }
        assert_eq!((all.operations(), all.unexpected, all.behind_ns), (2, 4, u64::MAX));
        let kinds: Vec<(Kind, u64)> =
            all.kinds().map(|(kind, record)| (kind, record.counters.reads)).collect();
        assert_eq!(kinds, [(Kind::Get, 0), (Kind::Put, 6)]);
        let (_, gets) = all.kinds().next().unwrap();
        let latencies = gets.latencies.histogram();
        assert!(latencies.max() >= LATENCY_NS_MAX);
        assert_eq!(latencies.value_at_quantile(0.4), 100);
        let service_times = gets.service_times.as_ref().unwrap().histogram();
        assert_eq!((service_times.len(), service_times.max()), (2, 50));
    }
}
