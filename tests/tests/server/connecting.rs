//! Which connections become clients, and that refused connections harm no client.

use std::os::unix::fs::{FileExt, MetadataExt};

use super::*;

#[test]
fn a_writer_gets_a_welcome_a_region_and_a_lease() {
    let (folder, server) = serving();
    assert_eq!(server.addresses(), folder.config.listen);
    let client = folder.writer();
    let (superblock, format) = client.superblock();
    assert_eq!(client.welcome.region_bytes, REGION_BYTES);
    assert_eq!(client.welcome.region_id, format.region_id);
    assert_eq!((client.welcome.incarnation, superblock.incarnation()), (1, 1));
    assert_eq!(client.lease(), client.welcome.lease);
    assert_ne!(format.region_id, [0; 16]);
    assert_ne!(format.hash_key, [0; 16]);
    let other = folder.writer();
    assert_ne!(other.welcome.client_id, client.welcome.client_id);
    assert_eq!(other.lease(), other.welcome.lease);
    server.stop();
    assert_eq!(client.lease(), 0, "a server that stops fences its clients");
    assert_eq!(client.receive(), None);
    assert!(!folder.socket().exists());
}

#[test]
fn garbage_of_every_length_is_refused_and_harms_no_client() {
    let (folder, _server) = serving();
    let client = folder.writer();
    let refusal = |request: &[u8]| Some(answer(&folder.connect(), request)?.err());
    for bytes in 1..=200 {
        let malformed = Refusal::Malformed { bytes: bytes as u64 };
        for byte in [0x00, 0xa5] {
            assert_eq!(refusal(&vec![byte; bytes]), Some(Some(malformed)));
        }
    }
    assert_eq!(refusal(&[]), None);
    assert_eq!(refusal(&vec![1; MESSAGE_BYTES_MAX + 1]), None);
    assert_eq!(client.statistics().clients, 1);
    assert_eq!(client.statistics().clients_lost, 0);
}

/// A program that reaches the socket can get a challenge, and no more.
#[test]
fn a_connection_without_a_proof_is_no_client() {
    let (folder, _server) = serving();
    let client = folder.writer();
    let challenged = |_| {
        let connection = folder.connect();
        assert!(challenge(&connection, &hello(Role::Writer)).unwrap().is_ok());
        connection
    };
    let unproven: Vec<_> = (0..100).map(challenged).collect();
    assert_eq!(unproven[0].receive(&mut [0; 8]).unwrap().0, 0, "the server closes the oldest");
    let last = unproven.last().unwrap();
    let (answer, descriptor) = exchange(last, &ProofMessage(Proof([1; 16])).encode()).unwrap();
    assert_eq!(Welcome::decode(&answer), Ok(Err(Refusal::NoSecret)));
    assert!(descriptor.is_none());
    assert_eq!(last.receive(&mut [0; 8]).unwrap().0, 0, "the server closes it");
    assert_eq!((client.statistics().clients, client.statistics().clients_lost), (1, 0));
    assert_eq!(folder.writer().welcome.client_id, client.welcome.client_id + 1, "no id was given");
}

#[test]
fn a_full_server_refuses_clients_until_one_signs_off() {
    let mut folder = TestFolder::new();
    folder.config.clients_max = 2;
    let _server = folder.start();
    let (first, second) = (folder.writer(), folder.writer());
    let full = Refusal::Full { clients: 2 };
    assert_eq!(folder.attach(Role::Writer).err(), Some(full));
    first.send(&Request::Goodbye);
    assert_eq!(first.receive(), None);
    assert_eq!(first.lease(), 0);
    let third = folder.writer();
    assert_eq!(third.statistics().clients_lost, 0);
    drop(second);
    eventually("the lost client's id is free", || folder.attach(Role::Writer).is_ok());
}

#[test]
fn a_reader_cannot_write() {
    let (folder, _server) = serving();
    let writer = folder.writer();
    let reader = folder.attach(Role::Reader).unwrap();
    let error = Region::map(&reader.file).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(reader.file.write_at(b"x", 0).is_err() && reader.file.set_len(0).is_err());
    assert!(reader.region.store(4096, 1).is_err());
    assert_eq!(reader.superblock().1, writer.superblock().1);
    assert_eq!(reader.statistics().clients, 2);
    reader.send(&Request::TakeBlocks { class: class(64), count: 1 });
    assert_eq!(reader.receive(), None, "a reader that asks for blocks is disconnected");
    assert_eq!(writer.take(class(64), 1).len(), 1);
}

#[test]
fn the_config_sets_the_sockets_mode_and_group() {
    let mut folder = TestFolder::new();
    let group = rustix::process::getgid().as_raw();
    folder.config.socket_mode = Some("0620".parse().unwrap());
    folder.config.socket_group = Some(group.to_string().parse().unwrap());
    let _server = folder.start();
    let found = std::fs::metadata(folder.socket()).unwrap();
    assert_eq!((found.mode() & 0o777, found.gid()), (0o620, group));
    folder.writer();
}
