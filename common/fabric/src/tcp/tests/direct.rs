//! Chains that end in memory of the caller: each byte goes where it belongs, and none goes to
//! memory that was taken back.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::{Endpoint, Intercepted, Interceptor, LentMemory};

const HEAD: u32 = 64;
const CHANGED: u8 = 9;

fn split_read(remote: u64, bytes: u32) -> Verb {
    Verb::ReadSplit { remote, into: Buffer::ReadBlock, head_bytes: HEAD, bytes }
}

fn split_write(remote: u64, bytes: u32) -> Verb {
    Verb::WriteSplit { remote, from: Buffer::NewBlock, head_bytes: HEAD, bytes }
}

fn soon() -> Nanos {
    boot_time_ns() + LATENESS_MAX_NS
}

fn bytes(count: usize, seed: u8) -> Vec<u8> {
    (0..count).map(|n| (n as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

/// Several lanes at once, with memory of all lengths at odd addresses. A READ brings more than
/// there is memory for: the end is in the lane's buffer.
#[test]
fn chains_end_in_memory_of_the_caller() {
    check_chains(&Server::start(1));
}

pub(super) fn check_chains(server: &Server) {
    const LANES: u16 = 4;
    let endpoint = Endpoint::new(server.session(LANES), LANES);
    for rest_bytes in [1, 7, 8, 9, 4000, 16_383, 16_384, 65_537, 300_001] {
        let length = HEAD + (rest_bytes as u32).next_multiple_of(8);
        let at = |lane: u16| (1 << 20) + u64::from(lane) * (1 << 19);
        let sources: Vec<_> = (0..LANES).map(|lane| bytes(1 + rest_bytes, lane as u8)).collect();
        endpoint.lending(|loan| {
            for (lane, source) in (0..LANES).zip(&sources) {
                let lane = LaneId(lane);
                let mut fabric = endpoint.fabric_mut();
                assert!(fabric.reserve(lane, Buffer::NewBlock, HEAD as usize));
                fabric.buffer_mut(lane, Buffer::NewBlock)[..HEAD as usize].fill(lane.0 as u8 + 9);
                drop(fabric);
                assert!(loan.lend(lane, LentMemory::Source(&source[1..])));
                let word = Verb::WriteWord { remote: 64 + 8 * u64::from(lane.0), value: 5 };
                drop(endpoint.chain(
                    lane,
                    REGION,
                    &[split_write(at(lane.0), length), word],
                    soon(),
                ));
                let part = (Buffer::Lent, 0, rest_bytes as u32);
                let sum = endpoint.fabric_mut().part_sum(lane, 0, part, 0);
                assert_eq!(sum, crc32fast::hash(&source[1..]));
            }
            let mut left = LANES;
            while left > 0 {
                endpoint.step(|_| left -= 1);
            }
        });
        for (lane, source) in (0..LANES).zip(&sources) {
            assert!(matches!(endpoint.take_result(LaneId(lane)), Some(Ok(_))));
            let words = (0..length / 8).map(|n| server.region.load(at(lane) + 8 * u64::from(n)));
            let stored: Vec<_> = words.flat_map(|word| word.unwrap().to_le_bytes()).collect();
            assert_eq!(stored[..HEAD as usize], [lane as u8 + 9; HEAD as usize]);
            assert!(stored[HEAD as usize..][..rest_bytes] == source[1..], "{rest_bytes}");
            assert!(stored[HEAD as usize + rest_bytes..].iter().all(|byte| *byte == 0));
        }
        // All of the block, and a part of it. The memory is lent before the READ, or after it.
        let wanted = [(rest_bytes, false), (rest_bytes.div_ceil(2), false), (rest_bytes, true)];
        for (wanted, is_late) in wanted {
            let mut targets = vec![vec![7; wanted + 2]; LANES.into()];
            let sums = endpoint.lending(|loan| {
                let targets: Vec<_> = targets.iter_mut().map(|it| &mut it[1..=wanted]).collect();
                let mut later = Vec::new();
                for (lane, target) in (0..LANES).zip(targets) {
                    match is_late {
                        true => later.push(target),
                        false => assert!(loan.lend(LaneId(lane), LentMemory::Target(target))),
                    }
                    let read = split_read(at(lane), length);
                    drop(endpoint.chain(LaneId(lane), REGION, &[read], Nanos::MAX));
                }
                let mut left = LANES;
                while left > 0 {
                    endpoint.step(|_| left -= 1);
                }
                for (lane, target) in (0..).zip(later) {
                    assert!(loan.lend(LaneId(lane), LentMemory::Target(target)));
                }
                let mut fabric = endpoint.fabric_mut();
                let part = (Buffer::Lent, 0, wanted as u32);
                let sums = |lane| fabric.part_sum(LaneId(lane), 0, part, 0);
                (0..LANES).map(sums).collect::<Vec<_>>()
            });
            for ((lane, target), sum) in (0..LANES).zip(&targets).zip(sums) {
                let source = &sources[usize::from(lane)][1..];
                assert!(target[1..=wanted] == source[..wanted], "{rest_bytes} {wanted}");
                assert_eq!((target[0], target[wanted + 1]), (7, 7), "{rest_bytes} {wanted}");
                assert_eq!(sum, crc32fast::hash(&source[..wanted]));
                let buffer = endpoint.buffer(LaneId(lane), Buffer::ReadBlock);
                assert_eq!(buffer[..HEAD as usize], [lane as u8 + 9; HEAD as usize]);
                // What was not lent before the READ is in the buffer, and nothing else.
                let lent = if is_late { 0 } else { wanted };
                let behind = &buffer[HEAD as usize..length as usize - lent];
                assert!(behind[..rest_bytes - lent] == source[lent..], "{rest_bytes} {wanted}");
            }
        }
    }
}

/// Hands chains to the fabric at the doorbell.
#[derive(Default)]
struct Queue(Vec<(LaneId, RegionIndex, Vec<Verb>, Nanos)>);

impl<F: Fabric + ?Sized> Interceptor<F> for Queue {
    fn post(
        &mut self,
        _: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        self.0.push((lane, region, chain.to_vec(), deadline));
    }

    fn ring(&mut self, fabric: &mut F) {
        for (lane, region, chain, deadline) in self.0.drain(..) {
            fabric.post(lane, region, &chain, deadline);
        }
        fabric.ring();
    }
}

/// The lane's last chain was a READ of other bytes.
#[test]
fn the_sum_of_a_write_that_is_held_back_is_that_of_its_memory() {
    let server = Server::start(1);
    let fabric = Intercepted { interceptor: Queue::default(), fabric: Box::new(server.session(1)) };
    let endpoint = Endpoint::new(fabric, 1);
    for rest_bytes in [4000, 300_001] {
        let length = HEAD + (rest_bytes as u32).next_multiple_of(8);
        for is_late in [false, true] {
            let (mut target, source) = (vec![0; rest_bytes], bytes(rest_bytes, 5));
            endpoint.lending(|loan| {
                let mut target = Some(LentMemory::Target(&mut target));
                if !is_late && let Some(target) = target.take() {
                    assert!(loan.lend(LANE, target));
                }
                let read = split_read(1 << 20, length);
                drop(endpoint.chain(LANE, REGION, &[read], Nanos::MAX));
                endpoint.wait_for(LANE);
                if let Some(target) = target.take() {
                    assert!(loan.lend(LANE, target));
                }
                let part = (Buffer::Lent, 0, rest_bytes as u32);
                endpoint.fabric_mut().part_sum(LANE, 0, part, 0);
                assert!(loan.lend(LANE, LentMemory::Source(&source)));
                endpoint.fabric_mut().reserve(LANE, Buffer::NewBlock, HEAD as usize);
                let write = split_write(1 << 20, length);
                drop(endpoint.chain(LANE, REGION, &[write], soon()));
                let sum = endpoint.fabric_mut().part_sum(LANE, 0, part, 0);
                assert_eq!(sum, crc32fast::hash(&source), "{rest_bytes} {is_late}");
                endpoint.wait_for(LANE);
                assert_eq!(endpoint.take_result(LANE), Some(Ok(0)));
            });
        }
    }
}

/// A `WriteSplit` is not sent without the memory that it needs.
#[test]
fn a_write_whose_memory_was_taken_back_fails() {
    let server = Server::start(1);
    let endpoint = Endpoint::new(server.session(1), 1);
    drop(endpoint.chain(LANE, REGION, &[split_write(1 << 20, HEAD + 4096)], soon()));
    endpoint.wait_for(LANE);
    assert_eq!(endpoint.take_result(LANE), Some(Err(ChainError::Fenced)));
}

/// The functions end before the server has answered. What it answers later goes nowhere.
#[test]
fn memory_that_was_taken_back_is_not_changed() {
    let server = Server::start(1);
    for panics in [false, true] {
        let endpoint = Endpoint::new(server.session(1), 1);
        let mut target = vec![7; 1 << 20];
        let call = || {
            endpoint.lending(|loan| {
                assert!(loan.lend(LANE, LentMemory::Target(&mut target)));
                let read = split_read(1 << 20, HEAD + (1 << 20));
                drop(endpoint.chain(LANE, REGION, &[read], Nanos::MAX));
                endpoint.fabric_mut().ring();
                assert!(!panics, "on purpose");
            });
        };
        assert_eq!(catch_unwind(AssertUnwindSafe(call)).is_err(), panics);
        let content = target.clone();
        endpoint.step(|lane| assert_eq!(lane, LANE));
        let given_up = endpoint.take_result(LANE);
        assert!(matches!(given_up, Some(Err(ChainError::Fenced))), "{given_up:?}");
        std::thread::sleep(Duration::from_millis(20));
        endpoint.try_step(|_| ());
        assert!(target == content);
    }
}

/// The server answers a WRITE of which it has read the beginning only. The rest is not sent later,
/// when the memory may have another content.
#[test]
fn memory_is_not_sent_after_an_early_answer() {
    let (changed, is_changed) = std::sync::mpsc::channel();
    let (address, server) = false_server(move |mut stream| {
        stream.read_exact(&mut [0; 1000]).unwrap();
        let (mut reply, chain) = (Vec::new(), [write(0, 8)]);
        let pending = super::super::record::PendingReply::begin(&chain, &mut reply);
        pending.finish(0, &chain, &Ok(0), 0, &mut reply);
        stream.write_all(zerocopy::IntoBytes::as_bytes(reply.as_slice())).unwrap();
        is_changed.recv().unwrap();
        let mut sent = vec![0; 1 << 20];
        while let Ok(count @ 1..) = stream.read(&mut sent) {
            assert!(!sent[..count].contains(&CHANGED));
        }
    });
    let link = connect_data(address, None, &WRITER, TIMEOUT).unwrap();
    let endpoint = Endpoint::new(link.into_fabric(Server::remote(true), 1).unwrap(), 1);
    // More than the system takes at once.
    let mut rest = vec![7; 64 << 20];
    endpoint.fabric_mut().reserve(LANE, Buffer::NewBlock, HEAD as usize);
    endpoint.lending(|loan| {
        assert!(loan.lend(LANE, LentMemory::Source(&rest)));
        let chain = [split_write(4096, HEAD + rest.len() as u32)];
        drop(endpoint.chain(LANE, REGION, &chain, soon()));
        endpoint.wait_for(LANE);
    });
    assert_eq!(endpoint.take_result(LANE), Some(Ok(0)));
    rest.fill(CHANGED);
    changed.send(()).unwrap();
    let next = endpoint.fabric_mut().run(LANE, REGION, &[read(64, 8)], Nanos::MAX);
    assert_eq!(next, Err(ChainError::Fenced));
    server.join().unwrap();
}
