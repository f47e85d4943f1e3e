//! Admission: accepts connections. Each is refused, or becomes a client or a session of a client.
//!
//! A client on this host states its purpose in its first message. A client that comes through a
//! device states it in its request for a connection.

use std::io;

use farside_config::{Secret, ServerConfig};
use farside_control::cluster::Id;
use farside_control::{
    ConnectRequest, ControlChannel, FabricKind, Purpose, REQUEST_BYTES_MAX, Refusal, Role, Token,
    Welcome, encode_reply,
};
use farside_fabric::rdma::RemoteRegion;
use farside_fabric::{Nanos, boot_time_ns};

use super::acceptor::{Acceptor, Arrival, ConnectionRequest};
use super::client_connection::{ClientConnection, ClientIdentity, DisconnectReason};
use super::connections::{Connections, LISTENER};
use super::metrics_answers::{REFUSALS, refusal_label};
use crate::clients::Clients;
use crate::cluster::{Membership, OwnView};
use crate::error::{ServerError, system};
use crate::metrics::LabelledCounts;
use crate::rate_limited_warning::{RateLimitedWarning, warn_rarely};
use crate::recovery::ServedRegion;

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
    secrets: SecretTokens,
    /// The fields of the welcome message that are the same for all clients.
    welcome: Welcome,
    /// The refusals, by their reason.
    pub(super) refusals: LabelledCounts,
    refused: RateLimitedWarning,
    crowded: RateLimitedWarning,
    failed: RateLimitedWarning,
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
            secrets: SecretTokens::new(config),
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
            "FS-023 closed a silent connection, the oldest of the user with most: {reason}"
        );
        Some((connection_number, reason))
    }

    /// Makes a client of a connection from this host that sent its connection request, or a
    /// connection for the map. Or refuses it.
    pub(super) fn admit_unidentified(
        &mut self,
        connection_number: u64,
        request: Result<ConnectRequest, Refusal>,
        cluster: &mut Option<Membership>,
        connections: &mut Connections,
    ) -> Result<(), DisconnectReason> {
        let user = connections
            .by_number
            .get_mut(&connection_number)
            .and_then(|connection| connection.user);
        let admitted = request.and_then(|request| {
            self.check(&request, cluster)?;
            match request.purpose {
                Purpose::Control => {
                    Ok(Some((request.role, self.admit(request.role, user, connections)?)))
                }
                Purpose::Map => Ok(None),
                // A session of a client on this host uses the mapped region, so it needs no
                // connection.
                Purpose::Data { .. } => Err(Refusal::Malformed { bytes: REQUEST_BYTES_MAX as u64 }),
            }
        });
        let Some(connection) = connections.by_number.get_mut(&connection_number) else {
            return Ok(());
        };
        let (role, (id, lease)) = match admitted {
            Ok(Some(admitted)) => admitted,
            Ok(None) => {
                let reply = encode_reply(&Ok(map_welcome(cluster)));
                connection.channel.send(&reply).map_err(DisconnectReason::Unreachable)?;
                connection.client = ClientIdentity::Map;
                return Ok(());
            }
            Err(refusal) => {
                // If the refusal does not reach the client, it only sees the connection close.
                let _ = connection.channel.send(&encode_reply(&Err(refusal)));
                return Err(DisconnectReason::Refused(refusal));
            }
        };
        let reply = encode_reply(&Ok(Welcome { client_id: id, lease, ..self.welcome }));
        let descriptor = self.acceptors.iter().find_map(|acceptor| acceptor.descriptor(role));
        let sent = match descriptor {
            Some(descriptor) => connection.channel.send_with_descriptor(&reply, descriptor),
            None => connection.channel.send(&reply),
        };
        if let Err(error) = sent {
            self.take_back(id);
            return Err(DisconnectReason::Unreachable(error));
        }
        tracing::info!(client = id, ?role, "a client connected");
        connection.client = ClientIdentity::Client { id, role, lease, session_secret: 0 };
        Ok(())
    }

    /// Refuses a request that came through a device, or makes a client, a session or a connection
    /// for the map of it. For a new control channel it returns the number of the connection, and
    /// the role of the client, if there is one.
    pub(super) fn admit_request(
        &mut self,
        incoming: Box<dyn ConnectionRequest>,
        acceptor: usize,
        cluster: &mut Option<Membership>,
        connections: &mut Connections,
    ) -> Option<(u64, Option<Role>)> {
        let bytes = incoming.connect_request();
        // RDMA-CM pads with zeros.
        let bytes = bytes.get(..REQUEST_BYTES_MAX).unwrap_or(bytes);
        let request = ConnectRequest::decode(bytes)
            .and_then(|request| self.check(&request, cluster).map(|()| request));
        let accepted = match request {
            Err(refusal) => Err((incoming, refusal)),
            Ok(_) if !incoming.reaches_region() => Err((incoming, Refusal::Device)),
            Ok(ConnectRequest { role, purpose, .. }) => match purpose {
                Purpose::Control => self.accept_client(incoming, role, acceptor, connections),
                Purpose::Map => {
                    let welcome = map_welcome(cluster);
                    let added =
                        self.add(incoming, &welcome, ClientIdentity::Map, acceptor, connections);
                    Ok(added.map(|connection_number| (connection_number, None)))
                }
                Purpose::Data { client_id, session_secret } => {
                    let session = (client_id, session_secret, role);
                    let accepted = self.accept_session(incoming, session, acceptor, connections);
                    accepted.map(|()| None)
                }
            },
        };
        accepted.unwrap_or_else(|(incoming, refusal)| {
            self.note_refusal(refusal);
            incoming.reject(&encode_reply(&Err(refusal)));
            None
        })
    }

    /// Checks the proof of the secret, and that the client knows of this cluster, or of none.
    fn check(
        &self,
        request: &ConnectRequest,
        cluster: &mut Option<Membership>,
    ) -> Result<(), Refusal> {
        self.secrets.check(request)?;
        match (cluster, request.purpose) {
            (Some(cluster), Purpose::Control) => cluster.check(request.view, boot_time_ns()),
            (None, Purpose::Map) => Err(Refusal::NoCluster),
            (None, Purpose::Control) if request.view.is_some() => Err(Refusal::NoCluster),
            _ => Ok(()),
        }
    }

    /// Welcomes clients of this view of a shard from now on.
    pub(super) fn serve_view(&mut self, cluster: Id, view: OwnView) {
        let OwnView { shard, number: view_number } = view;
        self.welcome = Welcome { cluster, shard, view_number, ..self.welcome };
    }

    fn accept_client(
        &mut self,
        incoming: Box<dyn ConnectionRequest>,
        role: Role,
        acceptor: usize,
        connections: &mut Connections,
    ) -> Result<Option<(u64, Option<Role>)>, Refused> {
        // RDMA-CM does not name the peer's user.
        let (id, lease) = match self.admit(role, None, connections) {
            Ok(admitted) => admitted,
            Err(refusal) => return Err((incoming, refusal)),
        };
        let added = match new_session_secret() {
            Ok(session_secret) => {
                let remote = incoming.remote(role);
                let welcome = self.welcome_with_key((id, lease), session_secret, remote);
                let client = ClientIdentity::Client { id, role, lease, session_secret };
                self.add(incoming, &welcome, client, acceptor, connections)
            }
            Err(error) => {
                warn_rarely!(self.failed, "FS-024 cannot serve a client just now: {error}");
                None
            }
        };
        match added {
            Some(_) => tracing::info!(client = id, ?role, "a client connected"),
            None => self.take_back(id),
        }
        Ok(added.map(|connection_number| (connection_number, Some(role))))
    }

    /// Accepts a request as a control channel. Returns the number of the connection; `None` after
    /// a failure of the system, which it logs.
    fn add(
        &mut self,
        incoming: Box<dyn ConnectionRequest>,
        welcome: &Welcome,
        client: ClientIdentity,
        acceptor: usize,
        connections: &mut Connections,
    ) -> Option<u64> {
        let accepted = incoming.accept_control(&encode_reply(&Ok(*welcome)));
        let added = accepted.and_then(|(channel, connection_id)| {
            let fabric = self.acceptors[acceptor].fabric();
            let mut connection = ClientConnection::new(channel, client, fabric);
            connection.id = Some((acceptor, connection_id));
            Ok(connections.add(connection)?)
        });
        if let Err(error) = &added {
            warn_rarely!(self.failed, "FS-024 cannot serve a client just now: {error}");
        }
        added.ok()
    }

    fn accept_session(
        &mut self,
        incoming: Box<dyn ConnectionRequest>,
        (client_id, session_secret, role): (u16, u64, Role),
        acceptor: usize,
        connections: &mut Connections,
    ) -> Result<(), Refused> {
        let shown = (client_id, role, session_secret);
        let of_acceptor =
            connections.iter().filter(|(_, connection)| connection.came_through(acceptor));
        let found =
            of_acceptor.into_iter().find_map(|(number, connection)| match connection.client {
                ClientIdentity::Client { id, role, lease, session_secret } => {
                    ((id, role, session_secret) == shown).then_some((number, lease))
                }
                _ => None,
            });
        let unknown = Refusal::UnknownClient { client: client_id.into() };
        let Some((connection_number, lease)) = found else { return Err((incoming, unknown)) };
        let remote = incoming.remote(role);
        let welcome = self.welcome_with_key((client_id, lease), session_secret, remote);
        let Some(client) = connections.by_number.get_mut(&connection_number) else {
            return Ok(());
        };
        if client.data.len() >= SESSIONS_MAX {
            return Err((incoming, Refusal::TooManySessions { sessions: SESSIONS_MAX as u64 }));
        }
        match incoming.accept_data(role, &welcome) {
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

    fn welcome_with_key(
        &self,
        (client_id, lease): (u16, u64),
        session_secret: u64,
        remote: RemoteRegion,
    ) -> Welcome {
        let RemoteRegion { base_address, rkeys, round_trip_min_ns, .. } = remote;
        Welcome {
            client_id,
            lease,
            base_address,
            rkeys,
            round_trip_min_ns,
            session_secret,
            ..self.welcome
        }
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
            // kv-bench, and clients with several addresses, ask first whether there is a cluster.
            | Refusal::NoCluster
            // In a cluster, a client with an old map gets the new one.
            | Refusal::Spare
            | Refusal::OtherView { .. }
            | Refusal::Unconfirmed => tracing::debug!("refused a client: {refusal}"),
            _ => warn_rarely!(self.refused, "FS-022 refused a client: {refusal}"),
        }
    }
}

