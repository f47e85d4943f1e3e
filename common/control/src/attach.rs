//! Attaching to a server, over any fabric: the connection request, the control channel, and then
//! fabrics that reach the region. The client library, kv-cli's checker and kv-bench all use it.
//!
//! Each fabric has a file. [`ConnectOptions::attach`] chooses it by the server's address, and
//! returns the same type for all.

mod retry;
mod shm;
mod tcp;
#[cfg(feature = "verbs")]
mod verbs;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farside_fabric::rdma::{Options, VerbsError};
use farside_fabric::tcp::{OtherProtocol, TlsError, TlsFiles};
use farside_fabric::{AnyFabric, Nanos, RegionIndex, Trust, interrupt};
use farside_layout::LayoutError;
use retry::ATTEMPT_TIMEOUT_MIN;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::address::Address;
use crate::cluster::{ClusterMap, ShardView};
use crate::{
    Challenge, ConnectRequest, ControlChannel, ControlError, DataAccepted, Handshake, KnownView,
    MESSAGE_BYTES_MAX, Nonce, Proof, ProofMessage, Purpose, REQUEST_BYTES_MAX, Refusal, Request,
    Role, SecretKey, ServerMessage, SessionKey, Versions, Welcome,
};

pub use retry::{ANSWER_TIMEOUT, Attempts, CONNECT_TIMEOUT, Contact};

/// How to connect to a server.
#[derive(Clone)]
pub struct ConnectOptions {
    /// The server's address.
    pub address: Address,
    /// Further addresses of the same server. Each is tried if those before it do not answer.
    pub others: Vec<Address>,
    /// The client's role.
    pub role: Role,
    /// The view of the shard that the client wants. `None` if it knows of no cluster.
    pub view: Option<KnownView>,
    /// The key of the secret for this role.
    pub secret_key: SecretKey,
    /// How long connecting may take.
    pub timeout: Duration,
    /// How long [`ConnectOptions::connect`] waits for a server that accepts connections and does
    /// not answer yet, as one that still makes its region; `timeout` if that is longer.
    pub answer_timeout: Duration,
    /// How to use RDMA, for an `rdma://` address. Its `connect_timeout` is ignored.
    pub rdma: Options,
    /// The files for TLS, for a `tcp://` address. They are read when a connection is made.
    pub tls: TlsFiles,
    /// The time until which the client trusts the server.
    pub trust: Trust,
}

/// A connection to a server. It ends when the server process exits.
pub struct Attached {
    /// The address that answered.
    pub address: Address,
    /// The server's answer.
    pub welcome: Welcome,
    /// Makes fabrics for sessions.
    pub factory: Box<dyn FabricFactory>,
    /// The control channel.
    pub channel: Box<dyn ControlChannel>,
}

/// Makes fabrics that reach the region of a server, until its control channel ends.
pub trait FabricFactory: Send + Sync {
    /// Makes a fabric of this many lanes, for one session. Over RDMA it connects a queue pair.
    ///
    /// # Errors
    /// [`ConnectError::Unreachable`] if the server does not know this client any more.
    /// [`ConnectError::Rdma`], or `Unreachable` with [`Contact::Silent`], if the server does not
    /// answer; other sessions may still work.
    /// Other errors for failures of the system.
    fn fabric(&self, lanes: u16) -> Result<AnyFabric>;

    /// Adds the server's region to the regions that a session's fabric reaches. With `replaces` it
    /// takes the place of that region, whose connection or mapping is dropped: chains in flight
    /// there complete with an error.
    ///
    /// # Errors
    /// As [`FabricFactory::fabric`]; [`ConnectError::OtherFabric`] if `fabric` is of another kind.
    /// After an error `fabric` is unchanged.
    fn add_to(&self, fabric: &mut AnyFabric, replaces: Option<RegionIndex>) -> Result<RegionIndex>;
}

