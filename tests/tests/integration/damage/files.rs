//! Invalid region files: `kv-server` refuses them in one line and does not change them.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use farside_layout::{CHUNK_BYTES, ChunkEntry, ChunkUse, Row, SUBTABLE_BYTES};
use farside_tests::binary;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use zerocopy::{FromBytes, IntoBytes};

use super::*;

/// Runs a server on the file until it serves or has refused; returns its stderr.
pub(super) fn start_briefly(file: &Path) -> String {
    let socket = file.with_file_name("brief.sock");
    let log = file.with_file_name("brief.log");
    let mut child = Command::new(binary("kv-server"))
        .arg("--listen")
        .arg(format!("shm://{}", socket.display()))
        .arg("--region-file")
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let said = || std::fs::read_to_string(&log).unwrap();
    while child.try_wait().unwrap().is_none() && !said().contains("serving") {
        if started.elapsed() > Duration::from_secs(20) {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
    assert!(started.elapsed() < Duration::from_secs(20), "it neither serves nor refuses");
    said()
}

/// A region with a hundred keys, whose server stopped cleanly.
fn region() -> ServerProcess {
    let mut server = ServerProcess::start_with_file("--memory 8MiB");
    let mut session = server.session();
    (0..100u64).for_each(|n| session.put(&n.to_le_bytes(), &value(n, 0, 100)).unwrap());
    drop(session);
    assert_eq!(server.terminate(), Some(0));
    server
}

fn assert_refused(server: &ServerProcess, content: &[u8], what: &str) {
    std::fs::write(server.region_file(), content).unwrap();
    let said = start_briefly(&server.region_file());
    assert_eq!(said.lines().count(), 1, "{what}: {said}");
    let file = server.region_file().display().to_string();
    assert!(said.starts_with("kv-server: ") && said.contains(&file), "{what}: {said}");
    let mut after = Vec::new();
    std::fs::File::open(server.region_file()).unwrap().read_to_end(&mut after).unwrap();
    assert!(after == content, "{what}: the file was changed");
}

#[test]
fn a_truncated_region_file_is_refused_untouched() {
    let server = region();
    let whole = std::fs::read(server.region_file()).unwrap();
    let bytes = whole.len();
    for kept in [1, 7, 8, 16, 87, 88, 4095, 4096, 1 << 20, bytes / 2, bytes - 4096, bytes - 1] {
        assert_refused(&server, &whole[..kept], &format!("{kept} of {bytes} bytes"));
    }
    std::fs::write(server.region_file(), &whole).unwrap();
    let said = start_briefly(&server.region_file());
    assert!(said.contains("serving"), "the intact file is not served: {said}");
}

#[test]
fn a_region_file_of_random_bytes_is_refused_untouched() {
    let server = region();
    let whole = std::fs::read(server.region_file()).unwrap();
    let mut random = SmallRng::seed_from_u64(7);
    let mut content = vec![0; whole.len()];
    random.fill_bytes(&mut content);
    assert_refused(&server, &content, "random bytes");
    for kept in [8, 12, 32, 48, 71] {
        content[..kept].copy_from_slice(&whole[..kept]);
        assert_refused(&server, &content, &format!("random bytes after the first {kept}"));
    }
}

#[test]
fn every_flipped_byte_of_the_superblock_is_refused_untouched() {
    let server = region();
    let whole = std::fs::read(server.region_file()).unwrap();
    for byte in 0..72 {
        let mut content = whole.clone();
        content[byte] ^= 1 << (byte % 8);
        assert_refused(&server, &content, &format!("bit {} of byte {byte}", byte % 8));
    }
}

/// Continuing such a split would overwrite the keys of other subtables.
#[test]
fn an_unfinished_split_that_leads_to_other_subtables_is_refused() {
    let mut server = ServerProcess::start_with_file("--memory 8MiB --index 32KiB");
    let mut session = server.session();
    (0..100u64).for_each(|n| session.put(&n.to_le_bytes(), &value(n, 0, 100)).unwrap());
    drop(session);
    assert_eq!(server.terminate(), Some(0));
    let whole = std::fs::read(server.region_file()).unwrap();
    let heap = {
        let file = std::fs::File::open(server.region_file()).unwrap();
        superblock(&Region::map_read_only(&file).unwrap()).1.geometry().chunk_offset(0).unwrap()
    };
    let subtable = |number: u64| heap + number * SUBTABLE_BYTES;
    // A split of a subtable before, between and after the two in the directory; and one that leads
    // to itself and beyond the others.
    for (parent, new) in [(0, [1, 2]), (1, [0, 3]), (3, [2, 1]), (2, [2, 8])] {
        let (row, _) = Row::ref_from_prefix(&whole[subtable(parent) as usize..]).unwrap();
        let header = row.header.with_forward(new.map(subtable));
        let mut content = whole.clone();
        content[subtable(parent) as usize..][..header.as_bytes().len()]
            .copy_from_slice(header.as_bytes());
        std::fs::write(server.region_file(), &content).unwrap();
        let said = start_briefly(&server.region_file());
        assert!(
            said.contains("damaged") && said.lines().count() == 1,
            "{parent} to {new:?}: {said}"
        );
        let after = std::fs::read(server.region_file()).unwrap();
        assert!(after[heap as usize..] == content[heap as usize..], "{parent} to {new:?}");
    }
}

/// The next server either refuses the file in one line, or serves the region; it never panics.
#[test]
fn random_tables_are_refused_or_served() {
    let server = region();
    let whole = std::fs::read(server.region_file()).unwrap();
    let geometry = {
        let file = std::fs::File::open(server.region_file()).unwrap();
        superblock(&Region::map_read_only(&file).unwrap()).1.geometry()
    };
    let chunk_table = geometry.chunk_entry(0).unwrap();
    let directories = geometry.directory_offset(0).unwrap();
    let heap = geometry.chunk_offset(0).unwrap();
    let mut random = SmallRng::seed_from_u64(3);
    for (name, from, to) in [
        ("directories", directories, chunk_table),
        ("chunk table", chunk_table, chunk_table + 8 * u64::from(geometry.chunks())),
        ("client table", 4096, directories),
        ("heap", heap, heap + CHUNK_BYTES),
        ("everything after the superblock", 4096, whole.len() as u64),
    ] {
        let mut content = whole.clone();
        random.fill_bytes(&mut content[from as usize..to as usize]);
        std::fs::write(server.region_file(), &content).unwrap();
        let said = start_briefly(&server.region_file());
        let refused = said.lines().count() == 1 && said.starts_with("kv-server: ");
        assert!(refused || said.contains("serving"), "{name}: {said}");
        assert!(!said.contains("panicked"), "{name}: {said}");
    }
    // Each chunk with each possible use, of which only one is right.
    for chunk in 0..geometry.chunks() {
        let uses = [ChunkUse::Free, ChunkUse::Subtables, ChunkUse::Continued];
        for entry in uses.map(|chunk_use| ChunkEntry::new(chunk_use).bits()) {
            let mut content = whole.clone();
            let at = geometry.chunk_entry(chunk).unwrap() as usize;
            content[at..at + 8].copy_from_slice(&entry.to_le_bytes());
            std::fs::write(server.region_file(), &content).unwrap();
            let said = start_briefly(&server.region_file());
            assert!(!said.contains("panicked"), "chunk {chunk} as {entry:#x}: {said}");
        }
    }
}
