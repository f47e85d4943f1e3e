//! What a user of the same host can do to a server whose socket that user reaches. There are
//! descriptors that do not close, requests without end, and all places taken. Others are served all
//! the same.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use farside_fabric::ControlChannel;
use farside_fabric::shm::ShmChannel;
use rustix::net::sockopt::set_socket_linger;
use rustix::process::Signal;
use rustix::thread::set_thread_res_uid;

use super::command::Running;
use super::*;

/// A user that is neither root nor the one that runs the tests.
const STRANGER: u32 = 54321;

/// Runs as another user; `None` where this one may not become another.
#[allow(clippy::print_stdout, reason = "a test that is left out says so")]
fn as_stranger<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        println!("left out: it takes root to become another user");
        return None;
    }
    let become_stranger_and_work = || {
        // Of this thread alone: the system call knows nothing of processes.
        let uid = rustix::process::Uid::from_raw(STRANGER);
        set_thread_res_uid(uid, uid, uid).unwrap();
        work()
    };
    std::thread::scope(|scope| Some(scope.spawn(become_stranger_and_work).join().unwrap()))
}

/// A descriptor whose last copy takes a minute to close, and the other end, which does not read.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while (&sender).write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&sender, Some(Duration::from_secs(60))).unwrap();
    (sender.into(), receiver)
}

/// Before the hello, with it, and as a reader that was let in. Fails where the control thread
/// closes what it was sent.
#[test]
fn a_descriptor_that_does_not_close_holds_up_no_client() {
    let place = Place::new();
    let mut server = Running::start(&place);
    let reader = place.ask(Role::Reader).unwrap();
    let connect = || Connection::connect(&place.socket(), PATIENCE).unwrap();
    let (wrong, right) = (connect(), connect());
    let mut receivers = Vec::new();
    // So that it is the server that has the last copies.
    server.signal(Signal::STOP);
    for (connection, message) in [
        (&wrong, &b"hello"[..]),
        (&right, &hello(Role::Reader)[..]),
        (&reader.connection, b"what is that?"),
    ] {
        let (descriptor, receiver) = lingering();
        receivers.push(receiver);
        match connection.send(message, Some(descriptor.as_fd())) {
            Ok(()) => drop(descriptor),
            // The system keeps it out of the socket. To close it would hold up this test.
            Err(_) => std::mem::forget(descriptor),
        }
    }
    server.signal(Signal::CONT);
    // Hang guards, far below the minute that a close takes.
    assert_eq!(place.writer().take(class(64), 1).len(), 1);
    server.signal(Signal::TERM);
    assert!(server.ends_well(), "the control thread closes a descriptor");
}

/// Each round a new client says its hello, is let in and is served.
#[test]
fn readers_that_ask_without_end_keep_no_client_out() {
    const READERS: usize = 400;
    let place = Place::new();
    let server = place.start();
    let stop = AtomicBool::new(false);
    let mut request = Vec::new();
    Request::Statistics.encode(&mut request);
    let reader = || {
        let channel = place.ask(Role::Reader).unwrap().connection;
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
                let writer = place.writer();
                assert_eq!(writer.take(class(64), 1).len(), 1);
            }
        });
        server.stop();
        stop.store(true, Ordering::Relaxed);
        served.unwrap();
    });
}

#[test]
fn readers_leave_places_for_writers() {
    let mut place = Place::new();
    place.config.clients_max = 16;
    let _server = place.start();
    let read = || place.ask(Role::Reader);
    let readers: Vec<_> = (0..14).map(|_| read().unwrap()).collect();
    assert_eq!(read().err(), Some(Refusal::FullOfReaders { readers: 14 }));
    let writers = [place.writer(), place.writer()];
    assert_eq!(place.ask(Role::Writer).err(), Some(Refusal::Full { clients: 16 }));
    drop((readers, writers));
}

#[test]
fn a_user_leaves_places_for_others() {
    let mut place = Place::new();
    place.config.clients_max = 16;
    let _server = place.start();
    open_to_all(&place);
    let write = || place.ask(Role::Writer);
    let taken = as_stranger(|| {
        let taken: Vec<_> = (0..14).map(|_| write().unwrap()).collect();
        assert_eq!(write().err(), Some(Refusal::FullForUser { clients: 14 }));
        taken
    });
    let Some(taken) = taken else { return };
    drop((write().unwrap(), write().unwrap(), taken));
}

/// One that is slow to say what it is stays, whatever another user does.
#[test]
fn silent_connections_of_one_user_crowd_out_their_own() {
    let place = Place::new();
    let _server = place.start();
    open_to_all(&place);
    let connect = || Connection::connect(&place.socket(), PATIENCE).unwrap();
    let slow = connect();
    let Some(silent) = as_stranger(|| (0..200).map(|_| connect()).collect::<Vec<_>>()) else {
        return;
    };
    let first = &silent[0];
    first.set_receive_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(first.receive(&mut [0; 8]).unwrap().0, 0, "there are too many of them");
    slow.set_receive_timeout(Some(PATIENCE)).unwrap();
    slow.send(&hello(Role::Reader), None).unwrap();
    let mut buffer = [0; 256];
    let (bytes, _) = slow.receive(&mut buffer).unwrap();
    assert!(decode_reply(&buffer[..bytes]).unwrap().is_ok());
}

/// Lets other users to the socket.
fn open_to_all(place: &Place) {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(place.folder.path(), 0o755);
    mode(&place.socket(), 0o666);
}
