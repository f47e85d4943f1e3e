//! The same calls as in `bench/calls.py`, from Rust: prints one line of nanoseconds for each call.
//! `calls.py` runs it, so that both are measured in one run.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use farside::{Client, Result};

/// The best of several rounds, because other programs disturb a round.
const ROUNDS: u32 = 7;

/// Returns how long a call takes, in nanoseconds.
fn measure(calls: u32, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        best = best.min(started.elapsed().as_nanos() as f64 / f64::from(calls));
    }
    Ok(best)
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let server = std::env::args().nth(1).ok_or("pass a server's address")?;
    let client = Client::builder().server(&server).connect()?;
    let mut session = client.session()?;
    session.put("short", [b'x'; 64])?;
    session.put("long", vec![b'x'; 1 << 20])?;
    let keys: Vec<_> = (0..100).map(|number| format!("key:{number}")).collect();
    session.put_many(keys.iter().map(|key| (key, [b'x'; 64])))?;
    let mut target = vec![0; 1 << 20];
    let get = measure(200_000, || session.get("short").map(|value| drop(black_box(value))))?;
    let put = measure(100_000, || session.put("short", [b'x'; 64]))?;
    let get_many =
        measure(2_000, || session.get_many(&keys).map(|values| drop(black_box(values))))?;
    let get_into = measure(500, || session.get_into("long", &mut target[..]).map(drop))?;
    let mut output = String::new();
    for (name, nanoseconds) in
        [("get", get), ("put", put), ("get_many", get_many), ("get_into", get_into)]
    {
        output.push_str(&format!("{name} {nanoseconds:.1}\n"));
    }
    std::io::Write::write_all(&mut std::io::stdout(), output.as_bytes())?;
    Ok(())
}
