//! The command line of `kv-bench`.

mod ycsb;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueHint};
use farside_config::size::{ByteSize, ByteSizeError};
use farside_config::{ClientConfig, ConfigError};
use farside_layout::VALUE_BYTES_LIMIT;

use crate::{Error, Result};

pub use ycsb::Ycsb;

/// The text at the end of `--help`.
pub const EXIT_CODES: &str = "\
Exit codes, those of kv-cli:
  0  success
  2  the command line or the config file is wrong
  3  no server: none answers, its connection broke, or it refuses the connection
  4  damage: the region has impossible content
  5  any other failure
  130  SIGINT, SIGQUIT, SIGTERM or SIGHUP ended the run";

/// Measures Farside: YCSB through the client library, and the raw verbs below it.
#[derive(Debug, Parser)]
#[command(name = "kv-bench", version, about, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Args {
    /// What to measure.
    #[command(subcommand)]
    pub command: Command,
}

impl Args {
    /// Parses the command line, and completes it from the property files that it names.
    ///
    /// # Errors
    /// A mistake in either, as an error of clap; also `--help` and `--version`.
    pub fn read(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> std::result::Result<Self, clap::Error> {
        let matches = Self::command().try_get_matches_from(words)?;
        let mut args = Self::from_arg_matches(&matches)?;
        if let (Command::Ycsb(ycsb), Some((_, matches))) = (&mut args.command, matches.subcommand())
        {
            let given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
            let mistake = |error| Self::command().error(ErrorKind::ValueValidation, error);
            ycsb.complete(given).map_err(mistake)?;
        }
        Ok(args)
    }
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a standard workload of YCSB: load, warm up, measure
    Ycsb(Box<Ycsb>),
    /// Measure the raw READ, WRITE and compare-and-swap of a fabric, in free blocks
    Verbs(Verbs),
    /// Make an HTML page with charts from the results of runs
    Report(Report),
}

/// `kv-bench verbs`.
#[derive(Clone, Debug, clap::Args)]
pub struct Verbs {
    /// The server.
    #[command(flatten)]
    pub target: ServerArgs,
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
    /// How much memory the verbs access
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    pub span: ByteSize,
    /// Measure GETs and PUTs of values of these lengths, up to 256MiB, beside READs and WRITEs of
    /// the same bytes, one operation after the other. Those of a value with extents are as many as
    /// it has extents. Over TCP on one host also beside plain sockets
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', num_args = 0..=1)]
    #[arg(value_parser = value_bytes, default_missing_value = VALUES_DEFAULT)]
    #[arg(conflicts_with_all = ["bytes", "depth"])]
    pub values: Option<Vec<ByteSize>>,
    /// Write the result to this file as JSON, which `kv-bench report` reads unless it is of
    /// --values; - writes it to stdout instead of the table
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
}

/// `kv-bench report`.
#[derive(Clone, Debug, clap::Args)]
pub struct Report {
    /// Result files of `ycsb --json` and `verbs --json`, and folders of such files
    #[arg(required = true, value_name = "RESULTS", value_hint = ValueHint::AnyPath)]
    pub results: Vec<PathBuf>,
    /// The file to write the page to
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    #[arg(value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
}

/// The server of a run.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServerArgs {
    /// A running server. Without it kv-bench starts one for the run
    #[arg(long, value_name = "URI")]
    pub server: Option<String>,
    /// A client's config file, for `secret`, `server`, `[rdma]` and `[tls]`. With only --server,
    /// the files that kv-cli reads
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
}

impl ServerArgs {
    /// Returns how to connect to the server that was asked for. Names no server if the run needs
    /// one of its own. Only the connection's settings come from the file. So the file does not
    /// change the results, except by how `[rdma]` waits.
    pub fn config(&self) -> Result<ClientConfig> {
        if self.server.is_none() && self.config.is_none() {
            return Ok(ClientConfig::default());
        }
        let usage = |error: ConfigError| Error::Usage(error.to_string());
        let file = match ClientConfig::file(self.config.as_deref()) {
            Some(path) => ClientConfig::load(&path).map_err(usage)?,
            None => ClientConfig::default(),
        };
        let server = self.server.clone().or(file.server);
        if server.is_none() {
            let advice = "the config file names no server: write `server`, or give --server";
            return Err(Error::Usage(advice.to_owned()));
        }
        let ClientConfig { secret, connect_timeout_ms, rdma, tls, .. } = file;
        Ok(ClientConfig { server, secret, connect_timeout_ms, rdma, tls, ..Default::default() })
    }
}

