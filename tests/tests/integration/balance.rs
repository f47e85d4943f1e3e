//! Proves that memory moves to where it is needed. It moves from sessions that only delete to
//! sessions that only insert, between size classes, and away from sessions that do not use it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use farside::Client;
use farside_layout::{CHUNK_BYTES, SizeClass, block_bytes};
use farside_tests::{ServerProcess, TEST_TIMEOUT, fill, fill_up, scaled, wait_until};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Random bytes. Each value is a part of these bytes, so that making values costs nothing.
struct Noise(Vec<u8>);

impl Noise {
    /// Returns random bytes for values of up to `bytes_max` bytes.
    fn new(bytes_max: usize) -> Self {
        let mut random = SmallRng::seed_from_u64(7);
        Self((0..bytes_max + 4096).map(|_| random.random()).collect())
    }

    fn value(&self, key: u64, bytes: usize) -> &[u8] {
        &self.0[key as usize % 4096..][..bytes]
    }
}

/// The number of times that the region's size is inserted and deleted.
const PASSES: u64 = 100;

#[on(shm, tcp_in_soak)]
fn a_client_can_insert_without_end_while_another_deletes() {
    const REGION_BYTES: u64 = 16 << 20;
    let server = ServerProcess::start("--memory 16MiB --index 2MiB --grace-ms 1");
    // Three size classes share six chunks, any of which the deleter might keep; a quarter is live.
    const SIZES: [usize; 3] = [900, 3900, 16_000];
    let noise = Arc::new(Noise::new(SIZES[2]));
    let (send, receive) = sync_channel::<(u64, usize)>(400);
    let (deleting, expected) = (server.client(), noise.clone());
    let deleter = std::thread::spawn(move || {
        let mut session = deleting.session().unwrap();
        let mut value = Vec::new();
        for (key, bytes) in receive {
            session.get_into(key.to_le_bytes(), &mut value).unwrap().unwrap();
            assert!(value == expected.value(key, bytes), "key {key}");
            assert!(session.delete(key.to_le_bytes()).unwrap(), "key {key}");
        }
    });
    let client = server.client();
    let mut session = client.session().unwrap();
    let mut random = SmallRng::seed_from_u64(1);
    let mut bytes_written = 0;
    for key in 0u64.. {
        if bytes_written >= scaled(PASSES) * REGION_BYTES {
            break;
        }
        let bytes = SIZES[random.random_range(0..SIZES.len())];
        assert!(session.insert(key.to_le_bytes(), noise.value(key, bytes)).unwrap());
        bytes_written += bytes as u64;
        send.send((key, bytes)).unwrap();
    }
    drop(send);
    deleter.join().unwrap();
    let statistics = client.admin().statistics().unwrap();
    assert_eq!(statistics.requests_denied, 0, "{statistics:?}");
    server.assert_verifies();
}

/// Returns the bytes that a value's block takes of its chunks.
fn footprint(value_bytes: usize) -> u64 {
    let class = SizeClass::for_bytes(block_bytes(8, value_bytes)).unwrap();
    class.chunks_per_span() * CHUNK_BYTES / class.blocks_per_span()
}

// Not over RDMA: a chunk changes its class after 288 x GRACE, which is 29 s there.
#[on(shm, tcp_in_soak)]
fn values_of_all_sizes_fit_in_any_order_while_there_is_room() {
    let passes: u64 =
        std::env::var("FARSIDE_BALANCE_PASSES").map_or(4, |text| text.parse().unwrap());
    // Each of the 52 classes takes at least one chunk: too many for a small region.
    let server = ServerProcess::start("--memory 1GiB --index 2MiB --grace-ms 1");
    let client = server.client();
    let statistics = client.admin().statistics().unwrap();
    let heap = (statistics.chunks - statistics.chunks_index) * CHUNK_BYTES;
    let stop = Arc::new(AtomicBool::new(false));
    let (compacting, stopped) = (server.client(), stop.clone());
    let compactor = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            compacting.admin().compact().unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let mut session = client.session().unwrap();
    let mut random = SmallRng::seed_from_u64(2);
    let mut live: VecDeque<(u64, usize)> = VecDeque::new();
    let (mut live_bytes, mut bytes_written) = (0, 0);
    let mut value = Vec::new();
    let noise = Noise::new(1 << 20);
    for key in 0u64.. {
        if bytes_written >= scaled(passes * session.limits().region_bytes) {
            break;
        }
        // Sizes from 16 bytes to 1 MiB: each doubling is equally likely.
        let bytes = (16.0 * f64::powf(65_536.0, random.random())) as usize;
        while live_bytes + footprint(bytes) > heap / 5 * 4 {
            let victim = random.random_range(0..live.len());
            let (old, old_bytes) = live.swap_remove_back(victim).unwrap();
            session.get_into(old.to_le_bytes(), &mut value).unwrap().unwrap();
            assert!(value == noise.value(old, old_bytes), "key {old}");
            assert!(session.delete(old.to_le_bytes()).unwrap(), "key {old}");
            live_bytes -= footprint(old_bytes);
        }
        session.put(key.to_le_bytes(), noise.value(key, bytes)).unwrap_or_else(|error| {
            panic!("{error}; {live_bytes} of {heap} bytes live; {:?}", client.admin().statistics())
        });
        live.push_back((key, bytes));
        live_bytes += footprint(bytes);
        bytes_written += bytes as u64;
    }
    stop.store(true, Ordering::Relaxed);
    compactor.join().unwrap();
    let statistics = client.admin().statistics().unwrap();
    assert_eq!(statistics.requests_denied, 0, "{statistics:?}");
    assert!(statistics.chunks_emptied > 0 || passes < 2, "{statistics:?}");
    server.assert_verifies();
}