/// Why an attempt to attach failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No server answers, or it stopped answering: `contact` says which. A later attempt may
    /// succeed.
    #[error("{}", .contact.message(.server, *.tried))]
    Unreachable {
        /// The server's address.
        server: String,
        /// How far the last attempt came.
        contact: Contact,
        /// How long attempts were made.
        tried: Duration,
        /// The system's error, if it tells more.
        #[source]
        source: Option<Arc<io::Error>>,
    },
    /// The server refused this client.
    #[error("{server} refused the connection: {source}")]
    Refused {
        /// The server's address.
        server: String,
        /// The reason.
        #[source]
        source: Refusal,
    },
    /// The socket belongs to a user that is not trusted. Nothing was sent.
    #[error(
        "{server} is served by user {user}, which is not root, this user or the owner of the \
         socket's folder: let that user's server listen in a folder that only root or that \
         user could have made, such as /run/farside"
    )]
    Untrusted {
        /// The server's address.
        server: String,
        /// The number of the user.
        user: u32,
    },
    /// The server did not prove that it knows the client's secret, and admits this client without
    /// a proof. The client has proved nothing to it.
    #[error(
        "{server} does not prove that it knows this client's secret, so it may be another server: \
         check the address, and that the server has the same `secret`"
    )]
    Unproven {
        /// The server's address.
        server: String,
    },
    /// The system does not let this user connect.
    #[error(
        "this user may not connect to {server} ({source}): run the program as the server's user, \
         or set socket_group or socket_mode in the server's config file, and let both users enter \
         the folder"
    )]
    Forbidden {
        /// The server's address.
        server: String,
        /// The system's error.
        #[source]
        source: Arc<io::Error>,
    },
    /// A program answers at the address, and it is no server.
    #[error("{server} is no kv-server: the program there speaks {}", .protocol.advice())]
    NoServer {
        /// The address.
        server: String,
        /// What the program speaks.
        protocol: OtherProtocol,
    },
    /// The peer sent a wrong message: it is not a server, or not one of this version.
    #[error("the control channel broke: {0}")]
    Control(#[from] ControlError),
    /// The region that the server passed is damaged.
    #[error("the region is damaged: {0}; run `kv-cli verify`")]
    Layout(#[from] LayoutError),
    /// The session reaches its other servers over another fabric.
    #[error(
        "a session reaches all its servers over one fabric: all of them have shm:// addresses, or \
         all have tcp:// addresses, or all have rdma:// addresses"
    )]
    OtherFabric,
    /// As many of the addresses name one cluster as another.
    #[error(
        "{first} and {second} name two clusters: leave out those that are not of the one you want"
    )]
    SeveralClusters {
        /// Addresses of servers of one cluster.
        first: String,
        /// Addresses of servers of the other.
        second: String,
    },
    /// The connection cannot be encrypted, or one of the sides does not trust the other.
    #[error("cannot connect to {server}: {source}")]
    Tls {
        /// The server's address.
        server: String,
        /// The reason.
        #[source]
        source: TlsError,
    },
    /// A failure of RDMA.
    #[error(transparent)]
    Rdma(Arc<VerbsError>),
    /// A failure of the system.
    #[error("{doing}: {source}")]
    System {
        /// The step that failed.
        doing: &'static str,
        /// The system's error.
        #[source]
        source: Arc<io::Error>,
    },
}

impl From<VerbsError> for ConnectError {
    fn from(error: VerbsError) -> Self {
        Self::Rdma(Arc::new(error))
    }
}

impl ConnectError {
    /// Returns this error for a caller that has waited for this long.
    pub fn tried_for(mut self, waited: Duration) -> Self {
        if let Self::Unreachable { tried, .. } = &mut self {
            *tried = waited;
        }
        self
    }

    /// Returns this error, worded for a client that the server has answered before.
    pub fn after_an_answer(mut self) -> Self {
        if let Self::Unreachable { contact, source, .. } = &mut self {
            *contact = contact.after_an_answer();
            // "Connection refused" tells no more than "went away".
            *source = None;
        }
        self
    }
}

type Result<T> = std::result::Result<T, ConnectError>;

impl ConnectOptions {
    /// Makes one attempt to connect at each address, within this timeout.
    /// [`ConnectOptions::connect`] makes several.
    ///
    /// # Errors
    /// [`ConnectError`], of the last address. After [`ConnectError::Unreachable`] another attempt
    /// may succeed.
    pub fn attach(&self, timeout: Duration) -> Result<Attached> {
        self.at_each_address(timeout, Self::attach_at_address)
    }

    /// Makes an attempt at each address, until one is reached.
    fn at_each_address<T>(
        &self,
        timeout: Duration,
        attempt: impl Fn(&Self, Duration) -> Result<T>,
    ) -> Result<T> {
        let started = Instant::now();
        let share = timeout / (self.others.len() as u32 + 1);
        let mut result = attempt(self, share);
        for (at, address) in self.others.iter().enumerate() {
            // This host does not reach the address before, or cannot use its fabric.
            let Err(ConnectError::Unreachable { .. } | ConnectError::Rdma(_)) = result else {
                return result;
            };
            let left_addresses = (self.others.len() - at) as u32;
            let left = timeout.saturating_sub(started.elapsed()) / left_addresses;
            let options = Self { address: address.clone(), others: Vec::new(), ..self.clone() };
            result = attempt(&options, left.max(ATTEMPT_TIMEOUT_MIN));
        }
        result
    }

