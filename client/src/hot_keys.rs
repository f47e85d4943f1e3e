//! The keys that are read most, from the blocks that the servers' samples name.

use std::cmp::Reverse;
use std::collections::HashMap;

use farside_control::HotBlock;
use farside_layout::NamedBlock;
use farside_protocol::{LANE, read_key_at};

use crate::connection::SessionRegion;
use crate::{Error, Result, Session};

/// The keys that were read most; see [`Admin::hot_keys`](crate::Admin::hot_keys).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HotKeys {
    /// The number of reads in all samples.
    pub samples: u64,
    /// The keys, those with most reads first.
    pub keys: Vec<HotKey>,
}

/// A key that is read often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotKey {
    /// The key.
    pub key: Vec<u8>,
    /// How many reads of it the samples have.
    pub reads: u64,
}

/// Returns `None` for an error about one entry.
fn unless_odd<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(Error::Operation(_)) => Ok(None),
        result => result.map(Some),
    }
}

/// The reads of each key. An update moves a key to another block, so a key may have had several.
#[derive(Default)]
pub(crate) struct KeyReads {
    samples: u64,
    by_key: HashMap<Vec<u8>, u64>,
}

impl KeyReads {
    /// Adds the samples of a shard. READs each block, to find out its key.
    pub(crate) fn add(
        &mut self,
        session: &mut Session,
        shard: usize,
        samples: u64,
        blocks: &[HotBlock],
    ) -> Result<()> {
        self.samples = self.samples.saturating_add(samples);
        for HotBlock { address, class, reads } in blocks {
            let block = NamedBlock { address: *address, class: *class, generation_low: 0 };
            let read = |handle: SessionRegion<'_>| {
                handle.engine.endpoint.drive(read_key_at(handle, LANE, block))
            };
            // An entry that is damaged or changes all the time is left out.
            if let Some(key) = unless_odd(session.run_on_shard(shard, read))?.flatten() {
                let sum = self.by_key.entry(key).or_default();
                *sum = sum.saturating_add(*reads);
            }
        }
        Ok(())
    }

    /// Returns the keys with most reads that are present.
    pub(crate) fn hottest(self, session: &mut Session, count: usize) -> Result<HotKeys> {
        let mut by_reads: Vec<_> =
            self.by_key.into_iter().map(|(key, reads)| HotKey { key, reads }).collect();
        by_reads.sort_unstable_by(|one, other| {
            (Reverse(one.reads), &one.key).cmp(&(Reverse(other.reads), &other.key))
        });
        let mut keys = Vec::new();
        for key in by_reads {
            if keys.len() == count {
                break;
            }
            // The bytes at the address may have been anything.
            if unless_odd(session.exists(&key.key))? == Some(true) {
                keys.push(key);
            }
        }
        Ok(HotKeys { samples: self.samples, keys })
    }
}
