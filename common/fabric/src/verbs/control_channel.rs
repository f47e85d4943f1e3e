//! The control channel over verbs: messages both ways over a queue pair of its own. A thread that
//! waits for a message sleeps.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::ffi::{self, ibv_send_flags, ibv_wc_status, ibv_wr_opcode, rdma_cm_event_type, system};
use super::handles::{Capacity, ProtectionDomain, QueuePair, wait_until_readable};
use super::identifier::EventChannel;
use super::local_memory::Registered;
use crate::rdma::{ConnectionId, VerbsError};
use crate::{ControlChannel, MESSAGE_BYTES_MAX};

/// Buffers for messages that arrive. A peer whose messages find none waits until one is free.
const RECEIVES: usize = 4;
/// Buffers for messages that the peer's device has not acknowledged.
const SENDS: usize = 4;
const SLOTS: usize = RECEIVES + SENDS;
/// The work request id of a probe. All other ids are numbers of slots.
const PROBE: usize = SLOTS;
/// Limit on work requests in flight: one for each slot, and a probe.
const IN_FLIGHT_MAX: usize = SLOTS + 1;
/// How long a peer waits before it repeats a message to a side that had no free buffer, as an index
/// into the table of the InfiniBand specification: 1.28 ms. The default, 0, is 655 ms.
const RECEIVER_NOT_READY_TIMER: u8 = 14;

/// One end of a control channel over a queue pair. A message makes the descriptor readable only
/// once, when it arrives.
pub struct VerbsChannel {
    queue_pair: Arc<QueuePair>,
    /// The connection's events, on the connecting side. On the accepting side the listener gets
    /// them.
    events: Option<Arc<EventChannel>>,
    /// Watches the completions and the events, on the connecting side.
    watched: Option<OwnedFd>,
    /// Messages that arrived: slot and length.
    arrived: VecDeque<(usize, usize)>,
    /// Slots for sending that are free.
    idle: Vec<usize>,
    has_ended: bool,
    is_probing: bool,
    /// Whether the peer did not answer a probe.
    is_silent: bool,
    id: ConnectionId,
    /// Declared after the queue pair, so that no device uses the memory when it is dropped.
    memory: Registered,
}

impl VerbsChannel {
    pub(super) const CAPACITY: Capacity =
        Capacity { sends: SENDS as u32 + 1, receives: RECEIVES as u32, inline_bytes: 0 };

    /// A channel that can receive, before the connection is made.
    pub(super) fn new(
        queue_pair: Arc<QueuePair>,
        domain: Arc<ProtectionDomain>,
        id: ConnectionId,
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
            id,
            memory,
        };
        for slot in 0..RECEIVES {
            channel.offer(slot).map_err(system("preparing to receive"))?;
        }
        let wakeup = channel.queue_pair.completions.request_wakeup();
        wakeup.map_err(system("preparing to receive"))?;
        Ok(channel)
    }

    /// Sets the channel up after the connection is made.
    pub(super) fn begin(&mut self, events: Option<Arc<EventChannel>>) -> Result<(), VerbsError> {
        // SAFETY: a structure of numbers.
        let mut attributes = unsafe { ffi::zeroed::<ffi::ibv_qp_attr>() };
        attributes.min_rnr_timer = RECEIVER_NOT_READY_TIMER;
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.queue_pair.modify(&mut attributes, mask)?;
        let Some(events) = events else { return Ok(()) };
        let failed = || system("watching the control channel");
        let watched = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed())?;
        for source in [self.queue_pair.completions.as_fd(), events.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&watched, source, data, epoll::EventFlags::IN).map_err(failed())?;
        }
        (self.events, self.watched) = (Some(events), Some(watched));
        Ok(())
    }

    /// The connection's number in the listener's events; 0 on the connecting side.
    pub fn id(&self) -> ConnectionId {
        self.id
    }

    fn slot(&self, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS);
        // SAFETY: the offset is within the memory, which has room for all slots.
        unsafe { self.memory.start().add(slot * MESSAGE_BYTES_MAX) }
    }

    fn entry(&self, slot: usize, bytes: usize) -> ffi::ibv_sge {
        let (addr, lkey) = (self.slot(slot) as u64, self.memory.lkey());
        ffi::ibv_sge { addr, length: bytes as u32, lkey }
    }

    /// Offers a slot for the peer's next message.
    fn offer(&self, slot: usize) -> io::Result<()> {
        let mut entry = self.entry(slot, MESSAGE_BYTES_MAX);
        let mut request = ffi::ibv_recv_wr {
            wr_id: slot as u64,
            next: null_mut(),
            sg_list: &raw mut entry,
            num_sge: 1,
        };
        // SAFETY: the slot lives as long as the queue pair, and is not read before its completion.
        // Providers copy the request.
        unsafe { self.queue_pair.post_receive(&raw mut request) }
    }
}

