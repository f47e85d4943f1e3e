//! The plain data of RDMA: options and their arithmetic, errors, and what a machine has for it.
//!
//! It is here with and without the feature `verbs`, so that configuration files, errors and
//! `kv-cli doctor` are the same in both builds. What holds a handle of a C library is in `verbs`.

mod report;

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::Nanos;
pub use report::{Capabilities, Device, Finding, Gid, Port, Report};

/// What RDMA-CM lets a refusing side say, in bytes.
pub const REASON_BYTES_MAX: usize = 148;
/// 7 means *for ever* to some devices, soft-RoCE among them.
const RETRY_COUNT_MAX: u8 = 6;
/// The unit of a queue pair's timeout, in nanoseconds: 4.096 us.
const ACK_TIMEOUT_UNIT_NS: Nanos = 4096;
/// What is asked of a device: below, a busy host is called dead (and 0 means for ever); above, a
/// dead one is not noticed for minutes.
pub const ACK_TIMEOUT: RangeInclusive<u8> = 8..=22;
/// The InfiniBand specification (9.7.6.1.3) lets a device wait up to four times the timeout asked
/// for.
const ACK_TIMEOUT_SLACK: Nanos = 4;
/// How long a chain may wait for its doorbell before it is refused: longer than a busy machine
/// keeps a process from its processor, and little beside the rest.
const QUEUED_MAX_NS: Nanos = 500_000_000;
/// How much later than it should a session may notice that a chain is too old: it sleeps for at
/// most half of this.
pub(crate) const LOOK_NS_MAX: Nanos = 200_000_000;

/// How to connect and to wait. The default is for a data-centre network that loses few packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How often a device sends a packet again before it calls the peer dead: at most 6, for 7
    /// means for ever to some.
    pub retry_count: u8,
    /// How long a device waits for an acknowledgement: 4.096 us times 2 to this power. With 16 and
    /// 6 retries a dead host is noticed after about 2 s; with 14 and none a busy one is called
    /// dead. Of [`ACK_TIMEOUT`], or what is next to it there is used.
    pub ack_timeout: u8,
    /// How long connecting may take. RDMA-CM's own limit is 102 s for a host that does not answer.
    pub connect_timeout: Duration,
    /// How long a caller that waits for a completion spins before it sleeps. A wakeup costs some
    /// microseconds.
    pub spin: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            retry_count: RETRY_COUNT_MAX,
            ack_timeout: 16,
            connect_timeout: Duration::from_secs(5),
            spin: Duration::from_micros(100),
        }
    }
}

impl Options {
    /// The retry count that is used.
    pub fn retries(&self) -> u8 {
        self.retry_count.min(RETRY_COUNT_MAX)
    }

    /// The acknowledgement timeout that is used, as an exponent.
    pub(crate) fn ack_exponent(&self) -> u8 {
        self.ack_timeout.clamp(*ACK_TIMEOUT.start(), *ACK_TIMEOUT.end())
    }

    /// How long a device goes on with a verb that its peer does not acknowledge, and how long a
    /// chain that changes something may be under way before its connection is broken off.
    /// Nanoseconds.
    pub fn delivery_max_ns(&self) -> Nanos {
        let timeout = ACK_TIMEOUT_UNIT_NS << self.ack_exponent();
        timeout * ACK_TIMEOUT_SLACK * (Nanos::from(self.retries()) + 1)
    }

    /// How long after its post a chain can still take effect (L in `docs/protocol.md`): it may
    /// wait for its doorbell, queue and be sent again until it is broken off, and that may be
    /// noticed late.
    pub fn lateness_max_ns(&self) -> Nanos {
        QUEUED_MAX_NS + self.delivery_max_ns() + LOOK_NS_MAX
    }
}

/// A region in the memory of a peer, as it introduced itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Its virtual address there.
    pub base_address: u64,
    /// Its length, in bytes.
    pub region_bytes: u64,
    /// Its remote key.
    pub rkey: u32,
    /// Whether to send verbs that change it. Whether they may is decided by the peer's device.
    pub writable: bool,
    /// No chain of anybody's takes less than this there, in nanoseconds.
    pub round_trip_min_ns: u32,
}

