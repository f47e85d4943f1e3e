//! One server at several addresses, of different fabrics: clients of each see the same region. A
//! client that knows all addresses uses the best one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farside::Client;
use farside_control::attach::Attached;
use farside_fabric::{Buffer, Completion, Fabric, LaneId, Nanos, RegionIndex, Verb};
use farside_tests::engine::attach;
use farside_tests::{ServerProcess, StopOnDrop, free_tcp_address, scaled};

const REGION: RegionIndex = RegionIndex::FIRST;

/// Returns a server at a socket or a device and at a port, and both addresses.
fn server() -> (ServerProcess, String, String) {
    let tcp = free_tcp_address();
    let server = ServerProcess::start(&format!("--memory 32MiB --listen {tcp}"));
    let other = server.address();
    (server, other, tcp)
}

fn client(address: &str) -> Client {
    Client::builder().server(address).connect().unwrap()
}

// On shared memory only: it uses two fabrics itself.
#[on(shm)]
fn clients_of_both_fabrics_count_together() {
    let (server, shm, tcp) = server();
    count_together(&server, [&shm, &tcp]);
}

/// A device's compare-and-swaps and a processor's do not exclude each other, so all of them have to
/// go through the device.
#[on(rdma)]
fn clients_over_rdma_and_tcp_count_together() {
    let (server, rdma, tcp) = server();
    count_together(&server, [&rdma, &tcp]);
}

/// Raises a word by swaps for this time, as fast as the fabric can. Swaps in flight together expect
/// each other's words. Returns how many succeeded, and the word at the end.
fn raise_a_word(address: &str, lanes: u16, time: Duration) -> (u64, u64) {
    // The client ends with its channel.
    let Attached { welcome, factory, channel: _channel, .. } = attach(address);
    let mut fabric = factory.fabric(lanes).unwrap();
    // The last word of the region: the few blocks of this test are elsewhere.
    let remote = welcome.region_bytes - 8;
    let (mut raised, mut word) = (0, 0);
    let started = Instant::now();
    while started.elapsed() < time {
        let first = word;
        for lane in 0..lanes {
            let expected = first + u64::from(lane);
            let swap = [Verb::CompareSwap { remote, expected, desired: expected + 1 }];
            fabric.post(LaneId(lane), REGION, &swap, Nanos::MAX);
        }
        let mut in_flight = lanes;
        word = 0;
        while in_flight > 0 {
            fabric.ring();
            let Some(Completion { lane, result }) = fabric.poll() else {
                fabric.relax();
                continue;
            };
            let (expected, found) = (first + u64::from(lane.0), result.unwrap());
            raised += u64::from(found == expected);
            word = word.max(if found == expected { expected + 1 } else { found });
            in_flight -= 1;
        }
    }
    fabric.run_read(LaneId(0), REGION, remote, Buffer::Window, 8).unwrap();
    let word = fabric.buffer(LaneId(0), Buffer::Window).first_chunk().unwrap();
    (raised, u64::from_le_bytes(*word))
}

/// If a thread of the server swapped the word itself, a device in the middle of a swap would undo
/// that.
#[on(rdma)]
fn no_swap_over_tcp_gets_lost_beside_a_device() {
    let (_server, rdma, tcp) = server();
    // The server soon fences a client that does not answer its questions.
    let time = Duration::from_secs(2);
    let mut succeeded = 0;
    // A server whose threads swapped themselves lost some of 80,000 in four rounds of five.
    for _ in 0..3 {
        let raised = std::thread::scope(|scope| {
            // With one swap at a time, the slower fabric would hardly ever know the word.
            let raise = |address, lanes| scope.spawn(move || raise_a_word(address, lanes, time).0);
            [raise(&rdma, 1), raise(&tcp, 16)].map(|thread| thread.join().unwrap())
        });
        println!("raised {} times over RDMA, {} times over TCP", raised[0], raised[1]);
        assert!(raised.iter().all(|count| *count > 0), "{raised:?}");
        succeeded += raised.iter().sum::<u64>();
        assert_eq!(raise_a_word(&tcp, 1, Duration::ZERO).1, succeeded);
    }
}

/// Two clients of one server raise a counter and write common keys. No increment gets lost, and a
/// reader sees none undone.
fn count_together(server: &ServerProcess, addresses: [&str; 2]) {
    let increments = scaled(20_000);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stops = StopOnDrop(&done);
        let count = |address: &str| {
            let mut session = client(address).session().unwrap();
            scope.spawn(move || {
                for number in 0..increments {
                    session.increment("count", 1).unwrap();
                    session.put(format!("key-{}", number % 100), number.to_le_bytes()).unwrap();
                }
            })
        };
        let counting = addresses.map(count);
        let mut reader = client(addresses[1]).session().unwrap();
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
    let count = client(addresses[0]).session().unwrap().get("count").unwrap().unwrap();
    assert_eq!(*count, *(2 * increments).to_string().as_bytes());
    server.assert_verifies();
}

/// Guards against numbers of connections that two listeners give twice: then the end of one session
/// ended others.
// On shared memory only: it uses two ports itself.
#[on(shm)]
fn sessions_at_one_port_may_end_without_harm_to_those_at_another() {
    const SESSIONS: usize = 16;
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

// On shared memory only: it uses two fabrics itself.
#[on(shm)]
fn a_client_uses_the_best_address_that_answers() {
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

#[on(rdma_in_soak)]
fn a_client_prefers_rdma_to_tcp() {
    let (server, rdma, tcp) = server();
    let mut over_tcp = client(&tcp).session().unwrap();
    over_tcp.put("key", "value").unwrap();
    let mut best = client(&format!("{tcp},{rdma}")).session().unwrap();
    // It needs no block of the server from here on.
    best.put("key", "value").unwrap();
    // Over TCP no thread would answer.
    server.pause();
    assert_eq!(*best.get("key").unwrap().unwrap(), *b"value");
    best.put("key", "other").unwrap();
    server.signal(rustix::process::Signal::CONT);
    assert_eq!(*over_tcp.get("key").unwrap().unwrap(), *b"other");
    // A host without the device, or without a route to it, uses the port.
    let elsewhere = format!("rdma://192.0.2.1:7400,{tcp}");
    let mut session = client(&elsewhere).session().unwrap();
    session.put("key", "value").unwrap();
    assert_eq!(*best.get("key").unwrap().unwrap(), *b"value");
}

// On shared memory only: it uses two fabrics itself.
#[on(shm)]
fn addresses_that_no_executor_can_serve_are_refused() {
    let refused = |listen: &str| {
        let output = farside_tests::command::CommandOutput::of(
            farside_tests::command::command("kv-server").args(["--listen", listen]),
        );
        output.expect_line(1, &["listen = ", listen]);
        output.stderr
    };
    let line = refused("rdma://10.9.0.1:7400,shm:///tmp/kv.sock");
    assert!(line.contains("not exclude those of an RDMA device"), "{line}");
    let line = refused("rdma://10.9.0.1:7400,rdma://10.9.0.2:7400");
    assert!(line.contains("write one rdma:// address"), "{line}");
}
