//! What the serving thread knows of the cluster.
//!
//! An owner is *unconfirmed* if it does not know whether it still owns its view:
//!
//! - after a gap: the thread did not run for [`GAP_NS_MAX`]. Meanwhile the shard may have become
//!   another server's;
//! - after a writer's claim: it knows a newer view of the shard, and the records could not be read
//!   for [`CLAIM_NS_MAX`]. A client's word alone makes no server give up, as it may be wrong. A
//!   reader's claim only makes the server read the records: otherwise any reader could stop it
//!   while they are away.
//!
//! Both end with a read of the records that began after the server noticed them. So the thread
//! gives each of its questions a number, and an answer has the number of the last question before
//! the read.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Duration;

use farside_control::cluster::ClusterMap;
use farside_control::{
    ControlError, KnownView, MESSAGE_BYTES_MAX, Refusal, Role, ServerMessage, Welcome,
};
use farside_fabric::Nanos;

use crate::error::ServerError;

/// The longest time for which the serving thread may not run before its view is in doubt. `assign`
/// waits longer before it gives the shard of a silent server away.
const GAP_NS_MAX: Nanos = 5_000_000_000;
/// The longest time for which a client's claim may be unexamined before the view is in doubt.
const CLAIM_NS_MAX: Nanos = 2_000_000_000;
/// How often the serving thread runs at least, so that an idle one has no gap.
const WAKEUP_NS: Nanos = 500_000_000;

/// A message is longer than the map in it by at most so many bytes.
const HEADER_BYTES_MAX: usize = 64;
/// How long a server that stops waits until the records say so.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// The view of a shard that this server owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnView {
    pub(crate) shard: u16,
    pub(crate) number: u64,
}

/// What the serving thread wants of the watcher.
pub(crate) enum Command {
    /// To read the records, for the question of this number.
    Read { question: u64 },
    /// To read the records, which have probably changed.
    Changed,
    /// To commit that the server has stopped, and to end.
    Leave {
        /// How long some client may still use what it has read from the region.
        settle: Duration,
        done: Sender<()>,
    },
    /// To end.
    End,
}

/// What the watcher tells the serving thread.
pub(crate) enum News {
    /// The records.
    Read {
        /// The last question before the read began.
        answered: u64,
        map: ClusterMap,
        /// The view that names this server.
        own: Option<OwnView>,
    },
    /// The server cannot serve its shard any more.
    GivenUp(Box<ServerError>),
}

/// The serving thread's end of the watcher.
pub(crate) struct WatcherLink {
    pub(crate) commands: Sender<Command>,
    pub(crate) news: Receiver<News>,
    /// Readable when there are news.
    pub(crate) event: Arc<OwnedFd>,
}

/// What news have changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// The map has changed.
    pub(crate) map: bool,
    /// The server now owns this view.
    pub(crate) own: Option<OwnView>,
}

/// The server's place in its cluster.
pub(crate) struct Membership {
    link: WatcherLink,
    /// Made of records only.
    map: ClusterMap,
    /// The encoded `ServerMessage::Map`; empty if the map is too long for one message.
    message: Arc<[u8]>,
    own: Option<OwnView>,
    /// The number of the last question.
    question: u64,
    /// When the serving thread ran last.
    ran_at: Nanos,
    /// The question after a gap.
    gap: Option<u64>,
    /// The question after a writer's claim, and when the claim came.
    claim: Option<(u64, Nanos)>,
    /// The question after a reader's claim.
    hint: Option<u64>,
    /// The operations that clients have reported, for the statistics.
    pub(crate) operations: u64,
}

impl Membership {
    pub(crate) fn new(link: WatcherLink, map: ClusterMap, now: Nanos) -> Self {
        let message = Arc::from([]);
        let (own, gap, claim, hint) = (None, None, None, None);
        let (question, operations) = (0, 0);
        let mut made =
            Self { link, map, message, own, question, ran_at: now, gap, claim, hint, operations };
        made.encode_map();
        made
    }

    /// Refuses a client that does not want the view that this server owns, or if the server does
    /// not know whether it still owns it.
    pub(crate) fn check(&mut self, view: Option<KnownView>, now: Nanos) -> Result<(), Refusal> {
        let wanted = view.ok_or(Refusal::Clustered)?;
        let own = self.own.ok_or(Refusal::Spare)?;
        if !self.is_confirmed(now) {
            return Err(Refusal::Unconfirmed);
        }
        if wanted != (KnownView { shard: own.shard, number: own.number as u32 }) {
            return Err(Refusal::OtherView { shard: own.shard.into(), number: own.number });
        }
        Ok(())
    }

    /// The answer to a connection for the map.
    pub(crate) fn map_welcome(&self) -> Welcome {
        let OwnView { shard, number } = self.own.unwrap_or(OwnView { shard: 0, number: 0 });
        Welcome::for_map(self.map.cluster, shard, number)
    }

    /// The view that this server owns, if any.
    pub(crate) fn own(&self) -> Option<OwnView> {
        self.own
    }

