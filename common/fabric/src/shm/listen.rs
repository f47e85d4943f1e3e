//! Where clients on this host connect: a Unix socket at a path, with a lock beside it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::net::{self, SocketAddrUnix, SocketFlags};

use super::connect::{Connection, new_socket};
use super::descriptors::{self, Closers, Socket};
use super::own_file::{self, Place};

const BACKLOG: i32 = 128;

/// Which users may connect to a socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketOptions {
    /// The permissions of its path; else what the process's mask leaves.
    pub mode: Option<u32>,
    /// The group of its path; else the process's.
    pub group: Option<u32>,
    /// As on Linux before 6.16, where a socket cannot refuse descriptors: for tests.
    #[doc(hidden)]
    pub takes_descriptors: bool,
}

/// A socket that clients connect to. Removes its path when dropped.
pub struct Listener {
    socket: Socket,
    path: PathBuf,
    /// Device and inode of the path, for another socket may have taken its place.
    bound: (u64, u64),
    /// Keeps the path from other servers. The file itself stays: to remove it safely is harder
    /// than to leave it.
    lock: File,
}

impl Listener {
    /// Binds the path; takes over one that a dead server left behind. A lock on a file beside it,
    /// `<path>.lock`, keeps two servers from doing so at the same time.
    ///
    /// # Errors
    /// `AddrInUse` when a server answers or starts there, `AlreadyExists` when the path is no
    /// socket, else what the system says.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Self::bind_with(path, &SocketOptions::default())
    }

    /// The same, with these permissions before anybody can connect.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_with(path: &Path, options: &SocketOptions) -> io::Result<Self> {
        // Before the lock, which would leave a file beside something that is not ours.
        is_socket(path)?;
        let lock = lock_beside(path)?;
        if is_socket(path)? {
            let probe = new_socket(SocketFlags::NONBLOCK)?;
            match net::connect(&probe, &SocketAddrUnix::new(path)?) {
                // Another kind of socket is another program's, and so is a full backlog.
                Ok(()) | Err(rustix::io::Errno::PROTOTYPE | rustix::io::Errno::AGAIN) => {
                    return Err(io::ErrorKind::AddrInUse.into());
                }
                Err(rustix::io::Errno::CONNREFUSED) => fs::remove_file(path)?,
                Err(error) => return Err(error.into()),
            }
        }
        let socket = new_socket(SocketFlags::empty())?;
        let refuses =
            !options.takes_descriptors && descriptors::refuse_descriptors(socket.as_fd()).is_ok();
        let socket = Socket::new(socket, (!refuses).then(Closers::default));
        net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        let listener = Self { bound: identity(path)?, socket, path: path.to_owned(), lock };
        // Nothing connects before it listens.
        permit(&listener.path, options)?;
        net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// The next client, without waiting for its request. Blocks.
    ///
    /// # Errors
    /// What the system says; `Other` while too many former connections cannot be closed.
    pub fn accept(&self) -> io::Result<Connection> {
        let closers = self.socket.closers();
        if closers.is_some_and(Closers::is_full) {
            let why = "former connections brought descriptors that do not close";
            return Err(io::Error::other(why));
        }
        let socket = net::accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        Ok(Connection::accepted(Socket::new(socket, closers.cloned())))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Nothing is lost if it stays: the next server takes a dead socket over.
        if identity(&self.path).is_ok_and(|found| found == self.bound) {
            let _ = fs::remove_file(&self.path);
        }
        // Explicitly, for a child that is just being started may hold a copy of the descriptor.
        own_file::unlock(&self.lock);
    }
}

/// Whether there is a socket; an error for anything else.
fn is_socket(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => Ok(true),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is not a socket")),
        Err(_) => Ok(false),
    }
}

/// Sets a new socket's group and mode, of the socket itself if something else has taken its path.
fn permit(path: &Path, options: &SocketOptions) -> io::Result<()> {
    use rustix::fs::{AtFlags, Gid, Mode, OFlags};
    if options.mode.is_none() && options.group.is_none() {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let socket = rustix::fs::open(path, flags, Mode::empty())?;
    if let Some(group) = options.group {
        let group = Some(Gid::from_raw(group));
        rustix::fs::chownat(&socket, c"", None, group, AtFlags::EMPTY_PATH)?;
    }
    if let Some(mode) = options.mode {
        // A descriptor with O_PATH takes no fchmod, but chmod follows its link in /proc.
        let opened = format!("/proc/self/fd/{}", socket.as_raw_fd());
        fs::set_permissions(opened, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// What keeps other servers away from a socket's path.
pub fn lock_path(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    PathBuf::from(name)
}

fn lock_beside(path: &Path) -> io::Result<File> {
    let lock = Place::of(&lock_path(path))?.open_own()?;
    if own_file::lock(&lock)? { Ok(lock) } else { Err(io::ErrorKind::AddrInUse.into()) }
}

#[cfg(test)]
mod tests;
