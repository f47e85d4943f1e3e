//! Connecting, in steps. Each step consumes the value of the step before: [`Resolved`] has the
//! device, [`Prepared`] also a queue pair, and [`Connected`] also the peer's answer.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::control_channel::VerbsChannel;
use super::fabric::VerbsFabric;
use super::ffi::{self, rdma_cm_event_type as kind, system};
use super::handles::{Capacity, CompletionQueue, ProtectionDomain, QueuePair, wait_until_readable};
use super::identifier::{CmId, Event, EventChannel};
use super::link::{Connected, DataLink};
use crate::rdma::{ConnectionId, Options, VerbsError};
use crate::{CHAIN_VERBS_MAX, REQUEST_BYTES_MAX, Trust, interrupt};

/// IB_CM_REJ_CONSUMER_DEFINED: the peer's program refused the connection.
const REJECTED_BY_PROGRAM: i32 = 28;
/// The requested inline bytes: a block of a key and a value of about 200 bytes.
const INLINE_BYTES: u32 = 256;
/// A queue pair has room for at least one chain.
const SENDS_MIN: u32 = CHAIN_VERBS_MAX as u32;
/// The retries towards a receiver without a free buffer. 7 means forever, because a message on a
/// control channel waits until its peer has time. The data path needs no such buffers.
pub(super) const RECEIVER_RETRIES: u8 = 7;

/// Opens a control channel. Returns it with the server's reply, which is followed by zeros.
///
/// # Errors
/// [`VerbsError`]: [`VerbsError::Rejected`] if the server's program refuses the connection.
pub fn connect_control(
    address: SocketAddr,
    private_data: &[u8],
    options: &Options,
) -> Result<(VerbsChannel, Vec<u8>), VerbsError> {
    check_bytes(private_data, REQUEST_BYTES_MAX)?;
    let prepared = Resolved::new(address, options)?.prepare(VerbsChannel::CAPACITY, None)?;
    let (queue_pair, domain) = (prepared.queue_pair.clone(), prepared.domain.clone());
    let mut channel = VerbsChannel::new(queue_pair, domain, ConnectionId(0))?;
    let connected = prepared.connect(private_data, 0)?;
    channel.begin(Some(connected.events))?;
    Ok((channel, connected.reply))
}

/// Opens a data connection for a fabric of `lanes` lanes.
///
/// # Errors
/// [`VerbsError`]: [`VerbsError::Rejected`] if the server's program refuses the connection.
pub fn connect_data(
    address: SocketAddr,
    private_data: &[u8],
    lanes: u16,
    options: &Options,
) -> Result<DataLink, VerbsError> {
    connect_on(None, address, private_data, lanes, options)
}

impl VerbsFabric {
    /// Opens a data connection to a further region, through this fabric's device, with its
    /// protection domain and completion queue. Pass it to [`VerbsFabric::add_region`].
    ///
    /// # Errors
    /// [`VerbsError::SeveralDevices`] if the address is reached through another device, and the
    /// errors of [`connect_data`]. The fabric does not change.
    pub fn connect_data(
        &self,
        address: SocketAddr,
        private_data: &[u8],
        options: &Options,
    ) -> Result<DataLink, VerbsError> {
        let failed = || system("sharing a completion queue")(io::ErrorKind::BrokenPipe);
        let completions = self.completions.clone().ok_or_else(failed)?;
        let queues = Queues { domain: self.lanes.domain.clone(), completions };
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
    check_bytes(private_data, REQUEST_BYTES_MAX)?;
    let resolved = Resolved::new(address, options)?;
    if let Some(Queues { domain, .. }) = &queues
        && domain.id.device() != resolved.id.device()
    {
        let (device, other) = (domain.id.device_name(), resolved.id.device_name());
        return Err(VerbsError::SeveralDevices { address, device, other });
    }
    let limits = super::preflight::query(&resolved.id)?;
    if limits.atomic_cap == ffi::ibv_atomic_cap::IBV_ATOMIC_NONE {
        return Err(VerbsError::NoAtomics { device: resolved.id.device_name() });
    }
    let limit = limits.max_qp_wr.min(limits.max_cqe).max(0) as u32;
    let sends = (u32::from(lanes) * CHAIN_VERBS_MAX as u32).clamp(SENDS_MIN, limit.max(SENDS_MIN));
    let capacity = Capacity { sends, receives: 0, inline_bytes: INLINE_BYTES };
    let prepared = resolved.prepare(capacity, queues)?;
    let (domain, options) = (prepared.domain.clone(), *options);
    let depth = limits.max_qp_init_rd_atom.clamp(1, u8::MAX.into()) as u8;
    let connected = prepared.connect(private_data, depth)?;
    Ok(DataLink { connected, domain, sends, lanes, options, trust: Trust::forever() })
}

/// The queues of a session, which its queue pairs share.
struct Queues {
    domain: Arc<ProtectionDomain>,
    completions: Arc<CompletionQueue>,
}

/// An identifier with its device and the route to the peer.
struct Resolved {
    id: Arc<CmId>,
    waiting: CmEventWait,
    options: Options,
}

/// An identifier with a queue pair, which is dropped before the event channel.
struct Prepared {
    queue_pair: Arc<QueuePair>,
    domain: Arc<ProtectionDomain>,
    waiting: CmEventWait,
    options: Options,
}

impl Resolved {
    fn new(address: SocketAddr, options: &Options) -> Result<Self, VerbsError> {
        let channel = EventChannel::new()?;
        let until = Instant::now() + options.connect_timeout;
        let waiting = CmEventWait { channel, address, until, timeout: options.connect_timeout };
        let id = CmId::new(&waiting.channel).map_err(system("making an RDMA-CM identifier"))?;
        let unreachable = |source| VerbsError::NoRoute { address, source };
        id.resolve_address(address, options.connect_timeout).map_err(unreachable)?;
        waiting.wait_for(kind::RDMA_CM_EVENT_ADDR_RESOLVED)?;
        id.set_ack_timeout(options).map_err(system("setting the ack timeout"))?;
        id.resolve_route(waiting.left()).map_err(unreachable)?;
        waiting.wait_for(kind::RDMA_CM_EVENT_ROUTE_RESOLVED)?;
        Ok(Self { id: Arc::new(id), waiting, options: *options })
    }