    fn attach_at_address(&self, timeout: Duration) -> Result<Attached> {
        match &self.address {
            Address::Shm(path) => shm::attach(self, path, timeout),
            Address::Tcp { .. } => tcp::attach(self, timeout),
            #[cfg(feature = "verbs")]
            Address::Rdma { .. } => verbs::attach(self, timeout),
            #[cfg(not(feature = "verbs"))]
            Address::Rdma { .. } => Err(VerbsError::NotBuilt.into()),
        }
    }

    /// Returns the options to connect to the server of a shard, at those of its addresses that this
    /// host can reach and that are `wanted`. `None` if there is none, or if the shard has no
    /// server.
    pub fn of_shard(
        &self,
        shard: u16,
        view: &ShardView,
        wanted: impl Fn(&Address) -> bool,
    ) -> Option<Self> {
        let copy = view.copies.first()?;
        let mut addresses = copy.reachable().filter(|address| wanted(address));
        let address = addresses.next()?.clone();
        let (others, view) = (addresses.cloned().collect(), view.number as u32);
        let view = Some(KnownView { shard, number: view });
        Some(Self { address, others, view, ..self.clone() })
    }

    /// Checks that a welcome is of a client, and for this fabric.
    fn check(&self, welcome: &Welcome) -> Result<()> {
        if welcome.is_for_map() {
            return Err(ControlError::Unknown { field: "client id", value: 0 }.into());
        }
        let (base_address, is_shared) = (welcome.base_address, welcome.is_shared());
        for (field, value, is_expected) in [
            ("base address", base_address, (base_address != 0) == self.address.is_rdma()),
            ("data nonce", is_shared.into(), is_shared == self.address.is_shm()),
        ] {
            if !is_expected {
                return Err(ControlError::Unknown { field, value }.into());
            }
        }
        Ok(())
    }

    /// Returns how late after its post a verb of this client can take effect: L in
    /// `docs/protocol.md`.
    pub fn lateness_max_ns(&self) -> Nanos {
        lateness_max_ns(&self.address, &self.rdma)
    }

    /// Returns a hello with a nonce of its own.
    fn request(&self, purpose: Purpose) -> Result<ConnectRequest> {
        let Self { role, view, .. } = *self;
        let nonce = Nonce::random().map_err(system("finding a random number"))?;
        Ok(ConnectRequest { versions: Versions::OWN, role, purpose, view, nonce })
    }

    fn unreachable(
        &self,
        contact: Contact,
        tried: Duration,
        source: Option<io::Error>,
    ) -> ConnectError {
        let (server, source) = (self.address.to_string(), source.map(Arc::new));
        ConnectError::Unreachable { server, contact, tried, source }
    }
}

/// Returns how late after its post a verb can take effect at this address: L in `docs/protocol.md`.
pub fn lateness_max_ns(address: &Address, rdma: &Options) -> Nanos {
    match address {
        Address::Shm(_) => farside_fabric::shm::LATENESS_MAX_NS,
        Address::Tcp { .. } => farside_fabric::tcp::LATENESS_MAX_NS,
        Address::Rdma { .. } => rdma.lateness_max_ns(),
    }
}

fn refused(server: &str, source: Refusal) -> ConnectError {
    let server = server.to_owned();
    match source {
        // A later attempt may succeed, at the next server or with a new control connection.
        Refusal::ShuttingDown | Refusal::UnknownClient { .. } | Refusal::OldNonce { .. } => {
            unreachable_untimed(server, Contact::Lost, io::Error::other(source))
        }
        source => ConnectError::Refused { server, source },
    }
}

/// A [`ConnectError::Unreachable`] in which the caller still has to set how long it tried.
fn unreachable_untimed(server: String, contact: Contact, source: io::Error) -> ConnectError {
    let (tried, source) = (Duration::ZERO, Some(Arc::new(source)));
    ConnectError::Unreachable { server, contact, tried, source }
}

fn system(doing: &'static str) -> impl FnOnce(io::Error) -> ConnectError {
    move |source| ConnectError::System { doing, source: Arc::new(source) }
}

