//! Proves that any sequence of operations by several sessions, one after the other, has the results
//! of a HashMap. Two versions are equal exactly if they are of the same write.

use std::collections::HashMap;

use std::time::Duration;

use farside::OperationError::{NotANumber, NumberOverflow};
use farside::{Error, Outcome, Session, Store, Ttl, Version};
use farside_tests::{ServerProcess, scaled};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

#[derive(Clone, Debug)]
enum ModelStep {
    Get(u8),
    Store(StoreKind, u8, Vec<u8>),
    Delete(u8),
    Exchange(u8, Option<Vec<u8>>, Vec<u8>),
    /// The key; whether the expected version is the current one, otherwise the one before it; and
    /// the new value.
    ExchangeVersion(u8, bool, Vec<u8>),
    Batch(Vec<(u8, Vec<u8>)>),
    Modify(ModificationKind, u8, Vec<u8>),
    Scan,
    ClearCache,
}

#[derive(Clone, Copy, Debug)]
enum ModificationKind {
    Increment(i64),
    Append,
    Take,
    GetOrInsert,
    Replace,
    Touch,
    Version,
}

#[derive(Clone, Copy, Debug)]
enum StoreKind {
    Put,
    Insert,
    Update,
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => proptest::collection::vec(any::<u8>(), 0..4),
        2 => proptest::collection::vec(any::<u8>(), 0..700),
        1 => (0usize..70_000, any::<u8>()).prop_map(|(bytes, byte)| vec![byte; bytes]),
    ]
}

fn modification() -> impl Strategy<Value = ModificationKind> {
    prop_oneof![
        3 => (-3i64..100).prop_map(ModificationKind::Increment),
        1 => any::<i64>().prop_map(ModificationKind::Increment),
        2 => Just(ModificationKind::Append),
        2 => Just(ModificationKind::Take),
        1 => Just(ModificationKind::GetOrInsert),
        1 => Just(ModificationKind::Replace),
        1 => Just(ModificationKind::Touch),
        1 => Just(ModificationKind::Version),
    ]
}

fn operation() -> impl Strategy<Value = ModelStep> {
    let key = 0u8..12;
    let kind = prop_oneof![
        2 => Just(StoreKind::Put),
        1 => Just(StoreKind::Insert),
        1 => Just(StoreKind::Update),
    ];
    prop_oneof![
        4 => key.clone().prop_map(ModelStep::Get),
        8 => (kind, key.clone(), value()).prop_map(|(kind, k, v)| ModelStep::Store(kind, k, v)),
        3 => key.clone().prop_map(ModelStep::Delete),
        2 => (key.clone(), proptest::option::of(value()), value())
            .prop_map(|(k, e, v)| ModelStep::Exchange(k, e, v)),
        2 => (key.clone(), any::<bool>(), value())
            .prop_map(|(k, current, v)| ModelStep::ExchangeVersion(k, current, v)),
        4 => (modification(), key.clone(), value())
            .prop_map(|(kind, k, v)| ModelStep::Modify(kind, k, v)),
        1 => proptest::collection::vec((key, value()), 0..8).prop_map(ModelStep::Batch),
        1 => Just(ModelStep::Scan),
        1 => Just(ModelStep::ClearCache),
    ]
}

/// Sessions of the store, and a HashMap with the values that they must find.
struct Model {
    sessions: Vec<Session>,
    values: HashMap<Vec<u8>, Vec<u8>>,
    /// The version of each key's present write, if it was seen.
    versions: HashMap<Vec<u8>, Version>,
    case: u32,
}

impl Model {
    fn key(&self, key: u8) -> Vec<u8> {
        format!("{} {key}", self.case).into_bytes()
    }

