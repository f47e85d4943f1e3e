//! A lock with a TTL: an INSERT takes it, and the version of that write is the proof. Its
//! holder renews and releases it by version, so it never touches the lock of the next holder.
//!
//! A holder that is slow can lose the lock without notice, when the TTL is over. So what the lock
//! protects should be written by version too, with `compare_exchange_version`.
//!
//! ```sh
//! cargo run -p farside --example lock shm:///run/farside/kv.sock
//! ```
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::time::Duration;

use farside::{Client, Session, Store, Version};

const NAME: &str = "lock:report";

/// One owner's view of the lock.
struct Lock {
    session: Session,
    owner: &'static str,
    /// The write that took or renewed the lock; `None` if this owner does not hold it.
    held: Option<Version>,
}

impl Lock {
    fn new(client: &Client, owner: &'static str) -> farside::Result<Self> {
        Ok(Self { session: client.session()?, owner, held: None })
    }

    /// Takes the lock if it is free. Returns whether this owner holds it now.
    fn acquire(&mut self, ttl: Duration) -> farside::Result<bool> {
        self.write(Store::if_absent().ttl(ttl))
    }

    /// Extends the TTL. Returns false if the lock was lost.
    fn renew(&mut self, ttl: Duration) -> farside::Result<bool> {
        let Some(version) = self.held else { return Ok(false) };
        self.write(Store::if_version(version).ttl(ttl))
    }

    /// Releases the lock. Returns false if it was lost.
    fn release(&mut self) -> farside::Result<bool> {
        let Some(version) = self.held.take() else { return Ok(false) };
        self.session.delete_if_version(NAME, version)
    }

    fn write(&mut self, store: Store<'_>) -> farside::Result<bool> {
        let outcome = self.session.store(NAME, self.owner, store)?;
        self.held = outcome.version.filter(|_| outcome.applied);
        Ok(self.held.is_some())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: lock ADDRESS")?;
    let client = Client::builder().server(&address).connect()?;
    let (mut first, mut second) = (Lock::new(&client, "first")?, Lock::new(&client, "second")?);
    let (long, short) = (Duration::from_secs(60), Duration::from_millis(50));

    println!("first acquires: {}", first.acquire(long)?);
    println!("second acquires: {}", second.acquire(long)?);
    println!("first renews: {}", first.renew(long)?);
    println!("first releases: {}", first.release()?);
    println!("second acquires, for {short:?}: {}", second.acquire(short)?);
    // The second owner does not renew in time, and loses the lock.
    while !first.acquire(long)? {
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("first acquires after that");
    println!("second renews: {}", second.renew(long)?);
    println!("first releases: {}", first.release()?);
    Ok(())
}
