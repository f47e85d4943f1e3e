//! Tables and values of the config files: RDMA, TCP and TLS, a server's socket and its place in a
//! cluster, the address of a program's metrics, and secrets. No error message shows a secret, and
//! other users must not read it.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, fs, thread};

use farside_control::Secret;
use farside_control::address::{Address, OWN_NAME_TIMEOUT};
use farside_fabric::rdma::{ACK_TIMEOUT, Options, SLICE_BYTES_MIN, SLICE_UNIT_BYTES};
use farside_fabric::tcp::TlsFiles;
use serde::Deserialize;

use super::{ConfigError, ServerConfig, addresses_text, bad_value, from_text};
use crate::size::ByteSize;

const MR_SLICE: &str = "rdma.mr_slice";

/// How to use RDMA, for an `rdma://` address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RdmaConfig {
    /// How often a device resends a packet.
    pub retry_count: u8,
    /// How long a device waits for an acknowledgement: 4.096 us times 2 to this power.
    pub ack_timeout: u8,
    /// How long a thread polls for a completion before it sleeps, in microseconds.
    pub spin_us: u64,
    /// The length of the memory regions in which a server registers its region. If unset, it is
    /// registered whole. Not for clients.
    #[serde(deserialize_with = "from_text")]
    pub mr_slice: Option<ByteSize>,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        let Options { retry_count, ack_timeout, spin, .. } = Options::default();
        Self { retry_count, ack_timeout, spin_us: spin.as_micros() as u64, mr_slice: None }
    }
}

impl RdmaConfig {
    /// Returns the fabric's options.
    pub fn options(&self) -> Options {
        let Self { retry_count, ack_timeout, spin_us, .. } = *self;
        let spin = Duration::from_micros(spin_us);
        Options { retry_count, ack_timeout, spin, ..Options::default() }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.retry_count > 6 {
            let advice = "write a number from 0 to 6; with 7 some devices resend without end";
            return Err(bad_value("rdma.retry_count", self.retry_count, advice));
        }
        if !ACK_TIMEOUT.contains(&self.ack_timeout) {
            let advice = "write a number from 8 (1 ms) to 22 (17 s)";
            return Err(bad_value("rdma.ack_timeout", self.ack_timeout, advice));
        }
        if let Some(slice) = self.mr_slice
            && (slice.0 < SLICE_BYTES_MIN || !slice.0.is_multiple_of(SLICE_UNIT_BYTES))
        {
            let (unit, min) = (ByteSize(SLICE_UNIT_BYTES), ByteSize(SLICE_BYTES_MIN));
            let advice = format!("write a multiple of {unit}, at least {min}, such as 4GiB");
            return Err(bad_value(MR_SLICE, slice, advice));
        }
        Ok(())
    }

    pub(super) fn validate_client(&self) -> Result<(), ConfigError> {
        self.validate()?;
        self.mr_slice.map_or(Ok(()), |slice| {
            let advice = "it is for the config file of a server; leave it out";
            Err(bad_value(MR_SLICE, slice, advice))
        })
    }
}

/// Limit on the threads that execute verbs.
const THREADS_MAX: u16 = 256;
/// The number of these threads by default, on a machine with at least as many processors.
const THREADS_DEFAULT: usize = 4;
/// The least memory for requests and replies that wait.
const BUFFERS_BYTES_MIN: u64 = 4 << 20;
/// The least and the most of this memory by default, which is a part of the region's length.
const BUFFERS_BYTES_DEFAULT: (u64, u64) = (64 << 20, 1 << 30);
const BUFFERS_DIVISOR: u64 = 8;

/// How to use TCP, for a `tcp://` address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TcpConfig {
    /// How many threads execute the clients' verbs; if unset, as many as there are processors, at
    /// most four.
    pub threads: Option<u16>,
    /// How long one of these threads polls for requests before it sleeps, in microseconds.
    pub spin_us: u64,
    /// Limit on the memory for requests and replies that wait: an eighth of the region by default,
    /// from 64 MiB to 1 GiB.
    #[serde(deserialize_with = "from_text")]
    pub buffers: Option<ByteSize>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self { threads: None, spin_us: 50, buffers: None }
    }
}

impl TcpConfig {
    /// Returns the number of threads that execute verbs.
    pub fn threads(&self) -> usize {
        let processors = || thread::available_parallelism().map_or(1, usize::from);
        self.threads.map_or_else(|| processors().min(THREADS_DEFAULT), usize::from)
    }

