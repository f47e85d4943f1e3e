//! The command line of `kv-bench`, and of `kv-bench ycsb`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueHint};
use farside_config::size::{ByteSize, ByteSizeError};
use farside_config::{ClientConfig, ConfigError};
use farside_layout::VALUE_BYTES_LIMIT;

use crate::Error;
use crate::arrivals::Arrivals;
use crate::distribution::{HOT_OPERATIONS, HOT_SET, Shape, Skew, THETA};
use crate::emulation::{Emulation, Rates};
use crate::properties::{Properties, Property};
use crate::publish::Output;
use crate::records::ValueSize;
use crate::workload::{Mix, Workload};

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
    ) -> Result<Self, clap::Error> {
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
    pub fn config(&self) -> crate::Result<ClientConfig> {
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
const SECONDS_MAX: u64 = 86_400;

/// Parses a number of seconds.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=SECONDS_MAX as f64).contains(&seconds) => Ok(seconds),
        _ => Err(format!("write a number of seconds from 0 to {SECONDS_MAX}")),
    }
}

/// Parses a number of seconds above 0.
pub fn positive_seconds(text: &str) -> Result<f64, String> {
    match seconds(text)? {
        0.0 => Err("write a number of seconds above 0".to_owned()),
        seconds => Ok(seconds),
    }
}

/// The longest READ or WRITE, in bytes.
const VERB_BYTES_MAX: u32 = 1 << 20;

/// The lengths of `--values` without a list.
const VALUES_DEFAULT: &str = "4KiB,64KiB,1MiB,4MiB,64MiB,256MiB";

fn value_bytes(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error: ByteSizeError| error.to_string())?;
    match size.0 {
        8..=VALUE_BYTES_LIMIT => Ok(size),
        _ => Err(format!("write lengths from 8B to {}", ByteSize(VALUE_BYTES_LIMIT))),
    }
}

fn verb_bytes(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(bytes) if (8..=VERB_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(8) => Ok(bytes),
        _ => Err(format!("write a multiple of 8 from 8 to {VERB_BYTES_MAX}")),
    }
}

/// Limit on the number of records, and on the number of operations, of a run.
const COUNT_MAX: u64 = 1 << 40;
/// Limit on the rate of an emulated device: a chain a nanosecond.
const CHAINS_PER_S_MAX: u64 = 1_000_000_000;
/// How long a run measures if neither a time nor a count is given, in seconds.
const SECONDS_DEFAULT: f64 = 10.0;

