//! How long a call goes on reconnecting.

use std::time::{Duration, Instant};

use crate::client::Shared;
use crate::{Contact, Result};

/// How often one call reconnects at least; it goes on until the timeout for connecting is over.
const RECONNECTS_MIN: u32 = 3;
/// Backoff before reconnect attempt n is n times this. The first attempt does not wait.
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);
const RECONNECT_PAUSE_MAX: Duration = Duration::from_millis(250);

/// How often a call lost its connection.
#[derive(Default)]
pub(crate) struct ReconnectBudget {
    first_at: Option<Instant>,
    count: u32,
}

impl ReconnectBudget {
    /// For how long there was no connection that lasted.
    pub(crate) fn lasted(&self) -> Duration {
        self.first_at.map_or(Duration::ZERO, |first| first.elapsed())
    }

    /// One more; the error if that is enough.
    pub(crate) fn add(&mut self, shared: &Shared) -> Result<()> {
        self.first_at.get_or_insert_with(Instant::now);
        self.count += 1;
        if self.count >= RECONNECTS_MIN && self.lasted() >= shared.connect_timeout() {
            return Err(shared.unreachable(Contact::Lost, self.lasted()));
        }
        std::thread::sleep((RECONNECT_PAUSE * (self.count - 1)).min(RECONNECT_PAUSE_MAX));
        Ok(())
    }
}
