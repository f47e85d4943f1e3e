//! Handles of libibverbs and librdmacm that destroy their objects when they are dropped.
//!
//! A handle holds an [`Arc`] of the handle from which it was made. So the objects are destroyed in
//! the only order that the C libraries allow, in whichever order Rust drops the handles. Both
//! libraries may be called from any thread; every handle is thread-safe by their documentation.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ffi::{self, cm, constructed, ibv, polled, system};
use super::identifier::CmId;
use super::lanes::ENTRIES_PER_WORK;
use crate::interrupt;
use crate::rdma::VerbsError;

macro_rules! impl_send_and_sync {
    ($($handle:ty),*) => {$(
        // SAFETY: libibverbs synchronizes access to its objects.
        unsafe impl Send for $handle {}
        // SAFETY: likewise.
        unsafe impl Sync for $handle {}
    )*};
}

impl_send_and_sync!(ProtectionDomain, MemoryRegion, CompletionQueue, QueuePair);

/// A protection domain. A queue pair can access only memory that is registered in its own domain,
/// so each role has one.
pub(super) struct ProtectionDomain {
    raw: NonNull<ffi::ibv_pd>,
    /// An RDMA-CM identifier that is bound to the device. It keeps the device's context open.
    pub(super) id: Arc<CmId>,
}

impl ProtectionDomain {
    /// A domain on the device that `id` is bound to.
    pub(super) fn new(id: &Arc<CmId>) -> Result<Self, VerbsError> {
        let doing = "making a protection domain";
        let context = id.device().ok_or(VerbsError::OtherDevice)?;
        // SAFETY: the context is open as long as `id` lives.
        let raw = unsafe { ffi::ibv_alloc_pd(context.as_ptr()) };
        Ok(Self { raw: constructed(raw).map_err(system(doing))?, id: id.clone() })
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: every object of the domain holds an `Arc` of it, so none is left.
        let _ = unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// Memory that a device may access.
pub(super) struct MemoryRegion {
    raw: NonNull<ffi::ibv_mr>,
    _domain: Arc<ProtectionDomain>,
}

impl MemoryRegion {
    /// Registers memory. It is slow and pins every page, so it must not be on the data path.
    ///
    /// # Safety
    /// The memory must stay mapped until this is dropped. All code that accesses it must expect
    /// `access` by the device at any time.
    pub(super) unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        start: *mut u8,
        bytes: usize,
        access: ffi::ibv_access_flags,
    ) -> Result<Self, VerbsError> {
        // SAFETY: the domain is alive, and the caller guarantees the rest for the memory.
        let raw = unsafe {
            ffi::ibv_reg_mr(domain.raw.as_ptr(), start.cast::<c_void>(), bytes, access.0 as c_int)
        };
        let raw = constructed(raw).map_err(|source| match source.kind() {
            io::ErrorKind::OutOfMemory => {
                VerbsError::Memlock { bytes, limit: memlock_text(), source }
            }
            _ => VerbsError::System { doing: "registering memory", source },
        })?;
        Ok(Self { raw, _domain: domain.clone() })
    }

    /// The key for local work requests.
    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: the region is registered and not yet dropped.
        unsafe { self.raw.as_ref() }.lkey
    }

    /// The key for work requests of peers.
    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: the region is registered and not yet dropped.
        unsafe { self.raw.as_ref() }.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is from ibv_reg_mr and dropped once.
        let _ = unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// How much memory this process may pin, for people to read.
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
        // SAFETY: the channel is from ibv_create_comp_channel and not yet dropped.
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

/// A completion queue of one or more queue pairs, with a channel that wakes its thread.
pub(super) struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    channel: CompletionChannel,
}

impl CompletionQueue {
    /// A queue with room for at least `completions` completions.
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

    /// Takes completions from the queue. Returns their number.
    #[inline]
    pub(super) fn poll(&self, into: &mut [ffi::ibv_wc]) -> io::Result<usize> {
        // SAFETY: the queue is alive, and the call gets the length of `into`.
        polled(unsafe { ffi::ibv_poll_cq(self.raw.as_ptr(), into.len() as i32, into.as_mut_ptr()) })
    }

