//! The control service: the server's one serving thread, which sleeps until a client connects,
//! sends a request or disconnects, or until a chore is due.
//!
//! The thread answers messages in turns of [`TURN_NS`]. Between two turns it checks whether it must
//! stop, accepts connections, and does its chores.

pub(crate) mod acceptor;
mod admission;
mod answers;
mod client_connection;
mod clients;
mod connections;
#[cfg(feature = "verbs")]
mod device;
#[cfg(feature = "verbs")]
mod device_atomics;
mod hot_blocks;
mod metrics_answers;
mod proofs;
mod roll_call;
mod socket;
mod tcp;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use farside_config::ServerConfig;
use farside_control::address::{Address, OWN_NAME_TIMEOUT};
use farside_control::{FabricKind, Refusal, Role, ServerRequest};
use farside_fabric::memory::RegionMemory;
use farside_fabric::tcp::TlsServer;
use farside_fabric::{ChainError, Nanos, boot_time_ns};
use farside_layout::clock_lag_max_ns;
use rustix::event::Timespec;

use crate::chores::collect::CollectorRequest;
use crate::chores::keeper::RegionKeeper;
use crate::cluster::Membership;
use crate::error::{ServerError, system};
use crate::metrics::MetricsQuestions;
use crate::rate_limited_warning::{RateLimitedWarning, log_rarely, warn_rarely};
use crate::region::served::ServedRegion;
use acceptor::{Acceptor, Arrival, BoundListener};
use admission::Admission;
use client_connection::{AwaitedAnswer, ClientConnection, ClientIdentity, DisconnectReason};
use connections::{
    CLUSTER, Connections, EVENTS_MAX, FIRST_CONNECTION, LISTENER, METRICS, Probing,
    ReceivedMessage, STOP,
};
use hot_blocks::HotBlocks;
use metrics_answers::MetricsCounts;
use roll_call::{DueClients, RollCall};

/// How long the thread answers messages before it accepts connections and does chores.
const TURN_NS: Nanos = 2_000_000;
/// Limit on the messages of one connection that are answered before the next connection's turn.
const MESSAGES_MAX: usize = 16;

/// Binds a listener to an address.
pub(crate) fn listen(
    address: &Address,
    config: &ServerConfig,
    tls: Option<&Arc<TlsServer>>,
) -> Result<Box<dyn BoundListener>, ServerError> {
    match address {
        Address::Shm(path) => Ok(Box::new(socket::bind(path, config)?)),
        Address::Tcp { .. } => Ok(Box::new(tcp::bind(&resolve(address)?, address, tls)?)),
        #[cfg(feature = "verbs")]
        Address::Rdma { .. } => Ok(Box::new(device::bind(&resolve(address)?, config)?)),
        #[cfg(not(feature = "verbs"))]
        Address::Rdma { .. } => Err(farside_fabric::rdma::VerbsError::NotBuilt.into()),
        _ => Err(system("listen")(io::Error::from(io::ErrorKind::Unsupported))),
    }
}

/// Returns the socket addresses of a host's name.
fn resolve(listen: &Address) -> Result<Vec<SocketAddr>, ServerError> {
    let listen_at = |source| ServerError::Name { listen: listen.to_string(), source };
    listen.resolve(OWN_NAME_TIMEOUT).map_err(listen_at)
}

/// The serving thread: its connections, and the region that it serves.
pub(crate) struct ControlService {
    connections: Connections,
    admission: Admission,
    probing: Probing,
    roll_call: RollCall,
    keeper: RegionKeeper,
    /// `None` if the server is a part of no cluster.
    cluster: Option<Membership>,
    /// Holds the lock of a region file.
    memory: Arc<RegionMemory>,
    started_at: Nanos,
    clients_lost: u64,
    left: RateLimitedWarning,
    lost: RateLimitedWarning,
    counts: MetricsCounts,
    hot_blocks: HotBlocks,
    /// When the server may ask its clients to describe themselves again.
    describe_at: Nanos,
}

