//! The control service: one thread that sleeps until a client connects, sends a request or
//! disconnects.
//!
//! The thread answers messages in turns of [`TURN_NS`]. Between two turns it checks whether it must
//! stop, accepts connections, and does its chores.

pub(crate) mod acceptor;
mod admission;
mod client_connection;
mod connections;
#[cfg(feature = "verbs")]
mod device;
mod probing;
mod recalls;
mod region_keeper;
mod roll_call;
mod socket;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use farside_config::ServerConfig;
use farside_control::address::Address;
use farside_control::{
    Refusal, Request, Role, ServerMessage, ServerRequest, ServerStatistics, encode_reply,
};
use farside_fabric::shm::RegionMemory;
use farside_fabric::{ChainError, Nanos, boot_time_ns};
use farside_layout::clock_lag_max_ns;
use rustix::event::Timespec;

use crate::collect::CollectorRequest;
use crate::error::{ServerError, system};
use crate::recovery::ServedRegion;
use acceptor::{Arrival, BoundListener};
use admission::Admission;
use client_connection::{ClientIdentity, DisconnectReason};
use connections::{Connections, EVENTS_MAX, FIRST_CONNECTION, LISTENER, ReceivedMessage, STOP};
use probing::Probing;
use region_keeper::RegionKeeper;
use roll_call::{DueClients, RollCall};

/// How long messages are answered before the thread checks for everything else.
const TURN_NS: Nanos = 2_000_000;
/// How many messages of one connection are answered before the next connection has its turn.
const MESSAGES_MAX: usize = 16;

/// Binds a listener to an address.
pub(crate) fn listen(
    address: &Address,
    config: &ServerConfig,
) -> Result<Box<dyn BoundListener>, ServerError> {
    match address {
        Address::Shm(path) => Ok(Box::new(socket::bind(path, config)?)),
        #[cfg(feature = "verbs")]
        Address::Rdma { .. } => {
            let addresses = address.resolve().map_err(system("find the address to listen at"))?;
            Ok(Box::new(device::bind(&addresses, config)?))
        }
        #[cfg(not(feature = "verbs"))]
        Address::Rdma { .. } => Err(farside_fabric::rdma::VerbsError::NotBuilt.into()),
        _ => Err(system("listen")(io::Error::from(io::ErrorKind::Unsupported))),
    }
}

/// The state of the control thread.
pub(crate) struct ControlService {
    connections: Connections,
    admission: Admission,
    probing: Probing,
    roll_call: RollCall,
    keeper: RegionKeeper,
    /// Holds the lock of a region file.
    memory: Arc<RegionMemory>,
    started_at: Nanos,
    clients_lost: u64,
}

impl ControlService {
    pub(crate) fn new(
        config: &ServerConfig,
        listener: Box<dyn BoundListener>,
        memory: Arc<RegionMemory>,
        opened: ServedRegion,
        stop: &OwnedFd,
    ) -> Result<Self, ServerError> {
        let connections = Connections::new()?;
        connections.watch(stop, STOP).map_err(system("watch for the end"))?;
        let (acceptor, own) = listener.open(config, &memory, &opened)?;
        let admission = Admission::new(config, acceptor, &opened);
        admission.watch(&connections)?;
        let probe_ms = if admission.is_remote() { config.probe_ms } else { 0 };
        Ok(Self {
            connections,
            admission,
            probing: Probing::every(Nanos::from(probe_ms) * 1_000_000),
            roll_call: RollCall::new(clock_lag_max_ns(opened.format.grace_ns())),
            keeper: RegionKeeper::new(config, opened, own),
            memory,
            started_at: boot_time_ns(),
            clients_lost: 0,
        })
    }

    /// Serves until the stop descriptor is readable or serving fails. Then shuts down in order.
    pub(crate) fn run(mut self) -> Result<(), ServerError> {
        let served = self.serve();
        let shut_down = self.shut_down();
        served.and(shut_down)
    }

