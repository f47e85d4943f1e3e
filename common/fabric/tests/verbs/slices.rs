//! A region that is registered in slices. Guards against a verb with the key of another slice,
//! which the device refuses or, worse, executes with the rights of a key of something else.

use farside_fabric::rdma::{Options, Rkeys, VerbsError};
use farside_fabric::verbs::{Protection, VerbsFabric};
use farside_fabric::{Buffer, ChainError, Fabric, LaneId, Role, Verb};

use crate::harness::{
    READER, REGION, Server, WRITER, address, fabric_from, far_deadline, increment, read, remote_of,
};

const LANE: LaneId = LaneId(0);
const SLICE: u64 = 8 << 20;
/// Three slices, of which the last one is short.
const REGION_BYTES: u64 = 2 * SLICE + (2 << 20);
/// The longest verb.
const LONG: u32 = 4 << 20;

fn server() -> Option<Server> {
    Server::of_region(REGION_BYTES, Some(SLICE))
}

fn pattern(seed: u64, bytes: u32) -> Vec<u8> {
    (0..u64::from(bytes)).map(|at| (seed + at * 7 + (at >> 8)) as u8).collect()
}

/// WRITEs a pattern, checks it in the region, and READs it.
fn write_and_read(server: &Server, fabric: &mut VerbsFabric, remote: u64, bytes: u32) {
    let deadline = far_deadline(fabric);
    let sent = pattern(remote, bytes);
    assert!(fabric.reserve(LANE, Buffer::NewBlock, sent.len()));
    fabric.buffer_mut(LANE, Buffer::NewBlock)[..sent.len()].copy_from_slice(&sent);
    let write = [Verb::Write { remote, from: Buffer::NewBlock, bytes }];
    assert_eq!(fabric.run(LANE, REGION, &write, deadline), Ok(0), "WRITE {bytes} at {remote}");
    for (at, word) in sent.chunks_exact(8).enumerate() {
        let expected = u64::from_le_bytes(word.try_into().unwrap());
        assert_eq!(server.region.load(remote + 8 * at as u64), Ok(expected));
    }
    let into = Buffer::ReadBlock;
    assert_eq!(fabric.run(LANE, REGION, &[read(remote, bytes)], deadline), Ok(0));
    assert!(fabric.buffer(LANE, into)[..sent.len()] == sent, "READ {bytes} at {remote}");
}

#[test]
fn each_slice_has_a_key_of_its_own() {
    let Some(server) = server() else { return };
    for protection in [&server.writers, &server.readers] {
        let Rkeys { slice_bytes, keys } = protection.remote().rkeys;
        assert_eq!((slice_bytes, &keys[3..]), (SLICE, &[0; 13][..]));
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[2] != keys[0], "{keys:?}");
    }
    assert_ne!(server.writers.remote().rkeys, server.readers.remote().rkeys);
}

#[test]
fn verbs_reach_both_sides_of_a_border_and_cross_it() {
    let Some(mut server) = server() else { return };
    let mut fabric = server.client(1);
    for border in [SLICE, 2 * SLICE] {
        for (remote, bytes) in [
            (border - 8, 8),
            (border, 8),
            (border - 8, 16),
            (border - 128, 256),
            (border - 4096, 4096),
            (border, 4096),
            (border - 4096, 1 << 20),
        ] {
            write_and_read(&server, &mut fabric, remote, bytes);
        }
    }
    // The block of two chunks, and the one that goes furthest beyond a border.
    write_and_read(&server, &mut fabric, SLICE - (2 << 20), LONG);
    write_and_read(&server, &mut fabric, SLICE - 8, LONG);
    write_and_read(&server, &mut fabric, 0, 8);
    write_and_read(&server, &mut fabric, REGION_BYTES - 8, 8);
}

#[test]
fn a_chain_changes_several_slices_in_its_order() {
    let Some(mut server) = server() else { return };
    let mut fabric = server.client(1);
    let deadline = far_deadline(&fabric);
    for round in 0..50 {
        let chain = [
            Verb::WriteWord { remote: SLICE - 8, value: round },
            Verb::WriteU32 { remote: 2 * SLICE + 4, value: round as u32 },
            increment(SLICE, round),
            read(SLICE - 8, 16),
        ];
        assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Ok(round));
        let words = fabric.buffer(LANE, Buffer::ReadBlock)[..16].to_vec();
        let expected = [round.to_le_bytes(), (round + 1).to_le_bytes()].concat();
        assert_eq!(words, expected);
        assert_eq!(server.region.load(2 * SLICE), Ok(round << 32));
    }
    // Swaps of one word through its own slice, and of the last word before it.
    assert_eq!(fabric.run(LANE, REGION, &[increment(SLICE - 8, 49)], deadline), Ok(49));
    assert_eq!([SLICE - 8, SLICE].map(|at| server.region.load(at)), [Ok(50), Ok(50)]);
}

