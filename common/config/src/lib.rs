//! The configuration files of server and client. Every key is documented in `config/`, and a test
//! keeps those files and the structs here together.
#![deny(unsafe_code)]

pub mod command_line;
mod rdma;
mod secret;
pub mod signals;
pub mod size;
mod socket;

use std::fmt;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use farside_control::address::{Address, AddressError};
use farside_control::attach::ConnectOptions;
use farside_control::{Role, Token};
use farside_fabric::shm::HugePages;
use farside_layout::{CHUNK_BYTES, CLIENTS_MAX, Format, LayoutError};

use crate::size::ByteSize;

pub use rdma::RdmaConfig;
pub use secret::{Secret, check_private};
pub use socket::{SocketGroup, SocketMode};

/// The most clients a server may be told to accept: every client id except 0, which is no client.
pub const CLIENTS_MAX_LIMIT: u32 = CLIENTS_MAX - 1;
/// How much memory a new region gets by default.
pub const MEMORY_DEFAULT: ByteSize = ByteSize(1 << 30);
/// The longest key and value of a new region when nothing else says, in bytes.
pub const KEY_BYTES_MAX_DEFAULT: u32 = 1024;
/// See [`KEY_BYTES_MAX_DEFAULT`].
pub const VALUE_BYTES_MAX_DEFAULT: u32 = 1 << 20;
/// The client's config file of all users of a machine.
const CLIENT_FILE_SYSTEM: &str = "/etc/farside/client.toml";
/// And of one user, from their home on.
const CLIENT_FILE_OWN: &str = ".config/farside/client.toml";
/// How many operations a session can keep in flight.
pub const PIPELINE_DEPTH: RangeInclusive<u16> = 1..=1024;

/// Why a configuration is no good: one line that names the key and what to write.
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

fn size_from_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// The names of [`Role`] in a file.
#[derive(Deserialize)]
#[serde(remote = "Role", rename_all = "lowercase")]
enum RoleName {
    Reader,
    Writer,
}

/// How a server is to run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// Where clients connect. Required.
    #[serde(deserialize_with = "from_text")]
    pub listen: Option<Address>,
    /// The permissions of the socket; else what the process's mask leaves.
    #[serde(deserialize_with = "from_text")]
    pub socket_mode: Option<SocketMode>,
    /// The group of the socket; else the process's.
    #[serde(deserialize_with = "from_text")]
    pub socket_group: Option<SocketGroup>,
    /// How large the region is. For a new one [`MEMORY_DEFAULT`]; an existing one keeps its size
    /// and is refused if this says another.
    #[serde(deserialize_with = "from_text")]
    pub memory: Option<ByteSize>,
    /// A file on tmpfs or hugetlbfs that holds the region and survives the server.
    pub region_file: Option<PathBuf>,
    /// A snapshot to fill a new region with, for this start only: it has no key in a file.
    #[serde(skip)]
    pub restore: Option<PathBuf>,
    /// Whether the region gets huge pages.
    pub huge_pages: HugePages,
    /// How long an unlinked block of a new region stays untouched, in milliseconds.
    pub grace_ms: u32,
    /// The longest key of a new region, in bytes; else what a snapshot says that it is restored
    /// from, or [`KEY_BYTES_MAX_DEFAULT`].
    pub key_bytes_max: Option<u32>,
    /// The longest value of a new region, in bytes; likewise [`VALUE_BYTES_MAX_DEFAULT`].
    pub value_bytes_max: Option<u32>,
    /// How much memory the index of a new region starts with; else one subtable, 8 KiB.
    #[serde(deserialize_with = "from_text")]
    pub index: Option<ByteSize>,
    /// Whether keys that were not written for long are removed when others need their room.
    pub evict: bool,
    /// How many clients may be connected at a time.
    pub clients_max: u32,
    /// How often the server looks whether the hosts of its clients are still there, in
    /// milliseconds; RDMA only. 0 for never.
    pub probe_ms: u32,
    /// How to use RDMA.
    pub rdma: RdmaConfig,
    /// What a client must know to connect as writer or reader.
    pub secret: Option<Secret>,
    /// What a client may know instead to connect as reader.
    pub reader_secret: Option<Secret>,
    /// How log lines look.
    pub log: LogFormat,
    /// How much is logged.
    pub log_level: LogLevel,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: None,
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
            secret: None,
            reader_secret: None,
            log: LogFormat::default(),
            log_level: LogLevel::default(),
        }
    }
}

