//! RDMA-CM: event channels, their events, and connection identifiers.

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::addr::SocketAddrArg;

use super::ffi::{self, cm, constructed};
use crate::rdma::{Options, VerbsError};

/// RDMA_OPTION_ID and RDMA_OPTION_ID_ACK_TIMEOUT, which the bindings leave out.
pub(super) const OPTION_LEVEL_ID: c_int = 0;
pub(super) const OPTION_ACK_TIMEOUT: c_int = 3;
const FAMILY_V4: u16 = rustix::net::AddressFamily::INET.as_raw();
const FAMILY_V6: u16 = rustix::net::AddressFamily::INET6.as_raw();

/// Where RDMA-CM reports what happens to connections. Never blocks.
pub(super) struct EventChannel {
    raw: NonNull<ffi::rdma_event_channel>,
}

// SAFETY: librdmacm synchronizes access to a channel.
unsafe impl Send for EventChannel {}
// SAFETY: likewise.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    pub(super) fn new() -> Result<Arc<Self>, VerbsError> {
        // SAFETY: takes nothing.
        let raw = unsafe { ffi::rdma_create_event_channel() };
        let raw = constructed(raw).map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::ACCESS | Errno::PERM) => VerbsError::NoPermission { source },
            Some(Errno::NODEV | Errno::NOENT | Errno::NXIO) => VerbsError::NoDevice { source },
            _ => VerbsError::System { doing: "opening RDMA-CM", source },
        })?;
        let channel = Self { raw };
        rustix::io::ioctl_fionbio(channel.as_fd(), true)
            .map_err(|error| ffi::system("preparing RDMA-CM")(error.into()))?;
        Ok(Arc::new(channel))
    }

    /// The next event, if there is one.
    pub(super) fn next(&self) -> io::Result<Option<Event<'_>>> {
        let mut raw = null_mut();
        // SAFETY: the channel is alive and the target writable.
        match cm(unsafe { ffi::rdma_get_cm_event(self.raw.as_ptr(), &raw mut raw) }) {
            Ok(()) => Ok(Some(Event { raw: constructed(raw)?, _channel: self })),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// Readable when there is an event.
impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: made by rdma_create_event_channel and not yet dropped.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: the channel owns the descriptor and outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: identifiers hold an `Arc` of it, so none is left.
        unsafe { ffi::rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}

/// An event, acknowledged when dropped. An identifier must not be dropped while an event of it is
/// held: its destruction waits for the acknowledgement.
pub(super) struct Event<'c> {
    raw: NonNull<ffi::rdma_cm_event>,
    _channel: &'c EventChannel,
}

impl Event<'_> {
    fn raw(&self) -> &ffi::rdma_cm_event {
        // SAFETY: valid until it is acknowledged, in drop.
        unsafe { self.raw.as_ref() }
    }

    /// What happened: `RDMA_CM_EVENT_*`.
    pub(super) fn kind(&self) -> ffi::rdma_cm_event_type::Type {
        self.raw().event
    }

    /// A negative errno, or for a rejection its reason.
    pub(super) fn status(&self) -> c_int {
        self.raw().status
    }

    /// The identifier it is about; of a connection request, a new one that the caller now owns.
    pub(super) fn id(&self) -> *mut ffi::rdma_cm_id {
        self.raw().id
    }

    /// The number that [`CmId::set_number`] gave the identifier.
    pub(super) fn number(&self) -> u64 {
        // SAFETY: an identifier outlives its events that are not acknowledged.
        unsafe { (*self.raw().id).context }.addr() as u64
    }

    fn connection(&self) -> &ffi::rdma_conn_param {
        // SAFETY: identifiers here are of RDMA_PS_TCP, whose events have this member.
        unsafe { &self.raw().param.conn }
    }

    /// What the peer said, with zeros behind it.
    pub(super) fn private_data(&self) -> &[u8] {
        let connection = self.connection();
        if connection.private_data.is_null() {
            return &[];
        }
        let (start, bytes) = (connection.private_data.cast::<u8>(), connection.private_data_len);
        // SAFETY: librdmacm's own buffer, valid until the event is acknowledged.
        unsafe { std::slice::from_raw_parts(start, bytes.into()) }
    }

    /// How many READs and atomic verbs the peer wants to have in flight at most.
    pub(super) fn responder_resources(&self) -> u8 {
        self.connection().responder_resources
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: got from rdma_get_cm_event and acknowledged once.
        let _ = unsafe { ffi::rdma_ack_cm_event(self.raw.as_ptr()) };
    }
}

