//! The configuration files of server and client. The files in `config/` document every key, and a
//! test compares them with the structs here.
#![deny(unsafe_code)]

pub mod command_line;
#[cfg(feature = "commands")]
pub mod generate;
#[cfg(feature = "commands")]
mod log_lines;
pub mod logging;
pub mod signals;
pub mod size;
mod tables;
#[cfg(test)]
mod tests;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, fs};

use farside_control::address::{Address, AddressError};
use farside_control::attach::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, ConnectOptions, lateness_max_ns};
use farside_control::{Role, SecretKey};
use farside_fabric::memory::HugePages;
use farside_fabric::tcp::TlsFiles;
use farside_fabric::{Nanos, Trust};
use farside_layout::{CHUNK_BYTES, CLIENT_IDS, Format, LayoutError, grace_ms_min};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::size::ByteSize;

pub use farside_control::Secret;
pub use logging::{LogFormat, LogLevel};
pub use tables::{
    ClusterStoreConfig, MetricsAddress, RdmaConfig, SocketGroup, SocketMode, TcpConfig,
    check_private,
};

/// The greatest `clients_max`: all client ids except 0, which belongs to no client.
pub const CLIENTS_MAX_LIMIT: u32 = CLIENT_IDS - 1;
/// The default size of a new region.
pub const MEMORY_DEFAULT: ByteSize = ByteSize(1 << 30);
/// The default of `key_bytes_max`, in bytes.
pub const KEY_BYTES_MAX_DEFAULT: u32 = 1024;
/// The default of `value_bytes_max` in a large region, in bytes. In a smaller one it is a sixteenth
/// of the memory, but at least [`VALUE_BYTES_MAX_LEAST`].
pub const VALUE_BYTES_MAX_DEFAULT: u32 = 64 << 20;
/// The default of `value_bytes_max` in the smallest regions, in bytes.
pub const VALUE_BYTES_MAX_LEAST: u32 = 1 << 20;
/// The client's config file for all users of a machine.
const SYSTEM_CLIENT_FILE: &str = "/etc/farside/client.toml";
/// The client's config file of one user, relative to their home.
const USER_CLIENT_FILE: &str = ".config/farside/client.toml";
/// The valid values of `pipeline_depth`.
pub const PIPELINE_DEPTH_RANGE: RangeInclusive<u16> = 1..=1024;

/// Why a configuration is invalid. Each message is one line, with the key and what to write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ConfigError {
    #[error("cannot read the config file {}: {why}", .path.display())]
    Unreadable { path: PathBuf, why: String },
    #[error("{}:{line}: {message}", .path.display())]
    Syntax { path: PathBuf, line: usize, message: String },
    #[error("{key} = {value}: {advice}")]
    Value { key: &'static str, value: String, advice: String },
    #[error(
        "{} has a secret in it, and with mode {mode:04o} other users can read or change it: chmod \
         600 it", .path.display()
    )]
    Exposed { path: PathBuf, mode: u32 },
    #[error("{key} is missing: {advice}")]
    Missing { key: &'static str, advice: &'static str },
}

fn bad_value(
    key: &'static str,
    value: impl fmt::Display,
    advice: impl Into<String>,
) -> ConfigError {
    ConfigError::Value { key, value: value.to_string(), advice: advice.into() }
}

fn from_text<'de, D: Deserializer<'de>, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err: fmt::Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// One address, or a list of them.
fn addresses_from_text<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<Address>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "an address, or a list of addresses")]
    enum OneOrSeveral {
        One(String),
        Several(Vec<String>),
    }
    let texts = match OneOrSeveral::deserialize(deserializer)? {
        OneOrSeveral::One(text) => vec![text],
        OneOrSeveral::Several(texts) => texts,
    };
    let parsed = texts.iter().map(|text| text.parse()).collect::<Result<_, AddressError>>();
    parsed.map_err(serde::de::Error::custom)
}

fn size_from_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// The names of the roles in a config file.
#[derive(Deserialize)]
#[serde(remote = "Role", rename_all = "lowercase")]
enum RoleName {
    Reader,
    Writer,
}

