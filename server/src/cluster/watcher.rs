//! The thread that owns the records' store: it reads the records, takes or continues a shard, and
//! keeps the server's announcement.
//!
//! A commit is followed by a read, whatever its outcome. The server owns a view if the record of
//! the shard names the server, and for no other reason. So a commit whose outcome is unknown needs
//! no case of its own.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use farside_cluster::{
    Announcement, Change, ClusterRecord, Commit, Condition, Memory, RecordError, RecordStore,
    Records, Revision, ServedCopy, ServerRecord, ShardRecord, StoreError,
};
use farside_control::cluster::{ClusterMap, Id};
use farside_fabric::memory::RegionMemory;

use super::error::{ClusterError, GivenUp};
use super::identity;
use super::membership::{Command, News, OwnView};
use super::serving::{KnownRegion, may_continue};
use super::serving::{Readiness, Servings};
use crate::event::signal;

/// The records are read at least this often, without any hint, and at most half as long later.
const READ_INTERVAL: Duration = Duration::from_millis(2000);
/// The shortest time from a read to the next, whatever the hints.
const READ_PAUSE: Duration = Duration::from_millis(50);
/// The time from a failed read or commit to the next attempt.
const RETRY: Duration = Duration::from_millis(500);
/// The interval at which the announcement is kept alive.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(1);
/// How long one call waits for a change.
const HINT_WAIT: Duration = Duration::from_secs(2);
/// Limit on the commits between two waits.
const COMMITS_MAX: usize = 8;

/// What the server offers to the cluster.
pub(super) struct OwnCopy {
    /// The copy, as it is written to the record of a shard.
    pub(super) served: ServedCopy,
    pub(super) servings: Servings,
    pub(super) region_file: Option<PathBuf>,
    /// The shard of the region. `None` for a spare, which takes any.
    pub(super) shard: Option<u16>,
    pub(super) label: Option<String>,
    pub(super) region_bytes: u64,
}

/// The server's own shard.
struct Held {
    view: OwnView,
    record: ShardRecord,
    revision: Revision,
}

/// What the records ask for.
enum Step {
    /// Nothing, until they change.
    Wait,
    Commit((Condition, Change)),
    /// A commit after which no earlier one can take effect.
    Settle((Condition, Change)),
}

/// The thread, before and while it runs.
pub(crate) struct Watcher {
    store: Arc<dyn RecordStore>,
    uri: String,
    cluster: ClusterRecord,
    own: OwnCopy,
    hints: Sender<Command>,
    commands: Receiver<Command>,
    news: Sender<News>,
    event: Arc<OwnedFd>,
    held: Option<Held>,
    announcement: Option<Box<dyn Announcement>>,
    announced_shard: Option<u16>,
    /// The last question of the serving thread.
    question: u64,
    /// The revision of the last read, for the thread that waits for changes.
    revision: Arc<AtomicU64>,
    /// The servers whose processes have ended, and when that was noticed.
    ended: BTreeMap<Id, Instant>,
    /// The highest number of each shard's view that was in the records.
    numbers: Vec<u64>,
    reading: Trouble,
    going_back: Trouble,
    writing: Trouble,
}

impl Watcher {
    pub(super) fn new(
        (store, uri): (Arc<dyn RecordStore>, String),
        cluster: ClusterRecord,
        own: OwnCopy,
        (hints, commands): (Sender<Command>, Receiver<Command>),
        (news, event): (Sender<News>, Arc<OwnedFd>),
    ) -> Self {
        Self {
            store,
            uri,
            cluster,
            own,
            hints,
            commands,
            news,
            event,
            held: None,
            announcement: None,
            announced_shard: None,
            question: 0,
            revision: Arc::default(),
            ended: BTreeMap::new(),
            numbers: Vec::new(),
            reading: Trouble::default(),
            going_back: Trouble::default(),
            writing: Trouble::default(),
        }
    }

