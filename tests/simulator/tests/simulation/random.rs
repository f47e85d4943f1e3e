//! Long random scenarios: words are accessed one by one, completions are late, clients sleep and
//! die.

use std::time::{Duration, Instant};

use farside_simulator::{Mutant, Op, Scenario, TRUST_NS, TTL_NS, client};

use crate::GRACE_NS;

/// Four clients on three keys that could be confused, with few slots and fewer blocks.
fn brawl() -> Scenario {
    let first = client().blocks(2).knows(0).put(0).get(1).delete(0).insert(2).put(1).get(0);
    let second = client().blocks(2).insert(1).get(0).exchange_seen(0).delete(1).put(2).get(2);
    let third = client().blocks(2).knows(0).get(0).put(0).get(0).insert(0).delete(2).get(1);
    let lanes = client().knows(0).get(0).get(1).get(2).lane().update(0).delete(1).put(1).get(1);
    let scenario = Scenario::new().slots(3).used(1).stored(0).deaths(1).sweeps();
    let scenario = scenario.jumps(2, &[1_300_000, GRACE_NS, 8_100_000_000]).chains(64);
    scenario.client(first).client(second).client(third).client(lanes)
}

/// Two keys that take turns in one slot.
fn chase() -> Scenario {
    let replaces_key =
        client().blocks(3).delete(0).insert(1).delete(1).insert(0).delete(0).insert(1);
    let writer = client().blocks(3).put(0).put(1).put(0).delete(0).put(1).get(0);
    let reader = client().knows(0).get(0).get(1).get(0).get(1).get(0).get(1);
    let scenario = Scenario::new().slots(1).stored(0).chains(64).jumps(1, &[GRACE_NS]);
    scenario.client(replaces_key).client(writer).client(reader)
}

/// All clients insert and delete one key.
fn rush() -> Scenario {
    let one = || client().insert(0).delete(0).put(0).get(0).insert(0).delete(0);
    let scenario = Scenario::new().slots(3).used(1).chains(64).client(one());
    scenario.client(one().guesses(0)).client(one().guesses(1))
}

/// All clients use keys of both new subtables, while the server splits, is killed, and continues.
fn moving() -> Scenario {
    let first = client().knows(0).put(0).get(2).delete(0).insert(1).put(2).get(0);
    let second = client().knows(2).insert(1).get(0).update(2).delete(1).put(0).get(1);
    let third = client().guesses(0);
    let third = third.knows(0).get(0).get(2).insert(0).get(1).exchange_seen(2).get(2);
    let scenario =
        Scenario::new().slots(4).used(1).stored(0).stored(2).splits(0, 2).split_restarts(1);
    let scenario = scenario.deaths(1).jumps(2, &[1_300_000, 3_000_000, GRACE_NS]).chains(64);
    scenario.client(first).client(second).client(third)
}

/// Clients die, or lose their connections and reconnect. The server is killed, and clears their
/// slots.
fn wreck() -> Scenario {
    let first = client().guesses(0);
    let first = first.knows(0).put(0).insert(1).get(0).delete(1).insert(2).get(1);
    let second = client().insert(1).get(2).put(0).delete(0).insert(0).exchange_seen(2);
    let third = client().knows(0).delete(0).insert(0).get(1).put(1).get(0);
    let scenario =
        Scenario::new().slots(3).used(1).stored(0).deaths(1).losses(2).server_restarts(1);
    let scenario = scenario.sweeps().chains(64).jumps(1, &[1_300_000, GRACE_NS]);
    scenario.client(first).client(second).client(third)
}

/// Two splits, the second into the place that the first has emptied, while clients sleep.
fn returning() -> Scenario {
    let first = client().knows(0).put(0).get(0).delete(0).insert(1).put(0).get(1);
    let second = client().knows(0).get(0).insert(1).get(0).update(0).delete(1).get(0);
    let scenario = Scenario::new().slots(3).used(1).stored(0).splits(0, 2).reuses(true);
    let scenario = scenario.deaths(1).sweeps().chains(64).jumps(2, &[1_300_000, GRACE_NS]);
    scenario.client(first).client(second)
}

