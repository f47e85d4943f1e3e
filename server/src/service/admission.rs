//! Admission: accepts connections. Each is refused, or becomes a client or a session of a client.
//!
//! A client on this host states its purpose in its first message. A client that comes through a
//! device states it in its request for a connection. The server answers with a challenge. Only a
//! client that answers it with a proof of the secret learns anything about the region or the
//! cluster, and gets an id.
//!
//! Each client has a descriptor of the server, and over TCP and RDMA each session has another one,
//! so the number of clients alone limits nothing. Their shares are:
//!
//! | part of the descriptors for clients | for |
//! |---|---|
//! | an eighth | clients without sessions, such as the operator's `kv-cli clients kick` |
//! | another eighth | writers, and their sessions |
//! | the rest | readers as well |

use std::collections::VecDeque;
use std::io;

use farside_config::ServerConfig;
use farside_control::cluster::Id;
use farside_control::{
    ConnectRequest, ControlChannel, DataAccepted, FabricKind, Handshake, Nonce, Proof, Purpose,
    REQUEST_BYTES_MAX, Refusal, Role, SessionKey, Welcome,
};
use farside_fabric::rdma::RemoteRegion;
use farside_fabric::{Nanos, boot_time_ns};
use rustix::process::{Resource, getrlimit};

use super::acceptor::{AcceptError, Acceptor, Arrival, ConnectionRequest};
use super::client_connection::{
    CLIENTLESS_MAX, ClientConnection, ClientIdentity, DisconnectReason, PROOF_NS_MAX,
};
use super::clients::Clients;
use super::connections::{Connections, LISTENER};
use super::metrics_answers::{REFUSALS, refusal_label};
use super::proofs::{SecretKeys, SessionGate};
use crate::cluster::{Membership, OwnView};
use crate::error::{ServerError, system};
use crate::metrics::LabelledCounts;
use crate::rate_limited_warning::{RateLimitedWarning, log_rarely, warn_rarely};
use crate::region::served::ServedRegion;

/// Limit on the sessions of one client. A request for another is refused.
const SESSIONS_MAX: usize = 4096;
/// How long the server accepts no connection after the system refused it a descriptor.
const ACCEPT_PAUSE_NS: Nanos = 100_000_000;
/// An eighth of the client ids is reserved for writers and for other users: all readers together,
/// and each user, get at most the rest.
const RESERVED_DIVISOR: u32 = 8;

/// A request that is refused, and the reason.
type Refused = (Box<dyn ConnectionRequest>, Refusal);

/// Accepts connections and admits clients.
pub(super) struct Admission {
    pub(super) acceptors: Vec<Box<dyn Acceptor>>,
    /// The acceptors that pause after a failure, and when each goes on.
    paused: Vec<(usize, Nanos)>,
    pub(super) clients: Clients,
    secrets: SecretKeys,
    /// The connections that have to prove something, or to hang up, and when each is closed if it
    /// does not. They are as many as connections without a client may be.
    awaited: VecDeque<(u64, Nanos)>,
    /// The fields of the welcome message that are the same for all clients.
    welcome: Welcome,
    /// The refusals, by their reason.
    pub(super) refusals: LabelledCounts,
    refused: RateLimitedWarning,
    crowded: RateLimitedWarning,
    failed: RateLimitedWarning,
    connected: RateLimitedWarning,
    descriptors: Descriptors,
}

impl Admission {
    pub(super) fn new(
        config: &ServerConfig,
        acceptors: Vec<Box<dyn Acceptor>>,
        opened: &ServedRegion,
    ) -> Self {
        let ServedRegion { region, geometry, incarnation, format, .. } = opened;
        Self {
            acceptors,
            paused: Vec::new(),
            clients: Clients::new(region, *geometry, *incarnation, config.clients_max),
            secrets: SecretKeys::new(config),
            awaited: VecDeque::new(),
            welcome: Welcome {
                region_id: format.region_id,
                incarnation: *incarnation,
                region_bytes: format.region_bytes,
                ..Default::default()
            },
            refusals: LabelledCounts::new(REFUSALS),
            refused: RateLimitedWarning::default(),
            crowded: RateLimitedWarning::default(),
            failed: RateLimitedWarning::default(),
            connected: RateLimitedWarning::of_ordinary_event(),
            descriptors: Descriptors::count(),
        }
    }

