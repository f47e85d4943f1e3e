//! The accepting side on one host: a Unix socket at a path, with a lock file beside it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::net::{self, SocketAddrUnix, SocketFlags};

use super::connect::{Connection, new_socket};
use super::descriptors::{self, Closers, Socket};
use crate::memory::own_file::{self, FolderEntry};

const BACKLOG: i32 = 128;

/// The permissions of a socket, which decide which users may connect.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketOptions {
    /// The permissions of the socket's path. By default the process's mask decides.
    pub mode: Option<u32>,
    /// The group of the socket's path. By default it is the process's group.
    pub group: Option<u32>,
    /// For tests: the listener behaves as on Linux before 6.16, where a socket cannot refuse
    /// descriptors.
    #[doc(hidden)]
    pub takes_descriptors: bool,
}

/// A socket that clients connect to. Removes its path when dropped.
pub struct Listener {
    socket: Socket,
    path: PathBuf,
    /// Device and inode of the path, because another socket may have replaced it.
    bound: (u64, u64),
    /// Locks the path against other servers. The file is never removed: a server that has opened it
    /// could then lock a file that the next one does not see.
    lock: File,
}

impl Listener {
    /// Binds the path, also one that the socket of a dead server occupies. A lock on the file
    /// `<path>.lock` ensures that only one server does so at a time.
    ///
    /// # Errors
    /// `AddrInUse` if a server answers or starts at the path, `AlreadyExists` if the path is no
    /// socket, otherwise the system's error.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Self::bind_with(path, &SocketOptions::default())
    }

    /// Binds the path as [`Listener::bind`] does. The socket has these permissions before a client
    /// can connect.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_with(path: &Path, options: &SocketOptions) -> io::Result<Self> {
        // Checked before the lock: its file would stay beside another program's file.
        is_socket(path)?;
        let lock = lock_beside(path)?;
        if is_socket(path)? {
            let probe = new_socket(SocketFlags::NONBLOCK)?;
            match net::connect(&probe, &SocketAddrUnix::new(path)?) {
                // Another kind of socket belongs to another program. A socket whose backlog is full
                // has a listener.
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
        // No client can connect before `listen`.
        permit(&listener.path, options)?;
        net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// Waits for the next client to connect, and returns before its request arrives.
    ///
    /// # Errors
    /// The system's error, or `Other` while too many former connections cannot be closed.
    pub fn accept(&self) -> io::Result<Connection> {
        let closers = self.socket.closers();
        if closers.is_some_and(Closers::is_full) {
            let why = "too many former connections brought descriptors that do not close";
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
        // A failure does no harm: the next server removes a dead socket.
        if identity(&self.path).is_ok_and(|found| found == self.bound) {
            let _ = fs::remove_file(&self.path);
        }
        // Closing is not enough: a child that is just being started may have a copy of the
        // descriptor.
        own_file::unlock(&self.lock);
    }
}

/// Whether the path is a socket. An error if it is something else, false if it does not exist.
fn is_socket(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => Ok(true),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is not a socket")),
        Err(_) => Ok(false),
    }
}

/// Sets a new socket's group and mode through a descriptor, so that both change the same file.
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
        // fchmod refuses a descriptor with O_PATH, but chmod follows its link in /proc.
        let opened = format!("/proc/self/fd/{}", socket.as_raw_fd());
        fs::set_permissions(opened, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// The path of the file whose lock protects a socket's path from other servers.
pub fn lock_path(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    PathBuf::from(name)
}

fn lock_beside(path: &Path) -> io::Result<File> {
    let lock = FolderEntry::of(&lock_path(path))?.open_own()?;
    if own_file::lock(&lock)? { Ok(lock) } else { Err(io::ErrorKind::AddrInUse.into()) }
}

#[cfg(test)]
mod tests;
