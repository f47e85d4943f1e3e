//! The command line of `kv-resp`.

use std::path::PathBuf;

use clap::{Parser, ValueHint};
use farside_config::{LogFormat, MetricsAddress};

use crate::listen::ListenAddress;

const EXIT_CODES: &str = "\
Exit codes:
  0  ended by SIGTERM, SIGINT or SIGHUP
  2  the command line or the config file is wrong
  3  no server: none answers, or it refuses the connection
  5  any other failure, such as a port that is in use

The server's address comes from --server, or FARSIDE_SERVER, or the config file, as for kv-cli. The
password of clients comes from --password-file or FARSIDE_RESP_PASSWORD.

With TLS, SIGHUP makes the gateway read certificate, key and CA again instead.";

/// Serves a store of Farside to the clients of redis: RESP2 and RESP3, for keys with strings.
#[derive(Debug, Parser)]
#[command(name = "kv-resp", version, after_help = EXIT_CODES, max_term_width = 100)]
pub(crate) struct Args {
    /// The address of the store, for example shm:///run/farside/kv.sock
    #[arg(long, value_name = "URI", env = "FARSIDE_SERVER")]
    pub(crate) server: Option<String>,
    /// Config file of the client to use instead of the default ones
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: Option<PathBuf>,
    /// Refuse a file with a secret that other users can read, instead of warning about it
    #[arg(long)]
    pub(crate) strict_config: bool,
    /// Where clients of redis connect: tcp://HOST:PORT or unix:///PATH; can be given several times
    #[arg(
        long,
        value_name = "ADDRESS",
        value_delimiter = ',',
        default_value = "tcp://127.0.0.1:6379"
    )]
    pub(crate) listen: Vec<ListenAddress>,
    /// The number of threads, 1 to 128. Each serves its share of the connections
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) threads: u16,
    /// How many operations each thread has in flight, 16 to 1024
    #[arg(long, value_name = "N", default_value_t = 256)]
    #[arg(value_parser = clap::value_parser!(u16).range(16..=1024))]
    pub(crate) depth: u16,
    /// The most connections at a time; further ones are refused
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(crate) clients_max: usize,
    /// Serve the metrics of its client for Prometheus at http://IP:PORT/metrics
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) metrics: Option<MetricsAddress>,
    /// Close a connection that was idle for so many seconds; 0 for never
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(crate) idle_timeout: u32,
    /// A file with the password that clients have to give (AUTH); a line end at its end is left out
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) password_file: Option<PathBuf>,
    /// Serve all hosts that reach a tcp:// address, although clients need neither password nor
    /// certificate
    #[arg(long, conflicts_with = "password_file")]
    pub(crate) no_password: bool,
    /// The certificate for TLS at tcp:// addresses, and those between it and its CA
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_key")]
    pub(crate) tls_certificate: Option<PathBuf>,
    /// The private key of the certificate
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    #[arg(requires = "tls_certificate")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The CAs of clients: only clients with a certificate are accepted
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    #[arg(requires = "tls_certificate")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Format of log lines: human or json
    #[arg(long, value_name = "FORMAT", default_value = "human")]
    pub(crate) log_format: LogFormat,
}
