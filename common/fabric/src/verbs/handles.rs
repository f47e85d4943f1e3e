//! Handles of libibverbs and librdmacm that clean up after themselves.
//!
//! A handle holds an [`Arc`] of the handle that it was made from. So objects of the C libraries are
//! destroyed in the only order that they allow, whatever Rust drops first. Both libraries may be
//! called from any thread; every handle is thread-safe by their documentation.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use super::ffi::{self, cm, constructed, ibv, polled, system};
use super::identifier::CmId;
use crate::rdma::VerbsError;

/// What separates the memory of one role from that of another: a queue pair reaches only memory
/// registered in its own domain.
pub(super) struct ProtectionDomain {
    raw: NonNull<ffi::ibv_pd>,
    /// Keeps the device's context open.
    id: Arc<CmId>,
}

// SAFETY: libibverbs synchronizes access to a domain.
unsafe impl Send for ProtectionDomain {}
// SAFETY: likewise.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// A domain on the device that `id` is bound to.
    pub(super) fn new(id: &Arc<CmId>) -> Result<Self, VerbsError> {
        let doing = "making a protection domain";
        let context = id.device().ok_or(VerbsError::OtherDevice)?;
        // SAFETY: the context is open as long as `id` lives.
        let raw = unsafe { ffi::ibv_alloc_pd(context.as_ptr()) };
        Ok(Self { raw: constructed(raw).map_err(system(doing))?, id: id.clone() })
    }

    /// What the device is called.
    pub(super) fn device_name(&self) -> String {
        self.id.device_name()
    }

    /// The device.
    pub(super) fn device(&self) -> Option<NonNull<ffi::ibv_context>> {
        self.id.device()
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: whatever was made in the domain holds an `Arc` of it, so nothing is left.
        let _ = unsafe { ffi::ibv_dealloc_pd(self.raw()) };
    }
}

/// Memory that a device may access.
pub(super) struct MemoryRegion {
    raw: NonNull<ffi::ibv_mr>,
    _domain: Arc<ProtectionDomain>,
}

// SAFETY: libibverbs synchronizes access to a region.
unsafe impl Send for MemoryRegion {}
// SAFETY: likewise.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory. Slow, and it pins every page: never on the data path.
    ///
    /// # Safety
    /// The memory must stay mapped until this is dropped, and whatever else accesses it must
    /// expect `access` by the device at any time.
    pub(super) unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        start: *mut u8,
        bytes: usize,
        access: ffi::ibv_access_flags,
    ) -> Result<Self, VerbsError> {
        // SAFETY: the domain is alive, and the caller answers for the memory.
        let raw = unsafe {
            ffi::ibv_reg_mr(domain.raw(), start.cast::<c_void>(), bytes, access.0 as c_int)
        };
        let raw = constructed(raw).map_err(|source| match source.kind() {
            io::ErrorKind::OutOfMemory => {
                VerbsError::Memlock { bytes, limit: memlock_text(), source }
            }
            _ => VerbsError::System { doing: "registering memory", source },
        })?;
        Ok(Self { raw, _domain: domain.clone() })
    }

    /// The key of local work requests.
    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: registered and not yet dropped.
        unsafe { self.raw.as_ref() }.lkey
    }

    /// The key that peers present.
    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: registered and not yet dropped.
        unsafe { self.raw.as_ref() }.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: made by ibv_reg_mr and dropped once.
        let _ = unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// How much memory this process may pin, to be read.
fn memlock_text() -> String {
    match rustix::process::getrlimit(rustix::process::Resource::Memlock).current {
        Some(bytes) => format!("the limit is {bytes} bytes in all"),
        None => "though there is no limit".to_owned(),
    }
}

/// Wakes the thread that sleeps for completions.
struct CompletionChannel {
    raw: NonNull<ffi::ibv_comp_channel>,
    _id: Arc<CmId>,
}

impl CompletionChannel {
    fn new(id: &Arc<CmId>, context: NonNull<ffi::ibv_context>) -> io::Result<Self> {
        // SAFETY: the context is open as long as `id` lives.
        let raw = unsafe { ffi::ibv_create_comp_channel(context.as_ptr()) };
        let channel = Self { raw: constructed(raw)?, _id: id.clone() };
        rustix::io::ioctl_fionbio(channel.fd(), true)?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: made by ibv_create_comp_channel and not yet dropped.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: the channel owns the descriptor and outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: its only completion queue was dropped before it.
        let _ = unsafe { ffi::ibv_destroy_comp_channel(self.raw.as_ptr()) };
    }
}

/// Where a queue pair's completions arrive, with a channel of its own to sleep on.
pub(super) struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    channel: CompletionChannel,
}

