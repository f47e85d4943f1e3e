//! The hello, which is a client's first message on any connection.
//!
//! A server answers the hello of a control connection with a [`Challenge`], the client answers with
//! its proof, and the server with a [`Welcome`]. It answers the hello of a session's connection,
//! which has a proof already, with a [`DataAccepted`]. Instead of each answer there may be a
//! [`Refusal`].

mod refusal;
mod replies;

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use farside_layout::CLIENT_IDS;

use super::cluster::SHARDS_MAX;
use super::{Nonce, PROTOCOL_VERSION, Proof, REQUEST_BYTES_MAX, Role};
pub use refusal::Refusal;
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

#[cfg(test)]
mod tests;
