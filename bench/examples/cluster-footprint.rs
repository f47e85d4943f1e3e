//! What a client of a cluster takes: `cluster-footprint SEEDS SESSIONS`.
//!
//! Opens the sessions, then uses every shard in each of them. Before, between and after, prints the
//! process's descriptors, threads, resident and pinned memory. `tools/scripts/cluster-footprint.sh`
//! starts the servers.
#![allow(clippy::print_stdout, reason = "this is its output")]

use std::error::Error;
use std::path::Path;

use farside::{Client, Session};

/// So many keys, and each shard has some, unless the hash is very unfair.
const KEYS_PER_SHARD: u32 = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, seeds, sessions] = &arguments[..] else {
        return Err("usage: cluster-footprint SEEDS SESSIONS".into());
    };
    print("at the start")?;
    let client = Client::builder().server(seeds).connect()?;
    print("connected")?;
    let sessions = (0..sessions.parse()?).map(|_| client.session());
    let mut sessions = sessions.collect::<farside::Result<Vec<Session>>>()?;
    print("sessions, one shard each")?;
    let keys = client.admin().shards() as u32 * KEYS_PER_SHARD;
    for session in &mut sessions {
        for key in 0..keys {
            session.put(key.to_le_bytes(), "value")?;
        }
    }
    print("sessions, all shards")
}

fn print(when: &str) -> Result<(), Box<dyn Error>> {
    let process = Path::new("/proc/self");
    let entries = |folder: &str| Ok::<_, std::io::Error>(process.join(folder).read_dir()?.count());
    let status = std::fs::read_to_string(process.join("status"))?;
    let kib = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        line.map_or("?", str::trim).to_owned()
    };
    println!(
        "{when:<26} {:>6} descriptors {:>5} threads, resident {}, pinned {}",
        entries("fd")?,
        entries("task")?,
        kib("VmRSS:"),
        kib("VmPin:"),
    );
    Ok(())
}
