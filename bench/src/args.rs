//! What can be written after `kv-bench`.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueHint};
use farside_common::config::{ClientConfig, ConfigError};
use farside_common::size::ByteSize;

use crate::compare::Compare;
use crate::distribution::Shape;
use crate::workload::Workload;
use crate::{Error, Result};

/// Measures Farside: YCSB through the client library, and the raw verbs below it.
#[derive(Debug, Parser)]
#[command(name = "kv-bench", version, about, max_term_width = 100)]
pub struct Args {
    /// What to measure.
    #[command(subcommand)]
    pub command: Command,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a standard workload of YCSB: load, warm up, measure
    Ycsb(Ycsb),
    /// Measure Farside beside what others published, in turns, on the same fabric
    Compare(Compare),
    /// Measure the raw READ, WRITE and compare-and-swap of a fabric, in blocks nobody uses
    Verbs(Verbs),
}

const RECORDS_MAX: u64 = 1 << 40;

/// `kv-bench ycsb`.
#[derive(Clone, Debug, clap::Args)]
pub struct Ycsb {
    /// a: half reads, half updates; b: 95 % reads, 5 % updates; c: reads; d: 95 % reads of the
    /// latest, 5 % inserts; f: half reads, half read-modify-writes
    #[arg(long, value_name = "a|b|c|d|f")]
    pub workload: Workload,
    /// How many records to load
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=RECORDS_MAX))]
    pub records: u64,
    /// The length of every value, in bytes
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub value_size: u32,
    /// How many threads, each with a session of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub threads: u32,
    /// How many operations each thread keeps in flight; 1 is one after another
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub depth: u16,
    /// How long to measure
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive_seconds)]
    pub seconds: f64,
    /// How long to run before that
    #[arg(long, value_name = "N", default_value = "2", value_parser = seconds)]
    pub warmup_seconds: f64,
    /// How long to measure the limit after that: the same operations of one thread on a map inside
    /// kv-bench. Over shm; 0 leaves it out
    #[arg(long, value_name = "N", default_value = "1", value_parser = seconds)]
    pub limit_seconds: f64,
    /// Which records are popular; latest for workload d, else zipfian
    #[arg(long, value_name = "zipfian|uniform|latest")]
    pub distribution: Option<Shape>,
    /// Which server.
    #[command(flatten)]
    pub target: Target,
    /// Memory for each session's location cache, as in 64MiB; 0B switches it off
    #[arg(long, value_name = "SIZE")]
    pub cache_bytes: Option<ByteSize>,
    /// Memory for the server started for the run, instead of what the records need
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["server", "config"])]
    pub memory: Option<ByteSize>,
    /// The same seed makes the same operations
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Write the result here as JSON; - writes it to stdout instead of the table
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
    /// Record every operation, those of loading too, as one JSON object a line here: for checkers
    /// of linearizability. Takes time and space, so what is measured meanwhile is slower
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub history: Option<PathBuf>,
}

impl Ycsb {
    /// The distribution asked for, or the workload's own.
    pub fn shape(&self) -> Shape {
        self.distribution.unwrap_or(self.workload.default_shape())
    }
}

/// `kv-bench verbs`.
#[derive(Clone, Debug, clap::Args)]
pub struct Verbs {
    /// Which server.
    #[command(flatten)]
    pub target: Target,
    /// How long to measure each verb
    #[arg(long, value_name = "N", default_value = "3", value_parser = positive_seconds)]
    pub seconds: f64,
    /// The length of a READ and a WRITE, a multiple of 8
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = verb_bytes)]
    pub bytes: u32,
    /// How many verbs to keep in flight, each a chain of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub depth: u16,
    /// How much memory the verbs spread over
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    pub span: ByteSize,
    /// Write the result here as JSON; - writes it to stdout instead of the table
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
}

/// The server of a run.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Target {
    /// A running server; without it kv-bench starts one for the run
    #[arg(long, value_name = "URI")]
    pub server: Option<String>,
    /// A client's config file, for `secret`, `server` and `[rdma]`; with --server alone the files
    /// that kv-cli takes
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
}

