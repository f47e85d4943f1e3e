//! Proves that a reader cannot change anything: the library refuses, and so does the memory.

use farside::ConnectError::Refused;
use farside::OperationError::Denied;
use farside::{Client, Error, Role};
use farside_control::{ConnectRequest, Purpose, Token, decode_reply};
use farside_fabric::shm::{Connection, Region};
use farside_tests::{PATIENCE, ServerProcess, left_out_over_rdma};

#[test]
fn a_reader_reads_and_is_denied_the_rest() {
    let server = ServerProcess::start(&["--memory", "32MiB"]);
    server.client().session().unwrap().put(b"key", b"value").unwrap();
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    let mut session = reader.session().unwrap();
    assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
    let before = session.counters();
    assert!(matches!(session.put(b"key", b"other"), Err(Error::Operation(Denied))));
    assert!(matches!(session.insert(b"new", b"other"), Err(Error::Operation(Denied))));
    assert!(matches!(session.update(b"key", b"other"), Err(Error::Operation(Denied))));
    assert!(matches!(session.delete(b"key"), Err(Error::Operation(Denied))));
    assert!(matches!(
        session.compare_exchange(b"key", None, b"other"),
        Err(Error::Operation(Denied))
    ));
    let mut pipeline = session.pipeline().unwrap();
    pipeline.put(b"key", b"other").unwrap();
    assert!(matches!(pipeline.wait().unwrap().result, Err(Error::Operation(Denied))));
    drop(pipeline);
    assert_eq!(session.counters(), before, "the region was not touched");
    assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
}

#[test]
fn the_readers_memory_cannot_be_written() {
    if left_out_over_rdma(
        "there is no memory to map; common/fabric/tests/verbs asks the device instead",
    ) {
        return;
    }
    let server = ServerProcess::start(&["--memory", "32MiB"]);
    let path = server.address().strip_prefix("shm://").unwrap().to_owned();
    let connection = Connection::connect(path.as_ref(), PATIENCE).unwrap();
    let request =
        ConnectRequest { role: Role::Reader, purpose: Purpose::Control, token: Token::NONE };
    connection.send(&request.encode(), None).unwrap();
    let mut buffer = [0; 1024];
    let (bytes, descriptor) = connection.receive(&mut buffer).unwrap();
    decode_reply(&buffer[..bytes]).unwrap().unwrap();
    let file = std::fs::File::from(descriptor.unwrap());
    let writable = Region::map(&file);
    assert_eq!(writable.err().unwrap().kind(), std::io::ErrorKind::PermissionDenied);
    use std::os::unix::fs::FileExt;
    assert!(file.write_at(b"x", 0).is_err());
    assert!(file.set_len(0).is_err());
    assert!(Region::map_read_only(&file).is_ok());
}

#[test]
fn secrets_tell_readers_from_writers() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("server.toml");
    let text = "secret = \"writers\"\nreader_secret = \"readers\"\nmemory = \"32MiB\"\n";
    std::fs::write(&config, text).unwrap();
    let server = ServerProcess::start_unchecked(&["--config", config.to_str().unwrap()]);
    let connect = |secret: &str, role| {
        Client::builder().server(&server.address()).secret(secret).role(role).connect()
    };
    assert!(connect("writers", Role::Writer).is_ok());
    assert!(connect("writers", Role::Reader).is_ok());
    assert!(connect("readers", Role::Reader).is_ok());
    for refused in [connect("readers", Role::Writer), connect("guess", Role::Reader)] {
        let error = refused.err().unwrap();
        assert!(matches!(error, Error::Connect(Refused { .. })), "{error}");
        assert!(error.to_string().contains("secret"), "{error}");
    }
    let without = server.client_builder().connect();
    assert!(matches!(without, Err(Error::Connect(Refused { .. }))));
}
