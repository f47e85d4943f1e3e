//! Attaching on this host: a Unix socket passes the region as a descriptor.
//!
//! If another user made the socket, that user could pass messages on between the client and the
//! real server, and keep the region's descriptor. Without a secret it would even get the client's
//! keys and values. So a client first checks which user listens. It trusts root and its own user.
//! It also trusts the owner of the socket's folder, if no other user could have put that folder
//! there.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_fabric::memory::{Lease, Region};
use farside_fabric::shm::{Connection, ShmChannel, ShmFabric};
use farside_fabric::{AnyFabric, Fabric, RegionIndex, interrupt};
use farside_layout::{CLIENT_IDS, LayoutError, SUPERBLOCK_BYTES, Superblock};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{Attached, ConnectError, ConnectOptions, Contact, FabricFactory, Result, system};
use crate::{ControlChannel, MESSAGE_BYTES_MAX, Purpose, Role, Welcome};

/// Makes fabrics that reach a region on this host.
struct ShmFactory {
    region: Arc<Region>,
    lease: Lease,
}

impl FabricFactory for ShmFactory {
    fn fabric(&self, lanes: u16) -> Result<AnyFabric> {
        Ok(AnyFabric::Shm(ShmFabric::new(self.region.clone(), Some(self.lease), lanes)))
    }

    fn add_to(&self, fabric: &mut AnyFabric, replaces: Option<RegionIndex>) -> Result<RegionIndex> {
        let Some(AnyFabric::Shm(own)) = fabric.any() else { return Err(ConnectError::OtherFabric) };
        let index = own.add_region(self.region.clone(), Some(self.lease), replaces);
        replaces.inspect(|replaced| fabric.replaced(*replaced));
        Ok(index)
    }
}

/// The socket, the server's welcome, and the region's descriptor.
type Welcomed = (Connection, Welcome, Option<OwnedFd>);

/// Connects with this purpose, if the server's user is trusted, and proves both ways.
fn connect(
    options: &ConnectOptions,
    path: &Path,
    purpose: Purpose,
    timeout: Duration,
) -> Result<Welcomed> {
    let started = Instant::now();
    let silent = || options.unreachable(Contact::Silent, started.elapsed(), None);
    let hung_up = || options.unreachable(Contact::HungUp, started.elapsed(), None);
    // At least 1 ms, because a socket timeout of 0 means no timeout.
    let left = || timeout.saturating_sub(started.elapsed()).max(Duration::from_millis(1));
    let connection = Connection::connect(path, left()).map_err(|source| {
        match Errno::from_io_error(&source) {
            // The listener's backlog is full.
            Some(Errno::AGAIN) => silent(),
            Some(Errno::ACCESS | Errno::PERM) => {
                let (server, source) = (options.address.to_string(), Arc::new(source));
                ConnectError::Forbidden { server, source }
            }
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                system("connecting to the server's socket")(source)
            }
            _ => options.unreachable(Contact::None, started.elapsed(), Some(source)),
        }
    })?;
    let user = connection.peer_user().map_err(system("asking whose server it is"))?;
    if !may_serve(user, path) {
        return Err(ConnectError::Untrusted { server: options.address.to_string(), user });
    }
    let exchange = |message: &[u8]| {
        connection.send(message, None).map_err(|_| hung_up())?;
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let received = loop {
            let step = interrupt::step(left()).max(Duration::from_millis(1));
            let waiting = connection.set_receive_timeout(Some(step));
            waiting.map_err(system("setting up the socket"))?;
            match connection.receive(&mut buffer) {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && started.elapsed() < timeout
                        && !interrupt::gives_up() => {}
                received => break received,
            }
        };
        let (bytes, descriptor) =
            received.map_err(|source| match Errno::from_io_error(&source) {
                Some(Errno::MFILE) => system("receiving the region's descriptor")(source),
                Some(Errno::CONNRESET) => hung_up(),
                Some(Errno::AGAIN) => silent(),
                _ => options.unreachable(Contact::Silent, started.elapsed(), Some(source)),
            })?;
        if bytes == 0 {
            return Err(hung_up());
        }
        buffer.truncate(bytes);
        Ok((buffer, descriptor))
    };
    let request = options.request(purpose)?;
    let (challenge, _) = exchange(&request.encode())?;
    let mut region = None;
    let (welcome, _) = options.prove(&request, &challenge, |proof| {
        let (answer, descriptor) = exchange(proof)?;
        region = descriptor;
        Ok(answer)
    })?;
    Ok((connection, welcome, region))
}

/// Connects for the map of the server's cluster.
pub(super) fn map_channel(
    options: &ConnectOptions,
    path: &Path,
    timeout: Duration,
) -> Result<(Box<dyn ControlChannel>, Welcome)> {
    let (connection, welcome, _) = connect(options, path, Purpose::Map, timeout)?;
    let channel = ShmChannel::over(connection).map_err(system("setting up the socket"))?;
    Ok((Box::new(channel), welcome))
}

pub(super) fn attach(options: &ConnectOptions, path: &Path, timeout: Duration) -> Result<Attached> {
    let (connection, welcome, descriptor) = connect(options, path, Purpose::Control, timeout)?;
    options.check(&welcome)?;
    let truncated = LayoutError::Truncated { what: "welcome without a descriptor", bytes: 0 };
    let file = File::from(descriptor.ok_or(truncated)?);
    let region = match options.role {
        Role::Reader => Region::map_read_only(&file),
        Role::Writer => Region::map(&file),
    };
    let region = region.map_err(system("mapping the region"))?;
    let (says, is) = (welcome.region_bytes, region.bytes());
    if says != is {
        return Err(LayoutError::RegionLength { says, is }.into());
    }
    let lease = Lease { offset: lease_offset(&region, &welcome)?, number: welcome.lease };
    let channel = ShmChannel::over(connection).map_err(system("setting up the socket"))?;
    let factory = Box::new(ShmFactory { region: Arc::new(region), lease });
    Ok(Attached { address: options.address.clone(), welcome, factory, channel: Box::new(channel) })
}

