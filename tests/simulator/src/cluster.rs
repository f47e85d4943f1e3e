//! A cluster of two shards over three regions. One shard changes its region: an operator revokes it
//! from its owner, waits until no client trusts that server, and lets an empty region be the shard.
//!
//! The client's side is production code: [`Trust`] in the region that it has opened, and the merge
//! of maps. The server, the operator and the control channel are modelled here.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use farside_control::cluster::{ClusterMap, Id, Router, ShardCopy, ShardView};
use farside_fabric::{Nanos, RegionIndex, Trust};
use farside_protocol::OpenRegion;

use crate::memory::TIMING;
use crate::mutant::Mutant;
use crate::region::{GRACE_MS, HASH_KEY, KEYS, Key, hash, keys};

/// The region of the moving shard at the start.
pub(crate) const FORMER: RegionIndex = RegionIndex::FIRST;
/// The region that the moving shard gets, which is empty.
pub(crate) const LATTER: RegionIndex = RegionIndex(3);
/// The region of the other shard.
pub(crate) const OTHER: RegionIndex = RegionIndex(4);
/// How long a client trusts a server after it sent a heartbeat that the server answered.
pub const TRUST_NS: Nanos = 2_000_000_000;
/// How long a server may stand still before it has to read the records.
const SERVER_GAP_NS: Nanos = 5_000_000_000;
/// How long a server answers clients after it was told of a newer view, while it cannot read the
/// records.
const CLAIM_NS_MAX: Nanos = 2_000_000_000;
/// The shortest wait of an operator for a server that does not answer.
const SILENCE_NS_MIN: Nanos = SERVER_GAP_NS + CLAIM_NS_MAX;
/// The numbers of the moving shard's views: with its first owner, without an owner, and with the
/// owner of the empty region.
pub(crate) const OWNED: u64 = 1;
pub(crate) const REVOKED: u64 = 2;
pub(crate) const REASSIGNED: u64 = 3;

/// An event of a cluster. Clients are named by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClusterEvent {
    /// A client sends a heartbeat to the first owner.
    Heartbeat(usize),
    /// The owner answers a client's heartbeat.
    Answer(usize),
    /// The answer arrives.
    Extend(usize),
    /// The trust has ended, and a client's connection breaks. If the flag is set, the chain in
    /// flight is still executed.
    Lapse(usize, bool),
    /// A client gets a map with this view. The flag is as that of `Lapse`.
    Map(usize, u64, bool),
    /// A client connects to the server of the view that it knows.
    Connect(usize),
    /// The owner's process stands still.
    Freeze,
    /// The owner's process continues.
    Thaw,
    /// The owner reads the records, after it stood still for long or was told of a newer view.
    Confirm,
    /// The operator revokes the shard.
    Revoke,
    /// The owner learns from the operator that the shard is revoked, and gives it up.
    Tell,
    /// The operator tells the owner that the shard is revoked. The owner cannot read the records
    /// now.
    Claim,
    /// The operator has waited long enough. An empty region becomes the shard.
    Reassign,
}

/// What the first owner of the moving shard does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum OwnerState {
    /// It answers heartbeats.
    Running,
    /// Its process stands still since this time. Its device executes verbs.
    Frozen(Nanos),
    /// It was told of a newer view at this time, and cannot read the records.
    Claimed(Nanos),
    /// It has stood still for too long, and has not read the records yet.
    Unconfirmed,
    /// It has given the shard up: no verb reaches its region any more.
    GivenUp,
}

/// The records, the first owner of the moving shard, and the operator.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) struct ClusterState {
    /// The number of the moving shard's present view in the records.
    pub(crate) number: u64,
    pub(crate) owner: OwnerState,
    /// When the operator revoked the shard, when the owner first answered the operator, and when it
    /// answered that it has given the shard up.
    pub(crate) revoked_at: Nanos,
    pub(crate) answered_at: Option<Nanos>,
    pub(crate) told_at: Option<Nanos>,
    /// A verb has changed the former region after the shard got another one.
    pub(crate) is_former_changed: bool,
}

impl ClusterState {
    pub(crate) fn new() -> Self {
        Self {
            number: OWNED,
            owner: OwnerState::Running,
            revoked_at: 0,
            answered_at: None,
            told_at: None,
            is_former_changed: false,
        }
    }

    /// Whether the empty region is the moving shard.
    pub(crate) fn is_reassigned(&self) -> bool {
        self.number == REASSIGNED
    }

    /// Whether the first owner answers heartbeats and welcomes clients of its view at this time.
    pub(crate) fn answers(&self, server: Option<Mutant>, now: Nanos) -> bool {
        match self.owner {
            OwnerState::Running => true,
            OwnerState::Claimed(at) => now - at < CLAIM_NS_MAX,
            OwnerState::Unconfirmed => server == Some(Mutant::UnconfirmedAnswers),
            OwnerState::Frozen(_) | OwnerState::GivenUp => false,
        }
    }

    /// What the owner is when its process continues at this time.
    pub(crate) fn thawed(&self, now: Nanos) -> OwnerState {
        match self.owner {
            OwnerState::Frozen(since) if now - since > SERVER_GAP_NS => OwnerState::Unconfirmed,
            _ => OwnerState::Running,
        }
    }

