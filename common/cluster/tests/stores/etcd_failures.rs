//! A real etcd of three members, of which some are frozen or killed. A frozen process accepts
//! connections and answers nothing, so only a deadline finds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farside_cluster::{Commit, RecordStore, StoreError, StoreOptions};

use crate::contract::{LONG, get};
use crate::etcd::problems;
use crate::etcd_process::{Etcd, is_left_out, until};
use crate::server;

/// More than the deadline of any call, for a machine that is busy.
const CALL_MAX: Duration = Duration::from_secs(60);

/// Calls, and checks that it ended by its deadline.
fn bounded<T>(call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = call();
    assert!(begun.elapsed() < CALL_MAX, "a call took {:?}", begun.elapsed());
    result
}

/// Counts in a record, as servers change theirs: by what it read, and once more after a commit
/// with an unknown outcome. Returns the number.
fn count_on(store: &dyn RecordStore) -> u64 {
    until("no commit succeeds", || {
        let records = bounded(|| store.read()).ok()?;
        let found = records.by_key.get("count");
        let number: u64 =
            found.map_or(0, |found| std::str::from_utf8(&found.value).unwrap().parse().unwrap());
        let condition = ("count".to_owned(), found.map(|found| found.revision));
        let change = ("count".to_owned(), Some((number + 1).to_string().into_bytes()));
        match bounded(|| store.commit(&[condition], &[change])) {
            Ok(Commit::Done) => Some(number + 1),
            Ok(Commit::Refused) | Err(StoreError::Unreachable { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    })
}

#[test]
fn one_frozen_member_of_three_is_passed_over() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(3, &[]);
    let store = etcd.store();
    let mut announcement = store.announce(&server(1)).unwrap();
    let mut last = 0;
    for frozen in 0..3 {
        // A watch on the frozen member ends by its timeout. The others may tell it of a change.
        let revision = store.read().unwrap().revision;
        let watcher = etcd.store_at(&[frozen], &StoreOptions::default());
        watcher.read().unwrap();
        thread::scope(|scope| {
            let wait = || watcher.wait_for_change(revision, Duration::from_secs(3));
            let watching = scope.spawn(move || bounded(wait));
            thread::sleep(Duration::from_millis(200));
            etcd.freeze(frozen);
            for _ in 0..3 {
                let number = count_on(&*store);
                assert!(number > last);
                last = number;
            }
            watching.join().unwrap().unwrap();
        });
        // This one has no other member.
        assert!(matches!(bounded(|| watcher.read()), Err(StoreError::Unreachable { .. })));
        assert!(watcher.commit(&[], &[("x".to_owned(), None)]).is_err());
        // A watch begins at another member, and sees a change.
        let revision = until("no read", || store.read().ok()).revision;
        count_on(&*store);
        bounded(|| store.wait_for_change(revision, LONG)).unwrap();
        until("the announcement is not kept alive", || bounded(|| announcement.keep_alive()).ok());
        let found = problems(&*store);
        assert!(found.iter().any(|problem| problem.contains("start this member")), "{found:?}");
        etcd.thaw(frozen);
        until("the member does not come back", || watcher.read().ok());
    }
    until("a problem remains", || problems(&*store).is_empty().then_some(()));
    assert_eq!(store.read().unwrap().servers().count(), 1);
}

#[test]
fn each_member_of_three_is_killed_while_records_change() {
    if is_left_out() {
        return;
    }
    let mut etcd = Etcd::start(3, &[]);
    let store = etcd.store();
    let is_over = Arc::new(AtomicBool::new(false));
    let counting = thread::spawn({
        let (store, is_over) = (Arc::clone(&store), Arc::clone(&is_over));
        move || {
            let mut last = 0;
            while !is_over.load(Ordering::Relaxed) {
                let number = count_on(&*store);
                assert!(number > last, "a commit was lost: {number} after {last}");
                last = number;
            }
            last
        }
    });
    let reader = etcd.store();
    let number = || {
        let found = reader.read().ok().and_then(|records| {
            let value = &records.by_key.get("count")?.value;
            std::str::from_utf8(value).unwrap().parse::<u64>().ok()
        });
        found.unwrap_or(0)
    };
    for killed in 0..3 {
        etcd.kill(killed);
        let before = until("no reads", || Some(number()).filter(|number| *number > 0));
        until("no progress without a member", || (number() > before + 5).then_some(()));
        etcd.restart(killed);
        let own = etcd.store_at(&[killed], &StoreOptions::default());
        until("the member does not come back", || own.read().ok());
    }
    is_over.store(true, Ordering::Relaxed);
    let last = counting.join().unwrap();
    assert_eq!(get(&*store, "count").unwrap().0, last.to_string());
}

#[test]
fn no_commit_is_lost_when_the_leader_changes() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(3, &[]);
    let store = etcd.store();
    let mut last = 0;
    for _ in 0..6 {
        let leader = until("no leader", || etcd.leader());
        let next = (leader + 1) % 3;
        until("the leader does not change", || etcd.move_leader(next).then_some(()));
        let number = count_on(&*store);
        assert!(number > last, "a commit was lost: {number} after {last}");
        last = number;
        until("the change is not seen", || (etcd.leader() == Some(next)).then_some(()));
    }
}

#[test]
fn a_cluster_without_a_majority_is_reported() {
    if is_left_out() {
        return;
    }
    let mut etcd = Etcd::start(3, &[]);
    let only_first = etcd.store_at(&[0], &StoreOptions::default());
    let found = problems(&*only_first);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().all(|problem| problem.contains("add its HOST:PORT")));
    let store = etcd.store();
    count_on(&*store);
    etcd.kill(1);
    etcd.kill(2);
    // No read is answered from what the rest has: that could be old.
    until("a read is not linearizable", || bounded(|| store.read()).err());
    let condition = ("count".to_owned(), None);
    assert!(bounded(|| store.commit(&[condition], &[])).is_err());
    until("the missing leader is not reported", || {
        problems(&*store).iter().any(|problem| problem.contains("no leader")).then_some(())
    });
    // With all members gone, the check still answers.
    etcd.kill(0);
    assert_eq!(bounded(|| problems(&*store)).len(), 3);
    for member in 0..3 {
        etcd.restart(member);
    }
    until("the cluster does not come back", || store.read().ok());
}
