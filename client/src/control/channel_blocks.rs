//! A session's access to the server's depot, over its client's control channel.
//!
//! The control thread also reports the blocks of all sessions, and gives back the spare ones, when
//! the server asks for that.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use farside_control::{FreeBlock, Request};
use farside_layout::{BlockAddress, SizeClass};

use farside_protocol::Prefix;
use farside_protocol::allocator::{BlockDelivery, BlockSource, Delivery, give_drained};
use farside_protocol::held_blocks::HeldBlocks;

use super::{ControlQueue, Waiter, lock};

/// Limit on the heads that wait for the next message. Their extents are of no use meanwhile.
const HEADS_QUEUED_MAX: usize = 16;

/// Answers that a session has not received yet.
#[derive(Default)]
pub(super) struct Inbox {
    /// The number of `answers`, so that a session can look for them without the lock.
    undelivered: AtomicUsize,
    deliveries: Mutex<Deliveries>,
}

#[derive(Default)]
struct Deliveries {
    answers: VecDeque<Delivery>,
    /// The session has ended: blocks that arrive from now on are given back.
    closed: bool,
}

/// A session as the control thread sees it.
pub(super) struct ReportingSession {
    held_blocks: Arc<HeldBlocks>,
    inbox: Arc<Inbox>,
}

/// A session's access to the server's depot.
pub(crate) struct ControlChannelBlocks {
    queue: Arc<ControlQueue>,
    inbox: Arc<Inbox>,
}

impl ControlChannelBlocks {
    pub(super) fn new(queue: Arc<ControlQueue>) -> Self {
        Self { queue, inbox: Arc::default() }
    }
}

impl BlockSource for ControlChannelBlocks {
    fn watch(&mut self, held_blocks: &Arc<HeldBlocks>) {
        let session =
            ReportingSession { held_blocks: held_blocks.clone(), inbox: self.inbox.clone() };
        lock(&self.queue.sessions).push(session);
    }

    fn request(&mut self, class: SizeClass, count: u32) {
        let waiter = Waiter::Session(self.inbox.clone());
        self.queue.send(Request::TakeBlocks { class, count }, waiter);
    }

    fn request_split(&mut self, prefix: Prefix) {
        let (directory_hash, local_depth) = (prefix.directory_hash(), prefix.local_depth);
        let waiter = Waiter::Session(self.inbox.clone());
        self.queue.send(Request::Split { directory_hash, local_depth }, waiter);
    }

    #[inline]
    fn receive(&mut self) -> Option<Delivery> {
        if self.inbox.undelivered.load(Ordering::Acquire) == 0 {
            return None;
        }
        let delivery = lock(&self.inbox.deliveries).answers.pop_front()?;
        self.inbox.undelivered.fetch_sub(1, Ordering::AcqRel);
        Some(delivery)
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        self.queue.give(class, rested, blocks);
    }

    fn give_heads(&mut self, class: SizeClass, blocks: Vec<FreeBlock>) {
        self.queue.give_heads(class, blocks);
    }

    fn announce_expiry(&mut self) {
        self.queue.send(Request::Expires, Waiter::None);
    }

    fn is_lost(&self) -> bool {
        self.queue.is_lost()
    }
}

impl Drop for ControlChannelBlocks {
    /// Gives back the blocks that the session has not received. Under the lock, so that no report
    /// misses a block that has left the inbox and is not yet in the outbox.
    fn drop(&mut self) {
        let mut deliveries = lock(&self.inbox.deliveries);
        deliveries.closed = true;
        for delivery in std::mem::take(&mut deliveries.answers) {
            self.queue.give_back(delivery);
        }
        drop(deliveries);
        let mut sessions = lock(&self.queue.sessions);
        sessions.retain(|session| !Arc::ptr_eq(&session.inbox, &self.inbox));
    }
}

impl Inbox {
    /// Puts an answer into the inbox, or gives its blocks back if the session has ended.
    pub(super) fn deliver(&self, delivery: Delivery, queue: &ControlQueue) {
        let mut deliveries = lock(&self.deliveries);
        if !deliveries.closed {
            deliveries.answers.push_back(delivery);
            self.undelivered.fetch_add(1, Ordering::AcqRel);
        } else {
            queue.give_back(delivery);
        }
    }
}

