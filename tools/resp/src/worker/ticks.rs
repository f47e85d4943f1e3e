//! What a worker does once a second: it ends connections that are overdue.

use std::time::Instant;

use super::{TICK, Worker};
use crate::connection::Overdue;

impl Worker {
    /// Ends the connections that are overdue, once a second.
    pub(super) fn tick(&mut self) {
        if self.ticked.elapsed() < TICK {
            return;
        }
        self.ticked = Instant::now();
        let idle_s_max = self.gateway().idle_s_max;
        let idle_ticks_max = (idle_s_max > 0).then_some(idle_s_max);
        let (mut stalled, mut last) = (0, None);
        for place in 0..self.connections.len() {
            let Some(Some(connection)) = self.connections.get_mut(place) else { continue };
            let overdue = connection.tick(idle_ticks_max);
            if overdue == Some(Overdue::Replies) {
                (stalled, last) = (stalled + 1, Some(connection.client.record.clone()));
            }
            connection.has_ended |= overdue.is_some();
            let was_delayed = std::mem::take(&mut connection.client.is_delayed);
            let goes_on = was_delayed || connection.is_paused && connection.reads_ahead();
            if connection.has_ended || was_delayed {
                self.touch(place);
            }
            if goes_on {
                self.list(place);
            }
        }
        if let Some(record) = last {
            let address = &record.address;
            tracing::warn!(
                "FS-065 closed a connection whose client sends requests and takes no replies \
                 address={address} others={}",
                stalled - 1
            );
        }
        let (wrong, address) = self.gateway().take_wrong_passwords();
        if wrong > 0 {
            let others = wrong - 1;
            tracing::warn!(
                "FS-066 a client gave a wrong password address={address} others={others}"
            );
        }
    }
}
