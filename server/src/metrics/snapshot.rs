//! What the serving thread tells the metrics thread, and how: the metrics thread signals an event,
//! and the serving thread answers with a copy of its numbers. Neither waits for the other longer
//! than [`ANSWER_MAX`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use farside_control::ServerStatistics;

use crate::cluster::OwnView;
use crate::event::{new_event, signal};

/// How long the metrics thread waits for the serving thread. Prometheus waits 10 s by default.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// For how long the metrics thread gives the same numbers again. So requests for metrics wake the
/// serving thread ten times a second at most, however many there are.
const AGE_MAX: Duration = Duration::from_millis(100);

/// Counts of events, one for each of a fixed set of labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LabelledCounts(Vec<(&'static str, u64)>);

impl LabelledCounts {
    /// All counts begin with 0, so that every label is there from the start. Prometheus cannot
    /// compute the increase of a count whose first value it has not seen.
    pub(crate) fn new(labels: &[&'static str]) -> Self {
        Self(labels.iter().map(|label| (*label, 0)).collect())
    }

    /// Counts one event.
    pub(crate) fn count(&mut self, label: &'static str) {
        let found = self.0.iter_mut().find(|(known, _)| *known == label);
        debug_assert!(found.is_some(), "{label} is not among the labels");
        if let Some((_, count)) = found {
            *count += 1;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().copied()
    }
}

/// The numbers of the serving thread at one moment. Counts of events start with the server.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServiceSnapshot {
    pub(crate) statistics: ServerStatistics,
    pub(crate) clients_max: u32,
    pub(crate) readers: u64,
    pub(crate) writers: u64,
    /// The sessions with a connection of their own, which those on shared memory have not.
    pub(crate) sessions: u64,
    /// Lost clients, by the reason.
    pub(crate) fences: LabelledCounts,
    /// Refused connections, by the reason.
    pub(crate) refusals: LabelledCounts,
    /// Messages of clients on the control channel, by their kind.
    pub(crate) messages: LabelledCounts,
    pub(crate) probes: u64,
    pub(crate) probe_failures: u64,
    /// Whether the last split found no memory for two more subtables.
    pub(crate) is_growth_blocked: bool,
    /// Whether the region is a cache.
    pub(crate) evicts: bool,
    /// The view of a cluster's shard that the server owns.
    pub(crate) view: Option<OwnView>,
}

/// The serving thread's end.
pub(crate) struct MetricsQuestions {
    event: Arc<OwnedFd>,
    answers: SyncSender<ServiceSnapshot>,
}

impl MetricsQuestions {
    /// Answers a question. Never waits: the metrics thread takes each answer before it asks again.
    pub(crate) fn answer(&self, snapshot: ServiceSnapshot) {
        // Nothing to read is no error: the metrics thread has given up.
        let _ = rustix::io::read(&*self.event, &mut [0; 8]);
        let _ = self.answers.try_send(snapshot);
    }
}

impl AsFd for MetricsQuestions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// The metrics thread's end.
pub(crate) struct ServiceLink {
    event: Arc<OwnedFd>,
    answers: Receiver<ServiceSnapshot>,
    /// The last answer, or that there was none, and when.
    last: Option<(Instant, Option<ServiceSnapshot>)>,
}

/// Returns both ends.
pub(crate) fn link() -> io::Result<(MetricsQuestions, ServiceLink)> {
    let event = Arc::new(new_event()?);
    let (sender, answers) = sync_channel(1);
    let questions = MetricsQuestions { event: event.clone(), answers: sender };
    Ok((questions, ServiceLink { event, answers, last: None }))
}

impl ServiceLink {
    /// Returns the numbers of the serving thread, which are at most [`AGE_MAX`] old. `None` if the
    /// thread does not answer.
    pub(crate) fn snapshot(&mut self) -> Option<&ServiceSnapshot> {
        self.snapshot_at(Instant::now())
    }

    /// As [`ServiceLink::snapshot`], at this time.
    fn snapshot_at(&mut self, now: Instant) -> Option<&ServiceSnapshot> {
        let age = self.last.as_ref().map(|(at, _)| now.saturating_duration_since(*at));
        if age.is_none_or(|age| age >= AGE_MAX) {
            let answer = self.ask();
            self.last = Some((Instant::now(), answer));
        }
        self.last.as_ref()?.1.as_ref()
    }

    fn ask(&self) -> Option<ServiceSnapshot> {
        // An answer that came too late for the last question.
        while self.answers.try_recv().is_ok() {}
        signal(&self.event);
        self.answers.recv_timeout(ANSWER_MAX).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::RecvTimeoutError;
    use std::thread;

    use super::*;

    fn snapshot(uptime_ms: u64) -> ServiceSnapshot {
        let statistics = ServerStatistics { uptime_ms, ..Default::default() };
        ServiceSnapshot { statistics, ..Default::default() }
    }

    fn shown(link: &mut ServiceLink, now: Instant) -> Option<u64> {
        link.snapshot_at(now).map(|snapshot| snapshot.statistics.uptime_ms)
    }

    #[test]
    fn an_answer_is_given_again_for_a_while_and_a_late_one_is_never_given() {
        let (questions, mut link) = link().unwrap();
        // Answers to a question of which the metrics thread has given up. The second finds no room.
        [1, 2].into_iter().for_each(|uptime_ms| questions.answer(snapshot(uptime_ms)));
        let answered = thread::spawn(move || {
            for uptime_ms in [3, 4] {
                let polled = &mut [rustix::event::PollFd::new(&questions, POLLED)];
                rustix::event::poll(polled, None).unwrap();
                questions.answer(snapshot(uptime_ms));
            }
        });
        let now = Instant::now();
        assert_eq!([shown(&mut link, now), shown(&mut link, now)], [Some(3), Some(3)]);
        assert_eq!(shown(&mut link, Instant::now() + AGE_MAX), Some(4));
        answered.join().unwrap();
    }

    const TIMEOUT: Duration = Duration::from_secs(60);
    const POLLED: rustix::event::PollFlags = rustix::event::PollFlags::IN;

    #[test]
    fn a_serving_thread_that_does_not_answer_or_has_ended_is_not_waited_for_without_end() {
        let (questions, mut link) = link().unwrap();
        let started = Instant::now();
        assert_eq!(shown(&mut link, started), None);
        assert!(started.elapsed() >= ANSWER_MAX);
        drop(questions);
        assert_eq!(link.answers.recv_timeout(TIMEOUT).err(), Some(RecvTimeoutError::Disconnected));
        assert_eq!(shown(&mut link, Instant::now() + AGE_MAX), None);
    }
}