    /// Starts the thread, when the server listens. It ends with the serving thread, or soon after.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn start(mut self, memory: &Arc<RegionMemory>) -> io::Result<()> {
        self.own.servings.attach(memory);
        let (store, hints) = (self.store.clone(), self.hints.clone());
        let revision = Arc::downgrade(&self.revision);
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        named("farside-changes").spawn(move || wait_for_changes(&*store, &revision, &hints))?;
        named("farside-cluster").spawn(move || self.run())?;
        Ok(())
    }

    fn run(mut self) {
        let mut read_at = Instant::now();
        let mut announce_at = read_at;
        let mut last_read = None;
        loop {
            let wait = read_at.min(announce_at).saturating_duration_since(Instant::now());
            let first = match self.commands.recv_timeout(wait) {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let rest: Vec<Command> = self.commands.try_iter().collect();
            for command in first.into_iter().chain(rest) {
                match command {
                    Command::Read { question } => self.question = question,
                    Command::Changed => {}
                    Command::Leave { settle, done } => {
                        self.leave(settle);
                        // Drops the announcement before the server's process ends.
                        drop(self);
                        let _ = done.send(());
                        return;
                    }
                    Command::End => return,
                }
                let soon = last_read.map_or_else(Instant::now, |last| last + READ_PAUSE);
                read_at = read_at.min(soon);
            }
            if Instant::now() >= read_at {
                let pause = match self.read_and_act() {
                    Ok(pause) => pause,
                    Err(error) => {
                        self.tell(News::GivenUp(Box::new(error.into())));
                        return;
                    }
                };
                let now = Instant::now();
                (last_read, read_at) = (Some(now), now + pause);
            }
            if Instant::now() >= announce_at {
                self.announce();
                announce_at = Instant::now() + ANNOUNCE_INTERVAL;
            }
        }
    }

    fn tell(&self, news: News) {
        // Without a serving thread the next command is `End`.
        let _ = self.news.send(news);
        signal(&self.event);
    }

    /// Reads the records, and does what they ask for. Returns the time until the next read.
    ///
    /// # Errors
    /// Why the server has to end.
    fn read_and_act(&mut self) -> Result<Duration, ClusterError> {
        for _ in 0..COMMITS_MAX {
            let answered = self.question;
            let records = match self.store.read() {
                Ok(records) => records,
                Err(error) => {
                    self.reading.report(&error.to_string());
                    return Ok(RETRY);
                }
            };
            self.revision.store(records.revision, Ordering::Relaxed);
            let map = match self.usable_map(&records) {
                Ok(map) => map,
                Err(why) => {
                    self.reading.report(&format!("the records at {} {why}", self.uri));
                    return Ok(RETRY);
                }
            };
            let is_older = self.note_numbers(&map);
            let own_shard = self.held.as_ref().map(|held| usize::from(held.view.shard));
            if own_shard.is_some_and(|own| map.shards[own].number < self.numbers[own]) {
                return Ok(RETRY);
            }
            let step = match self.decide(&records)? {
                // Records that went back must not decide whose a shard is.
                _ if is_older => Step::Wait,
                step => step,
            };
            let settles = matches!(step, Step::Settle(..));
            let (condition, change) = match step {
                Step::Commit(commit) | Step::Settle(commit) => commit,
                Step::Wait => {
                    let own = self.held.as_ref().map(|held| held.view);
                    self.tell(News::Read { answered, map, own });
                    return Ok(self.pause());
                }
            };
            match self.store.commit(&[condition], &[change]) {
                Ok(Commit::Done) => {
                    self.writing.end("the records can be changed again");
                    if settles {
                        self.own.servings.settle();
                    }
                }
                // Another server was faster.
                Ok(Commit::Refused) => thread::sleep(up_to(READ_PAUSE)),
                Err(error) => {
                    self.report_write(&error);
                    return Ok(RETRY);
                }
            }
        }
        Ok(RETRY)
    }

    /// Returns the map, or why these records are not those of the server's cluster. The server then
    /// goes on with what it knows.
    fn usable_map(&mut self, records: &Records) -> Result<ClusterMap, String> {
        match records.cluster() {
            Err(RecordError::Missing { .. }) => {
                let gone = "are gone: restore them from a backup of their store, and run `kv-cli \
                            cluster repair`";
                return Err(gone.to_owned());
            }
            Err(error) => return Err(format!("cannot be used: {error}")),
            Ok(cluster) if cluster != self.cluster => {
                return Err(format!(
                    "are now those of the cluster {}, and this server is of {}: stop the servers \
                     of one of them",
                    cluster.cluster, self.cluster.cluster
                ));
            }
            Ok(_) => {}
        }
        let map = records.map().map_err(|error| format!("cannot be used: {error}"))?;
        self.reading.end("the records can be read again");
        Ok(map)
    }

    /// Notes the numbers of these views. Returns whether one is lower than it was, which is so only
    /// if the records were restored from a backup.
    fn note_numbers(&mut self, map: &ClusterMap) -> bool {
        self.numbers.resize(map.shards.len(), 0);
        let mut older = None;
        for (shard, (known, view)) in self.numbers.iter_mut().zip(&map.shards).enumerate() {
            if view.number < *known {
                older = older.or(Some((shard, view.number, *known)));
            }
            *known = view.number.max(*known);
        }
        let Some((shard, found, known)) = older else {
            self.going_back.end("the records are not older than this server any more");
            return false;
        };
        self.going_back.report(&format!(
            "the records at {uri} are older than this server: they have view {found} of shard \
             {shard}, which was at {known}. If they were restored from a backup, run `kv-cli \
             cluster repair {uri}`",
            uri = self.uri
        ));
        true
    }

    /// Finds out what the server owns, and what it has to do.
    fn decide(&mut self, records: &Records) -> Result<Step, ClusterError> {
        let unusable = |source| ClusterError::Records { uri: self.uri.clone(), source };
        let mut shards = Vec::new();
        for shard in 0..self.cluster.shards {
            let (record, revision) = records.shard(shard).map_err(unusable)?;
            shards.push((shard, record, revision));
        }
        let own_id = self.own.served.copy.server;
        let names_this = |record: &ShardRecord| {
            record.copies.first().is_some_and(|served| served.copy.server == own_id)
        };
        let wanted = self.held.as_ref().map(|held| held.view.shard);
        for (shard, record, revision) in &shards {
            if names_this(record) && wanted.is_none_or(|wanted| wanted == *shard) {
                if record.copies.first().is_some_and(|served| served.serving.is_none()) {
                    // After a repair the record lacks what only this server knows.
                    let own = vec![self.own.served.clone()];
                    return Ok(Step::Commit(commit(*shard, record, *revision, own)));
                }
                let view = OwnView { shard: *shard, number: record.number };
                self.held = Some(Held { view, record: record.clone(), revision: *revision });
                break;
            }
            if wanted == Some(*shard) {
                return Err(self.given_up(*shard, record));
            }
        }
        let own_shard = self.held.as_ref().map(|held| held.view.shard);
        for (shard, record, revision) in &shards {
            // A commit that was late, when the server had taken another shard already.
            let is_surplus = names_this(record) && own_shard != Some(*shard);
            if is_surplus || self.is_lost(record) {
                return Ok(Step::Commit(commit(*shard, record, *revision, Vec::new())));
            }
        }
        if own_shard.is_some() {
            return Ok(Step::Wait);
        }
        let Some(shard) = self.own.shard else {
            let vacant = shards.iter().find(|(_, record, _)| record.is_vacant());
            return vacant.map_or(Ok(Step::Wait), |(shard, record, revision)| {
                self.take(*shard, record, *revision)
            });
        };
        let region = KnownRegion {
            region_id: self.own.served.copy.region_id,
            incarnation: self.own.served.copy.incarnation.saturating_sub(1),
            memory: &self.own.served.memory,
            servings: self.own.servings.written(),
        };
        let file = self.own.region_file.clone().unwrap_or_default();
        match shards.into_iter().nth(shard.into()) {
            Some((_, record, revision)) if may_continue(&record, &region, (&file, shard))? => {
                self.take(shard, &record, revision)
            }
            _ => Err(ClusterError::NoShard { file, uri: self.uri.clone() }),
        }
    }

    /// Returns the step that makes this server the owner of a shard, or a step before that.
    fn take(
        &mut self,
        shard: u16,
        record: &ShardRecord,
        revision: Revision,
    ) -> Result<Step, ClusterError> {
        let recorded = record.copies.first().and_then(|served| served.serving);
        let ready = self.own.servings.prepare(recorded).map_err(ClusterError::Superblock)?;
        Ok(match ready {
            Readiness::Ready => {
                Step::Commit(commit(shard, record, revision, vec![self.own.served.clone()]))
            }
            Readiness::MustSettle => {
                Step::Settle(commit(shard, record, revision, record.copies.clone()))
            }
            Readiness::Closed => Step::Wait,
        })
    }

    fn given_up(&self, shard: u16, record: &ShardRecord) -> ClusterError {
        ClusterError::GivenUp(Box::new(GivenUp {
            shard,
            number: record.number,
            now_at: record.copies.first().map(|served| served.copy.clone()),
            file: self.own.region_file.clone(),
        }))
    }

    /// Whether the data of this shard is lost: its process ended so long ago that no client may use
    /// what it has read there. Only a server of the same host sees that.
    fn is_lost(&mut self, record: &ShardRecord) -> bool {
        let Some(served) = record.copies.first() else { return false };
        let Memory::Process { process } = &served.memory else { return false };
        if !identity::has_ended(process) {
            self.ended.remove(&served.copy.server);
            return false;
        }
        let noticed = *self.ended.entry(served.copy.server).or_insert_with(Instant::now);
        noticed.elapsed() >= Duration::from_millis(served.distrust_ms)
    }

    /// Returns the time until the next read, unless there is a hint.
    fn pause(&self) -> Duration {
        let pause = READ_INTERVAL + up_to(READ_INTERVAL / 2);
        if self.ended.is_empty() { pause } else { pause.min(RETRY) }
    }

    fn announce(&mut self) {
        if self.reading.is_present() {
            return;
        }
        let shard = self.held.as_ref().map(|held| held.view.shard);
        let copy = &self.own.served.copy;
        let (addresses, label) = (copy.addresses.clone(), self.own.label.clone());
        let server = ServerRecord::new(copy.server, addresses, label, self.own.region_bytes, shard);
        let announced = match &mut self.announcement {
            None => self.store.announce(&server).map(|made| self.announcement = Some(made)),
            Some(announcement) if self.announced_shard != shard => announcement.update(&server),
            Some(announcement) => announcement.keep_alive(),
        };
        match announced {
            Ok(()) => {
                self.announced_shard = shard;
                self.writing.end("the records can be changed again");
            }
            Err(error) => self.report_write(&error),
        }
    }

    /// Reports a failed change. A store that cannot be reached is reported once, and the next read
    /// ends that.
    fn report_write(&mut self, error: &StoreError) {
        let trouble = match error {
            StoreError::Unreachable { .. } => &mut self.reading,
            _ => &mut self.writing,
        };
        trouble.report(&error.to_string());
    }

    /// Commits that the server has stopped. An anonymous region ends with it, so its shard becomes
    /// vacant: not before `settle`, when no client uses any more what it has read.
    fn leave(&mut self, settle: Duration) {
        let Some(Held { view, record, revision }) = self.held.take() else { return };
        let mut copies = record.copies.clone();
        match self.own.served.memory {
            Memory::File { .. } => {
                // A number that no copy has which was made while the server ran.
                let ends_with = farside_cluster::random_id().ok();
                let ends_with = ends_with.filter(|number| self.own.servings.end_with(*number));
                let Some(number) = ends_with else {
                    tracing::warn!(
                        shard = view.shard,
                        "FS-045 cannot tell the cluster that the server has stopped: its region is \
                         closed already"
                    );
                    return;
                };
                for served in &mut copies {
                    (served.serving, served.is_stopped) = (Some(number), true);
                }
            }
            Memory::Process { .. } => {
                thread::sleep(settle);
                copies.clear();
            }
        }
        let (condition, change) = commit(view.shard, &record, revision, copies);
        match self.store.commit(&[condition], &[change]) {
            Ok(Commit::Done) => {}
            Ok(Commit::Refused) => tracing::warn!(
                shard = view.shard,
                "FS-045 cannot tell the cluster that the server has stopped: its record has changed"
            ),
            Err(error) => tracing::warn!(
                shard = view.shard,
                "FS-045 cannot tell the cluster that the server has stopped: {error}"
            ),
        }
    }
}