/// The configuration of a server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// The addresses at which clients connect. At least one is required.
    #[serde(deserialize_with = "addresses_from_text")]
    pub listen: Vec<Address>,
    /// The permissions of the socket; if unset, those that the process's umask leaves.
    #[serde(deserialize_with = "from_text")]
    pub socket_mode: Option<SocketMode>,
    /// The group of the socket; if unset, the process's group.
    #[serde(deserialize_with = "from_text")]
    pub socket_group: Option<SocketGroup>,
    /// The size of the region. If unset, a new region has [`MEMORY_DEFAULT`]. An existing one keeps
    /// its size, and is refused if this is another size.
    #[serde(deserialize_with = "from_text")]
    pub memory: Option<ByteSize>,
    /// A file on tmpfs or hugetlbfs for the region, which then outlives the server.
    pub region_file: Option<PathBuf>,
    /// A snapshot to restore into a new region, for this start only. Not a key of the config file.
    #[serde(skip)]
    pub restore: Option<PathBuf>,
    /// Whether the region gets huge pages.
    pub huge_pages: HugePages,
    /// GRACE of a new region: how long an unlinked block stays unchanged, in milliseconds.
    pub grace_ms: u32,
    /// The longest key of a new region, in bytes; if unset, that of the snapshot that the region is
    /// restored from, or [`KEY_BYTES_MAX_DEFAULT`].
    pub key_bytes_max: Option<u32>,
    /// The longest value of a new region, in bytes; if unset, that of the snapshot that the region
    /// is restored from, or [`VALUE_BYTES_MAX_DEFAULT`].
    pub value_bytes_max: Option<u32>,
    /// The initial size of the index of a new region; if unset, one subtable of 8 KiB.
    #[serde(deserialize_with = "from_text")]
    pub index: Option<ByteSize>,
    /// Whether the region is a cache: when it is full, the server evicts keys that were neither
    /// written nor read for long.
    pub evict: bool,
    /// The maximum number of connected clients.
    pub clients_max: u32,
    /// The interval at which the server probes its clients' hosts, in milliseconds; 0 for never.
    /// RDMA only.
    pub probe_ms: u32,
    /// How to use RDMA.
    pub rdma: RdmaConfig,
    /// How to use TCP.
    pub tcp: TcpConfig,
    /// The files for TLS over TCP. Without any, nothing is encrypted.
    pub tls: TlsFiles,
    /// The URI of the records of the cluster that the server is a part of, if any.
    pub cluster: Option<String>,
    /// The failure domain of the server, for the operator of the cluster.
    pub label: Option<String>,
    /// Access to the records of the cluster.
    pub cluster_store: ClusterStoreConfig,
    /// The secret that a client needs to connect as a writer. It also lets readers connect.
    pub secret: Option<Secret>,
    /// A secret that only lets readers connect.
    pub reader_secret: Option<Secret>,
    /// The address at which the server answers requests for its metrics over HTTP, if any.
    #[serde(deserialize_with = "from_text")]
    pub metrics: Option<MetricsAddress>,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The least severe level that is logged.
    pub log_level: LogLevel,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            socket_mode: None,
            socket_group: None,
            memory: None,
            region_file: None,
            restore: None,
            huge_pages: HugePages::default(),
            grace_ms: 100,
            key_bytes_max: None,
            value_bytes_max: None,
            index: None,
            evict: false,
            clients_max: CLIENTS_MAX_LIMIT,
            probe_ms: 1000,
            rdma: RdmaConfig::default(),
            tcp: TcpConfig::default(),
            tls: TlsFiles::default(),
            cluster: None,
            label: None,
            cluster_store: ClusterStoreConfig::default(),
            secret: None,
            reader_secret: None,
            metrics: None,
            log_format: LogFormat::default(),
            log_level: LogLevel::default(),
        }
    }
}

