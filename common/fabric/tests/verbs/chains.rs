//! Chains keep the contract of the trait `Fabric`: results, order, sizes and deadlines.

use std::time::Duration;

use farside_fabric::rdma::Options;
use farside_fabric::verbs::{Listener, connect_data};
use farside_fabric::{Buffer, ChainError, Fabric, LaneId, Verb};

use crate::harness::{
    REGION, REGION_BYTES, Server, TEST_TIMEOUT, address, far_deadline, increment, next, read,
};

const LANE: LaneId = LaneId(0);

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

#[test]
fn each_verb_has_its_effect_and_is_counted() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(1);
    let region = server.region.clone();
    region.store(64, 0x1111_2222_3333_4444).unwrap();
    let deadline = far_deadline(&fabric);
    let mut run = |chain: &[Verb]| fabric.run(LANE, REGION, chain, deadline);
    let cas = |expected, desired| Verb::CompareSwap { remote: 64, expected, desired };
    assert_eq!(run(&[cas(0x1111_2222_3333_4444, 7)]), Ok(0x1111_2222_3333_4444));
    assert_eq!(run(&[cas(8, 9)]), Ok(7), "a swap that fails returns the word that it found");
    assert_eq!(region.load(64), Ok(7));
    // A WRITE of four bytes leaves the other half of the word unchanged.
    assert_eq!(run(&[Verb::WriteU32 { remote: 68, value: 0xabcd }]), Ok(0));
    assert_eq!(region.load(64), Ok(0xabcd_0000_0007));
    assert_eq!(run(&[Verb::WriteWord { remote: 72, value: 99 }]), Ok(0));
    let window = Verb::Read { remote: 64, into: Buffer::Window, bytes: 16 };
    assert_eq!(run(&[window]), Ok(0));
    let found = fabric.buffer(LANE, Buffer::Window);
    assert_eq!(found[..16], [0xabcd_0000_0007u64.to_le_bytes(), 99u64.to_le_bytes()].concat());
    let outside = fabric.run(LANE, REGION, &[read(REGION_BYTES, 8)], deadline);
    assert!(matches!(outside, Err(ChainError::Outside { .. })));
    assert_eq!(fabric.run(LANE, REGION, &[window], deadline), Ok(0), "the connection still works");
    let counters = fabric.counters();
    assert_eq!((counters.reads, counters.compare_swaps), (3, 2));
    assert_eq!((counters.writes, counters.round_trips), (2, 7));
    assert_eq!(counters.doorbells, 6, "the READ outside of the region was not posted");
}

#[test]
fn blocks_of_every_size_are_written_and_read_inline_or_not() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(2);
    let sizes = [8, 64, 248, 256, 264, 1024, 4096, 4104, 65_536, 1 << 20];
    for (seed, bytes) in sizes.into_iter().enumerate() {
        let content = pattern(bytes, seed as u8);
        fabric.reserve(LANE, Buffer::NewBlock, bytes);
        fabric.buffer_mut(LANE, Buffer::NewBlock)[..bytes].copy_from_slice(&content);
        let write = Verb::Write { remote: 4096, from: Buffer::NewBlock, bytes: bytes as u32 };
        let word = Verb::WriteWord { remote: 8, value: seed as u64 };
        let deadline = far_deadline(&fabric);
        assert_eq!(fabric.run(LANE, REGION, &[write, word], deadline), Ok(0));
        let mut words = vec![0; bytes / 8];
        server.region.read(4096, &mut words).unwrap();
        let there: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        assert!(there == content, "{bytes} bytes");
        // Without `reserve`, because a READ makes its buffer grow.
        let other = LaneId(1);
        assert_eq!(fabric.run(other, REGION, &[read(4096, bytes as u32)], deadline), Ok(0));
        assert!(fabric.buffer(other, Buffer::ReadBlock)[..bytes] == content, "{bytes} bytes");
    }
}

