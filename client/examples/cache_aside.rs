//! Cache-aside: a read asks the cache first. If the key is absent, it loads the value from a slow
//! source, and stores it with a TTL.
//!
//! A change of the source removes the key. A reader that loaded the old value before the change may
//! store it after the removal. Then the old value stays until its TTL is over, and no longer.
//!
//! `Session::get_or_fetch` is the same in one call. This program shows the parts.
//!
//! ```sh
//! cargo run -p farside --example cache_aside shm:///run/farside/kv.sock
//! ```
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::collections::HashMap;
use std::error::Error;
use std::time::Duration;

use farside::{Client, Session};

/// How old a value in the cache can be.
const TTL: Duration = Duration::from_secs(60);

/// Names of users: in a source, here a stand-in for a database, and in the cache.
struct Users {
    source: HashMap<u32, String>,
    cache: Session,
}

impl Users {
    /// Returns the user's name, and whether it came from the cache.
    fn name(&mut self, user: u32) -> Result<(String, bool), Box<dyn Error>> {
        let key = format!("user:{user}");
        if let Some(value) = self.cache.get(&key)? {
            return Ok((String::from_utf8(value.into_vec())?, true));
        }
        let name = self.source.get(&user).ok_or("no such user")?.clone();
        self.cache.put_with_ttl(&key, &name, TTL)?;
        Ok((name, false))
    }

    fn rename(&mut self, user: u32, name: &str) -> farside::Result<()> {
        self.source.insert(user, name.to_owned());
        self.cache.delete(format!("user:{user}"))?;
        Ok(())
    }

    fn show(&mut self, user: u32) -> Result<(), Box<dyn Error>> {
        let (name, is_cached) = self.name(user)?;
        println!("user {user}: {name} ({})", if is_cached { "cached" } else { "loaded" });
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: cache_aside ADDRESS")?;
    let client = Client::builder().server(&address).connect()?;
    let source = HashMap::from([(7, "Ada".to_owned())]);
    let mut users = Users { source, cache: client.session()? };

    users.show(7)?;
    users.show(7)?;
    users.rename(7, "Grace")?;
    users.show(7)?;
    users.show(7)?;

    // Makes the value expire at once, as if its TTL were over.
    users.cache.touch("user:7", Duration::from_millis(1))?;
    while users.cache.exists("user:7")? {
        std::thread::sleep(Duration::from_millis(1));
    }
    users.show(7)
}