    /// Whether the hosts of clients have to be probed.
    pub(super) fn needs_probes(&self) -> bool {
        self.acceptors.iter().any(|acceptor| acceptor.needs_probes())
    }

    /// Returns the next arrival of an acceptor; `None` if no arrival waits, or if the system is out
    /// of descriptors. In the second case the acceptor pauses for `ACCEPT_PAUSE_NS`.
    pub(super) fn next_arrival(
        &mut self,
        acceptor: usize,
        connections: &Connections,
    ) -> Option<Arrival> {
        match self.acceptors[acceptor].next() {
            Ok(arrival) => arrival,
            Err(error) => {
                warn_rarely!(self.failed, "FS-025 cannot accept a client just now: {error}");
                if connections.unwatch(&self.acceptors[acceptor]).is_ok() {
                    self.paused.push((acceptor, boot_time_ns() + ACCEPT_PAUSE_NS));
                }
                None
            }
        }
    }

    /// When to call [`Admission::resume`]; `None` while no acceptor pauses.
    pub(super) fn accept_again_at(&self) -> Option<Nanos> {
        self.paused.iter().map(|(_, at)| *at).min()
    }

    /// Lets the acceptors whose pause has passed go on.
    pub(super) fn resume(
        &mut self,
        connections: &Connections,
        now: Nanos,
    ) -> Result<(), ServerError> {
        while let Some(first) = self.paused.iter().position(|(_, at)| *at <= now) {
            let (acceptor, _) = self.paused.swap_remove(first);
            self.watch(acceptor, connections)?;
        }
        Ok(())
    }

    /// Adds all listeners to the descriptors that the serving thread polls.
    pub(super) fn watch_all(&self, connections: &Connections) -> Result<(), ServerError> {
        (0..self.acceptors.len()).try_for_each(|acceptor| self.watch(acceptor, connections))
    }

    fn watch(&self, acceptor: usize, connections: &Connections) -> Result<(), ServerError> {
        let watched = connections.watch(&self.acceptors[acceptor], LISTENER);
        watched.map_err(system("watch for clients"))
    }

    /// Adds a connection that has not identified itself.
    pub(super) fn add_unidentified(
        &mut self,
        connection: io::Result<(Box<dyn ControlChannel>, u32)>,
        connections: &mut Connections,
    ) {
        let added = connection.and_then(|(channel, user)| {
            let mut connection =
                ClientConnection::new(channel, ClientIdentity::Unidentified, FabricKind::Shm);
            connection.user = Some(user);
            connections.add(connection)
        });
        if let Err(error) = added {
            warn_rarely!(self.failed, "FS-024 cannot serve a client just now: {error}");
        }
    }

    /// Returns the number of the connection to close if too many connections have no client, and
    /// the reason.
    pub(super) fn surplus(&mut self, connections: &Connections) -> Option<(u64, DisconnectReason)> {
        let (connection_number, reason) = connections.surplus()?;
        warn_rarely!(
            self.crowded,
            "FS-023 closed a silent connection, the oldest of the user or host with most: {reason}"
        );
        Some((connection_number, reason))
    }

    /// Challenges a connection from this host that sent its hello, or refuses it.
    pub(super) fn challenge_unidentified(
        &mut self,
        connection_number: u64,
        request: Result<ConnectRequest, Refusal>,
        connections: &mut Connections,
    ) -> Result<(), DisconnectReason> {
        // A session of a client on this host uses the mapped region, so it needs no connection.
        let malformed = Refusal::Malformed { bytes: REQUEST_BYTES_MAX as u64 };
        let request = request.and_then(|request| match request.purpose {
            Purpose::Control | Purpose::Map => Ok(request),
            Purpose::Data { .. } => Err(malformed),
        });
        let Some(connection) = connections.by_number.get_mut(&connection_number) else {
            return Ok(());
        };
        let challenged = request.map(|request| self.challenge(request, connection.fabric));
        let (handshake, challenge) = match challenged {
            Ok(challenged) => challenged.map_err(DisconnectReason::Unreachable)?,
            Err(refusal) => return self.refuse(connection_number, refusal, connections),
        };
        connection.channel.send(&challenge).map_err(DisconnectReason::Unreachable)?;
        connection.client = ClientIdentity::Challenged(handshake);
        self.expect(connection_number);
        Ok(())
    }