impl ServerConfig {
    /// Reads a config file. The caller validates it, after flags have changed it.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`], and [`ConfigError::Syntax`] with the line.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        parse(&read(path)?, path)
    }

    /// Checks every key, except whether `grace_ms` is long enough for the fabric. That matters only
    /// to new regions: see [`ServerConfig::check_grace`].
    ///
    /// # Errors
    /// [`ConfigError::Value`] or [`ConfigError::Missing`], with the key and what to write.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_addresses()?;
        if !self.listens_at(Address::is_shm) {
            tables::refuse_without_socket(self)?;
        }
        self.rdma.validate()?;
        self.tcp.validate()?;
        tables::validate_server(self)?;
        tables::validate(self)?;
        if let Some(memory) = self.memory.filter(|memory| memory.0 > CHUNK_BYTES)
            && !memory.0.is_multiple_of(CHUNK_BYTES)
        {
            let chunk = ByteSize(CHUNK_BYTES);
            let advice = match memory.0.checked_next_multiple_of(CHUNK_BYTES).map(ByteSize) {
                Some(next) => format!("write a multiple of {chunk}, such as {next}"),
                None => format!("write a multiple of {chunk}"),
            };
            return Err(bad_value("memory", memory, advice));
        }
        check_format(&self.format(self.region_bytes(), [0; 16], [0; 16]))?;
        if !(1..=CLIENTS_MAX_LIMIT).contains(&self.clients_max) {
            let advice = format!("write a number from 1 to {CLIENTS_MAX_LIMIT}");
            return Err(bad_value("clients_max", self.clients_max, advice));
        }
        for (key, secret) in [("secret", &self.secret), ("reader_secret", &self.reader_secret)] {
            if secret.as_ref().is_some_and(|secret| secret.0.is_empty()) {
                return Err(bad_value(key, "\"\"", "write a secret, or leave the key out"));
            }
        }
        match (&self.secret, &self.reader_secret) {
            (None, Some(_)) => {
                let advice = "it needs `secret` for the writers too; set both or neither";
                Err(bad_value("reader_secret", "...", advice))
            }
            (Some(writer), Some(reader)) if writer == reader => {
                let advice = "it is the writers' secret too; write another one or leave it out";
                Err(bad_value("reader_secret", "...", advice))
            }
            _ => Ok(()),
        }
    }

    /// Whether one of the addresses has this property.
    pub fn listens_at(&self, has_property: impl Fn(&Address) -> bool) -> bool {
        self.listen.iter().any(has_property)
    }

    /// Checks that there are addresses, and that one executor can execute the atomic verbs of them
    /// all (invariant I11).
    fn check_addresses(&self) -> Result<(), ConfigError> {
        if self.listen.is_empty() {
            let advice =
                "write for example listen = \"shm:///run/farside/kv.sock\", or use --listen";
            return Err(ConfigError::Missing { key: "listen", advice });
        }
        let device_addresses = self.listen.iter().filter(|address| address.is_rdma()).count();
        let advice = match device_addresses {
            1 if self.listens_at(Address::is_shm) => {
                "clients at shm:// execute atomic verbs with their own processors, and these do \
                 not exclude those of an RDMA device: serve rdma:// and shm:// with two servers, \
                 or rdma:// and tcp:// with one"
            }
            0 | 1 => return Ok(()),
            _ => "write one rdma:// address, as one device executes all atomic verbs",
        };
        Err(bad_value("listen", addresses_text(&self.listen), advice))
    }

    /// Returns how late after its post a verb of a client can take effect: L in `docs/protocol.md`.
    pub fn lateness_max_ns(&self) -> Nanos {
        let lateness = |address| lateness_max_ns(address, &self.rdma.options());
        self.listen.iter().map(lateness).max().unwrap_or(0)
    }

    /// Checks that GRACE is long enough for proofs of words: T_word in docs/protocol.md must be
    /// above 0. Otherwise no update of a new region could succeed.
    ///
    /// # Errors
    /// [`ConfigError::Value`] with the shortest GRACE that is long enough.
    pub fn check_grace(&self) -> Result<(), ConfigError> {
        let is_rdma = self.listens_at(Address::is_rdma);
        let lateness_max_ns = self.lateness_max_ns();
        let (min, late_ms) = (grace_ms_min(lateness_max_ns), lateness_max_ns / 1_000_000);
        if u64::from(self.grace_ms) >= min || self.listen.iter().all(Address::is_shm) {
            return Ok(());
        }
        let advice = match is_rdma {
            true => format!(
                "with this rdma.retry_count and rdma.ack_timeout a verb can take effect {late_ms} \
                 ms late: write at least {min}, or lower these two keys"
            ),
            false => format!(
                "over tcp:// a verb can take effect {late_ms} ms late: write at least {min}"
            ),
        };
        Err(bad_value("grace_ms", self.grace_ms, advice))
    }

    /// Returns the length of a new region: `memory`, rounded up to whole chunks.
    pub fn region_bytes(&self) -> u64 {
        let memory = self.memory.unwrap_or(MEMORY_DEFAULT).0;
        memory.checked_next_multiple_of(CHUNK_BYTES).unwrap_or(memory)
    }

    /// Returns the format of a new region of this length.
    pub fn format(&self, region_bytes: u64, region_id: [u8; 16], hash_key: [u8; 16]) -> Format {
        Format {
            region_bytes,
            region_id,
            hash_key,
            grace_ms: self.grace_ms,
            key_bytes_max: self.key_bytes_max.unwrap_or(KEY_BYTES_MAX_DEFAULT),
            value_bytes_max: self.value_bytes_max.unwrap_or_else(|| {
                let share = (region_bytes / 16).min(VALUE_BYTES_MAX_DEFAULT.into());
                (share as u32).max(VALUE_BYTES_MAX_LEAST)
            }),
        }
    }
}

