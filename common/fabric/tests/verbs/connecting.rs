//! Accepted and refused connections, the reasons that refused clients get, and the limits of a
//! reader. Connections that end leave no descriptors open.

use std::net::SocketAddr;
use std::time::Duration;

use farside_fabric::rdma::{Options, REASON_BYTES_MAX, VerbsError, preflight};
use farside_fabric::verbs::{Listener, connect_control, connect_data};
use farside_fabric::{Buffer, ControlChannel, Fabric, LaneId, REQUEST_BYTES_MAX, Verb};

use crate::harness::{
    CONTROL, READER, REASON, REGION, Server, WRITER, address, fabric_from, far_deadline, increment,
    read,
};

const LANE: LaneId = LaneId(0);

#[test]
fn garbage_of_every_length_is_refused_with_the_reason() {
    let Some(mut server) = Server::new() else { return };
    let address = server.address();
    for bytes in 0..=REQUEST_BYTES_MAX {
        let garbage = vec![0xa5; bytes];
        let error = server.while_client(|| {
            connect_data(address, &garbage, 1, &Options::default()).err().unwrap()
        });
        let VerbsError::Rejected { reason, .. } = error else { panic!("{error}") };
        assert!(reason.starts_with(REASON), "{bytes} bytes");
        // RDMA-CM pads private data with zeros.
        let seen = server.refused_requests.pop().unwrap();
        assert!(seen.starts_with(&garbage) && seen[bytes..].iter().all(|byte| *byte == 0));
    }
    let long = vec![0xa5; REQUEST_BYTES_MAX + 1];
    let error = connect_control(address, &long, &Options::default()).err().unwrap();
    assert!(matches!(error, VerbsError::PrivateData { bytes: 57, max: 56 }));
    assert!(server.connections.is_empty() && server.channels.is_empty());
    // A valid request is still served.
    let mut fabric = server.client(1);
    let deadline = far_deadline(&fabric);
    assert_eq!(fabric.run(LANE, REGION, &[read(0, 64)], deadline), Ok(0));
}

