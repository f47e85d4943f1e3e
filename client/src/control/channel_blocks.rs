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
        self.queue.send(Request::GiveHeads { class, blocks }, Waiter::None);
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