/// Returns addresses as a user writes them, with commas between them.
pub fn addresses_text(addresses: &[Address]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Checks the bounds of the format. The errors name the keys of the configuration.
fn check_format(format: &Format) -> Result<(), ConfigError> {
    match format.check() {
        Ok(()) => Ok(()),
        Err(LayoutError::Bound { field: "region_bytes", value, min, max }) => {
            let advice = format!("write a size from {} to {}", ByteSize(min), ByteSize(max));
            Err(bad_value("memory", ByteSize(value), advice))
        }
        Err(LayoutError::Bound { field, value, min, max }) => {
            Err(bad_value(field, value, format!("write a number from {min} to {max}")))
        }
        Err(other) => Err(bad_value("memory", format.region_bytes, other.to_string())),
    }
}

/// The configuration of a client.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientConfig {
    /// The server's address, or several addresses of it with commas between them.
    pub server: Option<String>,
    /// The client's role.
    #[serde(with = "RoleName")]
    pub role: Role,
    /// The server's secret, if it has one.
    pub secret: Option<Secret>,
    /// The maximum size of the client's location cache; 0 for no cache.
    #[serde(deserialize_with = "size_from_text")]
    pub cache_bytes: ByteSize,
    /// The number of operations that a session keeps in flight.
    pub pipeline_depth: u16,
    /// How long connecting may take, in milliseconds: for commands and the library alike.
    pub connect_timeout_ms: Option<u64>,
    /// How to use RDMA.
    pub rdma: RdmaConfig,
    /// The files for TLS over TCP. Without any, nothing is encrypted.
    pub tls: TlsFiles,
    /// Access to the records of a cluster, which only `kv-cli cluster` reads.
    pub cluster_store: ClusterStoreConfig,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            server: None,
            role: Role::Writer,
            secret: None,
            cache_bytes: ByteSize::mib(64),
            pipeline_depth: 64,
            connect_timeout_ms: None,
            rdma: RdmaConfig::default(),
            tls: TlsFiles::default(),
            cluster_store: ClusterStoreConfig::default(),
        }
    }
}

impl ClientConfig {
    /// Returns the config file that a command uses: the `given` file, otherwise the user's file,
    /// otherwise the machine's file.
    pub fn file(given: Option<&Path>) -> Option<PathBuf> {
        if let Some(path) = given {
            return Some(path.to_owned());
        }
        let users_file =
            std::env::var_os("HOME").map(|home| Path::new(&home).join(USER_CLIENT_FILE));
        [users_file, Some(SYSTEM_CLIENT_FILE.into())]
            .into_iter()
            .flatten()
            .find(|path| path.exists())
    }

