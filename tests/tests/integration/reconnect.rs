//! Proves that sessions survive the server: they reconnect when it restarts, and fail with an error
//! when it does not. `histories.rs` checks that they find all acknowledged writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside::ConnectError::Unreachable;
use farside::{Contact, Error};
use farside_fabric::Intercept;
use farside_tests::faults::Fence;
use farside_tests::{ServerProcess, TEST_TIMEOUT, device, fill, is_over_tcp, short_timeout};
use rustix::process::{Pid, Signal, kill_process};

const KEYS: u64 = 1000;

#[on(each, rdma_in_soak)]
fn a_server_that_stays_away_is_unreachable_within_the_timeout() {
    let mut server = ServerProcess::start("--memory 32MiB");
    let timeout = short_timeout();
    let client = server.client_builder().connect_timeout(timeout).connect().unwrap();
    let mut session = client.session().unwrap();
    session.put(b"key", b"value").unwrap();
    server.kill();
    // The memory can be read until the client notices that the socket closed.
    let started = Instant::now();
    let error = loop {
        match session.get(b"key") {
            Ok(value) => assert_eq!(*value.unwrap(), *b"value"),
            Err(error) => break error,
        }
        assert!(started.elapsed() < timeout + TEST_TIMEOUT, "the server's death was not noticed");
    };
    assert!(matches!(error, Error::Connect(Unreachable { contact: Contact::Lost, .. })), "{error}");
    assert!(error.to_string().contains("answered, then went away"), "{error}");
    assert!(matches!(session.put(b"key", b"other"), Err(Error::Connect(Unreachable { .. }))));
    assert!(matches!(client.session(), Err(Error::Connect(Unreachable { .. }))));
    server.restart();
    // A region without a file is lost with its server.
    assert_eq!(session.get(b"key").unwrap(), None);
    session.put(b"key", b"new").unwrap();
}

