//! Chains that end in memory of the caller: each byte goes where it belongs, and none goes to
//! memory that was taken back.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::{Endpoint, LentMemory, LongWrite, WriteSum};

const HEAD: u32 = 64;
const CHANGED: u8 = 9;

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
                assert_eq!(loan.takes(&source[1..]), Ok(true));
                let write =
                    Verb::Write { remote: at(lane.0), from: Buffer::NewBlock, bytes: length };
                let word = Verb::WriteWord { remote: 64 + 8 * u64::from(lane.0), value: 5 };
                let rest = (HEAD, LentMemory::Source(&source[1..]));
                loan.post(lane, REGION, (&[write, word], soon()), rest);
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
        // All of the block, and a part of it.
        for wanted in [rest_bytes, rest_bytes.div_ceil(2)] {
            let mut targets = vec![vec![7; wanted + 2]; LANES.into()];
            let sums = endpoint.lending(|loan| {
                for (lane, target) in (0..LANES).zip(&mut targets) {
                    let read =
                        Verb::Read { remote: at(lane), into: Buffer::ReadBlock, bytes: length };
                    let rest = (HEAD, LentMemory::Target(&mut target[1..=wanted]));
                    loan.post(LaneId(lane), REGION, (&[read], Nanos::MAX), rest);
                }
                let mut left = LANES;
                while left > 0 {
                    endpoint.step(|_| left -= 1);
                }
                let mut fabric = endpoint.fabric_mut();
                let part = (Buffer::Lent, 0, wanted as u32);
                let sums = |lane| {
                    let arrived = fabric.arrived_sum(LaneId(lane));
                    (fabric.part_sum(LaneId(lane), 0, part), arrived)
                };
                (0..LANES).map(sums).collect::<Vec<_>>()
            });
            for ((lane, target), (sum, arrived)) in (0..LANES).zip(&targets).zip(sums) {
                let source = &sources[usize::from(lane)][1..];
                assert!(target[1..=wanted] == source[..wanted], "{rest_bytes} {wanted}");
                assert_eq!((target[0], target[wanted + 1]), (7, 7), "{rest_bytes} {wanted}");
                assert_eq!(sum, crc32fast::hash(&source[..wanted]));
                let (sum, summed_bytes) = arrived;
                assert_eq!(sum, crc32fast::hash(&source[..summed_bytes]));
                // A reply that is longer than the session's input arrives where it belongs.
                assert!(rest_bytes < 65_537 || summed_bytes == wanted, "{rest_bytes} {wanted}");
                let buffer = endpoint.buffer(LaneId(lane), Buffer::ReadBlock);
                assert_eq!(buffer[..HEAD as usize], [lane as u8 + 9; HEAD as usize]);
                let behind = &buffer[HEAD as usize..length as usize - wanted];
                assert!(behind[..rest_bytes - wanted] == source[wanted..], "{rest_bytes} {wanted}");
            }
        }
    }
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
                let bytes = HEAD + (1 << 20);
                let read = Verb::Read { remote: 1 << 20, into: Buffer::ReadBlock, bytes };
                let rest = (HEAD, LentMemory::Target(&mut target));
                loan.post(LANE, REGION, (&[read], Nanos::MAX), rest);
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

/// Without a sum.
struct Unsummed;

impl WriteSum for Unsummed {
    fn add(&mut self, _: &[u8]) {}

    fn end(&mut self, _: &mut [u8]) {}
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
    let mut fabric = link.into_fabric(Server::remote(true), 1).unwrap();
    // More than the system takes at once.
    let mut rest = vec![7; 64 << 20];
    let chain = [write(4096, HEAD + rest.len() as u32)];
    let deadline = fabric.now() + LATENESS_MAX_NS;
    let long = LongWrite { head_bytes: HEAD, rest: &rest, sum: &mut Unsummed };
    assert_eq!(fabric.run_long_write(LANE, REGION, &chain, deadline, long), Ok(0));
    rest.fill(CHANGED);
    changed.send(()).unwrap();
    let next = fabric.run(LANE, REGION, &[read(64, 8)], Nanos::MAX);
    assert_eq!(next, Err(ChainError::Fenced));
    server.join().unwrap();
}