/// `kv-bench ycsb`.
#[derive(Clone, Debug, clap::Args)]
pub struct Ycsb {
    /// a: half reads, half updates; b: 95 % reads, 5 % updates; c: reads; d: 95 % reads of the
    /// latest, 5 % inserts; f: half reads, half read-modify-writes. With -P or -p it replaces their
    /// proportions and request distribution
    #[arg(long, value_name = "a|b|c|d|f")]
    #[arg(required_unless_present_any = ["property_files", "properties"])]
    pub workload: Option<Workload>,
    /// A property file of upstream YCSB, like its workloads/workloada; may be repeated. Flags win
    /// over files, later files over earlier ones. Properties in no file have upstream's defaults
    #[arg(short = 'P', value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub property_files: Vec<PathBuf>,
    /// A single property, which wins over the files; may be repeated
    #[arg(short = 'p', value_name = "NAME=VALUE")]
    pub properties: Vec<Property>,
    /// How many records to load
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=COUNT_MAX))]
    pub records: u64,
    /// The length of the values, in bytes: 64, uniform:16-1024, or the published fits facebook
    /// (memcached's ETC pool, SIGMETRICS 2012) and zippydb (FAST 2020). A record keeps its length
    #[arg(long, value_name = "N|NAME", default_value = "64")]
    pub value_size: ValueSize,
    /// How many threads, each with a session of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub threads: u32,
    /// How many clients, each with a connection, a location cache and --threads threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    pub clients: u32,
    /// How many operations each thread keeps in flight; with 1, one after another
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub depth: u16,
    /// Start so many operations a second, by all threads together, whether or not the store keeps
    /// up. Latency then counts from when an operation was due. Without it a thread starts the next
    /// operation when one has ended
    #[arg(long, value_name = "N", value_parser = rate)]
    pub target_rate: Option<f64>,
    /// When the operations of --target-rate are due: at fixed or at exponential intervals
    #[arg(long, value_name = "KIND", default_value = "fixed")]
    pub arrivals: Arrivals,
    /// How many operations to measure, by all threads together. With --seconds the run ends at
    /// whichever comes first
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=COUNT_MAX))]
    pub operations: Option<u64>,
    /// How long to measure, in seconds; 10 unless there are --operations
    #[arg(long, value_name = "N", value_parser = positive_seconds)]
    pub seconds: Option<f64>,
    /// How long to warm up before measuring, in seconds
    #[arg(long, value_name = "N", default_value = "2", value_parser = seconds)]
    pub warmup_seconds: f64,
    /// How long to measure the raw verbs of the fabric after the run, in seconds, in up to 64 MiB
    /// of free blocks; 0 skips them
    #[arg(long, value_name = "N", default_value = "1", value_parser = seconds)]
    pub limit_seconds: f64,
    /// The popularity of records. Default: latest for workload d, else zipfian. Upstream's zipfian,
    /// also in its property files, is scrambled-zipfian here
    #[arg(long, value_name = "NAME")]
    pub distribution: Option<Shape>,
    /// How skewed zipfian, scrambled-zipfian and latest are
    #[arg(long, value_name = "X", default_value_t = THETA, value_parser = theta)]
    pub theta: f64,
    /// The share of the records that is hot, for hotspot
    #[arg(long, value_name = "X", default_value_t = HOT_SET, value_parser = share)]
    pub hot_set: f64,
    /// The share of the operations that goes to hot records, for hotspot
    #[arg(long, value_name = "X", default_value_t = HOT_OPERATIONS, value_parser = share)]
    pub hot_operations: f64,
    /// The server.
    #[command(flatten)]
    pub target: ServerArgs,
    /// Memory for each client's location cache, as in 64MiB; 0B switches it off
    #[arg(long, value_name = "SIZE")]
    pub cache_bytes: Option<ByteSize>,
    /// Start so many servers: a cluster with as many shards. Without it kv-bench starts one server
    /// without a cluster
    #[arg(long, value_name = "N", conflicts_with_all = ["server", "config"])]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    pub servers: Option<u16>,
    /// Emulate a network in which the device of each server executes at most so many chains a
    /// second, one after another. The load and half of the warm-up are not slowed down
    #[arg(long, value_name = "N", requires = "servers")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=CHAINS_PER_S_MAX))]
    pub emulate_rate: Option<u64>,
    /// The bandwidth of each server in the emulated network, in bytes a second, as in 24MiB;
    /// default 100 Gb/s
    #[arg(long, value_name = "SIZE", requires = "emulate_rate", value_parser = bandwidth)]
    pub emulate_bandwidth: Option<ByteSize>,
    /// Memory of the server that kv-bench starts, or of all --servers together. Default: enough for
    /// the records and for the inserts of the run
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["server", "config"])]
    pub memory: Option<ByteSize>,
    /// The same seed makes the same operations
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// The files for the result.
    #[command(flatten)]
    pub output: Output,
    /// Write every operation to this file, also those of the load, as one JSON object a line: for
    /// checkers of linearizability. This slows the run down
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub history: Option<PathBuf>,
    /// Switch the metrics of the clients on, and write those of the first client to this file at
    /// the end, for Prometheus; - writes them to stdout
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub client_metrics: Option<PathBuf>,
    /// The operations, from the workload or from properties.
    #[arg(skip = Mix::NOTHING)]
    pub mix: Mix,
    /// The names of properties that kv-bench does not know.
    #[arg(skip)]
    pub ignored: Vec<String>,
}

impl Ycsb {
    /// The distribution asked for, or the workload's own.
    pub fn shape(&self) -> Shape {
        let own = self.workload.map_or(Shape::Uniform, Workload::default_shape);
        self.distribution.unwrap_or(own)
    }

    /// The skew of the distribution.
    pub fn skew(&self) -> Skew {
        let Self { theta, hot_set, hot_operations, .. } = *self;
        Skew { theta, hot_set, hot_operations }
    }

    /// The number of threads of all clients together.
    pub fn all_threads(&self) -> u32 {
        self.threads * self.clients
    }

    /// The emulated devices, if they were asked for.
    pub fn emulation(&self) -> Option<Emulation> {
        let usual = Rates::of_chains(self.emulate_rate?);
        let bytes_per_s = self.emulate_bandwidth.map_or(usual.bytes_per_s, |ByteSize(it)| it);
        let in_flight_max = u64::from(self.all_threads()) * u64::from(self.depth);
        Some(Emulation { rates: Rates { bytes_per_s, ..usual }, in_flight_max })
    }

