//! Proves that long values, which one pass copies and sums, behave as short ones: they are stored
//! and read whole at all lengths, at the price of short ones, into vectors and slices. Torn and
//! damaged ones are refused, and expired ones are absent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farside::OperationError::{Layout, TargetTooShort};
use farside::{Counters, Error, Session};
use farside_fabric::memory::Region;
use farside_tests::{ServerProcess, StopOnDrop, is_over_shm, scaled, self_describing};

/// The lengths around the limit of long values, and around those of parts and words.
const LENGTHS: [usize; 12] =
    [4000, 4095, 4096, 4097, 4103, 8191, 8192, 12_289, 65_535, 65_536, 70_001, 1 << 20];
/// The price of a cached GET and of a cached PUT: round trips, doorbells, and verbs.
const GET: [u64; 5] = [1, 1, 1, 0, 0];
const PUT: [u64; 5] = [1, 1, 0, 2, 1];

fn value(key: u64, count: u64, bytes: usize) -> Vec<u8> {
    self_describing::value(key, 0, count, bytes)
}

fn price<T>(session: &mut Session, call: impl FnOnce(&mut Session) -> T) -> (T, [u64; 5]) {
    let before = session.counters();
    let output = call(session);
    let Counters { round_trips, doorbells, reads, writes, compare_swaps, .. } =
        session.counters() - before;
    (output, [round_trips, doorbells, reads, writes, compare_swaps])
}

#[on(each, rdma_in_soak)]
fn long_values_of_all_lengths_cost_as_much_as_short_ones() {
    // A READ that takes longer than GRACE costs another one.
    let server = ServerProcess::start("--memory 128MiB --grace-ms 2000");
    let (mut session, mut other) = (server.session(), server.session());
    let mut vector = Vec::new();
    let mut memory = vec![0; 2 << 20];
    for (n, bytes) in LENGTHS.into_iter().enumerate() {
        for key_bytes in [1, 7, 8, 32, 33, session.limits().key_bytes_max] {
            let key = vec![n as u8 + 1; key_bytes];
            session.put(&key, value(1, 0, bytes)).unwrap();
            for count in 1..4 {
                let (new, what) = (value(1, count, bytes), (bytes, key_bytes));
                let (done, paid) = price(&mut session, |session| session.put(&key, &new));
                done.unwrap();
                assert_eq!(paid, PUT, "{what:?}");
                let (read, paid) =
                    price(&mut session, |session| session.get_into(&key, &mut vector));
                assert_eq!((read.unwrap().unwrap().bytes, paid), (bytes, GET), "{what:?}");
                assert!(vector == new, "{what:?}");
                // A slice at an odd address.
                memory.fill(7);
                let slice = &mut memory[1..];
                let (read, paid) = price(&mut session, |session| session.get_into(&key, slice));
                let read = read.unwrap().unwrap();
                assert_eq!((read.bytes, paid), (bytes, GET), "{what:?}");
                assert!(memory[1..=bytes] == new && memory[0] == 7, "{what:?}");
                let got = session.get(&key).unwrap().unwrap();
                assert!(got.data == new && got.version == read.version, "{what:?}");
                // The other session finds the location in the index at first.
                let found = other.get_into(&key, &mut memory[..]).unwrap().unwrap();
                assert!(found == read && memory[..bytes] == new, "{what:?}");
            }
            assert!(session.delete(&key).unwrap());
            assert!(session.get_into(&key, &mut vector).unwrap().is_none() && vector.is_empty());
        }
    }
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn a_slice_that_is_too_short_is_an_error_with_the_length() {
    let server = ServerProcess::start("--memory 64MiB");
    let session = &mut server.session();
    for bytes in [5, 5000, 100_000] {
        let stored = value(2, 0, bytes.max(24));
        session.put("key", &stored).unwrap();
        let needed = stored.len();
        for is_cached in [true, false, true] {
            if !is_cached {
                session.clear_cache();
            }
            let mut short = vec![7; needed - 1];
            let error = session.get_into("key", &mut short[..]).unwrap_err();
            let is_named = |is: usize| is == needed;
            assert!(
                matches!(error, Error::Operation(TargetTooShort { needed, bytes })
                    if is_named(needed) && is_named(bytes + 1)),
                "{error}"
            );
            assert!(error.to_string().contains(&format!("{needed} bytes long")), "{error}");
            let mut long = vec![7; needed];
            let read = session.get_into("key", &mut long[..]).unwrap().unwrap();
            assert!(read.bytes == needed && long == stored);
        }
    }
    assert!(session.get_into("absent", &mut [0; 4]).unwrap().is_none());
}

/// The PUT that finds another block in the slot continues with the lane's image, which has not had
/// the value so far.
#[on(each, rdma_in_soak)]
fn a_long_put_that_others_overtook_stores_its_value() {
    let server = ServerProcess::start("--memory 128MiB --grace-ms 50");
    let (mut session, mut other) = (server.session(), server.session());
    for round in 0..scaled(50) {
        let bytes = 4096 + 977 * round as usize;
        session.put("key", value(3, 4 * round, bytes)).unwrap();
        if round % 2 == 0 {
            other.put("key", value(3, 4 * round + 1, bytes)).unwrap();
        } else {
            assert!(other.delete("key").unwrap());
        }
        let new = value(3, 4 * round + 2, bytes + 8);
        session.put("key", &new).unwrap();
        assert!(other.get("key").unwrap().unwrap().data == new, "round {round}");
        assert!(session.get("key").unwrap().unwrap().data == new, "round {round}");
    }
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn long_values_expire_at_cached_locations() {
    const TTL: Duration = Duration::from_secs(3);
    let server = ServerProcess::start("--memory 64MiB");
    let session = &mut server.session();
    let (new, mut vector) = (value(4, 0, 100_000), Vec::new());
    session.put("key", b"short").unwrap();
    let (done, paid) = price(session, |session| session.put_with_ttl("key", &new, TTL));
    done.unwrap();
    assert_eq!(paid, PUT);
    let (read, paid) = price(session, |session| session.get_into("key", &mut vector).unwrap());
    assert_eq!((read.map(|read| read.bytes), paid), (Some(new.len()), GET));
    assert!(vector == new);
    std::thread::sleep(TTL + Duration::from_millis(10));
    let (read, paid) = price(session, |session| session.get_into("key", &mut vector).unwrap());
    assert!(read.is_none() && vector.is_empty(), "{read:?}");
    // The server may have removed the key already.
    assert!(paid == GET || paid[0] > 1, "{paid:?}");
    assert!(session.get_into("key", &mut [0; 4][..]).unwrap().is_none());
}

/// GRACE is so short that blocks are overwritten all the time, also while they are read.
#[on(each, rdma_in_soak)]
fn a_long_value_is_never_a_mixture_of_two() {
    let server = ServerProcess::start("--memory 64MiB --grace-ms 1");
    let rounds = scaled(3000);
    let stop = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(stop);
        let server = &server;
        for writer in 0..2 {
            scope.spawn(move || {
                let mut session = server.session();
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    let bytes = 40_000 + count as usize % 3 * 777;
                    session.put("key", self_describing::value(5, writer, count, bytes)).unwrap();
                    count += 1;
                }
            });
        }
        let (mut session, mut memory) = (server.session(), vec![0; 50_000]);
        session.put("key", value(5, 0, 40_000)).unwrap();
        for round in 0..rounds {
            match session.get_into("key", &mut memory[..]) {
                Ok(read) => {
                    let read = read.expect("no one deletes it");
                    assert!(self_describing::holds(5, &memory[..read.bytes]), "round {round}");
                }
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
        }
    });
    server.assert_verifies();
}