    /// Returns the key of the secret.
    pub fn secret_key(&self) -> SecretKey {
        self.secret.as_ref().map_or(SecretKey::NONE, |secret| SecretKey::of(&secret.0))
    }

    /// How long connecting may take, if the user says so.
    pub fn connect_timeout(&self) -> Option<Duration> {
        self.connect_timeout_ms.map(Duration::from_millis)
    }

    /// Returns the options for connecting to the server in this role.
    ///
    /// # Errors
    /// [`AddressError`] if `server` is unset or no address.
    pub fn connect_options(&self, role: Role) -> Result<ConnectOptions, AddressError> {
        let (address, others) = first_and_others(self.server.as_deref().unwrap_or_default())?;
        Ok(ConnectOptions { address, others, ..self.options_without_server(role) })
    }

    /// Returns the options for connecting in this role to a server whose address is still to be
    /// set.
    pub fn options_without_server(&self, role: Role) -> ConnectOptions {
        ConnectOptions {
            address: Address::Shm(PathBuf::new()),
            others: Vec::new(),
            role,
            view: None,
            secret_key: self.secret_key(),
            timeout: self.connect_timeout().unwrap_or(CONNECT_TIMEOUT),
            answer_timeout: self.connect_timeout().unwrap_or(ANSWER_TIMEOUT),
            rdma: self.rdma.options(),
            tls: self.tls.clone(),
            trust: Trust::forever(),
        }
    }

    /// Reads and validates a config file.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the key, or the file and the line.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let config: Self = parse(&read(path)?, path)?;
        config.validate()?;
        Ok(config)
    }

    /// Checks every key.
    ///
    /// # Errors
    /// [`ConfigError::Value`], with the key and what to write.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(server) = &self.server
            && let Err(error) = Address::parse_several(server)
        {
            return Err(bad_value("server", server, error.to_string()));
        }
        if !PIPELINE_DEPTH_RANGE.contains(&self.pipeline_depth) {
            let (min, max) = (PIPELINE_DEPTH_RANGE.start(), PIPELINE_DEPTH_RANGE.end());
            let advice = format!("write a number from {min} to {max}");
            return Err(bad_value("pipeline_depth", self.pipeline_depth, advice));
        }
        if self.connect_timeout_ms == Some(0) {
            return Err(bad_value("connect_timeout_ms", 0, "write a number from 1"));
        }
        self.rdma.validate_client()?;
        tables::validate_client(&self.tls)
    }
}

/// Returns the addresses in this text: the one that a client prefers, and the others.
///
/// # Errors
/// [`AddressError`] for a part that is no address.
pub fn first_and_others(text: &str) -> Result<(Address, Vec<Address>), AddressError> {
    let mut addresses = Address::parse_several(text)?;
    // A text has at least one part, and each part is an address.
    let first = addresses.remove(0);
    Ok((first, addresses))
}

fn read(path: &Path) -> Result<String, ConfigError> {
    fs::read_to_string(path)
        .map_err(|error| ConfigError::Unreadable { path: path.to_owned(), why: error.to_string() })
}

/// Parses the text of a config file, without validating it.
///
/// # Errors
/// [`ConfigError::Syntax`] with the file and the line.
pub fn parse<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text.as_bytes()[..start].iter().filter(|byte| **byte == b'\n').count() + 1;
        let mut message = error.message().replace('\n', " ");
        let line_text = text.lines().nth(line - 1).unwrap_or_default();
        // Adds the text before the `=` only if it looks like a key: in a wrong line it may be a
        // part of a secret.
        let is_key =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        if let Some((key, _)) = line_text.split_once('=')
            && is_key(key.trim())
            && !message.contains(key.trim())
        {
            message = format!("{}: {message}", key.trim());
        }
        ConfigError::Syntax { path: path.to_owned(), line, message }
    })
}
