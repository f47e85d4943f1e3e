//! The command line of `kv-bench ycsb`.

use std::path::PathBuf;

use clap::ValueHint;
use farside_config::size::{ByteSize, ByteSizeError};

use super::{ServerArgs, positive_seconds, seconds};
use crate::arrivals::Arrivals;
use crate::distribution::{HOT_OPERATIONS, HOT_SET, Shape, Skew};
use crate::emulation::{Emulation, Rates};
use crate::properties::{Properties, Property};
use crate::publish::Output;
use crate::value_size::ValueSize;
use crate::workload::{Mix, Workload};
use crate::zipfian::THETA;

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
    pub(super) fn complete(&mut self, given: impl Fn(&str) -> bool) -> Result<(), String> {
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

/// Limit on the length of a run: a day.
const SECONDS_MAX: u64 = 86_400;
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
mod tests {
    use std::path::Path;

    use super::super::tests::ycsb;
    use super::*;
    use crate::workload::Kind;

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
        let error = super::super::Args::read(words).unwrap_err().to_string();
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