    /// Returns how long one of these threads polls for requests before it sleeps.
    pub fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }

    /// Returns the limit on the memory for requests and replies that wait, for a region of this
    /// length.
    pub fn buffers_bytes(&self, region_bytes: u64) -> u64 {
        let (least, most) = BUFFERS_BYTES_DEFAULT;
        let default = (region_bytes / BUFFERS_DIVISOR).clamp(least, most);
        self.buffers.map_or(default, |buffers| buffers.0)
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(threads) = self.threads
            && !(1..=THREADS_MAX).contains(&threads)
        {
            let advice = format!("write a number from 1 to {THREADS_MAX}");
            return Err(bad_value("tcp.threads", threads, advice));
        }
        if let Some(buffers) = self.buffers
            && buffers.0 < BUFFERS_BYTES_MIN
        {
            let advice = format!("write {} or more", ByteSize(BUFFERS_BYTES_MIN));
            return Err(bad_value("tcp.buffers", buffers, advice));
        }
        Ok(())
    }
}

pub(super) fn validate_server(config: &ServerConfig) -> Result<(), ConfigError> {
    let tls = &config.tls;
    if !tls.is_used() {
        return Ok(());
    }
    if !config.listens_at(Address::is_tcp) {
        let advice = "[tls] encrypts tcp:// alone: leave it out, or listen at a tcp:// address";
        return Err(bad_value("listen", addresses_text(&config.listen), advice));
    }
    needed("tls.certificate", tls.certificate.is_some(), "a server with [tls] needs one")?;
    needed("tls.key", tls.key.is_some(), "write the file of the certificate's private key")
}

pub(super) fn validate_client(tls: &TlsFiles) -> Result<(), ConfigError> {
    if !tls.is_used() {
        return Ok(());
    }
    let advice = "write the file of the CA that signed the server's certificate";
    needed("tls.ca", tls.ca.is_some(), advice)?;
    let is_paired = tls.certificate.is_some() == tls.key.is_some();
    needed("tls.key", tls.key.is_some() || is_paired, "tls.certificate needs it")?;
    needed("tls.certificate", is_paired, "tls.key needs it")
}

fn needed(key: &'static str, is_there: bool, advice: &'static str) -> Result<(), ConfigError> {
    if is_there { Ok(()) } else { Err(ConfigError::Missing { key, advice }) }
}

/// The address at which a program answers requests for its metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsAddress(pub SocketAddr);

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| {
            format!(
                "`{text}` is no address for metrics; write an IP address and a port, such as \
                 127.0.0.1:9400 or [::1]:9400"
            )
        })
    }
}

/// The longest `label`, in bytes.
const LABEL_BYTES_MAX: usize = 64;

/// Access to the records of the cluster in etcd: the table `[cluster_store]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterStoreConfig {
    /// The user. Unset if etcd has no authentication, or knows the user by the certificate.
    pub user: Option<String>,
    /// The password of this user.
    pub password: Option<Secret>,
    /// The files for TLS with etcd. With `ca` the connections use TLS.
    pub tls: TlsFiles,
}

pub(super) fn validate(config: &ServerConfig) -> Result<(), ConfigError> {
    if config.cluster.is_none() {
        let advice = "it is for a server of a cluster: write `cluster`, too, or leave it out";
        return match &config.label {
            Some(label) => Err(bad_value("label", label, advice)),
            None if config.cluster_store != ClusterStoreConfig::default() => {
                Err(bad_value("cluster_store", "...", advice))
            }
            None => Ok(()),
        };
    }
    if let Some(label) = &config.label
        && !(1..=LABEL_BYTES_MAX).contains(&label.len())
    {
        let advice = format!("write 1 to {LABEL_BYTES_MAX} characters");
        return Err(bad_value("label", format_args!("{label:?}"), advice));
    }
    if let Some(file) = &config.restore {
        let advice = "a snapshot may have keys of all shards: start the servers of the cluster \
                      without it, and then run `kv-cli restore`";
        return Err(bad_value("restore", file.display(), advice));
    }
    config.listen.iter().try_for_each(check_address)
}

/// Checks that clients of other hosts can be told this address.
fn check_address(address: &Address) -> Result<(), ConfigError> {
    // An address that cannot be resolved is an error later, when the server listens.
    let resolved = address.resolve(OWN_NAME_TIMEOUT).unwrap_or_default();
    if resolved.iter().any(|address| address.ip().is_unspecified()) {
        let advice = "the cluster tells clients this address, and it names no host: write an \
                      address of this host's";
        return Err(bad_value("listen", address, advice));
    }
    Ok(())
}

/// The file with the groups of this machine.
const GROUPS_FILE: &str = "/etc/group";
/// The greatest mode of a socket: all permission bits.
const MODE_MAX: u32 = 0o777;

