//! Why a server is not, or no longer, a part of a cluster.

use std::path::PathBuf;

use farside_cluster::{RecordError, StoreError};
use farside_control::cluster::{Id, ShardCopy};

/// Why a server does not start as a part of a cluster, or why it gives its shard up: one line that
/// says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ClusterError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the records at {uri} cannot be used: {source}")]
    Records { uri: String, source: RecordError },
    #[error("there is no cluster at {uri}: make one with `kv-cli cluster create`, or correct it")]
    NoCluster { uri: String },
    #[error("the server was told to stop before it could read the records at {uri}")]
    Stopped { uri: String },
    #[error(
        "the region in {} has another hash key than the cluster at {uri}, so it is not of this \
         cluster: name another region_file, or delete this one if its content is not needed",
        .file.display()
    )]
    OtherHashKey { file: PathBuf, uri: String },
    #[error(
        "no shard of the cluster at {uri} has the region in {}: another server has its shard now. \
         Name another region_file, or delete this one if its content is not needed",
        .file.display()
    )]
    NoShard { file: PathBuf, uri: String },
    #[error(
        "an operator has given up the region in {}, which shard {shard} had: name another \
         region_file, or delete this one if its content is not needed", .file.display()
    )]
    Revoked { file: PathBuf, shard: u16 },
    #[error(
        "{} is a copy of the region file of shard {shard}, or that file was moved while its server \
         {server} could not say so: start the server with the original file and stop it cleanly, \
         and move the file then", .file.display()
    )]
    OtherFile { file: PathBuf, shard: u16, server: Id },
    #[error(
        "{} is an older copy of the region of shard {shard}, which the server {server} has served \
         since: writes are missing in it. Start the server with the file that was served last. If \
         the records were restored from a backup, run `kv-cli cluster repair` first",
        .file.display()
    )]
    StaleFile { file: PathBuf, shard: u16, server: Id },
    #[error("cannot write to the superblock of the region: {0}")]
    Superblock(farside_fabric::ChainError),
    #[error("{}", .0)]
    GivenUp(Box<GivenUp>),
}

/// A shard that its server has lost to another one, or to none.
#[derive(Debug)]
pub struct GivenUp {
    /// The shard.
    pub shard: u16,
    /// The number of its view now.
    pub number: u64,
    /// The copy that the shard has now.
    pub now_at: Option<ShardCopy>,
    /// The region file of this server.
    pub file: Option<PathBuf>,
}

impl std::fmt::Display for GivenUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { shard, number, now_at, file } = self;
        match now_at {
            Some(ShardCopy { server, addresses, .. }) => {
                let addresses = farside_config::addresses_text(addresses);
                write!(f, "shard {shard} was given to the server {server} at {addresses}")?;
            }
            None => write!(f, "shard {shard} was taken from this server, and has no server")?,
        }
        write!(f, " (view {number}), so this server ends")?;
        match file {
            Some(file) => write!(f, ". Its region file {} can be deleted", file.display()),
            None => Ok(()),
        }
    }
}