#[test]
fn a_reason_has_a_length_limit_and_a_rejection_without_one_reads_as_no_listener() {
    use farside_fabric::verbs::Event;
    let Some(address) = address() else { return };
    let mut listener = Listener::bind(address, &Options::default()).unwrap();
    let target = listener.local_address().unwrap();
    for bytes in [0, 1, REASON_BYTES_MAX, REASON_BYTES_MAX + 1] {
        let client = std::thread::spawn(move || {
            connect_control(target, CONTROL, &Options::default()).err().unwrap()
        });
        let incoming = loop {
            match listener.next_event().unwrap() {
                Some(Event::Request(incoming)) => break incoming,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let rejected = incoming.reject(&vec![7; bytes]);
        assert_eq!(rejected.is_ok(), bytes <= REASON_BYTES_MAX);
        match (client.join().unwrap(), bytes) {
            (VerbsError::Rejected { reason, .. }, 1..=REASON_BYTES_MAX) => {
                assert_eq!(reason.iter().filter(|byte| **byte == 7).count(), bytes);
            }
            // Without a reason it looks like Linux's own rejection for a program that has exited.
            (VerbsError::NoListener { .. }, _) => {}
            (other, bytes) => panic!("{bytes}: {other}"),
        }
    }
}

#[test]
fn connecting_to_a_port_without_a_listener_fails() {
    let Some(address) = address() else { return };
    let dead = SocketAddr::new(address.ip(), 9);
    let error = connect_control(dead, CONTROL, &Options::default()).err().unwrap();
    assert!(matches!(error, VerbsError::NoListener { .. }), "{error}");
    assert!(error.is_transient());
    // Addresses that no host has: one in this network, and one that no device has a route to.
    let options = Options { connect_timeout: Duration::from_millis(500), ..Options::default() };
    let SocketAddr::V4(own) = address else { return };
    let [a, b, c, _] = own.ip().octets();
    for absent in [SocketAddr::from(([a, b, c, 250], 7)), SocketAddr::from(([240, 0, 0, 1], 7))] {
        let error = connect_data(absent, CONTROL, 1, &options).err().unwrap();
        assert!(error.is_transient(), "{error}");
    }
}

#[test]
fn a_listener_binds_only_a_free_address_of_this_host() {
    let Some(address) = address() else { return };
    let listener = Listener::bind(address, &Options::default()).unwrap();
    let taken = listener.local_address().unwrap();
    assert_eq!(taken.ip(), address.ip());
    assert!(Listener::bind(taken, &Options::default()).is_err());
    let foreign = SocketAddr::from(([203, 0, 113, 1], 0));
    let error = Listener::bind(foreign, &Options::default()).err().unwrap();
    assert!(matches!(error, VerbsError::NoRoute { .. }), "{error}");
    drop(listener);
    assert!(Listener::bind(taken, &Options::default()).is_ok());
}

/// A reader's memory key and its queue pair allow only READs. This client tries the other verbs.
#[test]
fn the_device_refuses_a_readers_writes_and_swaps() {
    let Some(mut server) = Server::new() else { return };
    server.region.store(64, 5).unwrap();
    for forbidden in [
        Verb::WriteWord { remote: 64, value: 6 },
        Verb::Write { remote: 64, from: Buffer::NewBlock, bytes: 4096 },
        increment(64, 5),
    ] {
        let mut fabric = server.client_of(READER, 1, Options::default());
        let deadline = far_deadline(&fabric);
        assert_eq!(fabric.run(LANE, REGION, &[read(64, 8)], deadline), Ok(0));
        assert_eq!(fabric.buffer(LANE, Buffer::ReadBlock)[..8], 5u64.to_le_bytes());
        assert!(fabric.run(LANE, REGION, &[forbidden], deadline).is_err());
        assert!(fabric.is_broken(REGION));
        let after = fabric.run(LANE, REGION, &[read(64, 8)], deadline);
        assert!(after.is_err(), "a broken queue pair executes no further verb");
        assert_eq!(server.region.load(64), Ok(5));
    }
}

/// A reader uses a writer's rkey, which belongs to another protection domain.
#[test]
fn the_device_refuses_the_rkey_of_another_role() {
    let Some(mut server) = Server::new() else { return };
    let stolen = server.writers.remote();
    let address = server.address();
    let link =
        server.while_client(|| connect_data(address, READER, 1, &Options::default()).unwrap());
    let mut fabric = link.into_fabric(stolen).unwrap();
    let deadline = far_deadline(&fabric);
    assert!(fabric.run(LANE, REGION, &[increment(64, 0)], deadline).is_err());
    assert_eq!(server.region.load(64), Ok(0));
}

fn descriptors() -> u64 {
    std::fs::read_dir("/proc/self/fd").unwrap().count() as u64
}

#[test]
fn closed_connections_leave_no_descriptors_open() {
    let Some(mut server) = Server::new() else { return };
    let rounds = std::env::var("FARSIDE_TEST_CONNECTIONS").map_or(80, |n| n.parse().unwrap());
    let mut open = Vec::new();
    for round in 0..rounds {
        let mut fabric = server.client(4);
        let deadline = far_deadline(&fabric);
        assert_eq!(fabric.run(LANE, REGION, &[increment(64, round)], deadline), Ok(round));
        let (mut client_end, server_end) = server.control();
        client_end.send(b"hello").unwrap();
        drop(fabric);
        server.until(|server| !server.disconnected.is_empty());
        // Either end may close first.
        if round % 2 == 0 {
            drop(client_end);
            drop(server_end);
        } else {
            drop(server_end);
            drop(client_end);
        }
        while server.step() {}
        server.disconnected.clear();
        server.connections.clear();
        if round % 10 == 0 {
            open.push(descriptors());
        }
    }
    // Not exact, because other tests may open descriptors meanwhile.
    println!("descriptors: {open:?}");
    assert!(open.iter().all(|count| *count < open[0] + rounds / 2));
}

#[test]
fn preflight_describes_the_devices_of_this_host() {
    let Some(address) = address() else { return };
    let report = preflight();
    let text = report.to_string();
    println!("{text}");
    assert!(report.devices.iter().any(|device| {
        device.capabilities.is_some_and(|can| can.atomics && can.max_qp_rd_atom > 0)
            && device.ports.iter().any(|port| port.mtu_bytes.is_some() && port.state == "ACTIVE")
    }));
    assert!(text.contains("RoCE v2"), "{address} {text}");
}

/// A verb that needs a larger buffer fails if the buffer cannot grow; later verbs work. Needs
/// `setpriv` and root. `connecting.rs` of the integration tests has programs that may pin next to
/// nothing.
#[test]
fn a_buffer_that_cannot_grow_fails_only_the_verb_that_needs_it() {
    let stdout = by_child("ulimit -l 1024", "child_whose_buffers_may_not_grow");
    assert!(stdout.is_none_or(|stdout| stdout.contains("1 passed")));
}

#[test]
#[ignore = "a part of another test"]
fn child_whose_buffers_may_not_grow() {
    let Ok(peer) = std::env::var("FARSIDE_TEST_PEER") else { return };
    println!("connecting as a client");
    let mut fabric = fabric_from(peer.parse().unwrap(), WRITER, 1, Options::default(), 0);
    let deadline = far_deadline(&fabric);
    for bytes in [8, 2 << 20, 8, 4096] {
        let fits = bytes <= 4096;
        assert_eq!(fabric.reserve(LANE, Buffer::NewBlock, bytes as usize), fits, "{bytes}");
        fabric.buffer_mut(LANE, Buffer::NewBlock)[..8].copy_from_slice(b"12345678");
        let write = Verb::Write { remote: 4096, from: Buffer::NewBlock, bytes };
        for verb in [write, read(4096, bytes)] {
            assert_eq!(fabric.run(LANE, REGION, &[verb], deadline).is_ok(), fits, "{bytes}");
        }
        if fits {
            assert_eq!(&fabric.buffer(LANE, Buffer::ReadBlock)[..8], b"12345678");
        }
    }
}

/// Runs another test of this module in a process with this limit, without root's right to exceed
/// it. Returns its output, or `None` if such a process cannot be started.
fn by_child(limit: &str, test: &str) -> Option<String> {
    let mut server = Server::new()?;
    let address = server.address();
    let program = std::env::current_exe().unwrap();
    let script = format!(
        "{limit}; exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock \
         \"$0\" --exact connecting::{test} --nocapture --ignored"
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).arg(program).env("FARSIDE_TEST_PEER", address.to_string());
    let output = server.while_client(|| command.output().unwrap());
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
    stdout.contains("connecting as a client").then_some(stdout)
}

/// Without a device connecting and listening fail at once, with an error that is not transient.
#[test]
fn without_a_device_connecting_and_listening_report_that() {
    if !preflight().devices.is_empty() {
        return;
    }
    let (address, options) = (SocketAddr::from(([127, 0, 0, 1], 7400)), Options::default());
    let errors = [
        connect_control(address, b"", &options).err(),
        connect_data(address, b"", 1, &options).err(),
        Listener::bind(address, &options).err(),
    ];
    for error in errors {
        let Some(VerbsError::NoDevice { .. }) = error else { panic!("{error:?}") };
    }
    assert!(!preflight().findings.is_empty());
}