impl ServerConfig {
    /// The configuration in this file, not yet validated: flags may still change it.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`], and [`ConfigError::Syntax`] with the line.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&read(path)?, path)
    }

    /// The configuration in this text of a file, not yet validated.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`] with the file and the line.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        parse(text, path)
    }

    /// Checks every key. Whether `grace_ms` is enough over RDMA only matters to new regions: see
    /// [`RdmaConfig::check_grace`].
    ///
    /// # Errors
    /// [`ConfigError::Value`] or [`ConfigError::Missing`]: which key, and what to write.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.address()?.is_rdma() {
            socket::refuse_over_rdma(self)?;
        }
        self.rdma.validate()?;
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

    /// Where clients connect.
    ///
    /// # Errors
    /// [`ConfigError::Missing`].
    pub fn address(&self) -> Result<&Address, ConfigError> {
        let advice = "write for example listen = \"shm:///run/farside/kv.sock\", or use --listen";
        self.listen.as_ref().ok_or(ConfigError::Missing { key: "listen", advice })
    }

    /// The length of a new region: the memory asked for, in whole chunks.
    pub fn region_bytes(&self) -> u64 {
        let asked = self.memory.unwrap_or(MEMORY_DEFAULT).0;
        asked.checked_next_multiple_of(CHUNK_BYTES).unwrap_or(asked)
    }

    /// What a new region of this length is formatted with.
    pub fn format(&self, region_bytes: u64, region_id: [u8; 16], hash_key: [u8; 16]) -> Format {
        Format {
            region_bytes,
            region_id,
            hash_key,
            grace_ms: self.grace_ms,
            key_bytes_max: self.key_bytes_max.unwrap_or(KEY_BYTES_MAX_DEFAULT),
            value_bytes_max: self.value_bytes_max.unwrap_or(VALUE_BYTES_MAX_DEFAULT),
        }
    }
}

/// The layout's own bounds, said in the words of the configuration.
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

/// How a client is to reach its server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientConfig {
    /// The server's address.
    pub server: Option<String>,
    /// What the client wants to do.
    #[serde(with = "RoleName")]
    pub role: Role,
    /// The server's secret, if it has one.
    pub secret: Option<Secret>,
    /// How much memory the client's location cache takes; 0 for none.
    #[serde(deserialize_with = "size_from_text")]
    pub cache_bytes: ByteSize,
    /// How many operations a session keeps in flight.
    pub pipeline_depth: u16,
    /// How long connecting may take, in milliseconds: for commands and the library alike.
    pub connect_timeout_ms: u64,
    /// How to use RDMA.
    pub rdma: RdmaConfig,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            server: None,
            role: Role::Writer,
            secret: None,
            cache_bytes: ByteSize::mib(64),
            pipeline_depth: 64,
            connect_timeout_ms: 3000,
            rdma: RdmaConfig::default(),
        }
    }
}

impl ClientConfig {
    /// The file a command takes: the one it was told, else the user's own, else the machine's.
    pub fn file(told: Option<&Path>) -> Option<PathBuf> {
        if let Some(path) = told {
            return Some(path.to_owned());
        }
        let own = std::env::var_os("HOME").map(|home| Path::new(&home).join(CLIENT_FILE_OWN));
        [own, Some(CLIENT_FILE_SYSTEM.into())].into_iter().flatten().find(|path| path.exists())
    }

    /// What tells the server that this client knows the secret.
    pub fn token(&self) -> Token {
        self.secret.as_ref().map_or(Token::NONE, |secret| Token::of(&secret.0))
    }

    /// How to connect to its server in this role.
    ///
    /// # Errors
    /// [`AddressError`] if it names no server.
    pub fn connect_options(&self, role: Role) -> Result<ConnectOptions, AddressError> {
        Ok(ConnectOptions {
            address: self.server.as_deref().unwrap_or_default().parse()?,
            role,
            token: self.token(),
            timeout: Duration::from_millis(self.connect_timeout_ms),
            rdma: self.rdma.options(),
        })
    }

    /// The configuration in this file, validated.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the key, or the file and the line.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let config = Self::parse(&read(path)?, path)?;
        config.validate()?;
        Ok(config)
    }

    /// The configuration in this text of a file, not yet validated.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`] with the file and the line.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        parse(text, path)
    }

    /// Checks every key.
    ///
    /// # Errors
    /// [`ConfigError::Value`]: which key, and what to write.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(server) = &self.server
            && let Err(error) = server.parse::<Address>()
        {
            return Err(bad_value("server", server, error.to_string()));
        }
        if !PIPELINE_DEPTH.contains(&self.pipeline_depth) {
            let (min, max) = (PIPELINE_DEPTH.start(), PIPELINE_DEPTH.end());
            let advice = format!("write a number from {min} to {max}");
            return Err(bad_value("pipeline_depth", self.pipeline_depth, advice));
        }
        if self.connect_timeout_ms == 0 {
            return Err(bad_value("connect_timeout_ms", 0, "write a number from 1 up"));
        }
        self.rdma.validate()
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    fs::read_to_string(path)
        .map_err(|error| ConfigError::Unreadable { path: path.to_owned(), why: error.to_string() })
}

fn parse<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text.as_bytes()[..start].iter().filter(|byte| **byte == b'\n').count() + 1;
        let mut message = error.message().replace('\n', " ");
        let line_text = text.lines().nth(line - 1).unwrap_or_default();
        // Only what is a key: in a line that is wrong anything may stand before the `=`.
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

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "human" => Ok(Self::Human),
            "json" => Ok(Self::Json),
            _ => Err(bad_value("log", text, "write human or json")),
        }
    }
}

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

#[cfg(test)]
mod tests;