/// Limit on a number of seconds: a day.
const SECONDS_MAX: f64 = 86_400.0;

/// Parses a number of seconds.
pub fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=SECONDS_MAX).contains(&seconds) => Ok(seconds),
        _ => Err(format!("write a number of seconds from 0 to {SECONDS_MAX}")),
    }
}

/// Parses a number of seconds above 0.
pub fn positive_seconds(text: &str) -> std::result::Result<f64, String> {
    match seconds(text)? {
        0.0 => Err("write a number of seconds above 0".to_owned()),
        seconds => Ok(seconds),
    }
}

/// The longest READ or WRITE, in bytes.
const VERB_BYTES_MAX: u32 = 1 << 20;

/// The lengths of `--values` without a list.
const VALUES_DEFAULT: &str = "4KiB,64KiB,1MiB,4MiB,64MiB,256MiB";

fn value_bytes(text: &str) -> std::result::Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error: ByteSizeError| error.to_string())?;
    match size.0 {
        8..=VALUE_BYTES_LIMIT => Ok(size),
        _ => Err(format!("write lengths from 8B to {}", ByteSize(VALUE_BYTES_LIMIT))),
    }
}

fn verb_bytes(text: &str) -> std::result::Result<u32, String> {
    match text.parse::<u32>() {
        Ok(bytes) if (8..=VERB_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(8) => Ok(bytes),
        _ => Err(format!("write a multiple of 8 from 8 to {VERB_BYTES_MAX}")),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::distribution::Shape;

    fn parse(line: &str) -> std::result::Result<Args, String> {
        let words = std::iter::once("kv-bench").chain(line.split_whitespace());
        Args::read(words).map_err(|error| error.to_string())
    }

    /// Parses the command line `kv-bench LINE`.
    pub(crate) fn ycsb(line: &str) -> Ycsb {
        match parse(line).map(|args| args.command) {
            Ok(Command::Ycsb(ycsb)) => *ycsb,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn the_documented_command_lines_parse() {
        let line = "ycsb --workload c --records 1000000 --value-size 64 --threads 2 --depth 16 \
                    --seconds 0.5 --distribution uniform --json - --server shm:///tmp/kv.sock \
                    --cache-bytes 1GiB --warmup-seconds 0 --seed 9";
        let ycsb = ycsb(line);
        assert_eq!((ycsb.threads, ycsb.depth, ycsb.shape()), (2, 16, Shape::Uniform));
        assert!(parse("verbs --seconds 1 --bytes 64 --depth 8 --json x").is_ok());
        for (line, sizes) in [("verbs --values", 6), ("verbs --seconds 1 --values 4KiB,256MiB", 2)]
        {
            let Ok(Command::Verbs(verbs)) = parse(line).map(|args| args.command) else {
                panic!("{line}")
            };
            assert_eq!(verbs.values.map(|values| values.len()), Some(sizes), "{line}");
        }
    }

    #[test]
    fn the_error_names_the_mistake() {
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
            ("ycsb --workload a --seconds 0 --operations 5", "above 0"),
            ("ycsb --workload a --operations 0", "1..="),
            ("ycsb --workload a --distribution zipf", "zipfian"),
            ("ycsb --workload a --theta 1", "between 0 and 1"),
            ("ycsb --workload a --distribution uniform --theta 0.5", "--theta is for"),
            ("ycsb --workload a --hot-set 0.5", "--hot-set is for"),
            ("ycsb --workload a --distribution hotspot --hot-set 2", "from 0 to 1"),
            ("ycsb --workload a --value-size 1KiB", "facebook"),
            ("ycsb --workload a --target-rate 0", "operations a second"),
            ("ycsb --workload a --arrivals poisson", "--target-rate"),
            ("ycsb --workload a --target-rate 5 --arrivals random", "fixed, poisson"),
            ("ycsb --workload a -P /nowhere/workloada", "/nowhere/workloada: No such file"),
            ("ycsb -p readproportion", "name=value"),
            ("ycsb --workload a --cache-bytes 5", "1GiB"),
            ("ycsb --workload a --servers 0", "1..=64"),
            ("ycsb --workload a --servers 2 --server shm:///x", "cannot be used with"),
            ("ycsb --workload a --emulate-rate 5", "--servers"),
            ("ycsb --workload a --servers 2 --emulate-bandwidth 1KiB", "--emulate-rate"),
            ("ycsb --workload a --servers 2 --emulate-rate 0", "1..="),
            ("verbs --bytes 12", "multiple of 8"),
            ("verbs --values --depth 4", "cannot be used with"),
            ("verbs --values 1MiB,257MiB", "from 8B to 256MiB"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
