//! Each policy does what its paper says, on lists of requests that were checked by hand, and none
//! beats Belady's optimum.

use std::collections::HashMap;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;

fn trace(keys: impl Iterator<Item = u32>) -> Trace {
    let requests: Vec<Request> = keys.map(|key| Request { key, bytes: 1 }).collect();
    let keys = requests.iter().map(|request| request.key + 1).max().unwrap_or(0);
    Trace { name: String::new(), requests, keys, data: (keys.into(), keys.into()) }
}

/// Replays a request for each letter. Returns a + for each hit and a - for each miss.
fn outcomes(kind: Kind, capacity: u64, letters: &str) -> String {
    let trace = trace(letters.bytes().map(|letter| u32::from(letter - b'a')));
    let mut cache = kind.cache(&trace, capacity);
    let outcome = |request: &Request| if cache.request(*request) { '+' } else { '-' };
    trace.requests.iter().map(outcome).collect()
}

#[test]
fn fifo_evicts_what_was_stored_first_and_lru_what_was_used_first() {
    assert_eq!(outcomes(Kind::Fifo, 3, "abcadac"), "---+--+");
    assert_eq!(outcomes(Kind::Lru, 3, "abcadacb"), "---+-++-");
}

#[test]
fn clock_and_sieve_spare_a_key_once_after_a_hit() {
    assert_eq!(outcomes(Kind::Clock, 3, "abcadabcad"), "---+-+--+-");
    // A spared key keeps its place, and the hand goes on to the newer ones: a stays.
    assert_eq!(outcomes(Kind::Sieve, 3, "abcadefad"), "---+---+-");
    assert_eq!(outcomes(Kind::Clock, 3, "abcadefad"), "---+-----");
}

#[test]
fn s3_fifo_protects_a_key_that_comes_back() {
    assert_eq!(outcomes(Kind::S3Fifo, 4, "abcdeafghia"), "----------+");
    assert_eq!(outcomes(Kind::Lru, 4, "abcdeafghia"), "-----------");
    // Two hits in the small queue protect it as well.
    assert_eq!(outcomes(Kind::S3Fifo, 4, "aaabcdefgha"), "-++-------+");
}

#[test]
fn tiny_lfu_admits_only_what_is_more_frequent() {
    assert_eq!(outcomes(Kind::WTinyLfu, 2, "aaabcaba"), "-++--+-+");
    assert_eq!(outcomes(Kind::Lru, 2, "aaabcaba"), "-++----+");
}

#[test]
fn many_samples_make_sampled_lru_exact() {
    assert_eq!(outcomes(Kind::SampledLru(64), 3, "abcadacb"), "---+-++-");
    assert_eq!(outcomes(Kind::SampledLru(64), 4, "abcdeafghia"), "-----------");
}

#[test]
fn a_key_that_does_not_fit_is_not_stored() {
    let mut trace = trace([0, 1, 0, 1].into_iter());
    trace.requests[0].bytes = 9;
    trace.requests[2].bytes = 9;
    for kind in Kind::all() {
        let mut cache = kind.cache(&trace, 4);
        let hits: Vec<bool> =
            trace.requests.iter().map(|request| cache.request(*request)).collect();
        assert_eq!(hits, [false, false, false, true], "{}", kind.name());
    }
}

/// The most hits that any choice of evictions can have.
fn most_hits(
    keys: &[u32],
    stored: u32,
    capacity: u32,
    known: &mut HashMap<(usize, u32), u64>,
) -> u64 {
    let Some((key, rest)) = keys.split_first() else { return 0 };
    if let Some(most) = known.get(&(keys.len(), stored)) {
        return *most;
    }
    let with = stored | (1 << key);
    let most = if with == stored {
        1 + most_hits(rest, stored, capacity, known)
    } else if with.count_ones() <= capacity {
        most_hits(rest, with, capacity, known).max(most_hits(rest, stored, capacity, known))
    } else {
        let victims = (0..32).filter(|victim| with & (1 << victim) != 0);
        let after = victims.map(|victim| with & !(1 << victim));
        after.map(|stored| most_hits(rest, stored, capacity, known)).max().unwrap_or(0)
    };
    known.insert((keys.len(), stored), most);
    most
}