    fn check(&mut self, number: usize, operation: &ModelStep) {
        let session = number % self.sessions.len();
        match operation {
            ModelStep::Get(key) => {
                let key = self.key(*key);
                let got = self.sessions[session].get(&key).unwrap();
                assert_eq!(got.as_ref().map(|value| &value.data), self.values.get(&key));
                if let Some(value) = got {
                    let seen = self.versions.insert(key, value.version);
                    assert!(seen.is_none_or(|seen| seen == value.version));
                }
            }
            ModelStep::Store(kind, key, value) => {
                let (key, session) = (self.key(*key), &mut self.sessions[session]);
                let is_there = self.values.contains_key(&key);
                let (stored, expected) = match kind {
                    StoreKind::Put => (session.put(&key, value).map(|()| true), true),
                    StoreKind::Insert => (session.insert(&key, value), !is_there),
                    StoreKind::Update => (session.update(&key, value), is_there),
                };
                assert_eq!(stored.unwrap(), expected, "{kind:?}");
                if expected {
                    self.set(key, value);
                }
            }
            ModelStep::Delete(key) => {
                let key = self.key(*key);
                let deleted = self.sessions[session].delete(&key).unwrap();
                assert_eq!(deleted, self.values.remove(&key).is_some());
                self.versions.remove(&key);
            }
            ModelStep::Exchange(key, expected, new) => {
                let key = self.key(*key);
                let expected = expected.as_deref();
                let exchange =
                    self.sessions[session].compare_exchange(&key, expected, new).unwrap();
                self.exchanged(key, exchange, new, |current| current == expected);
            }
            ModelStep::ExchangeVersion(key, current, new) => {
                self.exchange_version(session, *key, *current, new)
            }
            ModelStep::Batch(puts) => self.batch(session, puts),
            ModelStep::Modify(kind, key, value) => self.modify(session, *kind, *key, value),
            ModelStep::Scan => self.scan(session),
            ModelStep::ClearCache => self.sessions[session].clear_cache(),
        }
    }

    fn set(&mut self, key: Vec<u8>, value: &[u8]) {
        self.versions.remove(&key);
        self.values.insert(key, value.to_vec());
    }

    fn exchanged(
        &mut self,
        key: Vec<u8>,
        exchange: Outcome,
        new: &[u8],
        expected: impl Fn(Option<&[u8]>) -> bool,
    ) {
        let current = self.values.get(&key).map(Vec::as_slice);
        assert_eq!(exchange.applied, expected(current));
        if exchange.applied {
            self.set(key, new);
        } else {
            assert_eq!(exchange.value.as_deref(), current);
        }
    }

    fn exchange_version(&mut self, session: usize, key: u8, current: bool, new: &[u8]) {
        let key = self.key(key);
        let session = &mut self.sessions[session];
        let Some(before) = session.get(&key).unwrap() else { return };
        if !current {
            // Another write of the same bytes: its version must differ.
            session.put(&key, &before.data).unwrap();
            self.versions.remove(&key);
        }
        let exchange = session.compare_exchange_version(&key, before.version, new).unwrap();
        self.exchanged(key, exchange, new, |_| current);
    }