impl Target {
    /// How to connect to the server that is asked for; without a server if the run needs one of
    /// its own. Only what leads to the server comes from the file: what is measured does not
    /// depend on it, but for how `[rdma]` waits.
    ///
    /// # Errors
    /// [`Error::Usage`] with what is wrong in the file.
    pub fn config(&self) -> Result<ClientConfig> {
        if self.server.is_none() && self.config.is_none() {
            return Ok(ClientConfig::default());
        }
        let usage = |error: ConfigError| Error::Usage(error.to_string());
        let file = match ClientConfig::file(self.config.as_deref()) {
            Some(path) => ClientConfig::load(&path).map_err(usage)?,
            None => ClientConfig::default(),
        };
        let Some(server) = self.server.clone().or(file.server) else {
            let advice = "the config file names no server: write `server`, or give --server";
            return Err(Error::Usage(advice.to_owned()));
        };
        let ClientConfig { secret, connect_timeout_ms, rdma, .. } = file;
        let server = Some(server);
        Ok(ClientConfig { server, secret, connect_timeout_ms, rdma, ..Default::default() })
    }
}

/// A day.
const SECONDS_MAX: f64 = 86_400.0;

pub(crate) fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=SECONDS_MAX).contains(&seconds) => Ok(seconds),
        _ => Err(format!("write a number of seconds from 0 to {SECONDS_MAX}")),
    }
}

pub(crate) fn positive_seconds(text: &str) -> std::result::Result<f64, String> {
    match seconds(text)? {
        0.0 => Err("write a number of seconds above 0".to_owned()),
        seconds => Ok(seconds),
    }
}

/// The longest READ or WRITE, in bytes.
const VERB_BYTES_MAX: u32 = 1 << 20;

fn verb_bytes(text: &str) -> std::result::Result<u32, String> {
    match text.parse::<u32>() {
        Ok(bytes) if (8..=VERB_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(8) => Ok(bytes),
        _ => Err(format!("write a multiple of 8 from 8 to {VERB_BYTES_MAX}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> std::result::Result<Args, String> {
        let words = std::iter::once("kv-bench").chain(line.split_whitespace());
        Args::try_parse_from(words).map_err(|error| error.to_string())
    }

    #[test]
    fn the_documented_command_lines_parse() {
        let line = "ycsb --workload c --records 1000000 --value-size 64 --threads 2 --depth 16 \
                    --seconds 0.5 --distribution uniform --json - --server shm:///tmp/kv.sock \
                    --cache-bytes 1GiB --warmup-seconds 0 --seed 9";
        let Command::Ycsb(ycsb) = parse(line).unwrap().command else { panic!("ycsb") };
        assert_eq!((ycsb.threads, ycsb.depth, ycsb.shape()), (2, 16, Shape::Uniform));
        let Command::Ycsb(ycsb) = parse("ycsb --workload d").unwrap().command else {
            panic!("ycsb")
        };
        assert_eq!(ycsb.shape(), Shape::Latest);
        assert!(parse("verbs --seconds 1 --bytes 64 --depth 8 --json x").is_ok());
    }

    #[test]
    fn mistakes_are_named() {
        for (line, expected) in [
            ("ycsb", "--workload"),
            ("ycsb --workload e", "range scans"),
            ("ycsb --workload x", "a, b, c, d and f"),
            ("ycsb --workload a --threads 0", "1..="),
            ("ycsb --workload a --depth 0", "1..=1024"),
            ("ycsb --workload a --depth 1025", "1..=1024"),
            ("ycsb --workload a --records 0", "1..="),
            ("ycsb --workload a --seconds 0", "above 0"),
            ("ycsb --workload a --seconds x", "number of seconds"),
            ("ycsb --workload a --distribution zipf", "zipfian"),
            ("ycsb --workload a --cache-bytes 5", "1GiB"),
            ("verbs --bytes 12", "multiple of 8"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