#[test]
fn belady_is_the_optimum() {
    let mut random = SmallRng::seed_from_u64(3);
    for _ in 0..300 {
        let keys: Vec<u32> = (0..24).map(|_| random.random_range(0..6)).collect();
        for capacity in 1..5 {
            let expected = most_hits(&keys, 0, capacity, &mut HashMap::new());
            let found = replay(Kind::Belady, &trace(keys.iter().copied()), capacity.into()).0;
            assert_eq!(found, expected, "{keys:?} {capacity}");
        }
    }
}

#[test]
fn no_policy_beats_belady() {
    let mut random = SmallRng::seed_from_u64(4);
    for _ in 0..20 {
        let keys = random.random_range(5..300u32);
        let skew = random.random_range(1..4);
        let key = |_| (f64::from(keys) * random.random::<f64>().powi(skew)) as u32;
        let trace = trace((0..3000).map(key));
        for capacity in [1, u64::from(keys / 7 + 1), u64::from(keys / 2)] {
            let (most, _) = replay(Kind::Belady, &trace, capacity);
            for kind in Kind::all() {
                let (hits, _) = replay(kind, &trace, capacity);
                assert!(hits <= most, "{}: {hits} of {most}, capacity {capacity}", kind.name());
            }
        }
    }
}

#[test]
fn the_server_follows_lru_if_every_hit_is_reported() {
    let extent = Extent { keys: 20_000, requests: 200_000, seed: 5 };
    let trace = Workload::Zipfian(0.99).trace(extent);
    let percent = |kind| 100.0 * replay(kind, &trace, 2000).0 as f64 / 200_000.0;
    let rate = Rate::OneOf;
    let reported = |every| Kind::Farside(Rule::Lru, Reporting { clients: 4, rate: rate(every) });
    let [lru, fifo, all, none] =
        [Kind::Lru, Kind::Fifo, reported(1), reported(u64::MAX)].map(percent);
    assert!((all - lru).abs() < 2.0, "{all} {lru}");
    assert!((none - fifo).abs() < 2.0, "{none} {fifo}");
}

/// The traces and sizes with which the policy is more than a point below exact LRU, or not above it
/// although scans come in.
fn worse_than_lru(reporting: Reporting) -> Vec<String> {
    let mut worse = Vec::new();
    for workload in WORKLOADS {
        let trace = workload.trace(Extent { keys: 5000, requests: 100_000, seed: 7 });
        for cache_percent in [1, 10, 50] {
            let capacity = trace.data.1 * cache_percent / 100;
            let percent = |kind| percent(replay(kind, &trace, capacity).0, &trace);
            let above = percent(Kind::Farside(SIEVE, reporting)) - percent(Kind::Lru);
            let has_scans = matches!(workload, Workload::Scans | Workload::FullScans);
            if above <= if has_scans { 0.0 } else { -1.0 } {
                worse.push(format!("{}, {cache_percent} %: {above:+.2}", trace.name));
            }
        }
    }
    worse
}

#[test]
fn farside_is_nowhere_worse_than_lru() {
    // One client reports each block once in a gap, so its keys have to live for a few gaps.
    for reporting in [REPORTING, Reporting { clients: 1, rate: Rate::OncePerGap(0.5) }] {
        assert_eq!(worse_than_lru(reporting), [""; 0], "{reporting:?}");
    }
    // The check finds a policy that is worse: too few reports leave it a FIFO.
    let reporting = Reporting { rate: Rate::OneOf(64), ..REPORTING };
    assert!(worse_than_lru(reporting).len() > WORKLOADS.len());
}