/// A map, the channel through which it came, and the server's shard with the number of its view, if
/// it serves one.
pub type FetchedMap = (ClusterMap, Box<dyn ControlChannel>, Option<(u16, u64)>);

impl ConnectOptions {
    /// Makes one attempt to connect at each address, within this timeout, and fetches the map of
    /// the server's cluster. The server sends the map again through the channel when it changes.
    ///
    /// # Errors
    /// [`ConnectError`], of the last address; `Refused` with
    /// [`Refusal::NoCluster`] if the server is a part of no cluster.
    pub fn fetch_map(&self, timeout: Duration) -> Result<(ClusterMap, Box<dyn ControlChannel>)> {
        self.fetch_map_and_view(timeout).map(|(map, channel, _)| (map, channel))
    }

    /// As [`ConnectOptions::fetch_map`]. Also returns the view that the server serves, and its
    /// shard.
    ///
    /// # Errors
    /// Those of [`ConnectOptions::fetch_map`].
    pub fn fetch_map_and_view(&self, timeout: Duration) -> Result<FetchedMap> {
        self.at_each_address(timeout, Self::fetch_map_at_address)
    }

    fn fetch_map_at_address(&self, timeout: Duration) -> Result<FetchedMap> {
        let started = Instant::now();
        let (mut channel, welcome) = self.map_channel(timeout)?;
        if !welcome.is_for_map() {
            let (field, value) = ("client id", welcome.client_id.into());
            return Err(ControlError::Unknown { field, value }.into());
        }
        let mut request = Vec::new();
        Request::Map.encode(&mut request);
        self.send(&mut *channel, &request, started)?;
        let answer = self.receive(&mut *channel, (started, timeout))?;
        match ServerMessage::decode(&answer)? {
            ServerMessage::Map { map } => {
                let view = (welcome.shard, welcome.view_number);
                let own = (welcome.view_number > 0).then_some(view);
                Ok((ClusterMap::decode(&map)?, channel, own))
            }
            _ => Err(ControlError::NotFarside.into()),
        }
    }

    /// Connects for the map. Returns the channel and the server's welcome.
    fn map_channel(&self, timeout: Duration) -> Result<(Box<dyn ControlChannel>, Welcome)> {
        match &self.address {
            Address::Shm(path) => shm::map_channel(self, path, timeout),
            Address::Tcp { .. } => tcp::map_channel(self, timeout),
            #[cfg(feature = "verbs")]
            Address::Rdma { .. } => verbs::map_channel(self, timeout),
            #[cfg(not(feature = "verbs"))]
            Address::Rdma { .. } => Err(farside_fabric::rdma::VerbsError::NotBuilt.into()),
        }
    }
}

/// Limit on the hellos for one connection of a session. After the first one the server may have
/// replaced its nonce. The second one comes in time, unless the client or the server stood still.
const DATA_HELLOS_MAX: usize = 3;

impl ConnectOptions {
    /// Takes the server's challenge, and proves that the client knows the secret if the server has
    /// proved it. `exchange` sends a message and returns the answer. Returns the welcome, and the
    /// key for the client's sessions.
    fn prove(
        &self,
        request: &ConnectRequest,
        challenge: &[u8],
        exchange: impl FnOnce(&[u8]) -> Result<Vec<u8>>,
    ) -> Result<(Welcome, SessionKey)> {
        let refused = |refusal| refused(&self.address.to_string(), refusal);
        let Challenge { version, nonce, proofs } =
            Challenge::decode(challenge)?.map_err(refused)?;
        let (request, fabric) = (*request, self.address.fabric());
        let handshake = Handshake { request, fabric, version, server_nonce: nonce };
        let key = &self.secret_key;
        let is_proven = proofs.iter().any(|proof| handshake.is_of_server(key, *proof));
        // An imposter gets no proof. A real server refuses a message without one, says why, and
        // logs that a client has a wrong secret.
        let proof = if is_proven { handshake.client_proof(key) } else { Proof::NONE };
        let answer = exchange(&ProofMessage(proof).encode())?;
        let welcome = Welcome::decode(&answer)?.map_err(refused)?;
        if !is_proven {
            return Err(ConnectError::Unproven { server: self.address.to_string() });
        }
        Ok((welcome, handshake.session_key(key)))
    }