#[test]
fn a_buffer_that_grows_keeps_its_content() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(1);
    fabric.buffer_mut(LANE, Buffer::NewBlock)[..3].copy_from_slice(b"abc");
    for bytes in [100, 5000, 100_000, 3 << 20] {
        fabric.reserve(LANE, Buffer::NewBlock, bytes);
        assert!(fabric.buffer(LANE, Buffer::NewBlock).len() >= bytes);
        assert_eq!(&fabric.buffer(LANE, Buffer::NewBlock)[..3], b"abc");
    }
}

/// Repeats the verbs of an INSERT and a PUT in one chain. The READ at its end must always see the
/// effects of the verbs before it.
#[test]
fn chains_execute_in_order() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(1);
    let rounds = std::env::var("FARSIDE_TEST_CHAINS").map_or(10_000, |n| n.parse().unwrap());
    for round in 0u64..rounds {
        fabric.buffer_mut(LANE, Buffer::NewBlock)[..512].fill(round as u8);
        let chain = [
            Verb::Write { remote: 4096, from: Buffer::NewBlock, bytes: 512 },
            Verb::WriteU32 { remote: 4096 + 256, value: round as u32 },
            increment(4096 + 512, round),
            read(4096, 520),
        ];
        let deadline = far_deadline(&fabric);
        assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Ok(round));
        let seen = fabric.buffer(LANE, Buffer::ReadBlock);
        assert_eq!(seen[512..520], (round + 1).to_le_bytes());
        assert_eq!(seen[256..260], (round as u32).to_le_bytes());
        assert!(seen[..256].iter().chain(&seen[260..512]).all(|byte| *byte == round as u8));
    }
    assert_eq!(fabric.counters().doorbells, rounds);
}

/// A device keeps the order of these verbs only if the work request has a fence.
#[test]
fn a_swap_waits_for_a_read_before_it_and_a_write_for_a_swap_before_it() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(1);
    for round in 0u64..300 {
        let chain = [
            read(8192, 2048),
            increment(8192 + 1024, round),
            Verb::WriteWord { remote: 8192 + 1032, value: round },
        ];
        let deadline = far_deadline(&fabric);
        assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Ok(round));
        let seen = &fabric.buffer(LANE, Buffer::ReadBlock)[1024..1040];
        assert_eq!(seen[..8], round.to_le_bytes(), "the READ came before the swap");
        assert_eq!(seen[8..], round.saturating_sub(1).to_le_bytes());
    }
}

#[test]
fn lanes_share_a_doorbell_and_get_their_own_results() {
    const LANES: u16 = 64;
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(LANES);
    for round in 0u64..50 {
        let before = fabric.counters();
        let deadline = far_deadline(&fabric);
        for lane in 0..LANES {
            let (offset, id) = (4096 + u64::from(lane) * 64, LaneId(lane));
            let expected = u64::from(lane) * round;
            fabric.buffer_mut(id, Buffer::NewBlock)[..32].fill(lane as u8);
            let chain = [
                Verb::Write { remote: offset, from: Buffer::NewBlock, bytes: 32 },
                Verb::CompareSwap {
                    remote: offset + 32,
                    expected,
                    desired: expected + u64::from(lane),
                },
                read(offset, 40),
            ];
            fabric.post(id, REGION, &chain, deadline);
        }
        fabric.ring();
        for _ in 0..LANES {
            let completion = next(&mut fabric);
            let lane = u64::from(completion.lane.0);
            assert_eq!(completion.result, Ok(lane * round));
            let seen = fabric.buffer(completion.lane, Buffer::ReadBlock);
            assert!(seen[..32].iter().all(|byte| u64::from(*byte) == lane));
            assert_eq!(seen[32..40], (lane * (round + 1)).to_le_bytes());
        }
        let counters = fabric.counters() - before;
        assert_eq!((counters.doorbells, counters.round_trips), (1, u64::from(LANES)));
    }
}