impl ControlChannel for VerbsChannel {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.is_empty() || message.len() > MESSAGE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if self.idle.is_empty() {
            self.take_completions()?;
        }
        if self.has_ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let slot = self.idle.pop().ok_or(io::ErrorKind::WouldBlock)?;
        // SAFETY: the slot has room for the longest message. It was idle, so no device uses it.
        unsafe { self.slot(slot).copy_from_nonoverlapping(message.as_ptr(), message.len()) };
        let mut entry = self.entry(slot, message.len());
        // SAFETY: a structure of numbers and pointers.
        let mut request = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
        request.wr_id = slot as u64;
        request.sg_list = &raw mut entry;
        request.num_sge = 1;
        request.opcode = ibv_wr_opcode::IBV_WR_SEND;
        request.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: a list of one request; the slot does not change until its completion.
        unsafe { self.queue_pair.post_sends(&raw mut request) }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        if self.arrived.is_empty() {
            self.take_completions()?;
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
            // SAFETY: the device has filled `bytes` bytes of the slot, and no longer uses it.
            let message = unsafe { std::slice::from_raw_parts(self.slot(slot), bytes) };
            target.copy_from_slice(message);
        }
        if !self.has_ended && self.offer(slot).is_err() {
            // The queue pair has failed. The message that arrived is still valid.
            self.has_ended = true;
        }
        if fits { Ok(Some(bytes)) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    fn signals_room_as_writable(&self) -> bool {
        false
    }

    /// Does nothing while another probe is in flight. If the peer's device does not answer in the
    /// time that the options allow, [`ControlChannel::receive`] reports it.
    fn probe(&mut self) -> io::Result<()> {
        if self.is_probing || self.has_ended {
            return Ok(());
        }
        self.queue_pair.post_probe(PROBE as u64)?;
        self.is_probing = true;
        Ok(())
    }

    fn flush(&mut self, timeout: Duration) -> io::Result<()> {
        let until = Instant::now() + timeout;
        loop {
            self.take_completions()?;
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
            wait_until_readable(self, left)?;
        }
    }
}

impl VerbsChannel {
    /// Takes all completions and events, and requests a wakeup for the next completion.
    fn take_completions(&mut self) -> io::Result<()> {
        self.take_events()?;
        let completions = &self.queue_pair.completions;
        completions.take_wakeups()?;
        // The poll below finds the completions that came before this request. Later ones cause a
        // wakeup.
        completions.request_wakeup()?;
        // SAFETY: structures of numbers.
        let mut taken: [ffi::ibv_wc; IN_FLIGHT_MAX] =
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

    fn take_events(&mut self) -> io::Result<()> {
        let Some(events) = &self.events else { return Ok(()) };
        while let Some(event) = events.next()? {
            let has_ended = matches!(
                event.kind(),
                rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED
                    | rdma_cm_event_type::RDMA_CM_EVENT_DEVICE_REMOVAL
            );
            if has_ended {
                // Ends all posted receives with an error, after the messages that have arrived.
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
            None => self.queue_pair.completions.as_fd(),
        }
    }
}

impl Drop for VerbsChannel {
    fn drop(&mut self) {
        // Notifies the peer even if the identifier still has another owner.
        self.queue_pair.id.disconnect();
    }
}