impl ReportingSession {
    /// Appends every block that the session has: in its lists, in its inbox, and those that its
    /// operations link or unlink. The lists stay locked meanwhile, so that no block moves from one
    /// of these to another unseen.
    fn report(&self, into: &mut Vec<BlockAddress>) {
        let lists = self.held_blocks.lists();
        into.extend(lists.addresses());
        let deliveries = lock(&self.inbox.deliveries);
        for delivery in &deliveries.answers {
            if let Delivery::Blocks(delivered) = delivery {
                into.extend(delivered.blocks.iter().map(|block| block.address));
            }
        }
        into.extend(self.held_blocks.held_by_lanes());
    }

    /// The number of blocks in the session's lists.
    pub(super) fn blocks_held(&self) -> u64 {
        self.held_blocks.lists().addresses().count() as u64
    }
}

impl ControlQueue {
    fn give_back(&self, delivery: Delivery) {
        if let Delivery::Blocks(BlockDelivery { class, rested, blocks, .. }) = delivery {
            self.give(class, rested, blocks);
        }
    }

    fn give(&self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        if !blocks.is_empty() {
            self.send(Request::GiveBlocks { class, rested, blocks }, Waiter::None);
        }
    }

    /// Gives heads with the next message, whatever it is about, so that no PUT or DELETE wakes the
    /// server. Each request for blocks comes after them. With [`HEADS_QUEUED_MAX`] they are sent.
    fn give_heads(&self, class: SizeClass, mut heads: Vec<FreeBlock>) {
        let mut outbox = lock(&self.outbox);
        let queued = match outbox.back_mut() {
            Some((Request::GiveHeads { class: of_last, blocks }, _)) if *of_last == class => {
                blocks.append(&mut heads);
                blocks.len()
            }
            _ => {
                let queued = heads.len();
                outbox.push_back((Request::GiveHeads { class, blocks: heads }, Waiter::None));
                queued
            }
        };
        drop(outbox);
        if queued >= HEADS_QUEUED_MAX {
            self.wake();
        }
    }

    /// Reports the blocks of all sessions. Blocks that were given back before are in the outbox
    /// ahead of the report.
    pub(super) fn report(&self, collection: u32) {
        let mut held = Vec::new();
        lock(&self.sessions).iter().for_each(|session| session.report(&mut held));
        Request::held(collection, &held).for_each(|message| self.send(message, Waiter::None));
    }

    /// Gives back the blocks that no session needs now.
    pub(super) fn give_spare(&self) {
        for session in &*lock(&self.sessions) {
            let mut lists = session.held_blocks.lists();
            give_drained(&mut lists, |class, rested, blocks| self.give(class, rested, blocks));
            // Also the blocks that an idle session has not received yet.
            for delivery in &mut lock(&session.inbox.deliveries).answers {
                if let Delivery::Blocks(BlockDelivery { class, rested, soon, blocks }) = delivery {
                    *soon |= !blocks.is_empty();
                    self.give(*class, *rested, std::mem::take(blocks));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::Trust;

    use super::*;

    #[test]
    fn heads_wait_for_the_next_message_and_go_ahead_of_it() {
        let queue = ControlQueue::new(Trust::forever()).unwrap();
        let is_woken = || rustix::io::read(&queue.wake, &mut [0; 8]).is_ok();
        let class = SizeClass::FIRST_HEAD;
        let heads = |count: usize| -> Vec<FreeBlock> {
            let head = |n: usize| FreeBlock { address: BlockAddress(64 * n as u32), generation: 1 };
            (0..count).map(head).collect()
        };
        let give =
            |count| heads(count).into_iter().for_each(|head| queue.give_heads(class, vec![head]));
        give(HEADS_QUEUED_MAX - 1);
        assert!(!is_woken());
        queue.send(Request::TakeBlocks { class, count: 1 }, Waiter::None);
        assert!(is_woken());
        give(HEADS_QUEUED_MAX);
        assert!(is_woken());
        let sent: Vec<_> = lock(&queue.outbox).drain(..).map(|(request, _)| request).collect();
        let expected = [
            Request::GiveHeads { class, blocks: heads(HEADS_QUEUED_MAX - 1) },
            Request::TakeBlocks { class, count: 1 },
            Request::GiveHeads { class, blocks: heads(HEADS_QUEUED_MAX) },
        ];
        assert_eq!(sent, expected);
    }
}
