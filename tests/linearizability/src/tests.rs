//! Tests the checker: against trying every order, on small random histories, and with histories
//! that are known to be wrong.

use proptest::prelude::*;

use super::*;

fn record(process: u64, operation: HistoryOperation, argument: Option<u32>) -> Record {
    Record {
        process,
        operation,
        key: "k".to_owned(),
        argument: argument.map(|value| value.to_string()),
        expected: None,
        result: Ended::Done,
        found: None,
        version: None,
        invoke: 0,
        returned: None,
    }
}

fn ended(done: bool) -> Ended {
    if done { Ended::Done } else { Ended::Refused }
}

fn get(process: u64, found: Option<u32>) -> Record {
    let result = ended(found.is_some());
    let found = found.map(|value| value.to_string());
    Record { result, found, ..record(process, HistoryOperation::Get, None) }
}

/// Returns a GET of a value with this version.
fn read_version(from: u64, value: u32, version: &str) -> Record {
    at(from, from + 1, Record { version: Some(version.to_owned()), ..get(2, Some(value)) })
}

fn put(process: u64, value: u32) -> Record {
    record(process, HistoryOperation::Put, Some(value))
}

/// Sets the times at which an operation begins and returns.
fn at(invoke: u64, returned: u64, record: Record) -> Record {
    Record { invoke, returned: Some(returned), ..record }
}

/// Whether some order of these operations explains all answers. `done` are the operations that are
/// already in the order; operations without an answer are optional. In a cache the key may become
/// absent before each operation.
fn explains(records: &[Record], done: &mut Vec<usize>, held: Option<Held>, is_cache: bool) -> bool {
    let values = Values::new("k", &records.iter().collect::<Vec<_>>(), false).unwrap();
    let is_left = |index: &usize| !done.contains(index);
    let rest: Vec<usize> = (0..records.len()).filter(is_left).collect();
    if rest.iter().all(|index| records[*index].result == Ended::Unknown) {
        return true;
    }
    if is_cache && held.is_some() && explains(records, done, None, is_cache) {
        return true;
    }
    for next in &rest {
        // An operation that ended before this one began must come before it.
        let must_precede = |other: &&usize| {
            let other = &records[**other];
            other.result != Ended::Unknown && other.returned < Some(records[*next].invoke)
        };
        if rest.iter().any(|other| must_precede(&other)) {
            continue;
        }
        let (after, answer) = values.call(&records[*next]).unwrap().apply(held);
        if values.answer(&records[*next]).is_some_and(|told| told != answer) {
            continue;
        }
        // An operation without an answer that ended before this one began has had no effect.
        let had_no_effect = |other: &&usize| {
            let end = records[**other].returned;
            *other != next && end.is_some_and(|end| end < records[*next].invoke)
        };
        let before = done.len();
        done.push(*next);
        done.extend(rest.iter().filter(had_no_effect));
        if explains(records, done, after, is_cache) {
            return true;
        }
        done.truncate(before);
    }
    false
}

