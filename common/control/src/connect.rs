//! The connection request and its reply.

use sha2::{Digest, Sha256};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use farside_fabric::rdma::{REASON_BYTES_MAX, RemoteRegion, Rkeys, SLICES_MAX, slice_count};
use farside_layout::{CHUNK_BYTES, CLIENT_IDS, FORMAT_VERSION, REGION_BYTES_MAX, REGION_BYTES_MIN};

use super::cluster::{Id, SHARDS_MAX};
use super::{ControlError, PROTOCOL_VERSION, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Role};

/// The proof that a client knows the shared secret. It protects against mistakes and against other
/// clients on the network, but not against a person who reads the wire.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Token([u8; 32]);

impl Token {
    /// Returns the token of a secret.
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret).into())
    }

    /// The token of a client without a secret.
    pub const NONE: Self = Self([0; 32]);

    /// Whether both tokens are equal. The time of the comparison does not depend on where they
    /// differ.
    pub fn matches(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

const REQUEST_MAGIC: u32 = u32::from_le_bytes(*b"FSrq");
const REPLY_MAGIC: u32 = u32::from_le_bytes(*b"FSre");

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The first connection of a client: its control channel, and on shared memory its region.
    Control,
    /// A connection that asks for the map of the server's cluster, and gets it again when it
    /// changes. It has no client.
    Map,
    /// A data connection of a client that has a control channel, for one of its sessions. Not on
    /// shared memory.
    Data {
        /// The client's number from its [`Welcome`].
        client_id: u16,
        /// The client's session secret from its [`Welcome`]. The lease proves nothing, because
        /// every client can read it in the region.
        session_secret: u64,
    },
}

/// The largest RTT_min, the minimum of a round trip, that a client accepts from a server. No device
/// has a larger one. With a larger one the client would trust hints for too long.
const ROUND_TRIP_MIN_NS_MAX: u32 = 1_000_000;

const CONTROL: u8 = 0;
const DATA: u8 = 1;
const MAP: u8 = 2;

/// The shard and the number of its view, as a client of a cluster knows them. A server refuses a
/// control connection unless both are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownView {
    /// The shard.
    pub shard: u16,
    /// The lower half of the number of its view.
    pub number: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RequestBytes {
    magic: le::U32,
    protocol_version: le::U16,
    role: u8,
    purpose: u8,
    /// `client_id` and `session_secret` are 0 for a control connection.
    client_id: le::U16,
    session_secret: le::U64,
    /// One more than the number of the shard; 0 for a client that knows of no cluster.
    shard: le::U16,
    /// 0 for a client that knows of no cluster.
    view_number: le::U32,
    token: Token,
}
const _: () = assert!(size_of::<RequestBytes>() == REQUEST_BYTES_MAX);

/// A client's first message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The client's role.
    pub role: Role,
    /// The purpose of the connection.
    pub purpose: Purpose,
    /// The view of the shard that the client wants. `None` if it knows of no cluster.
    pub view: Option<KnownView>,
    /// The proof that the client knows the secret.
    pub token: Token,
}

impl ConnectRequest {
    /// Returns the encoded request.
    pub fn encode(&self) -> [u8; REQUEST_BYTES_MAX] {
        let (purpose, client_id, session_secret) = match self.purpose {
            Purpose::Control => (CONTROL, 0, 0),
            Purpose::Map => (MAP, 0, 0),
            Purpose::Data { client_id, session_secret } => (DATA, client_id, session_secret),
        };
        let bytes = RequestBytes {
            magic: REQUEST_MAGIC.into(),
            protocol_version: PROTOCOL_VERSION.into(),
            role: self.role as u8,
            purpose,
            client_id: client_id.into(),
            session_secret: session_secret.into(),
            shard: self.view.map_or(0, |view| view.shard + 1).into(),
            view_number: self.view.map_or(0, |view| view.number).into(),
            token: self.token,
        };
        zerocopy::transmute!(bytes)
    }

