//! The hello, which is a client's first message on any connection.
//!
//! A server answers the hello of a control connection with a [`Challenge`], the client answers with
//! its proof, and the server with a [`Welcome`]. It answers the hello of a session's connection,
//! which has a proof already, with a [`DataAccepted`]. Instead of each answer there may be a
//! [`Refusal`].

mod replies;
#[cfg(test)]
mod tests;

use std::fmt;

use farside_fabric::rdma::REASON_BYTES_MAX;
use farside_layout::CLIENT_IDS;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::cluster::SHARDS_MAX;
use super::{Nonce, PROTOCOL_VERSION, Proof, REQUEST_BYTES_MAX, Role};
use crate::ControlError;

pub use replies::{Challenge, DataAccepted, ProofMessage, Welcome};

const REQUEST_MAGIC: u32 = u32::from_le_bytes(*b"FSrq");

/// The versions of the messages that a program speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Versions {
    /// The lowest.
    pub lowest: u16,
    /// The highest, which is not below the lowest.
    pub highest: u16,
}

impl Versions {
    /// Those of this program.
    pub const OWN: Self = Self { lowest: PROTOCOL_VERSION, highest: PROTOCOL_VERSION };

    /// Whether there is a version that both speak.
    fn overlap(self, other: Self) -> bool {
        self.lowest <= other.highest && other.lowest <= self.highest
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { lowest, highest } if lowest == highest => write!(f, "version {lowest}"),
            Self { lowest, highest } => write!(f, "versions {lowest} to {highest}"),
        }
    }
}

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
        /// The proof that this client makes the connection. The lease proves nothing, because
        /// every client can read it in the region.
        proof: Proof,
    },
}

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
    version_lowest: le::U16,
    version_highest: le::U16,
    role: u8,
    purpose: u8,
    /// 0 except for a data connection.
    client_id: le::U16,
    /// One more than the number of the shard; 0 for a client that knows of no cluster.
    shard: le::U16,
    reserved: [u8; 6],
    /// 0 for a client that knows of no cluster.
    view_number: le::U32,
    nonce: Nonce,
    /// Zeros except for a data connection.
    proof: Proof,
}
const _: () = assert!(size_of::<RequestBytes>() == REQUEST_BYTES_MAX);

/// A client's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The versions of the protocol that the client speaks.
    pub versions: Versions,
    /// The client's role.
    pub role: Role,
    /// The purpose of the connection.
    pub purpose: Purpose,
    /// The view of the shard that the client wants. `None` if it knows of no cluster.
    pub view: Option<KnownView>,
    /// A random number of this connection.
    pub nonce: Nonce,
}

impl ConnectRequest {
    /// Returns the encoded request.
    pub fn encode(&self) -> [u8; REQUEST_BYTES_MAX] {
        let (purpose, client_id, proof) = match self.purpose {
            Purpose::Control => (CONTROL, 0, Proof::NONE),
            Purpose::Map => (MAP, 0, Proof::NONE),
            Purpose::Data { client_id, proof } => (DATA, client_id, proof),
        };
        let bytes = RequestBytes {
            magic: REQUEST_MAGIC.into(),
            version_lowest: self.versions.lowest.into(),
            version_highest: self.versions.highest.into(),
            role: self.role as u8,
            purpose,
            client_id: client_id.into(),
            shard: self.view.map_or(0, |view| view.shard + 1).into(),
            reserved: [0; 6],
            view_number: self.view.map_or(0, |view| view.number).into(),
            nonce: self.nonce,
            proof,
        };
        zerocopy::transmute!(bytes)
    }

