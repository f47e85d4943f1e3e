//! A counter that several threads increment. Each increment is atomic: none is lost.
//!
//! If the connection breaks during an increment, its error is `is_indeterminate()`: the number may
//! or may not have grown. A program that must count exactly keeps the number under a version; the
//! section on errors in the documentation of the crate shows how.
//!
//! ```sh
//! cargo run -p farside --example counter shm:///run/farside/kv.sock
//! ```
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use farside::Client;

const THREADS: u32 = 4;
const INCREMENTS: u32 = 250;

/// Increments the counter of a page many times, on one session.
fn visit(client: &Client, page: &str) -> farside::Result<()> {
    let mut session = client.session()?;
    for _ in 0..INCREMENTS {
        session.increment(page, 1)?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: counter ADDRESS")?;
    let client = Client::builder().server(&address).connect()?;
    let mut session = client.session()?;
    session.delete("visits:home")?;

    std::thread::scope(|scope| {
        let visitors: Vec<_> =
            (0..THREADS).map(|_| scope.spawn(|| visit(&client, "visits:home"))).collect();
        visitors.into_iter().try_for_each(|visitor| visitor.join().expect("no panic"))
    })?;
    // An increment by 0 reads the counter as a number.
    println!("home: {} visits", session.increment("visits:home", 0)?);

    // Counters of several keys, in one doorbell.
    session.delete_many(["visits:about", "visits:help"])?;
    let batch = session.batch().increment("visits:about", 2).increment("visits:help", 3);
    for (page, outcome) in ["about", "help"].iter().zip(batch.run()?) {
        println!("{page}: {} visits", outcome?.number);
    }
    Ok(())
}