    fn modify(&mut self, session: usize, kind: ModificationKind, key: u8, value: &[u8]) {
        let (key, session) = (self.key(key), &mut self.sessions[session]);
        let current = self.values.get(&key).cloned();
        match kind {
            ModificationKind::Increment(delta) => {
                let text = current.as_deref().map_or(Some("0"), |value| str::from_utf8(value).ok());
                let number = text.and_then(|text| {
                    text.parse().ok().filter(|number: &i64| number.to_string() == text)
                });
                match session.increment(&key, delta) {
                    Ok(sum) => {
                        assert_eq!(number.unwrap().checked_add(delta), Some(sum));
                        self.set(key, sum.to_string().as_bytes());
                    }
                    Err(Error::Operation(NotANumber)) => assert_eq!(number, None),
                    Err(Error::Operation(NumberOverflow)) => {
                        assert_eq!(number.unwrap().checked_add(delta), None);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            ModificationKind::Append => {
                let longer = [current.unwrap_or_default(), value.to_vec()].concat();
                assert_eq!(session.append(&key, value).unwrap(), longer.len());
                self.set(key, &longer);
            }
            ModificationKind::Take => {
                let taken = session.take(&key).unwrap();
                assert_eq!(taken.map(|value| value.data), self.values.remove(&key));
                self.versions.remove(&key);
            }
            ModificationKind::GetOrInsert => {
                let found = session.get_or_insert(&key, value).unwrap();
                assert_eq!(found, current.as_deref().unwrap_or(value));
                if current.is_none() {
                    self.set(key, value);
                }
            }
            ModificationKind::Replace => {
                let stored = session.store(&key, value, Store::always().returning()).unwrap();
                assert_eq!(stored.value.map(|value| value.data), current);
                self.set(key, value);
            }
            ModificationKind::Touch => {
                let is_there = current.is_some();
                assert_eq!(session.touch(&key, Duration::from_secs(1000)).unwrap(), is_there);
                let ttl = session.ttl(&key).unwrap();
                assert!(ttl.is_none_or(|ttl| ttl != Ttl::Forever) && ttl.is_some() == is_there);
                assert_eq!(session.persist(&key).unwrap(), is_there);
                assert_eq!(session.ttl(&key).unwrap(), is_there.then_some(Ttl::Forever));
                self.versions.remove(&key);
            }
            ModificationKind::Version => {
                let version = session.version(&key).unwrap();
                assert_eq!(version, session.get(&key).unwrap().map(|value| value.version));
                assert_eq!(session.exists(&key).unwrap(), current.is_some());
                if let Some(version) = version {
                    let seen = self.versions.insert(key, version);
                    assert!(seen.is_none_or(|seen| seen == version));
                }
            }
        }
    }

    fn batch(&mut self, session: usize, puts: &[(u8, Vec<u8>)]) {
        // Operations of a batch are concurrent, so there is only one for each key.
        let puts: HashMap<Vec<u8>, &[u8]> =
            puts.iter().map(|(key, value)| (self.key(*key), value.as_slice())).collect();
        let puts: Vec<(Vec<u8>, &[u8])> = puts.into_iter().collect();
        let session = &mut self.sessions[session];
        session.put_many(puts.iter().map(|(key, value)| (key, value))).unwrap();
        let found = session.get_many(puts.iter().map(|(key, _)| key)).unwrap();
        assert!(found.iter().zip(&puts).all(|(found, (_, value))| found.as_deref() == Some(value)));
        for (key, value) in puts {
            self.set(key, value);
        }
    }

    fn scan(&mut self, session: usize) {
        let prefix = format!("{} ", self.case).into_bytes();
        let entries = self.sessions[session].scan().unwrap().map(Result::unwrap);
        let of_case = entries.filter(|entry| entry.key.starts_with(&prefix));
        let scanned: Vec<_> = of_case.map(|entry| (entry.key, entry.value.data)).collect();
        assert_eq!(scanned.len(), self.values.len(), "a key is missing, or returned twice");
        assert_eq!(scanned.into_iter().collect::<HashMap<_, _>>(), self.values);
    }
}

#[on(any, rdma_in_soak)]
fn any_sequence_of_operations_has_the_results_of_a_hash_map() {
    let server = ServerProcess::start("--memory 128MiB --grace-ms 5");
    let clients = [0, 1 << 20].map(|cache_bytes| {
        let builder = server.client_builder().cache_bytes(cache_bytes);
        [builder.clone(), builder].map(|builder| builder.connect().unwrap())
    });
    let operations = proptest::collection::vec(operation(), 1..60);
    let case = std::cell::Cell::new(0);
    let config = ProptestConfig {
        cases: scaled(300) as u32,
        failure_persistence: None,
        ..Default::default()
    };
    TestRunner::new(config)
        .run(&(operations, any::<bool>()), |(operations, cached)| {
            case.set(case.get() + 1);
            // The first two sessions share their cached locations.
            let [one, other] = &clients[usize::from(cached)];
            let sessions = [one, one, other].map(|client| client.session().unwrap()).into();
            let (values, versions) = (HashMap::new(), HashMap::new());
            let mut model = Model { sessions, values, versions, case: case.get() };
            for (number, operation) in operations.iter().enumerate() {
                model.check(number, operation);
            }
            for key in model.values.keys() {
                assert!(model.sessions[0].delete(key).unwrap());
            }
            Ok(())
        })
        .unwrap();
}
