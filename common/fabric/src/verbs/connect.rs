//! Connecting, step by step: `Resolved` knows the device, `Prepared` has a queue pair, `Connected`
//! the peer's answer. Each step consumes the last.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::control_channel::VerbsChannel;
use super::fabric::{Queues, VerbsFabric};
use super::ffi::{self, rdma_cm_event_type as kind, system};
use super::handles::{Capacity, CompletionQueue, ProtectionDomain, QueuePair};
use super::identifier::{CmId, Event, EventChannel};
use super::link::{Connected, DataLink};
use crate::rdma::{Options, RemoteRegion, VerbsError};
use crate::{CHAIN_VERBS_MAX, REQUEST_BYTES_MAX};

/// IB_CM_REJ_CONSUMER_DEFINED: the peer's program refused.
const REJECTED_BY_PROGRAM: i32 = 28;
/// The most inline bytes asked for: a block of a key and a value of about 200 bytes.
const INLINE_BYTES: u32 = 256;
/// What a queue pair should hold at least.
const SENDS_MIN: u32 = CHAIN_VERBS_MAX as u32;
/// How often a receiver is asked again that has no buffer ready: for ever, for a control channel
/// waits until its peer has time. Nothing on the data path needs a buffer.
pub(super) const RECEIVER_RETRIES: u8 = 7;

/// Opens a control channel; returns it and what the server answered, with zeros behind it.
///
/// # Errors
/// [`VerbsError`]; a server's own refusal is [`VerbsError::Rejected`].
pub fn connect_control(
    address: SocketAddr,
    private_data: &[u8],
    options: &Options,
) -> Result<(VerbsChannel, Vec<u8>), VerbsError> {
    check_request(private_data)?;
    let prepared = Resolved::new(address, options)?.prepare(VerbsChannel::CAPACITY, None)?;
    let mut channel = VerbsChannel::new(prepared.queue_pair.clone(), prepared.domain.clone())?;
    let connected = prepared.connect(private_data)?;
    channel.begin(Some(connected.events))?;
    Ok((channel, connected.reply))
}

/// Opens a data connection for a fabric of so many lanes.
///
/// # Errors
/// [`VerbsError`]; a server's own refusal is [`VerbsError::Rejected`].
pub fn connect_data(
    address: SocketAddr,
    private_data: &[u8],
    lanes: u16,
    options: &Options,
) -> Result<DataLink, VerbsError> {
    connect_on(None, address, private_data, lanes, options)
}

impl VerbsFabric {
    /// Opens a data connection to one region more, through the device of this fabric, on its
    /// protection domain and completion queue. [`VerbsFabric::add_region`] makes use of it.
    ///
    /// # Errors
    /// [`VerbsError::SeveralDevices`] if the way there is through another device; what else
    /// [`connect_data`] has. This fabric stays as it is.
    pub fn connect_data(
        &self,
        address: SocketAddr,
        private_data: &[u8],
        options: &Options,
    ) -> Result<DataLink, VerbsError> {
        let failed = system("sharing a completion queue");
        let queues = self.queues().ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        connect_on(Some(queues), address, private_data, self.lanes.all.len() as u16, options)
    }
}

fn connect_on(
    queues: Option<Queues>,
    address: SocketAddr,
    private_data: &[u8],
    lanes: u16,
    options: &Options,
) -> Result<DataLink, VerbsError> {
    check_request(private_data)?;
    let resolved = Resolved::new(address, options)?;
    if let Some(Queues { domain, .. }) = &queues
        && domain.device() != resolved.id.device()
    {
        let (device, other) = (domain.device_name(), resolved.id.device_name());
        return Err(VerbsError::SeveralDevices { address, device, other });
    }
    let limits = super::preflight::query(&resolved.id)?;
    if limits.atomic_cap == ffi::ibv_atomic_cap::IBV_ATOMIC_NONE {
        return Err(VerbsError::NoAtomics { device: resolved.id.device_name() });
    }
    let most = limits.max_qp_wr.min(limits.max_cqe).max(0) as u32;
    let sends = (u32::from(lanes) * CHAIN_VERBS_MAX as u32).clamp(SENDS_MIN, most.max(SENDS_MIN));
    let capacity = Capacity { sends, receives: 0, inline_bytes: INLINE_BYTES };
    let prepared = resolved.prepare(capacity, queues)?;
    let (domain, options) = (prepared.domain.clone(), *options);
    let depth = limits.max_qp_init_rd_atom.clamp(1, u8::MAX.into()) as u8;
    let prepared = Prepared { initiator_depth: depth, ..prepared };
    let connected = prepared.connect(private_data)?;
    Ok(DataLink { connected, domain, sends, lanes, options })
}

impl DataLink {
    /// What the server answered, with zeros behind it.
    pub fn reply(&self) -> &[u8] {
        &self.connected.reply
    }

    /// A fabric whose first region is the one that the answer describes.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`] when there is no registered memory for the lanes.
    pub fn into_fabric(self, region: RemoteRegion) -> Result<VerbsFabric, VerbsError> {
        VerbsFabric::new(self, region)
    }
}

/// An identifier that knows its device and the way to the peer.
struct Resolved {
    id: Arc<CmId>,
    waiting: WaitTimer,
    options: Options,
}

/// One with a queue pair. The fields drop in the order that events need: the queue pair first.
struct Prepared {
    queue_pair: Arc<QueuePair>,
    domain: Arc<ProtectionDomain>,
    initiator_depth: u8,
    waiting: WaitTimer,
    options: Options,
}

