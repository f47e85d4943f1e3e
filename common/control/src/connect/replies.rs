//! The answers of a server that does not refuse, and the client's proof.

use farside_fabric::rdma::{RemoteRegion, Rkeys, SLICES_MAX, slice_count};
use farside_layout::{CHUNK_BYTES, FORMAT_VERSION, REGION_BYTES_MAX, REGION_BYTES_MIN};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{Refusal, Versions, is_client_id};
use crate::cluster::{Id, SHARDS_MAX};
use crate::{ControlError, MESSAGE_BYTES_MAX, Nonce, Proof, REPLY_BYTES_MAX, Role, connect};

/// The largest RTT_min, the minimum of a round trip, that a client accepts from a server. No device
/// has a larger one. With a larger one the client would trust hints for too long.
const ROUND_TRIP_MIN_NS_MAX: u32 = 1_000_000;

const CHALLENGE_MAGIC: u32 = u32::from_le_bytes(*b"FSch");
const PROOF_MAGIC: u32 = u32::from_le_bytes(*b"FSpr");
const DATA_MAGIC: u32 = u32::from_le_bytes(*b"FSda");
const WELCOME_MAGIC: u32 = u32::from_le_bytes(*b"FSwe");

/// Returns the message with this magic number in these bytes, or the refusal in its place.
fn read<T: FromBytes>(
    bytes: &[u8],
    magic: u32,
) -> Result<Result<(T, &[u8]), Refusal>, ControlError> {
    let length = || ControlError::Length { bytes: bytes.len() };
    match bytes.first_chunk().map(|found| u32::from_le_bytes(*found)) {
        None => Err(length()),
        Some(connect::MAGIC) => Ok(Err(Refusal::decode(bytes)?)),
        Some(found) if found == magic => Ok(Ok(T::read_from_prefix(bytes).map_err(|_| length())?)),
        Some(_) => Err(ControlError::NotFarside),
    }
}

fn is_known(field: &'static str, value: u64, is_known: bool) -> Result<(), ControlError> {
    if is_known { Ok(()) } else { Err(ControlError::Unknown { field, value }) }
}

/// Checks that RDMA-CM has padded the message with zeros, if at all.
fn is_padding(rest: &[u8]) -> Result<(), ControlError> {
    let other = rest.iter().find(|byte| **byte != 0);
    is_known("padding", other.copied().unwrap_or(0).into(), other.is_none())
}

/// The server's answer to the hello of a control connection, or of one for the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// The version of the protocol for this connection.
    pub version: u16,
    /// A random number of this connection.
    pub nonce: Nonce,
    /// The proofs that the server knows the client's secret: one for each secret that a client of
    /// this role may have. A server with one secret for the role repeats its proof.
    pub proofs: [Proof; 2],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ChallengeBytes {
    magic: le::U32,
    version: le::U16,
    reserved: [u8; 2],
    nonce: Nonce,
    proofs: [Proof; 2],
}
const _: () = assert!(size_of::<ChallengeBytes>() <= REPLY_BYTES_MAX);

impl Challenge {
    /// Returns the encoded challenge.
    pub fn encode(&self) -> Vec<u8> {
        let Self { version, nonce, proofs } = *self;
        let magic = CHALLENGE_MAGIC.into();
        let bytes =
            ChallengeBytes { magic, version: version.into(), reserved: [0; 2], nonce, proofs };
        bytes.as_bytes().to_vec()
    }

    /// Returns the challenge in these bytes, which RDMA-CM may have padded, or the refusal.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are no answer to a hello.
    pub fn decode(bytes: &[u8]) -> Result<Result<Self, Refusal>, ControlError> {
        let (challenge, rest) = match read::<ChallengeBytes>(bytes, CHALLENGE_MAGIC)? {
            Ok(read) => read,
            Err(refusal) => return Ok(Err(refusal)),
        };
        is_padding(rest)?;
        is_padding(&challenge.reserved)?;
        let ChallengeBytes { version, nonce, proofs, .. } = challenge;
        let version = version.get();
        let is_spoken = (Versions::OWN.lowest..=Versions::OWN.highest).contains(&version);
        is_known("protocol version", version.into(), is_spoken)?;
        Ok(Ok(Self { version, nonce, proofs }))
    }
}

/// The client's answer to a [`Challenge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProofMessage(pub Proof);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ProofBytes {
    magic: le::U32,
    proof: Proof,
}

impl ProofMessage {
    /// Returns the encoded message.
    pub fn encode(&self) -> Vec<u8> {
        ProofBytes { magic: PROOF_MAGIC.into(), proof: self.0 }.as_bytes().to_vec()
    }

    /// Returns the message in these bytes.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are no such message.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let length = ControlError::Length { bytes: bytes.len() };
        let ProofBytes { magic, proof } = ProofBytes::read_from_bytes(bytes).map_err(|_| length)?;
        if magic.get() == PROOF_MAGIC { Ok(Self(proof)) } else { Err(ControlError::NotFarside) }
    }
}

/// The server's answer to the hello of a session's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataAccepted {
    /// The proof that it is the client's server.
    pub proof: Proof,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct DataBytes {
    magic: le::U32,
    proof: Proof,
}
const _: () = assert!(size_of::<DataBytes>() <= REPLY_BYTES_MAX);

impl DataAccepted {
    /// Returns the encoded answer.
    pub fn encode(&self) -> Vec<u8> {
        DataBytes { magic: DATA_MAGIC.into(), proof: self.proof }.as_bytes().to_vec()
    }

