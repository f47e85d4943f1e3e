//! The reasons for which a server refuses a connection.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use farside_fabric::rdma::REASON_BYTES_MAX;

use super::{Nonce, Versions};
use crate::ControlError;

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

pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"FSno");

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
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let length = ControlError::Length { bytes: bytes.len() };
        let (refusal, _) = RefusalBytes::read_from_prefix(bytes).map_err(|_| length)?;
        let [first, second] = refusal.numbers.map(le::U64::get);
        Ok(Self::from_numbers(refusal.code.get(), first, second))
    }
}