/// A session that fails and tries again must not prolong the wait of others.
#[on(each, rdma)]
fn sessions_of_a_lost_server_fail_together() {
    const ATTEMPTS_MAX: u64 = 20;
    let mut server = ServerProcess::start("--memory 32MiB");
    let client = server.client_builder().connect_timeout(short_timeout()).connect().unwrap();
    let mut sessions: Vec<_> = (0..4).map(|_| client.session().unwrap()).collect();
    let failures: Vec<AtomicU64> = sessions.iter().map(|_| AtomicU64::new(0)).collect();
    let all_failed = || failures.iter().all(|count| count.load(Ordering::Relaxed) > 0);
    server.kill();
    std::thread::scope(|scope| {
        for (session, count) in sessions.iter_mut().zip(&failures) {
            scope.spawn(move || {
                while !all_failed() && count.load(Ordering::Relaxed) < ATTEMPTS_MAX {
                    if session.get(b"key").is_err() {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert!(
        failures.iter().all(|count| count.load(Ordering::Relaxed) < ATTEMPTS_MAX),
        "{failures:?}"
    );
}

/// Fences a client at one chain: its connection executes neither that chain nor any later one.
#[derive(Clone)]
pub(crate) struct FenceAt {
    /// The number of chains before it, on all connections of the client.
    chains_before: Arc<AtomicU64>,
    /// Called at that chain.
    on_fence: Arc<dyn Fn() + Send + Sync>,
}

impl FenceAt {
    /// Returns a fence that is not set.
    pub(crate) fn new(on_fence: impl Fn() + Send + Sync + 'static) -> Self {
        Self { chains_before: Arc::new(AtomicU64::new(u64::MAX)), on_fence: Arc::new(on_fence) }
    }

    pub(crate) fn set(&self, chains_before: u64) {
        self.chains_before.store(chains_before, Ordering::Relaxed);
    }

    /// Returns whether the client has posted that chain. Meaningful only after `set`.
    pub(crate) fn was_reached(&self) -> bool {
        self.chains_before.load(Ordering::Relaxed) > u64::MAX / 2
    }

    pub(crate) fn wrap(&self) -> Intercept {
        let fence = self.clone();
        Arc::new(move |fabric, _| {
            let (fence, mut is_fenced) = (fence.clone(), false);
            Box::new(Fence::around(fabric, move || {
                if fence.chains_before.fetch_sub(1, Ordering::Relaxed) == 0 {
                    is_fenced = true;
                    (fence.on_fence)();
                }
                !is_fenced
            }))
        })
    }
}

/// The connection is lost at each chain of a batch in turn, as when a client was stopped too long.
#[on(each, rdma_in_soak)]
fn a_batch_whose_connection_is_lost_continues_on_the_next() {
    const KEYS: u64 = 12;
    let server = ServerProcess::start("--memory 32MiB");
    let fence = FenceAt::new(|| {});
    let client =
        server.client_builder().pipeline_depth(8).intercept_fabric(fence.wrap()).connect().unwrap();
    let mut session = client.session().unwrap();
    for before in 0.. {
        let keys = |kind: u64| -> Vec<_> {
            (0..KEYS).map(|n| [before, kind, n].map(u64::to_le_bytes).concat()).collect()
        };
        let (read, replaced, new) = (keys(0), keys(1), keys(2));
        for key in read.iter().chain(&replaced) {
            session.put(key, b"old").unwrap();
        }
        let mut batch = session.batch();
        for ((read, replaced), new) in read.iter().zip(&replaced).zip(&new) {
            batch = batch.get(read).put(replaced, b"new").insert(new, b"new");
        }
        fence.set(before);
        let outcomes = batch.run().unwrap();
        let was_reached = fence.was_reached();
        fence.set(u64::MAX);
        let mut unknown = Vec::new();
        for (number, outcome) in outcomes.into_iter().enumerate() {
            let outcome = match outcome {
                // Over TCP the answer of a write that was in flight may be lost.
                Err(error) if is_over_tcp() && error.is_indeterminate() && number % 3 > 0 => {
                    unknown.push([&replaced, &new][number % 3 - 1][number / 3].clone());
                    continue;
                }
                outcome => outcome.unwrap(),
            };
            assert!(outcome.applied, "operation {number}, fenced after {before}: {outcome:?}");
            if number % 3 == 0 {
                assert_eq!(outcome.value.unwrap(), b"old");
            }
        }
        for key in replaced.iter().chain(&new).filter(|key| !unknown.contains(key)) {
            assert_eq!(*session.get(key).unwrap().unwrap(), *b"new");
        }
        if !was_reached {
            assert!(before > 3 * KEYS, "a batch of {} was {before} chains", 3 * KEYS);
            break;
        }
    }
    server.assert_verifies();
}

// Not over TCP: a dead server answers no chain that is on its way.
#[on(shm, rdma_in_soak)]
fn a_batch_whose_server_dies_returns_the_results_that_it_has() {
    const KEYS: u64 = 12;
    const CHAINS_BEFORE: u64 = 5;
    const DEPTH: u16 = 4;
    let server = ServerProcess::start("--memory 32MiB");
    let pid = Pid::from_raw(server.pid().cast_signed()).unwrap();
    let fence = FenceAt::new(move || kill_process(pid, Signal::KILL).unwrap());
    let builder = server.client_builder().pipeline_depth(DEPTH).connect_timeout(short_timeout());
    let client = builder.intercept_fabric(fence.wrap()).connect().unwrap();
    let mut session = client.session().unwrap();
    let keys: Vec<_> = (0..KEYS).map(u64::to_le_bytes).collect();
    keys.iter().for_each(|key| session.put(key, b"value").unwrap());
    let batch = keys.iter().fold(session.batch(), |batch, key| batch.get(key));
    fence.set(CHAINS_BEFORE);
    let outcomes = batch.run().unwrap();
    let (before, after) = outcomes.split_at(CHAINS_BEFORE as usize);
    let is_unreachable = |error: &Error| match error {
        Error::Connect(Unreachable { tried, .. }) => !tried.is_zero(),
        _ => false,
    };
    let lost = before.iter().filter(|it| it.is_err()).count();
    // A device may lose chains that are in flight when the server ends.
    let lost_max = if device().is_some() { usize::from(DEPTH) - 1 } else { 0 };
    assert!(lost <= lost_max, "{before:?}");
    let mut unknown = before.iter().chain(after).filter_map(|it| it.as_ref().err());
    assert!(unknown.all(is_unreachable), "{outcomes:?}");
    assert!(after.iter().all(Result::is_err), "{after:?}");
    assert_eq!(outcomes.len() as u64, KEYS);
}

/// The connection is lost at each chain of a scan in turn, as when a client was stopped too long.
#[on(each, rdma_in_soak)]
fn a_scan_whose_connection_is_lost_continues_on_the_next() {
    const KEYS: u64 = 40;
    let server = ServerProcess::start("--memory 32MiB --index 64KiB");
    let fence = FenceAt::new(|| {});
    let client = server.client_builder().intercept_fabric(fence.wrap()).connect().unwrap();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..KEYS, |_| b"value");
    for before in 0.. {
        fence.set(before);
        let keys = session.scan().unwrap().map(|entry| entry.unwrap().key.try_into().unwrap());
        let mut keys: Vec<_> = keys.map(u64::from_le_bytes).collect();
        let was_reached = fence.was_reached();
        fence.set(u64::MAX);
        keys.sort_unstable();
        assert!(keys.iter().copied().eq(0..KEYS), "fenced after {before}: {keys:?}");
        if !was_reached {
            assert!(before > KEYS, "a scan of {KEYS} keys was {before} chains");
            break;
        }
    }
}

#[on(each, rdma_in_soak)]
fn a_scan_ends_with_its_region() {
    let mut server = ServerProcess::start("--memory 32MiB");
    let client = server.client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..KEYS, |_| b"value");
    let mut scan = session.scan().unwrap();
    assert!(scan.next().unwrap().is_ok());
    server.kill();
    server.restart();
    // The old region can be read until the client notices that the server died.
    let error = scan.find_map(|entry| {
        entry.err().or_else(|| {
            std::thread::sleep(Duration::from_millis(20));
            None
        })
    });
    assert!(matches!(error, Some(Error::Disconnected { .. })), "{error:?}");
    assert!(scan.next().is_none());
    session.put(b"key", b"value").unwrap();
    assert_eq!(session.scan().unwrap().count(), 1);
}