// SAFETY: libibverbs synchronizes access to a queue and its channel.
unsafe impl Send for CompletionQueue {}
// SAFETY: likewise.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue for at least this many completions.
    pub(super) fn new(id: &Arc<CmId>, completions: u32) -> Result<Self, VerbsError> {
        let context = id.device().ok_or(VerbsError::OtherDevice)?;
        let doing = "making a completion queue";
        let channel = CompletionChannel::new(id, context).map_err(system(doing))?;
        let count = completions.min(i32::MAX as u32) as c_int;
        // SAFETY: context and channel are alive; the channel is dropped after the queue.
        let raw = unsafe {
            ffi::ibv_create_cq(context.as_ptr(), count, null_mut(), channel.raw.as_ptr(), 0)
        };
        Ok(Self { raw: constructed(raw).map_err(system(doing))?, channel })
    }

    /// Takes completions; returns how many.
    #[inline]
    pub(super) fn poll(&self, into: &mut [ffi::ibv_wc]) -> io::Result<usize> {
        // SAFETY: the queue is alive and `into` has room for as many as it says.
        polled(unsafe { ffi::ibv_poll_cq(self.raw.as_ptr(), into.len() as i32, into.as_mut_ptr()) })
    }

    /// Asks for one wakeup at the next completion. Completions that are already there cause none:
    /// poll once more before sleeping.
    pub(super) fn request_wakeup(&self) -> io::Result<()> {
        // SAFETY: the queue is alive.
        ibv(unsafe { ffi::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }

    /// Takes all wakeups from the channel, so that its descriptor is no longer readable.
    pub(super) fn take_wakeups(&self) -> io::Result<()> {
        loop {
            let (mut queue, mut context) = (null_mut(), null_mut());
            // SAFETY: the channel is alive and both targets are writable.
            let taken = cm(unsafe {
                ffi::ibv_get_cq_event(self.channel.raw.as_ptr(), &raw mut queue, &raw mut context)
            });
            match taken {
                // SAFETY: the event was for this channel's only queue, which is alive.
                Ok(()) => unsafe { ffi::ibv_ack_cq_events(self.raw.as_ptr(), 1) },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }
}

/// Readable when there is a wakeup.
impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold an `Arc` of it, so none uses it; all its events were acked.
        let _ = unsafe { ffi::ibv_destroy_cq(self.raw.as_ptr()) };
    }
}

/// What a queue pair has to hold.
#[derive(Clone, Copy)]
pub(super) struct Capacity {
    pub(super) sends: u32,
    pub(super) receives: u32,
    pub(super) inline_bytes: u32,
}

/// A reliable connected queue pair. Destroyed when dropped, which ends everything under way on it:
/// the peer's verbs find no queue pair any more.
pub(super) struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    inline_bytes: u32,
    id: Arc<CmId>,
    _domain: Arc<ProtectionDomain>,
    completions: Arc<CompletionQueue>,
}

// SAFETY: libibverbs synchronizes access to a queue pair.
unsafe impl Send for QueuePair {}
// SAFETY: likewise.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// A queue pair on `id`, with half of the inline bytes asked for where the device has not as
    /// much room, and so on.
    pub(super) fn new(
        id: &Arc<CmId>,
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        mut asked: Capacity,
    ) -> Result<Self, VerbsError> {
        loop {
            // SAFETY: a structure of numbers and pointers.
            let mut attributes = unsafe { ffi::zeroed::<ffi::ibv_qp_init_attr>() };
            attributes.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
            attributes.send_cq = completions.raw();
            attributes.recv_cq = completions.raw();
            attributes.cap.max_send_wr = asked.sends;
            attributes.cap.max_recv_wr = asked.receives;
            attributes.cap.max_send_sge = 1;
            attributes.cap.max_recv_sge = 1;
            attributes.cap.max_inline_data = asked.inline_bytes;
            // SAFETY: id, domain and queue are alive and of the same device.
            let made =
                cm(unsafe { ffi::rdma_create_qp(id.raw(), domain.raw(), &raw mut attributes) });
            match made {
                Ok(()) => {
                    let raw = constructed(id.queue_pair()).map_err(system(MAKING))?;
                    let (inline_bytes, completions) = (asked.inline_bytes, completions.clone());
                    let (id, domain) = (id.clone(), domain.clone());
                    return Ok(Self { raw, inline_bytes, id, _domain: domain, completions });
                }
                Err(_) if asked.inline_bytes > 0 => asked.inline_bytes /= 2,
                Err(source) => return Err(VerbsError::System { doing: MAKING, source }),
            }
        }
    }

    /// How much a work request may carry itself.
    pub(super) fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    pub(super) fn completions(&self) -> &Arc<CompletionQueue> {
        &self.completions
    }

    pub(super) fn id(&self) -> &Arc<CmId> {
        &self.id
    }

    /// Rings the doorbell for a list of work requests.
    ///
    /// # Safety
    /// The list must be well-formed and end in null. The memory that its scatter/gather entries
    /// name, unless inline, must stay as it is until the completion.
    #[inline]
    pub(super) unsafe fn post_sends(&self, first: *mut ffi::ibv_send_wr) -> io::Result<()> {
        let mut bad = null_mut();
        // SAFETY: the queue pair is alive, and the caller answers for the list.
        ibv(unsafe { ffi::ibv_post_send(self.raw.as_ptr(), first, &raw mut bad) })
    }

    /// Offers one buffer to the peer's SENDs.
    ///
    /// # Safety
    /// The memory that the request names must stay valid until its completion, and nothing else may
    /// use it until then.
    pub(super) unsafe fn post_receive(&self, request: *mut ffi::ibv_recv_wr) -> io::Result<()> {
        let mut bad = null_mut();
        // SAFETY: the queue pair is alive, and the caller answers for the request.
        ibv(unsafe { ffi::ibv_post_recv(self.raw.as_ptr(), request, &raw mut bad) })
    }

    /// Changes attributes of a connected queue pair.
    pub(super) fn modify(
        &self,
        attributes: &mut ffi::ibv_qp_attr,
        mask: ffi::ibv_qp_attr_mask,
    ) -> Result<(), VerbsError> {
        // SAFETY: the queue pair is alive and the structure is valid for the call.
        let modified =
            unsafe { ffi::ibv_modify_qp(self.raw.as_ptr(), attributes, mask.0 as c_int) };
        ibv(modified).map_err(system("setting up a queue pair"))
    }

    /// Ends the connection: both sides' work under way completes with an error.
    pub(super) fn disconnect(&self) {
        self.id.disconnect();
    }
}

const MAKING: &str = "making a queue pair";

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by rdma_create_qp on this id, which has one queue pair in its life.
        unsafe { ffi::rdma_destroy_qp(self.id.raw()) };
    }
}