    /// Returns the answer in these bytes, which RDMA-CM may have padded, or the refusal.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are no answer to a hello.
    pub fn decode(bytes: &[u8]) -> Result<Result<Self, Refusal>, ControlError> {
        let (DataBytes { proof, .. }, rest) = match read(bytes, DATA_MAGIC)? {
            Ok(read) => read,
            Err(refusal) => return Ok(Err(refusal)),
        };
        is_padding(rest)?;
        Ok(Ok(Self { proof }))
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct WelcomeBytes {
    magic: le::U32,
    format_version: le::U32,
    client_id: le::U16,
    shard: le::U16,
    region_id: [u8; 16],
    incarnation: le::U64,
    lease: le::U64,
    base_address: le::U64,
    region_bytes: le::U64,
    data_nonce: Nonce,
    cluster: [u8; 16],
    view_number: le::U64,
    round_trip_min_ns: le::U32,
    /// The length of a slice in chunks; 0 if the region is registered whole.
    slice_chunks: le::U32,
    /// The remote keys of the slices.
    rkeys: [le::U32; SLICES_MAX],
}
const _: () = assert!(size_of::<WelcomeBytes>() <= MESSAGE_BYTES_MAX);

/// The answer of a server that accepts a client. The client then reads the region's limits from the
/// superblock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Welcome {
    /// The client's number while it is connected; 0 only in the answer to
    /// [`Purpose::Map`](crate::Purpose::Map).
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
    /// The nonce for the proofs in the next hellos of sessions' connections. Zeros on shared
    /// memory, which has no such connections.
    pub data_nonce: Nonce,
    /// The cluster that the server is a part of, if any; otherwise zeros.
    pub cluster: Id,
    /// The shard that it serves; 0 without a cluster.
    pub shard: u16,
    /// The number of the shard's view; 0 without a cluster.
    pub view_number: u64,
}

impl Welcome {
    /// The answer to [`Purpose::Map`](crate::Purpose::Map), which has no client. `shard` and
    /// `view_number` are 0 if the server is a spare.
    pub fn for_map(cluster: Id, shard: u16, view_number: u64) -> Self {
        Self { cluster, shard, view_number, ..Self::default() }
    }

    /// Whether this is the answer to [`Purpose::Map`](crate::Purpose::Map).
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

    /// Returns the encoded welcome.
    pub fn encode(&self) -> Vec<u8> {
        let bytes = WelcomeBytes {
            magic: WELCOME_MAGIC.into(),
            format_version: FORMAT_VERSION.into(),
            client_id: self.client_id.into(),
            shard: self.shard.into(),
            region_id: self.region_id,
            incarnation: self.incarnation.into(),
            lease: self.lease.into(),
            base_address: self.base_address.into(),
            region_bytes: self.region_bytes.into(),
            data_nonce: self.data_nonce,
            cluster: self.cluster.0,
            view_number: self.view_number.into(),
            round_trip_min_ns: self.round_trip_min_ns.into(),
            slice_chunks: ((self.rkeys.slice_bytes / CHUNK_BYTES) as u32).into(),
            rkeys: self.rkeys.keys.map(le::U32::new),
        };
        bytes.as_bytes().to_vec()
    }

    /// Returns the welcome in these bytes, or the refusal.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are no answer to a proof.
    pub fn decode(bytes: &[u8]) -> Result<Result<Self, Refusal>, ControlError> {
        let (reply, rest) = match read::<WelcomeBytes>(bytes, WELCOME_MAGIC)? {
            Ok(read) => read,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if !rest.is_empty() {
            return Err(ControlError::Length { bytes: bytes.len() });
        }
        let format = reply.format_version.get();
        is_known("format version", format.into(), format == FORMAT_VERSION)?;
        let slice_bytes = u64::from(reply.slice_chunks.get()) * CHUNK_BYTES;
        let rkeys = Rkeys { slice_bytes, keys: reply.rkeys.map(le::U32::get) };
        let welcome = Self {
            client_id: reply.client_id.get(),
            lease: reply.lease.get(),
            region_id: reply.region_id,
            incarnation: reply.incarnation.get(),
            base_address: reply.base_address.get(),
            region_bytes: reply.region_bytes.get(),
            rkeys,
            round_trip_min_ns: reply.round_trip_min_ns.get(),
            data_nonce: reply.data_nonce,
            cluster: Id(reply.cluster),
            shard: reply.shard.get(),
            view_number: reply.view_number.get(),
        };
        welcome.check()?;
        Ok(Ok(welcome))
    }

    /// Checks what no server sends.
    fn check(&self) -> Result<(), ControlError> {
        let Self { client_id, lease, incarnation, base_address, region_bytes, .. } = *self;
        let Self { rkeys, round_trip_min_ns, cluster, shard, view_number, .. } = *self;
        is_known("shard", shard.into(), shard < SHARDS_MAX)?;
        let is_for_map = *self == Self::for_map(cluster, shard, view_number);
        if is_for_map && cluster != Id::default() {
            return Ok(());
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
        let is_shared = self.is_shared();
        let bounds = if is_shared { 0..=0 } else { 1..=ROUND_TRIP_MIN_NS_MAX };
        is_known("round trip", round_trip_min_ns.into(), bounds.contains(&round_trip_min_ns))?;
        is_known("base address", base_address, !is_shared || base_address == 0)
    }

    /// Whether the client maps the region, so that its sessions make no connections.
    pub(crate) fn is_shared(&self) -> bool {
        self.data_nonce == Nonce::default()
    }
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
