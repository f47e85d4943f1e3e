//! Histories of a server that evicts keys, and of values that expire.
//!
//! A key that is present may become absent at any moment, and only an operation that stores a value
//! makes it present again. A value that expires is not found once its time to live is over.

use std::collections::HashMap;
use std::time::Duration;

use farside_linearizability::{Ended, HistoryOperation, Record};
use farside_tests::recorder::ttl_ms_of;
use farside_tests::scaled;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::run::{
    CLIENTS_KILLED_MIN, EVICTIONS_MIN, Figures, LONG_EVICTIONS_MIN, LONG_OPERATIONS_MIN,
    OPERATIONS_MIN, Plan, Run,
};
use super::{runs, soak_time};

/// How much later than its time to live a value may be found, in nanoseconds: an expiry is a whole
/// millisecond, and the wall clock may be corrected.
const MARGIN_NS: u64 = 3_000_000;

/// Checks a history of a cache.
pub(super) fn check_cache(history: &[Record]) -> Result<(), String> {
    farside_linearizability::check_cache(history).map_err(|violation| violation.to_string())?;
    match found_expired(history) {
        None => Ok(()),
        Some([store, found]) => Err(format!("an expired value was found:\n  {store}\n  {found}")),
    }
}

/// Returns an operation that found a value although it began after the value's expiry, behind the
/// operation that had stored the value.
fn found_expired(history: &[Record]) -> Option<[&Record; 2]> {
    let mut stores: HashMap<(&str, &str), &Record> = HashMap::new();
    for record in history.iter().filter(|record| record.result == Ended::Done) {
        if let Some(value) = &record.argument {
            stores.insert((&record.key, value), record);
        }
    }
    let finds = history.iter().filter_map(|record| Some((record, record.found.as_ref()?)));
    finds.into_iter().find_map(|(record, value)| {
        let store = stores.get(&(record.key.as_str(), value.as_str()))?;
        let ttl_ns = ttl_ms_of(&record.key, value)? * 1_000_000;
        let is_late = record.invoke > store.returned? + ttl_ns + MARGIN_NS;
        is_late.then_some([*store, record])
    })
}

fn assert_good(figures: &Figures) {
    assert_eq!(figures.violations, 0, "{figures}");
    assert!(figures.operations > scaled(OPERATIONS_MIN), "{figures}");
    assert!(figures.failed < figures.operations / 10, "{figures}");
    assert!(figures.evicted > scaled(EVICTIONS_MIN) && figures.expired > 0, "{figures}");
}

/// The duration of a round, in which the server walks through the index for expired values.
const ROUND: Duration = Duration::from_secs(5);

#[on(shm, tcp_in_soak)]
fn a_full_cache_leaves_linearizable_histories_while_clients_are_killed() {
    let plan = Plan { is_cache: true, kills_workers: true, ..Plan::default() };
    let figures = runs(plan, ROUND, ROUND);
    assert_good(&figures);
    assert!(figures.clients_killed > CLIENTS_KILLED_MIN, "{figures}");
}

/// The clients also die at any verb, such as one between the WRITEs of two extents.
fn assert_good_with_long(figures: &Figures) {
    assert_eq!(figures.violations, 0, "{figures}");
    assert!(figures.operations > scaled(LONG_OPERATIONS_MIN), "{figures}");
    assert!(figures.failed < figures.operations / 10, "{figures}");
    assert!(figures.long_evicted > scaled(LONG_EVICTIONS_MIN), "{figures}");
    assert!(figures.expired > 0 && figures.suicides > 0, "{figures}");
    assert!(figures.clients_killed > CLIENTS_KILLED_MIN, "{figures}");
}

#[on(shm, tcp_in_soak)]
fn a_full_cache_of_long_values_leaves_linearizable_histories_while_clients_die() {
    let plan =
        Plan { is_cache: true, has_long: true, kills_workers: true, faulty: 2, ..Plan::default() };
    assert_good_with_long(&runs(plan, ROUND, ROUND));
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak_of_a_cache_of_long_values() {
    let plan =
        Plan { is_cache: true, has_long: true, kills_workers: true, faulty: 2, ..Plan::default() };
    assert_good_with_long(&runs(plan, ROUND, soak_time()));
}

#[on(shm, tcp_in_soak)]
fn a_history_in_which_a_value_returns_or_outlives_its_expiry_is_refused() {
    let mut run = Run::start(Plan { is_cache: true, ..Plan::default() });
    run.continue_for(ROUND, &mut SmallRng::seed_from_u64(1));
    let (figures, history) = run.check();
    assert_good(&figures);
    let verdict = farside_linearizability::check(&history);
    assert!(verdict.is_err(), "no recorded key was evicted");
    let is_before = |one: &Record, other: &Record| one.returned < Some(other.invoke);
    let is_get = |record: &&Record| {
        record.operation == HistoryOperation::Get && record.result != Ended::Unknown
    };
    let refused = |get: &Record, store: &Record| {
        let mut history = history.clone();
        let wrong = history.iter_mut().find(|record| *record == get).unwrap();
        (wrong.result, wrong.found, wrong.version) = (Ended::Done, store.argument.clone(), None);
        check_cache(&history).unwrap_err()
    };
    let stores = || {
        let is_put = |record: &&Record| {
            record.operation == HistoryOperation::Put && record.result == Ended::Done
        };
        history.iter().filter(is_put)
    };
    // A GET that finds a value again which an earlier GET did not find any more.
    let (store, late) = stores()
        .find_map(|store| {
            let of_key = || history.iter().filter(is_get).filter(|get| get.key == store.key);
            let gone = of_key().find(|get| is_before(store, get) && get.found.is_none())?;
            Some((store, of_key().find(|get| is_before(gone, get) && get.found.is_none())?))
        })
        .unwrap();
    let said = refused(late, store);
    assert!(said.contains("no order of the operations"), "{said}");
    // A GET that finds the value that was stored last, after its expiry.
    let found = |get: &&Record| {
        let ttl = get.found.as_ref().and_then(|value| ttl_ms_of(&get.key, value));
        ttl.is_some() && is_get(get)
    };
    let get = history.iter().find(found).unwrap();
    let mut late = history.clone();
    let wrong = late.iter_mut().find(|record| *record == get).unwrap();
    let far = u64::MAX - 1;
    (wrong.invoke, wrong.returned) = (far, Some(far));
    let [_, expired] = found_expired(&late).unwrap();
    assert_eq!(expired.invoke, far);
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak_of_a_cache() {
    let plan = Plan { is_cache: true, kills_workers: true, faulty: 1, ..Plan::default() };
    let total = runs(plan, ROUND, soak_time());
    assert_good(&total);
    assert!(total.suicides > 0 && total.clients_killed > CLIENTS_KILLED_MIN, "{total}");
}
