//! Which kind of operation asked for what, where one follows another.

use farside::Counters;

use crate::recorder::Recorder;
use crate::store::Store;
use crate::workload::Kind;

/// Adds what the store asked of its fabric to the kind of operation it did meanwhile. Looks only
/// where the kind changes.
pub struct Attribution {
    kind: Option<Kind>,
    since: Counters,
}

impl Attribution {
    /// Nothing yet.
    pub fn new(store: &impl Store) -> Self {
        Self { kind: None, since: store.counters() }
    }

    /// From now on operations are of this kind.
    #[inline]
    pub fn enter(&mut self, kind: Kind, store: &impl Store, recorder: &mut Recorder) {
        if self.kind != Some(kind) {
            self.leave(store, recorder);
            self.kind = Some(kind);
        }
    }

    /// No more operations.
    pub fn leave(&mut self, store: &impl Store, recorder: &mut Recorder) {
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
