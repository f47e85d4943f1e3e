//! One server at several addresses, of different fabrics: clients of each see the same region. A
//! client that knows all addresses uses the best one.

use std::sync::atomic::{AtomicBool, Ordering};

use farside::Client;
use farside_tests::{ServerProcess, StopOnDrop, left_out_without_shm};

/// Returns a server at a socket and at a port, and both addresses.
fn server() -> (ServerProcess, String, String) {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let tcp = format!("tcp://127.0.0.1:{port}");
    let server = ServerProcess::start(&format!("--memory 32MiB --listen {tcp}"));
    let shm = server.address();
    (server, shm, tcp)
}

fn client(address: &str) -> Client {
    Client::builder().server(address).connect().unwrap()
}

#[test]
fn clients_of_both_fabrics_count_together() {
    if left_out_without_shm("it uses two fabrics itself") {
        return;
    }
    const INCREMENTS: i64 = 20_000;
    let (server, shm, tcp) = server();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stops = StopOnDrop(&done);
        let count = |address: &str| {
            let mut session = client(address).session().unwrap();
            scope.spawn(move || {
                for number in 0..INCREMENTS {
                    session.increment("count", 1).unwrap();
                    session.put(format!("key-{}", number % 100), number.to_le_bytes()).unwrap();
                }
            })
        };
        let counting = [count(&shm), count(&tcp)];
        let mut reader = client(&tcp).session().unwrap();
        let done = &done;
        scope.spawn(move || {
            // The count never falls, whichever client raised it.
            let mut last = 0;
            while !done.load(Ordering::Relaxed) {
                let Some(value) = reader.get("count").unwrap() else { continue };
                let count: i64 = std::str::from_utf8(&value).unwrap().parse().unwrap();
                assert!(count >= last, "{count} after {last}");
                last = count;
            }
        });
        counting.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let count = client(&shm).session().unwrap().get("count").unwrap().unwrap();
    assert_eq!(*count, *(2 * INCREMENTS).to_string().as_bytes());
    server.assert_verifies();
}

/// Guards against numbers of connections that two listeners give twice: then the end of one session
/// ended others.
#[test]
fn sessions_at_one_port_may_end_without_harm_to_those_at_another() {
    const SESSIONS: usize = 16;
    if left_out_without_shm("it uses two ports itself") {
        return;
    }
    let ports = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let [one, other] = ports.map(|port| format!("tcp://{}", port.local_addr().unwrap()));
    let server = ServerProcess::start(&format!("--memory 32MiB --listen {one} --listen {other}"));
    let clients: Vec<Client> = (0..SESSIONS).map(|_| client(&one)).collect();
    let open = |client: &Client| client.session().unwrap();
    let mut sessions: Vec<_> = clients.iter().map(open).collect();
    let ending = client(&other);
    drop((0..2 * SESSIONS).map(|_| open(&ending)).collect::<Vec<_>>());
    // A session that has ended uses its connection no more, so nothing shows when the server knows.
    std::thread::sleep(std::time::Duration::from_millis(200));
    for session in &mut sessions {
        session.put("key", "value").unwrap();
    }
    assert_eq!(ending.admin().statistics().unwrap().clients_lost, 0);
    server.assert_verifies();
}

#[test]
fn a_client_uses_the_best_address_that_answers() {
    if left_out_without_shm("it uses two fabrics itself") {
        return;
    }
    let (server, shm, tcp) = server();
    let put = |addresses: &str| {
        let mut session = client(addresses).session().unwrap();
        session.put("key", addresses).unwrap();
        session.get("key").unwrap().unwrap();
        session.counters()
    };
    put(&shm);
    put(&tcp);
    // Only over TCP does the server ask for the client's clock, so a stopped server shows which.
    let best = client(&format!("{tcp},{shm}"));
    let mut session = best.session().unwrap();
    session.put("key", "value").unwrap();
    server.pause();
    assert_eq!(*session.get("key").unwrap().unwrap(), *b"value");
    server.signal(rustix::process::Signal::CONT);
    // An address that does not answer is passed over.
    put(&format!("shm:///nowhere/kv.sock,{tcp}"));
    put(&format!("{tcp},rdma://192.0.2.1:7400,shm:///nowhere/kv.sock"));
}

#[test]
fn addresses_that_no_executor_can_serve_are_refused() {
    if left_out_without_shm("it uses two fabrics itself") {
        return;
    }
    let refused = |listen: &str| {
        let output = farside_tests::command::CommandOutput::of(
            farside_tests::command::command("kv-server").args(["--listen", listen]),
        );
        output.expect_line(1, &["listen = ", listen]);
        output.stderr
    };
    let line = refused("rdma://10.9.0.1:7400,shm:///tmp/kv.sock");
    assert!(line.contains("do not exclude each other"), "{line}");
    let line = refused("rdma://10.9.0.1:7400,tcp://10.9.0.1:7400");
    assert!(line.contains("has to be the only one"), "{line}");
}
