//! The share of the operations that each shard of a cluster gets. With emulated devices it limits
//! the throughput: the busiest device has no time left.

use std::fmt::{self, Write as _};

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};

use crate::args::Ycsb;
use crate::emulation::Rates;
use crate::pattern::Pattern;
use crate::publish::grouped;
use crate::recorder::RunFacts;
use crate::records;
use crate::server::Server;

/// How many operations are drawn for the expected shares. The standard error of a share of 0.1 is
/// 0.0003.
const SAMPLE: u64 = 1 << 20;

/// The emulated network of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct EmulatedReport {
    /// The rates of each server's device.
    #[serde(flatten)]
    pub rates: Rates,
    /// The operations a second if each takes one chain, and the device of the shard with the
    /// largest expected share is always busy.
    pub predicted_ops_s: f64,
    pub shards: Vec<ShardReport>,
}

/// A shard, and its server's device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct ShardReport {
    /// The share of the operations that is for its keys, from a sample of their distribution.
    pub expected_share: f64,
    /// The chains that the device was asked for during the measurement.
    pub chains: u64,
}

impl EmulatedReport {
    /// The report of a run; `None` if its network was not emulated.
    pub fn new(args: &Ycsb, server: &Server, facts: &RunFacts) -> Option<Self> {
        let rates = server.devices.as_ref()?.rates();
        let router = server.map.as_ref()?.router();
        let shard = |record| router.shard(router.hasher.hash(&records::key_of(record)));
        let shares = expected_shares(args, server.servers().into(), shard);
        let largest = shares.iter().copied().fold(0.0, f64::max);
        let chains = facts.chains.iter().copied();
        let report = |(expected_share, chains)| ShardReport { expected_share, chains };
        Some(Self {
            rates,
            predicted_ops_s: rates.chains_per_s as f64 / largest,
            shards: shares.into_iter().zip(chains).map(report).collect(),
        })
    }

    /// Writes the line of the table.
    pub fn write(&self, seconds: f64, out: &mut String) -> fmt::Result {
        let chains: u64 = self.shards.iter().map(|shard| shard.chains).sum();
        let busiest = self.shards.iter().map(|shard| shard.chains).max().unwrap_or(0);
        let most = self.shards.iter().map(|shard| shard.expected_share).fold(0.0, f64::max);
        writeln!(
            out,
            "emulated: {} chains/s; the busiest of {} devices had {:.1} % of them, and was busy \
             {:.0} % of the time; {} ops/s predicted from the largest share, {:.1} %",
            grouped((chains as f64 / seconds) as u64),
            self.shards.len(),
            busiest as f64 * 100.0 / chains.max(1) as f64,
            busiest as f64 * 100.0 / (self.rates.chains_per_s as f64 * seconds),
            grouped(self.predicted_ops_s as u64),
            most * 100.0,
        )
    }
}

/// The share of each shard, from a sample of the records that operations are for.
fn expected_shares(args: &Ycsb, shards: usize, shard: impl Fn(u64) -> usize) -> Vec<f64> {
    let distribution = Pattern::new(args).distribution;
    let mut random = SmallRng::seed_from_u64(args.seed);
    let mut counts = vec![0_u64; shards];
    for _ in 0..SAMPLE {
        counts[shard(distribution.draw(&mut random, args.records))] += 1;
    }
    counts.into_iter().map(|count| count as f64 / SAMPLE as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::ycsb;

    #[test]
    fn the_shares_are_those_of_the_distribution() {
        let shares = |line: &str| {
            let args = ycsb(&format!("ycsb --workload c --records 1000 {line}"));
            expected_shares(&args, 2, |record| usize::from(record != 0))
        };
        let [uniform, zipfian] = ["--distribution uniform", "--theta 0.99"].map(shares);
        assert!((uniform[0] - 0.001).abs() < 0.0002, "{uniform:?}");
        // Record 0 has rank 0. The sum of 1 / rank^0.99 over 1000 ranks is 7.73.
        assert!((zipfian[0] - 0.129).abs() < 0.003, "{zipfian:?}");
        assert!((zipfian[0] + zipfian[1] - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_table_shows_the_busiest_device() {
        let shard = |expected_share, chains| ShardReport { expected_share, chains };
        let report = EmulatedReport {
            rates: Rates::of_chains(1000),
            predicted_ops_s: 1250.0,
            shards: vec![shard(0.2, 500), shard(0.8, 1500)],
        };
        let mut out = String::new();
        report.write(2.0, &mut out).unwrap();
        for text in
            ["1,000 chains/s", "75.0 % of them", "75 % of the time", "1,250 ops/s", "80.0 %"]
        {
            assert!(out.contains(text), "{out}");
        }
    }
}
