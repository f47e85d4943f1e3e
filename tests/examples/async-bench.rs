//! Compares the throughput of an async client with that of a pipeline of the same depth, by cached
//! GETs of 64 bytes. Start a server first: `kv-server --listen ADDRESS --memory 256MiB`.
//!
//! `async-bench ADDRESS [WORKERS [KEYS]]`. Without WORKERS, tokio has a worker for each processor.
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farside::{AsyncClient, Client, Session};

const DEPTH: u16 = 16;
const TASKS: u64 = 10_000;
const ROUNDS: usize = 6;
const ROUND: Duration = Duration::from_secs(1);
/// Operations of the pipeline between two looks at the clock.
const OPERATIONS_PER_LOOK: u64 = 4096;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(address) = arguments.first() else {
        eprintln!("async-bench ADDRESS [WORKERS [KEYS]]");
        std::process::exit(2);
    };
    let processors = std::thread::available_parallelism().unwrap().get();
    let workers = arguments.get(1).map_or(processors, |workers| workers.parse().unwrap());
    let keys = arguments.get(2).map_or(TASKS, |keys| keys.parse().unwrap());
    let client = Client::builder().server(address).pipeline_depth(DEPTH).connect().unwrap();
    let mut session = client.session().unwrap();
    for key in 0..keys {
        session.put(key.to_le_bytes(), [7; 64]).unwrap();
    }
    let async_client = client.async_client().unwrap();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(workers).build().unwrap();
    let mut rounds = Vec::new();
    for round in 0..=ROUNDS {
        let of_pipeline = run_pipeline(&mut session, keys);
        let of_tasks = run_tasks(&runtime, &async_client, keys);
        // The first round warms up.
        if round > 0 {
            println!("pipeline {of_pipeline:10.0}/s, tasks {of_tasks:10.0}/s");
            rounds.push((of_pipeline, of_tasks));
        }
    }
    let mean = |of: fn(&(f64, f64)) -> f64| rounds.iter().map(of).sum::<f64>() / ROUNDS as f64;
    let (of_pipeline, of_tasks) = (mean(|round| round.0), mean(|round| round.1));
    println!("ratio of the means {:.2}, {workers} workers of tokio", of_tasks / of_pipeline);
}

/// Returns the key after this one, in an order without a pattern.
fn next(seed: &mut u64, keys: u64) -> [u8; 8] {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*seed >> 33) % keys).to_le_bytes()
}

/// Returns the operations per second of a pipeline.
fn run_pipeline(session: &mut Session, keys: u64) -> f64 {
    let (mut seed, mut operations, begun) = (1, 0, Instant::now());
    let mut pipeline = session.pipeline().unwrap();
    while begun.elapsed() < ROUND {
        for _ in 0..OPERATIONS_PER_LOOK {
            if pipeline.free_lanes() == 0 {
                let completed = pipeline.wait().unwrap();
                assert!(completed.result.unwrap().applied);
            }
            pipeline.get(next(&mut seed, keys)).unwrap();
        }
        operations += OPERATIONS_PER_LOOK;
    }
    drop(pipeline);
    operations as f64 / begun.elapsed().as_secs_f64()
}

/// Returns the operations per second of all tasks together.
fn run_tasks(runtime: &tokio::runtime::Runtime, client: &AsyncClient, keys: u64) -> f64 {
    let (begun, is_over) = (Instant::now(), Arc::new(AtomicBool::new(false)));
    let task = |number| {
        let (client, is_over) = (client.clone(), is_over.clone());
        runtime.spawn(async move {
            let (mut seed, mut operations) = (number, 0u64);
            while !is_over.load(Ordering::Relaxed) {
                assert!(client.get(next(&mut seed, keys)).await.unwrap().is_some());
                operations += 1;
            }
            operations
        })
    };
    let tasks: Vec<_> = (0..TASKS).map(task).collect();
    std::thread::sleep(ROUND);
    is_over.store(true, Ordering::Relaxed);
    let sum = async {
        let mut sum = 0;
        for task in tasks {
            sum += task.await.unwrap();
        }
        sum
    };
    runtime.block_on(sum) as f64 / begun.elapsed().as_secs_f64()
}
