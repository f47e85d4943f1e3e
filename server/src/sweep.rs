//! What is left of clients that vanished: slots in the middle of an INSERT.

use std::sync::Arc;

use farside_fabric::shm::Region;
use farside_fabric::{ChainError, Nanos};
use farside_layout::Geometry;

use crate::content::ReadBudget;
use crate::index::Index;
use crate::own_endpoint::OwnEndpoint;

/// How many subtables are looked through before the server looks after its clients again: 2 MiB.
const SUBTABLES_PER_STEP: usize = 256;

/// Walks the index for fenced clients, a step at a time.
pub(crate) struct Sweeper {
    region: Arc<Region>,
    geometry: Geometry,
    /// Fenced clients, and from when on none of their verbs can take effect any more.
    waiting: Vec<(Nanos, u16)>,
    pass: Option<Pass>,
}

/// One walk, for all clients that were ready when it began.
struct Pass {
    clients: Vec<u16>,
    next_subtable: usize,
    /// How many slots of it were looked at when the step before had read enough.
    slots_done: usize,
    cleared: u64,
}

impl Sweeper {
    pub(crate) fn new(region: &Arc<Region>, geometry: Geometry) -> Self {
        Self { region: region.clone(), geometry, waiting: Vec::new(), pass: None }
    }

    /// A client was fenced just now and left without a goodbye; its verbs take effect for so long.
    pub(crate) fn add(&mut self, client: u16, now: Nanos, settles_ns: Nanos) {
        self.waiting.push((now.saturating_add(settles_ns), client));
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

    /// Goes on a little; returns the clients of whom nothing is left, once a walk is over.
    pub(crate) fn step(
        &mut self,
        index: &Index,
        own: &OwnEndpoint,
        now: Nanos,
    ) -> Result<Vec<u16>, ChainError> {
        let mut pass = match self.pass.take() {
            Some(pass) => pass,
            None => {
                let ready = self.waiting.extract_if(.., |(ready_at, _)| *ready_at <= now);
                let clients: Vec<u16> = ready.map(|(_, client)| client).collect();
                Pass { clients, next_subtable: 0, slots_done: 0, cleared: 0 }
            }
        };
        if pass.clients.is_empty() {
            return Ok(Vec::new());
        }
        let mut budget = ReadBudget::of_step();
        for _ in 0..SUBTABLES_PER_STEP {
            let Some(image) = index.subtable(pass.next_subtable) else {
                if pass.cleared > 0 {
                    tracing::info!(slots = pass.cleared, "emptied what lost clients left behind");
                }
                return Ok(pass.clients);
            };
            for (slot, content) in image?.slots().skip(pass.slots_done) {
                if budget.is_spent() {
                    self.pass = Some(pass);
                    return Ok(Vec::new());
                }
                let (slot, memory) = ((slot, content.word()), (&*self.region, &self.geometry));
                let cleared = own.clear_left_by(&pass.clients, slot, memory, &mut budget)?;
                pass.cleared += u64::from(cleared);
                pass.slots_done += 1;
            }
            (pass.next_subtable, pass.slots_done) = (pass.next_subtable + 1, 0);
        }
        self.pass = Some(pass);
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests;
