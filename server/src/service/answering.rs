//! What clients ask for, and what they are asked for.

use farside_control::{Reply, Request, Role, ServerRequest, SplitOutcome};
use farside_fabric::Nanos;
use farside_layout::SizeClass;

use super::Service;
use crate::collect::Step;
use crate::depot::Returned;
use crate::peer::{ClientIdentity, DisconnectReason, Peer};
use crate::recovery::{Opened, RegionTables};

/// How long after it asked all clients for what they can spare the server waits for it before it
/// says that there is nothing.
const RECALL_ANSWER_NS: Nanos = 100_000_000;
/// How often it asks at most for one kind of memory.
const RECALL_PAUSE_NS: Nanos = 20_000_000;
/// How often when nothing of that kind came back the last time: a client may be about to unlink
/// some.
const RECALL_IN_VAIN_PAUSE_NS: Nanos = 50_000_000;
/// How many times in a row it does that ...
const RECALLS_IN_VAIN: u32 = 8;
/// ... before it takes this long between two.
const RECALL_HOPELESS_PAUSE_NS: Nanos = 500_000_000;

/// When all clients were asked last for the blocks they do not need, because of one kind of memory:
/// what has come back of another does not help a client that wants this.
#[derive(Clone, Copy, Default)]
pub(super) struct Recall {
    at: Option<Nanos>,
    /// What had come back until then.
    returned: Returned,
    /// How many in a row have brought nothing.
    in_vain: u32,
}

impl Recall {
    /// What becomes of it if clients are asked now; `None` if it is too early.
    fn next(&self, returned: Returned, now: Nanos) -> Option<Self> {
        let again = Self { at: Some(now), returned, in_vain: 0 };
        let Some(at) = self.at else { return Some(again) };
        let in_vain = if self.returned == returned { self.in_vain + 1 } else { 0 };
        let pause = match in_vain {
            0 => RECALL_PAUSE_NS,
            1..=RECALLS_IN_VAIN => RECALL_IN_VAIN_PAUSE_NS,
            _ => RECALL_HOPELESS_PAUSE_NS,
        };
        (now.saturating_sub(at) >= pause).then_some(Self { in_vain, ..again })
    }

    fn is_recent(&self, now: Nanos) -> bool {
        self.at.is_some_and(|at| now.saturating_sub(at) < RECALL_ANSWER_NS)
    }
}

/// A recall for each class of blocks, and one for the index, which wants chunks.
pub(super) type Recalls = [Recall; SizeClass::COUNT + 1];
/// Which of them is that for chunks.
const CHUNKS: usize = SizeClass::COUNT;

impl Service {
    pub(super) fn answer(
        &mut self,
        token: u64,
        role: Role,
        bytes: &[u8],
        now: Nanos,
    ) -> Result<(), DisconnectReason> {
        let request = Request::decode(bytes).map_err(broken)?;
        if role == Role::Writer {
            self.depot_figures = None;
        }
        let reply = match request {
            Request::TakeBlocks { .. }
            | Request::GiveBlocks { .. }
            | Request::Held { .. }
            | Request::Collect
            | Request::Split { .. }
            | Request::Expires
                if role == Role::Reader =>
            {
                return Err(broken("a reader has no use for memory"));
            }
            Request::TakeBlocks { class, count } => return self.take_out(token, class, count, now),
            Request::GiveBlocks { class, rested, blocks } => {
                let count = blocks.len() as u64;
                self.opened.depot.give(class, blocks, rested, now).map_err(broken)?;
                self.statistics.blocks_given += count;
                return Ok(());
            }
            Request::Held { collection, last, blocks } => {
                if self.collector.is_awaited(token, collection) {
                    blocks.into_iter().for_each(|block| self.opened.depot.clear(block));
                    if last {
                        self.collector.answered(token);
                    }
                }
                return Ok(());
            }
            Request::Split { directory_hash, local_depth } => {
                let split = self.opened.split((directory_hash, local_depth), &self.own);
                let outcome = match split.map_err(DisconnectReason::Failed)? {
                    Some(outcome) => outcome,
                    None => self.seek_chunk(now),
                };
                Reply::Split { directory_hash, local_depth, outcome }
            }
            Request::Collect => {
                let reply = Reply::Statistics(self.statistics(now));
                self.collector.want(now);
                reply
            }
            Request::Statistics => Reply::Statistics(self.statistics(now)),
            Request::Expires => {
                if let Some(Peer { who: ClientIdentity::Client { id, .. }, .. }) =
                    self.peers.get(&token)
                {
                    self.reaper.announce(*id, now);
                }
                return Ok(());
            }
            Request::Snapshot { permille } => {
                if let Some(peer) = self.peers.get_mut(&token) {
                    peer.snapshot_permille = (permille < 1000).then_some(permille);
                    self.statistics.snapshots_taken += u64::from(permille == 1000);
                }
                return Ok(());
            }
            Request::Alive { clock_ns } => {
                let answered = self.roll_call.answered(token, clock_ns, now);
                return answered.map_err(|ms| DisconnectReason::ClockBehind { ms });
            }
            Request::Goodbye => return Err(DisconnectReason::Goodbye),
        };
        self.reply(token, reply)
    }

