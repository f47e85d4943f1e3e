//! The clients of a server, as it lists them, and the description that a client sends.

use serde::Serialize;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{ControlError, Role};

/// The maximum number of clients in one message.
pub const CLIENTS_PER_MESSAGE_MAX: usize = 256;
/// The maximum length of a text in a description, in bytes.
pub const DESCRIPTION_TEXT_BYTES_MAX: usize = 64;

/// A client's description of itself. The server passes it on and does not check it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClientDescription {
    /// The number of its process, on its host.
    pub pid: u32,
    /// The name of its host, at most [`DESCRIPTION_TEXT_BYTES_MAX`] bytes.
    pub host: String,
    /// The name of its program, at most [`DESCRIPTION_TEXT_BYTES_MAX`] bytes.
    pub program: String,
    /// Its sessions on this connection.
    pub sessions: u32,
    /// The free blocks that its sessions hold for their next writes.
    pub blocks_held: u64,
    /// Operations on keys since it connected.
    pub operations: u64,
    /// Reads that found their key since it connected.
    pub reads_found: u64,
    /// Reads that did not find their key since it connected.
    pub reads_absent: u64,
    /// The median latency of a GET, in nanoseconds; 0 if it is unknown.
    pub get_p50_ns: u64,
    /// The latency that 99 % of GETs do not exceed, in nanoseconds; 0 if it is unknown.
    pub get_p99_ns: u64,
}

/// The fabric through which a client came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FabricKind {
    /// Shared memory of one host.
    Shm = 1,
    /// TCP.
    Tcp = 2,
    /// RDMA.
    Rdma = 3,
}

impl FabricKind {
    /// The scheme of its addresses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

/// A client of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConnectedClient {
    /// Its id, which a later client can get only after all others have been used.
    pub id: u16,
    /// Its role.
    pub role: Role,
    /// The fabric through which it came.
    pub fabric: FabricKind,
    /// Whether it is the client that asked for the list.
    pub is_asking: bool,
    /// The id of its user, if it is on the server's host and came through a Unix socket.
    pub user: Option<u32>,
    /// How long it has been connected, in milliseconds.
    pub connected_ms: u64,
    /// The last description of itself that it sent; `None` if it has sent none yet.
    pub description: Option<ClientDescription>,
    /// How long ago the description arrived, in milliseconds; 0 without one.
    pub description_age_ms: u64,
}

/// A description in a message, before its two texts.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct DescriptionBytes {
    pid: le::U32,
    sessions: le::U32,
    numbers: [le::U64; 6],
    host_bytes: u8,
    program_bytes: u8,
}

/// A client in a message, before its description.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ClientBytes {
    id: le::U16,
    role: u8,
    fabric: u8,
    flags: le::U32,
    user: le::U32,
    connected_ms: le::U64,
    description_age_ms: le::U64,
}

/// The flags of a client in a message.
const ASKS: u32 = 1;
const HAS_USER: u32 = 2;
const HAS_DESCRIPTION: u32 = 4;

/// Takes a value from the start of a payload.
fn take<T: FromBytes>(payload: &mut &[u8]) -> Result<T, ControlError> {
    let length = ControlError::Length { bytes: payload.len() };
    let (value, rest) = T::read_from_prefix(payload).map_err(|_| length)?;
    *payload = rest;
    Ok(value)
}

/// Takes a text of so many bytes from the start of a payload.
fn take_text(bytes: u8, payload: &mut &[u8]) -> Result<String, ControlError> {
    let length = ControlError::Length { bytes: payload.len() };
    let bytes = usize::from(bytes);
    if bytes > DESCRIPTION_TEXT_BYTES_MAX {
        return Err(length);
    }
    let (text, rest) = payload.split_at_checked(bytes).ok_or(length)?;
    *payload = rest;
    let (field, value) = ("text", bytes as u64);
    let text = str::from_utf8(text).map_err(|_| ControlError::Unknown { field, value })?;
    Ok(text.to_owned())
}

