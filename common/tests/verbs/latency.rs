//! Figures beside perftest's, for whoever runs this with `--ignored --nocapture`.

use std::time::{Duration, Instant};

use farside_common::fabric::verbs::Options;
use farside_common::fabric::{Buffer, Fabric, LaneId, Verb};

use crate::harness::{Server, WRITER, later};

const LANE: LaneId = LaneId(0);
const ROUNDS: usize = 2000;

fn report(what: &str, mut took: Vec<Duration>) {
    took.sort();
    let (typical, tail) = (took[took.len() / 2], took[took.len() * 99 / 100]);
    let micros = |duration: Duration| duration.as_nanos() as f64 / 1000.0;
    let (least, typical, tail) = (micros(took[0]), micros(typical), micros(tail));
    println!("{what:<36} min {least:8.2}   p50 {typical:8.2}   p99 {tail:8.2} us");
}

#[test]
#[ignore = "prints figures"]
fn figures() {
    let Some(mut server) = Server::new() else { return };
    let options = Options { spin: Duration::from_millis(10), ..Options::default() };
    let mut fabric = server.client_of(WRITER, 64, options);
    let read = |bytes| Verb::Read { remote: 4096, into: Buffer::Block, bytes };
    let swap = Verb::CompareSwap { remote: 64, expected: 0, desired: 0 };
    let write = |bytes| Verb::Write { remote: 4096, from: Buffer::Image, bytes };
    let mark = Verb::WriteHalf { remote: 4096, value: 1 };
    let word = Verb::WriteWord { remote: 4096, value: 1 };
    let cases: &[(&str, &[Verb])] = &[
        ("READ 64", &[read(64)]),
        ("READ 256", &[read(256)]),
        ("READ 4096", &[read(4096)]),
        ("WRITE 64 inline", &[write(64)]),
        ("CAS", &[swap]),
        ("[WRITE 128][CAS]", &[write(128), swap]),
        ("[WRITE 128][WRITE 4][CAS]", &[write(128), mark, swap]),
        ("[WRITE 128][WRITE 4][CAS][READ 256]", &[write(128), mark, swap, read(256)]),
        ("[WRITE 8][CAS]", &[word, swap]),
        ("[CAS][CAS]", &[swap, swap]),
        ("[WRITE 128][CAS][READ 256]", &[write(128), swap, read(256)]),
        ("[WRITE 128][READ 128][READ 128]", &[write(128), read(128), read(128)]),
    ];
    for (what, chain) in cases {
        let mut took = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let deadline = later(&fabric);
            let started = Instant::now();
            fabric.run(LANE, chain, deadline).unwrap();
            took.push(started.elapsed());
        }
        report(what, took);
    }
    let (started, total) = (Instant::now(), 20_000);
    let (mut posted, mut completed) = (0, 0);
    while completed < total {
        while posted < total && posted - completed < 64 {
            let lane = if posted < 64 { LaneId(posted as u16) } else { break };
            fabric.post(lane, &[read(64)], u64::MAX);
            posted += 1;
        }
        fabric.ring();
        while let Some(completion) = fabric.poll() {
            completed += 1;
            if posted < total {
                fabric.post(completion.lane, &[read(64)], u64::MAX);
                posted += 1;
            }
        }
    }
    let rate = f64::from(total) / started.elapsed().as_secs_f64();
    println!("READ 64, 64 lanes: {rate:.0} a second");
}