/// A connection that a listener accepted; never the same twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// What a probe of a peer found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeState {
    /// Nothing was asked.
    Idle,
    /// No answer yet.
    Pending,
    /// The peer's device answered.
    Alive,
    /// It did not, for as long as the options allow, or the connection is broken.
    Dead,
}

/// Why RDMA does not do what was asked: what failed for the user, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum VerbsError {
    #[error("this program was built without RDMA: build it with --features verbs, or use shm://")]
    NotBuilt,
    #[error(
        "there is no RDMA device here: load the driver of the network card, or try soft-RoCE: \
         modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
    )]
    NoDevice { source: io::Error },
    #[error(
        "no permission to use RDMA: join the group that owns /dev/infiniband/* (usermod -aG rdma \
         $USER), and in a container pass /dev/infiniband in"
    )]
    NoPermission { source: io::Error },
    #[error(
        "the system does not let this process pin {bytes} bytes of memory ({limit}): raise the \
         limit with ulimit -l unlimited, LimitMEMLOCK=infinity in the systemd unit, or memlock in \
         /etc/security/limits.conf"
    )]
    Memlock { bytes: usize, limit: String, source: io::Error },
    #[error(
        "{address} cannot be reached through an RDMA device: look at `rdma link` and `ip route \
         get {}`", .address.ip()
    )]
    NoRoute { address: SocketAddr, source: io::Error },
    #[error(
        "no program listens at {address}: is kv-server running there, with this rdma:// address?"
    )]
    NobodyListens { address: SocketAddr },
    #[error("{address} did not answer within {} ms: is the host up?", .after.as_millis())]
    TimedOut { address: SocketAddr, after: Duration },
    /// The peer's reason, as its owner encodes it.
    #[error("{address} refused the connection")]
    Rejected { address: SocketAddr, reason: Vec<u8> },
    #[error("the RDMA device {device} has no atomic operations, which Farside needs: use another")]
    NoAtomics { device: String },
    #[error(
        "the connection came in through another RDMA device than the region's: bind the server to \
         one device's address instead of all"
    )]
    OtherDevice,
    #[error(
        "the way to {address} is through the RDMA device {other}, and this session already uses \
         {device}: the servers of a session have to be reached through one device"
    )]
    SeveralDevices { address: SocketAddr, device: String, other: String },
    #[error("{bytes} bytes do not fit into the {max} that RDMA-CM carries")]
    PrivateData { bytes: usize, max: usize },
    #[error("the RDMA device offers {offered} {what}, at least {needed} are needed")]
    TooSmall { what: &'static str, offered: u64, needed: u64 },
    #[error("{doing}: {source}")]
    System { doing: &'static str, source: io::Error },
}

impl VerbsError {
    /// Whether the same may work a little later: the server is not up, or not yet again.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::NoRoute { .. } | Self::NobodyListens { .. } | Self::TimedOut { .. })
    }
}

/// What this machine has for RDMA, and what is wrong with it. Opens every device for a moment.
pub fn preflight() -> Report {
    let mut report = Report::from_sysfs();
    // Without the list of devices the report has what sysfs says.
    #[cfg(feature = "verbs")]
    let _ = crate::verbs::ask_all(&mut report.devices);
    report = report.judge();
    if cfg!(not(feature = "verbs")) {
        let (what, mend) =
            ("this program was built without RDMA", "build it with --features verbs");
        report.findings.push(Finding { what: what.to_owned(), mend: mend.to_owned() });
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_follows_the_retry_formula() {
        let options = Options::default();
        let nominal = 7 * (4_096 << 16);
        assert_eq!(options.delivery_max_ns(), 4 * nominal);
        assert!((1_800_000_000..2_000_000_000).contains(&nominal));
        assert_eq!(options.lateness_max_ns(), 4 * nominal + 700_000_000);
        // For ever is no bound.
        let endless = Options { retry_count: 7, ..options };
        assert_eq!(endless.delivery_max_ns(), options.delivery_max_ns());
        let wild = Options { ack_timeout: 255, retry_count: 255, ..options };
        assert!(wild.delivery_max_ns() > options.delivery_max_ns());
    }

    #[test]
    fn a_build_without_rdma_says_so() {
        let says = preflight().to_string().contains("built without RDMA");
        assert_eq!(says, cfg!(not(feature = "verbs")));
    }
}
