//! The control service: one thread that sleeps until somebody connects, asks or leaves.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farside_common::config::ServerConfig;
use farside_common::control::{
    ConnectRequest, MESSAGE_BYTES_MAX, Refusal, Reply, Request, Role, ServerStatistics, Token,
    Welcome, encode_reply,
};
use farside_common::fabric::Nanos;
use farside_common::fabric::shm::{Listener, RegionMemory, boot_time_ns};
use farside_common::layout::{RegionState, STATE_OFFSET, Superblock};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use crate::clients::Clients;
use crate::error::{ServerError, system};
use crate::peer::{Farewell, Peer, Who};
use crate::recovery::{Opened, RegionTables};
use crate::sweep::Sweeper;

/// Connections of nobody: those that have not said who they are and those that said goodbye. More
/// than these, and the oldest is dropped.
const STRANGERS_MAX: usize = 64;
/// Events taken at a time.
const EVENTS_MAX: usize = 64;
/// How long the server does not accept after the system refused it a descriptor.
const ACCEPT_PAUSE_NS: Nanos = 100_000_000;

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST_PEER: u64 = 2;

/// Everything the control thread has.
pub(crate) struct Service {
    epoll: OwnedFd,
    listener: Listener,
    accept_again_at: Option<Nanos>,
    /// By token; tokens rise, so the first that is no client is the oldest.
    peers: BTreeMap<u64, Peer>,
    next_token: u64,
    buffer: Vec<u8>,
    reply: Vec<u8>,
    /// Holds the lock of a region file, and what writers get.
    memory: RegionMemory,
    for_readers: File,
    tokens: Tokens,
    opened: Opened,
    clients: Clients,
    sweeper: Sweeper,
    started_at: Nanos,
    statistics: ServerStatistics,
}

/// What clients must show.
struct Tokens {
    everything: Option<Token>,
    reading: Option<Token>,
}

impl Tokens {
    fn admit(&self, request: &ConnectRequest) -> Result<(), Refusal> {
        let Some(everything) = &self.everything else { return Ok(()) };
        // Both are always compared, so that the time does not tell which one was close.
        let reads = self.reading.is_some_and(|token| token.matches(&request.token));
        let may = everything.matches(&request.token) | (reads && request.role == Role::Reader);
        if may { Ok(()) } else { Err(Refusal::Credentials) }
    }
}

