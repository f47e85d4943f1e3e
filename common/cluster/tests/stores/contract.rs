//! The promises that every store keeps. Each function gets an empty store.

use std::thread;
use std::time::{Duration, Instant};

use farside_cluster::{ClusterRecord, Commit, RecordStore, Revision, ShardRecord};
use farside_control::cluster::Id;

pub(crate) use crate::etcd_process::LONG;
use crate::server;

/// A commit of one key with this condition.
pub(crate) fn put(
    store: &dyn RecordStore,
    key: &str,
    expected: Option<Revision>,
    value: &str,
) -> Commit {
    let change = (key.to_owned(), Some(value.as_bytes().to_vec()));
    store.commit(&[(key.to_owned(), expected)], &[change]).unwrap()
}

/// The value and the revision of a record.
pub(crate) fn get(store: &dyn RecordStore, key: &str) -> Option<(String, Revision)> {
    let records = store.read().unwrap();
    let found = records.by_key.get(key)?;
    assert!(found.revision <= records.revision);
    Some((String::from_utf8(found.value.clone()).unwrap(), found.revision))
}

/// All of these.
pub(crate) fn check_all(store: &dyn RecordStore) {
    commits_follow_their_conditions(store);
    several_records_change_together(store);
    records_make_a_map(store);
    one_of_two_racing_commits_wins(store);
    waiting_ends_with_a_change(store);
    announcements_are_written_and_replaced(store);
    let health = store.health().unwrap();
    assert!(!health.is_empty() && health.iter().all(|found| found.problem.is_none()), "{health:?}");
}

fn commits_follow_their_conditions(store: &dyn RecordStore) {
    let none = store.read().unwrap();
    assert!(none.by_key.is_empty());
    assert_eq!(put(store, "a", None, "1"), Commit::Done);
    let (value, first) = get(store, "a").unwrap();
    assert_eq!(value, "1");
    assert!(first > none.revision);
    // It exists now, so a creation is refused, and so is a change of another revision.
    assert_eq!(put(store, "a", None, "2"), Commit::Refused);
    assert_eq!(put(store, "a", Some(first + 1), "2"), Commit::Refused);
    assert_eq!(get(store, "a"), Some(("1".to_owned(), first)));
    assert_eq!(put(store, "a", Some(first), "2"), Commit::Done);
    assert_eq!(put(store, "a", Some(first), "3"), Commit::Refused);
    assert!(get(store, "a").unwrap().1 > first);
    // A removed record is absent again.
    assert_eq!(store.commit(&[], &[("a".to_owned(), None)]).unwrap(), Commit::Done);
    assert_eq!(get(store, "a"), None);
    assert_eq!(put(store, "a", None, "4"), Commit::Done);
}

fn several_records_change_together(store: &dyn RecordStore) {
    let change = |key: &str, value: &str| (key.to_owned(), Some(value.as_bytes().to_vec()));
    let (_, revision) = get(store, "a").unwrap();
    let conditions = [("a".to_owned(), Some(revision)), ("b".to_owned(), None)];
    let changes = [change("a", "5"), change("b", "5"), change("c", "5")];
    assert_eq!(store.commit(&conditions, &changes).unwrap(), Commit::Done);
    let records = store.read().unwrap();
    let revisions: Vec<_> = ["a", "b", "c"].map(|key| records.by_key[key].revision).into();
    assert!(revisions.iter().all(|found| *found == records.revision), "{revisions:?}");
    // One condition that does not hold is enough, and nothing changes.
    let conditions = [("a".to_owned(), Some(records.revision)), ("b".to_owned(), None)];
    assert_eq!(store.commit(&conditions, &[change("a", "6")]).unwrap(), Commit::Refused);
    assert_eq!(store.read().unwrap(), records);
}

fn records_make_a_map(store: &dyn RecordStore) {
    let cluster = ClusterRecord::new(Id([1; 16]), Id([2; 16]), 2, 2000);
    let shards = [0, 1].map(|shard| ShardRecord::default().change(shard));
    let conditions = [(ClusterRecord::KEY.to_owned(), None)];
    let changes = [&[cluster.change()][..], &shards].concat();
    assert_eq!(store.commit(&conditions, &changes).unwrap(), Commit::Done);
    let records = store.read().unwrap();
    assert_eq!(records.cluster().unwrap(), cluster);
    assert_eq!(records.map().unwrap().shards.len(), 2);
    assert_eq!(records.shard(1).unwrap().1, records.revision);
    assert_eq!(store.commit(&conditions, &changes).unwrap(), Commit::Refused);
}

fn one_of_two_racing_commits_wins(store: &dyn RecordStore) {
    const ROUNDS: usize = 20;
    let wins: usize = thread::scope(|scope| {
        let racers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let race = |round: &usize| {
                        put(store, &format!("race/{round}"), None, "won") == Commit::Done
                    };
                    (0..ROUNDS).filter(race).count()
                })
            })
            .collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).sum()
    });
    assert_eq!(wins, ROUNDS);
}

fn waiting_ends_with_a_change(store: &dyn RecordStore) {
    // Without a change, the wait ends by itself.
    let revision = store.read().unwrap().revision;
    store.wait_for_change(revision, Duration::from_millis(100)).unwrap();
    // A change before the wait counts.
    put(store, "w", None, "1");
    let begun = Instant::now();
    store.wait_for_change(revision, LONG).unwrap();
    let revision = store.read().unwrap().revision;
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.wait_for_change(revision, LONG).unwrap());
        while !waiting.is_finished() && begun.elapsed() < LONG {
            assert_eq!(
                store.commit(&[], &[("w".to_owned(), Some(b"2".to_vec()))]).unwrap(),
                Commit::Done
            );
            thread::sleep(Duration::from_millis(20));
        }
    });
    assert!(begun.elapsed() < LONG, "a change did not end the wait");
}

fn announcements_are_written_and_replaced(store: &dyn RecordStore) {
    let before = store.read().unwrap().revision;
    let mut announcement = store.announce(&server(7)).unwrap();
    let found: Vec<_> = store.read().unwrap().servers().map(Result::unwrap).collect();
    assert_eq!(found, [server(7)]);
    let mut serving = server(7);
    serving.shard = Some(1);
    announcement.update(&serving).unwrap();
    let records = store.read().unwrap();
    assert_eq!(records.servers().map(Result::unwrap).collect::<Vec<_>>(), [serving.clone()]);
    assert!(records.revision > before);
    // Nothing is written while the announcement is only kept alive.
    for _ in 0..3 {
        announcement.keep_alive().unwrap();
    }
    assert_eq!(store.read().unwrap().revision, records.revision);
}