/// One end of a connection, or a listening address. Destroying it disconnects.
pub(super) struct CmId {
    raw: NonNull<ffi::rdma_cm_id>,
    _channel: Arc<EventChannel>,
}

// SAFETY: an identifier is memory of the process, with nothing of the thread that made it.
unsafe impl Send for CmId {}
// SAFETY: librdmacm does not synchronize access to the structure. The calls that write its fields
// (bind, resolve, listen, make a queue pair, connect, accept, number it) come from the thread that
// sets the connection up, before another one has it. After that its fields are only read, and
// `disconnect` is two calls into the kernel, which synchronizes those.
unsafe impl Sync for CmId {}

impl CmId {
    pub(super) fn new(channel: &Arc<EventChannel>) -> io::Result<Self> {
        let mut raw = null_mut();
        // SAFETY: the channel is alive, for `self` holds it, and the target writable.
        cm(unsafe {
            ffi::rdma_create_id(
                channel.raw.as_ptr(),
                &raw mut raw,
                null_mut(),
                ffi::rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        Ok(Self { raw: constructed(raw)?, _channel: channel.clone() })
    }

    /// Takes over the identifier of a connection request.
    ///
    /// # Safety
    /// `raw` must come from such an event of this channel, and nothing else may own it.
    pub(super) unsafe fn adopt(raw: NonNull<ffi::rdma_cm_id>, channel: &Arc<EventChannel>) -> Self {
        Self { raw, _channel: channel.clone() }
    }

    pub(super) fn raw(&self) -> *mut ffi::rdma_cm_id {
        self.raw.as_ptr()
    }

    /// The device it is bound to, if any. Open as long as `self` lives.
    pub(super) fn device(&self) -> Option<NonNull<ffi::ibv_context>> {
        // SAFETY: the identifier is alive.
        NonNull::new(unsafe { (*self.raw()).verbs })
    }

    /// The name of that device.
    pub(super) fn device_name(&self) -> String {
        let Some(context) = self.device() else { return "unknown".to_owned() };
        // SAFETY: open as long as the identifier lives.
        ffi::device_name(unsafe { context.as_ref() }.device)
    }

    /// Null before there is one.
    pub(super) fn queue_pair(&self) -> *mut ffi::ibv_qp {
        // SAFETY: the identifier is alive.
        unsafe { (*self.raw()).qp }
    }

    /// Names the identifier, for its events.
    pub(super) fn set_number(&self, number: u64) {
        let context = std::ptr::without_provenance_mut::<c_void>(number as usize);
        // SAFETY: the identifier is alive; the field is the user's, and no event of an identifier
        // that is being numbered is looked at elsewhere.
        unsafe { (*self.raw()).context = context };
    }

    /// Binds to a local address, whose device then is this identifier's.
    pub(super) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        with_raw(address, |raw| {
            // SAFETY: the identifier is alive, and the address only read.
            cm(unsafe { ffi::rdma_bind_addr(self.raw(), raw.cast()) })
        })
    }

    pub(super) fn listen(&self, backlog: c_int) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        cm(unsafe { ffi::rdma_listen(self.raw(), backlog) })
    }

    /// Starts to find the device that leads to an address.
    pub(super) fn resolve_address(&self, address: SocketAddr, most: Duration) -> io::Result<()> {
        let most = most.as_millis().min(i32::MAX as u128) as c_int;
        with_raw(address, |raw| {
            // SAFETY: the identifier is alive, and the address only read.
            cm(unsafe { ffi::rdma_resolve_addr(self.raw(), null_mut(), raw.cast(), most) })
        })
    }

    /// Starts to find the way there.
    pub(super) fn resolve_route(&self, most: Duration) -> io::Result<()> {
        let most = most.as_millis().min(i32::MAX as u128) as c_int;
        // SAFETY: the identifier is alive.
        cm(unsafe { ffi::rdma_resolve_route(self.raw(), most) })
    }

    /// How long the device is to wait for acknowledgements; before the connection is made.
    pub(super) fn set_ack_timeout(&self, options: &Options) -> io::Result<()> {
        let mut exponent = options.ack_exponent();
        let value = (&raw mut exponent).cast::<c_void>();
        // SAFETY: the option is one byte long, and only read.
        cm(unsafe {
            ffi::rdma_set_option(self.raw(), OPTION_LEVEL_ID, OPTION_ACK_TIMEOUT, value, 1)
        })
    }

    pub(super) fn connect(&self, parameters: &mut ffi::rdma_conn_param) -> io::Result<()> {
        // SAFETY: the identifier is alive; the caller's structure is valid for the call.
        cm(unsafe { ffi::rdma_connect(self.raw(), parameters) })
    }

    pub(super) fn accept(&self, parameters: &mut ffi::rdma_conn_param) -> io::Result<()> {
        // SAFETY: the identifier is alive; the caller's structure is valid for the call.
        cm(unsafe { ffi::rdma_accept(self.raw(), parameters) })
    }

    pub(super) fn reject(&self, reason: &[u8]) -> io::Result<()> {
        let start = reason.as_ptr().cast::<c_void>();
        // SAFETY: the identifier is alive; the bytes are only read. Callers check the length.
        cm(unsafe { ffi::rdma_reject(self.raw(), start, reason.len() as u8) })
    }

    /// Ends the connection, if there is one.
    pub(super) fn disconnect(&self) {
        disconnect(self.raw());
    }

    /// Where it is bound.
    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is alive, and its address does not change once it is bound.
        let route = unsafe { &(*self.raw()).route };
        let address = &route.addr.src_addr_union;
        // SAFETY: every family begins with these two fields.
        let family = unsafe { address.src_sin }.sin_family;
        match family {
            FAMILY_V4 => {
                // SAFETY: the family says that it is this one.
                let v4 = unsafe { address.src_sin };
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some((IpAddr::V4(ip), u16::from_be(v4.sin_port)).into())
            }
            FAMILY_V6 => {
                // SAFETY: the family says that it is this one.
                let v6 = unsafe { address.src_sin6 };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some((IpAddr::V6(ip), u16::from_be(v6.sin6_port)).into())
            }
            _ => None,
        }
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: owned, and its queue pair is gone, for that holds an `Arc` of it.
        let _ = unsafe { ffi::rdma_destroy_id(self.raw()) };
    }
}

/// Calls with the address as C has it.
fn with_raw<T>(address: SocketAddr, call: impl FnOnce(*mut c_void) -> T) -> T {
    // SAFETY: the pointer is not used after the call: callers hand it to functions that copy.
    unsafe { address.with_sockaddr(|raw, _| call(raw.cast_mut().cast())) }
}

/// Disconnects; what is not connected stays as it is.
fn disconnect(id: *mut ffi::rdma_cm_id) {
    // SAFETY: callers hold the identifier, or an event of it.
    let _ = unsafe { ffi::rdma_disconnect(id) };
}

impl Event<'_> {
    /// Completes the disconnection on this side: what is under way on the queue pair fails now
    /// and not after all retries.
    pub(super) fn finish_disconnection(&self) {
        disconnect(self.id());
    }
}
