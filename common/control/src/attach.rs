//! Attaching to a server, over either fabric: the hello, the control channel, and from then on
//! fabrics that reach the region. The client library, kv-cli's checker and kv-bench all do it here.

mod retry;

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::address::Address;
use crate::trust;
use crate::{
    ConnectRequest, ControlChannel, ControlError, MESSAGE_BYTES_MAX, Purpose, REQUEST_BYTES_MAX,
    Refusal, Role, Token, Welcome, decode_reply,
};
use farside_fabric::shm::{self, Lease, Region, ShmFabric};
use farside_fabric::verbs::{
    Options, RemoteRegion, VerbsError, VerbsFabric, connect_control, connect_data,
};
use farside_layout::{CLIENTS_MAX, LayoutError, SUPERBLOCK_BYTES, Superblock};
pub use retry::{Attempts, Contact};

/// The least an attempt to connect over RDMA may take, where there is that much time left.
const ATTEMPT_MIN: Duration = Duration::from_millis(500);

/// How long one attempt may take: RDMA-CM sends a request that got lost again only after 4.3 s, so
/// half of the time is for another one.
fn attempt_max(left: Duration) -> Duration {
    (left / 2).max(ATTEMPT_MIN).min(left)
}

/// A server, and as whom to connect.
#[derive(Clone)]
pub struct Target {
    /// Where it is.
    pub address: Address,
    /// What to do there.
    pub role: Role,
    /// The proof that one may.
    pub token: Token,
    /// How long connecting may take.
    pub timeout: Duration,
    /// How to use RDMA, for an `rdma://` address; its own timeout is not looked at.
    pub rdma: Options,
}

/// A connection to one life of a server.
pub struct Attached {
    /// What the server said.
    pub welcome: Welcome,
    /// What the server leads to.
    pub route: Route,
    /// The control channel.
    pub channel: Box<dyn ControlChannel>,
}

/// How fabrics reach the region of a server. It ends with the control channel.
pub struct Route {
    server: String,
    way: Way,
}

enum Way {
    Shm { region: Arc<Region>, lease: Lease },
    Verbs(Box<Remote>),
}

/// What a session needs to reach a region over RDMA.
struct Remote {
    address: SocketAddr,
    request: [u8; REQUEST_BYTES_MAX],
    welcome: Welcome,
    region: RemoteRegion,
    options: Options,
}