    /// Returns the request in these bytes, of a client that speaks a version of this program.
    ///
    /// # Errors
    /// The [`Refusal`] to send to the client.
    pub fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        let malformed = Refusal::Malformed { bytes: bytes.len() as u64 };
        let request = RequestBytes::read_from_bytes(bytes).map_err(|_| malformed)?;
        if request.magic.get() != REQUEST_MAGIC {
            return Err(malformed);
        }
        let (lowest, highest) = (request.version_lowest.get(), request.version_highest.get());
        let (server, client) = (Versions::OWN, Versions { lowest, highest });
        // What follows may mean something else in another version.
        if lowest <= highest && !server.overlap(client) {
            return Err(Refusal::Version { server, client });
        }
        let role = match request.role {
            1 => Role::Reader,
            2 => Role::Writer,
            _ => return Err(malformed),
        };
        let purpose = match (request.purpose, request.client_id.get(), request.proof) {
            (CONTROL, 0, Proof::NONE) => Purpose::Control,
            (MAP, 0, Proof::NONE) => Purpose::Map,
            (DATA, client_id, proof) if is_client_id(client_id) => {
                Purpose::Data { client_id, proof }
            }
            _ => return Err(malformed),
        };
        let view = match (request.shard.get(), request.view_number.get()) {
            (0, 0) => None,
            (shard @ 1..=SHARDS_MAX, number) => Some(KnownView { shard: shard - 1, number }),
            _ => return Err(malformed),
        };
        if lowest > highest || request.reserved != [0; 6] {
            return Err(malformed);
        }
        Ok(Self { versions: client, role, purpose, view, nonce: request.nonce })
    }

    /// Returns the part of the request that its proof covers.
    pub(super) fn without_proof(mut self) -> Self {
        if let Purpose::Data { proof, .. } = &mut self.purpose {
            *proof = Proof::NONE;
        }
        self
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
    #[error("the server speaks protocol {server}, this client {client}: upgrade the older")]
    Version { server: Versions, client: Versions },
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
        "the server knows no client {client} in this role: its control connection is gone, connect \
         anew"
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
    #[error("the proof of the session is over a nonce that the server has replaced: connect anew")]
    OldNonce { nonce: Nonce },
    #[error(
        "this client has a secret, but the server has none: give the server the same `secret`, or \
         leave it out of the client's config file"
    )]
    NoSecret,
    #[error(
        "the server has {connections} connections and keeps its last descriptors for others: close \
         sessions, or raise the server's limit (`ulimit -n`, LimitNOFILE)"
    )]
    OutOfDescriptors { connections: u64 },
    #[error("the server refused with the unknown reason {code}: upgrade this client")]
    Unknown { code: u64 },
}

impl Refusal {
    /// Returns the code of the refusal, which is never 0, and its two numbers.
    fn to_numbers(self) -> (u32, u64, u64) {
        match self {
            Self::Version { server, client } => (1, server.to_number(), client.to_number()),
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
            Self::OldNonce { nonce } => {
                let [first, second]: [[u8; 8]; 2] = zerocopy::transmute!(nonce);
                (16, u64::from_le_bytes(first), u64::from_le_bytes(second))
            }
            Self::NoSecret => (17, 0, 0),
            Self::OutOfDescriptors { connections } => (18, connections, 0),
            Self::Unknown { code } => (code as u32, 0, 0),
        }
    }

    fn from_numbers(code: u32, first: u64, second: u64) -> Self {
        match code {
            1 => Self::Version {
                server: Versions::from_number(first),
                client: Versions::from_number(second),
            },
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
            16 => Self::OldNonce {
                nonce: zerocopy::transmute!([first.to_le_bytes(), second.to_le_bytes()]),
            },
            17 => Self::NoSecret,
            18 => Self::OutOfDescriptors { connections: first },
            code => Self::Unknown { code: code.into() },
        }
    }
}

impl Versions {
    fn to_number(self) -> u64 {
        u64::from(self.lowest) | u64::from(self.highest) << 32
    }

    /// Returns the versions in a number, of which a server of any version may make any.
    fn from_number(number: u64) -> Self {
        Self { lowest: number as u16, highest: (number >> 32) as u16 }
    }
}

const MAGIC: u32 = u32::from_le_bytes(*b"FSno");

/// All versions of the protocol have the same refusal, so that a client can read it from a server
/// of another version.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RefusalBytes {
    magic: le::U32,
    code: le::U32,
    numbers: [le::U64; 2],
}
const _: () = assert!(size_of::<RefusalBytes>() <= REASON_BYTES_MAX);

impl Refusal {
    /// Returns the encoded refusal, which is the answer to any message of a client.
    pub fn encode(&self) -> Vec<u8> {
        let (code, first, second) = self.to_numbers();
        let (magic, numbers) = (MAGIC.into(), [first.into(), second.into()]);
        RefusalBytes { magic, code: code.into(), numbers }.as_bytes().to_vec()
    }

    /// Returns the refusal at the beginning of these bytes, which RDMA-CM may have padded.
    fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let length = ControlError::Length { bytes: bytes.len() };
        let (refusal, _) = RefusalBytes::read_from_prefix(bytes).map_err(|_| length)?;
        let [first, second] = refusal.numbers.map(le::U64::get);
        Ok(Self::from_numbers(refusal.code.get(), first, second))
    }
}
