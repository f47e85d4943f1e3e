//! One client of `tests/vm/slow-link`: many large GETs or PUTs in flight over a slow link. Each run
//! prints its figures.
//!
//! `slow-link ADDRESS load|gets|puts DEPTH`
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside::{Client, Outcome, Session};
use farside_fabric::{
    Completion, Fabric, Intercepted, Interceptor, LaneId, Nanos, RegionIndex, Verb,
};

const BYTES_PER_S: f64 = 25e6;
/// The size of a value. With key and header it fills a block of 512 KiB, so a GET without a cached
/// location READs no unused byte.
const BYTES: usize = (512 << 10) - 64;
/// More keys than operations in flight: concurrent GETs of one key would share a READ.
const KEYS: u64 = 1152;
/// The minimum number of GETs of a run: they keep the link busy for twelve seconds, so the run's
/// start hardly changes the figures.
const GETS_MIN: u64 = 600;
/// A run ends after this time, even if operations are left.
const TIME_MAX: Duration = Duration::from_secs(60);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, what, depth] = arguments.as_slice() else {
        eprintln!("slow-link ADDRESS load|gets|puts DEPTH");
        std::process::exit(2);
    };
    let (slowest, lateness_max) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let depth: u16 = depth.parse().unwrap();
    let builder = Client::builder().server(address).pipeline_depth(depth).cache_bytes(0);
    let watch = (slowest.clone(), lateness_max.clone());
    let builder = builder.intercept_fabric(Arc::new(move |fabric, lanes| {
        watch.1.store(fabric.timing(RegionIndex::FIRST).lateness_max_ns, Ordering::Relaxed);
        let interceptor = Doorbells {
            rung_at: vec![None; lanes.into()],
            posted: Vec::with_capacity(lanes.into()),
            slowest: watch.0.clone(),
        };
        Box::new(Intercepted { interceptor, fabric })
    }));
    let client = builder.connect().unwrap();
    let mut session = client.session().unwrap();
    match what.as_str() {
        "load" => {
            let value = vec![7; BYTES];
            (0..KEYS).for_each(|key| session.put(key.to_le_bytes(), &value).unwrap());
        }
        "gets" => {
            let gets = GETS_MIN.max(u64::from(depth) * 3 / 2);
            println!("{depth:5} GETs in flight: {}", run(&mut session, gets, false));
        }
        _ => {
            println!("{depth:5} PUTs in flight: {}", run(&mut session, depth.into(), true));
            println!(
                "      slowest successful change, doorbell to completion: {:.2} s; L = {:.2} s",
                slowest.load(Ordering::Relaxed) as f64 / 1e9,
                lateness_max.load(Ordering::Relaxed) as f64 / 1e9
            );
        }
    }
    // Dropping the session would wait for operations in flight, as dropping the pipeline would.
    std::process::exit(0);
}

/// Makes `operations` operations on the keys in turn, and returns the lines of figures.
fn run(session: &mut Session, operations: u64, puts: bool) -> String {
    let value = vec![9; if puts { BYTES } else { 0 }];
    let before = session.counters();
    let (begun, mut errors) = (Instant::now(), BTreeMap::<String, u64>::new());
    let (mut started, mut ended, mut succeeded) = (0, 0, 0u64);
    let mut pipeline = session.pipeline().unwrap();
    while ended < operations && begun.elapsed() < TIME_MAX {
        while started < operations {
            let key = (started % KEYS).to_le_bytes();
            let ticket = if puts { pipeline.put(key, &value) } else { pipeline.get(key) };
            if ticket.is_err() {
                break;
            }
            started += 1;
        }
        let Some(completed) = pipeline.poll() else { continue };
        ended += 1;
        match completed.result {
            Ok(Outcome { applied: true, value, .. })
                if value.is_none_or(|value| value.len() == BYTES) =>
            {
                succeeded += 1
            }
            Ok(_) => panic!("a value was lost"),
            Err(error) => {
                let error = error.to_string();
                *errors.entry(error.chars().take(90).collect()).or_default() += 1;
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    // Dropping the pipeline would wait for operations in flight, which may take minutes.
    std::mem::forget(pipeline);
    let moved = (succeeded * BYTES as u64) as f64;
    let counters = session.counters() - before;
    let verbs = if puts { counters.written_bytes } else { counters.read_bytes } as f64;
    let mut line = format!(
        "{succeeded} of {operations} in {seconds:.1} s, {:.2} of the link, {} {:.2} times \
         the values",
        moved / (BYTES_PER_S * seconds),
        if puts { "WRITE" } else { "READ" },
        verbs / moved
    );
    for (error, count) in errors {
        line += &format!("\n      {count} x {error}");
    }
    line
}

/// Times chains that change the region, from the doorbell to the completion.
struct Doorbells {
    /// For each lane the time at which the doorbell of its changing chain was rung.
    rung_at: Vec<Option<Nanos>>,
    /// The lanes with a changing chain whose doorbell is not yet rung.
    posted: Vec<LaneId>,
    slowest: Arc<AtomicU64>,
}

impl<F: Fabric + ?Sized> Interceptor<F> for Doorbells {
    fn post(
        &mut self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        self.rung_at[usize::from(lane.0)] = None;
        if chain.iter().any(|verb| verb.changes_region()) {
            self.posted.push(lane);
        }
        fabric.post(lane, region, chain, deadline);
    }

    fn ring(&mut self, fabric: &mut F) {
        for lane in self.posted.drain(..) {
            self.rung_at[usize::from(lane.0)] = Some(fabric.now());
        }
        fabric.ring();
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        let completion = fabric.poll()?;
        let rung_at = self.rung_at[usize::from(completion.lane.0)].take();
        if let (Some(rung_at), Ok(_)) = (rung_at, &completion.result) {
            let took = fabric.now().saturating_sub(rung_at);
            self.slowest.fetch_max(took, Ordering::Relaxed);
        }
        Some(completion)
    }
}