    /// The letter of the standard workload, or `custom`.
    pub fn workload_name(&self) -> String {
        let workload = self.workload.or_else(|| self.mix.standard());
        workload.map_or_else(|| "custom".to_owned(), |workload| workload.to_string())
    }

    /// Takes from the properties what no flag sets. `given` returns whether the flag of this name
    /// was given.
    fn complete(&mut self, given: impl Fn(&str) -> bool) -> Result<(), String> {
        if self.property_files.is_empty() && self.properties.is_empty() {
            self.mix = self.workload.map_or(Mix::NOTHING, Workload::mix);
        } else {
            let properties = Properties::read(&self.property_files, &self.properties)?;
            self.take(&properties, &given)?;
            self.ignored = properties.unknown();
        }
        if self.seconds.is_none() && self.operations.is_none() {
            self.seconds = Some(SECONDS_DEFAULT);
        }
        if given("arrivals") && self.target_rate.is_none() {
            return Err("--arrivals is for a --target-rate".to_owned());
        }
        let is_zipfian = self.shape().is_zipfian();
        let is_hotspot = self.shape() == Shape::Hotspot;
        for (id, flag, is_used, distributions) in [
            ("theta", "--theta", is_zipfian, "zipfian, scrambled-zipfian or latest"),
            ("hot_set", "--hot-set", is_hotspot, "hotspot"),
            ("hot_operations", "--hot-operations", is_hotspot, "hotspot"),
        ] {
            if given(id) && !is_used {
                let shape = self.shape().name();
                return Err(format!(
                    "{flag} is for {distributions}, and the distribution is {shape}"
                ));
            }
        }
        Ok(())
    }

    fn take(
        &mut self,
        properties: &Properties,
        given: &impl Fn(&str) -> bool,
    ) -> Result<(), String> {
        match self.workload {
            Some(workload) => self.mix = workload.mix(),
            None => {
                self.mix = properties.mix()?;
                self.distribution = self.distribution.or(Some(properties.shape()?));
            }
        }
        let records = properties.number("recordcount", 1..=COUNT_MAX)?;
        let threads = properties.number("threadcount", 1..=1000)?;
        let threads = threads.map(|threads| threads as u32);
        replace(&mut self.records, !given("records"), records);
        replace(&mut self.threads, !given("threads"), threads);
        let hot_set = properties.share("hotspotdatafraction")?;
        let hot_operations = properties.share("hotspotopnfraction")?;
        replace(&mut self.hot_set, !given("hot_set"), hot_set);
        replace(&mut self.hot_operations, !given("hot_operations"), hot_operations);
        let target = properties.number("target", 0..=RATE_MAX)?.filter(|target| *target > 0);
        let target = target.map(|target| Some(target as f64));
        replace(&mut self.target_rate, !given("target_rate"), target);
        if !given("value_size") {
            self.value_size = properties.value_size()?;
        }
        // A length of the run on the command line replaces both properties.
        if !given("operations") && !given("seconds") {
            // In both, upstream's 0 means no limit.
            let positive = |number: &u64| *number > 0;
            let operations = properties.number("operationcount", 0..=COUNT_MAX)?;
            let seconds = properties.number("maxexecutiontime", 0..=SECONDS_MAX)?;
            self.operations = operations.filter(positive);
            self.seconds = seconds.filter(positive).map(|seconds| seconds as f64);
        }
        properties.check()
    }
}

/// Replaces the value by the property if there is one and `may_replace`.
fn replace<T>(value: &mut T, may_replace: bool, property: Option<T>) {
    if let (true, Some(property)) = (may_replace, property) {
        *value = property;
    }
}

/// Limit on the target rate: one operation a nanosecond.
const RATE_MAX: u64 = 1_000_000_000;

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| *rate > 0.0 && *rate <= RATE_MAX as f64);
    rate.ok_or_else(|| format!("write a number of operations a second, up to {RATE_MAX}"))
}

fn bandwidth(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error: ByteSizeError| error.to_string())?;
    if size.0 == 0 { Err("write a size above 0".to_owned()) } else { Ok(size) }
}