impl ClientDescription {
    /// Returns the longest beginning of a text that a description can have.
    fn shorten(text: &str) -> &str {
        &text[..text.floor_char_boundary(DESCRIPTION_TEXT_BYTES_MAX)]
    }

    /// Appends the description to a message. Texts that are too long are shortened.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let (host, program) = (Self::shorten(&self.host), Self::shorten(&self.program));
        let numbers = [
            self.blocks_held,
            self.operations,
            self.reads_found,
            self.reads_absent,
            self.get_p50_ns,
            self.get_p99_ns,
        ];
        let bytes = DescriptionBytes {
            pid: self.pid.into(),
            sessions: self.sessions.into(),
            numbers: numbers.map(Into::into),
            host_bytes: host.len() as u8,
            program_bytes: program.len() as u8,
        };
        into.extend_from_slice(bytes.as_bytes());
        into.extend_from_slice(host.as_bytes());
        into.extend_from_slice(program.as_bytes());
    }

    /// Takes a description from the start of a payload.
    pub(super) fn take(payload: &mut &[u8]) -> Result<Self, ControlError> {
        let bytes: DescriptionBytes = take(payload)?;
        let [blocks_held, operations, reads_found, reads_absent, get_p50_ns, get_p99_ns] =
            bytes.numbers.map(le::U64::get);
        Ok(Self {
            pid: bytes.pid.get(),
            sessions: bytes.sessions.get(),
            blocks_held,
            operations,
            reads_found,
            reads_absent,
            get_p50_ns,
            get_p99_ns,
            host: take_text(bytes.host_bytes, payload)?,
            program: take_text(bytes.program_bytes, payload)?,
        })
    }
}

impl ConnectedClient {
    /// Appends the client to a message.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let flags = flag(self.is_asking, ASKS)
            | flag(self.user.is_some(), HAS_USER)
            | flag(self.description.is_some(), HAS_DESCRIPTION);
        let bytes = ClientBytes {
            id: self.id.into(),
            role: self.role as u8,
            fabric: self.fabric as u8,
            flags: flags.into(),
            user: self.user.unwrap_or(0).into(),
            connected_ms: self.connected_ms.into(),
            description_age_ms: self.description_age_ms.into(),
        };
        into.extend_from_slice(bytes.as_bytes());
        if let Some(description) = &self.description {
            description.encode(into);
        }
    }

    /// Takes a client from the start of a payload.
    pub(super) fn take(payload: &mut &[u8]) -> Result<Self, ControlError> {
        let bytes: ClientBytes = take(payload)?;
        let (flags, user) = (bytes.flags.get(), bytes.user.get());
        let unknown = |field, value: u64| ControlError::Unknown { field, value };
        if flags & !(ASKS | HAS_USER | HAS_DESCRIPTION) != 0 {
            return Err(unknown("flags", flags.into()));
        }
        let (has_user, is_described) = (flags & HAS_USER != 0, flags & HAS_DESCRIPTION != 0);
        if !has_user && user != 0 {
            return Err(unknown("user", user.into()));
        }
        let role = match bytes.role {
            1 => Role::Reader,
            2 => Role::Writer,
            other => return Err(unknown("role", other.into())),
        };
        let fabric = match bytes.fabric {
            1 => FabricKind::Shm,
            2 => FabricKind::Tcp,
            3 => FabricKind::Rdma,
            other => return Err(unknown("fabric", other.into())),
        };
        Ok(Self {
            id: bytes.id.get(),
            role,
            fabric,
            is_asking: flags & ASKS != 0,
            user: has_user.then_some(user),
            connected_ms: bytes.connected_ms.get(),
            description: is_described.then(|| ClientDescription::take(payload)).transpose()?,
            description_age_ms: bytes.description_age_ms.get(),
        })
    }
}
