//! The requests of an operator, and the wait for their answers.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use farside_control::{ConnectedClient, HotBlock, Request, ServerMessage, ServerStatistics};

use super::{Control, Waiter, lock};

/// Timeout of a request of an operator.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Holds the answer to one request of an operator.
#[derive(Default)]
pub(super) struct ReplyCell {
    answer: Mutex<Option<ServerMessage>>,
    answered: Condvar,
}

impl ReplyCell {
    /// Gives the waiter this answer.
    pub(super) fn fill(&self, answer: ServerMessage) {
        *lock(&self.answer) = Some(answer);
        self.answered.notify_all();
    }

    /// Has the waiter find out that the connection is lost.
    pub(super) fn wake(&self) {
        // Under the lock, so that the waiter cannot miss this between its check and its sleep.
        let _answer = lock(&self.answer);
        self.answered.notify_all();
    }
}

impl Control {
    /// Returns the server's statistics; `None` if it did not answer.
    pub(crate) fn statistics(&self) -> Option<ServerStatistics> {
        self.ask_for_statistics(Request::Statistics)
    }

    /// Has the server search for lost blocks. Returns its statistics from before the search; `None`
    /// if it did not answer.
    pub(crate) fn collect(&self) -> Option<ServerStatistics> {
        self.ask_for_statistics(Request::Collect)
    }

    fn ask_for_statistics(&self, request: Request) -> Option<ServerStatistics> {
        self.ask(request, |answer| match answer {
            ServerMessage::Statistics(statistics) => Some(statistics),
            _ => None,
        })
    }

    /// Returns the server's clients; `None` if it did not answer.
    pub(crate) fn clients(&self) -> Option<Vec<ConnectedClient>> {
        let (mut all, mut from_id) = (Vec::new(), 0);
        loop {
            let (last, clients) =
                self.ask(Request::Clients { from_id }, |answer| match answer {
                    ServerMessage::Clients { last, clients } => Some((last, clients)),
                    _ => None,
                })?;
            let highest = clients.last().map(|client| client.id);
            all.extend(clients);
            match highest.and_then(|id| id.checked_add(1)) {
                // The ids rise, so this ends, whatever the server sends.
                Some(next) if !last && next > from_id => from_id = next,
                _ => return Some(all),
            }
        }
    }

    /// Has the server disconnect a client. Returns whether it was connected; `None` if the server
    /// did not answer.
    pub(crate) fn kick(&self, client_id: u16) -> Option<bool> {
        self.ask(Request::Kick { client_id }, |answer| match answer {
            ServerMessage::Kicked { was_connected } => Some(was_connected),
            _ => None,
        })
    }

    /// Returns how many reads the server has samples of, and the blocks that were read most; `None`
    /// if it did not answer. The server samples for the given time.
    pub(crate) fn hot_blocks(&self, for_ms: u32) -> Option<(u64, Vec<HotBlock>)> {
        self.ask(Request::Hot { for_ms }, |answer| match answer {
            ServerMessage::Hot { samples, blocks } => Some((samples, blocks)),
            _ => None,
        })
    }

    /// Returns what `expected` finds in the answer to a request. If that is nothing, the server
    /// breaks the protocol, and the connection is given up.
    fn ask<T>(
        &self,
        request: Request,
        expected: impl FnOnce(ServerMessage) -> Option<T>,
    ) -> Option<T> {
        let cell = Arc::new(ReplyCell::default());
        self.queue.send(request, Waiter::Operator(cell.clone()));
        let answer = lock(&cell.answer);
        let (mut answer, _) = cell
            .answered
            .wait_timeout_while(answer, ANSWER_TIMEOUT, |answer| {
                answer.is_none() && !self.is_lost()
            })
            .unwrap_or_else(PoisonError::into_inner);
        let found = expected(answer.take()?);
        if found.is_none() {
            self.give_up();
        }
        found
    }
}