fn theta(text: &str) -> Result<f64, String> {
    let is_possible = |theta: &f64| *theta > 0.0 && *theta < 1.0;
    let theta = text.parse().ok().filter(is_possible);
    theta.ok_or_else(|| "write a number between 0 and 1".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "write a number from 0 to 1".to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use super::*;
    use crate::distribution::Shape;
    use crate::workload::Kind;

    fn parse(line: &str) -> Result<Args, String> {
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

    /// Upstream's workloada to workloadf, without their comments.
    const UPSTREAM: [(&str, &str); 6] = [
        ("a", "readproportion=0.5\nupdateproportion=0.5\nscanproportion=0\ninsertproportion=0\n"),
        ("b", "readproportion=0.95\nupdateproportion=0.05\nscanproportion=0\ninsertproportion=0\n"),
        ("c", "readproportion=1\nupdateproportion=0\nscanproportion=0\ninsertproportion=0\n"),
        ("d", "readproportion=0.95\nupdateproportion=0\nscanproportion=0\ninsertproportion=0.05\n"),
        (
            "e",
            "readproportion=0\nupdateproportion=0\nscanproportion=0.95\ninsertproportion=0.05\n\
             maxscanlength=100\nscanlengthdistribution=uniform\n",
        ),
        (
            "f",
            "readproportion=0.5\nupdateproportion=0\nscanproportion=0\ninsertproportion=0\n\
             readmodifywriteproportion=0.5\n",
        ),
    ];
    const HEAD: &str = "recordcount=1000\noperationcount=1000\n\
                        workload=site.ycsb.workloads.CoreWorkload\n\nreadallfields=true\n\n";

    fn write(folder: &Path) {
        for (name, lines) in UPSTREAM {
            let shape = if name == "d" { "latest" } else { "zipfian" };
            let text = format!("{HEAD}{lines}\nrequestdistribution={shape}\n\n");
            std::fs::write(folder.join(format!("workload{name}")), text).unwrap();
        }
    }

    #[test]
    fn upstreams_property_files_make_the_standard_workloads() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path());
        let path = |name: &str| folder.path().join(name).display().to_string();
        for workload in Workload::ALL {
            let run = ycsb(&format!("ycsb -P {}", path(&format!("workload{workload}"))));
            assert_eq!(run.workload_name(), workload.to_string());
            let shape = match workload.default_shape() {
                Shape::Zipfian => Shape::ScrambledZipfian,
                shape => shape,
            };
            assert_eq!((run.mix, run.shape()), (workload.mix(), shape));
            assert_eq!((run.records, run.operations, run.seconds), (1000, Some(1000), None));
            assert_eq!((run.value_size, run.ignored), (ValueSize::Constant(1000), vec![]));
        }
        let words = ["kv-bench", "ycsb", "-P", &path("workloade")];
        let error = super::Args::read(words).unwrap_err().to_string();
        assert!(error.contains("scanproportion=0.95") && error.contains("range scans"), "{error}");
    }

    #[test]
    fn flags_win_over_properties_and_properties_over_files() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path());
        let a = format!("ycsb -P {}", folder.path().join("workloada").display());
        let run = ycsb(&format!("{a} -p recordcount=7 -p fieldcount=1 -p redis.host=here"));
        assert_eq!((run.records, run.value_size), (7, ValueSize::Constant(100)));
        assert_eq!(run.ignored, ["redis.host"]);
        let run = ycsb(&format!("{a} --records 9 -p recordcount=7 --value-size 64 --seconds 3"));
        assert_eq!((run.records, run.value_size), (9, ValueSize::Constant(64)));
        assert_eq!((run.operations, run.seconds), (None, Some(3.0)));
        let run = ycsb(&format!("{a} --workload d -p operationcount=0"));
        assert_eq!((run.mix, run.shape()), (Workload::D.mix(), Shape::Latest));
        assert_eq!((run.operations, run.seconds), (None, Some(10.0)));
        let line = "-p requestdistribution=hotspot -p hotspotdatafraction=0.1 -p threadcount=4";
        let run = ycsb(&format!("{a} {line} -p hotspotopnfraction=0.7 --hot-set 0.3"));
        assert_eq!((run.shape(), run.hot_set, run.hot_operations), (Shape::Hotspot, 0.3, 0.7));
        assert_eq!((run.threads, run.target_rate), (4, None));
        let run = ycsb(&format!("{a} -p target=500"));
        assert_eq!((run.target_rate, run.arrivals), (Some(500.0), Arrivals::Fixed));
        assert_eq!(ycsb(&format!("{a} -p target=5 --target-rate 0.5")).target_rate, Some(0.5));
        let run = ycsb("ycsb -p fieldlengthdistribution=constant -p readproportion=0.2");
        assert_eq!((run.value_size, run.shape()), (ValueSize::Constant(1000), Shape::Uniform));
        // Reads are 0.2, and updates have upstream's default of 0.05.
        assert!((run.mix.share(Kind::Get) - 0.8).abs() < 1e-12);
        assert_eq!(run.workload_name(), "custom");
    }
}
