//! One client of the growth tests: inserts keys as fast as it can, reports their timing, then
//! overwrites them until it is killed. Exits with 3 and a line on stderr when anything fails.
//!
//! `growth-worker ADDRESS WRITER KEYS REPORT`; the timing of the inserts goes to the file REPORT.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::time::{Duration, Instant};

use farside::Client;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, writer, keys, report] = arguments.as_slice() else {
        eprintln!("growth-worker ADDRESS WRITER KEYS REPORT");
        std::process::exit(2);
    };
    let (writer, keys): (u64, u64) = (writer.parse().unwrap(), keys.parse().unwrap());
    let client = Client::builder().server(address).connect().unwrap();
    let mut session = client.session().unwrap();
    let key = |number: u64| (writer << 48 | number).to_le_bytes();
    let (started, mut slowest, mut slow) = (Instant::now(), Duration::ZERO, 0u64);
    let mut before = started;
    for number in 0..keys {
        if !matches!(session.insert(key(number), number.to_le_bytes()), Ok(true)) {
            eprintln!("WRONG: inserting {number}: {:?}", session.get(key(number)));
            std::process::exit(3);
        }
        let now = Instant::now();
        slowest = slowest.max(now - before);
        slow += u64::from(now - before > Duration::from_millis(50));
        before = now;
    }
    let seconds = started.elapsed().as_secs_f64();
    let line = format!(
        "{keys} inserts in {seconds:.2} s, {:.0} a second, the slowest {:.1} ms, {slow} over 50 ms",
        keys as f64 / seconds,
        slowest.as_secs_f64() * 1e3
    );
    // Renamed when complete, so that the test never reads part of the line.
    std::fs::write(format!("{report}.new"), line).unwrap();
    std::fs::rename(format!("{report}.new"), report).unwrap();
    for number in (0..keys).cycle() {
        if let Err(error) = session.put(key(number), number.to_le_bytes()) {
            eprintln!("WRONG: {error}");
            std::process::exit(3);
        }
    }
}