    /// Returns the request in these bytes.
    ///
    /// # Errors
    /// The [`Refusal`] to send to the client.
    pub fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        let malformed = Refusal::Malformed { bytes: bytes.len() as u64 };
        let request = RequestBytes::read_from_bytes(bytes).map_err(|_| malformed)?;
        if request.magic.get() != REQUEST_MAGIC {
            return Err(malformed);
        }
        let client_version = request.protocol_version.get();
        if client_version != PROTOCOL_VERSION {
            let (server, client) = (PROTOCOL_VERSION.into(), client_version.into());
            return Err(Refusal::Version { server, client });
        }
        let role = match request.role {
            1 => Role::Reader,
            2 => Role::Writer,
            _ => return Err(malformed),
        };
        let purpose = match (request.purpose, request.client_id.get(), request.session_secret.get())
        {
            (CONTROL, 0, 0) => Purpose::Control,
            (MAP, 0, 0) => Purpose::Map,
            (DATA, client_id, session_secret) if is_client_id(client_id) && session_secret != 0 => {
                Purpose::Data { client_id, session_secret }
            }
            _ => return Err(malformed),
        };
        let view = match (request.shard.get(), request.view_number.get()) {
            (0, 0) => None,
            (shard @ 1..=SHARDS_MAX, number) => Some(KnownView { shard: shard - 1, number }),
            _ => return Err(malformed),
        };
        Ok(Self { role, purpose, view, token: request.token })
    }
}

/// Whether a client can have this id. No client has the id 0.
fn is_client_id(id: u16) -> bool {
    id != 0 && u32::from(id) < CLIENT_IDS
}

/// The reason why a server does not accept a client or a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum Refusal {
    #[error("the server speaks protocol version {server}, this client {client}: upgrade the older")]
    Version { server: u64, client: u64 },
    #[error("wrong secret for this role: put the server's `secret` into the client's config file")]
    Credentials,
    #[error(
        "the server has {clients} clients, which is its maximum: close some or raise \
             `clients_max`"
    )]
    Full { clients: u64 },
    #[error("the server did not understand the connection request of {bytes} bytes")]
    Malformed { bytes: u64 },
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error(
        "the server knows no client {client} with this session secret: its control connection is \
         gone, connect anew"
    )]
    UnknownClient { client: u64 },
    #[error(
        "the connection reached the server through another RDMA device than its region is \
         registered with: use the address that the server listens at"
    )]
    Device,
    #[error(
        "the server has {readers} readers and reserves its last connections for writers: close \
         some or raise `clients_max`"
    )]
    FullOfReaders { readers: u64 },
    #[error(
        "this user has {clients} clients at the server, which reserves its last connections for \
         other users: close some or raise `clients_max`"
    )]
    FullForUser { clients: u64 },
    #[error(
        "this client has {sessions} sessions, which is the maximum of one client: close some or \
         open further sessions with another client"
    )]
    TooManySessions { sessions: u64 },
    #[error(
        "the server is a part of a cluster: upgrade this client, which does not ask for the map"
    )]
    Clustered,
    #[error(
        "the server is a part of no cluster, but this client knows of one: check the addresses"
    )]
    NoCluster,
    #[error("the server waits as a spare of its cluster: it serves no shard")]
    Spare,
    #[error("the server serves view {number} of shard {shard}, and not the one that was asked for")]
    OtherView { shard: u64, number: u64 },
    #[error(
        "the server was stopped for long and does not know yet whether it still serves its shard: \
         it asks the cluster's records"
    )]
    Unconfirmed,
    #[error("the server refused with the unknown reason {code}: upgrade this client")]
    Unknown { code: u64 },
}

