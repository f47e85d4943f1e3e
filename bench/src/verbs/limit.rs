//! The rates of raw verbs, which a report shows beside a result as its limit. They are measured on
//! the same server as the result, with as many threads and as many chains in flight.

use std::time::Duration;

use farside_config::ClientConfig;
use farside_layout::{BLOCK_HEADER_BYTES, class_for};
use serde::{Deserialize, Serialize};

use super::{ThreadLoad, Timed, rates_of_threads};
use crate::Result;
use crate::args::Ycsb;
use crate::command::Interrupt;
use crate::keys::KEY_BYTES;
use crate::raw_connection::RawConnection;
use crate::recorder::Recorder;
use crate::workload::Kind;

/// Limit on the memory that the verbs access: the default of `kv-bench verbs --span`.
const TARGET_BYTES_MAX: u64 = 64 << 20;
/// The number of chains that are measured: READ, WRITE, compare-and-swap, and a PUT's chain.
const CHAINS: u32 = 4;

/// The rates of raw chains, in chains a second, of all threads together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RawLimit {
    /// READs as long as the largest content of a record's size class, without the block's header.
    #[serde(rename = "read_ops_s")]
    pub read: f64,
    /// WRITEs of the same length.
    #[serde(rename = "write_ops_s")]
    pub write: f64,
    /// Compare-and-swaps.
    #[serde(rename = "cas_ops_s")]
    pub cas: f64,
    /// A cached PUT's chains.
    #[serde(rename = "update_ops_s")]
    pub update: f64,
}

impl RawLimit {
    /// Measures the rates in free blocks of the server. The inner error says why that was not
    /// possible.
    pub fn measure(
        args: &Ycsb,
        config: &ClientConfig,
        interrupt: &Interrupt,
    ) -> Result<std::result::Result<Self, String>> {
        let Some(class) = class_for(KEY_BYTES, args.value_size.mean().round() as usize) else {
            return Ok(Err("no block holds such values".to_owned()));
        };
        let mut connection = RawConnection::connect(config)?;
        let threads = args.all_threads() as usize;
        // Each chain in flight needs a target of its own.
        let in_flight = threads * usize::from(args.depth);
        let blocks_max = (TARGET_BYTES_MAX / class.block_bytes()) as usize;
        let blocks_max = blocks_max.min(connection.spare_blocks(class)?);
        let targets =
            connection.take_blocks(class, blocks_max.min(in_flight.max(args.records as usize)))?;
        if targets.len() < in_flight {
            connection.give_back()?;
            let (blocks, bytes) = (targets.len(), class.block_bytes());
            return Ok(Err(format!(
                "{in_flight} operations in flight need as many free blocks of {bytes} B, and the \
                 server gave {blocks}"
            )));
        }
        let load = ThreadLoad {
            bytes: (class.block_bytes() - BLOCK_HEADER_BYTES) as u32,
            lanes: args.depth,
            duration: Duration::from_secs_f64(args.limit_seconds) / CHAINS,
        };
        let measured = rates_of_threads(&mut connection, &targets, threads, load, interrupt)?;
        connection.give_back()?;
        Ok(Ok(Self::of(&measured)))
    }

    /// The rates of all threads, summed up; see [`rates`](super::rates).
    pub fn of(threads: &[[Timed; CHAINS as usize]]) -> Self {
        let sum = |chain: usize| threads.iter().map(|timed| timed[chain].rate_per_s()).sum();
        Self { read: sum(0), write: sum(1), cas: sum(2), update: sum(3) }
    }

    /// The rate that these operations would have, in operations a second, if they took only the
    /// time of their chains. Their round trips are in the row Farside of the table "How it
    /// compares" in docs/benchmarks.md.
    pub fn mix_ops_s(&self, recorder: &Recorder) -> f64 {
        let counts = recorder.kinds().map(|(kind, record)| (kind, record.latencies.count()));
        recorder.operations() as f64 / self.seconds(counts)
    }

    /// How many seconds these operations take. An INSERT counts as two chains: a PUT's and a
    /// compare-and-swap. Its READ of the window is left out.
    fn seconds(&self, operations: impl Iterator<Item = (Kind, u64)>) -> f64 {
        let seconds_each = |kind| match kind {
            Kind::Get => 1.0 / self.read,
            Kind::Put => 1.0 / self.update,
            Kind::Insert => 1.0 / self.update + 1.0 / self.cas,
            Kind::Rmw => 1.0 / self.read + 1.0 / self.update,
        };
        operations.map(|(kind, count)| count as f64 * seconds_each(kind)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_take_the_time_of_their_chains() {
        let raw = RawLimit { read: 4.0, write: 3.0, cas: 2.0, update: 1.0 };
        let seconds = |kind| raw.seconds(std::iter::once((kind, 8)));
        let all = [Kind::Get, Kind::Put, Kind::Insert, Kind::Rmw].map(seconds);
        assert_eq!(all, [2.0, 8.0, 12.0, 10.0]);
        let mix = [(Kind::Get, 8), (Kind::Put, 8)];
        assert_eq!(raw.seconds(mix.into_iter()), 10.0);
    }
}