/// Returns the condition and the change that give a shard these copies.
fn commit(
    shard: u16,
    record: &ShardRecord,
    revision: Revision,
    copies: Vec<ServedCopy>,
) -> (Condition, Change) {
    let mut next = record.clone();
    next.number = record.number.saturating_add(1);
    next.copies = copies;
    ((ShardRecord::key(shard), Some(revision)), next.change(shard))
}

/// Returns a random duration up to this one, so that servers do not act at the same moments.
fn up_to(longest: Duration) -> Duration {
    let mut random = [0; 4];
    let _ = rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::NONBLOCK);
    longest.mul_f64(f64::from(u32::from_le_bytes(random)) / f64::from(u32::MAX))
}

/// Sends hints that the records have changed, until the watcher has ended.
fn wait_for_changes(store: &dyn RecordStore, revision: &Weak<AtomicU64>, hints: &Sender<Command>) {
    while let Some(known) = revision.upgrade().map(|known| known.load(Ordering::Relaxed)) {
        let started = Instant::now();
        match store.wait_for_change(known, HINT_WAIT) {
            // The watcher needs a moment to read, and to note the new revision.
            Ok(()) if started.elapsed() < HINT_WAIT => {
                let _ = hints.send(Command::Changed);
                thread::sleep(READ_PAUSE * 2);
            }
            Ok(()) => {}
            // The watcher reports failures of its own.
            Err(_) => thread::sleep(RETRY),
        }
    }
}

