//! The `kv-server` command.
#![deny(unsafe_code)]

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser};
use farside_config::command_line::{one_line, usage_line};
use farside_config::generate::generate;
use farside_config::size::ByteSize;
use farside_config::{LogFormat, MetricsAddress, ServerConfig, check_private, logging, signals};
use farside_control::address::{Address, OWN_NAME_TIMEOUT};
use farside_fabric::memory::HugePages;
use farside_server::Server;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// Serves memory to Farside's clients until SIGTERM, SIGINT or SIGHUP. With TLS, SIGHUP makes it
/// read its certificate, key and CA again instead.
///
/// Flags override the config file. Secrets can only be set in the file.
#[derive(Parser)]
#[command(name = "kv-server", version)]
struct Flags {
    /// The config file; config/server.toml documents every key
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Refuse a config file with secrets that other users can read, instead of a warning
    #[arg(long)]
    strict_config: bool,
    /// Check the config file, the other flags and the files of TLS, and exit
    #[arg(long)]
    check_config: bool,
    /// Where clients connect, such as shm:///run/farside/kv.sock; can be given several times
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    listen: Vec<Address>,
    /// Size of the region, such as 1GiB
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// A file on tmpfs or hugetlbfs that holds the region and survives the server
    #[arg(long, value_name = "FILE")]
    region_file: Option<PathBuf>,
    /// A snapshot to fill a new region with; the region file must not exist yet
    #[arg(long, value_name = "FILE")]
    restore: Option<PathBuf>,
    /// Use the region as a cache: when it is full, remove keys neither written nor read for long
    #[arg(long)]
    evict: bool,
    /// Huge pages: auto (from the pool, otherwise made by the kernel), never or require
    #[arg(long, value_name = "CHOICE")]
    huge_pages: Option<HugePages>,
    /// How long an unlinked block of a new region is not reused, in milliseconds
    #[arg(long, value_name = "MS")]
    grace_ms: Option<u32>,
    /// Initial size of a new region's index, such as 64MiB
    #[arg(long, value_name = "SIZE")]
    index: Option<ByteSize>,
    /// The longest key of a new region, in bytes; with --restore the default is the snapshot's
    #[arg(long, value_name = "BYTES")]
    key_bytes_max: Option<u32>,
    /// The longest value of a new region, in bytes; with --restore the default is the snapshot's
    #[arg(long, value_name = "BYTES")]
    value_bytes_max: Option<u32>,
    /// The cluster that the server is a part of: the URI of its records
    #[arg(long, value_name = "URI")]
    cluster: Option<String>,
    /// What fails together with this server, such as its rack; for the operator of a cluster
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// Where to serve metrics for Prometheus over HTTP, such as 127.0.0.1:9400
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<MetricsAddress>,
    /// Format of log lines: human or json
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

/// The exit code for an invalid command line, the same as that of Farside's other commands.
const USAGE_ERROR: u8 = 2;

fn main() -> ExitCode {
    if let Some(code) = generate(Flags::command) {
        return code;
    }
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        Err(error) if error.use_stderr() => {
            report(&usage_line("kv-server", &error.to_string()));
            return ExitCode::from(USAGE_ERROR);
        }
        // --help or --version: prints and exits.
        Err(error) => error.exit(),
    };
    match run(flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&one_line(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(flags: Flags) -> Result<()> {
    raise_descriptor_limit();
    let (file, is_strict) = (flags.config.clone(), flags.strict_config);
    let only_checks = flags.check_config;
    let config = configure(flags)?;
    let _log = logging::start(config.log_format, config.log_level).context("cannot log")?;
    let has_secret = config.secret.is_some() || config.cluster_store.password.is_some();
    if let Some(file) = file.filter(|_| has_secret)
        && let Err(exposed) = check_private(&file)
    {
        if is_strict {
            return Err(exposed.into());
        }
        tracing::warn!("FS-001 {exposed}");
    }
    if only_checks {
        return Ok(Server::check(&config)?);
    }
    // Before the start, which may take minutes: a signal during a restore ends it cleanly.
    let (stop, mut signals) =
        register_signals(config.tls.is_used()).context("cannot wait for signals")?;
    let server = Server::start_unless(&config, &stop)?;
    warn_of_openness(&config);
    let (stopper, tls) = (server.stopper(), server.tls_reloader());
    std::thread::spawn(move || {
        for signal in signals.forever() {
            let Some(tls) = tls.as_ref().filter(|_| signal == SIGHUP) else { break };
            match tls.reload() {
                Ok(()) => tracing::info!("FS-005 read the files of TLS again"),
                Err(error) => {
                    tracing::error!("FS-006 {error}; the former certificate stays in use")
                }
            }
        }
        // Without systemd this does nothing, and so does the call below.
        let _ = sd_notify::notify(&[NotifyState::Stopping]);
        stopper.stop();
    });
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    Ok(server.wait()?)
}

/// Warns of addresses at which other hosts may connect as writers, because no secret and no
/// certificate is asked for.
fn warn_of_openness(config: &ServerConfig) {
    if config.secret.is_some() {
        return;
    }
    for address in &config.listen {
        let has_certificates = address.is_tcp() && config.tls.ca.is_some();
        // A name without an address is refused later.
        let found = address.resolve(OWN_NAME_TIMEOUT).unwrap_or_default();
        if !has_certificates && found.iter().any(|found| !found.ip().is_loopback()) {
            tracing::warn!(
                "FS-018 every host that reaches {address} can read and change all keys: the config \
                 has no `secret`"
            );
        }
    }
}

/// Lets the server have as many descriptors as the system allows. Often it allows 1024 of them at
/// first. Each client takes one, and over TCP and RDMA each session takes another.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If this fails, the server runs out of descriptors sooner, and says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Registers the signals that stop the server. Returns a flag that they set, which stops a start,
/// and an iterator over them, which stops a running server. With TLS the iterator has SIGHUP too.
fn register_signals(uses_tls: bool) -> io::Result<(Arc<AtomicBool>, Signals)> {
    // If file sizes are limited (ulimit -f), a larger region is then an error. Without this SIGXFSZ
    // would kill the process without a message.
    flag::register(SIGXFSZ, Arc::default())?;
    signals::explain_bus_errors("kv-server")?;
    let mut wanted = signals::ending();
    if uses_tls {
        wanted.retain(|signal| *signal != SIGHUP);
    }
    let stop = Arc::default();
    for signal in &wanted {
        flag::register(*signal, Arc::clone(&stop))?;
    }
    if uses_tls {
        wanted.push(SIGHUP);
    }
    Ok((stop, Signals::new(wanted)?))
}

fn configure(flags: Flags) -> Result<ServerConfig> {
    let mut config = match &flags.config {
        Some(path) => ServerConfig::load(path)?,
        None => ServerConfig::default(),
    };
    if !flags.listen.is_empty() {
        config.listen = flags.listen;
    }
    config.memory = flags.memory.or(config.memory);
    config.region_file = flags.region_file.or(config.region_file);
    config.evict |= flags.evict;
    config.restore = flags.restore.or(config.restore);
    config.index = flags.index.or(config.index);
    config.cluster = flags.cluster.or(config.cluster);
    config.label = flags.label.or(config.label);
    config.metrics = flags.metrics.or(config.metrics);
    override_with(&mut config.huge_pages, flags.huge_pages);
    override_with(&mut config.grace_ms, flags.grace_ms);
    config.key_bytes_max = flags.key_bytes_max.or(config.key_bytes_max);
    config.value_bytes_max = flags.value_bytes_max.or(config.value_bytes_max);
    override_with(&mut config.log_format, flags.log_format);
    Ok(config)
}

fn override_with<T>(value: &mut T, flag: Option<T>) {
    if let Some(flag) = flag {
        *value = flag;
    }
}

fn report(line: &str) {
    logging::report("kv-server", line);
}