    fn serve(&mut self) -> Result<(), ServerError> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            match self.connections.wait(&mut events, self.timeout().as_ref()) {
                Ok(()) => {}
                // The process may have been stopped for long. Messages are read before any chore.
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(system("wait for clients")(error)),
            }
            let tokens = || events.iter().map(|event| event.data.u64());
            if tokens().any(|token| token == STOP) {
                return Ok(());
            }
            if tokens().any(|token| token == LISTENER) {
                self.accept()?;
            }
            for token in tokens().filter(|token| *token >= FIRST_CONNECTION) {
                self.connections.enqueue(token);
            }
            self.take_turn()?;
            self.do_chores()?;
        }
    }

    /// How long the thread may sleep until a chore is due. `None` if no chore is planned.
    fn timeout(&self) -> Option<Timespec> {
        if !self.connections.queue.is_empty() {
            return Some(Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let due = [
            self.keeper.next_step_at(),
            self.admission.accept_again_at,
            self.next_probe_at(),
            self.roll_call.next_step_at(),
        ];
        let due = due.into_iter().flatten().min()?;
        let left = due.saturating_sub(boot_time_ns());
        let (tv_sec, tv_nsec) = ((left / 1_000_000_000) as i64, (left % 1_000_000_000) as i64);
        Some(Timespec { tv_sec, tv_nsec })
    }

    /// Takes the arrivals of the listener.
    fn accept(&mut self) -> Result<(), ChainError> {
        for _ in 0..self.admission.acceptor.arrivals_max() {
            match self.admission.next_arrival(&self.connections) {
                None => break,
                Some(Arrival::Stranger(stranger)) => {
                    let surplus = self.admission.add_stranger(stranger, &mut self.connections);
                    if let Some(token) = surplus {
                        self.disconnect(token, &DisconnectReason::Crowded);
                    }
                }
                Some(Arrival::Request(request)) => {
                    let is_first = self.connections.by_token.is_empty();
                    let client = self.admission.decide(request, &mut self.connections);
                    if let Some((token, role)) = client {
                        self.note_connected(token, role, is_first);
                    }
                }
                Some(Arrival::Established) => {}
                Some(Arrival::Ended(id)) => {
                    if let Some(token) = self.connections.end_connection(id) {
                        // The messages that the client sent before are answered first.
                        self.serve_connection(token)?;
                        self.disconnect(token, &DisconnectReason::Gone);
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins to probe the host of this client, and to check the clock of its process.
    fn note_connected(&mut self, token: u64, role: Role, is_first: bool) {
        let now = boot_time_ns();
        self.probing.note_connected(is_first, now);
        // A reader relies on no proof of a word, so its clock does not matter.
        if role == Role::Writer {
            self.roll_call.add(token, now);
        }
    }

    /// Serves the queued connections until none is left or the turn is over.
    fn take_turn(&mut self) -> Result<(), ChainError> {
        let ends_at = boot_time_ns().saturating_add(TURN_NS);
        while let Some(token) = self.connections.dequeue() {
            self.serve_connection(token)?;
            if boot_time_ns() >= ends_at {
                break;
            }
        }
        Ok(())
    }

    /// Sends the unsent messages of a connection, then receives and answers a bounded number.
    fn serve_connection(&mut self, token: u64) -> Result<(), ChainError> {
        for _ in 0..MESSAGES_MAX {
            match self.exchange(token) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                // The region cannot be used, so no client can be served. The server stops, and the
                // next one resumes.
                Err(DisconnectReason::Failed(error)) => return Err(error),
                Err(DisconnectReason::Goodbye) => {
                    self.sign_off(token);
                    return Ok(());
                }
                Err(reason) => {
                    self.disconnect(token, &reason);
                    return Ok(());
                }
            }
        }
        // The rest of its messages wait until the other connections have had their turn.
        self.connections.enqueue(token);
        Ok(())
    }

    /// Sends the unsent messages of a connection, then receives and answers one. Returns false if
    /// there was none.
    fn exchange(&mut self, token: u64) -> Result<bool, DisconnectReason> {
        let received = self.connections.receive(token)?;
        let has_received = received.is_some();
        match received {
            None => {}
            Some(ReceivedMessage::Hello(request)) => {
                self.admission.admit_stranger(token, request, &mut self.connections)?;
            }
            Some(ReceivedMessage::Request(id, role, request)) => {
                self.answer(token, (id, role), request, boot_time_ns())?;
            }
        }
        if let Some(connection) = self.connections.by_token.get_mut(&token) {
            self.keeper.take_back(connection.take_undelivered());
        }
        self.connections.update_interest(token)?;
        Ok(has_received)
    }

    fn answer(
        &mut self,
        token: u64,
        (client, role): (u16, Role),
        request: Request,
        now: Nanos,
    ) -> Result<(), DisconnectReason> {
        let (reply, begins_recall) = match request {
            Request::TakeBlocks { .. }
            | Request::GiveBlocks { .. }
            | Request::Held { .. }
            | Request::Collect
            | Request::Split { .. }
            | Request::Expires
                if role == Role::Reader =>
            {
                return Err(DisconnectReason::broken("a reader has no use for memory"));
            }
            Request::TakeBlocks { class, count } => self.keeper.take_blocks(class, count, now)?,
            Request::Split { directory_hash, local_depth } => {
                self.keeper.split((directory_hash, local_depth), now)?
            }
            Request::Statistics => (ServerMessage::Statistics(self.statistics(role, now)), false),
            Request::Collect => {
                let reply = ServerMessage::Statistics(self.statistics(role, now));
                self.keeper.collector.want(now);
                (reply, false)
            }
            Request::GiveBlocks { class, rested, blocks } => {
                let given = self.keeper.give_blocks(class, rested, blocks, now);
                return given.map_err(DisconnectReason::broken);
            }
            Request::Held { collection, last, blocks } => {
                self.keeper.note_held(token, (collection, last), blocks);
                return Ok(());
            }
            Request::Expires => {
                self.keeper.reaper.announce(client, now);
                return Ok(());
            }
            Request::Snapshot { permille } => {
                self.connections.note_snapshot(token, permille);
                return Ok(());
            }
            Request::Alive { clock_ns } => {
                let answered = self.roll_call.answered(token, clock_ns, now);
                return answered.map_err(|ms| DisconnectReason::ClockBehind { ms });
            }
            Request::Goodbye => return Err(DisconnectReason::Goodbye),
        };
        self.connections.reply(token, reply)?;
        if begins_recall {
            self.connections.ask_writers(ServerRequest::Return);
        }
        Ok(())
    }

    fn statistics(&mut self, role: Role, now: Nanos) -> ServerStatistics {
        let connections = self.connections.iter();
        let snapshots: Vec<u32> =
            connections.filter_map(|(_, connection)| connection.snapshot_permille).collect();
        ServerStatistics {
            uptime_ms: now.saturating_sub(self.started_at) / 1_000_000,
            clients: self.admission.clients.connected.into(),
            clients_lost: self.clients_lost,
            snapshots: snapshots.len() as u64,
            snapshot_permille: snapshots.into_iter().min().unwrap_or(0).into(),
            snapshots_taken: self.connections.snapshots_taken,
            huge_page_bytes: self.memory.huge_bytes(),
            ..self.keeper.statistics(role, now)
        }
    }

    /// Does the chores that are due.
    fn do_chores(&mut self) -> Result<(), ServerError> {
        let now = boot_time_ns();
        self.admission.resume(&self.connections, now)?;
        if self.next_probe_at().is_some_and(|at| at <= now) {
            self.probing.begin(now);
            self.connections.probe();
        }
        if self.roll_call.next_step_at().is_some_and(|at| at <= now) {
            self.call_roll(now);
        }
        let (swept, request) = self.keeper.step(now)?;
        swept.into_iter().for_each(|client| self.admission.clients.forget(client));
        match request {
            CollectorRequest::Nothing => {}
            CollectorRequest::Ask { collection } => {
                let asked = self.connections.ask_writers(ServerRequest::Report { collection });
                self.keeper.collector.asked(asked.into_iter().collect(), now);
            }
            CollectorRequest::Disconnect(tokens) => {
                for token in tokens {
                    self.disconnect_silent(token, &DisconnectReason::ReportOverdue);
                }
            }
        }
        Ok(())
    }

    /// When to probe the hosts of clients; `None` for never.
    fn next_probe_at(&self) -> Option<Nanos> {
        self.probing.next_at().filter(|_| !self.connections.by_token.is_empty())
    }

    /// Asks writers for their clocks when it is time, and fences those that have not answered.
    fn call_roll(&mut self, now: Nanos) {
        let DueClients { ask, silent } = self.roll_call.step(now);
        ask.into_iter().for_each(|token| self.connections.ask(token, ServerRequest::Alive));
        for (token, ms) in silent {
            self.disconnect_silent(token, &DisconnectReason::ProcessSilent { ms });
        }
    }

    /// Disconnects a client that did not answer, unless it is in the queue: then its answer may be
    /// among the messages that are still unread.
    fn disconnect_silent(&mut self, token: u64, reason: &DisconnectReason) {
        if self.connections.is_idle(token) {
            self.disconnect(token, reason);
        }
    }

    /// Frees the id of a client that said goodbye. Its connection stays until it hangs up.
    fn sign_off(&mut self, token: u64) {
        let Some(connection) = self.connections.by_token.get_mut(&token) else { return };
        let ClientIdentity::Client { id, .. } = connection.client else { return };
        connection.client = ClientIdentity::Leaving;
        connection.close();
        self.roll_call.remove(token);
        self.keeper.sign_off(token, id);
        let clients = &mut self.admission.clients;
        if let Err(error) = clients.fence(id) {
            tracing::error!(client = id, "cannot fence a client: {error}");
            return;
        }
        clients.forget(id);
        tracing::info!(client = id, "a client left");
        // The client may wait until the server closes its direction of the channel. A channel that
        // cannot close one direction is dropped.
        if !connection.channel.hang_up() {
            self.connections.remove(token);
        }
    }

    /// Ends a connection and fences its client, which may have been in the middle of an operation.
    fn disconnect(&mut self, token: u64, reason: &DisconnectReason) {
        // Over verbs this is the fence: it destroys the client's queue pairs.
        let Some(mut connection) = self.connections.remove(token) else { return };
        self.roll_call.remove(token);
        self.keeper.take_back(connection.take_undelivered());
        let ClientIdentity::Client { id, role, .. } = connection.client else {
            match reason {
                DisconnectReason::Refused(refusal) => self.admission.log_refusal(*refusal),
                other => tracing::debug!("a connection ended: {other}"),
            }
            return;
        };
        let clients = &mut self.admission.clients;
        if let Err(error) = clients.fence(id) {
            tracing::error!(client = id, "cannot fence a client: {error}");
            return;
        }
        if self.keeper.note_fenced(token, (id, role)) {
            clients.forget(id);
        }
        self.clients_lost += 1;
        tracing::warn!(client = id, ?role, "lost a client and fenced it: {reason}");
    }

    /// Fences all clients and notes that no server uses the region.
    fn shut_down(&mut self) -> Result<(), ServerError> {
        for mut connection in self.connections.remove_all() {
            connection.close();
            match connection.client {
                ClientIdentity::Client { id, .. } => self.admission.clients.fence(id)?,
                ClientIdentity::Leaving => {}
                ClientIdentity::Stranger => {
                    let bye = encode_reply(&Err(Refusal::ShuttingDown));
                    // If this does not reach the client, it only sees the connection close.
                    let _ = connection.channel.send(&bye);
                }
            }
        }
        self.keeper.opened.close()?;
        tracing::info!("stopped");
        Ok(())
    }
}
