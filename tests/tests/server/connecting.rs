//! Which connections become clients, and that the others hurt no client.

use std::os::unix::fs::{FileExt, MetadataExt};

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
    assert_eq!(client.lease(), 0, "a server that stopped accepts no client");
    assert_eq!(client.receive(), None);
    assert!(!place.socket().exists());
}

#[test]
fn garbage_of_every_length_is_refused_and_hurts_no_client() {
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
fn a_full_server_says_so_until_a_client_leaves() {
    let mut place = Place::new();
    place.config.clients_max = 2;
    let _server = place.start();
    let (first, second) = (place.writer(), place.writer());
    let full = Refusal::Full { clients: 2 };
    assert_eq!(place.ask(Role::Writer).err(), Some(full));
    first.send(&Request::Goodbye);
    assert_eq!(first.receive(), None);
    assert_eq!(first.lease(), 0);
    let third = place.writer();
    assert_eq!(third.statistics().clients_lost, 0);
    drop(second);
    eventually("the lost one's place is free", || place.ask(Role::Writer).is_ok());
}

#[test]
fn a_reader_cannot_write() {
    let place = Place::new();
    let _server = place.start();
    let writer = place.writer();
    let reader = place.ask(Role::Reader).unwrap();
    let error = Region::map(&reader.file).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(reader.file.write_at(b"x", 0).is_err() && reader.file.set_len(0).is_err());
    assert!(reader.region.store(4096, 1).is_err());
    assert_eq!(reader.superblock().1, writer.superblock().1);
    assert_eq!(reader.statistics().clients, 2);
    reader.send(&Request::TakeBlocks { class: class(64), count: 1 });
    assert_eq!(reader.receive(), None, "a reader that wants blocks is dropped");
    assert_eq!(writer.take(class(64), 1).len(), 1);
}

#[test]
fn the_config_says_who_may_connect() {
    let mut place = Place::new();
    let group = rustix::process::getgid().as_raw();
    place.config.socket_mode = Some("0620".parse().unwrap());
    place.config.socket_group = Some(group.to_string().parse().unwrap());
    let _server = place.start();
    let found = std::fs::metadata(place.socket()).unwrap();
    assert_eq!((found.mode() & 0o777, found.gid()), (0o620, group));
    place.writer();
}
