//! `include/farside.h` is what cbindgen makes of the sources. FARSIDE_UPDATE=1 writes it.
#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::path::Path;

/// What cbindgen makes of the sources. The pages on safety are for Rust; the header's beginning
/// says the same once.
fn generated(folder: &Path) -> String {
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new().with_crate(folder).with_config(config).generate();
    let mut header = Vec::new();
    bindings.unwrap().write(&mut header);
    let (mut lines, mut in_safety) = (Vec::new(), false);
    for line in std::str::from_utf8(&header).unwrap().lines() {
        if line == "// # Safety" {
            in_safety = true;
            assert_eq!(lines.pop(), Some("//"));
        }
        in_safety &= line.starts_with("//");
        if !in_safety {
            lines.push(line);
        }
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_header_is_that_of_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (header, path) = (generated(folder), folder.join("include/farside.h"));
    if std::env::var_os("FARSIDE_UPDATE").is_some() {
        std::fs::write(&path, &header).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).is_ok_and(|present| present == header),
        "the sources have changed; to write {} anew: FARSIDE_UPDATE=1 cargo test -p farside-c",
        path.display()
    );
}
