//! Damaged region files: `kv-server` refuses them in one line, or serves what they hold.
//! `tests/tests/server/restart.rs` has the files that hold no region.

use std::path::Path;

use farside_layout::{CHUNK_BYTES, ChunkEntry, ChunkUse, Row, SUBTABLE_BYTES};
use farside_tests::command::complaints;
use farside_tests::{fill, wait_until};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use zerocopy::{FromBytes, IntoBytes};

use super::*;

/// Runs a server on the file until it serves, or has refused with one line after its warnings;
/// returns its log.
pub(super) fn start_briefly(file: &Path) -> String {
    let folder = tempfile::tempdir().unwrap();
    let arguments = format!("--region-file {}", file.display());
    let mut server = ServerProcess::spawn_in(folder.path(), &arguments, |command| command);
    wait_until("it serves or refuses", Duration::from_secs(20), || {
        server.has_exited() || server.log().contains("serving")
    });
    let log = server.log();
    assert!(!log.contains("panicked"), "{log}");
    let last = log.lines().last().unwrap_or_default();
    assert!(last.starts_with("kv-server: ") || log.contains("serving"), "{log}");
    log
}

/// Returns a region with a hundred keys, whose server stopped cleanly.
fn region(arguments: &str) -> ServerProcess {
    let mut server = ServerProcess::start_with_file(arguments);
    fill(&mut server.session(), 0..100, |n| value(n, 0, 100));
    assert_eq!(server.terminate(), Some(0));
    server
}

fn geometry(server: &ServerProcess) -> Geometry {
    let file = std::fs::File::open(server.region_file()).unwrap();
    superblock(&Region::map_read_only(&file).unwrap()).1.geometry()
}

/// Continuing such a split would overwrite the keys of other subtables.
#[on(shm, tcp_in_soak)]
fn an_unfinished_split_that_leads_to_other_subtables_is_refused() {
    let server = region("--memory 8MiB --index 32KiB");
    let whole = std::fs::read(server.region_file()).unwrap();
    let heap = geometry(&server).chunk_offset(0).unwrap();
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
        let log = start_briefly(&server.region_file());
        let has_refused = log.contains("damaged") && complaints(&log) == 1;
        assert!(has_refused, "{parent} to {new:?}: {log}");
        let after = std::fs::read(server.region_file()).unwrap();
        assert!(after[heap as usize..] == content[heap as usize..], "{parent} to {new:?}");
    }
}

/// The next server either refuses the file in one line, or serves the region; it never panics.
#[on(shm, tcp_in_soak)]
fn random_tables_are_refused_or_served() {
    let server = region("--memory 8MiB");
    let whole = std::fs::read(server.region_file()).unwrap();
    let geometry = geometry(&server);
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
        let log = start_briefly(&server.region_file());
        assert!(log.contains("serving") || complaints(&log) == 1, "{name}: {log}");
    }
    // Each chunk with each possible use, of which only one is right.
    for chunk in 0..geometry.chunks() {
        let uses = [ChunkUse::Free, ChunkUse::Subtables, ChunkUse::Continued];
        for entry in uses.map(|chunk_use| ChunkEntry::new(chunk_use).bits()) {
            let mut content = whole.clone();
            let at = geometry.chunk_entry(chunk).unwrap() as usize;
            content[at..at + 8].copy_from_slice(&entry.to_le_bytes());
            std::fs::write(server.region_file(), &content).unwrap();
            start_briefly(&server.region_file());
        }
    }
}