impl ControlService {
    /// `listeners` begins with that of a device, if there is one: the others use the device.
    pub(crate) fn new(
        config: &ServerConfig,
        listeners: Vec<Box<dyn BoundListener>>,
        memory: Arc<RegionMemory>,
        opened: ServedRegion,
        cluster: Option<Membership>,
        (stop, questions): (&OwnedFd, Option<MetricsQuestions>),
    ) -> Result<Self, ServerError> {
        let connections = Connections::new()?;
        connections.watch(stop, STOP).map_err(system("watch for the end"))?;
        if let Some(cluster) = &cluster {
            connections.watch(cluster, CLUSTER).map_err(system("watch for the cluster"))?;
        }
        if let Some(questions) = &questions {
            connections.watch(questions, METRICS).map_err(system("watch for the metrics"))?;
        }
        let (mut acceptors, mut own) = (Vec::<Box<dyn Acceptor>>::new(), None);
        for listener in listeners {
            let device = acceptors.iter().find_map(|acceptor| acceptor.device());
            let (acceptor, endpoint) = listener.open(config, &memory, &opened, device)?;
            acceptors.push(acceptor);
            // All atomic verbs have one executor, so one endpoint is enough: the device's, if there
            // is a device.
            own.get_or_insert(endpoint);
        }
        let own = own.ok_or_else(|| system("listen")(io::Error::from(io::ErrorKind::NotFound)))?;
        let admission = Admission::new(config, acceptors, &opened);
        admission.watch_all(&connections)?;
        let probe_ms = if admission.needs_probes() { config.probe_ms } else { 0 };
        Ok(Self {
            connections,
            admission,
            probing: Probing::every(Nanos::from(probe_ms) * 1_000_000),
            roll_call: RollCall::new(clock_lag_max_ns(opened.format.grace_ns())),
            keeper: RegionKeeper::new(config, opened, own),
            cluster,
            memory,
            started_at: boot_time_ns(),
            clients_lost: 0,
            left: RateLimitedWarning::of_ordinary_event(),
            lost: RateLimitedWarning::of_ordinary_event(),
            counts: MetricsCounts::new(questions),
            hot_blocks: HotBlocks::default(),
            describe_at: 0,
        })
    }

    /// Serves until the stop descriptor is readable or serving fails. Then fences all clients and
    /// closes the region.
    pub(crate) fn run(mut self) -> Result<(), ServerError> {
        let served = self.serve();
        let shut_down = self.shut_down();
        if served.is_ok() && shut_down.is_ok() {
            self.leave_cluster();
        }
        served.and(shut_down)
    }

