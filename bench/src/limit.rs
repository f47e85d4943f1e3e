//! The limit beside a result: the same operations on a map inside this process. The same keys,
//! values and copies; nothing is shared, checked or freed for others.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_common::layout::block_bytes;

use crate::args::Ycsb;
use crate::interrupt::Interrupt;
use crate::keys::{self, KEY_BYTES, Key};
use crate::operations::{Batch, Generator, Operation, Values};
use crate::pattern::Pattern;
use crate::records::RecordCounter;
use crate::workload::Kind;
use crate::{Error, Result};

/// Operations a second of one thread on a [`HashMap`] that has the workload's records; `None` over
/// another fabric than `shm`, and without the time for it, or the memory.
///
/// # Errors
/// [`Error::Interrupted`], and what the system says about its memory.
pub fn map_ops_s(args: &Ycsb, fabric: &str, interrupt: &Interrupt) -> Result<Option<f64>> {
    // A map's entry takes hardly more than a block.
    let block_bytes = block_bytes(KEY_BYTES, args.value_size.mean() as usize);
    let needed = args.records.saturating_mul(2 * block_bytes);
    let is_wanted = fabric == "shm" && args.limit_seconds > 0.0;
    if !is_wanted || needed > available_bytes()? {
        return Ok(None);
    }
    let mut map = Map::load(args);
    let records = Arc::new(RecordCounter::new(args.records, (0, 1)));
    let mut source = Generator::new(Pattern::new(args), records.clone(), args.seed);
    let (mut batch, mut operations) = (Batch::new(), 0);
    let duration = Duration::from_secs_f64(args.limit_seconds);
    let started = Instant::now();
    while started.elapsed() < duration {
        interrupt.check()?;
        batch.refill(&mut source);
        for operation in batch.rest() {
            map.perform(operation);
            if operation.kind == Kind::Insert {
                records.acknowledge(operation.record);
            }
        }
        operations += batch.rest().len();
        batch.consume(batch.rest().len());
    }
    Ok(Some(operations as f64 / started.elapsed().as_secs_f64()))
}

/// How much memory the system can give at once, in bytes: as it does usually, or in huge pages that
/// were put aside.
///
/// # Errors
/// [`Error::System`] if it does not say so.
pub fn available_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")
        .map_err(Error::system("reading how much memory there is"))?;
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    let huge_kib = number("HugePages_Free:") * number("Hugepagesize:");
    Ok(number("MemAvailable:").max(huge_kib) << 10)
}

struct Map {
    entries: HashMap<Key, Vec<u8>>,
    values: Values,
    /// Where GETs put values.
    value: Vec<u8>,
}

impl Map {
    fn load(args: &Ycsb) -> Self {
        let mut values = Values::new(args.value_size.max(), args.seed);
        let sizes = args.value_size;
        let entry = |record| (keys::encode(record), values.take(sizes.of(record)).to_vec());
        Self { entries: (0..args.records).map(entry).collect(), values, value: Vec::new() }
    }

    #[inline]
    fn perform(&mut self, &Operation { kind, ref key, value_bytes, .. }: &Operation) {
        let Self { entries, values, value } = self;
        if matches!(kind, Kind::Get | Kind::Rmw) {
            value.clear();
            value.extend_from_slice(entries.get(key).map_or(&[], Vec::as_slice));
            std::hint::black_box(&value);
        }
        match kind {
            Kind::Get => {}
            Kind::Put | Kind::Insert | Kind::Rmw => {
                let entry = entries.entry(*key).or_default();
                entry.clear();
                entry.extend_from_slice(values.take(value_bytes));
            }
            Kind::Delete => drop(entries.remove(key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::ycsb;
    use crate::value_size::ValueSize;

    fn args(workload: char) -> Ycsb {
        ycsb(&format!("ycsb --workload {workload} --records 1000 --limit-seconds 0.01"))
    }

    #[test]
    fn every_workload_has_a_limit_unless_there_is_no_time_or_memory() {
        let measure = |args: Ycsb, fabric| map_ops_s(&args, fabric, &Interrupt::default()).unwrap();
        for workload in ['a', 'c', 'd', 'f'] {
            let rate = measure(args(workload), "shm");
            assert!(rate.is_some_and(|rate| rate > 0.0), "{rate:?}");
        }
        assert_eq!(measure(args('c'), "verbs"), None);
        let none = Ycsb { limit_seconds: 0.0, ..args('c') };
        assert_eq!(measure(none, "shm"), None);
        let much = Ycsb { records: 1 << 39, ..args('c') };
        assert_eq!(measure(much, "shm"), None);
    }

    #[test]
    fn the_map_does_what_it_is_told() {
        let mut map = Map::load(&args('c'));
        let operation = |kind, record| Operation::new(kind, record, ValueSize::Constant(64));
        map.perform(&operation(Kind::Get, 7));
        assert_eq!(map.value, map.entries[&keys::encode(7)]);
        let old = map.value.clone();
        map.perform(&operation(Kind::Rmw, 7));
        assert_ne!(map.entries[&keys::encode(7)], old);
        map.perform(&operation(Kind::Insert, 1000));
        assert_eq!(map.entries[&keys::encode(1000)].len(), old.len());
        map.perform(&operation(Kind::Delete, 7));
        assert!(!map.entries.contains_key(&keys::encode(7)));
    }
}
