//! A false server: it answers like a server at a socket, but is none.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use farside::Client;
use farside_fabric::memory::{HugePages, RegionMemory};
use farside_fabric::shm::Listener;
use farside_tests::{as_other_user, left_out_without_root, new_address};

use super::*;

/// Over a socket the region's descriptor comes with the welcome, and may be any file.
// On shared memory only: it is about the socket.
#[on(shm)]
fn a_socket_that_answers_with_garbage_is_no_server() {
    let folder = tempfile::tempdir().unwrap();
    let address = new_address(folder.path());
    let socket = Listener::bind(&folder.path().join("kv.sock")).unwrap();
    let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
    let no_region: File = memory.reader_descriptor().unwrap();
    let valid = false_welcome().encode();
    let options = options(&address, Role::Reader, SecretKey::NONE);
    let mut random = SmallRng::seed_from_u64(11);
    let mut lines = std::collections::BTreeSet::new();
    for round in 0..2_000 {
        let reply = match round {
            0..2 => valid.clone(),
            _ => garbage(&mut random, &valid, 300),
        };
        let error = std::thread::scope(|scope| {
            let client = scope.spawn(|| options.attach(options.timeout).err());
            let connection = socket.accept().unwrap();
            let mut hello = [0; REQUEST_BYTES_MAX];
            connection.receive(&mut hello).unwrap();
            let key = &SecretKey::NONE;
            let (_, challenge, _) = handshake::challenge(&hello, FabricKind::Shm, key);
            // The garbage comes in place of the challenge, or of the welcome.
            if round % 4 != 3 {
                connection.send(&challenge, None).unwrap();
                connection.receive(&mut hello).unwrap();
            }
            let descriptor = (round % 2 == 0).then(|| no_region.as_fd());
            connection.send(&reply, descriptor).unwrap();
            drop(connection);
            client.join().unwrap().expect("a connection to an imposter")
        });
        let line = error.to_string();
        assert!(line.len() > 20 && !line.contains('\n'), "{line}");
        lines.insert(line);
    }
    assert!(lines.iter().any(|line| line.contains("not a Farside region")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("without a descriptor")), "{lines:?}");
}

/// Without a secret, only the owner of the socket tells a client which server is the right one.
#[on(shm)]
fn a_socket_of_another_user_gets_no_hello() {
    if left_out_without_root("it takes two users") {
        return;
    }
    // All users may create files in this folder, as in /tmp.
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    for (path, mode) in [(folder.path(), 0o755), (shared.as_path(), 0o1777)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let address = format!("shm://{}/kv.sock", shared.display());
    let socket = as_other_user(|| Listener::bind(&shared.join("kv.sock")).unwrap());
    std::thread::scope(|scope| {
        let received = scope.spawn(|| {
            let connection = socket.accept().unwrap();
            connection.receive(&mut [0; REQUEST_BYTES_MAX]).unwrap().0
        });
        let timeout = Duration::from_millis(100);
        let builder = Client::builder().server(&address).secret("secret").connect_timeout(timeout);
        let error = builder.connect().err().unwrap();
        println!("{error}");
        assert_eq!(received.join().unwrap(), 0, "the imposter got a hello");
        assert!(error.to_string().contains("is served by user 54321, which is not root"));
    });
}
