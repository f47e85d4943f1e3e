//! Two hosts, one of which freezes: nobody says so, only time does. Run by hand in two guests:
//!
//! 1. `FARSIDE_TEST_PORT=7400 <this program> --ignored --exact hosts::serve`
//! 2. `FARSIDE_TEST_PEER=10.9.0.1:7400 <this program> --ignored --exact hosts::outlive`, and freeze
//!    the first guest once the second says that it is under way.
//!
//! Or `kv-server --listen rdma://10.9.0.1:7400` in the first and `hosts::idle` in the second, which
//! is then frozen: the server's log says `its host does not answer` after some seconds.

use std::time::{Duration, Instant};

use farside_common::address::Address;
use farside_common::attach::Target;
use farside_common::control::{Role, Token};
use farside_common::fabric::verbs::{Options, ProbeState};
use farside_common::fabric::{Buffer, ChainError, Fabric, LaneId, Verb};

use crate::harness::{Server, client_at, later};

const LANES: u16 = 16;

/// Serves for a minute, and probes whoever is connected.
#[test]
#[ignore = "a host of two"]
fn serve() {
    let Some(mut server) = Server::new() else { return };
    let started = Instant::now();
    let mut probed = Instant::now();
    let mut last = None;
    server.until_for(Duration::from_secs(60), |server| {
        if probed.elapsed() > Duration::from_secs(1) {
            probed = Instant::now();
            for connection in server.connections.values_mut() {
                let state = connection.probe_state().unwrap();
                if last != Some(state) {
                    println!("{:?}: the client is {state:?}", started.elapsed());
                    last = Some(state);
                }
                if state != ProbeState::Dead {
                    connection.probe().unwrap();
                }
            }
        }
        last == Some(ProbeState::Dead)
    });
}

#[test]
#[ignore = "a host of two"]
fn outlive() {
    let Ok(peer) = std::env::var("FARSIDE_TEST_PEER") else { return };
    let mut fabric = client_at(peer.parse().unwrap(), LANES);
    let chain = |lane: u16| {
        let word = u64::from(lane) * 8;
        [
            Verb::Write { remote: 65_536 + word * 64, from: Buffer::Image, bytes: 512 },
            Verb::FetchAdd { remote: 4096 + word, addend: 1 },
        ]
    };
    for lane in 0..LANES {
        let deadline = later(&fabric);
        fabric.post(LaneId(lane), &chain(lane), deadline);
    }
    println!("under way");
    let (mut flying, mut last_success, mut errors) = (LANES, Instant::now(), Vec::new());
    while flying > 0 {
        fabric.ring();
        let Some(completion) = fabric.poll() else {
            fabric.relax();
            continue;
        };
        match completion.result {
            Ok(_) => {
                last_success = Instant::now();
                let deadline = later(&fabric);
                fabric.post(completion.lane, &chain(completion.lane.0), deadline);
            }
            Err(error) => {
                errors.push(error);
                flying -= 1;
            }
        }
    }
    let silence = last_success.elapsed();
    println!("all ended {silence:?} after the last success");
    assert!(errors.iter().all(|error| *error == ChainError::Unknown), "{errors:?}");
    let bound = Duration::from_nanos(Options::default().delivery_max_ns());
    assert!((Duration::from_secs(1)..bound).contains(&silence), "{silence:?}");
}

/// A client of a real server, without a session, that does nothing for a minute.
#[test]
#[ignore = "a host of two"]
fn idle() {
    let Ok(peer) = std::env::var("FARSIDE_TEST_PEER") else { return };
    let address: Address = format!("rdma://{peer}").parse().unwrap();
    let (rdma, timeout) = (Options::default(), Duration::from_secs(10));
    let target = Target { address, role: Role::Writer, token: Token::NONE, timeout, rdma };
    let attached = target.attach(timeout).unwrap();
    println!("client {} is idle", attached.welcome.client_id);
    std::thread::sleep(Duration::from_secs(60));
}