impl Refusal {
    /// Returns the code of the refusal, which is never 0, and its two numbers.
    fn to_numbers(self) -> (u32, u64, u64) {
        match self {
            Self::Version { server, client } => (1, server, client),
            Self::Credentials => (2, 0, 0),
            Self::Full { clients } => (3, clients, 0),
            Self::Malformed { bytes } => (4, bytes, 0),
            Self::ShuttingDown => (5, 0, 0),
            Self::UnknownClient { client } => (6, client, 0),
            Self::Device => (7, 0, 0),
            Self::FullOfReaders { readers } => (8, readers, 0),
            Self::FullForUser { clients } => (9, clients, 0),
            Self::TooManySessions { sessions } => (10, sessions, 0),
            Self::Clustered => (11, 0, 0),
            Self::NoCluster => (12, 0, 0),
            Self::Spare => (13, 0, 0),
            Self::OtherView { shard, number } => (14, shard, number),
            Self::Unconfirmed => (15, 0, 0),
            Self::Unknown { code } => (code as u32, 0, 0),
        }
    }

    fn from_numbers(code: u32, first: u64, second: u64) -> Self {
        match code {
            1 => Self::Version { server: first, client: second },
            2 => Self::Credentials,
            3 => Self::Full { clients: first },
            4 => Self::Malformed { bytes: first },
            5 => Self::ShuttingDown,
            6 => Self::UnknownClient { client: first },
            7 => Self::Device,
            8 => Self::FullOfReaders { readers: first },
            9 => Self::FullForUser { clients: first },
            10 => Self::TooManySessions { sessions: first },
            11 => Self::Clustered,
            12 => Self::NoCluster,
            13 => Self::Spare,
            14 => Self::OtherView { shard: first, number: second },
            15 => Self::Unconfirmed,
            code => Self::Unknown { code: code.into() },
        }
    }
}

/// The beginning of a reply, with all of a refusal.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ReplyHead {
    magic: le::U32,
    protocol_version: le::U16,
    client_id: le::U16,
    /// 0 if the server accepts the client, otherwise the code of a refusal.
    refusal: le::U32,
    format_version: le::U32,
    refusal_numbers: [le::U64; 2],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ReplyBytes {
    head: ReplyHead,
    region_id: [u8; 16],
    incarnation: le::U64,
    lease: le::U64,
    base_address: le::U64,
    region_bytes: le::U64,
    rkey: le::U32,
    round_trip_min_ns: le::U32,
    session_secret: le::U64,
    cluster: [u8; 16],
    view_number: le::U64,
    shard: le::U64,
    /// The length of a slice in chunks; 0 if the region is registered whole.
    slice_chunks: le::U32,
    /// The remote keys of the slices after the first one.
    later_rkeys: [le::U32; SLICES_MAX - 1],
}
const _: () = assert!(size_of::<ReplyBytes>() <= REPLY_BYTES_MAX);

impl ReplyBytes {
    fn rkeys(&self) -> Rkeys {
        let mut keys = [self.rkey.get(); SLICES_MAX];
        for (key, later) in keys[1..].iter_mut().zip(self.later_rkeys) {
            *key = later.get();
        }
        Rkeys { slice_bytes: u64::from(self.slice_chunks.get()) * CHUNK_BYTES, keys }
    }
}

/// The length of a welcome, in bytes.
pub const REPLY_BYTES: usize = size_of::<ReplyBytes>();
/// The length of a refusal, in bytes: that of all replies in the protocol's version 5, so that
/// older clients can read the reason. The rest is zeros.
const REFUSAL_BYTES: usize = 128;
const _: () = assert!(size_of::<ReplyHead>() <= REFUSAL_BYTES);
const _: () = assert!(REFUSAL_BYTES <= REASON_BYTES_MAX && REFUSAL_BYTES < REPLY_BYTES);