#[test]
fn a_verb_that_is_too_long_for_a_border_is_refused_and_breaks_nothing() {
    let Some(mut server) = server() else { return };
    let mut fabric = server.client(1);
    let deadline = far_deadline(&fabric);
    let outside = ChainError::Outside { remote: SLICE - 8, bytes: u64::from(LONG) + 16 };
    let long = [read(SLICE - 8, LONG + 16)];
    assert_eq!(fabric.run(LANE, REGION, &long, deadline), Err(outside));
    assert_eq!(fabric.run(LANE, REGION, &[increment(SLICE, 0)], deadline), Ok(0));
}

/// The other tests rely on this: the device refuses an access outside the slice of its key, so a
/// wrong key makes them fail.
#[test]
fn the_device_refuses_the_key_of_another_slice() {
    let Some(mut server) = server() else { return };
    let address = server.address();
    let mut fabric = server.while_client(|| {
        let link =
            farside_fabric::verbs::connect_data(address, WRITER, 1, &Options::default()).unwrap();
        let mut remote = remote_of(link.reply(), 0);
        remote.rkeys = Rkeys::whole(remote.rkeys.keys[0]);
        link.into_fabric(remote).unwrap()
    });
    let deadline = far_deadline(&fabric);
    assert_eq!(fabric.run(LANE, REGION, &[increment(0, 0)], deadline), Ok(0));
    let beyond = SLICE + u64::from(LONG);
    let refused = fabric.run(LANE, REGION, &[increment(beyond, 0)], deadline);
    assert!(matches!(refused, Err(ChainError::Fenced | ChainError::Unknown)), "{refused:?}");
    assert_eq!(server.region.load(beyond), Ok(0));
}

#[test]
fn a_reader_changes_no_slice() {
    let Some(mut server) = server() else { return };
    server.region.store(2 * SLICE, 5).unwrap();
    let address = server.address();
    for remote in [0, SLICE, 2 * SLICE] {
        let mut fabric =
            server.while_client(|| fabric_from(address, READER, 1, Options::default(), 0));
        let deadline = far_deadline(&fabric);
        assert_eq!(fabric.run(LANE, REGION, &[read(remote, 8)], deadline), Ok(0));
        let found = fabric.buffer(LANE, Buffer::ReadBlock)[0];
        assert_eq!(found, if remote == 2 * SLICE { 5 } else { 0 });
        let refused = fabric.run(LANE, REGION, &[increment(remote, 0)], deadline);
        assert!(matches!(refused, Err(ChainError::Fenced | ChainError::Unknown)), "{refused:?}");
    }
}

/// The server changes words through its own queue pair, with the keys of the slices.
#[test]
fn the_loopback_reaches_all_slices() {
    let Some(server) = server() else { return };
    let mut loopback = server.writers.loopback(1, &Options::default()).unwrap();
    let deadline = far_deadline(&loopback.fabric);
    for remote in [0, SLICE - 8, SLICE, 2 * SLICE, REGION_BYTES - 8] {
        let swap = [increment(remote, 0)];
        assert_eq!(loopback.fabric.run(LANE, REGION, &swap, deadline), Ok(0));
        assert_eq!(server.region.load(remote), Ok(1));
    }
}

#[test]
fn slices_that_are_too_short_are_refused_and_long_ones_change_nothing() {
    let Some(device) = address() else { return };
    let Some(server) = Server::of_region(34 << 20, None) else { return };
    let at = |slice| Protection::in_slices(device, &server.region, Role::Reader, Some(slice));
    let Err(error) = at(2 << 20) else { panic!("17 slices") };
    assert!(matches!(error, VerbsError::TooManySlices { slices: 17, .. }), "{error}");
    assert!(error.to_string().contains("write at least \"8MiB\""), "{error}");
    for long in [34 << 20, 1 << 40] {
        assert_eq!(at(long).unwrap().remote().rkeys.slice_bytes, 0);
    }
}