    /// Returns when the operator may give the shard another region; `None` if it waits for an
    /// answer of a server that runs.
    pub(crate) fn may_reassign_at(&self, server: Option<Mutant>) -> Option<Nanos> {
        if self.number != REVOKED {
            return None;
        }
        let late_ns = TIMING.lateness_max_ns.max(Nanos::from(GRACE_MS) * 1_000_000);
        let distrust_ns = match server {
            Some(Mutant::ReassignedAtOnce) => return Some(self.revoked_at),
            Some(Mutant::DistrustWithoutMargin) => TRUST_NS + late_ns,
            _ => (TRUST_NS + late_ns) / 8 * 9,
        };
        let answered_at = self.answered_at.filter(|_| server != Some(Mutant::AnswerUncounted));
        match (self.told_at, answered_at, self.owner) {
            (Some(at), ..) => Some(at + distrust_ns),
            (None, Some(at), _) => Some(at + SILENCE_NS_MIN + distrust_ns),
            (None, None, OwnerState::Running) => None,
            (None, None, _) => Some(self.revoked_at + distrust_ns.max(SILENCE_NS_MIN)),
        }
    }
}

/// The map of the cluster in which the moving shard has the view with this number.
pub(crate) fn map(number: u64) -> ClusterMap {
    let view = |number, region: Option<RegionIndex>| {
        let copy = |RegionIndex(region)| ShardCopy {
            server: Id([region as u8 + 1; 16]),
            region_id: Id([region as u8 + 1; 16]),
            incarnation: 1,
            addresses: Vec::new(),
            host: String::new(),
        };
        ShardView { number, copies: region.map(copy).into_iter().collect() }
    };
    let moving = match number {
        OWNED => Some(FORMER),
        REASSIGNED => Some(LATTER),
        _ => None,
    };
    let mut shards = vec![view(1, Some(OTHER)); 2];
    let cluster = Id([7; 16]);
    let (hash_key, trust_ms) = (Id(HASH_KEY), (TRUST_NS / 1_000_000) as u32);
    let map = ClusterMap { cluster, hash_key, trust_ms, shards: shards.clone() };
    shards[moving_shard(map.router())] = view(number, moving);
    ClusterMap { shards, ..map }
}

/// The number of the moving shard: that of key 0.
fn moving_shard(router: Router) -> usize {
    router.shard(hash(&keys()[0]))
}

/// Returns the keys of the moving shard.
pub(crate) fn moving_keys() -> impl Iterator<Item = Key> {
    let router = map(OWNED).router();
    (0..KEYS).filter(move |key| router.shard(hash(&keys()[*key])) == moving_shard(router))
}

/// A heartbeat that has not come back. It was sent at this time of the client's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Heartbeat {
    Sent(Nanos),
    /// The server has answered. The answer is on its way.
    Answered(Nanos),
}

/// A client's connection to the owner of the moving shard.
pub(crate) struct Connection {
    /// The number of the view that it is for.
    pub(crate) number: u64,
    pub(crate) region: Rc<OpenRegion>,
    /// The trust that the client ought to have, and until when it lasts.
    pub(crate) trust: Trust,
    pub(crate) until: Nanos,
    pub(crate) heartbeat: Option<Heartbeat>,
}

/// What a client knows of its cluster.
pub(crate) struct ClusterClient {
    map: RefCell<ClusterMap>,
    router: Router,
    moving: usize,
    /// Its connection to the owner of the moving shard, if there is one.
    pub(crate) connection: RefCell<Option<Connection>>,
    /// The region at which the last operation was executed.
    pub(crate) used: Cell<RegionIndex>,
}

impl ClusterClient {
    /// A client with the map that has this view of the moving shard.
    pub(crate) fn new(number: u64) -> Self {
        let map = map(number);
        let router = map.router();
        Self {
            map: RefCell::new(map),
            router,
            moving: moving_shard(router),
            connection: RefCell::default(),
            used: Cell::new(OTHER),
        }
    }

    /// Whether the key is in the moving shard.
    pub(crate) fn is_moving(&self, key: &[u8]) -> bool {
        self.router.shard(hash(key)) == self.moving
    }

    /// The number of the moving shard's view that the client knows.
    pub(crate) fn number(&self) -> u64 {
        self.map.borrow().shards[self.moving].number
    }

    /// The region of the moving shard, if the client is connected to its owner.
    pub(crate) fn region(&self) -> Option<Rc<OpenRegion>> {
        self.connection.borrow().as_ref().map(|connection| connection.region.clone())
    }

    /// Takes the map with this view. Returns whether the present connection is for an earlier view.
    pub(crate) fn take_map(&self, number: u64, mutant: Option<Mutant>) -> bool {
        let newer = map(number);
        let mut own = self.map.borrow_mut();
        if mutant == Some(Mutant::OlderViewTaken) {
            own.clone_from(&newer);
        } else {
            own.merge(&newer);
        }
        let number = own.shards[self.moving].number;
        self.connection.borrow().as_ref().is_some_and(|connection| connection.number < number)
    }

    /// Ends the connection, and the trust in its server.
    pub(crate) fn disconnect(&self) {
        if let Some(connection) = self.connection.take() {
            connection.trust.end();
        }
    }

    /// Everything on which later steps of the client depend, beside the state of its regions.
    pub(crate) fn state(&self) -> (u64, Option<(u64, Nanos, Option<Heartbeat>)>) {
        let connection = self.connection.borrow();
        let state = |open: &Connection| (open.number, open.until, open.heartbeat);
        (self.number(), connection.as_ref().map(state))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scenarios rely on this.
    #[test]
    fn key_2_stays_while_keys_0_and_1_move() {
        assert_eq!(moving_keys().collect::<Vec<_>>(), [0, 1, 3]);
    }
}