    fn serve(&mut self) -> Result<(), ServerError> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            match self.connections.wait(&mut events, self.timeout().as_ref()) {
                Ok(()) => {}
                // The process may have been stopped for long. It then reads the messages before it
                // does any chore, because a chore may take an unread answer for silence.
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(system("wait for clients")(error)),
            }
            self.note_running();
            let numbers = || events.iter().map(|event| event.data.u64());
            if numbers().any(|number| number == STOP) {
                return Ok(());
            }
            if numbers().any(|number| number == CLUSTER) {
                self.take_cluster_news()?;
            }
            if numbers().any(|number| number == LISTENER) {
                (0..self.admission.acceptors.len()).try_for_each(|at| self.accept(at))?;
            }
            for connection_number in numbers().filter(|number| *number >= FIRST_CONNECTION) {
                self.connections.enqueue(connection_number);
            }
            self.take_turn()?;
            self.do_chores()?;
            // Last, so that no client waits for it.
            if numbers().any(|number| number == METRICS) {
                self.answer_metrics();
            }
        }
    }

    /// Returns how long the thread may sleep until a chore is due; `None` if no chore is planned.
    fn timeout(&self) -> Option<Timespec> {
        if !self.connections.queue.is_empty() {
            return Some(Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let due = [
            self.keeper.next_step_at(),
            self.admission.accept_again_at(),
            self.admission.overdue_at(),
            self.next_probe_at(),
            self.roll_call.next_step_at(),
            self.hot_blocks.next_step_at(),
            self.cluster.as_ref().map(Membership::next_step_at),
        ];
        let due = due.into_iter().flatten().min()?;
        let left = due.saturating_sub(boot_time_ns());
        let (tv_sec, tv_nsec) = ((left / 1_000_000_000) as i64, (left % 1_000_000_000) as i64);
        Some(Timespec { tv_sec, tv_nsec })
    }

    /// Takes the arrivals of a listener.
    fn accept(&mut self, acceptor: usize) -> Result<(), ChainError> {
        for _ in 0..self.admission.acceptors[acceptor].arrivals_max() {
            match self.admission.next_arrival(acceptor, &self.connections) {
                None => break,
                Some(Arrival::Unidentified(connection)) => {
                    self.admission.add_unidentified(connection, &mut self.connections);
                    self.close_surplus();
                }
                Some(Arrival::Request(request)) => {
                    let is_first = self.connections.by_number.is_empty();
                    let connections = &mut self.connections;
                    let added = self.admission.admit_request(request, acceptor, connections);
                    if let Some(connection_number) = added {
                        self.probing.note_connected(is_first, boot_time_ns());
                        // More than the hello may have been received with it.
                        self.connections.enqueue(connection_number);
                        self.close_surplus();
                    }
                }
                Some(Arrival::Established) => {}
                Some(Arrival::Ended(id)) => {
                    if let Some(connection_number) = self.connections.end_connection(acceptor, id) {
                        // The messages that the client sent before are answered first.
                        self.serve_connection(connection_number)?;
                        self.disconnect(connection_number, &DisconnectReason::Gone);
                    }
                }
            }
        }
        Ok(())
    }

    /// Closes a connection if too many have no client.
    fn close_surplus(&mut self) {
        if let Some((connection_number, reason)) = self.admission.surplus(&self.connections) {
            self.disconnect(connection_number, &reason);
        }
    }

    /// Begins to check the clock of a new writer's process, unless it is on this host. A reader
    /// relies on no proof of a word, so its clock does not matter.
    fn note_admitted(&mut self, connection_number: u64) {
        let connection = self.connections.by_number.get(&connection_number);
        let is_checked = |connection: &ClientConnection| {
            connection.role() == Some(Role::Writer) && connection.fabric != FabricKind::Shm
        };
        if connection.is_some_and(is_checked) {
            self.roll_call.add(connection_number, boot_time_ns());
        }
    }

    /// Serves the queued connections until none is left or the turn is over.
    fn take_turn(&mut self) -> Result<(), ChainError> {
        let ends_at = boot_time_ns().saturating_add(TURN_NS);
        while let Some(connection_number) = self.connections.dequeue() {
            self.serve_connection(connection_number)?;
            if boot_time_ns() >= ends_at {
                break;
            }
        }
        Ok(())
    }

    /// Sends the unsent messages of a connection, then receives and answers at most
    /// [`MESSAGES_MAX`] messages.
    fn serve_connection(&mut self, connection_number: u64) -> Result<(), ChainError> {
        for _ in 0..MESSAGES_MAX {
            match self.exchange(connection_number) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                // The region cannot be used, so no client can be served. The server stops, and the
                // next server continues.
                Err(DisconnectReason::Failed(error)) => return Err(error),
                Err(DisconnectReason::Goodbye) => {
                    self.sign_off(connection_number);
                    return Ok(());
                }
                Err(reason) => {
                    self.disconnect(connection_number, &reason);
                    return Ok(());
                }
            }
        }
        // The rest of its messages wait until the other connections have had their turn.
        self.connections.enqueue(connection_number);
        Ok(())
    }

    /// Sends the unsent messages of a connection, then receives and answers one message. Returns
    /// false if no message had arrived.
    fn exchange(&mut self, connection_number: u64) -> Result<bool, DisconnectReason> {
        let received = self.connections.receive(connection_number)?;
        let has_received = received.is_some();
        match received {
            None => {}
            Some(ReceivedMessage::ConnectRequest(request)) => {
                let connections = &mut self.connections;
                self.admission.challenge_unidentified(connection_number, request, connections)?;
            }
            Some(ReceivedMessage::Proof(proof)) => {
                let (cluster, connections) = (&mut self.cluster, &mut self.connections);
                self.admission.admit_proven(connection_number, proof, cluster, connections)?;
                self.note_admitted(connection_number);
                self.close_surplus();
            }
            Some(ReceivedMessage::Request(id, role, request)) => {
                self.counts.count_message(&request);
                self.answer(connection_number, (id, role), request, boot_time_ns())?;
            }
            Some(ReceivedMessage::MapRequest(request)) => {
                self.counts.count_message(&request);
                self.answer_about_cluster(connection_number, request, boot_time_ns())?;
            }
        }
        if let Some(connection) = self.connections.by_number.get_mut(&connection_number) {
            self.keeper.take_back(connection.take_undelivered());
        }
        self.connections.update_interest(connection_number)?;
        Ok(has_received)
    }

    /// Does the chores that are due.
    fn do_chores(&mut self) -> Result<(), ServerError> {
        let now = boot_time_ns();
        self.admission.resume(&self.connections, now)?;
        while let Some(connection_number) = self.admission.overdue(now) {
            match self.connections.is_idle(connection_number) {
                true => self.disconnect(connection_number, &DisconnectReason::ProofOverdue),
                // Its proof may be among the messages that are still unread.
                false => self.admission.expect(connection_number),
            }
        }
        if self.next_probe_at().is_some_and(|at| at <= now) {
            self.probing.begin(now);
            self.counts.count_probes(self.connections.probe());
        }
        if self.roll_call.next_step_at().is_some_and(|at| at <= now) {
            self.call_roll(now);
        }
        if self.hot_blocks.next_step_at().is_some_and(|at| at <= now) {
            self.ask_for_samples(now);
        }
        let (swept, request, questions) = self.keeper.step(now)?;
        if questions.recall {
            self.connections.ask_writers(ServerRequest::Return);
        }
        if questions.reads {
            let asked = self.connections.ask_for(AwaitedAnswer::Reads, true);
            self.keeper.note_asked_for_reads(asked, now);
        }
        swept.into_iter().for_each(|client| self.admission.clients.forget(client));
        match request {
            CollectorRequest::Nothing => {}
            CollectorRequest::Ask { collection } => {
                let asked = self.connections.ask_writers(ServerRequest::Report { collection });
                self.keeper.collector.asked(asked.into_iter().collect(), now);
            }
            CollectorRequest::Disconnect(connection_numbers) => {
                for connection_number in connection_numbers {
                    self.disconnect_silent(connection_number, &DisconnectReason::ReportOverdue);
                }
            }
        }
        Ok(())
    }

    /// Returns when to probe the hosts of clients; `None` if there are no clients or no probes.
    fn next_probe_at(&self) -> Option<Nanos> {
        self.probing.next_at().filter(|_| !self.connections.by_number.is_empty())
    }

    /// Asks writers for their clocks when it is time, and fences those that have not answered.
    fn call_roll(&mut self, now: Nanos) {
        let DueClients { ask, silent } = self.roll_call.step(now);
        ask.into_iter().for_each(|connection_number| {
            self.connections.ask(connection_number, ServerRequest::Alive)
        });
        for (connection_number, ms) in silent {
            self.disconnect_silent(connection_number, &DisconnectReason::ProcessSilent { ms });
        }
    }

    /// Disconnects a client that did not answer, unless it is in the queue: then its answer may be
    /// among the messages that are still unread.
    fn disconnect_silent(&mut self, connection_number: u64, reason: &DisconnectReason) {
        if self.connections.is_idle(connection_number) {
            self.disconnect(connection_number, reason);
        }
    }

    /// Frees the id of a client that said goodbye. Its connection stays until it hangs up.
    fn sign_off(&mut self, connection_number: u64) {
        let Some(connection) = self.connections.by_number.get_mut(&connection_number) else {
            return;
        };
        let ClientIdentity::Client { id, .. } = connection.client else { return };
        connection.client = ClientIdentity::Leaving;
        connection.close();
        self.roll_call.remove(connection_number);
        self.keeper.sign_off(connection_number, id);
        let clients = &mut self.admission.clients;
        if let Err(error) = clients.fence(id) {
            tracing::error!(client = id, "FS-026 cannot fence a client: {error}");
            return;
        }
        clients.forget(id);
        log_rarely!(info, self.left, client = id, "a client left");
        // The client may wait until the server closes its direction of the channel. A channel that
        // cannot close one direction is dropped.
        if !connection.channel.hang_up() {
            self.connections.remove(connection_number);
        }
    }

    /// Ends a connection and fences its client, which may have been in the middle of an operation.
    fn disconnect(&mut self, connection_number: u64, reason: &DisconnectReason) {
        // Over verbs this is the fence: it destroys the client's queue pairs.
        let Some(mut connection) = self.connections.remove(connection_number) else { return };
        self.admission.settle(connection_number);
        self.roll_call.remove(connection_number);
        self.keeper.take_back(connection.take_undelivered());
        let ClientIdentity::Client { id, role, .. } = connection.client else {
            match reason {
                DisconnectReason::Refused(refusal) => self.admission.note_refusal(*refusal),
                other => tracing::debug!("a connection ended: {other}"),
            }
            return;
        };
        let clients = &mut self.admission.clients;
        if let Err(error) = clients.fence(id) {
            tracing::error!(client = id, "FS-026 cannot fence a client: {error}");
            return;
        }
        if self.keeper.note_fenced(connection_number, (id, role)) {
            clients.forget(id);
        }
        self.clients_lost += 1;
        self.counts.count_fence(reason);
        warn_rarely!(self.lost, client = id, ?role, "FS-021 lost a client and fenced it: {reason}");
    }

    /// Fences all clients and notes that no server uses the region.
    fn shut_down(&mut self) -> Result<(), ServerError> {
        for mut connection in self.connections.remove_all() {
            connection.close();
            match connection.client {
                ClientIdentity::Client { id, .. } => self.admission.clients.fence(id)?,
                ClientIdentity::Leaving | ClientIdentity::Map { .. } => {}
                ClientIdentity::Unidentified | ClientIdentity::Challenged(_) => {
                    // If this does not reach the client, it only sees the connection close.
                    let _ = connection.channel.send(&Refusal::ShuttingDown.encode());
                }
            }
        }
        self.keeper.opened.close()?;
        tracing::info!("stopped");
        Ok(())
    }
}
