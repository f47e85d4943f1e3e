//! Proves that the library refuses a reader's changes. `tests/tests/server/connecting.rs` proves
//! that the memory refuses them too, and `common/fabric/tests/verbs/connecting.rs` proves it over
//! RDMA.

use farside::ConnectError::Refused;
use farside::OperationError::Denied;
use farside::{Client, Error, Role, SetupError};
use farside_tests::ServerProcess;

#[on(each, rdma_in_soak)]
fn a_reader_reads_and_is_denied_the_rest() {
    let server = ServerProcess::start("--memory 32MiB");
    server.session().put(b"key", b"value").unwrap();
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

#[on(each, rdma_in_soak)]
fn the_secret_decides_whether_a_client_may_write() {
    let config = "secret = 'writers'\nreader_secret = 'readers'\n";
    let server = ServerProcess::start_with_config(config, "--memory 32MiB");
    let connect = |secret: &str, role| {
        Client::builder().server(&server.address()).secret(secret).role(role).connect()
    };
    assert!(connect("writers", Role::Writer).is_ok());
    assert!(connect("writers", Role::Reader).is_ok());
    assert!(connect("readers", Role::Reader).is_ok());
    for refused in [connect("readers", Role::Writer), connect("guess", Role::Reader)] {
        let error = refused.err().unwrap();
        assert!(matches!(error, SetupError::Connect(Refused { .. })), "{error}");
        assert!(error.to_string().contains("secret"), "{error}");
    }
    let without = server.client_builder().connect();
    assert!(matches!(without, Err(SetupError::Connect(Refused { .. }))));
}
