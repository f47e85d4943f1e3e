//! Makes tests of the examples in the documentation of `farside` and in README.md: one function for
//! each example that needs a server. `integration::doc_examples` includes them.

use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The server's address in examples.
const ADDRESS: &str = "\"shm:///run/farside/kv.sock\"";

/// Returns the examples of a file, each with the number of its first line. `prefixes` begin a line
/// of documentation; none if the whole file is one.
fn examples(content: &str, prefixes: &[&str]) -> Vec<(usize, String)> {
    let (mut found, mut open) = (Vec::new(), None);
    for (number, line) in content.lines().enumerate() {
        let text = line.trim_start();
        let text = match prefixes.iter().find_map(|prefix| text.strip_prefix(prefix)) {
            _ if prefixes.is_empty() => line,
            Some(text) => text.strip_prefix(' ').unwrap_or(text),
            None => {
                open = None;
                continue;
            }
        };
        match (&mut open, text.strip_prefix("```")) {
            (None, Some("" | "no_run" | "rust")) => open = Some((number + 2, String::new())),
            // Another language: its end looks like the beginning of an example.
            (None, Some(_)) => open = Some((0, String::new())),
            (Some(_), Some(_)) => found.extend(open.take()),
            // rustdoc hides lines that begin with this mark.
            (Some((_, code)), None) => {
                let shown = text.strip_prefix("# ").unwrap_or(if text == "#" { "" } else { text });
                code.push_str(shown);
                code.push('\n');
            }
            (None, None) => {}
        }
    }
    found.retain(|(line, _)| *line > 0);
    found
}

/// Returns the test of an example; `None` if the example needs no server.
fn test(name: &str, code: &str) -> Option<String> {
    let end = match code {
        _ if code.contains("async fn example(") => "Ok(smol::block_on(example(&async_client()?))?)",
        _ if code.contains("fn example(") => "Ok(example(&mut session())?)",
        _ if code.contains("fn main(") => "main()",
        _ if code.contains(".connect()?") => "",
        _ => return None,
    };
    let code = code.replace(ADDRESS, "&address()");
    Some(format!("#[on(any)]\nfn {name}() {{\nrun(|| {{\n{code}{end}\n}});\n}}\n"))
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).expect("client/src can be read");
    for path in entries.map(|entry| entry.expect("client/src can be read").path()) {
        if path.is_dir() {
            rust_files(&path, found);
        } else {
            found.push(path);
        }
    }
}

fn main() {
    let mut files = vec![PathBuf::from("../README.md"), PathBuf::from("../client/README.md")];
    rust_files(Path::new("../client/src"), &mut files);
    files.sort();
    println!("cargo::rerun-if-changed=../client/src");
    let mut tests = String::new();
    for path in files {
        println!("cargo::rerun-if-changed={}", path.display());
        let content = std::fs::read_to_string(&path).expect("a file of documentation can be read");
        let is_rust = path.extension().is_some_and(|extension| extension == "rs");
        let prefixes: &[&str] = if is_rust { &["///", "//!"] } else { &[] };
        let place = path.to_string_lossy().to_lowercase().replace(['/', '-'], "_");
        let place = place.trim_start_matches(['.', '_']).split('.').next().unwrap_or_default();
        for (line, code) in examples(&content, prefixes) {
            if let Some(test) = test(&format!("{place}_line_{line}"), &code) {
                write!(tests, "{test}").expect("a string takes everything");
            }
        }
    }
    let folder = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let file = Path::new(&folder).join("doc_examples.rs");
    std::fs::write(file, tests).expect("the build folder can be written");
}