/// The answer of a server that accepts a client. The client then reads the region's limits from the
/// superblock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Welcome {
    /// The client's number while it is connected; 0 only in the answer to [`Purpose::Map`].
    pub client_id: u16,
    /// The value of the client's entry in the client table, until the server fences the client.
    pub lease: u64,
    /// The region's random number.
    pub region_id: [u8; 16],
    /// How many times a server has started on the region.
    pub incarnation: u64,
    /// The virtual address of the region in the server, for verbs; otherwise 0.
    pub base_address: u64,
    /// The length of the region, in bytes.
    pub region_bytes: u64,
    /// The remote keys of the region, for verbs; otherwise zeros.
    pub rkeys: Rkeys,
    /// The minimum time of a chain of any client to the region, in nanoseconds; 0 on shared memory,
    /// where the fabric knows it.
    pub round_trip_min_ns: u32,
    /// A random number that no other client gets: connections of the client's sessions must present
    /// it. 0 on shared memory, which has no such connections.
    pub session_secret: u64,
    /// The cluster that the server is a part of, if any; otherwise zeros.
    pub cluster: Id,
    /// The shard that it serves; 0 without a cluster.
    pub shard: u16,
    /// The number of the shard's view; 0 without a cluster.
    pub view_number: u64,
}

impl Welcome {
    /// The answer to [`Purpose::Map`], which has no client. `shard` and `view_number` are 0 if the
    /// server is a spare.
    pub fn for_map(cluster: Id, shard: u16, view_number: u64) -> Self {
        Self { cluster, shard, view_number, ..Self::default() }
    }

    /// Whether this is the answer to [`Purpose::Map`].
    pub fn is_for_map(&self) -> bool {
        self.client_id == 0
    }

    /// Returns the region as a client of this role reaches it over a connection for each session.
    pub(crate) fn remote_region(&self, role: Role) -> RemoteRegion {
        RemoteRegion {
            base_address: self.base_address,
            region_bytes: self.region_bytes,
            rkeys: self.rkeys,
            writable: role == Role::Writer,
            round_trip_min_ns: self.round_trip_min_ns,
        }
    }

    /// Returns the purpose of a session's connection.
    pub(crate) fn data_purpose(&self) -> Purpose {
        let Self { client_id, session_secret, .. } = *self;
        Purpose::Data { client_id, session_secret }
    }
}

/// Encodes the server's answer to a connection request.
pub fn encode_reply(reply: &Result<Welcome, Refusal>) -> Vec<u8> {
    let nothing = Welcome::default();
    let welcome = reply.as_ref().unwrap_or(&nothing);
    let [rkey, later_rkeys @ ..] = welcome.rkeys.keys.map(le::U32::new);
    let (code, first, second) = reply.as_ref().err().map_or((0, 0, 0), |why| why.to_numbers());
    let head = ReplyHead {
        magic: REPLY_MAGIC.into(),
        protocol_version: PROTOCOL_VERSION.into(),
        client_id: welcome.client_id.into(),
        refusal: code.into(),
        format_version: FORMAT_VERSION.into(),
        refusal_numbers: [first.into(), second.into()],
    };
    let bytes = ReplyBytes {
        head,
        region_id: welcome.region_id,
        incarnation: welcome.incarnation.into(),
        lease: welcome.lease.into(),
        base_address: welcome.base_address.into(),
        region_bytes: welcome.region_bytes.into(),
        rkey,
        round_trip_min_ns: welcome.round_trip_min_ns.into(),
        session_secret: welcome.session_secret.into(),
        cluster: welcome.cluster.0,
        view_number: welcome.view_number.into(),
        shard: u64::from(welcome.shard).into(),
        slice_chunks: ((welcome.rkeys.slice_bytes / CHUNK_BYTES) as u32).into(),
        later_rkeys,
    };
    let length = if reply.is_ok() { REPLY_BYTES } else { REFUSAL_BYTES };
    bytes.as_bytes()[..length].to_vec()
}

