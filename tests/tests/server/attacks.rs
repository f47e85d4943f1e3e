//! Attacks by another user of the host, through the server's socket: descriptors that do not close,
//! endless requests, and as many clients as the server admits. Others are still served. The server
//! does not follow, wait for, or remove a file that another user put under a name that the server
//! chooses itself. A region must belong to the server's own user.
//!
//! Guards against links in a folder that all users can write to. Without the checks such a link
//! makes the server remove any file, or create one anywhere.

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use farside_fabric::ControlChannel;
use farside_fabric::shm::ShmChannel;
use farside_tests::{OTHER_USER, as_other_user, left_out_without_root};
use rustix::net::sockopt::set_socket_linger;
use rustix::process::Signal;

use super::command::process_with_file;
use super::*;

/// Returns a descriptor whose last copy takes a minute to close, and its peer, which does not read.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while (&sender).write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&sender, Some(Duration::from_secs(60))).unwrap();
    (sender.into(), receiver)
}

/// The descriptor comes before the hello, with it, and from an accepted reader. The test fails if
/// the serving thread closes descriptors that it receives.
#[test]
fn a_descriptor_that_closes_slowly_delays_no_client() {
    let folder = TestFolder::new();
    let mut server = process_with_file(&folder);
    let reader = folder.attach(Role::Reader).unwrap();
    let (before_hello, with_hello) = (folder.connect(), folder.connect());
    let mut receivers = Vec::new();
    // The server reads only after this test has closed its copies, so it has the last ones.
    server.signal(Signal::STOP);
    for (connection, message) in [
        (&before_hello, &b"hello"[..]),
        (&with_hello, &hello(Role::Reader)[..]),
        (&reader.connection, b"what is that?"),
    ] {
        let (descriptor, receiver) = lingering();
        receivers.push(receiver);
        match connection.send(message, Some(descriptor.as_fd())) {
            Ok(()) => drop(descriptor),
            // The socket does not take the descriptor. Closing it would delay this test.
            Err(_) => std::mem::forget(descriptor),
        }
    }
    server.signal(Signal::CONT);
    // The timeouts here are far below the minute that a close takes.
    assert_eq!(folder.writer().take(class(64), 1).len(), 1);
    assert_eq!(server.terminate(), Some(0), "the serving thread closes a descriptor");
}

/// In each round a new client connects and is served.
#[test]
fn readers_that_send_endless_requests_keep_no_client_out() {
    const READERS: usize = 400;
    let (folder, server) = serving();
    let stop = AtomicBool::new(false);
    let mut request = Vec::new();
    Request::Statistics.encode(&mut request);
    let reader = || {
        let channel = folder.attach(Role::Reader).unwrap().connection;
        ShmChannel::over(channel).unwrap()
    };
    let mut readers: Vec<ShmChannel> = (0..READERS).map(|_| reader()).collect();
    std::thread::scope(|scope| {
        for part in readers.chunks_mut(READERS / 2) {
            let (stop, request) = (&stop, &request);
            scope.spawn(move || {
                let mut buffer = vec![0; MESSAGE_BYTES_MAX];
                while !stop.load(Ordering::Relaxed) {
                    for reader in &mut *part {
                        while reader.send(request).is_ok() {}
                        while let Ok(Some(1..)) = reader.receive(&mut buffer) {}
                    }
                }
            });
        }
        let served = std::panic::catch_unwind(|| {
            for _ in 0..20 {
                let writer = folder.writer();
                assert_eq!(writer.take(class(64), 1).len(), 1);
            }
        });
        server.stop();
        stop.store(true, Ordering::Relaxed);
        served.unwrap();
    });
}

#[test]
fn readers_do_not_take_all_client_ids() {
    let mut folder = TestFolder::new();
    folder.config.clients_max = 16;
    let _server = folder.start();
    let read = || folder.attach(Role::Reader);
    let readers: Vec<_> = (0..14).map(|_| read().unwrap()).collect();
    assert_eq!(read().err(), Some(Refusal::FullOfReaders { readers: 14 }));
    let writers = [folder.writer(), folder.writer()];
    assert_eq!(folder.attach(Role::Writer).err(), Some(Refusal::Full { clients: 16 }));
    drop((readers, writers));
}

#[test]
fn one_user_does_not_take_all_client_ids() {
    if left_out_without_root("it takes two users") {
        return;
    }
    let mut folder = TestFolder::new();
    folder.config.clients_max = 16;
    let _server = folder.start();
    open_to_all(&folder);
    let write = || folder.attach(Role::Writer);
    let taken = as_other_user(|| {
        let taken: Vec<_> = (0..14).map(|_| write().unwrap()).collect();
        assert_eq!(write().err(), Some(Refusal::FullForUser { clients: 14 }));
        taken
    });
    drop((write().unwrap(), write().unwrap(), taken));
}

