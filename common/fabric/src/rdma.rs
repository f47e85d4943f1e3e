//! The plain data of RDMA: options and their arithmetic, errors, and the report on a machine.
//!
//! This module does not depend on the feature `verbs`, so configuration files, errors and `kv-cli
//! doctor` are the same in both builds. Everything with a handle of a C library is in `verbs`.

mod report;
mod slices;

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::Nanos;
pub use report::{Capabilities, Device, Finding, Gid, Port, Report};
#[cfg(feature = "verbs")]
pub(crate) use slices::registered_ranges;
pub use slices::{
    Rkeys, SLICE_BYTES_MIN, SLICE_OVERLAP_BYTES, SLICE_UNIT_BYTES, SLICES_MAX, slice_bytes_min,
    slice_count,
};

/// The longest private data that RDMA-CM carries in a rejection, in bytes.
pub const REASON_BYTES_MAX: usize = 148;
/// Some devices, such as soft-RoCE, retry forever if the count is 7.
const RETRY_COUNT_MAX: u8 = 6;
/// The unit of a queue pair's timeout, in nanoseconds: 4.096 us.
const ACK_TIMEOUT_UNIT_NS: Nanos = 4096;
/// The exponents of timeouts that devices are given. Below them a busy host is taken for dead, and
/// 0 means forever. Above them a dead host is not noticed for minutes.
pub const ACK_TIMEOUT: RangeInclusive<u8> = 8..=22;
/// By the InfiniBand specification (9.7.6.1.3) a device may wait for up to this multiple of the
/// timeout.
const ACK_TIMEOUT_SLACK: Nanos = 4;
/// The longest time that a chain waits for its doorbell; after it the chain is refused. A busy
/// machine withholds the processor from a process for less time. The other terms are much larger.
const QUEUED_MAX_NS: Nanos = 500_000_000;
/// The longest time until a session notices that a chain is too old. A session sleeps for at most
/// half of it.
pub(crate) const LOOK_NS_MAX: Nanos = 200_000_000;

/// Settings for connecting and waiting. The default suits a data-centre network that loses few
/// packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How often a device repeats a packet before it reports the peer as dead: at most 6, because 7
    /// means forever to some devices.
    pub retry_count: u8,
    /// The time that a device waits for an acknowledgement is 4.096 us times 2 to this power. With
    /// 16 and 6 retries a dead host is noticed after about 2 s; with 14 and none a busy host is
    /// taken for dead. A value outside [`ACK_TIMEOUT`] is replaced by the nearest one inside.
    pub ack_timeout: u8,
    /// How long connecting may take. RDMA-CM itself waits 102 s for a host that does not answer.
    pub connect_timeout: Duration,
    /// How long a caller spins for a completion before it sleeps. A wakeup costs some microseconds.
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

    /// How long a device repeats a verb that its peer does not acknowledge, in nanoseconds. A chain
    /// that changes the region may be in flight for as long before its connection is closed.
    pub fn delivery_max_ns(&self) -> Nanos {
        let timeout = ACK_TIMEOUT_UNIT_NS << self.ack_exponent();
        timeout * ACK_TIMEOUT_SLACK * (Nanos::from(self.retries()) + 1)
    }

    /// How long after its post a chain can still take effect (L in `docs/protocol.md`): the time
    /// until its doorbell, in the queue and for repetitions, and the delay until a session notices
    /// that it is too old.
    pub fn lateness_max_ns(&self) -> Nanos {
        QUEUED_MAX_NS + self.delivery_max_ns() + LOOK_NS_MAX
    }
}

/// A region in the memory of a peer, as the peer describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// The region's virtual address in the peer's process.
    pub base_address: u64,
    /// The region's length.
    pub region_bytes: u64,
    /// The region's remote keys.
    pub rkeys: Rkeys,
    /// Whether to post verbs that change the region. The peer's device enforces the rights.
    pub writable: bool,
    /// No chain of any client takes less time at this region.
    pub round_trip_min_ns: u32,
}

/// The number of a connection that a listener accepted. No number is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// The state of the last probe of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeState {
    /// No probe was sent.
    Idle,
    /// No answer yet.
    Pending,
    /// The peer's device answered.
    Alive,
    /// The device did not answer in the time that the options allow, or the connection is broken.
    Dead,
}

/// An error of RDMA. Its message tells what failed for the user, and what to do.
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
    NoListener { address: SocketAddr },
    #[error("{address} did not answer within {} ms: is the host up?", .after.as_millis())]
    TimedOut { address: SocketAddr, after: Duration },
    /// `reason` is private data whose format the caller defines.
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
    #[error("{bytes} bytes of private data are more than the {max} that RDMA-CM carries")]
    PrivateData { bytes: usize, max: usize },
    #[error(
        "rdma.mr_slice would cut the region of {} MiB into {slices} slices, and at most \
         {SLICES_MAX} are possible: write at least \"{}MiB\"",
        .region_bytes >> 20, slice_bytes_min(*.region_bytes) >> 20
    )]
    TooManySlices { region_bytes: u64, slices: u64 },
    #[error("the RDMA device offers {offered} {what}, at least {needed} are needed")]
    TooSmall { what: &'static str, offered: u64, needed: u64 },
    #[error("{doing}: {source}")]
    System { doing: &'static str, source: io::Error },
}

impl VerbsError {
    /// Whether the same call may succeed a little later, because the server is not up yet.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::NoRoute { .. } | Self::NoListener { .. } | Self::TimedOut { .. })
    }
}

/// Reports this machine's RDMA devices and their faults. Opens every device for a moment.
pub fn preflight() -> Report {
    let mut report = Report::from_sysfs();
    // If the devices cannot be listed, the report has only what sysfs says.
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
        // 7 would mean forever, which is no bound.
        let endless = Options { retry_count: 7, ..options };
        assert_eq!(endless.delivery_max_ns(), options.delivery_max_ns());
        let huge = Options { ack_timeout: 255, retry_count: 255, ..options };
        assert!(huge.delivery_max_ns() > options.delivery_max_ns());
    }

    #[test]
    fn only_a_build_without_rdma_reports_that() {
        let is_reported = preflight().to_string().contains("built without RDMA");
        assert_eq!(is_reported, cfg!(not(feature = "verbs")));
    }
}