    /// Returns the server's side of a handshake, and the encoded challenge.
    fn challenge(
        &self,
        request: ConnectRequest,
        fabric: FabricKind,
    ) -> io::Result<(Handshake, Vec<u8>)> {
        let handshake = Handshake::answering(request, fabric, Nonce::random()?);
        Ok((handshake, self.secrets.challenge(&handshake).encode()))
    }

    /// Makes a client, or a connection for the map, of a connection that answered its challenge
    /// with this proof. Or refuses it.
    pub(super) fn admit_proven(
        &mut self,
        connection_number: u64,
        proof: Proof,
        cluster: &mut Option<Membership>,
        connections: &mut Connections,
    ) -> Result<(), DisconnectReason> {
        self.settle(connection_number);
        let found = connections.by_number.get(&connection_number);
        let Some((ClientIdentity::Challenged(handshake), user)) =
            found.map(|connection| (connection.client, connection.user))
        else {
            return Ok(());
        };
        let request = &handshake.request;
        let admitted = self.secrets.check(&handshake, proof).and_then(|key| {
            check_cluster(request, cluster)?;
            match request.purpose {
                Purpose::Map => Ok(None),
                _ => Ok(Some((self.admit(request.role, user, connections)?, key))),
            }
        });
        match admitted {
            Err(refusal) => self.refuse(connection_number, refusal, connections),
            Ok(client) => {
                let Some(connection) = connections.by_number.get_mut(&connection_number) else {
                    return Ok(());
                };
                match client {
                    Some((client, key)) => self.welcome(connection, request.role, client, key),
                    None => {
                        let welcome = map_welcome(cluster).encode();
                        connection.client = ClientIdentity::Map { role: request.role };
                        connection.channel.send(&welcome).map_err(DisconnectReason::Unreachable)
                    }
                }
            }
        }
    }

    /// Welcomes an admitted client. Takes its id back if the welcome cannot be sent.
    fn welcome(
        &mut self,
        connection: &mut ClientConnection,
        role: Role,
        (id, lease): (u16, u64),
        key: SessionKey,
    ) -> Result<(), DisconnectReason> {
        match self.send_welcome(connection, role, (id, lease), key) {
            Ok(gate) => {
                connection.gate = gate;
                connection.client = ClientIdentity::Client { id, role, lease };
                log_rarely!(info, self.connected, client = id, ?role, "a client connected");
                Ok(())
            }
            Err(error) => {
                self.take_back(id);
                Err(DisconnectReason::Unreachable(error))
            }
        }
    }

    /// Returns the gate for the client's sessions, if they make connections.
    fn send_welcome(
        &self,
        connection: &mut ClientConnection,
        role: Role,
        (client_id, lease): (u16, u64),
        key: SessionKey,
    ) -> io::Result<Option<SessionGate>> {
        let welcome = Welcome { client_id, lease, ..self.welcome };
        let channel = &mut connection.channel;
        let remote = connection.id.and_then(|(acceptor, _)| self.acceptors[acceptor].remote(role));
        let Some(RemoteRegion { base_address, rkeys, round_trip_min_ns, .. }) = remote else {
            let descriptor = self.acceptors.iter().find_map(|acceptor| acceptor.descriptor(role));
            match descriptor {
                Some(region) => channel.send_with_descriptor(&welcome.encode(), region)?,
                None => channel.send(&welcome.encode())?,
            }
            return Ok(None);
        };
        let gate = SessionGate::new(key, boot_time_ns())?;
        let data_nonce = gate.nonce();
        let welcome = Welcome { base_address, rkeys, round_trip_min_ns, data_nonce, ..welcome };
        channel.send(&welcome.encode())?;
        Ok(Some(gate))
    }