/// Changes a byte in the middle of a value, and at its end, in the region's file.
#[on(each, rdma_in_soak)]
fn a_damaged_long_value_is_refused() {
    let server = ServerProcess::start_with_file("--memory 32MiB");
    let file = std::fs::File::options().read(true).write(true).open(server.region_file());
    let region = Region::map(&file.unwrap()).unwrap();
    let (mut session, mut cold) = (server.session(), server.session());
    let (stored, mut memory) = (value(6, 0, 100_000), vec![0; 100_000]);
    session.put("key", b"before").unwrap();
    session.put("key", &stored).unwrap();
    // The value follows the header, which has 32 bytes, and a key of 3 bytes.
    let word_of = |at: usize| {
        let at = (at + 35) / 8 * 8 - 35;
        let word = u64::from_le_bytes(stored[at..at + 8].try_into().unwrap());
        let mut offsets = (0..region.bytes()).step_by(8);
        offsets.find(|offset| region.load(*offset).unwrap() == word).unwrap()
    };
    for at in [100, 50_000, 99_990] {
        let offset = word_of(at);
        let word = region.load(offset).unwrap();
        assert!(session.get_into("key", &mut memory[..]).unwrap().is_some() && memory == stored);
        region.store(offset, word ^ 1 << 17).unwrap();
        for session in [&mut session, &mut cold] {
            let read = session.get_into("key", &mut memory[..]);
            assert!(matches!(read, Err(Error::Operation(Layout(_)))), "{at}: {read:?}");
            let read = session.get("key");
            assert!(matches!(read, Err(Error::Operation(Layout(_)))), "{at}: {read:?}");
        }
        region.store(offset, word).unwrap();
        assert!(cold.get_into("key", &mut memory[..]).unwrap().is_some() && memory == stored);
        session.get("key").unwrap().unwrap();
    }
}

