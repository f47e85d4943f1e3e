//! Proves that an operation in a pipeline, a batch or an async client of a cluster leaves the same
//! value, and has the same answer, if the connection is lost at any of its chains and it runs
//! again. Guards against a run that leaves its lane another key or value than it found there
//! (invariant I28): an append once stored the beginning of the old value.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farside::{Client, Session, Version};
use farside_cluster::random_id;
use farside_fabric::Intercept;
use farside_protocol::{Action, Change, Expected, Lifetime};
use farside_tests::TEST_TIMEOUT;
use farside_tests::cluster::TestCluster;
use farside_tests::faults::Fence;
use farside_tests::lanes::{self, Answered, Call, Way};

const SHARDS: u16 = 3;
/// More than any operation has.
const CHAINS_MAX: u64 = 64;
/// Values of this length have extents, which several chains WRITE.
const LONG_BYTES: usize = (4 << 20) + 1;

/// Refuses one chain of a client, as a lost connection does.
#[derive(Clone)]
struct Refusal {
    /// The number of chains before it.
    chains_before: Arc<AtomicU64>,
}

impl Refusal {
    fn set(&self, chains_before: u64) {
        self.chains_before.store(chains_before, Ordering::Relaxed);
    }

    /// Whether the chain was refused since [`Refusal::set`].
    fn has_happened(&self) -> bool {
        self.chains_before.load(Ordering::Relaxed) > CHAINS_MAX
    }

    fn intercept(&self) -> Intercept {
        let refusal = self.clone();
        Arc::new(move |fabric, _| {
            let chains_before = refusal.chains_before.clone();
            let admits = move || chains_before.fetch_sub(1, Ordering::Relaxed) != 0;
            Box::new(Fence::around(fabric, admits))
        })
    }
}

/// Returns an action by the present value of its key, and the version of that.
type ActionOf = for<'v> fn(&'v [u8], Version) -> Action<'v>;

/// An operation on a key that has the value `present`, if any, and the value of the operation.
struct Case {
    name: &'static str,
    action: ActionOf,
    present: Option<Vec<u8>>,
    value: Vec<u8>,
}

const OPERATIONS: [(&str, ActionOf); 14] = [
    ("get", |_, _| Action::Get),
    ("put", |_, _| Action::Put(Lifetime::FOREVER)),
    ("insert", |_, _| Action::Insert(Lifetime::FOREVER)),
    ("update", |_, _| Action::Update(Lifetime::FOREVER)),
    ("delete", |_, _| Action::Delete),
    ("take", |_, _| Action::take()),
    ("increment", |_, _| Action::increment(5)),
    ("append", |_, _| Action::append()),
    ("touch", |_, _| Action::touch(Lifetime::FOREVER)),
    ("get or insert", |_, _| Action::get_or_insert()),
    ("replace", |_, _| Action::modify(Change::Store(None), true, Lifetime::FOREVER, true)),
    ("exchange", |present, _| Action::Exchange(Expected::Value(present), Lifetime::FOREVER)),
    ("exchange by version", |_, version| {
        Action::Exchange(Expected::Version(version), Lifetime::FOREVER)
    }),
    ("delete by version", |_, version| Action::delete_if_version(version)),
];

/// Every operation on a short value and on an absent key, and those that move long values.
fn cases() -> Vec<Case> {
    let present = [Some(b"4096".to_vec()), None];
    let short = OPERATIONS.iter().flat_map(|&(name, action)| {
        let value = b"7-and-more".to_vec();
        present.clone().map(|present| Case { name, action, present, value: value.clone() })
    });
    let long = OPERATIONS.iter().filter(|(name, _)| ["put", "append", "take"].contains(name));
    let long = long.map(|&(name, action)| {
        let value = if name == "put" { vec![5; LONG_BYTES] } else { b"the end".to_vec() };
        Case { name, action, present: Some(vec![6; LONG_BYTES]), value }
    });
    short.chain(long).collect()
}

/// What an operation answered, and the value afterwards.
type Effect = (bool, i64, Option<Vec<u8>>, Option<Vec<u8>>);

