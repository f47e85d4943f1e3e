//! What a server with `--evict` does when it is full: `full-cache ADDRESS SESSIONS PHASE...`.
//!
//! A phase is `SECONDS:BYTES`, or `SECONDS:BYTES+BYTES` for values of two sizes in turn. `@RATE`
//! behind it limits the PUTs of a session in each second. Each session PUTs new keys only, for this
//! time. After each phase the example prints the rate, the latency, the number of refused PUTs, and
//! the size of the phase's values that are still stored. In a region that is never full, the same
//! phases show the rate without eviction.
#![allow(clippy::print_stdout, reason = "this is its output")]

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use farside::{Client, Session};
use hdrhistogram::Histogram;

/// How many keys of a phase are looked up afterwards, for each session.
const LOOKUPS: u64 = 100_000;
/// A session counts its PUTs in each of these many parts of a phase.
const PARTS: usize = 10;

type Failure = Box<dyn Error + Send + Sync>;

struct Phase {
    duration: Duration,
    sizes: Vec<usize>,
    /// The least time from one PUT to the next.
    interval: Duration,
}

struct Measured {
    latency: Histogram<u64>,
    parts: [u64; PARTS],
    refused: u64,
    stored: f64,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, sessions, phases @ ..] = &arguments[..] else {
        return Err("usage: full-cache ADDRESS SESSIONS SECONDS:BYTES[+BYTES][@RATE]...".into());
    };
    let client = Client::builder().server(address).connect()?;
    // No two runs have a key in common, unless they begin in the same second.
    let run = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() << 44;
    let sessions = (0..sessions.parse()?).map(|_| client.session());
    let mut sessions = sessions.collect::<farside::Result<Vec<Session>>>()?;
    for (number, text) in (0u64..).zip(phases) {
        let phase = parse(text)?;
        let started = Instant::now();
        let measured: Vec<Measured> = thread::scope(|scope| {
            let run = |(at, session): (u64, _)| {
                let first_key = run | number << 38 | at << 32;
                let phase = &phase;
                scope.spawn(move || put_new_keys(session, first_key, phase, started))
            };
            let threads: Vec<_> = (0..).zip(&mut sessions).map(run).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().map_err(|_| "a thread panicked")?)
                .collect::<Result<_, Failure>>()
        })?;
        print(text, &phase, measured)?;
        let statistics = client.admin().statistics()?;
        println!(
            "    {} chunks free, {} emptying, {} index, {} splits, {} evicted, {} denied",
            statistics.chunks_free,
            statistics.chunks_emptying,
            statistics.chunks_index,
            statistics.splits,
            statistics.keys_evicted,
            statistics.requests_denied,
        );
    }
    Ok(())
}

fn parse(text: &str) -> Result<Phase, Failure> {
    let (text, rate) = text.split_once('@').unwrap_or((text, ""));
    let interval = if rate.is_empty() { 0.0 } else { 1.0 / rate.parse::<f64>()? };
    let interval = Duration::from_secs_f64(interval);
    let (seconds, sizes) = text.split_once(':').ok_or("a phase is SECONDS:BYTES[+BYTES][@RATE]")?;
    let sizes = sizes.split('+').map(str::parse).collect::<Result<_, _>>()?;
    Ok(Phase { duration: Duration::from_secs_f64(seconds.parse()?), sizes, interval })
}

fn put_new_keys(
    session: &mut Session,
    first_key: u64,
    phase: &Phase,
    started: Instant,
) -> Result<Measured, Failure> {
    let values: Vec<_> = phase.sizes.iter().map(|bytes| vec![7u8; *bytes]).collect();
    let mut latency = Histogram::new(3)?;
    let (mut parts, mut refused, mut count) = ([0; PARTS], 0, 0);
    let mut before = Instant::now();
    loop {
        let part = (before - started).as_nanos() * PARTS as u128 / phase.duration.as_nanos();
        let Some(puts) = parts.get_mut(part as usize) else { break };
        let value = &values[count as usize % values.len()];
        // Sleeps in larger steps, because short sleeps take longer than they should.
        let ahead = (phase.interval * count as u32).saturating_sub(before - started);
        if ahead > Duration::from_millis(1) {
            thread::sleep(ahead);
            before = Instant::now();
        }
        let outcome = session.put((first_key + count).to_le_bytes(), value);
        let now = Instant::now();
        latency.record((now - before).as_nanos() as u64)?;
        before = now;
        *puts += 1;
        count += 1;
        if let Err(error) = outcome {
            if refused == 0 {
                println!("    refused after {:.1} s: {error}", started.elapsed().as_secs_f64());
            }
            refused += 1;
        }
    }
    let step = (count / LOOKUPS).max(1);
    let mut bytes = 0;
    // Odd steps see values of both sizes.
    for key in (0..count).step_by(step as usize | 1) {
        if session.get((first_key + key).to_le_bytes())?.is_some() {
            bytes += values[key as usize % values.len()].len();
        }
    }
    let stored = (bytes as u64 * (step | 1)) as f64 / f64::from(1 << 20);
    Ok(Measured { latency, parts, refused, stored })
}

fn print(text: &str, phase: &Phase, measured: Vec<Measured>) -> Result<(), Failure> {
    let mut latency = Histogram::<u64>::new(3)?;
    let (mut parts, mut refused, mut stored) = ([0; PARTS], 0, 0.0);
    for session in measured {
        latency.add(session.latency)?;
        parts.iter_mut().zip(session.parts).for_each(|(sum, puts)| *sum += puts);
        refused += session.refused;
        stored += session.stored;
    }
    let seconds = phase.duration.as_secs_f64();
    let us = |quantile| latency.value_at_quantile(quantile) as f64 / 1000.0;
    println!(
        "{text}: {:.0} puts/s, p50 {:.2} us, p99 {:.1} us, p99.9 {:.1} us, max {:.1} ms; \
         {refused} refused, {stored:.1} MiB stored",
        latency.len() as f64 / seconds,
        us(0.5),
        us(0.99),
        us(0.999),
        us(1.0) / 1000.0,
    );
    let slow = |limit_us: u64| {
        let found = latency.iter_recorded();
        let slow = found.filter(|found| found.value_iterated_to() > limit_us * 1000);
        slow.fold((0, 0.0), |(count, sum), found| {
            let puts = found.count_since_last_iteration();
            (count + puts, sum + (puts * found.value_iterated_to()) as f64 / 1e9)
        })
    };
    let [(count, sum), (count_long, sum_long)] = [slow(100), slow(10_000)];
    println!(
        "    {count} PUTs of over 100 us took {sum:.1} s, \
         {count_long} of over 10 ms {sum_long:.1} s"
    );
    let rates = parts.map(|puts| format!("{:.0}", puts as f64 * PARTS as f64 / seconds / 1000.0));
    println!("    thousand puts/s in each tenth: {}", rates.join(" "));
    Ok(())
}