/// The answer to a connection for the map.
fn map_welcome(cluster: &Option<Membership>) -> Welcome {
    cluster.as_ref().map(Membership::map_welcome).unwrap_or_default()
}

/// Returns a random number, which no other client can guess. It is never 0, which stands for no
/// session secret.
fn new_session_secret() -> io::Result<u64> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(random).max(1))
}

/// The hashes of the configured secrets, which clients must show. Without a secret every client is
/// admitted.
struct SecretTokens {
    full: Option<Token>,
    read_only: Option<Token>,
}

impl SecretTokens {
    fn new(config: &ServerConfig) -> Self {
        let token = |secret: &Secret| Token::of(&secret.0);
        Self {
            full: config.secret.as_ref().map(token),
            read_only: config.reader_secret.as_ref().map(token),
        }
    }

    /// Refuses a client whose token does not allow the role that it asks for.
    fn check(&self, request: &ConnectRequest) -> Result<(), Refusal> {
        let Some(full) = &self.full else { return Ok(()) };
        // Always compares both tokens. Otherwise the time would tell which of them matched.
        let may_read = self.read_only.is_some_and(|token| token.matches(&request.token));
        let is_admitted = full.matches(&request.token) | (may_read && request.role == Role::Reader);
        if is_admitted { Ok(()) } else { Err(Refusal::Credentials) }
    }
}
