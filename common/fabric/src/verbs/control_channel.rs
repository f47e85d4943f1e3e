//! The control channel: messages both ways over a queue pair of its own, for threads that sleep.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::ffi::{self, ibv_send_flags, ibv_wc_status, ibv_wr_opcode, rdma_cm_event_type, system};
use super::handles::{Capacity, ProtectionDomain, QueuePair};
use super::identifier::EventChannel;
use super::memory::Registered;
use crate::rdma::{ConnectionId, VerbsError};
use crate::{ControlChannel, MESSAGE_BYTES_MAX};

/// Buffers for messages to come. A peer that sends more waits until one was taken.
const RECEIVES: usize = 4;
/// Buffers for messages that the peer's device has not taken.
const SENDS: usize = 4;
const SLOTS: usize = RECEIVES + SENDS;
/// What a probe is called among the slots.
const PROBE: usize = SLOTS;
/// Not more than this can be under way.
const UNDER_WAY_MAX: usize = SLOTS + 1;
/// 1.28 ms, in the table of the InfiniBand specification: how long a peer waits before it offers a
/// message again to a side that has no buffer ready. The default, 0, is 655 ms.
const RECEIVER_NOT_READY_TIMER: u8 = 14;

/// One end of a control channel over a queue pair. What was not taken does not make its descriptor
/// readable again.
pub struct VerbsChannel {
    queue_pair: Arc<QueuePair>,
    /// On the connecting side, where only this channel takes them.
    events: Option<Arc<EventChannel>>,
    /// Watches the completions and the events.
    watched: Option<OwnedFd>,
    /// Messages that arrived, by slot and length.
    arrived: VecDeque<(usize, usize)>,
    /// Slots that have nothing to send.
    idle: Vec<usize>,
    has_ended: bool,
    is_probing: bool,
    /// A probe was not answered.
    is_silent: bool,
    number: u64,
    /// After the queue pair, so that it is dropped later: no device uses it then.
    memory: Registered,
}

impl VerbsChannel {
    pub(super) const CAPACITY: Capacity =
        Capacity { sends: SENDS as u32 + 1, receives: RECEIVES as u32, inline_bytes: 0 };

    /// Ready for messages, before the connection is made.
    pub(super) fn new(
        queue_pair: Arc<QueuePair>,
        domain: Arc<ProtectionDomain>,
    ) -> Result<Self, VerbsError> {
        let memory = Registered::new(&domain, SLOTS * MESSAGE_BYTES_MAX)?;
        let channel = Self {
            queue_pair,
            events: None,
            watched: None,
            arrived: VecDeque::with_capacity(RECEIVES),
            idle: (RECEIVES..SLOTS).collect(),
            has_ended: false,
            is_probing: false,
            is_silent: false,
            number: 0,
            memory,
        };
        for slot in 0..RECEIVES {
            channel.offer(slot).map_err(system("preparing to receive"))?;
        }
        let wakeup = channel.queue_pair.completions().request_wakeup();
        wakeup.map_err(system("preparing to receive"))?;
        Ok(channel)
    }

    /// After the connection is made.
    pub(super) fn begin(&mut self, events: Option<Arc<EventChannel>>) -> Result<(), VerbsError> {
        // SAFETY: a structure of numbers.
        let mut attributes = unsafe { ffi::zeroed::<ffi::ibv_qp_attr>() };
        attributes.min_rnr_timer = RECEIVER_NOT_READY_TIMER;
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.queue_pair.modify(&mut attributes, mask)?;
        let Some(events) = events else { return Ok(()) };
        let doing = "watching the control channel";
        let failed = |error: rustix::io::Errno| system(doing)(error.into());
        let watched = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        for source in [self.queue_pair.completions().as_fd(), events.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&watched, source, data, epoll::EventFlags::IN).map_err(failed)?;
        }
        (self.events, self.watched) = (Some(events), Some(watched));
        Ok(())
    }

    pub(super) fn set_id(&mut self, id: ConnectionId) {
        self.number = id.0;
    }

    /// On the accepting side, the connection in a listener's events; 0 on the other.
    pub fn id(&self) -> ConnectionId {
        ConnectionId(self.number)
    }

    fn slot(&self, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS);
        // SAFETY: within the memory, which has that many slots.
        unsafe { self.memory.start().add(slot * MESSAGE_BYTES_MAX) }
    }

    fn entry(&self, slot: usize, bytes: usize) -> ffi::ibv_sge {
        let (addr, lkey) = (self.slot(slot) as u64, self.memory.lkey());
        ffi::ibv_sge { addr, length: bytes as u32, lkey }
    }

    /// Offers a slot to the peer's messages.
    fn offer(&self, slot: usize) -> io::Result<()> {
        let mut entry = self.entry(slot, MESSAGE_BYTES_MAX);
        let mut request = ffi::ibv_recv_wr {
            wr_id: slot as u64,
            next: null_mut(),
            sg_list: &raw mut entry,
            num_sge: 1,
        };
        // SAFETY: the slot lives as long as the queue pair, and is not looked at before its
        // completion. Providers copy the request.
        unsafe { self.queue_pair.post_receive(&raw mut request) }
    }
}

