//! The control service: one thread that sleeps until a client connects, asks or leaves.

mod acceptor;
mod admission;
mod answering;
mod chores;
mod crowding;
#[cfg(feature = "verbs")]
mod device;
mod probing;
mod refusing;
mod roll_call;
mod socket;
mod statistics;
mod turns;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use farside_config::ServerConfig;
use farside_control::{
    MESSAGE_BYTES_MAX, Refusal, Reply, Role, ServerStatistics, Welcome, encode_reply,
};
use farside_fabric::shm::RegionMemory;
use farside_fabric::{ChainError, Nanos, boot_time_ns};
use farside_layout::{CLIENTS_MAX, RegionState, STATE_OFFSET, Superblock, clock_lag_max_ns};
use rustix::event::epoll;

use crate::clients::Clients;
use crate::collect::Collector;
use crate::content::Reader;
use crate::error::{ServerError, system};
use crate::eviction::Evictor;
use crate::expiry::Reaper;
use crate::listening::BoundListener;
use crate::memory_level::MemoryLevel;
use crate::own_endpoint::OwnEndpoint;
use crate::peer::{ClientIdentity, DisconnectReason, Peer};
use crate::recovery::Opened;
use crate::sweep::Sweeper;
use crate::tokens::Tokens;

pub(crate) use acceptor::Acceptor;
use answering::{Recall, Recalls};
#[cfg(feature = "verbs")]
pub(crate) use device::bind as bind_device;
pub(crate) use probing::DataConnection;
use probing::Probing;
use refusing::{RareWarning, Refusals};
use roll_call::RollCall;
use statistics::DepotFigures;

/// Limit on connections without a client: not yet identified, or already signed off. More
/// than these, and the oldest is dropped.
const STRANGERS_MAX: usize = 64;
/// Events taken at a time: those of all connections, the listener and the end. So each client that
/// spoke by then has its turn, or waits for it, before a chore may call it mute.
const EVENTS_MAX: usize = CLIENTS_MAX as usize + STRANGERS_MAX + 2;
/// How long the server does not accept after the system refused it a descriptor.
const ACCEPT_PAUSE_NS: Nanos = 100_000_000;

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST_PEER: u64 = 2;

/// Everything the control thread has.
pub(crate) struct Service {
    epoll: OwnedFd,
    acceptor: Box<dyn Acceptor>,
    accept_again_at: Option<Nanos>,
    /// By token; tokens rise, so the first that is no client is the oldest.
    peers: BTreeMap<u64, Peer>,
    next_token: u64,
    /// Connections whose turn is still to come, in their order.
    queue: VecDeque<u64>,
    probing: Probing,
    roll_call: RollCall,
    refusals: Refusals,
    crowding: RareWarning,
    unaccepted: RareWarning,
    buffer: Vec<u8>,
    reply: Vec<u8>,
    /// Holds the lock of a region file.
    memory: Arc<RegionMemory>,
    tokens: Tokens,
    opened: Opened,
    clients: Clients,
    own: OwnEndpoint,
    sweeper: Sweeper,
    collector: Collector,
    recalls: Recalls,
    reaper: Reaper,
    /// In a region that is a cache.
    evictor: Option<Evictor>,
    memory_level: MemoryLevel,
    /// How many splits there were when the log said that the index cannot grow.
    stuck_at_splits: Option<u64>,
    started_at: Nanos,
    /// The server does not reach its own memory any more: it ends, so that the next one resumes.
    failed: Option<ChainError>,
    statistics: ServerStatistics,
    depot_figures: Option<DepotFigures>,
}