/// The shortest time between two log lines of one trouble.
const INTERVAL: Duration = Duration::from_secs(60);

/// A trouble with the records.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    is_present: bool,
    /// When it was logged last.
    logged_at: Option<Instant>,
    /// Whether its end is worth a line, because its begin had one.
    is_logged: bool,
}

impl Trouble {
    /// Notes that the trouble is there.
    pub(super) fn report(&mut self, why: &str) {
        if self.is_due(Instant::now()) {
            tracing::warn!("FS-042 {why}; the server goes on with what it knows, and tries again");
        } else {
            tracing::debug!("{why}");
        }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        self.is_present = true;
        let is_due = self.logged_at.is_none_or(|at| now.duration_since(at) >= INTERVAL);
        if is_due {
            (self.logged_at, self.is_logged) = (Some(now), true);
        }
        is_due
    }

    /// Notes that the trouble has ended.
    pub(super) fn end(&mut self, what: &str) {
        if std::mem::take(&mut self.is_logged) {
            tracing::info!("FS-043 {what}");
        }
        self.is_present = false;
    }

    /// Whether the trouble is there.
    pub(super) fn is_present(&self) -> bool {
        self.is_present
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_that_comes_and_goes_fills_no_log() {
        let (mut trouble, start) = (Trouble::default(), Instant::now());
        let mut is_due = |seconds| trouble.is_due(start + Duration::from_secs(seconds));
        assert_eq!([0, 1, 59, 60, 61].map(&mut is_due), [true, false, false, true, false]);
        assert!(trouble.is_present() && trouble.is_logged);
        trouble.end("over");
        assert!(!trouble.is_present());
        assert!(!trouble.is_due(start + Duration::from_secs(62)) && !trouble.is_logged);
    }
}