/// Two sessions of a cluster: one whose connections are lost, and one that looks.
struct Run {
    session: Session,
    observer: Session,
    refusal: Refusal,
    keys_used: u64,
}

impl Run {
    /// Runs an operation on a key of its own. The chain after `refused_after` is refused.
    fn effect(&mut self, way: &Way, case: &Case, refused_after: Option<u64>) -> Effect {
        self.keys_used += 1;
        let key = self.keys_used.to_le_bytes();
        let mut version = Version::from_u64(1);
        if let Some(present) = &case.present {
            self.observer.put(key, present).unwrap();
            version = self.observer.version(key).unwrap().unwrap();
        }
        let action = (case.action)(case.present.as_deref().unwrap_or(b"other"), version);
        let calls = [Call { action, key: &key, value: &case.value }];
        if self.keys_used.is_multiple_of(2) {
            // The location is cached.
            let get = [Call { action: Action::Get, ..calls[0] }];
            lanes::run(&mut self.session, way, &get).unwrap();
        }
        self.refusal.set(refused_after.unwrap_or(u64::MAX));
        let (_, answered) = lanes::run(&mut self.session, way, &calls).unwrap().remove(0);
        let Answered { applied, value, number } =
            answered.unwrap_or_else(|error| panic!("{} {refused_after:?}: {error}", case.name));
        let left = self.observer.take(key).unwrap();
        (applied, number, value.map(|value| value.data), left.map(|value| value.data))
    }

    fn check(&mut self, way: &Way, case: &Case) {
        let once = self.effect(way, case, None);
        for chains_before in 0..CHAINS_MAX {
            let mut has_happened = false;
            // With a cached location and without.
            for _ in 0..2 {
                let again = self.effect(way, case, Some(chains_before));
                let Case { name, present, .. } = case;
                let of = present.as_ref().map(Vec::len);
                assert!(
                    again == once,
                    "{way:?}: {name} of {of:?} bytes, refused after {chains_before} chains: {:?} \
                     instead of {:?}",
                    shown(&again),
                    shown(&once)
                );
                has_happened |= self.refusal.has_happened();
            }
            if !has_happened {
                assert!(chains_before > 0, "{}: no chain was refused", case.name);
                return;
            }
        }
        panic!("{}: more than {CHAINS_MAX} chains", case.name);
    }
}

/// An effect with the beginnings of its values.
fn shown((applied, number, found, left): &Effect) -> (bool, i64, Option<String>, Option<String>) {
    let text = |value: &Option<Vec<u8>>| {
        let value = value.as_ref()?;
        Some(String::from_utf8_lossy(&value[..value.len().min(32)]).into_owned())
    };
    (*applied, *number, text(found), text(left))
}

#[on(each, rdma_in_soak)]
fn an_operation_that_is_run_again_at_any_chain_equals_one_run() {
    let hash_key = random_id().unwrap();
    let arguments = "--memory 128MiB --grace-ms 20";
    let cluster = TestCluster::create_at(None, SHARDS, hash_key, arguments);
    let servers: Vec<_> = (0..SHARDS).map(|_| cluster.start("")).collect();
    cluster.wait_for_servers();
    let seeds = servers.iter().map(|server| server.address()).collect::<Vec<_>>().join(",");
    let builder = Client::builder().server(&seeds).connect_timeout(TEST_TIMEOUT);
    let refusal = Refusal { chains_before: Arc::new(AtomicU64::new(u64::MAX)) };
    let client = builder.clone().intercept_fabric(refusal.intercept()).connect().unwrap();
    let observer = builder.connect().unwrap().session().unwrap();
    let mut run = Run { session: client.session().unwrap(), observer, refusal, keys_used: 0 };
    let ways = [Way::Pipeline, Way::Batch, Way::Async(client.async_client().unwrap())];
    let cases = cases();
    for way in &ways {
        cases.iter().for_each(|case| run.check(way, case));
    }
    let verified = servers[0].cli(&["verify"]);
    assert_eq!(verified.code, Some(0), "{verified:?}");
}
