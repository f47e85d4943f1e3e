//! Who is let in and who is not, and that nobody who is not can hurt those who are.

use farside_config::Secret;
use farside_control::{PROTOCOL_VERSION, REQUEST_BYTES_MAX};

use super::*;

/// What the server answers to these bytes; `None` when it just hangs up.
fn answer(place: &Place, request: &[u8]) -> Option<Result<Welcome, Refusal>> {
    let connection = place.say(request);
    let mut buffer = [0; 256];
    match connection.receive(&mut buffer).unwrap() {
        (0, _) => None,
        (bytes, descriptor) => {
            let reply = decode_reply(&buffer[..bytes]).unwrap();
            assert_eq!(descriptor.is_some(), reply.is_ok());
            Some(reply)
        }
    }
}

#[test]
fn a_writer_gets_what_it_needs() {
    let place = Place::new();
    let server = place.start();
    assert_eq!(server.address(), place.config.listen.as_ref().unwrap());
    let client = place.writer();
    let (superblock, format) = client.superblock();
    assert_eq!(client.welcome.region_bytes, REGION_BYTES);
    assert_eq!(client.welcome.region_id, format.region_id);
    assert_eq!((client.welcome.incarnation, superblock.incarnation()), (1, 1));
    assert_eq!(client.lease(), client.welcome.lease);
    assert_ne!(format.region_id, [0; 16]);
    assert_ne!(format.hash_key, [0; 16]);
    let other = place.writer();
    assert_ne!(other.welcome.client_id, client.welcome.client_id);
    assert_eq!(other.lease(), other.welcome.lease);
    server.stop();
    assert_eq!(client.lease(), 0, "a server that stopped accepts nobody");
    assert_eq!(client.receive(), None);
    assert!(!place.socket().exists());
}

#[test]
fn garbage_of_every_length_is_refused_and_hurts_nobody() {
    let place = Place::new();
    let _server = place.start();
    let client = place.writer();
    for bytes in 1..=200 {
        let malformed = Refusal::Malformed { bytes: bytes as u64 };
        for byte in [0x00, 0xa5] {
            assert_eq!(answer(&place, &vec![byte; bytes]), Some(Err(malformed)));
        }
    }
    assert_eq!(answer(&place, &[]), None);
    assert_eq!(answer(&place, &vec![1; MESSAGE_BYTES_MAX + 1]), None);
    assert_eq!(client.statistics().clients, 1);
    assert_eq!(client.statistics().clients_lost, 0);
}

#[test]
fn another_version_is_told_both() {
    let place = Place::new();
    let _server = place.start();
    let mut request =
        ConnectRequest { role: Role::Writer, purpose: Purpose::Control, token: Token::NONE }
            .encode();
    assert_eq!(request.len(), REQUEST_BYTES_MAX);
    request[4] = 9;
    let versions = Refusal::Version { server: PROTOCOL_VERSION.into(), client: 9 };
    assert_eq!(answer(&place, &request), Some(Err(versions)));
}

#[test]
fn secrets_open_what_they_are_for() {
    let mut place = Place::new();
    place.config.secret = Some(Secret("all".into()));
    place.config.reader_secret = Some(Secret("read".into()));
    let _server = place.start();
    let may = |role, secret: Token| place.ask(role, secret).err();
    assert_eq!(may(Role::Writer, Token::of("all")), None);
    assert_eq!(may(Role::Reader, Token::of("all")), None);
    assert_eq!(may(Role::Reader, Token::of("read")), None);
    let refused = Some(Refusal::Credentials);
    assert_eq!(may(Role::Writer, Token::of("read")), refused);
    assert_eq!(may(Role::Reader, Token::of("else")), refused);
    assert_eq!(may(Role::Writer, Token::NONE), refused);
}

#[test]
fn a_full_server_says_so_until_somebody_leaves() {
    let mut place = Place::new();
    place.config.clients_max = 2;
    let _server = place.start();
    let (first, second) = (place.writer(), place.writer());
    let full = Refusal::Full { clients: 2 };
    assert_eq!(place.ask(Role::Writer, Token::NONE).err(), Some(full));
    first.send(&Request::Goodbye);
    assert_eq!(first.receive(), None);
    assert_eq!(first.lease(), 0);
    let third = place.writer();
    assert_eq!(third.statistics().clients_lost, 0);
    drop(second);
    eventually("the lost one's place is free", || place.ask(Role::Writer, Token::NONE).is_ok());
}

#[test]
fn a_reader_cannot_write() {
    let place = Place::new();
    let _server = place.start();
    let writer = place.writer();
    let reader = place.ask(Role::Reader, Token::NONE).unwrap();
    let error = Region::map(&reader.file).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(reader.region.store(4096, 1).is_err());
    assert_eq!(reader.superblock().1, writer.superblock().1);
    assert_eq!(reader.statistics().clients, 2);
    reader.send(&Request::TakeBlocks { class: class(64), count: 1 });
    assert_eq!(reader.receive(), None, "a reader that wants blocks is dropped");
    assert_eq!(writer.take(class(64), 1).len(), 1);
}

#[test]
fn silent_connections_keep_nobody_out() {
    let place = Place::new();
    let _server = place.start();
    let connect = || Connection::connect(&place.socket(), PATIENCE).unwrap();
    let silent: Vec<Connection> = (0..100).map(|_| connect()).collect();
    let client = place.writer();
    assert_eq!(client.statistics().clients, 1);
    // The oldest were dropped, the youngest may still speak.
    silent[0].set_receive_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(silent[0].receive(&mut [0; 8]).unwrap().0, 0);
    let youngest = silent.last().unwrap();
    youngest.set_receive_timeout(Some(PATIENCE)).unwrap();
    let request =
        ConnectRequest { role: Role::Writer, purpose: Purpose::Control, token: Token::NONE }
            .encode();
    youngest.send(&request, None).unwrap();
    let mut buffer = [0; 256];
    let (bytes, _) = youngest.receive(&mut buffer).unwrap();
    assert!(decode_reply(&buffer[..bytes]).unwrap().is_ok());
}

#[test]
fn what_cannot_be_listened_at_is_named() {
    let place = Place::new();
    let server = place.start();
    let line = place.start_error();
    assert!(line.contains("another server listens at"), "{line}");
    server.stop();
    std::fs::write(place.socket(), "not a socket").unwrap();
    let line = place.start_error();
    assert!(line.contains("is not a socket"), "{line}");
    let mut elsewhere = Place::new();
    elsewhere.config.listen = Some(Address::Shm(place.folder.path().join("no/kv.sock")));
    let line = elsewhere.start_error();
    assert!(line.contains("does not exist"), "{line}");
}

#[test]
fn the_config_says_who_may_connect() {
    use std::os::unix::fs::MetadataExt;
    let mut place = Place::new();
    let group = rustix::process::getgid().as_raw();
    place.config.socket_mode = Some("0620".parse().unwrap());
    place.config.socket_group = Some(group.to_string().parse().unwrap());
    let _server = place.start();
    let found = std::fs::metadata(place.socket()).unwrap();
    assert_eq!((found.mode() & 0o777, found.gid()), (0o620, group));
    place.writer();
}
