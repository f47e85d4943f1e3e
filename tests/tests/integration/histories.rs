//! Proves that operations on one key are linearizable, from the records of real processes.
//!
//! Meanwhile subtables split, clients are killed at any moment and replaced, and kv-server is
//! killed and started again on its region file. At the end a new client reads every key, `kv-cli
//! verify` finds no damage, and no dead client is left. A test shows that the check can fail.
//!
//! `FARSIDE_HISTORY_SECONDS` sets the duration of each kind of kill (5 by default). `make soak
//! MINUTES=n` does all of that together for a long time.

mod caches;
pub(crate) mod run;
pub(crate) mod workers;

use std::time::{Duration, Instant};

use farside_linearizability::{Ended, HistoryOperation, Record, Violation};
use farside_tests::{blocks_with_clients, device, scaled};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use run::{
    CLIENTS_KILLED_MIN, DENIED_MIN, Figures, LONG_OPERATIONS_MIN, OPERATIONS_MIN, Plan, Run,
    SERVER_RESTARTS_MIN, SPLITS_MIN, has_all_kinds,
};

pub(crate) use run::ENOUGH_TIMEOUT;

/// Limit on the extensions of a run with faults, which ends once each kind has happened.
const ATTEMPTS_MAX: u32 = 12;

/// `count` seconds, or more over RDMA, where everything takes longer.
fn seconds(count: u64) -> Duration {
    Duration::from_secs(if device().is_some() { 4 * count } else { count })
}

fn run(duration: Duration, plan: Plan, seed: u64) -> Figures {
    let mut run = Run::start(plan);
    run.continue_for(duration, &mut SmallRng::seed_from_u64(seed));
    run.check().0
}

/// Checks that there was enough to check, and no violation.
pub(crate) fn assert_good(figures: &Figures) {
    assert_eq!(figures.violations, 0, "{figures}");
    assert!(figures.operations > scaled(OPERATIONS_MIN), "{figures}");
    assert!(figures.failed < figures.operations / 10, "{figures}");
    assert!(figures.splits > scaled(SPLITS_MIN), "{figures}");
}

#[on(each, rdma_in_soak)]
fn hot_keys_that_move_all_the_time_are_linearizable() {
    // With a new region each time, because only the first splits move all the hot keys.
    for seed in 0..scaled(3) {
        let figures = run(seconds(1), Plan::default(), seed);
        assert_good(&figures);
        assert_eq!(figures.unknown, 0, "{figures}");
    }
}

/// Makes runs of `round` each, each on a new region, until `total` is over.
pub(crate) fn runs(plan: Plan, round: Duration, total: Duration) -> Figures {
    let (started, mut figures) = (Instant::now(), Figures::default());
    for seed in 0.. {
        figures.add(&run(round, plan, seed));
        if started.elapsed() >= total {
            break;
        }
    }
    println!("in {:?}: {figures}", started.elapsed());
    figures
}

/// Returns the duration of each kind of kill.
fn kill_time() -> Duration {
    let seconds = std::env::var("FARSIDE_HISTORY_SECONDS");
    Duration::from_secs(seconds.map_or(5, |text| text.parse().unwrap()))
}

/// Returns the duration of a soak.
pub(crate) fn soak_time() -> Duration {
    let minutes = std::env::var("FARSIDE_SOAK_MINUTES").map_or(10, |text| text.parse().unwrap());
    Duration::from_secs(60 * minutes)
}

#[on(each, rdma)]
fn clients_killed_at_random_leave_linearizable_histories() {
    let plan = Plan { kills_workers: true, ..Plan::default() };
    let figures = runs(plan, kill_time().min(Duration::from_secs(10)), kill_time());
    assert_good(&figures);
    assert!(figures.clients_killed > CLIENTS_KILLED_MIN, "{figures}");
    assert!(figures.killed_at_start > 0, "{figures}");
}

/// A device executes the compare-and-swaps of both clients, and a thread of the server the other
/// verbs of one.
#[on(rdma_in_soak)]
fn over_rdma_and_tcp_together_histories_are_linearizable() {
    let plan = Plan { also_over_tcp: true, ..Plan::default() };
    let figures = run(seconds(1), plan, 1);
    assert_good(&figures);
    assert_eq!(figures.unknown, 0, "{figures}");
}

/// As the test before. What a killed client over TCP left is cleared while the device may still
/// have its last verb.
#[on(rdma)]
fn over_rdma_and_tcp_together_clients_that_are_killed_leave_linearizable_histories() {
    let plan = Plan { also_over_tcp: true, kills_workers: true, ..Plan::default() };
    // In a longer round the checker finds no verdict: too many last verbs may still come.
    let figures = runs(plan, kill_time().min(Duration::from_secs(10)), kill_time());
    assert_good(&figures);
    assert!(figures.clients_killed > CLIENTS_KILLED_MIN, "{figures}");
}

#[on(shm, tcp_in_soak)]
fn a_server_killed_at_random_leaves_linearizable_histories() {
    let plan = Plan { kills_server: true, ..Plan::default() };
    let figures = runs(plan, seconds(3), kill_time());
    assert_good(&figures);
    assert!(figures.server_restarts > SERVER_RESTARTS_MIN, "{figures}");
    assert!(figures.idle_restarts < figures.server_restarts.div_ceil(2), "{figures}");
}