/// Decodes the server's answer, which RDMA-CM may have padded with zeros. Of a refusal only the
/// reason is read, because it may come from a server of another version.
///
/// # Errors
/// [`ControlError`] if the bytes are no answer to a connection request.
pub fn decode_reply(bytes: &[u8]) -> Result<Result<Welcome, Refusal>, ControlError> {
    let length = ControlError::Length { bytes: bytes.len() };
    let Ok((head, _)) = ReplyHead::read_from_prefix(bytes) else { return Err(length) };
    if bytes.len() > REPLY_BYTES_MAX {
        return Err(length);
    }
    if head.magic.get() != REPLY_MAGIC {
        return Err(ControlError::NotFarside);
    }
    let [first, second] = head.refusal_numbers.map(le::U64::get);
    match head.refusal.get() {
        0 => {}
        code => return Ok(Err(Refusal::from_numbers(code, first, second))),
    }
    let Ok((reply, padding)) = ReplyBytes::read_from_prefix(bytes) else { return Err(length) };
    let welcome = Welcome {
        client_id: head.client_id.get(),
        lease: reply.lease.get(),
        region_id: reply.region_id,
        incarnation: reply.incarnation.get(),
        base_address: reply.base_address.get(),
        region_bytes: reply.region_bytes.get(),
        rkeys: reply.rkeys(),
        round_trip_min_ns: reply.round_trip_min_ns.get(),
        session_secret: reply.session_secret.get(),
        cluster: Id(reply.cluster),
        shard: reply.shard.get().min(u16::MAX.into()) as u16,
        view_number: reply.view_number.get(),
    };
    let version = head.protocol_version.get();
    let format_version = head.format_version.get();
    let padding = padding.iter().map(|byte| u64::from(*byte));
    let unused = padding.fold(first | second, |all, byte| all | byte);
    let is_known = |field, value: u64, is_known: bool| {
        if is_known { Ok(()) } else { Err(ControlError::Unknown { field, value }) }
    };
    is_known("protocol version", version.into(), version == PROTOCOL_VERSION)?;
    is_known("format version", format_version.into(), format_version == FORMAT_VERSION)?;
    is_known("reserved part of the reply", unused, unused == 0)?;
    let is_shard = reply.shard.get() < SHARDS_MAX.into();
    is_known("shard", reply.shard.get(), is_shard)?;
    let Welcome { client_id, lease, incarnation, base_address, region_bytes, .. } = welcome;
    let Welcome { rkeys, round_trip_min_ns, cluster, shard, view_number, .. } = welcome;
    let is_for_map = welcome == Welcome::for_map(cluster, shard, view_number);
    if is_for_map && cluster != Id::default() {
        return Ok(Ok(welcome));
    }
    is_known("client id", client_id.into(), is_client_id(client_id))?;
    is_known("lease", lease, lease != 0)?;
    is_known("incarnation", incarnation, incarnation != 0)?;
    let is_region = (REGION_BYTES_MIN..=REGION_BYTES_MAX).contains(&region_bytes)
        && region_bytes.is_multiple_of(CHUNK_BYTES);
    is_known("region length", region_bytes, is_region)?;
    // Atomic verbs take aligned words, and no address may wrap around.
    let is_base =
        base_address.is_multiple_of(8) && base_address.checked_add(region_bytes).is_some();
    is_known("base address", base_address, is_base)?;
    // An rkey belongs to an address: both are 0 except over RDMA. The next two are 0 on shared
    // memory.
    let is_plain = base_address != 0 || rkeys == Rkeys::default();
    is_known("rkey", rkeys.keys[0].into(), is_plain)?;
    is_known("slice length", rkeys.slice_bytes, are_slices(&rkeys, region_bytes))?;
    let is_shared = welcome.session_secret == 0;
    let bounds = if is_shared { 0..=0 } else { 1..=ROUND_TRIP_MIN_NS_MAX };
    is_known("round trip", round_trip_min_ns.into(), bounds.contains(&round_trip_min_ns))?;
    is_known("base address", base_address, !is_shared || base_address == 0)?;
    Ok(Ok(welcome))
}

/// Whether the region can have such slices: more than one, and a key for each and no others.
fn are_slices(rkeys: &Rkeys, region_bytes: u64) -> bool {
    let slices = match rkeys.slice_bytes {
        0 => 1,
        bytes if bytes < region_bytes => slice_count(region_bytes, bytes),
        _ => return false,
    };
    // A key may be 0.
    slices <= SLICES_MAX as u64 && rkeys.keys.iter().skip(slices as usize).all(|key| *key == 0)
}

#[cfg(test)]
mod tests;