impl Service {
    pub(crate) fn new(
        config: &ServerConfig,
        listener: Listener,
        memory: RegionMemory,
        opened: Opened,
        stop: &OwnedFd,
    ) -> Result<Self, ServerError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("create epoll"))?;
        // What epoll promises may be gone when it is fetched; the thread must not wait for it.
        rustix::io::ioctl_fionbio(&listener, true).map_err(system("prepare the socket"))?;
        watch(&epoll, listener.as_fd(), LISTENER).map_err(system("watch the socket"))?;
        watch(&epoll, stop.as_fd(), STOP).map_err(system("watch for the end"))?;
        let token = |secret: &farside_common::config::Secret| Token::of(&secret.0);
        let tokens = Tokens {
            everything: config.secret.as_ref().map(token),
            reading: config.reader_secret.as_ref().map(token),
        };
        let (region, geometry) = (&opened.region, opened.geometry);
        Ok(Self {
            epoll,
            listener,
            accept_again_at: None,
            peers: BTreeMap::new(),
            next_token: FIRST_PEER,
            buffer: vec![0; MESSAGE_BYTES_MAX],
            reply: Vec::with_capacity(MESSAGE_BYTES_MAX),
            for_readers: memory.reader_descriptor()?,
            memory,
            tokens,
            clients: Clients::new(region, geometry, opened.incarnation, config.clients_max),
            sweeper: Sweeper::new(region, geometry),
            started_at: boot_time_ns(),
            statistics: ServerStatistics {
                incarnation: opened.incarnation,
                chunks: geometry.chunks().into(),
                chunks_index: opened.depot.chunks_index(),
                subtables: opened.index.subtables() as u64,
                ..Default::default()
            },
            opened,
        })
    }

    /// Serves until told to stop, then leaves the region in order if it can.
    pub(crate) fn run(mut self) -> Result<(), ServerError> {
        let served = self.serve();
        let left = self.let_go();
        served.and(left)
    }

    fn serve(&mut self) -> Result<(), ServerError> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            events.clear();
            let timeout = self.timeout();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(system("wait for clients")(error)),
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return Ok(()),
                    LISTENER => self.accept(),
                    token => self.listen_to(token),
                }
            }
            self.do_chores()?;
        }
    }

    /// How long the thread may sleep: for ever, unless a lost client has to be cleaned up after.
    fn timeout(&self) -> Option<Timespec> {
        let due =
            [self.sweeper.next_step_at(), self.accept_again_at].into_iter().flatten().min()?;
        let left = due.saturating_sub(boot_time_ns());
        let (tv_sec, tv_nsec) = ((left / 1_000_000_000) as i64, (left % 1_000_000_000) as i64);
        Some(Timespec { tv_sec, tv_nsec })
    }

    fn do_chores(&mut self) -> Result<(), ServerError> {
        let now = boot_time_ns();
        if self.accept_again_at.is_some_and(|at| at <= now) {
            self.accept_again_at = None;
            watch(&self.epoll, self.listener.as_fd(), LISTENER).map_err(system("watch"))?;
        }
        if self.sweeper.next_step_at().is_some_and(|at| at <= now) {
            for client in self.sweeper.step(&self.opened.index, now)? {
                self.clients.forget(client);
            }
        }
        Ok(())
    }

    fn accept(&mut self) {
        let connection = match self.listener.accept() {
            Ok(connection) => connection,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                // Out of descriptors, most likely. The client waits; so does this thread.
                tracing::warn!("cannot accept a client just now: {error}");
                if epoll::delete(&self.epoll, &self.listener).is_ok() {
                    self.accept_again_at = Some(boot_time_ns() + ACCEPT_PAUSE_NS);
                }
                return;
            }
        };
        let token = self.next_token;
        let prepared = rustix::io::ioctl_fionbio(&connection, true)
            .and_then(|()| watch(&self.epoll, connection.as_fd(), token));
        if let Err(error) = prepared {
            tracing::warn!("cannot serve a client just now: {error}");
            return;
        }
        self.next_token += 1;
        self.peers.insert(token, Peer::new(connection, epoll::EventFlags::IN));
        let nobodies = self.peers.iter().filter(|(_, peer)| !peer.is_client());
        let oldest = nobodies.clone().map(|(token, _)| *token).next();
        if nobodies.count() > STRANGERS_MAX
            && let Some(oldest) = oldest
        {
            tracing::warn!("dropped a connection: too many do not say who they are");
            self.part(oldest, &Farewell::Crowded);
        }
    }

    /// Sends what a connection waits for, or else takes one message from it and answers.
    fn listen_to(&mut self, token: u64) {
        let Some(peer) = self.peers.get_mut(&token) else { return };
        let outcome =
            if peer.is_waiting() { peer.flush(&mut self.reply) } else { self.take_message(token) };
        match outcome.and_then(|()| self.settle(token)) {
            Ok(()) => {}
            Err(Farewell::Goodbye) => self.let_leave(token),
            Err(farewell) => self.part(token, &farewell),
        }
    }

    fn take_message(&mut self, token: u64) -> Result<(), Farewell> {
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        let mut buffer = std::mem::take(&mut self.buffer);
        let outcome = match peer.receive(&mut buffer) {
            Ok(None) => Ok(()),
            Ok(Some(bytes)) => match peer.who {
                Who::Stranger => self.welcome(token, &buffer[..bytes]),
                Who::Client { role, .. } => self.answer(token, role, &buffer[..bytes]),
                Who::Leaving => Err(Farewell::Broken("it speaks after its goodbye".to_owned())),
            },
            Err(farewell) => Err(farewell),
        };
        self.buffer = buffer;
        outcome
    }

    /// Takes back what a connection did not get, and watches it for what comes next.
    fn settle(&mut self, token: u64) -> Result<(), Farewell> {
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        let undelivered = peer.take_undelivered();
        let wants = peer.wants();
        if wants != peer.watched {
            let data = epoll::EventData::new_u64(token);
            epoll::modify(&self.epoll, &*peer, data, wants)
                .map_err(|error| Farewell::Unreachable(error.into()))?;
            peer.watched = wants;
        }
        self.take_back(undelivered);
        Ok(())
    }

    /// Blocks in answers that nobody saw belong to the depot again, as rested as they were.
    fn take_back(&mut self, undelivered: [Option<Reply>; 2]) {
        for reply in undelivered.into_iter().flatten() {
            let Reply::Blocks { class, blocks } = reply else { continue };
            // Given like any other, so that taken less given is what clients and slots have.
            self.statistics.blocks_given += blocks.len() as u64;
            if let Err(error) = self.opened.depot.give(class, blocks, true, boot_time_ns()) {
                tracing::error!("blocks that were not delivered do not fit: {error}");
            }
        }
    }

    fn welcome(&mut self, token: u64, bytes: &[u8]) -> Result<(), Farewell> {
        let request = ConnectRequest::decode(bytes)
            .and_then(|request| self.tokens.admit(&request).map(|()| request));
        let admitted = request.and_then(|request| Ok((request.role, self.clients.admit()?)));
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        let (role, (client_id, lease)) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => {
                // Whoever does not take it learns less.
                let _ = peer.connection.send(&encode_reply(&Err(refusal)), None);
                return Err(Farewell::Refused(refusal));
            }
        };
        peer.who = Who::Client { id: client_id, role };
        let welcome = Welcome {
            client_id,
            lease,
            region_id: self.opened.format.region_id,
            incarnation: self.opened.incarnation,
            base_address: 0,
            region_bytes: self.opened.format.region_bytes,
            rkey: 0,
        };
        let descriptor: BorrowedFd<'_> = match role {
            Role::Writer => self.memory.file.as_fd(),
            Role::Reader => self.for_readers.as_fd(),
        };
        tracing::info!(client = client_id, ?role, "a client connected");
        let sent = peer.connection.send(&encode_reply(&Ok(welcome)), Some(descriptor));
        sent.map_err(|error| {
            // It has no region, so there is nothing of it to find, and nobody was lost.
            if self.clients.fence(client_id).is_ok() {
                self.clients.forget(client_id);
            }
            peer.who = Who::Stranger;
            Farewell::Unreachable(error)
        })
    }

    fn answer(&mut self, token: u64, role: Role, bytes: &[u8]) -> Result<(), Farewell> {
        let broken = |why: &dyn std::fmt::Display| Farewell::Broken(why.to_string());
        let request = Request::decode(bytes).map_err(|error| broken(&error))?;
        let now = boot_time_ns();
        let reply = match request {
            Request::TakeBlocks { .. } | Request::GiveBlocks { .. } if role == Role::Reader => {
                return Err(broken(&"a reader has no use for blocks"));
            }
            Request::TakeBlocks { class, count } => {
                let Opened { region, geometry, depot, .. } = &mut self.opened;
                let tables = RegionTables { region, geometry };
                let taken = depot.take(class, count, now, &tables);
                let blocks = taken.map_err(|error| broken(&error))?;
                self.statistics.blocks_taken += blocks.len() as u64;
                self.statistics.requests_denied += u64::from(count > 0 && blocks.is_empty());
                Reply::Blocks { class, blocks }
            }
            Request::GiveBlocks { class, rested, blocks } => {
                let count = blocks.len() as u64;
                let given = self.opened.depot.give(class, blocks, rested, now);
                given.map_err(|error| broken(&error))?;
                self.statistics.blocks_given += count;
                return Ok(());
            }
            Request::Statistics => Reply::Statistics(self.statistics(now)),
            Request::Goodbye => return Err(Farewell::Goodbye),
        };
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        peer.answer(reply, &mut self.reply)
    }

    fn statistics(&self, now: Nanos) -> ServerStatistics {
        ServerStatistics {
            uptime_ms: now.saturating_sub(self.started_at) / 1_000_000,
            clients: self.clients.connected().into(),
            chunks_free: self.opened.depot.chunks_free(),
            classes: self.opened.depot.classes(),
            ..self.statistics.clone()
        }
    }

    /// After a goodbye: the client's place is free, and the connection stays until it hangs up.
    fn let_leave(&mut self, token: u64) {
        let Some(peer) = self.peers.get_mut(&token) else { return };
        let Who::Client { id, .. } = peer.who else { return };
        peer.who = Who::Leaving;
        peer.close();
        if let Err(error) = self.clients.fence(id) {
            tracing::error!(client = id, "cannot fence a client: {error}");
            return;
        }
        self.clients.forget(id);
        tracing::info!(client = id, "a client left");
        // Whoever waits for the server to hang up sees it now. Gone already is as good.
        let _ = rustix::net::shutdown(&*peer, rustix::net::Shutdown::Write);
    }

    /// Ends a connection. A client without a goodbye may have been anywhere in an operation.
    fn part(&mut self, token: u64, farewell: &Farewell) {
        let Some(mut peer) = self.peers.remove(&token) else { return };
        // Explicitly, for a copy of the descriptor in a forked child would keep it watched.
        let _ = epoll::delete(&self.epoll, &peer);
        peer.close();
        self.take_back(peer.take_undelivered());
        let Who::Client { id, role } = peer.who else {
            tracing::debug!("a connection ended: {farewell}");
            return;
        };
        if let Err(error) = self.clients.fence(id) {
            tracing::error!(client = id, "cannot fence a client: {error}");
            return;
        }
        match role {
            // Its memory refused every store: there is nothing of it to find.
            Role::Reader => self.clients.forget(id),
            Role::Writer => self.sweeper.add(id, boot_time_ns()),
        }
        self.statistics.clients_lost += 1;
        tracing::warn!(client = id, "lost a client: {farewell}");
    }

    /// Fences whoever is connected and notes that the region is nobody's.
    fn let_go(&mut self) -> Result<(), ServerError> {
        for peer in std::mem::take(&mut self.peers).into_values() {
            match peer.who {
                Who::Client { id, .. } => self.clients.fence(id)?,
                Who::Leaving => {}
                Who::Stranger => {
                    let bye = encode_reply(&Err(Refusal::ShuttingDown));
                    // Whoever does not take it learns less.
                    let _ = peer.connection.send(&bye, None);
                }
            }
        }
        let word = Superblock::state_word(RegionState::Clean, self.opened.directory_depth);
        self.opened.region.store(STATE_OFFSET, word)?;
        tracing::info!("stopped");
        Ok(())
    }
}

fn watch(epoll: &OwnedFd, source: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, source, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
}