/// A connection that is slow to send its hello stays open, however many connections another user
/// opens.
#[test]
fn silent_connections_of_one_user_close_only_connections_of_that_user() {
    if left_out_without_root("it takes two users") {
        return;
    }
    let (folder, _server) = serving();
    open_to_all(&folder);
    let slow = folder.connect();
    assert_eq!(folder.writer().statistics().clients, 1, "a silent connection is no client");
    let silent = as_other_user(|| (0..200).map(|_| folder.connect()).collect::<Vec<_>>());
    assert_eq!(silent[0].receive(&mut [0; 8]).unwrap().0, 0, "the server closes the oldest");
    assert!(answer(&slow, &hello(Role::Reader)).unwrap().is_ok());
}

/// Lets all users connect to the socket.
fn open_to_all(folder: &TestFolder) {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(folder.dir.path(), 0o755);
    mode(&folder.socket(), 0o666);
}

/// A description, and the function that makes such a file under a name.
type Trap = (&'static str, fn(&std::path::Path));

const TRAPS: [Trap; 4] = [
    ("a link to a file", |path| {
        let victim = path.with_file_name("victim");
        fs::write(&victim, "precious").unwrap();
        symlink(victim, path).unwrap();
    }),
    ("a link to nothing", |path| symlink(path.with_file_name("nothing"), path).unwrap()),
    ("a pipe", |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success())),
    ("a second name of a file", |path| {
        let victim = path.with_file_name("victim");
        fs::write(&victim, "precious").unwrap();
        fs::hard_link(victim, path).unwrap();
    }),
];

/// Starts the server where a trap has this name; returns the line of the server's error.
fn start_in_trap(name: &str, (what, make): Trap) -> String {
    let folder = TestFolder::with_file();
    let path = folder.dir.path().join(name);
    make(&path);
    let before = fs::symlink_metadata(&path).unwrap();
    let line = folder.start_error();
    let after = fs::symlink_metadata(&path).unwrap();
    assert_eq!((before.ino(), before.len()), (after.ino(), after.len()), "{what}: {line}");
    assert!(!folder.dir.path().join("nothing").exists(), "{what}: {line}");
    if let Ok(victim) = fs::read(folder.dir.path().join("victim")) {
        assert_eq!(victim, b"precious", "{what}: {line}");
    }
    assert!(!folder.region_file().exists() && !folder.socket().exists(), "{what}: {line}");
    line
}

#[test]
fn a_trap_under_the_name_of_an_unfinished_region_is_left_alone() {
    for trap in TRAPS {
        let line = start_in_trap("region.restoring", trap);
        assert!(line.contains("region.restoring is no regular file of this user"), "{line}");
    }
}

#[test]
fn a_trap_under_the_name_of_a_lock_is_left_alone() {
    for trap in TRAPS {
        let line = start_in_trap("kv.sock.lock", trap);
        assert!(line.contains("kv.sock.lock") && line.contains("remove it"), "{line}");
    }
}

#[test]
fn files_of_another_user_are_refused_even_by_root() {
    if left_out_without_root("it changes the owners of files") {
        return;
    }
    let folder = TestFolder::with_file();
    folder.start().stop();
    let set_owner = |name: &str, user: u32| {
        chown(folder.dir.path().join(name), Some(user), None).unwrap();
    };
    set_owner("region", OTHER_USER);
    let line = folder.start_error();
    assert!(line.contains("region belongs to another user"), "{line}");
    set_owner("region", 0);
    set_owner("kv.sock.lock", OTHER_USER);
    let line = folder.start_error();
    assert!(line.contains("kv.sock.lock: it belongs to user 54321"), "{line}");
    set_owner("kv.sock.lock", 0);
    folder.start().stop();
    // Another user can point their link at any file.
    let region = folder.region_file();
    let elsewhere = folder.dir.path().join("elsewhere");
    fs::rename(&region, &elsewhere).unwrap();
    symlink(&elsewhere, &region).unwrap();
    folder.start().stop();
    std::os::unix::fs::lchown(&region, Some(OTHER_USER), None).unwrap();
    let line = folder.start_error();
    assert!(line.contains("region belongs to another user"), "{line}");
}

#[test]
fn an_empty_file_where_a_region_was_is_refused() {
    let folder = TestFolder::with_file();
    folder.start().stop();
    fs::OpenOptions::new().write(true).open(folder.region_file()).unwrap().set_len(0).unwrap();
    let line = folder.start_error();
    assert!(line.contains("is empty: a region was there") && line.contains("remove"), "{line}");
    assert_eq!(fs::metadata(folder.region_file()).unwrap().len(), 0);
    fs::remove_file(folder.region_file()).unwrap();
    folder.start().stop();
}

#[test]
fn a_start_removes_the_unfinished_region_of_a_killed_server() {
    let folder = TestFolder::with_file();
    let unfinished = folder.dir.path().join("region.restoring");
    fs::write(&unfinished, b"half").unwrap();
    folder.start().stop();
    assert!(!unfinished.exists() && folder.region_file().exists());
}
