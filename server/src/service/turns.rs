//! Turns of the control thread: what is accepted and answered before the thread looks again.
//!
//! Connections wait for their turn in one queue. Each gets a share and goes back to its end, so
//! that one with many requests delays another by a share at most. A turn ends after [`TURN_NS`]:
//! then the thread looks again at whether it is to stop, at the listener, and at its chores. A
//! connection that has not said what it is goes first; it has one message to say.

use std::io;
use std::os::fd::AsFd;

use farside_fabric::{Nanos, boot_time_ns};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;

use super::acceptor::Arrival;
use super::{EVENTS_MAX, FIRST_PEER, LISTENER, STOP, Service, watch};
use crate::error::{ServerError, system};
use crate::peer::{DisconnectReason, Peer};

/// How long messages are answered before the thread looks at everything else.
const TURN_NS: Nanos = 2_000_000;
/// How many messages of one connection are answered before others get their turn.
const MESSAGES_MAX: usize = 16;

impl Service {
    pub(super) fn serve(&mut self) -> Result<(), ServerError> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            events.clear();
            let timeout = self.timeout();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) => {}
                // No message was read, and this thread may have been stopped for long.
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(system("wait for clients")(error)),
            }
            let tokens = || events.iter().map(|event| event.data.u64());
            if tokens().any(|token| token == STOP) {
                return Ok(());
            }
            if tokens().any(|token| token == LISTENER) {
                self.accept();
            }
            for token in tokens().filter(|token| *token >= FIRST_PEER) {
                self.enqueue(token);
            }
            self.take_turn();
            self.do_chores()?;
        }
    }

    /// Takes what arrived where clients come in.
    fn accept(&mut self) {
        for _ in 0..self.acceptor.arrivals_max() {
            match self.acceptor.next() {
                Ok(None) => return,
                Ok(Some(Arrival::Stranger(stranger))) => self.add_stranger(stranger),
                Ok(Some(Arrival::Request(request))) => self.let_in(request),
                Ok(Some(Arrival::Established)) => {}
                Ok(Some(Arrival::Ended(id))) => self.hang_up(id),
                Err(error) => return self.pause_accepting(&error),
            }
        }
    }

    /// Answers those that wait, until none does or the turn is over.
    fn take_turn(&mut self) {
        let until = boot_time_ns().saturating_add(TURN_NS);
        while let Some(token) = self.queue.pop_front() {
            if let Some(peer) = self.peers.get_mut(&token) {
                peer.is_queued = false;
                self.listen_to(token);
            }
            if self.failed.is_some() || boot_time_ns() >= until {
                return;
            }
        }
    }

    /// A connection waits for its turn; once.
    fn enqueue(&mut self, token: u64) {
        let Some(peer) = self.peers.get_mut(&token).filter(|peer| !peer.is_queued) else { return };
        peer.is_queued = true;
        match peer.is_client() {
            true => self.queue.push_back(token),
            false => self.queue.push_front(token),
        }
    }

    /// Ends the connection of a client that did not answer. One that waits for its turn stays: its
    /// answer may be among the messages that the last turn did not take.
    pub(super) fn disconnect_silent(&mut self, token: u64, reason: &DisconnectReason) {
        if self.peers.get(&token).is_some_and(|peer| !peer.is_queued) {
            self.disconnect(token, reason);
        }
    }

    /// From here on the connection is watched.
    pub(super) fn add_peer(&mut self, peer: Peer) -> io::Result<u64> {
        let token = self.next_token;
        watch(&self.epoll, peer.as_fd(), token)?;
        self.next_token += 1;
        self.peers.insert(token, peer);
        Ok(token)
    }

    /// Sends what a connection waits for, and takes its messages and answers them.
    pub(super) fn listen_to(&mut self, token: u64) {
        for _ in 0..MESSAGES_MAX {
            let Some(peer) = self.peers.get_mut(&token) else { return };
            let outcome = peer.flush(&mut self.reply).and_then(|()| self.take_message(token));
            let more = outcome.and_then(|more| self.settle(token).map(|()| more));
            match more {
                Ok(true) => {}
                Ok(false) => return,
                Err(DisconnectReason::Goodbye) => return self.sign_off(token),
                // Not this client's fault; but no client can be served.
                Err(DisconnectReason::Failed(error)) => {
                    self.failed = Some(error);
                    return;
                }
                Err(reason) => return self.disconnect(token, &reason),
            }
        }
        // It has had its share; others come before the rest.
        self.enqueue(token);
    }
}