/// All clients change the present values of two keys, and when they expire.
fn mixture() -> Scenario {
    let first = client().knows(0).touch(0).put_keep_ttl(0).get(0).delete_seen(0).get_or_insert(0);
    let second = client().get(0).put_keep_ttl(0).touch(1).get(1).exchange_seen(1).delete_seen(0);
    let third = client().get_or_insert(0).get(1).delete_seen(1).get_or_insert(1).touch(0).get(0);
    let lanes = client().knows(0).touch(0).put(1).lane().put_keep_ttl(0).delete(1).update(0);
    let scenario = Scenario::new().slots(3).used(1).stored(0).deaths(1).sweeps();
    let scenario = scenario.jumps(2, &[1_300_000, GRACE_NS, 8_100_000_000]).chains(64);
    scenario.client(first).client(second).client(third).client(lanes)
}

/// A shard changes its region. Its former server stands still and continues, and its clients'
/// clocks differ.
fn succession() -> Scenario {
    let first = client().pace(15).knows(0).put(0).get(2).get(0).delete(0).put(2).insert(0).get(1);
    let second = client().pace(17).knows(2).insert(1).get(0).update(0).get(2).put(1).get(1);
    let third = client().knows(0).get(0).put(0).get(1).delete(2).insert(2).get(0).exchange(0, "i0");
    let scenario = Scenario::new().slots(4).used(1).stored(0).stored(2).moves(1, 4).deaths(1);
    let scenario = scenario.jumps(3, &[GRACE_NS, TRUST_NS / 2, TRUST_NS]).reconnects(3).old_maps(2);
    scenario.late_answers().records_fail().chains(64).client(first).client(second).client(third)
}

/// The server evicts keys, removes expired values, and splits the subtable. Evicted blocks go from
/// client to client.
fn cache() -> Scenario {
    let first = client().takes().knows(0).put(0).get(1).insert_ttl(1).get(0).delete(0).put(2);
    let second = client().takes().blocks(1).knows(0).get(0).touch(0).put_ttl(2).update(1);
    let third = client().takes().get(0).exchange_seen(0).op(Op::Take(2)).get_or_insert(1);
    let scenario = Scenario::new().slots(3).used(1).depot().expiring(1).splits(0, 2).expires(3);
    let scenario = scenario.evicts(0).evicts(1).evicts(2).evicts(0).deaths(1).chains(64);
    let scenario = scenario.jumps(2, &[1_300_000, TTL_NS, GRACE_NS]);
    let scenario = scenario.client(first.get(1).get(2)).client(second.insert(0).get(2).get(1));
    scenario.client(third.put_keep_ttl(2).put(1).get(0).delete(2))
}

/// Returns the number in an environment variable, or the default.
fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Runs as many seeds as fit into `FARSIDE_SIMULATION_SECONDS`, from `FARSIDE_SIMULATION_SEED` on.
#[test]
fn seeds() {
    let first = variable("FARSIDE_SIMULATION_SEED", 0);
    let separate = [
        brawl(),
        chase(),
        rush(),
        moving(),
        wreck(),
        returning(),
        mixture(),
        succession(),
        cache(),
    ];
    let shared = separate.clone().map(Scenario::shares_locations);
    let seconds = variable("FARSIDE_SIMULATION_SECONDS", 10);
    let share = Duration::from_secs(seconds) / (separate.len() + shared.len()) as u32;
    for scenario in separate.iter().chain(&shared) {
        let started = Instant::now();
        let seeds = (first..).take_while(|seed| *seed == first || started.elapsed() < share);
        let count = scenario.run_seeds(seeds).unwrap_or_else(|failure| panic!("{failure}"));
        println!("{scenario}: seeds {first} to {}", first + count - 1);
    }
}

/// The same seed repeats a failure, which is reported in fewer steps than the run took.
#[test]
fn a_seed_repeats_its_failure_and_the_report_is_short() {
    let reader = client().knows(0).get(0).get(0).get(0);
    let writer = || client().knows(0).put(0).put(0).put(0);
    let scenario = Scenario::new().stored(0).client(reader);
    let scenario = scenario.client(writer()).client(writer()).mutant_for_all(Mutant::NoMark);
    let wrong = |seed: u64| scenario.run_seed(seed).err();
    let (seed, failure) = (0..1000).find_map(|seed| Some((seed, wrong(seed)?))).unwrap();
    println!("{failure}");
    assert_eq!(wrong(seed).unwrap().to_string(), failure.to_string());
    assert!(failure.unfired.is_empty(), "{:?}", failure.unfired);
    assert!(failure.steps() < 80, "{} steps", failure.steps());
}