/// The price is that of other long values, on every fabric. Over RDMA no byte is copied.
#[on(each, rdma_in_soak)]
fn registered_buffers_bring_values_of_all_lengths() {
    let server = ServerProcess::start("--memory 256MiB --value-bytes-max 20971520");
    let client = server.client();
    let (mut session, mut other) = (client.session().unwrap(), client.session().unwrap());
    let mut buffer = client.buffer(10 << 20).unwrap();
    let mut from = client.buffer(10 << 20).unwrap();
    for bytes in LENGTHS.into_iter().chain([(4 << 20) + 1, (5 << 20) + 3, 9 << 20]) {
        let (old, new) = (value(1, 1, bytes), value(1, 2, bytes));
        session.put("key", &old).unwrap();
        // At an odd address.
        from[1..=bytes].copy_from_slice(&new);
        let (done, paid) = price(&mut session, |session| session.put("key", &from[1..=bytes]));
        done.unwrap();
        let is_long = bytes > 4 << 20;
        assert!(is_long || paid == PUT, "{bytes}: {paid:?}");
        for _ in 0..2 {
            buffer.fill(7);
            let (read, paid) = price(&mut session, |session| session.get_into("key", &mut buffer));
            assert_eq!(read.unwrap().unwrap().bytes, bytes);
            assert!(is_long || paid == GET, "{bytes}: {paid:?}");
            assert!(buffer[..bytes] == new, "{bytes}");
        }
        let read = other.get_into("key", &mut buffer).unwrap().unwrap();
        assert!(buffer[..read.bytes] == new, "{bytes}");
    }
    // A part of one buffer, and one that is too short.
    session.put("key", &from[..70_000]).unwrap();
    session.get_into("key", &mut buffer[5..70_005]).unwrap().unwrap();
    assert!(buffer[5..70_005] == from[..70_000]);
    let mut short = client.buffer(69_999).unwrap();
    let error = session.get_into("key", &mut short).unwrap_err();
    assert!(matches!(error, Error::Operation(TargetTooShort { needed: 70_000, .. })), "{error}");
    drop((buffer, from));
    // Buffers that are gone do not disturb.
    let mut buffer = client.buffer(1 << 20).unwrap();
    assert_eq!(session.get_into("key", &mut buffer).unwrap().unwrap().bytes, 70_000);
    assert!(session.get_into("absent", &mut buffer).unwrap().is_none());
}

#[on(each, rdma_in_soak)]
fn several_values_are_read_into_the_memory_of_the_caller() {
    let server = ServerProcess::start("--memory 128MiB --value-bytes-max 20971520");
    let mut session = server.session();
    let lengths = [10, 70_000, 5 << 20];
    for (n, bytes) in lengths.into_iter().enumerate() {
        session.put([n as u8], &value(n as u64, 1, bytes)[..bytes]).unwrap();
    }
    let mut memory = vec![vec![0; 6 << 20]; 4];
    let targets = memory.iter_mut().map(Vec::as_mut_slice);
    let (read, [_, doorbells, ..]) = price(&mut session, |session| {
        session.get_many_into([[0], [1], [2], [3]].into_iter().zip(targets)).unwrap()
    });
    assert!(doorbells <= 6, "{doorbells}");
    assert!(read[3].is_none());
    for (n, bytes) in lengths.into_iter().enumerate() {
        assert_eq!(read[n].unwrap().bytes, bytes);
        assert!(memory[n][..bytes] == value(n as u64, 1, bytes)[..bytes], "{n}");
    }
    let short = session.get_many_into([([1], &mut memory[0][..60_000])]).unwrap_err();
    assert!(matches!(short, Error::Operation(TargetTooShort { needed: 70_000, bytes: 60_000 })));
}

