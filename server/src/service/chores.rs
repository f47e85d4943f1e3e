//! What the control thread does by itself, when its time has come.

use std::os::fd::AsFd;

use farside_control::FreeBlock;
use farside_fabric::{ChainError, boot_time_ns};
use farside_layout::SizeClass;
use rustix::event::Timespec;

use super::{LISTENER, Service, watch};
use crate::error::{ServerError, system};
use crate::expiry::Removed;
use crate::memory_level::LevelChange;
use crate::recovery::Opened;

impl Service {
    /// How long the thread may sleep: for ever, unless a lost client has to be cleaned up after or
    /// values end.
    pub(super) fn timeout(&self) -> Option<Timespec> {
        if !self.queue.is_empty() {
            return Some(Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let due = [
            self.sweeper.next_step_at(),
            self.collector.next_step_at(self.sweeper.is_done()),
            self.reaper.next_step_at(),
            self.accept_again_at,
            self.next_probe_at(),
            self.roll_call.next_step_at(),
        ];
        let due = due.into_iter().flatten().min()?;
        let left = due.saturating_sub(boot_time_ns());
        let (tv_sec, tv_nsec) = ((left / 1_000_000_000) as i64, (left % 1_000_000_000) as i64);
        Some(Timespec { tv_sec, tv_nsec })
    }

    pub(super) fn do_chores(&mut self) -> Result<(), ServerError> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        let now = boot_time_ns();
        if self.accept_again_at.is_some_and(|at| at <= now) {
            self.accept_again_at = None;
            let watched = watch(&self.epoll, self.acceptor.as_fd(), LISTENER);
            watched.map_err(system("watch for clients"))?;
        }
        if self.next_probe_at().is_some_and(|at| at <= now) {
            self.probe(now);
        }
        if self.roll_call.next_step_at().is_some_and(|at| at <= now) {
            self.call_roll(now);
        }
        if self.sweeper.next_step_at().is_some_and(|at| at <= now) {
            self.depot_figures = None;
            for client in self.sweeper.step(&self.opened.index, &self.own, now)? {
                self.clients.forget(client);
            }
        }
        if self.reaper.next_step_at().is_some_and(|at| at <= now) {
            self.reap()?;
        }
        self.tell_levels();
        self.collect(now)
    }

    /// Says in the log when the memory gets full, and when the index grows again.
    fn tell_levels(&mut self) {
        let chunks: u64 = self.opened.geometry.chunks().into();
        let used = chunks - self.opened.depot.chunks_free();
        let share = format_args!("{used} of {chunks} chunks of 2 MiB");
        match self.memory_level.look(used, chunks) {
            // A cache is full as a rule.
            Some(LevelChange::Reached(level)) if self.evictor.is_some() => {
                tracing::info!("{level} % of the memory is in use, {share}");
            }
            Some(LevelChange::Reached(level)) => tracing::warn!(
                "{level} % of the memory is in use, {share}: delete keys and run `kv-cli compact`, \
                 or restore a snapshot into a larger region"
            ),
            Some(LevelChange::FellBelow(level)) => {
                tracing::info!("less than {level} % of the memory is in use again, {share}");
            }
            None => {}
        }
        if self.stuck_at_splits.is_some_and(|splits| splits != self.opened.index.splits) {
            self.stuck_at_splits = None;
            tracing::info!("the index grows again");
        }
    }

    /// Blocks of keys that were not written for long, in a cache; none where there is no such key.
    /// They have not rested.
    pub(super) fn evict(
        &mut self,
        class: SizeClass,
        count: u32,
    ) -> Result<Vec<FreeBlock>, ChainError> {
        let Some(evictor) = &mut self.evictor else { return Ok(Vec::new()) };
        let Opened { index, depot, .. } = &mut self.opened;
        if !depot.has_out(class) {
            return Ok(Vec::new());
        }
        let blocks = evictor.make_room(class, count, index, &self.own, &mut self.reaper)?;
        // As if they had gone by the depot: what comes out of it is not suspected to be lost, and
        // taken less given is what clients and slots have.
        blocks.iter().for_each(|block| depot.clear(block.address));
        self.statistics.blocks_given += blocks.len() as u64;
        Ok(blocks)
    }

    /// Removes some of what has ended; the blocks are the depot's, once they rested.
    fn reap(&mut self) -> Result<(), ServerError> {
        self.depot_figures = None;
        let Opened { index, depot, .. } = &mut self.opened;
        for Removed { class, block } in self.reaper.step(index, &self.own)? {
            // Given like any other, so that taken less given is what clients and slots have.
            self.statistics.blocks_given += 1;
            if let Err(error) = depot.give(class, vec![block], false, boot_time_ns()) {
                tracing::error!("a block of a value that ended does not fit: {error}");
            }
        }
        Ok(())
    }
}
