//! The command line of `kv-cli`.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueHint};
use farside_cli::formats::Encoding;
use farside_config::size::{ByteSize, ByteSizeError};
use farside_layout::{CHUNK_BYTES, REGION_BYTES_MAX};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  the key is absent, the condition of the change did not hold, or kick found no such client
  2  the command line or the config file is wrong: nothing was done
  3  no server: none answers, it went away, or it refuses the connection
  4  damage: something in the region is invalid; the command did what it could
  5  any other failure
  129, 130, 143  SIGHUP, SIGINT or SIGTERM ended a dump, a snapshot, a restore or top

The server's address comes from --server, or FARSIDE_SERVER, or the config file: --config, or
~/.config/farside/client.toml, or /etc/farside/client.toml. Only the config file can have a secret.

A command waits for a server that does not answer: 3 s, or 30 s if it accepts the connection, which
it does while it makes its region; or else connect_timeout_ms of the config file.
If the server goes away during the command, the command waits for the same time once more.";

/// Farside, a one-sided RDMA key-value store, from the command line.
#[derive(Debug, Parser)]
#[command(name = "kv-cli", version, after_help = EXIT_CODES, max_term_width = 100)]
pub(crate) struct Args {
    /// The server's address, for example shm:///run/farside/kv.sock
    #[arg(long, global = true, value_name = "URI", env = "FARSIDE_SERVER")]
    pub(crate) server: Option<String>,
    /// Config file to use instead of the default ones
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: Option<PathBuf>,
    /// Refuse a config file with a secret that other users can read, instead of warning about it
    #[arg(long, global = true)]
    pub(crate) strict_config: bool,
    /// How keys are written on the command line and printed
    #[arg(long, global = true, value_name = "HOW", default_value = "raw")]
    pub(crate) key_encoding: Encoding,
    /// How values are written on the command line and printed; files and stdin are always raw
    #[arg(long, global = true, value_name = "HOW", default_value = "raw")]
    pub(crate) value_encoding: Encoding,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the value of a key, byte for byte; exit 1 when it is absent
    Get(Key),
    /// Store a value, whether or not the key is present
    Put(KeyValue),
    /// Store a value only if the key is absent; exit 1 when it is present
    Insert(KeyValue),
    /// Store a value only if the key is present; exit 1 when it is absent
    Update(KeyValue),
    /// Remove a key; exit 1 when it is absent. With --prefix, remove all keys that start with it
    Delete(Delete),
    /// Print the values of several keys as `scan` does; exit 1 when one of them is absent
    Mget(Keys),
    /// Exit 0 when the key is present, 1 when it is absent
    Exists(Key),
    /// Add a number to the decimal number in a key's value, and print the sum
    ///
    /// An absent key counts as 0. The time of expiry stays.
    Incr(Increment),
    /// Print for how many more seconds a key's value stays, or `never`; exit 1 when it is absent
    Ttl(Key),
    /// Store NEW if the key has the value VALUE (--expect) or is absent (--absent); otherwise exit
    /// 1
    ///
    /// A compare-and-swap. On a mismatch the current value goes to stdout.
    Cas(Cas),
    /// Print all keys and values, in no order: key, tab, value, one a line
    ///
    /// Raw keys and values are escaped so that each stays on its line: \t, \n, \r, \\ and \xNN.
    /// Keys that are inserted or deleted meanwhile may or may not be printed.
    Scan(Scan),
    /// Print the keys with the longest values, longest first: bytes, tab, key, one a line
    ///
    /// Reads all values, as `scan` does. Clients may continue to work.
    Bigkeys(BigKeys),
    /// Print the keys that are read most: share of the reads, tab, sampled reads, tab, key, one a
    /// line
    ///
    /// The server asks its clients for samples while the command runs. A sample has one in 16
    /// reads, chosen at random. Reads that a pipeline combined count once.
    Hot(Hot),
    /// Show rates, latency, memory and clients in the terminal, anew every second
    ///
    /// Keys: q ends it. In a cluster the arrows and the digits choose the shard. The round trips
    /// are those of GETs of an absent key, by this command. Each second takes one request for
    /// statistics and one for the clients.
    Top(Top),
    /// List the clients of the server, except this command
    ///
    /// Clients report program, process, host and counts when the command asks. If a client does not
    /// answer within a second, its last report is shown with its age, or `-` if there was none.
    /// `held` are free blocks for its next writes.
    Clients {
        /// Print a JSON object for each client, one a line
        #[arg(long)]
        json: bool,
    },
    /// Disconnect and fence a client; exit 1 when none has this id
    ///
    /// Operations of the client that are under way fail or are repeated, as after the loss of a
    /// connection. With its next operation the client connects again, under a new id. To keep it
    /// out, stop its process, or change the server's secret.
    Kick(Kick),
    /// Show memory, keys, load and clients
    Stat {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Ask the server for an answer, and print how long that took; exit 3 when there is none
    ///
    /// For probes and scripts. In a cluster each shard's server is asked.
    Ping,
    /// Store every file below a folder under its relative path, or every record of a file
    ///
    /// A .jsonl file has {"key":..,"value":..} on each line, or key_base64 and value_base64 for
    /// bytes that are not text. Symbolic links are skipped. If a server goes away meanwhile, the
    /// keys of the others go on, and its own keys are stored when it is back.
    Load(Load),
    /// Write every key to a file below a folder, or to a .jsonl file
    ///
    /// Times of expiry and pins are not written: values that `load` stores again never expire. A
    /// snapshot keeps both.
    Dump(Dump),
    /// Write all keys, values, times of expiry and pins to a file, for `restore` or `kv-server
    /// --restore`
    ///
    /// A cluster of several shards gives a folder with a file for each shard, which are written in
    /// parallel. Clients may continue to work: each key gets a value that it had at some moment of
    /// the snapshot. A key that is present the whole time is never missing.
    Snapshot(Snapshot),
    /// Store all keys, values, times of expiry and pins of a snapshot
    ///
    /// The store may be one server or a cluster of any number of shards. It must be empty, unless
    /// --force is given. All of the snapshot is checked before anything is stored. Expired values
    /// are skipped. Any other key that cannot be stored ends the command.
    Restore(Restore),
    /// Collect blocks that dead clients held, and wait until this is done
    ///
    /// The server also does this by itself after a client dies. Clients continue to work; one that
    /// does not answer within 5 s is disconnected.
    Gc,
    /// Move blocks out of chunks that are mostly free, so that these can hold values of other sizes
    ///
    /// The moves are ordinary updates: values stay, their versions change. Clients continue to
    /// work.
    Compact,
    /// Check the whole region, read-only: every row, slot, block and checksum; exit 4 on damage
    ///
    /// Clients may continue to work; with --region no server may use the file.
    Verify {
        /// Check this region file, without a server
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        region: Option<PathBuf>,
    },
    /// Make, show, check or remove a cluster of servers, by its records
    #[command(subcommand)]
    Cluster(Cluster),
    /// Check this machine for what Farside needs, and print how to fix what is missing
    ///
    /// Exit 2 when the config file cannot be used, 3 when the configured server does not answer.
    /// What the machine lacks does not change the exit code.
    Doctor {
        /// Also measure WRITEs into a region of this size on the RDMA device, in one memory region
        /// and in slices (mr_slice); takes 7 seconds and as much memory
        #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "8GiB")]
        #[arg(value_parser = parse_measured)]
        measure: Option<ByteSize>,
    },
}

/// The commands take the URI of the records: etcd://HOST:2379,HOST:2379/NAME, or file:///PATH for
/// one machine.
#[derive(Debug, Subcommand)]
pub(crate) enum Cluster {
    /// Make the records of a new cluster, whose servers you then start
    Create {
        /// The place for the records
        #[arg(value_name = "URI")]
        uri: String,
        /// The number of shards, 1 to 128. It stays: choose as many as you will ever have servers
        #[arg(long, value_name = "N")]
        shards: u16,
    },
    /// Show each shard's server, keys, bytes and load
    Show {
        /// Where the records are
        #[arg(value_name = "URI")]
        uri: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Look at the store of the records, the records and all servers; exit 5 if something is wrong
    Check {
        /// Where the records are
        #[arg(value_name = "URI")]
        uri: String,
    },
    /// Remove the records of a cluster. Region files and snapshots stay
    Destroy {
        /// Where the records are
        #[arg(value_name = "URI")]
        uri: String,
        /// Remove them while servers run
        #[arg(long)]
        force: bool,
    },
    /// Give up the data of a shard whose server is lost, so that a spare may take the shard
    ///
    /// Takes the shard from its server if that still runs, and waits until no client trusts it any
    /// more: some seconds.
    Assign {
        /// Where the records are
        #[arg(value_name = "URI")]
        uri: String,
        /// The number of the shard
        #[arg(value_name = "SHARD")]
        shard: u16,
        /// The shard begins empty: its present data is given up
        #[arg(long, required = true)]
        empty: bool,
    },
    /// Make records right that were restored from a backup, or one that is damaged
    ///
    /// Asks all servers for the views that they know, and raises the numbers in the records beyond
    /// all of them, so that servers and clients follow the records again. A server that is stopped
    /// may then start with any copy of its region file: start it with the one that was served last.
    Repair {
        /// Where the records are
        #[arg(value_name = "URI")]
        uri: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Key {
    /// The key
    pub(crate) key: OsString,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Keys {
    /// The keys
    #[arg(required = true)]
    pub(crate) keys: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Delete {
    /// The key
    #[arg(required_unless_present = "prefix")]
    pub(crate) key: Option<OsString>,
    /// Remove all keys that start with this, and print how many there were
    #[arg(long, conflicts_with = "key")]
    pub(crate) prefix: Option<OsString>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Increment {
    /// The key
    pub(crate) key: OsString,
    /// The number to add, which may be negative
    #[arg(default_value_t = 1, allow_negative_numbers = true)]
    pub(crate) by: i64,
}

#[derive(Debug, clap::Args)]
pub(crate) struct KeyValue {
    /// The key
    pub(crate) key: OsString,
    /// The value; - reads it from stdin
    #[arg(required_unless_present = "file", allow_negative_numbers = true)]
    pub(crate) value: Option<OsString>,
    /// Read the value from this file
    #[arg(long, conflicts_with = "value", value_hint = ValueHint::FilePath)]
    pub(crate) file: Option<PathBuf>,
    /// Time after which the value expires, such as 500ms, 90s, 15m, 1.5h or 7d. Default: never
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    pub(crate) ttl: Option<Duration>,
    /// Never evict the value, also if the server is a cache (--evict)
    #[arg(long)]
    pub(crate) pinned: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Cas {
    /// The key
    pub(crate) key: OsString,
    /// The value that the key must have
    #[arg(long, value_name = "VALUE", required_unless_present = "absent")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) expect: Option<OsString>,
    /// The key must be absent
    #[arg(long, conflicts_with = "expect")]
    pub(crate) absent: bool,
    /// The new value; - reads it from stdin
    #[arg(allow_negative_numbers = true)]
    pub(crate) new: OsString,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BigKeys {
    /// How many keys to print
    #[arg(long, value_name = "N", default_value = "10")]
    pub(crate) count: NonZeroUsize,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Hot {
    /// For how long reads are sampled
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=600))]
    pub(crate) seconds: u16,
    /// How many keys to print
    #[arg(long, value_name = "N", default_value = "20")]
    pub(crate) count: NonZeroUsize,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Top {
    /// The time from one view to the next, such as 500ms or 5s; 100 ms at least
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "1s")]
    pub(crate) interval: Duration,
    /// Print one view as text after one interval, and end
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Kick {
    /// The client's id, as `clients` prints it
    pub(crate) id: u16,
    /// The number of the shard, if there are several: each server has clients of its own
    #[arg(long, value_name = "N")]
    pub(crate) shard: Option<u16>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Scan {
    /// Print only keys that start with this
    #[arg(long)]
    pub(crate) prefix: Option<OsString>,
    /// Print only the keys, without values
    #[arg(long, conflicts_with = "json")]
    pub(crate) keys_only: bool,
    /// Print at most this many entries
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<u64>,
    /// Print one JSON object per line, as `load` reads it
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Load {
    /// A folder, or a .jsonl file
    #[arg(value_name = "DIR|FILE", value_hint = ValueHint::AnyPath)]
    pub(crate) from: PathBuf,
    /// Skip values over the region's limit, instead of failing at the end
    #[arg(long)]
    pub(crate) skip_too_large: bool,
    /// Never evict the values, also if the server is a cache (--evict)
    #[arg(long)]
    pub(crate) pinned: bool,
    #[command(flatten)]
    pub(crate) retries: Retries,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Retries {
    /// How long to try again to store keys whose server is down, such as 500ms, 90s or 15m
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "30s")]
    pub(crate) retry_for: Duration,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Dump {
    /// A folder, which is created if it does not exist, or a .jsonl file
    #[arg(value_name = "DIR|FILE", value_hint = ValueHint::AnyPath)]
    pub(crate) to: PathBuf,
    /// Write into a folder that is not empty, or replace a file
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Snapshot {
    /// The file to create; for a cluster of several shards the folder to create
    #[arg(value_name = "FILE|DIR", value_hint = ValueHint::AnyPath)]
    pub(crate) to: PathBuf,
    /// Replace the file, or the folder of a former snapshot, if it exists
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Restore {
    /// A file or folder that `snapshot` wrote
    #[arg(value_name = "FILE|DIR", value_hint = ValueHint::AnyPath)]
    pub(crate) from: PathBuf,
    /// Store into a store that has keys: those of the snapshot get its values, others stay
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) retries: Retries,
}

/// The shortest region of several slices.
const MEASURED_BYTES_MIN: u64 = 16 << 20;

fn parse_measured(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error: ByteSizeError| error.to_string())?;
    let is_region = (MEASURED_BYTES_MIN..=REGION_BYTES_MAX).contains(&size.0);
    if is_region && size.0.is_multiple_of(CHUNK_BYTES) {
        return Ok(size);
    }
    let [min, max, unit] = [MEASURED_BYTES_MIN, REGION_BYTES_MAX, CHUNK_BYTES].map(ByteSize);
    Err(format!("write a size from {min} to {max}, in steps of {unit}"))
}

/// Parses a number of milliseconds, seconds, minutes, hours or days, rounded up to a millisecond.
fn parse_time(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, u64); 5] =
        [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    let with_unit = |(unit, unit_ms): (&str, u64)| {
        let number = text.strip_suffix(unit)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        // `parse` alone would accept a sign.
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !is_number(whole) || !is_number(fraction) {
            return None;
        }
        let parts = format!("{whole}{fraction}").parse::<u64>().ok()?.checked_mul(unit_ms)?;
        Some(parts.div_ceil(10u64.checked_pow(fraction.len() as u32)?))
    };
    let ms = UNITS.into_iter().find_map(with_unit).filter(|ms| *ms > 0);
    ms.map(Duration::from_millis).ok_or_else(|| {
        "write a number above 0 and ms, s, m, h or d, as in 500ms, 90s or 1.5h".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_value_has_exactly_one_source() {
        let parse = |line: &str| Args::try_parse_from(line.split(' '));
        assert!(parse("kv-cli put k v").is_ok());
        assert!(parse("kv-cli put k -").is_ok());
        assert!(parse("kv-cli put k -5").is_ok());
        assert!(parse("kv-cli put k --file f").is_ok());
        assert!(parse("kv-cli put k").is_err());
        assert!(parse("kv-cli put k v --file f").is_err());
        assert!(parse("kv-cli cas k --expect a b").is_ok());
        assert!(parse("kv-cli cas k --absent b").is_ok());
        assert!(parse("kv-cli cas k b").is_err());
        assert!(parse("kv-cli cas k --absent --expect a b").is_err());
        assert!(parse("kv-cli get k --secret s").is_err());
    }

    #[test]
    fn a_time_is_a_positive_number_with_a_unit() {
        let ms = |text| parse_time(text).ok().map(|ttl| ttl.as_millis());
        let seconds = |text| ms(text).map(|ms| ms / 1000);
        assert_eq!(["90s", "15m", "12h", "7d"].map(seconds), [90, 900, 43_200, 604_800].map(Some));
        let right = [1500, 500, 1, 1, 5_400_000, 18].map(Some);
        assert_eq!(["1500ms", "0.5s", "1ms", "0.0001s", "1.5h", "0.0000002d"].map(ms), right);
        for wrong in ["", "5", "s", "0s", "0.0ms", "+5s", "-5s", ".5s", "5.s", "1.2.3s", "1.-5s"] {
            assert_eq!(ms(wrong), None, "{wrong}");
        }
        for wrong in ["5 s", "5w", "99999999999999999d", "0.00000000000000000001d"] {
            assert_eq!(ms(wrong), None, "{wrong}");
        }
    }
}