/// Eight operations at cached locations have one doorbell, except on shared memory, where nothing
/// waits for one. Targets are as long as their values, longer and a little too short.
#[on(each, rdma)]
fn long_values_of_several_keys_share_a_doorbell() {
    const KEYS: usize = 8;
    let server = ServerProcess::start("--memory 128MiB --grace-ms 50");
    let client = server.client();
    let mut session = client.session().unwrap();
    let mut registered = client.buffer(3 << 20).unwrap();
    let mut plain = vec![0; 3 << 20];
    let shared = if is_over_shm() { KEYS as u64 } else { 1 };
    for (turn, bytes) in [4096, 8189, 12_289, 70_001, 131_072].into_iter().enumerate() {
        // A link that is slow at the moment gets only 64 KiB at a time.
        let is_shared = |doorbells| match is_over_shm() || KEYS * bytes < 64 << 10 {
            true => doorbells == shared,
            false => (1..KEYS as u64).contains(&doorbells),
        };
        let values = |turn: usize| -> Vec<_> {
            (0..KEYS).map(|n| value(n as u64, turn as u64 + 1, bytes + n)).collect()
        };
        // Until the session has enough free blocks of this class.
        for _ in 0..4 {
            session.put_many((0..KEYS).map(|n| ([n as u8], vec![0; bytes]))).unwrap();
        }
        for memory in [&mut registered[1..], &mut plain[1..]] {
            let new = values(turn);
            let mut sources = memory.chunks_mut(bytes + KEYS);
            for value in &new {
                sources.next().unwrap()[..value.len()].copy_from_slice(value);
            }
            let entries = memory.chunks(bytes + KEYS).take(KEYS).enumerate();
            let entries = entries.map(|(n, chunk)| ([n as u8], &chunk[..bytes + n]));
            let (done, paid) = price(&mut session, |session| session.put_many(entries));
            done.unwrap();
            assert_eq!(paid[2..], [0, 2 * KEYS as u64, KEYS as u64], "{bytes}");
            assert!(is_shared(paid[1]), "{bytes}: {paid:?}");
            memory.fill(7);
            let targets = memory.chunks_mut(bytes + KEYS).take(KEYS).enumerate();
            let targets = targets.map(|(n, target)| match n % 2 {
                0 => ([n as u8], &mut target[..bytes + n]),
                _ => ([n as u8], target),
            });
            let (read, paid) = price(&mut session, |session| session.get_many_into(targets));
            assert_eq!(paid[2..], [KEYS as u64, 0, 0], "{bytes}");
            assert!(is_shared(paid[1]), "{bytes}: {paid:?}");
            let chunks = memory.chunks(bytes + KEYS);
            for ((read, chunk), value) in read.unwrap().into_iter().zip(chunks).zip(&new) {
                assert_eq!(read.unwrap().bytes, value.len());
                assert!(chunk[..value.len()] == *value, "{bytes}");
            }
            let short = session.get_many_into([([3], &mut memory[..bytes + 2])]).unwrap_err();
            let Error::Operation(TargetTooShort { needed, .. }) = short else { panic!("{short}") };
            assert_eq!(needed, bytes + 3);
        }
    }
}

/// Other sessions replace and delete the values meanwhile, so that cached locations are wrong.
#[on(each, rdma_in_soak)]
fn several_long_values_are_whole_while_others_change_them() {
    const KEYS: u64 = 16;
    const BYTES: usize = 20_000;
    let server = ServerProcess::start("--memory 64MiB --grace-ms 50");
    let client = server.client();
    let (mut session, stop) = (client.session().unwrap(), AtomicBool::new(false));
    session.put_many((0..KEYS).map(|n| (n.to_le_bytes(), value(n, 0, BYTES)))).unwrap();
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            let mut other = server.session();
            let mut memory = client.buffer(KEYS as usize * BYTES).unwrap();
            for count in 1.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                for (n, chunk) in memory.chunks_mut(BYTES).enumerate() {
                    chunk.copy_from_slice(&value(n as u64, count, BYTES));
                }
                let entries = memory.chunks(BYTES).zip(0_u64..);
                other.put_many(entries.map(|(value, n)| (n.to_le_bytes(), value))).unwrap();
                if count % 8 == 0 {
                    other.delete((count / 8 % KEYS).to_le_bytes()).unwrap();
                }
            }
        });
        let mut memory = client.buffer(KEYS as usize * BYTES).unwrap();
        let (mut found, mut absent) = (0, 0);
        for _ in 0..scaled(400) {
            let targets = memory.chunks_mut(BYTES).zip(0_u64..);
            let targets = targets.map(|(target, n)| (n.to_le_bytes(), target));
            let read = session.get_many_into(targets).unwrap();
            for ((read, chunk), n) in read.iter().zip(memory.chunks(BYTES)).zip(0..) {
                match read {
                    Some(read) => {
                        assert!(self_describing::holds(n, &chunk[..read.bytes]), "{n}");
                        found += 1;
                    }
                    None => absent += 1,
                }
            }
        }
        assert!(found > 0, "{absent} were absent");
    });
}
