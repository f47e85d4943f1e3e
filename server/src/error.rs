//! The errors for which a server does not start or stops serving, and the kinds of damage in a
//! region.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use farside_config::ConfigError;
use farside_config::size::ByteSize;
use farside_control::listening::ListenError;
use farside_fabric::ChainError;
use farside_fabric::memory::MemoryError;
use farside_fabric::rdma::VerbsError;
use farside_fabric::tcp::TlsError;
use farside_layout::LayoutError;
use farside_protocol::OperationError;
use farside_snapshot::SnapshotError;

use crate::cluster::ClusterError;

/// Why a server did not start, or why it failed later: one line that says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ServerError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Rdma(#[from] VerbsError),
    #[error(
        "{listen} is no address of an RDMA device of this host: `rdma link` and `ip address` show \
         the addresses of its devices"
    )]
    NoDeviceAddress { listen: String },
    #[error("another program listens at {listen}: stop it or listen at another port ({source})")]
    PortInUse { listen: String, source: ListenError },
    #[error("{listen} is no address of this host: `ip address` shows its addresses ({source})")]
    OtherHost { listen: String, source: ListenError },
    #[error(
        "this user may not listen at {listen} ({source}): take a port from 1024 on, or give the \
         program CAP_NET_BIND_SERVICE"
    )]
    ListenForbidden { listen: String, source: ListenError },
    #[error("cannot listen at {listen}: {source}")]
    ListenAt { listen: String, source: ListenError },
    #[error("cannot find the address of {listen}: {source}")]
    Name { listen: String, source: io::Error },
    #[error("cannot serve metrics at {address}: {why}")]
    Metrics { address: SocketAddr, why: String },
    #[error("another server listens at {}: stop it or listen elsewhere", .path.display())]
    SocketInUse { path: PathBuf },
    #[error("{} exists and is not a socket: remove it or listen elsewhere", .path.display())]
    NotASocket { path: PathBuf },
    #[error("the folder of {} does not exist: create it first", .path.display())]
    NoFolder { path: PathBuf },
    #[error("cannot create the socket {}: this user may not write there", .path.display())]
    NotWritable { path: PathBuf },
    #[error(
        "cannot lock {}: it belongs to user {user}, whose server listened there once. Have that \
         user or root remove the file, or listen in a folder of this user, such as /run/farside or \
         $XDG_RUNTIME_DIR", .path.display()
    )]
    LockOfAnother { path: PathBuf, user: u32 },
    #[error(
        "{} is no regular file of this user, or it has another name (a hard link), and the server \
         would lock it: remove it", .path.display()
    )]
    LockNotRegularFile { path: PathBuf },
    #[error("cannot listen at {}: {source}", .path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error(
        "{} holds no region to continue with: {source}; name another file, or delete this one if \
         its content is not needed", .path.display()
    )]
    NotARegion { path: PathBuf, source: LayoutError },
    #[error("cannot make a region with these settings: {0}; correct them in the config file")]
    Format(LayoutError),
    #[error(
        "the region in {} has format version {found}, and this server knows {known}: serve it with \
         the kv-server that made it, take a snapshot (`kv-cli snapshot FILE`), and start this \
         server with another region_file and `--restore FILE`", .path.display()
    )]
    OtherFormat { path: PathBuf, found: u32, known: u32 },
    #[error(
        "memory = {asked}, but the region in {} has {has}: write memory = \"{has}\" or leave it \
         out", .path.display()
    )]
    MemoryDiffers { path: PathBuf, asked: ByteSize, has: ByteSize },
    #[error(
        "at this address a verb can take effect {lateness_ms} ms late, which requires grace_ms >= \
         {grace_ms_min}; the region in {} has {grace_ms}: over RDMA lower rdma.retry_count or \
         rdma.ack_timeout, or listen at shm://, take a snapshot and restore it into a new region",
        .path.display()
    )]
    GraceTooShort { path: PathBuf, grace_ms: u32, lateness_ms: u64, grace_ms_min: u64 },
    #[error(
        "index = {asked} would take over half of the region's heap: write at most \"{max}\" or \
         raise memory"
    )]
    IndexTooLarge { asked: ByteSize, max: ByteSize },
    #[error(
        "the region in {0} is damaged: {damage}; no key was changed. `kv-cli verify --region {0}` \
         shows all damage, and a snapshot can be restored into another region_file",
        .path.display()
    )]
    Damaged { path: PathBuf, damage: Damage },
    #[error("cannot restore {}: {source}", .path.display())]
    Restore { path: PathBuf, source: Box<RestoreError> },
    #[error("cannot use TLS: {0}")]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("cannot use the region's memory: {0}")]
    Access(#[from] ChainError),
    #[error("the control service panicked, which is a bug: please report the lines above")]
    Panicked,
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
}

/// Why a snapshot was not restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum RestoreError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("the server was told to stop before all of it was restored; nothing was kept")]
    Stopped,
    #[error(
        "{} is there already: a snapshot is restored into a new region; name another region_file, \
         or leave --restore out to continue with this one", .region_file.display()
    )]
    RegionExists { region_file: PathBuf },
    #[error(
        "the region is too small for it ({source}, after {records} of {total} keys): start the \
         server with more --memory"
    )]
    NoRoom { records: u64, total: u64, source: OperationError },
    #[error(
        "record {record} does not fit into the region ({source}): raise key_bytes_max or \
         value_bytes_max"
    )]
    TooLong { record: u64, source: OperationError },
    #[error("storing record {record} failed: {source}")]
    Store { record: u64, source: OperationError },
    #[error("storing record {record} failed, because the new region cannot be used any more")]
    Stuck { record: u64 },
    #[error("cannot create a region for it: {0}")]
    Region(Box<ServerError>),
}

/// Damage in a region, and its location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum Damage {
    #[error("directory entry {entry}: {source}")]
    Directory { entry: u64, source: LayoutError },
    #[error("directory entry {entry} does not agree with its neighbours")]
    DirectoryEntry { entry: u64 },
    #[error("the row at offset {offset:#x} does not belong to its subtable")]
    Row { offset: u64 },
    #[error("chunk {chunk}: {source}")]
    Chunk { chunk: u32, source: LayoutError },
    #[error("chunk {chunk} should be the second chunk of a block and is not")]
    Span { chunk: u32 },
    #[error("the slot at offset {slot:#x} belongs to a split that no row header records")]
    Split { slot: u64 },
    #[error("{0}")]
    Access(#[from] ChainError),
}

impl ServerError {
    /// Returns the error for a file whose superblock is invalid or has another format version.
    pub(crate) fn no_region(path: &Path, source: LayoutError) -> Self {
        let path = path.to_owned();
        match source {
            LayoutError::FormatVersion { found, known } => Self::OtherFormat { path, found, known },
            source => Self::NotARegion { path, source },
        }
    }
}

/// Wraps an error of the operating system; `what` completes "cannot ...".
pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> ServerError {
    move |source| ServerError::System { what, source: source.into() }
}