    /// The map.
    pub(crate) fn map(&self) -> &ClusterMap {
        &self.map
    }

    /// The encoded `ServerMessage::Map`. `None` if the map is too long for one message.
    pub(crate) fn map_message(&self) -> Option<Arc<[u8]>> {
        (!self.message.is_empty()).then(|| self.message.clone())
    }

    /// Whether to answer a heartbeat that was received before `now`.
    pub(crate) fn answers_heartbeats(&mut self, now: Nanos) -> bool {
        self.own.is_some() && self.is_confirmed(now)
    }

    fn is_confirmed(&mut self, now: Nanos) -> bool {
        self.note_running(now);
        let is_overdue = |at: Nanos| now.saturating_sub(at) >= CLAIM_NS_MAX;
        self.gap.is_none() && !self.claim.is_some_and(|(_, at)| is_overdue(at))
    }

    /// Notes that the serving thread runs, and a gap before.
    pub(crate) fn note_running(&mut self, now: Nanos) {
        let stopped_ns = now.saturating_sub(self.ran_at);
        self.ran_at = now;
        if stopped_ns > GAP_NS_MAX {
            // Also for a spare, whose commit may have been done before the gap.
            self.gap = Some(self.ask());
            if self.own.is_some() {
                tracing::warn!(
                    ms = stopped_ns / 1_000_000,
                    "FS-044 the server was stopped, so it asks the cluster's records whether it \
                     still serves its shard"
                );
            }
        }
    }

    /// When the serving thread has to run again.
    pub(crate) fn next_step_at(&self) -> Nanos {
        self.ran_at.saturating_add(WAKEUP_NS)
    }

    /// Notes a map that a writer or a reader knows.
    ///
    /// # Errors
    /// [`ControlError::Map`] for bytes that are no map.
    pub(crate) fn note_claim(
        &mut self,
        map: &[u8],
        role: Role,
        now: Nanos,
    ) -> Result<(), ControlError> {
        let claimed = ClusterMap::decode(map)?;
        let is_newer = self.map.clone().merge(&claimed);
        match role {
            Role::Writer if is_newer && self.claim.is_none() => {
                self.claim = Some((self.ask(), now));
            }
            Role::Reader if is_newer && self.hint.is_none() => self.hint = Some(self.ask()),
            Role::Writer | Role::Reader => {}
        }
        Ok(())
    }

    fn ask(&mut self) -> u64 {
        self.question += 1;
        // Without a watcher the question has no answer, and `take_news` fails.
        let _ = self.link.commands.send(Command::Read { question: self.question });
        self.question
    }

    /// Takes what the watcher has told.
    ///
    /// # Errors
    /// Why the server has to end.
    pub(crate) fn take_news(&mut self) -> Result<Changes, ServerError> {
        let _ = rustix::io::read(&self.link.event, &mut [0; 8]);
        let mut changes = Changes::default();
        loop {
            match self.link.news.try_recv() {
                Ok(News::Read { answered, map, own }) => {
                    changes.map |= self.map.merge(&map);
                    let is_answered = |question: u64| question <= answered;
                    // A repair of the records raises the number of the view that the server has.
                    if own.is_some() && own != self.own {
                        (self.own, changes.own) = (own, own);
                    }
                    // Records that are older than this server's view confirm nothing.
                    if self.own == own && self.gap.is_some_and(is_answered) {
                        self.gap = None;
                    }
                    if self.claim.is_some_and(|(question, _)| is_answered(question)) {
                        self.claim = None;
                    }
                    if self.hint.is_some_and(is_answered) {
                        self.hint = None;
                    }
                }
                Ok(News::GivenUp(error)) => return Err(*error),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(ServerError::Panicked),
            }
        }
        if changes.map {
            self.encode_map();
        }
        Ok(changes)
    }

    fn encode_map(&mut self) {
        let map = self.map.encode();
        let mut message = Vec::new();
        if map.len() + HEADER_BYTES_MAX <= MESSAGE_BYTES_MAX {
            ServerMessage::Map { map }.encode(&mut message);
        } else {
            tracing::error!(
                bytes = map.len(),
                "FS-046 the map of the cluster is too long to be sent: let its servers listen at \
                 fewer addresses"
            );
        }
        self.message = message.into();
    }

    /// Lets the watcher commit that the server has stopped serving its region. Returns when that is
    /// done, or after a deadline: a server stops even if it cannot say so.
    pub(crate) fn leave(self, settle: Duration) {
        let (done, wait) = channel();
        let _ = self.link.commands.send(Command::Leave { settle, done });
        let _ = wait.recv_timeout(settle + LEAVE_MAX);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let _ = self.link.commands.send(Command::End);
    }
}

impl AsFd for Membership {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use farside_control::cluster::{Id, ShardView, VIEW_NUMBER_MAX};

    use super::*;
    use crate::event::new_event;

    const SECOND: Nanos = 1_000_000_000;