#[on(shm, tcp_in_soak)]
fn clients_with_faults_leave_linearizable_histories_and_lose_no_block() {
    let mut run = Run::start(Plan { faulty: 2, ..Plan::default() });
    let mut random = SmallRng::seed_from_u64(1);
    for _ in 0..ATTEMPTS_MAX {
        run.continue_for(seconds(5), &mut random);
        if run.has_all_faults() {
            break;
        }
    }
    let figures = run.check().0;
    assert_good(&figures);
    assert!(has_all_kinds(&figures.faults) && figures.suicides > 0, "{figures}");
    assert!(figures.unknown > 0, "{figures}");
    assert_no_block_is_lost(&run, &figures);
}

/// Checks that after a collection no dead client has a block, and that some had.
fn assert_no_block_is_lost(run: &Run, figures: &Figures) {
    // The second collection also finds the blocks of clients that the first one has fenced.
    let client = run.client();
    client.admin().collect().unwrap();
    let after = client.admin().collect().unwrap();
    assert_eq!(blocks_with_clients(&client), 0, "{figures}");
    assert!(after.blocks_collected > 0, "no block was lost: {figures}");
}

/// The clients die at any verb, also between the WRITEs of two extents.
#[on(each, rdma_in_soak)]
fn clients_that_die_with_long_values_leave_linearizable_histories_and_lose_no_block() {
    let mut run = Run::start(Plan { faulty: 2, has_long: true, ..Plan::default() });
    run.continue_for(seconds(5), &mut SmallRng::seed_from_u64(1));
    let figures = run.check().0;
    assert_eq!(figures.violations, 0, "{figures}");
    assert!(figures.suicides > 0 && figures.unknown > 0, "{figures}");
    assert_no_block_is_lost(&run, &figures);
}

/// There is no room for all values. A PUT that finds none has changed nothing. Meanwhile the
/// clients die at any verb, or are killed.
#[on(shm, tcp_in_soak)]
fn a_full_region_of_long_values_leaves_linearizable_histories_and_loses_no_block() {
    let plan =
        Plan { is_full: true, has_long: true, kills_workers: true, faulty: 2, ..Plan::default() };
    let mut run = Run::start(plan);
    run.continue_for(seconds(5), &mut SmallRng::seed_from_u64(1));
    let figures = run.check().0;
    assert_eq!(figures.violations, 0, "{figures}");
    assert!(figures.operations > scaled(LONG_OPERATIONS_MIN), "{figures}");
    assert!(figures.denied > scaled(DENIED_MIN) && figures.failed > 0, "{figures}");
    assert!(figures.suicides > 0 && figures.clients_killed > CLIENTS_KILLED_MIN, "{figures}");
    assert_no_block_is_lost(&run, &figures);
}

#[on(shm, tcp_in_soak)]
fn a_history_with_one_wrong_answer_is_refused() {
    let mut run = Run::start(Plan::default());
    run.continue_for(seconds(1), &mut SmallRng::seed_from_u64(1));
    let (figures, history) = run.check();
    assert_good(&figures);
    let refused = |wrong: Record, right: &Record| {
        let mut history = history.clone();
        *history.iter_mut().find(|record| *record == right).unwrap() = wrong;
        let verdict = farside_linearizability::check(&history);
        assert!(matches!(verdict, Err(Violation::NotLinearizable { .. })), "{verdict:?}");
    };
    let of_one_key = || history.iter().filter(|record| record.key == "0");
    let is_put = |record: &&Record| {
        (record.operation, record.result) == (HistoryOperation::Put, Ended::Done)
    };
    let puts = || of_one_key().filter(is_put);
    let is_before = |one: &Record, other: &Record| one.returned < Some(other.invoke);
    // A GET that finds a value which was overwritten before it began.
    let (stale, get) = of_one_key()
        .filter(|record| record.operation == HistoryOperation::Get && record.found.is_some())
        .find_map(|get| {
            let earlier = puts().filter(|put| is_before(put, get));
            let newer = earlier.max_by_key(|put| put.invoke)?;
            Some((puts().find(|put| is_before(put, newer))?, get))
        })
        .unwrap();
    refused(Record { found: stale.argument.clone(), version: None, ..get.clone() }, get);
    // A PUT that failed, although its value was found.
    let found = of_one_key().filter_map(|record| record.found.as_ref());
    let found: Vec<&String> = found.collect();
    let put = puts().find(|put| found.contains(&put.argument.as_ref().unwrap())).unwrap();
    refused(Record { result: Ended::Failed, ..put.clone() }, put);
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak() {
    const ROUND: Duration = Duration::from_secs(1);
    let plan = Plan {
        kills_workers: true,
        kills_server: true,
        faulty: 1,
        chores: true,
        ..Plan::default()
    };
    let total = runs(plan, ROUND, soak_time());
    assert_good(&total);
    assert!(!total.faults.contains(&0) && total.suicides > 0, "{total}");
    assert!(!total.chores.contains(&0), "{total}");
}
