//! Filling a new region from a snapshot, before anybody is let in.
//!
//! The values are stored by an ordinary client over a private socket: the protocol exists once.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside::{Client, Store};
use farside_config::ServerConfig;
use farside_control::address::Address;
use farside_fabric::shm::RegionMemory;
use farside_snapshot::{Reader, Record, SnapshotError};
use tracing::subscriber::NoSubscriber;

use crate::error::{ServerError, system};
use crate::listening::Listening;
use crate::recovery;
use crate::server::{Server, region_memory, stop_event};
use crate::service::Service;

/// Why a snapshot was not restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum RestoreError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("the file cannot be opened: {0}")]
    Open(io::Error),
    #[error("it is no regular file: name a file that `kv-cli snapshot` wrote")]
    NotAFile,
    #[error("the server was told to stop before all of it was there; nothing was kept")]
    Stopped,
    #[error(
        "{} is there already: a snapshot is restored into a new region; name another region_file, \
         or leave --restore out to continue with this one", .region_file.display()
    )]
    RegionExists { region_file: PathBuf },
    #[error(
        "the region is too small for it ({source}, after {records} of {total} keys): give the \
         server more --memory"
    )]
    NoRoom { records: u64, total: u64, source: farside::Error },
    #[error(
        "record {record} does not fit into the region ({source}): raise key_bytes_max or \
         value_bytes_max"
    )]
    TooLong { record: u64, source: farside::Error },
    #[error("storing record {record} failed: {source}")]
    Store { record: u64, source: farside::Error },
    #[error("the server for it did not start: {0}")]
    Private(Box<ServerError>),
}

/// A region that has the snapshot's content. On failure, also because it is to stop, nothing is
/// left, and a region file that was there is as it was.
pub(crate) fn restored_memory(
    snapshot: &Path,
    config: &ServerConfig,
    stop: &AtomicBool,
) -> Result<RegionMemory, ServerError> {
    let refused =
        |source| ServerError::Restore { path: snapshot.to_owned(), source: Box::new(source) };
    if let Some(region_file) = config.region_file.clone().filter(|path| path.exists()) {
        return Err(refused(RestoreError::RegionExists { region_file }));
    }
    // A file has no name until it is whole: a server that is killed meanwhile leaves no region that
    // the next one would take for complete.
    let mut memory = fill(snapshot, config, stop).map_err(refused)?;
    memory.name_file()?;
    Ok(memory)
}

fn fill(
    snapshot: &Path,
    config: &ServerConfig,
    stop: &AtomicBool,
) -> Result<RegionMemory, RestoreError> {
    // All of it once before there is a region: a damaged file is refused at once.
    let mut reader = open(snapshot)?;
    while next_record(&mut reader, stop)?.is_some() {}
    let (total, limits) = (reader.records(), reader.limits());
    tracing::info!(keys = total, "restoring a snapshot");
    let private = |error: ServerError| RestoreError::Private(Box::new(error));
    let folder = tempfile::Builder::new().prefix("farside-restore-").tempdir();
    let folder = folder.map_err(|source| private(system("make a folder")(source)))?;
    let address = Address::Shm(folder.path().join("kv.sock"));
    let config = ServerConfig {
        listen: Some(address.clone()),
        secret: None,
        reader_secret: None,
        // A snapshot that does not fit is refused, not thinned out.
        evict: false,
        // What the snapshot says, unless this server was told otherwise.
        key_bytes_max: config.key_bytes_max.or(limits.map(|of| of.key_bytes_max)),
        value_bytes_max: config.value_bytes_max.or(limits.map(|of| of.value_bytes_max)),
        ..config.clone()
    };
    config.validate().map_err(|error| private(error.into()))?;
    let start = || -> Result<_, ServerError> {
        let listening = Listening::at(&address, &config)?;
        let memory = region_memory(&config)?;
        let opened = recovery::open(&memory, &config)?;
        Ok((listening, Arc::new(memory), opened, stop_event()?))
    };
    let (listening, memory, opened, end): (_, _, _, OwnedFd) = start().map_err(private)?;
    let server = Server::serve(&config, listening, memory.clone(), opened, end, run_unheard);
    let server = server.map_err(private)?;
    let stored = store_all(snapshot, &address, (total, stop));
    server.stop();
    stored?;
    // The server's thread has ended, and with it the only other holder.
    let gone = || private(ServerError::Panicked);
    let mut memory = Arc::into_inner(memory).ok_or_else(gone)?;
    memory.is_new = false;
    tracing::info!(keys = total, "restored the snapshot");
    Ok(memory)
}

/// Serves without a line in the log: that a client of ours came and went, and that this server has
/// stopped, would only look as if the one that was asked for had. What fails is an error here.
fn run_unheard(service: Service) -> Result<(), ServerError> {
    tracing::subscriber::with_default(NoSubscriber::default(), || service.run())
}

fn open(snapshot: &Path) -> Result<Reader<BufReader<File>>, RestoreError> {
    // A pipe would be waited for, and is not read twice.
    if !fs::metadata(snapshot).map_err(RestoreError::Open)?.is_file() {
        return Err(RestoreError::NotAFile);
    }
    let file = File::open(snapshot).map_err(RestoreError::Open)?;
    Ok(Reader::open(BufReader::new(file))?)
}

/// The next record, unless the server is to stop.
fn next_record<'r>(
    reader: &'r mut Reader<impl BufRead>,
    stop: &AtomicBool,
) -> Result<Option<Record<'r>>, RestoreError> {
    if stop.load(Ordering::Relaxed) {
        return Err(RestoreError::Stopped);
    }
    Ok(reader.next_record()?)
}

/// Stores every record that has not ended, one after the other, for a key may come twice.
fn store_all(
    snapshot: &Path,
    address: &Address,
    (total, stop): (u64, &AtomicBool),
) -> Result<(), RestoreError> {
    let failed = |record| move |source| RestoreError::Store { record, source };
    let client = Client::builder().server(&address.to_string()).cache_bytes(0).connect();
    let mut session = client.and_then(|client| client.session()).map_err(failed(0))?;
    let mut reader = open(snapshot)?;
    let mut records = 0;
    while let Some(Record { key, value, expires_at_s }) = next_record(&mut reader, stop)? {
        records += 1;
        let end = UNIX_EPOCH + Duration::from_secs(expires_at_s.into());
        let store = match expires_at_s {
            0 => Store::always(),
            _ if end <= SystemTime::now() => continue,
            _ => Store::always().until(end),
        };
        session.store(key, value, store).map_err(|source| match source {
            farside::Error::OutOfSpace { .. } => RestoreError::NoRoom { records, total, source },
            farside::Error::KeyTooLong { .. } | farside::Error::ValueTooLong { .. } => {
                RestoreError::TooLong { record: records, source }
            }
            source => failed(records)(source),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
