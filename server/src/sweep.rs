//! What is left of clients that vanished: slots in the middle of an INSERT.

use farside_fabric::{ChainError, Nanos};

use crate::index::Index;
use crate::own_endpoint::OwnEndpoint;
use crate::walk::{Budget, Cursor};

/// How many subtables are looked through before the server looks after its clients again: 2 MiB.
const SUBTABLES_PER_STEP: usize = 256;

/// Walks the index for fenced clients, a step at a time.
#[derive(Default)]
pub(crate) struct Sweeper {
    /// Fenced clients, and from when on none of their verbs can take effect any more.
    waiting: Vec<(Nanos, u16)>,
    pass: Option<Pass>,
}

/// One walk, for all clients that were ready when it began.
struct Pass {
    clients: Vec<u16>,
    cursor: Cursor,
    cleared: u64,
}

impl Sweeper {
    /// A client was fenced just now and left without a goodbye; its verbs take effect for so long.
    pub(crate) fn add(&mut self, client: u16, now: Nanos, fence_delay_ns: Nanos) {
        self.waiting.push((now.saturating_add(fence_delay_ns), client));
    }

    /// When there is something to do; `None` for never.
    pub(crate) fn next_step_at(&self) -> Option<Nanos> {
        match self.pass {
            Some(_) => Some(0),
            None => self.waiting.iter().map(|(ready_at, _)| *ready_at).min(),
        }
    }

    /// Whether nothing is left to be done.
    pub(crate) fn is_done(&self) -> bool {
        self.pass.is_none() && self.waiting.is_empty()
    }

    /// Goes on a little; returns the clients of which nothing is left, once a walk is over.
    pub(crate) fn step(
        &mut self,
        index: &Index,
        own: &OwnEndpoint,
        now: Nanos,
    ) -> Result<Vec<u16>, ChainError> {
        let mut pass = self.pass.take().unwrap_or_else(|| {
            let ready = self.waiting.extract_if(.., |(ready_at, _)| *ready_at <= now);
            let clients = ready.map(|(_, client)| client).collect();
            Pass { clients, cursor: Cursor::default(), cleared: 0 }
        });
        if pass.clients.is_empty() {
            return Ok(Vec::new());
        }
        let mut walk = pass.cursor.walk(index, Budget::of_step(SUBTABLES_PER_STEP));
        while let Some((slot, content)) = walk.next()? {
            let slot = (slot, content.word());
            let memory = (&*index.region, &index.geometry);
            let cleared = own.clear_left_by(&pass.clients, slot, memory, &mut walk.budget)?;
            pass.cleared += u64::from(cleared);
        }
        if !walk.is_over() {
            self.pass = Some(pass);
            return Ok(Vec::new());
        }
        if pass.cleared > 0 {
            tracing::info!(slots = pass.cleared, "cleared the unfinished inserts of lost clients");
        }
        Ok(pass.clients)
    }
}

#[cfg(test)]
mod tests;