/// Whichever fabric the server's address names.
#[allow(clippy::large_enum_variant, reason = "one a session")]
pub enum AnyFabric {
    /// On this host.
    Shm(ShmFabric),
    /// Over RDMA.
    Verbs(VerbsFabric),
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No server answers, or none does any more; a later attempt may succeed.
    #[error("{}", .contact.message(.server, *.tried))]
    Absent {
        /// The address tried.
        server: String,
        /// How far the last attempt came.
        contact: Contact,
        /// For how long.
        tried: Duration,
        /// What the system said, where that tells more.
        #[source]
        source: Option<io::Error>,
    },
    /// The server does not want this client.
    #[error("{server} refused the connection: {source}")]
    Refused {
        /// The address.
        server: String,
        /// Why.
        #[source]
        source: Refusal,
    },
    /// A user listens there who could take the client's secret: none was shown.
    #[error(
        "{server} is served by user {user}, which is not root, this user or the owner of the \
         socket's folder: let that user's server listen in a folder of its own, which nobody else \
         could have made, such as /run/farside"
    )]
    Untrusted {
        /// The address.
        server: String,
        /// The user.
        user: u32,
    },
    /// Something else than a server answers, or one that lies.
    #[error("the control channel broke: {0}")]
    Control(#[from] ControlError),
    /// The region that the server passed is none.
    #[error("the region is damaged: {0}; run `kv-cli verify`")]
    Layout(#[from] LayoutError),
    /// RDMA does not do what was asked.
    #[error(transparent)]
    Rdma(VerbsError),
    /// The system refused something.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, AttachError>;

impl Target {
    /// One attempt to connect, which may take this long; [`Target::connect`] makes several.
    ///
    /// # Errors
    /// [`AttachError`]; after [`AttachError::Absent`] another attempt may succeed.
    pub fn attach(&self, most: Duration) -> Result<Attached> {
        match &self.address {
            Address::Shm(path) => self.attach_shm(path, most),
            Address::Rdma { .. } => self.attach_verbs(most),
        }
    }

    fn attach_shm(&self, path: &Path, most: Duration) -> Result<Attached> {
        let started = Instant::now();
        let silent = || self.absent(Contact::Silent, started.elapsed(), None);
        let hung_up = || self.absent(Contact::HungUp, started.elapsed(), None);
        // To the system, no time at all means for ever.
        let left = || most.saturating_sub(started.elapsed()).max(Duration::from_millis(1));
        let connection = shm::Connection::connect(path, left()).map_err(|source| {
            use io::ErrorKind::{
                ConnectionRefused, ConnectionReset, Interrupted, NotFound, WouldBlock,
            };
            match source.kind() {
                NotFound | ConnectionRefused | ConnectionReset | Interrupted => {
                    self.absent(Contact::None, started.elapsed(), Some(source))
                }
                // Its backlog is full.
                WouldBlock => silent(),
                _ => system("connecting to the server's socket")(source),
            }
        })?;
        let user = connection.peer_user().map_err(system("asking whose server it is"))?;
        if !trust::may_serve(user, path) {
            return Err(AttachError::Untrusted { server: self.address.to_string(), user });
        }
        let waiting = connection.set_receive_timeout(Some(left()));
        waiting.map_err(system("setting up the socket"))?;
        connection.send(&self.request(Purpose::Control), None).map_err(|_| hung_up())?;
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let (bytes, descriptor) = connection.receive(&mut buffer).map_err(|source| {
            match Errno::from_io_error(&source) {
                Some(Errno::MFILE) => system("receiving the region's descriptor")(source),
                Some(Errno::CONNRESET) => hung_up(),
                Some(Errno::AGAIN) => silent(),
                _ => self.absent(Contact::Silent, started.elapsed(), Some(source)),
            }
        })?;
        if bytes == 0 {
            return Err(hung_up());
        }
        let welcome = self.welcome(&buffer[..bytes], false)?;
        let what = "reply without a descriptor";
        let truncated = LayoutError::Truncated { what, bytes: bytes as u64 };
        let file = File::from(descriptor.ok_or(truncated)?);
        let region = match self.role {
            Role::Reader => Region::map_read_only(&file),
            Role::Writer => Region::map(&file),
        };
        let region = region.map_err(system("mapping the region"))?;
        let (says, is) = (welcome.region_bytes, region.bytes());
        if says != is {
            return Err(LayoutError::RegionLength { says, is }.into());
        }
        let lease = Lease { offset: lease_offset(&region, &welcome)?, number: welcome.lease };
        let channel = shm::ShmChannel::over(connection).map_err(system("setting up the socket"))?;
        let way = Way::Shm { region: Arc::new(region), lease };
        Ok(Attached { welcome, route: self.route(way), channel: Box::new(channel) })
    }

    fn attach_verbs(&self, most: Duration) -> Result<Attached> {
        let started = Instant::now();
        let request = self.request(Purpose::Control);
        let absent = |source| self.absent(Contact::None, started.elapsed(), Some(source));
        let addresses = self.address.resolve().map_err(absent)?;
        let mut failure = absent(io::ErrorKind::NotFound.into());
        for address in addresses {
            let left = most.saturating_sub(started.elapsed());
            let options = Options { connect_timeout: attempt_max(left), ..self.rdma };
            let (channel, reply) = match connect_control(address, &request, &options) {
                Ok(connected) => connected,
                Err(error) => match from_verbs(&self.address.to_string(), error) {
                    absent @ AttachError::Absent { .. } => {
                        failure = absent;
                        continue;
                    }
                    // The server was there.
                    refused => return Err(refused),
                },
            };
            let welcome = self.welcome(&reply, true)?;
            let Welcome { client_id, ticket, base_address, region_bytes, rkey, .. } = welcome;
            let round_trip_min_ns = welcome.round_trip_min_ns;
            let writable = self.role == Role::Writer;
            let remote = Remote {
                address,
                request: self.request(Purpose::Data { client_id, ticket }),
                welcome,
                region: RemoteRegion {
                    base_address,
                    region_bytes,
                    rkey,
                    writable,
                    round_trip_min_ns,
                },
                // For sessions to come, the whole of it.
                options: Options { connect_timeout: self.timeout, ..self.rdma },
            };
            let route = self.route(Way::Verbs(Box::new(remote)));
            return Ok(Attached { welcome, route, channel: Box::new(channel) });
        }
        Err(failure)
    }

    /// What the server answered, if it is for this fabric.
    fn welcome(&self, reply: &[u8], over_rdma: bool) -> Result<Welcome> {
        let welcome = decode_reply(reply)?.map_err(|why| self.refused(why))?;
        let (field, value) = ("base address", welcome.base_address);
        if (value != 0) != over_rdma {
            return Err(ControlError::Unknown { field, value }.into());
        }
        Ok(welcome)
    }

    fn request(&self, purpose: Purpose) -> [u8; REQUEST_BYTES_MAX] {
        ConnectRequest { role: self.role, purpose, token: self.token }.encode()
    }

    fn route(&self, way: Way) -> Route {
        Route { server: self.address.to_string(), way }
    }

    fn absent(&self, contact: Contact, tried: Duration, source: Option<io::Error>) -> AttachError {
        AttachError::Absent { server: self.address.to_string(), contact, tried, source }
    }

    fn refused(&self, source: Refusal) -> AttachError {
        refused(&self.address.to_string(), source)
    }
}

impl Route {
    /// A fabric of so many lanes, for one session. Over RDMA it connects a queue pair.
    ///
    /// # Errors
    /// [`AttachError`]; [`AttachError::Absent`] when the server does not know this client any more,
    /// [`AttachError::Rdma`] when it does not answer, which says nothing of other sessions.
    pub fn fabric(&self, lanes: u16) -> Result<AnyFabric> {
        let remote = match &self.way {
            Way::Shm { region, lease } => {
                let fabric = ShmFabric::new(region.clone(), Some(*lease), lanes);
                return Ok(AnyFabric::Shm(fabric));
            }
            Way::Verbs(remote) => remote,
        };
        let failed = |error: VerbsError| match error.is_passing() {
            true => AttachError::Rdma(error),
            false => from_verbs(&self.server, error),
        };
        let started = Instant::now();
        let link = loop {
            let left = remote.options.connect_timeout.saturating_sub(started.elapsed());
            let options = Options { connect_timeout: attempt_max(left), ..remote.options };
            match connect_data(remote.address, &remote.request, lanes, &options) {
                Err(VerbsError::TimedOut { .. }) if left > ATTEMPT_MIN => {}
                link => break link.map_err(failed)?,
            }
        };
        if decode_reply(link.reply())? != Ok(remote.welcome) {
            return Err(ControlError::NotFarside.into());
        }
        Ok(AnyFabric::Verbs(link.into_fabric(remote.region).map_err(failed)?))
    }
}

/// Where this client's entry in the client table is.
fn lease_offset(region: &Region, welcome: &Welcome) -> Result<u64> {
    let mut words = [0u64; SUPERBLOCK_BYTES as usize / 8];
    let short = || LayoutError::Truncated { what: "region", bytes: region.bytes() };
    region.read(0, &mut words).map_err(|_| short())?;
    let (_, format) = Superblock::decode(words.as_bytes(), region.bytes())?;
    Ok(format.geometry().client_entry(welcome.client_id).ok_or_else(|| {
        let (field, value) = ("client id", welcome.client_id.into());
        LayoutError::Bound { field, value, min: 1, max: CLIENTS_MAX.into() }
    })?)
}

fn refused(server: &str, source: Refusal) -> AttachError {
    let server = server.to_owned();
    match source {
        // This server goes, or does not know this client any more. Another connection may be had.
        Refusal::ShuttingDown | Refusal::UnknownClient { .. } => {
            absent_now(server, Contact::Lost, io::Error::other(source))
        }
        source => AttachError::Refused { server, source },
    }
}

/// For a caller that knows how long it has tried.
fn absent_now(server: String, contact: Contact, source: io::Error) -> AttachError {
    AttachError::Absent { server, contact, tried: Duration::ZERO, source: Some(source) }
}

fn from_verbs(server: &str, error: VerbsError) -> AttachError {
    match error {
        error if error.is_passing() => {
            absent_now(server.to_owned(), Contact::None, io::Error::other(error))
        }
        VerbsError::Rejected { reason, .. } => match decode_reply(&reason) {
            Ok(Err(refusal)) => refused(server, refusal),
            // Something else than Farside may listen there.
            Ok(Ok(_)) => ControlError::NotFarside.into(),
            Err(error) => error.into(),
        },
        error => AttachError::Rdma(error),
    }
}

fn system(doing: &'static str) -> impl FnOnce(io::Error) -> AttachError {
    move |source| AttachError::System { doing, source }
}

#[cfg(test)]
mod tests;