    fn map(numbers: &[u64]) -> ClusterMap {
        let view = |&number| ShardView { number, copies: Vec::new() };
        let shards = numbers.iter().map(view).collect();
        ClusterMap { cluster: Id([7; 16]), hash_key: Id([9; 16]), trust_ms: 2000, shards }
    }

    struct World {
        membership: Membership,
        commands: Receiver<Command>,
        news: Sender<News>,
    }

    impl World {
        /// A server that has not run before the second 100, and owns view 4 of shard 1.
        fn new() -> Self {
            let ((commands, sent), (news, taken)) = (channel(), channel());
            let event = Arc::new(new_event().unwrap());
            let link = WatcherLink { commands, news: taken, event };
            let membership = Membership::new(link, map(&[1, 3]), 100 * SECOND);
            let mut world = Self { membership, commands: sent, news };
            assert_eq!(world.check(4, 100), Err(Refusal::Spare));
            assert!(!world.membership.answers_heartbeats(100 * SECOND));
            let own = Some(OwnView { shard: 1, number: 4 });
            assert_eq!(world.read(0, own), Changes { map: true, own });
            assert_eq!(world.check(4, 100), Ok(()));
            world
        }

        fn read(&mut self, answered: u64, own: Option<OwnView>) -> Changes {
            let map = map(&[1, own.map_or(3, |own| own.number)]);
            self.news.send(News::Read { answered, map, own }).unwrap();
            self.membership.take_news().unwrap()
        }

        fn check(&mut self, number: u32, second: u64) -> Result<(), Refusal> {
            self.membership.check(Some(KnownView { shard: 1, number }), second * SECOND)
        }

        fn question(&self) -> Option<u64> {
            match self.commands.try_recv() {
                Ok(Command::Read { question }) => Some(question),
                _ => None,
            }
        }
    }

    #[test]
    fn only_clients_of_the_own_view_come_in() {
        let mut world = World::new();
        assert_eq!(world.membership.check(None, 100 * SECOND), Err(Refusal::Clustered));
        let other = Refusal::OtherView { shard: 1, number: 4 };
        assert_eq!(world.check(3, 100), Err(other));
        let other_shard = Some(KnownView { shard: 0, number: 4 });
        assert_eq!(world.membership.check(other_shard, 100 * SECOND), Err(other));
    }

    #[test]
    fn after_a_gap_only_a_later_read_that_names_the_server_confirms_it() {
        let mut world = World::new();
        let own = Some(OwnView { shard: 1, number: 4 });
        for second in [101, 103, 108] {
            assert!(world.membership.answers_heartbeats(second * SECOND));
        }
        assert_eq!(world.question(), None);
        assert_eq!(world.check(4, 114), Err(Refusal::Unconfirmed));
        assert_eq!(world.question(), Some(1));
        // A read that had begun before the gap.
        world.read(0, own);
        assert!(!world.membership.answers_heartbeats(115 * SECOND));
        // Records that were restored from an old backup.
        world.read(1, None);
        assert!(!world.membership.answers_heartbeats(116 * SECOND));
        world.read(1, own);
        assert!(world.membership.answers_heartbeats(117 * SECOND));
    }

    #[test]
    fn a_claim_is_examined_and_changes_nothing_by_itself() {
        let mut world = World::new();
        let own = Some(OwnView { shard: 1, number: 4 });
        let claim_as = |world: &mut World, role, numbers: &[u64], second: u64| {
            let map = map(numbers).encode();
            world.membership.note_claim(&map, role, second * SECOND).unwrap();
        };
        let claim = |world: &mut World, numbers: &[u64], second| {
            claim_as(world, Role::Writer, numbers, second);
        };
        claim(&mut world, &[1, 4], 101);
        assert_eq!(world.question(), None, "it is not newer");
        claim(&mut world, &[1, VIEW_NUMBER_MAX], 101);
        claim(&mut world, &[9, VIEW_NUMBER_MAX], 102);
        assert_eq!((world.question(), world.question()), (Some(1), None));
        assert!(world.membership.answers_heartbeats(102 * SECOND));
        assert!(!world.membership.answers_heartbeats(103 * SECOND));
        assert_eq!(world.membership.map(), &map(&[1, 4]));
        assert!(!world.read(1, own).map);
        assert!(world.membership.answers_heartbeats(104 * SECOND));
        // A reader's claim makes the server ask once, and never doubt.
        (0..3).for_each(|_| claim_as(&mut world, Role::Reader, &[9, 9], 105));
        assert_eq!((world.question(), world.question()), (Some(2), None));
        assert!(world.membership.answers_heartbeats(108 * SECOND));
        claim(&mut world, &[9, 9], 108);
        assert_eq!(world.question(), Some(3));
        assert!(!world.membership.answers_heartbeats(110 * SECOND));
        world.read(3, own);
        claim_as(&mut world, Role::Reader, &[9, 9], 111);
        assert_eq!(world.question(), Some(4));
        let refused = world.membership.note_claim(b"no map", Role::Writer, 111 * SECOND);
        assert!(refused.is_err());
    }
}
