//! The raw verbs as the limit beside a result: the same server, as many threads, as many in flight.

use std::cell::RefCell;
use std::thread;
use std::time::Duration;

use farside_config::ClientConfig;
use farside_fabric::AnyFabric;
use farside_layout::{BLOCK_HEADER_BYTES, class_for};

use super::{Plan, Timed, rates};
use crate::args::Ycsb;
use crate::command::Interrupt;
use crate::keys::KEY_BYTES;
use crate::phases::start;
use crate::raw_connection::Attached;
use crate::recorder::Recorder;
use crate::workload::Kind;
use crate::{Error, Result};

/// The most memory that is taken for it: as `kv-bench verbs` takes.
const SPAN_BYTES_MAX: u64 = 64 << 20;
/// READ, WRITE, compare-and-swap, and a PUT's chain.
const CHAINS: u32 = 4;

/// How many chains a second all threads together make.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawLimit {
    /// READs as long as a record's block.
    pub read: f64,
    /// WRITEs as long.
    pub write: f64,
    /// Compare-and-swaps.
    pub cas: f64,
    /// A cached PUT's chains.
    pub update: f64,
}

impl RawLimit {
    /// Measures it in free blocks of the server; without enough of them, why not.
    pub fn measure(
        args: &Ycsb,
        config: &ClientConfig,
        interrupt: &Interrupt,
    ) -> Result<std::result::Result<Self, String>> {
        let Some(class) = class_for(KEY_BYTES, args.value_size.mean().round() as usize) else {
            return Ok(Err("no block holds such values".to_owned()));
        };
        let mut attached = Attached::connect(config)?;
        let threads = args.all_threads() as usize;
        // Each chain has a target of its own.
        let in_flight = threads * usize::from(args.depth);
        let most = (SPAN_BYTES_MAX / class.block_bytes()) as usize;
        let most = most.min(attached.spare_blocks(class)?);
        let targets =
            attached.take_blocks(class, most.min(in_flight.max(args.records as usize)))?;
        if targets.len() < in_flight {
            attached.give_back()?;
            let (blocks, bytes) = (targets.len(), class.block_bytes());
            return Ok(Err(format!(
                "{in_flight} in flight take as many free blocks of {bytes} B, and here are {blocks}"
            )));
        }
        let fabrics: Vec<AnyFabric> =
            (0..threads).map(|_| attached.fabric(args.depth)).collect::<Result<_>>()?;
        let duration = Duration::from_secs_f64(args.limit_seconds) / CHAINS;
        let bytes = (class.block_bytes() - BLOCK_HEADER_BYTES) as u32;
        let attached = RefCell::new(attached);
        let of_thread = |mut fabric, targets: &[u64], look: &dyn Fn() -> Result<()>| {
            let plan = Plan { targets, bytes, lanes: args.depth, duration, look };
            rates(&mut fabric, &plan)
        };
        let measured = thread::scope(|scope| {
            let mut parts = fabrics.into_iter().zip(targets.chunks(targets.len() / threads));
            // This thread is one of them, and the one that listens to the server meanwhile.
            let Some((fabric, part)) = parts.next() else { return Ok(Vec::new()) };
            let of_thread = &of_thread;
            let other = |(fabric, part)| {
                start(scope, move || of_thread(fabric, part, &|| interrupt.check()))
            };
            let others = parts.map(other).collect::<Result<Vec<_>>>()?;
            let look = || {
                attached.borrow_mut().answer_all()?;
                interrupt.check()
            };
            let mut all = vec![of_thread(fabric, part, &look)?];
            for other in others {
                all.push(other.join().unwrap_or(Err(Error::Panicked))?);
            }
            Ok::<_, Error>(all)
        })?;
        attached.into_inner().give_back()?;
        Ok(Ok(Self::of(&measured)))
    }

    /// What [`rates`] found for each thread, all together.
    pub fn of(threads: &[[Timed; CHAINS as usize]]) -> Self {
        let all = |at: usize| threads.iter().map(|timed| timed[at].rate_per_s()).sum();
        Self { read: all(0), write: all(1), cas: all(2), update: all(3) }
    }

    /// How many of these operations a second would be done that are nothing but the chains on
    /// README's price list.
    pub fn mix_ops_s(&self, recorder: &Recorder) -> f64 {
        let counts = recorder.kinds().map(|(kind, of)| (kind, of.latencies.len()));
        recorder.operations() as f64 / self.seconds(counts)
    }

    /// How long so many take. An INSERT's two are like a PUT's, and a compare-and-swap; its READ of
    /// the window is left out.
    fn seconds(&self, operations: impl Iterator<Item = (Kind, u64)>) -> f64 {
        let one = |kind| match kind {
            Kind::Get => 1.0 / self.read,
            Kind::Put => 1.0 / self.update,
            Kind::Insert => 1.0 / self.update + 1.0 / self.cas,
            Kind::Delete => 1.0 / self.cas,
            Kind::Rmw => 1.0 / self.read + 1.0 / self.update,
        };
        operations.map(|(kind, count)| count as f64 * one(kind)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_take_the_time_of_their_chains() {
        let raw = RawLimit { read: 4.0, write: 3.0, cas: 2.0, update: 1.0 };
        let seconds = |kind| raw.seconds(std::iter::once((kind, 8)));
        let all = [Kind::Get, Kind::Put, Kind::Insert, Kind::Delete, Kind::Rmw].map(seconds);
        assert_eq!(all, [2.0, 8.0, 12.0, 4.0, 10.0]);
        let mix = [(Kind::Get, 8), (Kind::Put, 8)];
        assert_eq!(raw.seconds(mix.into_iter()), 10.0);
    }
}
