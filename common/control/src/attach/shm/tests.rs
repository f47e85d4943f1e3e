//! A server that never answers.

use farside_fabric::rdma::Options;
use farside_fabric::shm::Listener;

use super::*;
use crate::Token;
use crate::address::Address;

#[test]
fn a_server_that_never_accepts_is_absent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv.sock");
    let listener = Listener::bind(&path).unwrap();
    // One may wait.
    rustix::net::listen(&listener, 0).unwrap();
    let options = ConnectOptions {
        address: Address::Shm(path),
        role: Role::Writer,
        token: Token::NONE,
        timeout: Duration::from_millis(1),
        rdma: Options::default(),
    };
    // The first waits for its reply, the second for room in the backlog, which those leave full
    // that nobody accepted.
    for _ in 0..2 {
        let Err(ConnectError::Unreachable { contact, source, .. }) =
            options.attach(options.timeout)
        else {
            panic!("nobody answers");
        };
        assert!(contact == Contact::Silent && source.is_none(), "{contact:?} {source:?}");
    }
}
