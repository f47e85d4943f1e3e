//! The command line of `kv-compare`.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum, ValueHint};
use farside_bench::args::{EXIT_CODES, ServerArgs, positive_seconds, seconds};
use farside_bench::emulation::{self, Link};
use farside_bench::workload::Workload;
use farside_bench::{Error, Result};
use farside_config::size::{ByteSize, ByteSizeError};

/// Measures Farside beside other published stores, in turns, on the same fabric.
#[derive(Clone, Debug, Parser)]
#[command(name = "kv-compare", version, after_help = EXIT_CODES, max_term_width = 100)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Compare {
    /// Another comparison than that of YCSB's workloads.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Workloads of YCSB, separated by commas; see kv-bench ycsb --help
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "a,b,c,d,f")]
    pub workloads: Vec<Workload>,
    /// Stores, separated by commas. Fusee, race, smart and swarm are drivers written from the
    /// published descriptions, not their code. Redis, valkey and memcached have to be installed
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "farside,fusee,race,smart,swarm")]
    pub stores: Vec<StoreName>,
    /// A network to emulate between the client and the region: emulated has round trips of 2 us and
    /// the verb rates of a ConnectX-5
    #[arg(long, value_name = "NETWORK", value_parser = ["emulated"])]
    pub network: Option<String>,
    /// The bandwidth of the emulated network, in bytes a second, as in 24MiB; default 100 Gb/s
    #[arg(long, value_name = "SIZE", requires = "network", value_parser = bandwidth)]
    pub bandwidth: Option<ByteSize>,
    /// How many records to load
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=RECORDS_MAX))]
    pub records: u64,
    /// The length of every value, in bytes
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=VALUE_BYTES_MAX))]
    pub value_size: u32,
    /// How many operations the one thread keeps in flight; with 1, one after another
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=512))]
    pub depth: u16,
    /// How long to measure each store with each workload, in seconds, over all rounds
    #[arg(long, value_name = "N", default_value = "5", value_parser = positive_seconds)]
    pub seconds: f64,
    /// The number of rounds. In each round the stores take turns, so that other load on the machine
    /// affects all of them
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// How long to warm up each store with each workload, in seconds
    #[arg(long, value_name = "N", default_value = "0.5", value_parser = seconds)]
    pub warmup_seconds: f64,
    /// The server.
    #[command(flatten)]
    pub target: ServerArgs,
    /// The same seed makes the same operations
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Write the result to this file as JSON; - writes it to stdout instead of the tables
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
}

/// Another comparison.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Compare full caches: the hit ratio and rate of Farside and memcached on the same requests,
    /// beside exact LRU, FIFO and Belady's optimum
    Cache(Cache),
}

/// `kv-compare cache`.
#[derive(Clone, Debug, clap::Args)]
pub struct Cache {
    /// The memory region of Farside's server. Memcached gets as much as this region has for values
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub memory: ByteSize,
    /// The length of every value, in bytes
    #[arg(long, value_name = "N", default_value_t = 1024)]
    #[arg(value_parser = clap::value_parser!(u32).range(8..=VALUE_BYTES_MAX))]
    pub value_size: u32,
    /// The sizes of the cache in percent of the data. The number of keys follows from them
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "1,10,50")]
    #[arg(value_parser = cache_percent)]
    pub sizes: Vec<f64>,
    /// The number of requests of each trace, without those of scans
    #[arg(long, value_name = "N", default_value_t = 2_000_000)]
    pub requests: usize,
    /// Traces whose names contain one of these texts: zipfian-0.7, zipfian-0.99, zipfian-1.2,
    /// scans, shifts
    #[arg(long, value_name = "TEXT,...", value_delimiter = ',')]
    pub only: Vec<String>,
    /// How many threads ask, each one request after another
    #[arg(long, value_name = "N", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: u16,
    /// The same seed makes the same requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Write the result to this file as JSON; - writes it to stdout instead of the tables
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
}

/// Limit on the number of records.
const RECORDS_MAX: u64 = 1 << 30;
/// Limit on the length of a value: the drivers store it in one piece.
const VALUE_BYTES_MAX: i64 = 64 << 10;

/// A store. The comments are the descriptions in `--help` and in results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoreName {
    /// Farside's client library
    Farside,
    /// Driver from the description of FUSEE (FAST'23), one replica
    Fusee,
    /// Driver from the description of RACE hashing (ATC'21)
    Race,
    /// Race with the speculative lookup of SMART (ASPLOS'24)
    Smart,
    /// Driver from the description of SWARM-KV (SOSP'24), one replica; the chain that an UPDATE
    /// does not wait for counts as a round trip too
    Swarm,
    /// The redis-server as installed, over a Unix socket, nothing kept on disk
    Redis,
    /// The valkey-server as installed, over a Unix socket, nothing kept on disk
    Valkey,
    /// The memcached as installed, over a Unix socket
    Memcached,
}

impl StoreName {
    /// The name on the command line and in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Farside => "farside",
            Self::Fusee => "fusee",
            Self::Race => "race",
            Self::Smart => "smart",
            Self::Swarm => "swarm",
            Self::Redis => "redis",
            Self::Valkey => "valkey",
            Self::Memcached => "memcached",
        }
    }

    /// The description in results.
    pub fn description(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|value| Some(value.get_help()?.to_string())).unwrap_or_default()
    }

    /// The server program of a store that is not on a fabric.
    pub const fn program(self) -> Option<&'static str> {
        match self {
            Self::Redis => Some("redis-server"),
            Self::Valkey => Some("valkey-server"),
            Self::Memcached => Some("memcached"),
            _ => None,
        }
    }
}

impl Compare {
    /// The emulated network, if one was asked for.
    pub fn link(&self) -> Option<Link> {
        let usual = Link::default();
        let bytes_per_s = self.bandwidth.map_or(usual.bytes_per_s, |ByteSize(bytes)| bytes);
        self.network.as_ref().map(|_| Link { bytes_per_s, ..usual })
    }

    /// The description of that network in results.
    pub fn network_label(&self) -> Option<String> {
        let bandwidth = self.bandwidth.map(|bandwidth| format!(", {bandwidth} a second"));
        self.network.as_ref().map(|_| emulation::LABEL.to_owned() + &bandwidth.unwrap_or_default())
    }

    /// Checks what clap does not.
    pub fn check(&self) -> Result<()> {
        for (index, store) in self.stores.iter().enumerate() {
            if self.stores[..index].contains(store) {
                return Err(Error::Usage(format!("--stores has {} twice", store.name())));
            }
        }
        for (index, workload) in self.workloads.iter().enumerate() {
            if self.workloads[..index].contains(workload) {
                return Err(Error::Usage(format!("--workloads has {workload} twice")));
            }
        }
        Ok(())
    }
}

fn bandwidth(text: &str) -> std::result::Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error: ByteSizeError| error.to_string())?;
    if size.0 == 0 { Err("write a size above 0".to_owned()) } else { Ok(size) }
}

/// Parses the size of a cache in percent of its data.
fn cache_percent(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent),
        _ => Err("write percentages above 0 and up to 100".to_owned()),
    }
}
