//! Sockets carry messages and descriptors as documented, and two servers never share one.

use std::io::{Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;

const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A path for a socket, and its temporary folder.
fn new_path() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv.sock");
    (folder, path)
}

/// The kind of error with which a listener at this path fails.
fn bind_error(path: &Path) -> io::ErrorKind {
    Listener::bind(path).err().unwrap().kind()
}

fn pair() -> (Connection, Connection) {
    let (_folder, path) = new_path();
    let listener = Listener::bind(&path).unwrap();
    let client = Connection::connect(&path, TEST_TIMEOUT).unwrap();
    (client, listener.accept().unwrap())
}

#[test]
fn messages_keep_their_boundaries_and_carry_descriptors() {
    let (client, server) = pair();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"inside").unwrap();
    server.send(b"one", Some(file.as_fd())).unwrap();
    server.send(b"two", None).unwrap();
    let mut buffer = [0; 8];
    let (bytes, descriptor) = client.receive(&mut buffer).unwrap();
    assert_eq!(&buffer[..bytes], b"one");
    let mut passed = std::fs::File::from(descriptor.unwrap());
    passed.rewind().unwrap();
    let mut content = String::new();
    passed.read_to_string(&mut content).unwrap();
    assert_eq!(content, "inside");
    let (bytes, descriptor) = client.receive(&mut buffer).unwrap();
    assert_eq!((&buffer[..bytes], descriptor.is_none()), (&b"two"[..], true));
    server.send(b"far too long", None).unwrap();
    assert_eq!(client.receive(&mut buffer).unwrap_err().kind(), io::ErrorKind::InvalidData);
    drop(server);
    assert_eq!(client.receive(&mut buffer).unwrap().0, 0);
}

/// Emulates a process that may open no more descriptors. The system does not report how many came.
#[test]
fn a_descriptor_that_could_not_be_received_is_an_error() {
    let (client, server) = pair();
    let many = [server.as_fd(); 9];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&many)));
    let parts = [io::IoSlice::new(b"one")];
    net::sendmsg(&server, &parts, &mut ancillary, SendFlags::empty()).unwrap();
    let error = client.receive(&mut [0; 8]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::MFILE.raw_os_error()));
}

/// Returns a socket whose last close takes a minute, and its other end.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while (&sender).write(&[0; 1 << 16]).is_ok() {}
    let linger = Some(Duration::from_secs(60));
    net::sockopt::set_socket_linger(&sender, linger).unwrap();
    (sender.into(), receiver)
}

/// Tests both ways: sockets that refuse descriptors, and the way for older kernels, whose sockets
/// accept them.
#[test]
fn descriptors_of_strangers_delay_no_close() {
    for takes_descriptors in [false, true] {
        let (_folder, path) = new_path();
        let options = SocketOptions { takes_descriptors, ..Default::default() };
        let listener = Listener::bind_with(&path, &options).unwrap();
        let (ended, has_ended) = std::sync::mpsc::channel();
        let (descriptor, _receiver) = lingering();
        let connect = || Connection::connect(&path, TEST_TIMEOUT).unwrap();
        let (read, unread, unaccepted) = (connect(), connect(), connect());
        for stranger in [&read, &unread, &unaccepted] {
            let sent = stranger.send(b"hello", Some(descriptor.as_fd()));
            assert_eq!(sent.is_ok(), listener.socket.closers().is_some());
        }
        match listener.socket.closers() {
            Some(_) => drop(descriptor),
            // This is the last copy: to close it would delay this test.
            None => std::mem::forget(descriptor),
        }
        std::thread::spawn(move || {
            let (read, unread) = (listener.accept().unwrap(), listener.accept().unwrap());
            if listener.socket.closers().is_some() {
                let error = read.receive(&mut [0; 8]).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            }
            drop((read, unread, listener));
            ended.send(()).unwrap();
        });
        has_ended.recv_timeout(TEST_TIMEOUT).expect("a stranger's descriptor is being closed");
    }
}

#[test]
fn a_socket_has_the_requested_permissions() {
    let (_folder, path) = new_path();
    let group = rustix::process::getgid().as_raw();
    let options = SocketOptions { mode: Some(0o620), group: Some(group), ..Default::default() };
    let listener = Listener::bind_with(&path, &options).unwrap();
    let found = fs::metadata(&path).unwrap();
    assert_eq!((found.mode() & 0o7777, found.gid()), (0o620, group));
    assert!(Connection::connect(&path, TEST_TIMEOUT).is_ok());
    drop(listener);
}

#[test]
fn a_listener_refuses_a_socket_in_use_and_replaces_a_dead_one() {
    let (folder, path) = new_path();
    let listener = Listener::bind(&path).unwrap();
    assert_eq!(bind_error(&path), io::ErrorKind::AddrInUse);
    let Listener { socket, lock, .. } = &listener;
    // The state after a SIGKILL: the path without a listener, and the file without a lock.
    net::shutdown(socket, net::Shutdown::Both).unwrap();
    assert_eq!(bind_error(&path), io::ErrorKind::AddrInUse, "while it is locked");
    rustix::fs::flock(lock, FlockOperation::Unlock).unwrap();
    assert!(Listener::bind(&path).is_ok());
    std::mem::forget(listener);
    std::fs::write(folder.path().join("file"), "").unwrap();
    assert_eq!(bind_error(&folder.path().join("file")), io::ErrorKind::AlreadyExists);
    assert!(!folder.path().join("file.lock").exists());
}

#[test]
fn connecting_to_a_listener_that_never_accepts_times_out() {
    let (_folder, path) = new_path();
    let Listener { socket, lock, .. } = &Listener::bind(&path).unwrap();
    // The backlog has room for one client.
    net::listen(socket, 0).unwrap();
    let waiting = Connection::connect(&path, TEST_TIMEOUT).unwrap();
    let refused = Connection::connect(&path, Duration::from_millis(1));
    assert_eq!(refused.err().unwrap().kind(), io::ErrorKind::WouldBlock);
    // Without the lock the listener looks like another program's.
    rustix::fs::flock(lock, FlockOperation::Unlock).unwrap();
    assert_eq!(bind_error(&path), io::ErrorKind::AddrInUse);
    drop(waiting);
}

#[test]
fn a_listener_removes_its_own_socket_only() {
    let (_folder, path) = new_path();
    drop(Listener::bind(&path).unwrap());
    assert!(!path.exists());
    let listener = Listener::bind(&path).unwrap();
    // A program that does not use the lock replaces the socket.
    fs::remove_file(&path).unwrap();
    let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
    drop(other);
    assert!(Listener::bind(&path).is_ok(), "a lock that was held is free again");
}

#[test]
fn one_of_many_listeners_that_start_together_binds() {
    let (_folder, path) = new_path();
    // A dead socket, which each of them tries to replace.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let barrier = std::sync::Barrier::new(8);
    let bound: Vec<_> = std::thread::scope(|scope| {
        let start = || {
            barrier.wait();
            Listener::bind(&path)
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (listeners, refused): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
    assert_eq!(listeners.len(), 1);
    for error in refused {
        assert_eq!(error.err().unwrap().kind(), io::ErrorKind::AddrInUse);
    }
    assert!(Connection::connect(&path, TEST_TIMEOUT).is_ok());
}