impl Resolved {
    fn new(address: SocketAddr, options: &Options) -> Result<Self, VerbsError> {
        let channel = EventChannel::new()?;
        let until = Instant::now() + options.connect_timeout;
        let waiting = WaitTimer { channel, address, until, most: options.connect_timeout };
        let id = CmId::new(&waiting.channel).map_err(system("making an RDMA-CM identifier"))?;
        let unreachable = |source| VerbsError::NoRoute { address, source };
        id.resolve_address(address, options.connect_timeout).map_err(unreachable)?;
        waiting.wait_for(kind::RDMA_CM_EVENT_ADDR_RESOLVED)?;
        id.set_ack_timeout(options).map_err(system("setting the ack timeout"))?;
        id.resolve_route(waiting.left()).map_err(unreachable)?;
        waiting.wait_for(kind::RDMA_CM_EVENT_ROUTE_RESOLVED)?;
        Ok(Self { id: Arc::new(id), waiting, options: *options })
    }

    /// With a domain and a completion queue of its own, or on those of a session.
    fn prepare(self, capacity: Capacity, queues: Option<Queues>) -> Result<Prepared, VerbsError> {
        let Self { id, waiting, options } = self;
        let Queues { domain, completions } = match queues {
            Some(queues) => queues,
            None => Queues {
                domain: Arc::new(ProtectionDomain::new(&id)?),
                completions: Arc::new(CompletionQueue::new(
                    &id,
                    capacity.sends + capacity.receives,
                )?),
            },
        };
        let queue_pair = Arc::new(QueuePair::new(&id, &domain, &completions, capacity)?);
        Ok(Prepared { queue_pair, domain, initiator_depth: 0, waiting, options })
    }
}

impl Prepared {
    fn connect(self, private_data: &[u8]) -> Result<Connected, VerbsError> {
        // SAFETY: a structure of numbers and a pointer.
        let mut parameters = unsafe { ffi::zeroed::<ffi::rdma_conn_param>() };
        parameters.private_data = private_data.as_ptr().cast();
        parameters.private_data_len = private_data.len() as u8;
        parameters.initiator_depth = self.initiator_depth;
        // The peer never READs from here.
        parameters.responder_resources = 0;
        parameters.retry_count = self.options.retries();
        parameters.rnr_retry_count = RECEIVER_RETRIES;
        self.queue_pair.id().connect(&mut parameters).map_err(system("connecting"))?;
        let reply = self.waiting.wait_for(kind::RDMA_CM_EVENT_ESTABLISHED)?;
        let Self { queue_pair, waiting, .. } = self;
        Ok(Connected { queue_pair, events: waiting.channel, reply })
    }
}

/// Waits for one event after the other, until one deadline for all.
struct WaitTimer {
    channel: Arc<EventChannel>,
    address: SocketAddr,
    until: Instant,
    most: Duration,
}

impl WaitTimer {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Returns the event's private data.
    fn wait_for(&self, wanted: kind::Type) -> Result<Vec<u8>, VerbsError> {
        let failed = || system("waiting for RDMA-CM");
        loop {
            if let Some(event) = self.channel.next().map_err(failed())? {
                if event.kind() == wanted {
                    return Ok(event.private_data().to_vec());
                }
                return Err(self.refusal(&event));
            }
            let left = self.left();
            if left.is_zero() {
                return Err(VerbsError::TimedOut { address: self.address, after: self.most });
            }
            let channel: &EventChannel = &self.channel;
            let timeout = Timespec::try_from(left).ok();
            let mut polled = [PollFd::new(channel, PollFlags::IN)];
            match poll(&mut polled, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed()(error.into())),
            }
        }
    }

    fn refusal(&self, event: &Event<'_>) -> VerbsError {
        let (address, status) = (self.address, event.status());
        let source = io::Error::from_raw_os_error(status.saturating_abs());
        match event.kind() {
            // Linux refuses in the name of a program that ends before it answers, and says nothing.
            kind::RDMA_CM_EVENT_REJECTED
                if status == REJECTED_BY_PROGRAM
                    && event.private_data().iter().any(|byte| *byte != 0) =>
            {
                VerbsError::Rejected { address, reason: event.private_data().to_vec() }
            }
            kind::RDMA_CM_EVENT_REJECTED => VerbsError::NobodyListens { address },
            kind::RDMA_CM_EVENT_UNREACHABLE | kind::RDMA_CM_EVENT_DISCONNECTED => {
                VerbsError::TimedOut { address, after: self.most.saturating_sub(self.left()) }
            }
            _ => VerbsError::NoRoute { address, source },
        }
    }
}

/// What a client says first has to fit into RDMA-CM's private data.
pub(super) fn check_request(private_data: &[u8]) -> Result<(), VerbsError> {
    check_bytes(private_data, REQUEST_BYTES_MAX)
}

pub(super) fn check_bytes(private_data: &[u8], max: usize) -> Result<(), VerbsError> {
    let bytes = private_data.len();
    if bytes > max { Err(VerbsError::PrivateData { bytes, max }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_is_bounded() {
        assert!(check_request(&[0; REQUEST_BYTES_MAX]).is_ok());
        assert!(check_request(&[0; REQUEST_BYTES_MAX + 1]).is_err());
    }
}
