//! A region file that no server uses, read-only, for the checker.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use farside_fabric::shm::{Region, ShmFabric};
use farside_fabric::{Endpoint, LaneId};
use farside_tools::check::{self, Observer, Report, Scope};
use rustix::fs::{FlockOperation, Mode, OFlags};

/// Checks a region that no server uses meanwhile.
pub(crate) fn check(path: &Path, observer: &mut dyn Observer) -> anyhow::Result<Report> {
    let name = path.display();
    // Without waiting for the other end of a pipe.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.with_context(|| format!("cannot open {name}"))?);
    if !file.metadata()?.is_file() {
        bail!("{name} is not a file: name a server's region_file");
    }
    // Shared, so that several may look at once; a server's is not. Held as long as `file`.
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => bail!(
            "a server uses {name}: stop it first, or ask it with `kv-cli verify --server ADDRESS`"
        ),
        Err(error) => return Err(error).with_context(|| format!("cannot lock {name}")),
    }
    let region = Region::map_read_only(&file).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => anyhow::anyhow!("{name} is too short to hold a region"),
        _ => anyhow::Error::from(error).context(format!("cannot map {name}")),
    })?;
    let bytes = region.bytes();
    let endpoint = Endpoint::new(ShmFabric::new(Arc::new(region), None, 1), 1);
    let report = check::check_at_rest(&endpoint, LaneId(0), bytes, Scope::File, observer);
    report.with_context(|| format!("{name} cannot be checked"))
}