/// Waits until the heap has this many free chunks.
fn wait_for_chunks(client: &Client, chunks: u64) {
    let free = || client.admin().statistics().unwrap().chunks_free;
    wait_until("chunks are free", TEST_TIMEOUT, || free() >= chunks);
}

// Not over RDMA: a chunk changes its class after 288 x GRACE, which is 29 s there.
#[on(shm, tcp_in_soak)]
fn a_heap_full_of_small_values_becomes_one_of_large_values_and_back() {
    let server = ServerProcess::start("--memory 32MiB --index 4MiB --grace-ms 2");
    let client = server.client();
    let mut session = client.session().unwrap();
    // After a round these sessions hold blocks that they no longer use.
    let mut idle: Vec<_> = (0..4).map(|_| client.session().unwrap()).collect();
    for (round, bytes) in (0u64..).zip([450, 900_000, 60_000, 450]) {
        let mut stored = 0u64;
        loop {
            let name = (round << 32 | stored).to_le_bytes();
            let session = &mut idle[stored as usize % 4];
            if session.put(name, vec![round as u8; bytes]).is_err() {
                break;
            }
            stored += 1;
        }
        let payload = stored * bytes as u64;
        let heap = client.admin().statistics().unwrap().chunks * CHUNK_BYTES - (4 << 20);
        assert!(payload > heap * 2 / 5, "round {round}: {stored} values of {bytes} bytes");
        for n in 0..stored {
            let name = (round << 32 | n).to_le_bytes();
            let value = session.get(name).unwrap().unwrap();
            assert!(value.len() == bytes && value.iter().all(|byte| *byte == round as u8));
            assert!(session.delete(name).unwrap());
        }
    }
    assert!(client.admin().statistics().unwrap().chunks_emptied > 10);
    drop((session, idle));
    let statistics = client.admin().statistics().unwrap();
    wait_for_chunks(&client, statistics.chunks - statistics.chunks_index);
    server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn blocks_that_an_idle_session_has_not_yet_received_are_recalled() {
    const BYTES: usize = 60_000;
    let server = ServerProcess::start("--memory 32MiB --grace-ms 1");
    let (hoarder, observer) = (server.client(), server.client());
    let mut idle = hoarder.session().unwrap();
    fill(&mut idle, 0..3, |_| [1; BYTES]);
    let mut session = observer.session().unwrap();
    let (full, _) = fill_up(&mut session, 3, |_| [2; BYTES]);
    let class = SizeClass::for_bytes(block_bytes(8, BYTES)).unwrap();
    let statistics = observer.admin().statistics().unwrap();
    let found = statistics.classes.iter().find(|found| found.class == class).unwrap();
    assert_eq!(full, found.blocks, "not all blocks of the class are in use: {statistics:?}");
}

/// Requests for a size that has no memory left do not keep recalling the blocks of other clients.
#[on(shm, tcp_in_soak)]
fn a_client_whose_requests_are_denied_does_not_disturb_others() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 1");
    let client = server.client();
    let mut session = client.session().unwrap();
    fill_up(&mut session, 1, |_| [3; 2000]);
    let before = client.admin().statistics().unwrap().recalls;
    let is_over = AtomicBool::new(false);
    let denied = std::thread::scope(|scope| {
        let (other, is_over) = (server.client(), &is_over);
        scope.spawn(move || {
            let mut session = other.session().unwrap();
            // This client frees and takes blocks of its class all the time.
            while !is_over.load(Ordering::Relaxed) {
                session.delete(1u64.to_le_bytes()).unwrap();
                session.put(1u64.to_le_bytes(), [4; 2000]).unwrap();
            }
        });
        let mut large = server.session();
        let denied = (0..4).filter(|_| large.put(b"large", [5; 1 << 20]).is_err()).count();
        is_over.store(true, Ordering::Relaxed);
        denied
    });
    assert_eq!(denied, 4);
    let recalls = client.admin().statistics().unwrap().recalls - before;
    assert!(recalls <= 60, "{recalls} recalls for four puts");
}
