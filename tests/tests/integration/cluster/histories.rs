//! Proves that operations on one key of a cluster are linearizable, from the records of real
//! processes.
//!
//! Meanwhile servers are killed, stopped and started again on their region files, mostly at another
//! address. Servers are frozen, for less and for longer than clients trust them, and than they
//! trust themselves. Clients are killed and replaced. In the soak, members of etcd are killed and
//! frozen, the leader changes, and the network cuts servers off from etcd, from clients, or from
//! both. At the end a new client reads every key, twice, with a kill of all servers in between.
//!
//! `histories::a_history_with_one_wrong_answer_is_refused` shows that the check can fail: the same
//! code records and checks the histories of both.

mod faults;
mod figures;
mod run;

use std::time::{Duration, Instant};

use farside_tests::etcd_process::is_left_out;
use farside_tests::{network_or_left_out, scaled};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::histories::soak_time;
use figures::Figures;
use run::{OPERATIONS_MIN, Plan, Run};

/// The time of a soak's run, after which the next one begins in a new cluster.
const ROUND: Duration = Duration::from_secs(25);

fn run(plan: Plan, duration: Duration, seed: u64) -> Figures {
    let mut run = Run::start(plan);
    run.continue_for(duration, &mut SmallRng::seed_from_u64(seed));
    run.check()
}

/// Checks that there was enough to check, and no violation.
fn assert_good(figures: &Figures) {
    assert_eq!(figures.violations, 0, "{figures}");
    assert!(figures.operations > scaled(OPERATIONS_MIN), "{figures}");
    assert!(figures.failed < figures.operations / 2, "{figures}");
}

#[on(each)]
fn of_servers_and_clients_that_are_killed_and_frozen_are_linearizable() {
    const DURATION: Duration = Duration::from_secs(6);
    assert_good(&run(Plan::default(), DURATION, 1));
}

/// One session of each worker has its operations in pipelines, one in batches, and one in tasks of
/// an async client. Their connections break before, within and after chains: an operation that had
/// no effect is run again.
#[on(each)]
fn of_many_operations_in_flight_whose_connections_break_are_linearizable() {
    const DURATION: Duration = Duration::from_secs(6);
    let plan = Plan { lanes: Some("lanes"), ..Plan::default() };
    let figures = run(plan, DURATION, 1);
    assert_good(&figures);
    assert!(!figures.broken.contains(&0), "{figures}");
}

/// Runs of this mode of the workers, for the time of a soak.
fn soak_of(mode: &'static str) {
    let (started, mut total) = (Instant::now(), Figures::default());
    let plan = Plan { lanes: Some(mode), ..Plan::default() };
    for seed in 0.. {
        total.add(&run(plan, ROUND, seed));
        if started.elapsed() >= soak_time() {
            break;
        }
    }
    println!("{mode}, in {:?}: {total}", started.elapsed());
    assert_good(&total);
    assert!(!total.broken.contains(&0), "{total}");
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak_of_pipelines() {
    soak_of("pipelines");
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak_of_batches() {
    soak_of("batches");
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak_of_async_clients() {
    soak_of("async");
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak() {
    if is_left_out() {
        return;
    }
    let has_networks = network_or_left_out().is_some();
    let (started, mut total) = (Instant::now(), Figures::default());
    for seed in 0.. {
        let has_partitions = has_networks && seed % 2 == 1;
        let plan = Plan { has_etcd: true, has_partitions, ..Plan::default() };
        total.add(&run(plan, ROUND, seed));
        // A slow machine has had too few rounds for all faults by then.
        let is_complete = total.has_all_kinds(has_networks);
        if started.elapsed() >= soak_time() * if is_complete { 1 } else { 4 } {
            break;
        }
    }
    println!("in {:?}: {total}", started.elapsed());
    assert_good(&total);
    assert!(total.has_all_kinds(has_networks), "{total}");
}