    /// Refuses a connection that was accepted. A channel that cannot close one direction stays
    /// until the client has read why, and hangs up.
    fn refuse(
        &mut self,
        connection_number: u64,
        refusal: Refusal,
        connections: &mut Connections,
    ) -> Result<(), DisconnectReason> {
        let Some(connection) = connections.by_number.get_mut(&connection_number) else {
            return Ok(());
        };
        // If the refusal does not reach the client, it only sees the connection close.
        let sent = connection.channel.send(&refusal.encode());
        if sent.is_err() || connection.channel.hang_up() {
            return Err(DisconnectReason::Refused(refusal));
        }
        self.note_refusal(refusal);
        connection.client = ClientIdentity::Leaving;
        self.expect(connection_number);
        Ok(())
    }

    /// Has a connection closed if it does not do its part in time.
    pub(super) fn expect(&mut self, connection_number: u64) {
        self.awaited.push_back((connection_number, boot_time_ns() + PROOF_NS_MAX));
    }

    /// Notes that a connection has done its part, or has ended.
    pub(super) fn settle(&mut self, connection_number: u64) {
        self.awaited.retain(|(awaited, _)| *awaited != connection_number);
    }

    /// When [`Admission::overdue`] may return a connection; `None` if it is not going to.
    pub(super) fn overdue_at(&self) -> Option<Nanos> {
        self.awaited.front().map(|(_, until)| *until)
    }

    /// Takes a connection that did not do its part in time.
    pub(super) fn overdue(&mut self, now: Nanos) -> Option<u64> {
        self.awaited.pop_front_if(|(_, until)| *until <= now).map(|(number, _)| number)
    }

    /// Refuses a request that came over a network, or challenges it, or makes a session's
    /// connection of it. Returns the number of a new control connection.
    pub(super) fn admit_request(
        &mut self,
        incoming: Box<dyn ConnectionRequest>,
        acceptor: usize,
        connections: &mut Connections,
    ) -> Option<u64> {
        let bytes = incoming.connect_request();
        // RDMA-CM pads with zeros.
        let bytes = bytes.get(..REQUEST_BYTES_MAX).unwrap_or(bytes);
        let accepted = match ConnectRequest::decode(bytes) {
            Err(refusal) => Err((incoming, refusal)),
            Ok(_) if !incoming.reaches_region() => Err((incoming, Refusal::Device)),
            Ok(request) => match request.purpose {
                Purpose::Control | Purpose::Map => {
                    Ok(self.accept_control(incoming, request, acceptor, connections))
                }
                Purpose::Data { client_id, proof } => {
                    let session = (client_id, proof);
                    let accepted =
                        self.accept_session(incoming, (&request, session), acceptor, connections);
                    accepted.map(|()| None)
                }
            },
        };
        accepted.unwrap_or_else(|(incoming, refusal)| {
            self.note_refusal(refusal);
            incoming.reject(&refusal.encode());
            None
        })
    }

    /// Welcomes clients of this view of a shard from now on.
    pub(super) fn serve_view(&mut self, cluster: Id, view: OwnView) {
        let OwnView { shard, number: view_number } = view;
        self.welcome = Welcome { cluster, shard, view_number, ..self.welcome };
    }

