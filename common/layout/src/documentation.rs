//! Checks `docs/memory-layout.md`: this test prints its tables from the structs.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;

use super::block::BlockHeader;
use super::{ClientEntry, Extent, Row, RowHeader, SizeClass, Slot, Superblock};

/// Writes a table of a struct's fields: offset, length, name.
macro_rules! table {
    ($out:expr, $type:ident: $($field:ident),+) => {{
        let mut offsets = vec![$(offset_of!($type, $field)),+];
        offsets.push(size_of::<$type>());
        writeln!($out, "`{}`, {} bytes:\n", stringify!($type), size_of::<$type>()).unwrap();
        writeln!($out, "| offset | bytes | field |\n|---:|---:|---|").unwrap();
        for (offset, field) in offsets.windows(2).zip([$(stringify!($field)),+]) {
            writeln!($out, "| {} | {} | {field} |", offset[0], offset[1] - offset[0]).unwrap();
        }
        writeln!($out).unwrap();
    }};
}

fn tables() -> String {
    let mut out = String::new();
    table!(out, Superblock: magic, format_version, crc32, region_id, hash_key, region_bytes,
        grace_ms, key_bytes_max, value_bytes_max, reserved, incarnation, state, directory_depth,
        servings);
    table!(out, ClientEntry: lease, reserved);
    table!(out, Row: header, slots);
    table!(out, RowHeader: prefix, local_depth, filling, magic, forward);
    table!(out, Slot: word, hint);
    table!(out, BlockHeader: superseded, generation, checksum, key_bytes, writer, value_bytes,
        written_at_ms, expires_at_ms);
    table!(out, Extent: address, generation, checksum);
    writeln!(out, "Size classes, in bytes:\n\n```").unwrap();
    let classes: Vec<u64> = SizeClass::all().map(SizeClass::block_bytes).collect();
    for line in classes.chunks(12) {
        let line: Vec<String> = line.iter().map(u64::to_string).collect();
        writeln!(out, "{}", line.join(" ")).unwrap();
    }
    out.push_str("```\n");
    out
}

const BEGIN: &str = "<!-- printed by the test in common/layout/src/documentation.rs -->\n";

/// With `FARSIDE_UPDATE_DOCS=1` this writes the tables into the file instead.
#[test]
fn the_documented_memory_layout_is_the_real_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/memory-layout.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, printed) = text.split_once(BEGIN).expect("the page has the marker line");
    if std::env::var_os("FARSIDE_UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}\n{}", tables())).unwrap();
    } else {
        assert_eq!(printed.trim(), tables().trim(), "run with FARSIDE_UPDATE_DOCS=1");
    }
}
