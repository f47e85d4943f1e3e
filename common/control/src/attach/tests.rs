//! A server that never answers, and how the time for connecting is shared out.

use super::*;

#[test]
fn a_server_that_never_accepts_is_absent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv.sock");
    let listener = shm::Listener::bind(&path).unwrap();
    // One may wait.
    rustix::net::listen(&listener, 0).unwrap();
    let target = Target {
        address: Address::Shm(path),
        role: Role::Writer,
        token: Token::NONE,
        timeout: Duration::from_millis(1),
        rdma: Options::default(),
    };
    // The first waits for its reply, the second for room in the backlog, which those leave full
    // that nobody accepted.
    for _ in 0..2 {
        let Err(AttachError::Absent { contact, source, .. }) = target.attach(target.timeout) else {
            panic!("nobody answers");
        };
        assert!(contact == Contact::Silent && source.is_none(), "{contact:?} {source:?}");
    }
}

#[test]
fn a_lost_request_leaves_time_for_another() {
    let mut left = Duration::from_secs(4);
    let mut attempts = Vec::new();
    while !left.is_zero() {
        attempts.push(attempt_max(left).as_millis());
        left -= attempt_max(left);
    }
    assert_eq!(attempts, [2000, 1000, 500, 500]);
    assert_eq!(attempt_max(Duration::from_millis(100)), Duration::from_millis(100));
}