    /// Accepts a request as a control connection, with a challenge. Returns the number of the
    /// connection; `None` after a failure of the system, which it logs.
    fn accept_control(
        &mut self,
        incoming: Box<dyn ConnectionRequest>,
        request: ConnectRequest,
        acceptor: usize,
        connections: &mut Connections,
    ) -> Option<u64> {
        let (fabric, host) = (self.acceptors[acceptor].fabric(), incoming.host());
        let accept = || {
            let (handshake, challenge) = self.challenge(request, fabric)?;
            let (channel, id) = incoming.accept_control(&challenge)?;
            let client = ClientIdentity::Challenged(handshake);
            let mut connection = ClientConnection::new(channel, client, fabric);
            (connection.id, connection.host) = (Some((acceptor, id)), host);
            Ok::<_, AcceptError>(connections.add(connection)?)
        };
        match accept() {
            Ok(connection_number) => {
                self.expect(connection_number);
                Some(connection_number)
            }
            Err(error) => {
                warn_rarely!(self.failed, "FS-024 cannot serve a client just now: {error}");
                None
            }
        }
    }

    fn accept_session(
        &mut self,
        incoming: Box<dyn ConnectionRequest>,
        (request, (client_id, proof)): (&ConnectRequest, (u16, Proof)),
        acceptor: usize,
        connections: &mut Connections,
    ) -> Result<(), Refused> {
        let role = request.role;
        if let Err(refusal) = self.descriptors.check_session(role, connections) {
            return Err((incoming, refusal));
        }
        let of_acceptor =
            connections.by_number.values_mut().filter(|client| client.came_through(acceptor));
        let found = of_acceptor.into_iter().find_map(|client| match client.client {
            ClientIdentity::Client { id, role, lease } => {
                ((id, role) == (client_id, request.role)).then_some((client, lease))
            }
            _ => None,
        });
        let unknown = Refusal::UnknownClient { client: client_id.into() };
        let Some((client, lease)) = found else { return Err((incoming, unknown)) };
        let Some(gate) = &mut client.gate else { return Err((incoming, unknown)) };
        let accepted = match gate.check(request, proof, boot_time_ns()) {
            Ok(Err(refusal)) => return Err((incoming, refusal)),
            Ok(Ok(_)) if client.data.len() >= SESSIONS_MAX => {
                return Err((incoming, Refusal::TooManySessions { sessions: SESSIONS_MAX as u64 }));
            }
            Ok(Ok(proof)) => {
                let answer = DataAccepted { proof }.encode();
                incoming.accept_data(role, (client_id, lease), &answer)
            }
            Err(error) => Err(error.into()),
        };
        match accepted {
            Ok(connection) => client.data.push(connection),
            Err(error) => {
                warn_rarely!(
                    self.failed,
                    client = client_id,
                    "FS-024 cannot serve a session: {error}"
                );
            }
        }
        Ok(())
    }

    /// Returns an id and a lease for one more client in this role, of this user. The limit for a
    /// user applies neither to root nor to the server's own user, because both can stop the server
    /// anyway.
    fn admit(
        &mut self,
        role: Role,
        user: Option<u32>,
        connections: &Connections,
    ) -> Result<(u16, u64), Refusal> {
        self.descriptors.check_client(role, connections)?;
        let clients_max = self.clients.clients_max;
        let unreserved = (clients_max - clients_max / RESERVED_DIVISOR) as usize;
        let clients = || {
            connections.iter().map(|(_, connection)| connection).filter(|client| client.is_client())
        };
        if role == Role::Reader {
            let readers = clients().filter(|client| client.role() == Some(Role::Reader)).count();
            if readers >= unreserved {
                return Err(Refusal::FullOfReaders { readers: readers as u64 });
            }
        }
        let server_user = rustix::process::geteuid().as_raw();
        if let Some(user) = user.filter(|user| *user != 0 && *user != server_user) {
            let count = clients().filter(|client| client.user == Some(user)).count();
            if count >= unreserved {
                return Err(Refusal::FullForUser { clients: count as u64 });
            }
        }
        self.clients.admit()
    }

    /// Frees the id of an admitted client whose welcome could not be sent. The id needs no sweep,
    /// because the client has stored nothing.
    fn take_back(&mut self, client: u16) {
        if self.clients.fence(client).is_ok() {
            self.clients.forget(client);
        }
    }