    /// Adds a queue pair, with the queues of a session or new ones.
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
        Ok(Prepared { queue_pair, domain, waiting, options })
    }
}

impl Prepared {
    /// Connects, with up to `depth` READs and atomics in flight.
    fn connect(self, private_data: &[u8], depth: u8) -> Result<Connected, VerbsError> {
        // SAFETY: a structure of numbers and a pointer.
        let mut parameters = unsafe { ffi::zeroed::<ffi::rdma_conn_param>() };
        parameters.private_data = private_data.as_ptr().cast();
        parameters.private_data_len = private_data.len() as u8;
        parameters.initiator_depth = depth;
        // The peer posts no READ.
        parameters.responder_resources = 0;
        parameters.retry_count = self.options.retries();
        parameters.rnr_retry_count = RECEIVER_RETRIES;
        self.queue_pair.id.connect(&mut parameters).map_err(system("connecting"))?;
        let reply = self.waiting.wait_for(kind::RDMA_CM_EVENT_ESTABLISHED)?;
        let Self { queue_pair, waiting, .. } = self;
        Ok(Connected { queue_pair, events: waiting.channel, reply })
    }
}

/// Waits for the events of connecting, with one deadline for all.
struct CmEventWait {
    channel: Arc<EventChannel>,
    address: SocketAddr,
    until: Instant,
    timeout: Duration,
}

impl CmEventWait {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Waits for this kind of event. Returns the event's private data.
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
            if left.is_zero() || interrupt::gives_up() {
                return Err(VerbsError::TimedOut { address: self.address, after: self.timeout });
            }
            wait_until_readable(&*self.channel, left).map_err(failed())?;
        }
    }

    fn refusal(&self, event: &Event<'_>) -> VerbsError {
        let (address, status) = (self.address, event.status());
        let source = io::Error::from_raw_os_error(status.saturating_abs());
        match event.kind() {
            // If a program ends before it answers, Linux refuses the connection in its place,
            // without private data.
            kind::RDMA_CM_EVENT_REJECTED
                if status == REJECTED_BY_PROGRAM
                    && event.private_data().iter().any(|byte| *byte != 0) =>
            {
                VerbsError::Rejected { address, reason: event.private_data().to_vec() }
            }
            kind::RDMA_CM_EVENT_REJECTED => VerbsError::NoListener { address },
            kind::RDMA_CM_EVENT_UNREACHABLE | kind::RDMA_CM_EVENT_DISCONNECTED => {
                VerbsError::TimedOut { address, after: self.timeout.saturating_sub(self.left()) }
            }
            _ => VerbsError::NoRoute { address, source },
        }
    }
}

/// Refuses private data that RDMA-CM would not carry.
pub(super) fn check_bytes(private_data: &[u8], max: usize) -> Result<(), VerbsError> {
    let bytes = private_data.len();
    if bytes > max { Err(VerbsError::PrivateData { bytes, max }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_that_is_too_long_is_refused() {
        assert!(check_bytes(&[0; REQUEST_BYTES_MAX], REQUEST_BYTES_MAX).is_ok());
        assert!(check_bytes(&[0; REQUEST_BYTES_MAX + 1], REQUEST_BYTES_MAX).is_err());
    }
}
