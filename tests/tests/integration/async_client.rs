//! Proves that an async client runs each operation on any runtime, and survives its server. Futures
//! can be dropped at any time: no slot leaks, which would end in a wait without end, and no block.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use farside::ConnectError::Unreachable;
use farside::OperationError::{Denied, KeyEmpty, KeyTooLong, NotANumber, ValueTooLong};
use farside::{AsyncClient, Client, Error, Role, Store};
use farside_tests::allocations::of_this_thread;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, blocks_with_clients, fill, scaled, short_timeout, wait_until,
};

use crate::reconnect::FenceAt;

/// More than an async client has slots; fewer over RDMA.
fn more_than_slots() -> u64 {
    scaled(20_000)
}

fn tokio_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap()
}

/// Connects two clients. One of them has a fabric of which the library does not know that it
/// executes chains at once: its driver runs all operations, as over RDMA.
fn clients(server: &ServerProcess) -> [AsyncClient; 2] {
    let driven = server.client_builder().intercept_fabric(Arc::new(|fabric, _| fabric));
    [server.client(), driven.connect().unwrap()].map(|client| client.async_client().unwrap())
}

fn poll_once(future: impl Future) -> bool {
    pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Waits until the driver of a dropped client has ended: its session has signed off by then.
fn assert_leaves_nothing(server: &ServerProcess, observer: &Client) {
    wait_until("the async client signs off", TEST_TIMEOUT, || {
        observer.admin().statistics().unwrap().clients == 1
    });
    assert_eq!(observer.admin().statistics().unwrap().clients_lost, 0);
    assert_eq!(blocks_with_clients(observer), 0);
    server.assert_verifies();
}

/// Every operation, with and without an effect. `prefix` makes the keys distinct.
async fn operate(client: AsyncClient, prefix: &'static str) {
    let key = format!("{prefix} key");
    let absent = format!("{prefix} absent");
    assert_eq!(client.get(&key).await.unwrap(), None);
    assert!(!client.update(&key, "too early").await.unwrap());
    assert!(client.insert(&key, "first").await.unwrap());
    assert!(!client.insert(&key, "again").await.unwrap());
    assert_eq!(client.get(&key).await.unwrap().unwrap(), "first");
    assert!(client.update(&key, "second").await.unwrap());
    client.put(&key, "third").await.unwrap();
    let value = client.get(&key).await.unwrap().unwrap();
    assert_eq!(value, "third");
    assert_eq!(client.version(&key).await.unwrap(), Some(value.version));
    assert!(client.exists(&key).await.unwrap());
    assert!(!client.exists(&absent).await.unwrap());
    assert_eq!(client.append(&key, " and more").await.unwrap(), 14);
    assert!(client.touch(&key, Duration::from_secs(3600)).await.unwrap());
    assert!(!client.touch(&absent, Duration::from_secs(3600)).await.unwrap());
    assert_eq!(client.take(&key).await.unwrap().unwrap(), "third and more");
    assert_eq!(client.take(&key).await.unwrap(), None);
    assert_eq!(client.increment(&key, 40).await.unwrap(), 40);
    assert_eq!(client.increment(&key, 2).await.unwrap(), 42);
    let version = client.version(&key).await.unwrap().unwrap();
    assert_eq!(client.increment(&key, 1).await.unwrap(), 43);
    assert!(!client.delete_if_version(&key, version).await.unwrap());
    let version = client.version(&key).await.unwrap().unwrap();
    assert!(client.delete_if_version(&key, version).await.unwrap());
    assert!(!client.delete_if_version(&key, version).await.unwrap());
    client.put(&key, "fourth").await.unwrap();
    assert!(client.delete(&key).await.unwrap());
    assert!(!client.delete(&key).await.unwrap());
    let mut buffer = b"stale".to_vec();
    assert_eq!(client.get_into(&key, &mut buffer).await.unwrap(), None);
    assert!(buffer.is_empty());
    // Longer than what is copied under the lock, in both directions.
    let long = vec![7; 1 << 20];
    client.put(&key, &long).await.unwrap();
    assert_eq!(client.get(&key).await.unwrap().unwrap().data, long);
    assert!(client.get_into(&key, &mut buffer).await.unwrap().is_some());
    assert_eq!(buffer, long);
}

/// Stores with conditions. There are more expected values than one pipeline keeps.
async fn exchange(client: AsyncClient, prefix: &'static str) {
    let key = format!("{prefix} exchanged");
    client.put(&key, "0").await.unwrap();
    for number in 0..scaled(1000) {
        let (old, new) = (number.to_string(), (number + 1).to_string());
        let other = Store::if_value(b"other").returning();
        let refused = client.store(&key, "refused", other).await.unwrap();
        assert!(!refused.applied);
        assert_eq!(refused.value.unwrap(), *old.as_bytes());
        let stored = client.store(&key, new, Store::if_value(old.as_bytes())).await.unwrap();
        assert!(stored.applied);
    }
    let version = client.version(&key).await.unwrap().unwrap();
    let stored = client.store(&key, "last", Store::if_version(version)).await.unwrap();
    assert!(stored.applied);
    assert!(!client.store(&key, "", Store::if_absent()).await.unwrap().applied);
}

#[on(shm, tcp_in_soak)]
fn every_operation_runs_on_tokio_and_on_smol() {
    let server = ServerProcess::start("--memory 64MiB");
    let runtime = tokio_runtime();
    for client in clients(&server) {
        let on_tokio = [
            runtime.spawn(operate(client.clone(), "tokio")),
            runtime.spawn(exchange(client.clone(), "tokio")),
        ];
        let on_smol = [
            smol::spawn(operate(client.clone(), "smol")),
            smol::spawn(exchange(client.clone(), "smol")),
        ];
        on_tokio.into_iter().for_each(|task| runtime.block_on(task).unwrap());
        on_smol.into_iter().for_each(smol::block_on);
        let keys = ["tokio key", "smol key"];
        keys.into_iter().for_each(|key| assert!(smol::block_on(client.delete(key)).unwrap()));
    }
    server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn ten_thousand_tasks_share_a_client() {
    const COUNTERS: u64 = 100;
    let tasks = scaled(10_000);
    let server = ServerProcess::start("--memory 64MiB --index 4MiB");
    let observer = server.client();
    let client = server.client().async_client().unwrap();
    let runtime = tokio_runtime();
    let task = |number: u64| {
        let client = client.clone();
        async move {
            let key = number.to_le_bytes();
            client.put(key, [7; 64]).await.unwrap();
            assert_eq!(client.get(key).await.unwrap().unwrap(), [7; 64]);
            client.increment(format!("counter {}", number % COUNTERS), 1).await.unwrap();
        }
    };
    let on_tokio: Vec<_> = (0..tasks).map(|number| runtime.spawn(task(number))).collect();
    on_tokio.into_iter().for_each(|task| runtime.block_on(task).unwrap());
    let on_smol: Vec<_> = (0..tasks).map(|number| smol::spawn(task(number))).collect();
    on_smol.into_iter().for_each(smol::block_on);
    let mut session = observer.session().unwrap();
    let counts = (0..COUNTERS).map(|n| session.increment(format!("counter {n}"), 0).unwrap());
    assert_eq!(counts.sum::<i64>(), 2 * tasks as i64);
    drop((session, client));
    assert_leaves_nothing(&server, &observer);
}

#[on(shm, tcp_in_soak)]
fn each_operation_has_an_error_of_its_own() {
    let server = ServerProcess::start("--memory 32MiB");
    server.session().put("word", "value").unwrap();
    let connected = server.client();
    let limits = connected.session().unwrap().limits();
    let client = connected.async_client().unwrap();
    smol::block_on(async {
        let (long_key, long_value) =
            (vec![1; limits.key_bytes_max + 1], vec![1; limits.value_bytes_max + 1]);
        let found = client.get("word");
        let errors = [
            client.get("").await.map(drop).unwrap_err(),
            client.get(&long_key).await.map(drop).unwrap_err(),
            client.put("key", &long_value).await.unwrap_err(),
            client.increment("word", 1).await.map(drop).unwrap_err(),
        ];
        assert!(
            matches!(
                errors,
                [
                    Error::Operation(KeyEmpty),
                    Error::Operation(KeyTooLong { .. }),
                    Error::Operation(ValueTooLong { .. }),
                    Error::Operation(NotANumber),
                ]
            ),
            "{errors:?}"
        );
        assert_eq!(found.await.unwrap().unwrap(), "value");
    });
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    let reader = reader.async_client().unwrap();
    let put = smol::block_on(reader.put("word", "other"));
    assert!(matches!(put, Err(Error::Operation(Denied))), "{put:?}");
    assert_eq!(smol::block_on(reader.get("word")).unwrap().unwrap(), "value");
}

#[on(shm, tcp_in_soak)]
fn futures_can_be_dropped_at_any_time() {
    let server = ServerProcess::start("--memory 64MiB --grace-ms 5");
    let observer = server.client();
    for client in clients(&server) {
        drop_futures(client, &observer);
    }
    assert_leaves_nothing(&server, &observer);
}

fn drop_futures(client: AsyncClient, observer: &Client) {
    const KEYS: u64 = 100;
    let mut session = observer.session().unwrap();
    fill(&mut session, 0..KEYS, |_| b"old");
    drop(client.put(0u64.to_le_bytes(), "never polled"));
    for number in 0..more_than_slots() {
        let key = (number % KEYS).to_le_bytes();
        poll_once(client.get(key));
        poll_once(client.put(key, "new"));
        if number.is_multiple_of(64) {
            // The driver starts some of them.
            std::thread::yield_now();
        }
    }
    for key in 0..KEYS {
        smol::block_on(client.get(key.to_le_bytes())).unwrap().unwrap();
    }
    let value = |key: u64| session.get(key.to_le_bytes()).unwrap().unwrap().data;
    let values: HashSet<_> = (0..KEYS).map(value).collect();
    assert!(values.iter().all(|value| value == b"old" || value == b"new"), "{values:?}");
}

/// A GET is dropped at once, but its PUT after a while, so that it is started.
#[on(shm, tcp_in_soak)]
fn a_started_put_goes_on_after_its_future_is_dropped() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    let client = server.client().async_client().unwrap();
    {
        let mut put = pin!(client.put("key", "value"));
        assert!(put.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        wait_until("the PUT takes effect", TEST_TIMEOUT, || session.exists("key").unwrap());
    }
    assert_eq!(smol::block_on(client.get("key")).unwrap().unwrap(), "value");
}

/// The connection is lost at each chain in turn, as when a client was stopped too long.
#[on(shm, tcp_in_soak)]
fn operations_whose_connection_is_lost_run_on_the_next() {
    const KEYS: u64 = 6;
    let server = ServerProcess::start("--memory 32MiB");
    let fence = FenceAt::new(|| {});
    let builder = server.client_builder().pipeline_depth(8).intercept_fabric(fence.wrap());
    let connected = builder.connect().unwrap();
    let client = connected.async_client().unwrap();
    let runtime = tokio_runtime();
    for before in 0.. {
        let key = move |kind: u64, n: u64| [before, kind, n].map(u64::to_le_bytes).concat();
        let put = |n| client.put(key(0, n), "old");
        (0..KEYS).for_each(|n| smol::block_on(put(n)).unwrap());
        fence.set(before);
        let task = |n| {
            let client = client.clone();
            runtime.spawn(async move {
                assert_eq!(client.get(key(0, n)).await?.unwrap(), "old");
                client.put(key(0, n), "new").await?;
                assert!(client.insert(key(1, n), "new").await?);
                Ok::<_, Error>(())
            })
        };
        let tasks: Vec<_> = (0..KEYS).map(task).collect();
        tasks.into_iter().for_each(|task| runtime.block_on(task).unwrap().unwrap());
        let was_reached = fence.was_reached();
        fence.set(u64::MAX);
        for n in 0..KEYS {
            let [replaced, new] =
                [0, 1].map(|kind| smol::block_on(client.get(key(kind, n))).unwrap().unwrap());
            assert_eq!((replaced.data, new.data), (b"new".to_vec(), b"new".to_vec()));
        }
        if !was_reached {
            assert!(before > 3 * KEYS, "{} operations were {before} chains", 3 * KEYS);
            break;
        }
    }
    server.assert_verifies();
}

/// More futures wait than there are slots, while the server is away.
#[on(shm, tcp_in_soak)]
fn a_restarted_server_is_found_by_all_tasks() {
    let mut server = ServerProcess::start("--memory 32MiB");
    let builder = server.client_builder().connect_timeout(TEST_TIMEOUT);
    let client = builder.connect().unwrap().async_client().unwrap();
    smol::block_on(client.put("key", "value")).unwrap();
    server.kill();
    let runtime = tokio_runtime();
    let task = |number: u64| {
        let client = client.clone();
        async move {
            match number % 10 {
                0 => client.put("key", "new").await,
                _ => client.get("key").await.map(drop),
            }
        }
    };
    // The memory can be read until the client notices that the socket closed.
    std::thread::sleep(Duration::from_millis(100));
    let tasks: Vec<_> = (0..more_than_slots()).map(|n| runtime.spawn(task(n))).collect();
    // Some give up meanwhile, with or without a slot.
    tasks.iter().skip(5).step_by(20).for_each(|task| task.abort());
    std::thread::sleep(Duration::from_millis(100));
    server.restart();
    for (number, task) in tasks.into_iter().enumerate() {
        match runtime.block_on(task) {
            Ok(Err(error)) => assert!(error.is_indeterminate() && number % 10 == 0, "{error}"),
            Ok(Ok(())) => {}
            Err(aborted) => assert!(aborted.is_cancelled() && number % 20 == 5),
        }
    }
    smol::block_on(client.put("key", "last")).unwrap();
    assert_eq!(smol::block_on(client.get("key")).unwrap().unwrap(), "last");
    server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn a_server_that_stays_away_is_unreachable_until_it_returns() {
    let mut server = ServerProcess::start("--memory 32MiB");
    let timeout = short_timeout();
    let connected = server.client_builder().connect_timeout(timeout).connect().unwrap();
    let client = connected.async_client().unwrap();
    server.kill();
    let started = Instant::now();
    let error = loop {
        if let Err(error) = smol::block_on(client.get("key")) {
            break error;
        }
        assert!(started.elapsed() < timeout + TEST_TIMEOUT, "the death was not noticed");
    };
    assert!(matches!(error, Error::Connect(Unreachable { .. })), "{error}");
    let put = smol::block_on(client.put("key", "value"));
    assert!(matches!(put, Err(Error::Connect(Unreachable { .. }))), "{put:?}");
    server.restart();
    smol::block_on(client.put("key", "value")).unwrap();
}

/// Unparks a thread. Also counts the allocations of the thread that wakes it, the driver.
struct CountingWaker {
    woken: Thread,
    allocations: AtomicU64,
}

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        if std::thread::current().id() != self.woken.id() {
            self.allocations.store(of_this_thread(), Ordering::Relaxed);
        }
        self.woken.unpark();
    }
}

#[on(shm, tcp_in_soak)]
fn a_warm_get_allocates_nothing() {
    const KEYS: u64 = 100;
    let server = ServerProcess::start("--memory 32MiB");
    fill(&mut server.session(), 0..KEYS, |_| [7; 100]);
    for client in clients(&server) {
        assert_allocates_nothing(&client, KEYS);
    }
}

fn assert_allocates_nothing(client: &AsyncClient, keys: u64) {
    let woken = std::thread::current();
    let counting = Arc::new(CountingWaker { woken, allocations: AtomicU64::new(0) });
    let waker = Waker::from(counting.clone());
    let mut context = Context::from_waker(&waker);
    let mut value = Vec::with_capacity(100);
    let mut get = |key: u64| {
        {
            let mut future = pin!(client.get_into(key.to_le_bytes(), &mut value));
            while future.as_mut().poll(&mut context).is_pending() {
                std::thread::park();
            }
        }
        assert_eq!(value, [7; 100]);
    };
    (0..10 * keys).for_each(|n| get(n % keys));
    let allocations = || [of_this_thread(), counting.allocations.load(Ordering::Relaxed)];
    let before = allocations();
    assert!(before.iter().all(|count| *count > 0), "allocations are counted");
    (0..10 * keys).for_each(|n| get(n % keys));
    assert_eq!(allocations(), before);
}

#[on(shm, tcp_in_soak)]
fn a_task_is_woken_only_for_its_answer() {
    let server = ServerProcess::start("--memory 8MiB");
    let client = server.client().async_client().unwrap();
    let polls = AtomicU64::new(0);
    smol::block_on(async {
        let mut get = pin!(client.get("key"));
        let counted = std::future::poll_fn(|context| {
            polls.fetch_add(1, Ordering::Relaxed);
            get.as_mut().poll(context)
        });
        assert_eq!(counted.await.unwrap(), None);
    });
    assert!(polls.into_inner() < 10, "the task was woken without a reason");
}