impl Service {
    pub(crate) fn new(
        config: &ServerConfig,
        listener: Box<dyn BoundListener>,
        memory: Arc<RegionMemory>,
        mut opened: Opened,
        stop: &OwnedFd,
    ) -> Result<Self, ServerError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("create epoll"))?;
        watch(&epoll, listener.as_fd(), LISTENER).map_err(system("watch for clients"))?;
        watch(&epoll, stop.as_fd(), STOP).map_err(system("watch for the end"))?;
        if config.evict {
            opened.depot.reserve_for_index();
        }
        let (region, geometry) = (&opened.region, opened.geometry);
        let (acceptor, own) = listener.open(config, &memory, &opened)?;
        let grace = Nanos::from(opened.format.grace_ms) * 1_000_000;
        let reader = || Reader::new(region, &opened.format);
        Ok(Self {
            epoll,
            acceptor,
            accept_again_at: None,
            peers: BTreeMap::new(),
            next_token: FIRST_PEER,
            queue: VecDeque::new(),
            probing: Probing::every(Nanos::from(config.probe_ms) * 1_000_000),
            roll_call: RollCall::new(clock_lag_max_ns(grace)),
            refusals: Refusals::default(),
            crowding: RareWarning::default(),
            unaccepted: RareWarning::default(),
            buffer: vec![0; MESSAGE_BYTES_MAX],
            reply: Vec::with_capacity(MESSAGE_BYTES_MAX),
            memory,
            tokens: Tokens::new(config),
            clients: Clients::new(region, geometry, opened.incarnation, config.clients_max),
            collector: Collector::new(own.settles_ns()),
            reaper: Reaper::new(reader(), (grace, own.word_ns(grace)), opened.is_new),
            evictor: config.evict.then(|| Evictor::new(reader(), own.word_ns(grace))),
            sweeper: Sweeper::new(region, geometry),
            recalls: [Recall::default(); _],
            own,
            memory_level: MemoryLevel::default(),
            stuck_at_splits: None,
            started_at: boot_time_ns(),
            failed: None,
            statistics: ServerStatistics {
                incarnation: opened.incarnation,
                chunks: geometry.chunks().into(),
                ..Default::default()
            },
            depot_figures: None,
            opened,
        })
    }

    /// Serves until told to stop, then leaves the region in order if it can.
    pub(crate) fn run(mut self) -> Result<(), ServerError> {
        let served = self.serve();
        let left = self.shut_down();
        served.and(left)
    }

    /// Takes a message and answers it; false when there is none, or no room for an answer.
    fn take_message(&mut self, token: u64) -> Result<bool, DisconnectReason> {
        let Some(peer) = self.peers.get_mut(&token).filter(|peer| !peer.is_waiting()) else {
            return Ok(false);
        };
        let mut buffer = std::mem::take(&mut self.buffer);
        let outcome = match peer.receive(&mut buffer) {
            Ok(None) => Ok(false),
            Ok(Some(bytes)) => match peer.who {
                ClientIdentity::Stranger => self.welcome(token, &buffer[..bytes]),
                ClientIdentity::Client { role, .. } => {
                    self.answer(token, role, &buffer[..bytes], boot_time_ns())
                }
                ClientIdentity::Leaving => {
                    Err(DisconnectReason::Broken("it speaks after its goodbye".to_owned()))
                }
            }
            .map(|()| true),
            Err(reason) => Err(reason),
        };
        self.buffer = buffer;
        outcome
    }

    /// Takes back what a connection did not get, and watches it for what comes next.
    fn settle(&mut self, token: u64) -> Result<(), DisconnectReason> {
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        let undelivered = peer.take_undelivered();
        let wants = peer.wants();
        if wants != peer.watched {
            let data = epoll::EventData::new_u64(token);
            epoll::modify(&self.epoll, &*peer, data, wants)
                .map_err(|error| DisconnectReason::Unreachable(error.into()))?;
            peer.watched = wants;
        }
        self.take_back(undelivered);
        Ok(())
    }

    /// Blocks in undelivered answers belong to the depot again, as rested as they were.
    fn take_back(&mut self, undelivered: [Option<Reply>; 2]) {
        self.depot_figures = None;
        for reply in undelivered.into_iter().flatten() {
            let Reply::Blocks { class, rested, blocks, .. } = reply else { continue };
            // Given like any other, so that taken less given is what clients and slots have.
            self.statistics.blocks_given += blocks.len() as u64;
            if let Err(error) = self.opened.depot.give(class, blocks, rested, boot_time_ns()) {
                tracing::error!("blocks that were not delivered do not fit: {error}");
            }
        }
    }

    /// The welcome message for this role, without the region's location.
    fn welcome_of(&self, (client_id, lease): (u16, u64)) -> Welcome {
        Welcome {
            client_id,
            lease,
            region_id: self.opened.format.region_id,
            incarnation: self.opened.incarnation,
            base_address: 0,
            region_bytes: self.opened.format.region_bytes,
            rkey: 0,
            round_trip_min_ns: 0,
            ticket: 0,
        }
    }

    /// A client that was admitted and could not be told so: there is nothing of it to find.
    fn take_back_admission(&mut self, client_id: u16) {
        if self.clients.fence(client_id).is_ok() {
            self.clients.forget(client_id);
        }
    }

    /// After a goodbye: the client's place is free, and the connection stays until it hangs up.
    fn sign_off(&mut self, token: u64) {
        let Some(peer) = self.peers.get_mut(&token) else { return };
        let ClientIdentity::Client { id, .. } = peer.who else { return };
        self.reaper.forget(id);
        self.roll_call.left(token);
        peer.who = ClientIdentity::Leaving;
        self.collector.lost(token, false, boot_time_ns());
        peer.close();
        peer.data.clear();
        if let Err(error) = self.clients.fence(id) {
            tracing::error!(client = id, "cannot fence a client: {error}");
            return;
        }
        self.clients.forget(id);
        tracing::info!(client = id, "a client left");
        // A client that waits for the server to hang up sees it now.
        if !peer.channel.hang_up() {
            self.peers.remove(&token);
        }
    }

    /// Ends a connection. A client without a goodbye may have been anywhere in an operation.
    fn disconnect(&mut self, token: u64, reason: &DisconnectReason) {
        let Some(mut peer) = self.peers.remove(&token) else { return };
        self.roll_call.left(token);
        // Explicitly, for a copy of the descriptor in a forked child would keep it watched.
        let _ = epoll::delete(&self.epoll, &peer);
        peer.close();
        // The fence of verbs: these queue pairs are gone when this returns.
        peer.data.clear();
        self.take_back(peer.take_undelivered());
        let ClientIdentity::Client { id, role, .. } = peer.who else {
            match reason {
                DisconnectReason::Refused(refusal) => self.refusals.note(*refusal, boot_time_ns()),
                other => tracing::debug!("a connection ended: {other}"),
            }
            return;
        };
        let now = boot_time_ns();
        match role {
            Role::Reader => self.reaper.forget(id),
            Role::Writer => self.reaper.lose(id, now),
        }
        if let Err(error) = self.clients.fence(id) {
            tracing::error!(client = id, "cannot fence a client: {error}");
            return;
        }
        self.collector.lost(token, role == Role::Writer, now);
        match role {
            // Its memory refused every store: there is nothing of it to find.
            Role::Reader => self.clients.forget(id),
            Role::Writer => self.sweeper.add(id, now, self.own.settles_ns()),
        }
        self.statistics.clients_lost += 1;
        tracing::warn!(client = id, ?role, "lost a client and fenced it: {reason}");
    }

    /// Fences all clients and notes that no server uses the region.
    fn shut_down(&mut self) -> Result<(), ServerError> {
        for mut peer in std::mem::take(&mut self.peers).into_values() {
            peer.data.clear();
            match peer.who {
                ClientIdentity::Client { id, .. } => self.clients.fence(id)?,
                ClientIdentity::Leaving => {}
                ClientIdentity::Stranger => {
                    let bye = encode_reply(&Err(Refusal::ShuttingDown));
                    // A client that does not take it learns less.
                    let _ = peer.channel.send(&bye);
                }
            }
        }
        let word = Superblock::state_word(RegionState::Clean, self.opened.index.depth);
        self.opened.region.store(STATE_OFFSET, word)?;
        tracing::info!("stopped");
        Ok(())
    }
}

fn watch(epoll: &OwnedFd, source: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, source, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
}