/// Returns an operation with a random answer of a valid form, at a random time.
fn any_record() -> impl Strategy<Value = Record> {
    let value = 0..3u32;
    let conditional = |operation| {
        (0..3u32, any::<bool>()).prop_map(move |(value, done)| Record {
            result: ended(done),
            ..record(0, operation, Some(value))
        })
    };
    let operations = prop_oneof![
        prop::option::of(0..3u32).prop_map(|found| get(0, found)),
        value.clone().prop_map(|value| put(0, value)),
        conditional(HistoryOperation::Insert),
        conditional(HistoryOperation::Update),
        any::<bool>().prop_map(|done| {
            Record { result: ended(done), ..record(0, HistoryOperation::Delete, None) }
        }),
        (value.clone(), value, prop::option::of(0..3u32), any::<bool>()).prop_map(
            |(expected, value, found, done)| {
                let (result, expected) = (ended(done), Some(expected.to_string()));
                let found = found.filter(|_| !done).map(|value| value.to_string());
                let exchange = record(0, HistoryOperation::Exchange, Some(value));
                Record { expected, result, found, ..exchange }
            }
        ),
    ];
    (operations, 0..12u64, 0..6u64, 0..8u8).prop_map(|(operation, invoke, takes, unknown)| {
        let record = at(invoke, invoke + takes, operation);
        let returned = record.returned.filter(|_| unknown == 0);
        match unknown {
            0 | 1 => Record { result: Ended::Unknown, found: None, returned, ..record },
            _ => record,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn the_checker_agrees_with_trying_every_order(
        records in prop::collection::vec(any_record(), 0..7),
    ) {
        let explained = |is_cache| explains(&records, &mut Vec::new(), None, is_cache);
        let verdict = check(&records);
        prop_assert_eq!(verdict.is_ok(), explained(false), "{:?}", verdict);
        let verdict = check_cache(&records);
        prop_assert_eq!(verdict.is_ok(), explained(true), "in a cache: {:?}", verdict);
    }
}

#[test]
fn random_histories_of_both_kinds_are_tried() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let histories = prop::collection::vec(any_record(), 1..7);
    let mut good = 0;
    for _ in 0..1000 {
        let history = histories.new_tree(&mut runner).unwrap().current();
        good += usize::from(check(&history).is_ok());
    }
    assert!((50..950).contains(&good), "{good} of 1000 random histories are linearizable");
}

fn assert_bad(history: &[Record]) {
    let verdict = check(history);
    assert!(matches!(verdict, Err(Violation::NotLinearizable { .. })), "{verdict:?}");
}

#[test]
fn a_stale_read_is_found() {
    assert_bad(&[at(0, 1, put(1, 1)), at(2, 3, put(1, 2)), at(4, 5, get(2, Some(1)))]);
    // It is right if it is concurrent with the second PUT.
    let concurrent = [at(0, 1, put(1, 1)), at(2, 6, put(1, 2)), at(4, 5, get(2, Some(1)))];
    assert_eq!(check(&concurrent), Ok(()));
}

#[test]
fn reads_that_go_back_are_found() {
    let put_two = at(2, 9, put(1, 2));
    let (new, old) = (at(3, 4, get(2, Some(2))), at(5, 6, get(3, Some(1))));
    assert_bad(&[at(0, 1, put(1, 1)), put_two, new, old]);
}

#[test]
fn a_lost_update_and_a_value_from_nowhere_are_found() {
    let exchange = |process, expected: u32, value| Record {
        expected: Some(expected.to_string()),
        ..record(process, HistoryOperation::Exchange, Some(value))
    };
    assert_bad(&[at(0, 1, put(1, 1)), at(2, 5, exchange(1, 1, 2)), at(2, 5, exchange(2, 1, 3))]);
    assert_bad(&[at(0, 1, put(1, 1)), at(2, 3, get(2, Some(9)))]);
}

#[test]
fn two_inserts_or_two_deletes_of_one_key_are_found() {
    let insert = |process, value| record(process, HistoryOperation::Insert, Some(value));
    assert_bad(&[at(0, 5, insert(1, 1)), at(0, 5, insert(2, 2))]);
    let delete = |process| record(process, HistoryOperation::Delete, None);
    assert_bad(&[at(0, 1, put(1, 1)), at(2, 5, delete(1)), at(2, 5, delete(2))]);
}

#[test]
fn an_operation_that_never_returned_may_take_effect_late_or_never() {
    let lost = Record { result: Ended::Unknown, returned: None, ..put(1, 2) };
    let first = at(0, 1, put(2, 1));
    for found in [1, 2] {
        let history = [first.clone(), lost.clone(), at(7, 8, get(2, Some(found)))];
        assert_eq!(check(&history), Ok(()));
    }
    // But its value cannot be found, then lost, then found again.
    let seen = [2, 1, 2].map(Some);
    let reads = (0..3).map(|n| at(10 + 2 * n, 11 + 2 * n, get(2, seen[n as usize])));
    assert_bad(&[first, lost].into_iter().chain(reads).collect::<Vec<_>>());
}

#[test]
fn an_operation_that_returned_without_an_answer_took_effect_by_then_or_never() {
    let lost = at(2, 5, Record { result: Ended::Unknown, ..put(1, 2) });
    let (first, before) = (at(0, 1, put(2, 1)), at(3, 4, get(2, Some(1))));
    for found in [1, 2] {
        let after = [6, 8].map(|from| at(from, from + 1, get(2, Some(found))));
        let history = [first.clone(), lost.clone(), before.clone()];
        assert_eq!(check(&[&history[..], &after].concat()), Ok(()));
    }
    assert_bad(&[first, lost, at(6, 7, get(2, Some(1))), at(8, 9, get(2, Some(2)))]);
}

#[test]
fn a_failed_operation_had_no_effect() {
    let failed = Record { result: Ended::Failed, ..at(0, 1, put(1, 1)) };
    assert_eq!(check(&[failed.clone(), at(2, 3, get(1, None))]), Ok(()));
    assert_bad(&[failed, at(2, 3, get(1, Some(1)))]);
}

/// A cache may lose any key, and nothing else: no value returns, and none comes from nowhere.
#[test]
fn a_cache_may_lose_a_key_but_no_value_returns() {
    let insert = |result| Record { result, ..record(1, HistoryOperation::Insert, Some(2)) };
    let exchange = |expected: u32| Record {
        expected: Some(expected.to_string()),
        ..record(1, HistoryOperation::Exchange, Some(3))
    };
    let delete = |result| Record { result, ..record(1, HistoryOperation::Delete, None) };
    let first = at(0, 1, put(1, 1));
    let with = |more: &[Record]| check_cache(&[std::slice::from_ref(&first), more].concat());
    let gone = at(2, 3, get(2, None));
    for lost in [gone.clone(), at(2, 3, insert(Ended::Done)), at(2, 3, delete(Ended::Refused))] {
        assert_eq!(with(std::slice::from_ref(&lost)), Ok(()));
        assert!(check(&[first.clone(), lost]).is_err());
    }
    // A value that was evicted, one that was replaced, and one of another key.
    assert!(with(&[gone.clone(), at(4, 5, get(2, Some(1)))]).is_err());
    assert!(with(&[at(2, 3, put(1, 2)), at(4, 5, get(2, Some(1)))]).is_err());
    assert!(with(&[at(2, 3, get(2, Some(9)))]).is_err());
    // What depends on the value fails once the key is gone, and an INSERT once it is there.
    assert!(with(&[gone.clone(), at(4, 5, exchange(1))]).is_err());
    assert!(with(&[gone.clone(), at(4, 5, delete(Ended::Done))]).is_err());
    assert!(with(&[gone, at(4, 5, insert(Ended::Refused))]).is_err());
    // One of two exchanges of the same value is a lost update.
    assert!(with(&[at(2, 5, exchange(1)), at(2, 5, exchange(1))]).is_err());
}

#[test]
fn a_version_belongs_to_one_write() {
    let puts = [at(0, 1, put(1, 1)), at(4, 5, put(1, 2))];
    let with = |reads: [Record; 2]| check(&[&puts[..], &reads].concat());
    assert_eq!(with([read_version(2, 1, "a"), read_version(6, 2, "b")]), Ok(()));
    assert!(matches!(
        with([read_version(2, 1, "a"), read_version(6, 2, "a")]),
        Err(Violation::Version { .. })
    ));
    assert!(matches!(
        with([read_version(2, 1, "a"), read_version(3, 1, "b")]),
        Err(Violation::Version { .. })
    ));
}

#[test]
fn an_exchange_by_version_is_an_exchange_of_the_versions_value() {
    let read = read_version(2, 1, "a");
    let exchange = |version: &str, value| Record {
        expected: Some(version.to_owned()),
        ..record(1, HistoryOperation::ExchangeVersion, Some(value))
    };
    let first = at(0, 1, put(1, 1));
    let history = [first.clone(), read.clone(), at(4, 5, exchange("a", 2))];
    assert_eq!(check(&history), Ok(()));
    assert_bad(&[first, read, at(4, 5, exchange("a", 2)), at(6, 7, exchange("a", 3))]);
}

#[test]
fn compactions_change_versions_and_nothing_else() {
    let refused = |expected: &str, found, version: &str| Record {
        operation: HistoryOperation::ExchangeVersion,
        argument: Some("2".to_owned()),
        expected: Some(expected.to_owned()),
        result: Ended::Refused,
        ..read_version(6, found, version)
    };
    let first = [at(0, 1, put(1, 1)), read_version(2, 1, "a")];
    let with = |more: Record| [&first[..], &[more]].concat();
    for moved in [with(read_version(4, 1, "b")), with(refused("a", 1, "b"))] {
        assert_eq!(check_compacted(&moved), Ok(()));
        assert!(check(&moved).is_err());
    }
    // Wrong: refused although the version was the required one; refused by a value that was never
    // stored; one version of two values.
    assert!(check_compacted(&with(refused("a", 1, "a"))).is_err());
    assert!(check_compacted(&with(refused("a", 3, "b"))).is_err());
    let two = [with(at(3, 4, put(1, 3))), vec![read_version(6, 3, "a")]].concat();
    assert!(matches!(check_compacted(&two), Err(Violation::Version { .. })));
}

#[test]
fn a_long_history_of_many_processes_is_checked_without_exceeding_the_limit() {
    let (processes, rounds) = (8u64, 4000u64);
    let mut history = Vec::new();
    for round in 0..rounds {
        for process in 0..processes {
            let start = round * 100 + process;
            let value = (round * processes + process) as u32;
            // All operations of a round overlap. A GET finds the value of the PUT before it.
            let operation = match process % 2 {
                0 => put(process, value),
                _ => get(process, Some(value - 1)),
            };
            history.push(at(start, start + 50, operation));
        }
    }
    assert_eq!(check(&history), Ok(()));
}

#[test]
fn histories_round_trip_through_json_lines() {
    let lost = Record { result: Ended::Unknown, returned: None, ..put(1, 2) };
    let history = [at(0, 1, put(1, 1)), lost, at(4, 5, get(2, None))];
    let mut bytes = Vec::new();
    write(&history, &mut bytes).unwrap();
    let text = String::from_utf8(bytes.clone()).unwrap();
    let first = r#"{"process":1,"operation":"put","key":"k","argument":"1","result":"done","#;
    assert!(text.starts_with(&format!(r#"{first}"invoke":0,"return":1}}"#)), "{text}");
    assert_eq!(read(&bytes[..]).unwrap(), history);
    assert!(read(&b"{}\n"[..]).unwrap_err().starts_with("line 1: "));
}

#[test]
fn a_delete_by_version_removes_this_version_only() {
    let delete = |version: &str| Record {
        expected: Some(version.to_owned()),
        ..record(1, HistoryOperation::DeleteVersion, None)
    };
    let first = [at(0, 1, put(1, 1)), read_version(2, 1, "a")];
    let with = |more: &[Record]| check(&[&first[..], more].concat());
    assert_eq!(with(&[at(4, 5, delete("a")), at(6, 7, get(2, None))]), Ok(()));
    assert!(with(&[at(4, 5, put(1, 2)), at(6, 7, delete("a"))]).is_err());
    // A version that no GET has found may be the present one.
    assert_eq!(with(&[at(4, 5, delete("b")), at(6, 7, get(2, None))]), Ok(()));
    let refused = Record { result: Ended::Refused, ..delete("a") };
    assert!(with(&[at(4, 5, refused)]).is_err());
}

/// A get-or-insert stores only if the key is absent, and returns what kept it from storing.
#[test]
fn a_second_get_or_insert_finds_the_value_of_the_first() {
    let stored = |process, value| record(process, HistoryOperation::GetOrInsert, Some(value));
    let found = |process, value, found: u32| {
        let (result, found) = (Ended::Refused, Some(found.to_string()));
        Record { result, found, ..stored(process, value) }
    };
    assert_eq!(check(&[at(0, 5, stored(1, 7)), at(1, 6, found(2, 8, 7))]), Ok(()));
    assert!(check(&[at(0, 5, stored(1, 7)), at(1, 6, stored(2, 8))]).is_err());
    assert!(check(&[at(0, 5, stored(1, 7)), at(1, 6, found(2, 8, 8))]).is_err());
}

/// As after the loss of a client with many operations on one key in flight.
#[test]
fn many_operations_without_an_answer_have_a_verdict() {
    let lost = |operation, argument| {
        let record = record(1, operation, argument);
        at(0, 9, Record { result: Ended::Unknown, ..record })
    };
    let increments = [1, 2, 4, 8, 16, 32, 64].map(|n| lost(HistoryOperation::Increment, Some(n)));
    let deletes = || (0..4).map(|_| lost(HistoryOperation::Delete, None));
    let history = |found| {
        let read = [at(1, 2, get(2, Some(found))), at(20, 21, get(2, Some(127)))];
        increments.iter().cloned().chain(deletes()).chain(read).collect::<Vec<_>>()
    };
    assert_eq!(check(&history(85)), Ok(()));
    assert!(matches!(check(&history(128)), Err(Violation::NotLinearizable { .. })));
}

/// A touch changes the expiry, and a store that keeps it the value.
#[test]
fn a_register_knows_expiries() {
    let mut register = Register::default();
    let mut run = |id, operation, argument, found| {
        let call = HistoryCall { operation, argument, expiry: 0, expected: None };
        register.invoke(id, call, Ending::Unknown);
        register.respond(id, HistoryAnswer { done: true, found })
    };
    let held = |value, expiry| Some(Held { value, expiry });
    assert_eq!(run(0, HistoryOperation::Put, 1, None), Ok(()));
    assert_eq!(run(1, HistoryOperation::Touch, 5, None), Ok(()));
    assert_eq!(run(2, HistoryOperation::PutKeepTtl, 2, None), Ok(()));
    assert_eq!(run(3, HistoryOperation::Get, 0, held(2, 5)), Ok(()));
    assert_eq!(run(4, HistoryOperation::Put, 3, None), Ok(()));
    let kept = run(5, HistoryOperation::Get, 0, held(3, 5));
    assert_eq!(kept, Err(RegisterFault::NotLinearizable(5)));
    let touch = at(0, 1, record(1, HistoryOperation::Touch, Some(5)));
    assert!(matches!(check(&[touch]), Err(Violation::Record(_))), "a history has no expiries");
}

fn held(value: Value, expiry: Value) -> Held {
    Held { value, expiry }
}

/// Runs operations on a register, one after another. Each is an operation with its argument, expiry
/// and expected content; `done` and `found` are the answer.
fn run(
    register: &mut Register,
    id: u32,
    (operation, argument, expiry): (HistoryOperation, Value, Value),
    expected: Option<Held>,
    (done, found): (bool, Option<Held>),
) -> Result<(), RegisterFault> {
    register.invoke(id, HistoryCall { operation, argument, expiry, expected }, Ending::Unknown);
    register.respond(id, HistoryAnswer { done, found })
}

#[test]
fn a_value_is_absent_from_its_expiry_on() {
    use HistoryOperation::{Delete, Evict, Expire, Get, Insert, Put, Update};
    let (absent, done) = ((false, None), (true, None));
    // A register with a value that has expired at 5, and what follows.
    let after = |follows: &[(HistoryOperation, (bool, Option<Held>))]| {
        let mut register = Register::default();
        run(&mut register, 0, (Put, 1, 5), None, done).unwrap();
        run(&mut register, 1, (Get, 0, 0), None, (true, Some(held(1, 5)))).unwrap();
        register.advance(5).unwrap();
        (2..).zip(follows).try_for_each(|(id, (operation, answer))| {
            run(&mut register, id, (*operation, 2, 0), Some(held(1, 5)), *answer)
        })
    };
    for (operation, answer) in
        [(Get, absent), (Update, absent), (Delete, absent), (Insert, done), (Expire, done)]
    {
        assert_eq!(after(&[(operation, answer)]), Ok(()), "{operation:?}");
    }
    assert!(after(&[(Get, (true, Some(held(1, 5))))]).is_err());
    assert!(after(&[(Update, done)]).is_err());
    // The server removes the value once, and only if nothing has replaced it.
    assert_eq!(after(&[(Evict, done)]), Ok(()));
    assert!(after(&[(Expire, done), (Expire, done)]).is_err());
    assert!(after(&[(Insert, done), (Expire, done)]).is_err());
    assert_eq!(after(&[(Delete, absent), (Get, absent)]), Ok(()));
}

/// An operation that looked before the expiry may change the value after it, unless the value was
/// replaced or removed meanwhile. One that began later may not.
#[test]
fn an_update_that_began_before_the_expiry_counts_the_value() {
    use HistoryOperation::{Expire, Get, Put, Update};
    let (absent, done) = ((false, None), (true, None));
    for is_removed in [false, true] {
        for begins_late in [false, true] {
            let mut register = Register::default();
            run(&mut register, 0, (Put, 1, 5), None, done).unwrap();
            let update = HistoryCall { operation: Update, argument: 2, expiry: 0, expected: None };
            if !begins_late {
                register.invoke(1, update, Ending::Unknown);
            }
            register.advance(5).unwrap();
            if begins_late {
                register.invoke(1, update, Ending::Unknown);
            }
            run(&mut register, 2, (Get, 0, 0), None, absent).unwrap();
            if is_removed {
                run(&mut register, 3, (Expire, 0, 0), Some(held(1, 5)), done).unwrap();
            }
            let updated = register.respond(1, HistoryAnswer { done: true, found: None });
            assert_eq!(updated.is_ok(), !is_removed && !begins_late);
        }
    }
}

/// A removal before the expiry is none of an expired value. An eviction removes one value only.
#[test]
fn a_removal_of_another_value_is_found() {
    use HistoryOperation::{Evict, Expire, Get, Put};
    let done = (true, None);
    let mut register = Register::default();
    run(&mut register, 0, (Put, 1, 5), None, done).unwrap();
    let mut other = register.clone();
    assert!(run(&mut register.clone(), 1, (Expire, 0, 0), Some(held(1, 5)), done).is_err());
    assert_eq!(run(&mut register, 1, (Evict, 0, 0), Some(held(1, 5)), done), Ok(()));
    assert_eq!(run(&mut register, 2, (Get, 0, 0), None, (false, None)), Ok(()));
    assert!(run(&mut other, 1, (Evict, 0, 0), Some(held(2, 0)), done).is_err());
}

#[test]
fn a_lost_increment_append_or_take_is_found() {
    let increment = |process, sum: u32| {
        let found = Some(sum.to_string());
        Record { found, ..record(process, HistoryOperation::Increment, Some(1)) }
    };
    let append = |process| record(process, HistoryOperation::Append, Some(7));
    let take = |process, value: u32| {
        let found = Some(value.to_string());
        Record { found, ..record(process, HistoryOperation::Take, None) }
    };
    let both = |one, two, found| check(&[at(0, 5, one), at(1, 6, two), at(7, 8, get(3, found))]);
    assert_eq!(both(increment(1, 1), increment(2, 2), Some(2)), Ok(()));
    assert!(both(increment(1, 1), increment(2, 1), Some(1)).is_err());
    assert_eq!(both(append(1), append(2), Some(77)), Ok(()));
    assert!(both(append(1), append(2), Some(7)).is_err());
    assert_eq!(both(put(1, 3), take(2, 3), None), Ok(()));
    assert!(both(put(1, 3), take(2, 3), Some(3)).is_err());
    // An increment without an answer has added to the value, or not.
    let lost = Record { result: Ended::Unknown, found: None, ..increment(1, 1) };
    assert_eq!(both(lost.clone(), append(2), Some(17)), Ok(()));
    assert_eq!(both(lost.clone(), append(2), Some(7)), Ok(()));
    assert!(both(lost, append(2), Some(27)).is_err());
}