    /// Counts a refusal and logs it: as a warning, or for debugging only.
    pub(super) fn note_refusal(&mut self, refusal: Refusal) {
        self.refusals.count(refusal_label(&refusal));
        match refusal {
            // Routine: a client whose session comes after its fence reconnects.
            Refusal::UnknownClient { .. }
            // The session repeats its hello.
            | Refusal::OldNonce { .. }
            // Clients ask for the map first, or find out that they have to.
            | Refusal::NoCluster
            | Refusal::Clustered
            // In a cluster, a client with an old map gets the new one.
            | Refusal::Spare
            | Refusal::OtherView { .. }
            | Refusal::Unconfirmed => tracing::debug!("refused a client: {refusal}"),
            _ => {
                warn_rarely!(self.refused, "FS-022 refused a client: {refusal}");
            }
        }
    }
}

/// The answer to a connection for the map.
fn map_welcome(cluster: &Option<Membership>) -> Welcome {
    cluster.as_ref().map(Membership::map_welcome).unwrap_or_default()
}

/// Checks that a client knows of this cluster, or of none.
fn check_cluster(
    request: &ConnectRequest,
    cluster: &mut Option<Membership>,
) -> Result<(), Refusal> {
    match (cluster, request.purpose) {
        (Some(cluster), Purpose::Control) => cluster.check(request.view, boot_time_ns()),
        (None, Purpose::Map) => Err(Refusal::NoCluster),
        (None, Purpose::Control) if request.view.is_some() => Err(Refusal::NoCluster),
        _ => Ok(()),
    }
}

/// Limit on the connections over TCP that have not identified themselves.
const GREETING_MAX: u64 = farside_fabric::tcp::GREETING_MAX as u64;
/// Strangers get this part of the descriptors at most.
const STRANGERS_DIVISOR: u64 = 4;
/// This part is for writers, and as much is for clients without sessions.
const DESCRIPTORS_RESERVED_DIVISOR: u64 = 8;

/// The descriptors that the server has beside its clients.
pub(super) struct Descriptors {
    own: u64,
}

/// How many descriptors are used, or may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shares {
    /// Those of readers and their sessions.
    readers: u64,
    /// Those of all clients and sessions.
    all: u64,
}

impl Descriptors {
    /// Counts those that are open now.
    pub(super) fn count() -> Self {
        let open = std::fs::read_dir("/proc/self/fd");
        Self { own: open.map_or(0, |all| all.count() as u64) }
    }

    /// Refuses another client in this role if too few descriptors are left.
    pub(super) fn check_client(
        &self,
        role: Role,
        connections: &Connections,
    ) -> Result<(), Refusal> {
        let (used, max) = (used(connections), self.max());
        refuse_if(role == Role::Reader && used.readers >= max.readers, used)
    }

    /// Refuses another session of a client in this role if too few descriptors are left.
    pub(super) fn check_session(
        &self,
        role: Role,
        connections: &Connections,
    ) -> Result<(), Refusal> {
        let (used, max) = (used(connections), self.max());
        let is_reader = role == Role::Reader;
        refuse_if(used.all >= max.all || is_reader && used.readers >= max.readers, used)
    }

    /// The limits. The system's may change while the server runs.
    fn max(&self) -> Shares {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let free = limit.saturating_sub(self.own);
        let strangers = GREETING_MAX + CLIENTLESS_MAX as u64;
        let clients = free - strangers.min(free / STRANGERS_DIVISOR);
        let reserved = clients / DESCRIPTORS_RESERVED_DIVISOR;
        Shares { readers: clients - 2 * reserved, all: clients - reserved }
    }
}

fn refuse_if(is_refused: bool, used: Shares) -> Result<(), Refusal> {
    match is_refused {
        true => Err(Refusal::OutOfDescriptors { connections: used.all }),
        false => Ok(()),
    }
}

fn used(connections: &Connections) -> Shares {
    let of = |connection: &ClientConnection| 1 + connection.data.len() as u64;
    let mut used = Shares { readers: 0, all: 0 };
    for (_, connection) in connections.iter() {
        used.all += of(connection);
        if connection.role() == Some(Role::Reader) {
            used.readers += of(connection);
        }
    }
    used
}