/// The permissions of a socket, such as 0660. Connecting needs write permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(pub u32);

impl FromStr for SocketMode {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let is_octal = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let mode = if is_octal { u32::from_str_radix(text, 8).ok() } else { None };
        match mode.filter(|mode| *mode <= MODE_MAX) {
            Some(mode) => Ok(Self(mode)),
            None => Err(bad_value("socket_mode", text, "write octal digits, such as \"0660\"")),
        }
    }
}

/// The number of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketGroup(pub u32);

impl FromStr for SocketGroup {
    type Err = ConfigError;

    /// Parses a number, or a name in /etc/group.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if let Ok(number) = text.parse() {
            return Ok(Self(number));
        }
        let groups = std::fs::read_to_string(GROUPS_FILE).unwrap_or_default();
        number_of(text, &groups).map(Self).ok_or_else(|| {
            let advice = format!("{GROUPS_FILE} has no such group: write its number, or another");
            bad_value("socket_group", text, advice)
        })
    }
}

/// Returns the number of the group with this name. `groups` has lines such as
/// `farside:x:998:app,web`.
fn number_of(name: &str, groups: &str) -> Option<u32> {
    let mut lines = groups.lines().map(|line| line.split(':'));
    let number = |mut fields: std::str::Split<'_, char>| fields.nth(1)?.parse().ok();
    lines.find_map(|mut fields| if fields.next() == Some(name) { number(fields) } else { None })
}

/// Refuses the keys about the socket, which exists only on shared memory.
pub(super) fn refuse_without_socket(config: &ServerConfig) -> Result<(), ConfigError> {
    let advice = "it is for an address such as shm:///run/farside/kv.sock: leave it out";
    if let Some(mode) = config.socket_mode {
        return Err(bad_value("socket_mode", mode, advice));
    }
    match config.socket_group {
        Some(group) => Err(bad_value("socket_group", group.0, advice)),
        None => Ok(()),
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// The permission bits that let all other users read or change a file.
const MODE_OTHERS: u32 = 0o006;
/// The permission bits that let the file's group read or change it.
const MODE_GROUP: u32 = 0o060;

/// Checks that other users cannot read or change a config file with a secret.
///
/// The file's group may do so if it is this process's group: a service's file often belongs to root
/// and the service's group.
///
/// # Errors
/// [`ConfigError::Exposed`] with the file's mode.
pub fn check_private(path: &Path) -> Result<(), ConfigError> {
    let Ok(metadata) = fs::metadata(path) else { return Ok(()) };
    let is_own_group = metadata.gid() == rustix::process::getegid().as_raw();
    let exposing = if is_own_group { MODE_OTHERS } else { MODE_OTHERS | MODE_GROUP };
    let mode = metadata.mode() & 0o7777;
    match mode & exposing {
        0 => Ok(()),
        _ => Err(ConfigError::Exposed { path: path.to_owned(), mode }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_and_groups_have_names_or_numbers() {
        for (text, mode) in [("0660", 0o660), ("777", 0o777), ("0", 0)] {
            assert_eq!(text.parse::<SocketMode>().unwrap(), SocketMode(mode));
        }
        for text in ["", "0o660", "1777", "0668", "-1", "+660", "rw"] {
            let line = text.parse::<SocketMode>().unwrap_err().to_string();
            assert!(line.contains("socket_mode") && line.contains("\"0660\""), "{line}");
        }
        let groups = "root:x:0:\nbroken\nno:x:number:\nfarside:x:998:app,web\n";
        assert_eq!(number_of("farside", groups), Some(998));
        for name in ["app", "broken", "no", "x", ""] {
            assert_eq!(number_of(name, groups), None);
        }
        assert_eq!("998".parse::<SocketGroup>().unwrap(), SocketGroup(998));
        let line = "no such group".parse::<SocketGroup>().unwrap_err().to_string();
        assert!(line.contains("/etc/group has no such group"), "{line}");
    }

    #[test]
    fn socket_keys_are_refused_without_a_socket() {
        let mut config = ServerConfig {
            listen: vec!["rdma://10.9.0.1:7400".parse().unwrap()],
            socket_mode: Some(SocketMode(0o660)),
            ..Default::default()
        };
        let line = config.validate().unwrap_err().to_string();
        assert!(line.starts_with("socket_mode = 0660: it is for"), "{line}");
        (config.socket_mode, config.socket_group) = (None, Some(SocketGroup(7)));
        assert!(config.validate().unwrap_err().to_string().starts_with("socket_group = 7"));
    }
}
