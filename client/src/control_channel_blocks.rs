//! A session's way to the server's depot, over its client's control channel. Also what the control
//! thread does with a session's blocks when the server asks for them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use farside_control::{FreeBlock, Request};
use farside_layout::{BlockAddress, SizeClass};

use farside_protocol::Prefix;
use farside_protocol::allocator::{BlockDelivery, BlockSource, Delivery, give_drained};
use farside_protocol::held_blocks::HeldBlocks;

use crate::control::{ControlQueue, Waiter, lock};

/// Answers on their way to a session.
#[derive(Default)]
pub(crate) struct Inbox {
    waiting: AtomicUsize,
    deliveries: Mutex<Deliveries>,
}

#[derive(Default)]
struct Deliveries {
    answers: VecDeque<Delivery>,
    /// The session has ended: what comes now goes back.
    closed: bool,
}

/// A session as the control thread sees it.
pub(crate) struct ReportingSession {
    held: Arc<HeldBlocks>,
    inbox: Arc<Inbox>,
}

/// A session's way to the server's depot.
pub(crate) struct ControlChannelBlocks {
    queue: Arc<ControlQueue>,
    inbox: Arc<Inbox>,
}

impl ControlChannelBlocks {
    pub(crate) fn new(queue: Arc<ControlQueue>) -> Self {
        Self { queue, inbox: Arc::default() }
    }
}

impl BlockSource for ControlChannelBlocks {
    fn watch(&mut self, held: &Arc<HeldBlocks>) {
        let watched = ReportingSession { held: held.clone(), inbox: self.inbox.clone() };
        lock(&self.queue.sessions).push(watched);
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
        if self.inbox.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let delivery = lock(&self.inbox.deliveries).answers.pop_front()?;
        self.inbox.waiting.fetch_sub(1, Ordering::AcqRel);
        Some(delivery)
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        self.queue.give(class, rested, blocks);
    }

    fn announce_ends(&mut self) {
        self.queue.send(Request::Expires, Waiter::None);
    }

    fn is_lost(&self) -> bool {
        self.queue.is_lost()
    }
}

impl Drop for ControlChannelBlocks {
    /// What was delivered too late for the session goes back, now and later. Under the lock, so
    /// that no report comes between the taking out and the giving back.
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
    /// Hands an answer over, or gives its blocks back if the session has ended.
    pub(crate) fn deliver(&self, delivery: Delivery, queue: &ControlQueue) {
        let mut deliveries = lock(&self.deliveries);
        if !deliveries.closed {
            deliveries.answers.push_back(delivery);
            self.waiting.fetch_add(1, Ordering::AcqRel);
        } else {
            queue.give_back(delivery);
        }
    }
}

impl ReportingSession {
    /// Every block the session has: delivered, in lists, in hands.
    fn report(&self, into: &mut Vec<BlockAddress>) {
        let lists = self.held.lists();
        into.extend(lists.addresses());
        let deliveries = lock(&self.inbox.deliveries);
        for delivery in &deliveries.answers {
            if let Delivery::Blocks(delivered) = delivery {
                into.extend(delivered.blocks.iter().map(|block| block.address));
            }
        }
        into.extend(self.held.in_hands());
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

    /// Says what all sessions hold. Whatever was given back before is in the outbox before this.
    pub(crate) fn report(&self, collection: u32) {
        let mut held = Vec::new();
        lock(&self.sessions).iter().for_each(|session| session.report(&mut held));
        Request::held(collection, &held).for_each(|message| self.send(message, Waiter::None));
    }

    /// Gives back what no session needs at this moment.
    pub(crate) fn give_spare(&self) {
        for session in &*lock(&self.sessions) {
            let mut lists = session.held.lists();
            give_drained(&mut lists, |class, rested, blocks| self.give(class, rested, blocks));
            // Also what an idle session has not even seen.
            for delivery in &mut lock(&session.inbox.deliveries).answers {
                if let Delivery::Blocks(BlockDelivery { class, rested, soon, blocks }) = delivery {
                    *soon |= !blocks.is_empty();
                    self.give(*class, *rested, std::mem::take(blocks));
                }
            }
        }
    }
}