    /// Requests one wakeup at the next completion. Completions that have already arrived cause
    /// none, so poll once more before sleeping.
    pub(super) fn request_wakeup(&self) -> io::Result<()> {
        // SAFETY: the queue is alive.
        ibv(unsafe { ffi::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }

    /// Consumes all wakeups of the channel, so that its descriptor is no longer readable.
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
}

/// Readable when there is a wakeup.
impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold an `Arc` of the queue, so none uses it. `take_wakeups` has
        // acknowledged every event that it got.
        let _ = unsafe { ffi::ibv_destroy_cq(self.raw.as_ptr()) };
    }
}

/// Sleeps until the descriptor is readable, a signal arrives, or the timeout has passed, or for a
/// step of a call that its caller can end.
pub(super) fn wait_until_readable(source: &impl AsFd, timeout: Duration) -> io::Result<()> {
    let timeout = Timespec::try_from(interrupt::step(timeout)).ok();
    match poll(&mut [PollFd::new(source, PollFlags::IN)], timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The requested capacity of a queue pair.
#[derive(Clone, Copy)]
pub(super) struct Capacity {
    pub(super) sends: u32,
    pub(super) receives: u32,
    pub(super) inline_bytes: u32,
}

/// A reliable connected queue pair. Dropping it destroys it, which ends all its work in flight: no
/// verb of the peer is executed any more.
pub(super) struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    /// How many bytes a work request can carry inline.
    pub(super) inline_bytes: u32,
    pub(super) id: Arc<CmId>,
    _domain: Arc<ProtectionDomain>,
    pub(super) completions: Arc<CompletionQueue>,
}

impl QueuePair {
    /// A queue pair on `id`. If the device refuses the capacity, this halves the inline bytes until
    /// it does not.
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
            attributes.send_cq = completions.raw.as_ptr();
            attributes.recv_cq = completions.raw.as_ptr();
            attributes.cap.max_send_wr = asked.sends;
            attributes.cap.max_recv_wr = asked.receives;
            attributes.cap.max_send_sge = ENTRIES_PER_WORK as u32;
            attributes.cap.max_recv_sge = 1;
            attributes.cap.max_inline_data = asked.inline_bytes;
            // SAFETY: id, domain and queue are alive and of the same device.
            let made =
                unsafe { ffi::rdma_create_qp(id.raw(), domain.raw.as_ptr(), &raw mut attributes) };
            match cm(made) {
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

    /// Rings the doorbell for a list of work requests.
    ///
    /// # Safety
    /// The list must be well-formed and end in null. The memory of its scatter/gather entries must
    /// not change until the completion, unless it is sent inline.
    #[inline]
    pub(super) unsafe fn post_sends(&self, first: *mut ffi::ibv_send_wr) -> io::Result<()> {
        let mut bad = null_mut();
        // SAFETY: the queue pair is alive, and the caller guarantees the rest for the list.
        ibv(unsafe { ffi::ibv_post_send(self.raw.as_ptr(), first, &raw mut bad) })
    }

    /// Posts a probe: a WRITE of no bytes, which the peer's device acknowledges. The peer's
    /// processor does not notice it.
    pub(super) fn post_probe(&self, wr_id: u64) -> io::Result<()> {
        // SAFETY: a structure of numbers and pointers.
        let mut request = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
        request.wr_id = wr_id;
        request.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        request.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: a list of one request, without memory.
        unsafe { self.post_sends(&raw mut request) }
    }

    /// Offers one buffer to the peer's SENDs.
    ///
    /// # Safety
    /// The memory that the request names must stay valid until its completion. Until then only the
    /// device may use it.
    pub(super) unsafe fn post_receive(&self, request: *mut ffi::ibv_recv_wr) -> io::Result<()> {
        let mut bad = null_mut();
        // SAFETY: the queue pair is alive, and the caller guarantees the rest for the request.
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
}

const MAKING: &str = "making a queue pair";

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: the queue pair is from rdma_create_qp on this id, which never has a second one.
        unsafe { ffi::rdma_destroy_qp(self.id.raw()) };
    }
}