/// Returns the offset of this client's entry in the client table.
fn lease_offset(region: &Region, welcome: &Welcome) -> Result<u64> {
    let mut words = [0u64; SUPERBLOCK_BYTES as usize / 8];
    let short = || LayoutError::Truncated { what: "region", bytes: region.bytes() };
    region.read(0, &mut words).map_err(|_| short())?;
    let (_, format) = Superblock::decode(words.as_bytes(), region.bytes())?;
    Ok(format.geometry().client_entry(welcome.client_id).ok_or_else(|| {
        let (field, value) = ("client id", welcome.client_id.into());
        LayoutError::Bound { field, value, min: 1, max: CLIENT_IDS.into() }
    })?)
}

const ROOT: u32 = 0;
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Whether a client trusts a server of this user at this socket.
pub(crate) fn may_serve(user: u32, socket: &Path) -> bool {
    let own_user = rustix::process::geteuid().as_raw();
    if user == ROOT || user == own_user {
        return true;
    }
    let Some(folder) = socket.parent() else { return false };
    let is_owner = fs::metadata(folder).is_ok_and(|found| found.uid() == user);
    // The folder behind a symbolic link counts too: it may be another user's.
    let real = fs::canonicalize(folder);
    is_owner
        && is_protected(folder, user, own_user)
        && real.is_ok_and(|real| is_protected(&real, user, own_user))
}

/// Whether only root, this process's user and `user` could have put a folder where it is.
fn is_protected(folder: &Path, user: u32, own_user: u32) -> bool {
    let pairs = folder.ancestors().zip(folder.ancestors().skip(1));
    let mut pairs = pairs.map(|(inner, outer)| Some((metadata(inner)?, metadata(outer)?)));
    pairs.all(|pair| {
        pair.is_some_and(|(inner, outer)| is_step_protected(&inner, &outer, user, own_user))
    })
}

fn metadata(path: &Path) -> Option<Metadata> {
    fs::metadata(path).ok()
}

/// Whether only root, this process's user and `user` could have put the folder `inner` into
/// `outer`.
fn is_step_protected(inner: &Metadata, outer: &Metadata, user: u32, own_user: u32) -> bool {
    let is_ours = |found: &Metadata| [ROOT, own_user].contains(&found.uid());
    // In a sticky folder, such as /tmp, all users make entries, but replace only their own.
    let is_sticky_and_ours = outer.mode() & STICKY != 0 && is_ours(inner);
    let is_writable = outer.mode() & WRITABLE_BY_OTHERS != 0;
    (is_ours(outer) || outer.uid() == user) && (!is_writable || is_sticky_and_ours)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use farside_fabric::rdma::Options;
    use farside_fabric::shm::Listener;

    use super::*;
    use crate::SecretKey;
    use crate::address::Address;

    #[test]
    fn a_server_that_never_accepts_is_unreachable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv.sock");
        let listener = Listener::bind(&path).unwrap();
        // The backlog has room for one connection.
        rustix::net::listen(&listener, 0).unwrap();
        let options = ConnectOptions {
            address: Address::Shm(path),
            others: Vec::new(),
            role: Role::Writer,
            view: None,
            secret_key: SecretKey::NONE,
            timeout: Duration::from_millis(1),
            answer_timeout: Duration::from_millis(1),
            rdma: Options::default(),
            tls: Default::default(),
            trust: farside_fabric::Trust::forever(),
        };
        // The first attempt waits for a reply, and the second for room in the backlog.
        for _ in 0..2 {
            let Err(ConnectError::Unreachable { contact, source, .. }) =
                options.attach(options.timeout)
            else {
                panic!("no server answers");
            };
            assert!(contact == Contact::Silent && source.is_none(), "{contact:?} {source:?}");
        }
    }

    const OTHER: u32 = 54321;

    #[test]
    fn another_users_folder_is_trusted_only_where_that_user_could_not_put_it() {
        if !rustix::process::geteuid().is_root() {
            // Only root can change the owner of a file.
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, mode, owner| {
            let path = folder.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            chown(&path, Some(owner), None).unwrap();
            path.join("kv.sock")
        };
        // A folder such as /run/farside.
        let of_server = make("farside", 0o750, OTHER);
        assert!(may_serve(OTHER, &of_server));
        assert!(!may_serve(OTHER + 1, &of_server));
        assert!(may_serve(0, &of_server), "root is always trusted");
        // A socket directly in /tmp, and one in a folder that another user made there.
        let shared = make("tmp", 0o1777, 0);
        assert!(!may_serve(OTHER, &shared));
        let of_other = make("tmp/farside", 0o755, OTHER);
        assert!(!may_serve(OTHER, &of_other));
        // Another user's link to the server's folder, and a link to the other user's folder.
        symlink(of_server.parent().unwrap(), folder.path().join("tmp/link")).unwrap();
        assert!(!may_serve(OTHER, &folder.path().join("tmp/link/kv.sock")));
        symlink(of_other.parent().unwrap(), folder.path().join("link")).unwrap();
        assert!(!may_serve(OTHER, &folder.path().join("link/kv.sock")));
    }
}