    /// As [`ConnectOptions::prove`], over a channel. The whole attempt began at `started`.
    fn prove_over(
        &self,
        channel: &mut dyn ControlChannel,
        (request, challenge): (&ConnectRequest, &[u8]),
        (started, timeout): (Instant, Duration),
    ) -> Result<(Welcome, SessionKey)> {
        self.prove(request, challenge, |proof| {
            self.send(channel, proof, started)?;
            self.receive(channel, (started, timeout))
        })
    }

    /// Sends a message of an attempt that began at this time.
    fn send(
        &self,
        channel: &mut dyn ControlChannel,
        message: &[u8],
        started: Instant,
    ) -> Result<()> {
        let lost = |error| self.unreachable(Contact::HungUp, started.elapsed(), Some(error));
        channel.send(message).map_err(lost)
    }

    /// Waits for a message, until this time after the attempt began.
    fn receive(
        &self,
        channel: &mut dyn ControlChannel,
        (started, timeout): (Instant, Duration),
    ) -> Result<Vec<u8>> {
        let lost = |source| self.unreachable(Contact::HungUp, started.elapsed(), source);
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        loop {
            match channel.receive(&mut buffer).map_err(|error| lost(Some(error)))? {
                Some(0) => return Err(lost(None)),
                Some(bytes) => {
                    buffer.truncate(bytes);
                    return Ok(buffer);
                }
                None => {}
            }
            let left = timeout.checked_sub(started.elapsed()).filter(|_| !interrupt::gives_up());
            let step = left.and_then(|left| Timespec::try_from(interrupt::step(left)).ok());
            let Some(step) = step else {
                return Err(self.unreachable(Contact::Silent, started.elapsed(), None));
            };
            match poll(&mut [PollFd::new(&channel, PollFlags::IN)], Some(&step)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(system("waiting for the server")(error.into())),
            }
        }
    }
}

/// What the connections of a client's sessions need, to prove whose they are.
struct DataProofs {
    options: ConnectOptions,
    client_id: u16,
    key: SessionKey,
    /// The server's last nonce.
    nonce: Mutex<Nonce>,
}

impl DataProofs {
    fn new(options: &ConnectOptions, welcome: &Welcome, key: SessionKey) -> Self {
        let (client_id, nonce) = (welcome.client_id, Mutex::new(welcome.data_nonce));
        Self { options: options.clone(), client_id, key, nonce }
    }

    /// Makes a session's connection. `connect` sends a hello, and returns the link and the answer.
    /// Without a link the answer is a refusal.
    fn connect<L>(
        &self,
        connect: impl Fn(&[u8; REQUEST_BYTES_MAX]) -> Result<(L, Vec<u8>)>,
    ) -> Result<L> {
        let server = self.options.address.to_string();
        let client_id = self.client_id;
        for _ in 0..DATA_HELLOS_MAX {
            let server_nonce = *self.nonce();
            let unproven = Purpose::Data { client_id, proof: Proof::NONE };
            let request = self.options.request(unproven)?;
            let proof = self.key.data_proof(&request, server_nonce);
            let purpose = Purpose::Data { client_id, proof };
            let (link, answer) = connect(&ConnectRequest { purpose, ..request }.encode())?;
            match DataAccepted::decode(&answer)? {
                Ok(DataAccepted { proof })
                    if self.key.is_data_answer(&request, server_nonce, proof) =>
                {
                    return Ok(link);
                }
                Ok(_) => return Err(ConnectError::Unproven { server }),
                Err(Refusal::OldNonce { nonce }) => *self.nonce() = nonce,
                Err(refusal) => return Err(refused(&server, refusal)),
            }
        }
        let nonce = *self.nonce();
        Err(refused(&server, Refusal::OldNonce { nonce }))
    }

    fn nonce(&self) -> std::sync::MutexGuard<'_, Nonce> {
        // A nonce is never half written.
        self.nonce.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(all(test, not(feature = "verbs")))]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_rdma_refuses_an_rdma_address() {
        let options = ConnectOptions {
            address: "rdma://127.0.0.1:7400".parse().unwrap(),
            others: Vec::new(),
            role: Role::Writer,
            view: None,
            secret_key: SecretKey::NONE,
            timeout: Duration::from_secs(1),
            answer_timeout: Duration::from_secs(1),
            rdma: Options::default(),
            tls: TlsFiles::default(),
            trust: farside_fabric::Trust::forever(),
        };
        let Err(error) = options.connect() else { panic!("connected without RDMA") };
        let ConnectError::Rdma(cause) = &error else { panic!("{error}") };
        assert!(matches!(**cause, VerbsError::NotBuilt), "{error}");
    }
}