#[test]
fn late_chains_are_refused_and_reads_have_no_deadline() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(1);
    let write = Verb::Write { remote: 128, from: Buffer::NewBlock, bytes: 8 };
    // A mark, too: its block's memory may have another use by then (invariant I13).
    for chain in [[increment(64, 0)], [write], [Verb::WriteU32 { remote: 64, value: 3 }]] {
        let now = fabric.now();
        assert_eq!(fabric.run(LANE, REGION, &chain, now - 1), Err(ChainError::Late));
        // Not late yet, but the device might execute it after its deadline.
        let too_soon = now + Options::default().delivery_max_ns() / 2;
        assert_eq!(fabric.run(LANE, REGION, &chain, too_soon), Err(ChainError::Late));
    }
    assert_eq!(server.region.load(64), Ok(0));
    assert_eq!(fabric.run(LANE, REGION, &[read(0, 8)], 0), Ok(0));
}

#[test]
fn a_wait_completes_at_its_time_and_does_not_delay_other_lanes() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(2);
    let until = fabric.now() + 20_000_000;
    fabric.wait(LaneId(1), until);
    let deadline = far_deadline(&fabric);
    fabric.post(LANE, REGION, &[read(0, 8)], deadline);
    fabric.ring();
    assert_eq!([(); 2].map(|()| next(&mut fabric).lane), [LANE, LaneId(1)]);
    assert!(fabric.now() >= until);
}

#[test]
fn swaps_of_the_owner_and_of_a_client_are_atomic_with_each_other() {
    let Some(mut server) = Server::new() else { return };
    let mut client = server.client(1);
    let mut own = server.writers.loopback(4, &Options::default()).unwrap();
    let deadline = far_deadline(&client);
    for count in (0..400).step_by(2) {
        let chains = [count, count + 1].map(|count| [increment(64, count)]);
        assert_eq!(own.fabric.run(LaneId(3), REGION, &chains[0], deadline), Ok(count));
        assert_eq!(client.run(LANE, REGION, &chains[1], deadline), Ok(count + 1));
    }
    assert_eq!(server.region.load(64), Ok(400));
}

/// Strangers that connect to the listener of a server's own connection are rejected, whatever
/// private data they send. It fails if the owner's private data is a constant in the source.
#[test]
fn a_stranger_does_not_get_the_owners_own_connection() {
    let Some(server) = Server::new() else { return };
    let options = Options { connect_timeout: TEST_TIMEOUT, ..Default::default() };
    let listener = Listener::bind(address().unwrap(), &options).unwrap();
    let target = listener.local_address().unwrap();
    let mut strangers = Vec::new();
    for guess in [&b"farside loopback"[..], &[0; 16], &[]] {
        let stranger = std::thread::spawn(move || connect_data(target, guess, 1, &options).is_ok());
        strangers.push(stranger);
    }
    // The strangers connect before the owner does.
    std::thread::sleep(Duration::from_millis(500));
    let mut own = server.writers.loopback_over(listener, 1, &options).unwrap();
    let deadline = far_deadline(&own.fabric);
    assert_eq!(own.fabric.run(LANE, REGION, &[read(0, 64)], deadline), Ok(0));
    drop(own);
    for stranger in strangers {
        assert!(!stranger.join().unwrap(), "a stranger was accepted as the owner");
    }
}

/// The device may be reading the lane's buffers, so nothing may change or move them.
#[test]
fn a_lane_with_a_chain_in_flight_refuses_another() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(1);
    let deadline = far_deadline(&fabric);
    let swap = |desired| [Verb::CompareSwap { remote: 64, expected: 0, desired }];
    // Before the doorbell, and after it.
    for is_rung in [false, true] {
        server.region.store(64, 0).unwrap();
        fabric.post(LANE, REGION, &swap(1), deadline);
        if is_rung {
            fabric.ring();
        }
        fabric.post(LANE, REGION, &swap(100), deadline);
        assert!(!fabric.reserve(LANE, Buffer::NewBlock, 1 << 20), "the buffer would move");
        fabric.ring();
        assert_eq!(next(&mut fabric).result, Err(ChainError::Busy));
        assert_eq!(next(&mut fabric).result, Ok(0));
        assert_eq!(server.region.load(64), Ok(1));
    }
    assert!(fabric.reserve(LANE, Buffer::NewBlock, 1 << 20));
    assert_eq!(fabric.run(LANE, REGION, &swap(1), deadline), Ok(1), "the lane is usable again");
}