impl ControlChannel for VerbsChannel {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.is_empty() || message.len() > MESSAGE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if self.idle.is_empty() {
            self.look()?;
        }
        if self.has_ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let slot = self.idle.pop().ok_or(io::ErrorKind::WouldBlock)?;
        // SAFETY: the slot is as long as the longest message, and no device uses it: it was idle.
        unsafe { self.slot(slot).copy_from_nonoverlapping(message.as_ptr(), message.len()) };
        let mut entry = self.entry(slot, message.len());
        // SAFETY: a structure of numbers and pointers.
        let mut request = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
        request.wr_id = slot as u64;
        request.sg_list = &raw mut entry;
        request.num_sge = 1;
        request.opcode = ibv_wr_opcode::IBV_WR_SEND;
        request.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: a list of one; the slot stays as it is until its completion.
        unsafe { self.queue_pair.post_sends(&raw mut request) }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        if self.arrived.is_empty() {
            self.look()?;
        }
        let Some((slot, bytes)) = self.arrived.pop_front() else {
            return match self.is_silent {
                true => Err(io::ErrorKind::TimedOut.into()),
                false => Ok(self.has_ended.then_some(0)),
            };
        };
        let target = buffer.get_mut(..bytes);
        let fits = target.is_some();
        if let Some(target) = target {
            // SAFETY: the device filled this much of the slot and has it no more.
            let message = unsafe { std::slice::from_raw_parts(self.slot(slot), bytes) };
            target.copy_from_slice(message);
        }
        if !self.has_ended && self.offer(slot).is_err() {
            // The queue pair is ending. What arrived counts all the same.
            self.has_ended = true;
        }
        if fits { Ok(Some(bytes)) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    fn is_writable_with_room(&self) -> bool {
        false
    }

    /// A WRITE of no bytes. One at a time: while one is under way this does nothing. A peer that
    /// does not answer for as long as its side of the connection asked for is gone: see
    /// [`ControlChannel::receive`].
    fn probe(&mut self) -> io::Result<()> {
        if self.is_probing || self.has_ended {
            return Ok(());
        }
        // SAFETY: a structure of numbers and pointers.
        let mut request = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
        request.wr_id = PROBE as u64;
        request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        request.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: a list of one, without memory.
        unsafe { self.queue_pair.post_sends(&raw mut request) }?;
        self.is_probing = true;
        Ok(())
    }

    fn flush(&mut self, most: Duration) -> io::Result<()> {
        let until = Instant::now() + most;
        loop {
            self.look()?;
            if self.idle.len() == SENDS {
                return Ok(());
            }
            if self.has_ended {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let timeout = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(self, PollFlags::IN)], timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl VerbsChannel {
    /// Takes everything that completed, and asks to be woken for the next.
    fn look(&mut self) -> io::Result<()> {
        self.look_at_events()?;
        let completions = self.queue_pair.completions();
        completions.take_wakeups()?;
        // What completes before this is found below, what completes after it wakes.
        completions.request_wakeup()?;
        // SAFETY: structures of numbers.
        let mut taken: [ffi::ibv_wc; UNDER_WAY_MAX] =
            std::array::from_fn(|_| unsafe { ffi::zeroed::<ffi::ibv_wc>() });
        let count = completions.poll(&mut taken)?;
        for completion in &taken[..count] {
            let slot = completion.wr_id as usize;
            if completion.status != ibv_wc_status::IBV_WC_SUCCESS {
                self.has_ended = true;
                let unanswered = completion.status == ibv_wc_status::IBV_WC_RETRY_EXC_ERR;
                self.is_silent |= slot == PROBE && unanswered;
            } else if slot == PROBE {
                self.is_probing = false;
            } else if slot < RECEIVES {
                self.arrived.push_back((slot, completion.byte_len as usize));
            } else {
                self.idle.push(slot);
            }
        }
        Ok(())
    }

    fn look_at_events(&mut self) -> io::Result<()> {
        let Some(events) = &self.events else { return Ok(()) };
        while let Some(event) = events.next()? {
            let has_ended = matches!(
                event.kind(),
                rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED
                    | rdma_cm_event_type::RDMA_CM_EVENT_DEVICE_REMOVAL
            );
            if has_ended {
                // Hands back all buffers, behind the messages that arrived before.
                event.finish_disconnection();
            }
        }
        Ok(())
    }
}

impl AsFd for VerbsChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.watched {
            Some(watched) => watched.as_fd(),
            None => self.queue_pair.completions().as_fd(),
        }
    }
}

impl Drop for VerbsChannel {
    fn drop(&mut self) {
        // So that the peer hears of it even if another owner still has the identifier.
        self.queue_pair.disconnect();
    }
}