    fn reply(&mut self, token: u64, reply: Reply) -> Result<(), DisconnectReason> {
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        peer.answer(reply, &mut self.reply)
    }

    /// Blocks for a client. When there are none, others may have some that they do not need.
    fn take_out(
        &mut self,
        token: u64,
        class: SizeClass,
        count: u32,
        now: Nanos,
    ) -> Result<(), DisconnectReason> {
        let blocks = self.opened.take_blocks(class, count, now);
        let mut blocks = blocks.map_err(DisconnectReason::Failed)?;
        let rested = count == 0 || !blocks.is_empty();
        if !rested {
            blocks = self.evict(class, count).map_err(DisconnectReason::Failed)?;
        }
        self.statistics.blocks_taken += blocks.len() as u64;
        if rested || !blocks.is_empty() {
            return self.reply(token, Reply::Blocks { class, rested, soon: false, blocks });
        }
        let returned = self.opened.depot.returned(Some(class));
        let recalls = self.recall(class.index().into(), returned, now);
        let soon = self.recalls[usize::from(class.index())].is_recent(now)
            || self.opened.has_block_soon(class, now);
        self.statistics.requests_denied += u64::from(!soon);
        self.reply(token, Reply::Blocks { class, rested: true, soon, blocks })?;
        if recalls {
            self.ask_writers(ServerRequest::Return);
        }
        Ok(())
    }

    /// The answer to a client that needs another subtable when there is no chunk for it: a chunk
    /// that gets free does so long after its last block did. Meanwhile a client that has left
    /// something in a place that rests may clear it.
    fn seek_chunk(&mut self, now: Nanos) -> SplitOutcome {
        if self.recall(CHUNKS, self.opened.depot.returned(None), now) {
            self.ask_writers(ServerRequest::Return);
        }
        let outcome = self.opened.without_place(now);
        if outcome == SplitOutcome::Impossible {
            self.tell_stuck();
        }
        outcome
    }

    /// Says once in the log that the index cannot grow, until it has.
    fn tell_stuck(&mut self) {
        if self.stuck_at_splits.is_none() {
            self.stuck_at_splits = Some(self.opened.index.splits);
            tracing::warn!(
                "the index cannot grow, for no chunk of 2 MiB is free: some new keys find no room; \
                 delete keys and run `kv-cli compact`, or restore a snapshot into a larger region"
            );
        }
    }

    /// Whether to ask all clients for what they can spare, for the sake of this kind of memory.
    fn recall(&mut self, kind: usize, returned: Returned, now: Nanos) -> bool {
        let next = self.recalls[kind].next(returned, now);
        if let Some(next) = next {
            self.recalls[kind] = next;
            self.statistics.recalls += 1;
        }
        next.is_some()
    }

    /// Asks every writer; returns their connections.
    fn ask_writers(&mut self, ask: ServerRequest) -> Vec<u64> {
        let is_writer = |who| matches!(who, ClientIdentity::Client { role: Role::Writer, .. });
        let writers = self.peers.iter_mut().filter(|(_, peer)| is_writer(peer.who));
        let mut asked = Vec::new();
        for (token, peer) in writers {
            // A client that is gone already is found out soon: the event is there.
            let _ = peer.ask(ask, &mut self.reply);
            asked.push(*token);
        }
        // What did not fit waits for room.
        for token in &asked {
            let _ = self.settle(*token);
        }
        asked
    }

    /// The collector's turn.
    pub(super) fn collect(&mut self, now: Nanos) -> Result<(), crate::error::ServerError> {
        let is_due = |at| at <= now;
        if !self.collector.next_step_at(self.sweeper.is_done()).is_some_and(is_due) {
            return Ok(());
        }
        self.depot_figures = None;
        let Opened { region, geometry, depot, index, .. } = &mut self.opened;
        let memory = RegionTables { region, geometry };
        match self.collector.step(depot, index, &memory, now)? {
            Step::Nothing => {}
            Step::Ask => {
                let ask = ServerRequest::Report { collection: self.collector.number() };
                let asked = self.ask_writers(ask);
                self.collector.asked(asked.into_iter().collect(), now);
            }
            Step::Fence(tokens) => {
                tokens
                    .into_iter()
                    .for_each(|token| self.disconnect_silent(token, &DisconnectReason::Mute));
            }
        }
        Ok(())
    }
}

fn broken(why: impl std::fmt::Display) -> DisconnectReason {
    DisconnectReason::Broken(why.to_string())
}
