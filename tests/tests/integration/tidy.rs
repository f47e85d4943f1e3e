//! Checks the rules of the house that neither the compiler nor clippy checks, in every file that
//! git tracks or is about to. Code is short and ASCII, and names no machine or workplace. Paths
//! that documents name exist. Crates use only lower ones. Prose has short sentences and plain
//! words, and commit subjects are short. What pages, invariants and the order of files need is in
//! `tidy/`.

mod invariants;
mod pages;
mod rings;

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use farside_tests::left_out;

/// The longest line of Rust, in columns: the limit of rustfmt.toml, here also for comments.
const COLUMNS_MAX: usize = 100;
/// The longest file of Rust, in lines.
const LINES_MAX: usize = 800;

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The text of a file, by its path in the repository.
pub(super) fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every file that belongs to the repository, by its path in it.
fn files() -> BTreeSet<String> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let listed = Command::new("git").args(arguments).current_dir(root()).output();
    match listed {
        Ok(output) if output.status.success() => {
            let listed = String::from_utf8(output.stdout).unwrap();
            let paths = listed.split('\0').filter(|path| !path.is_empty());
            paths.filter(|path| root().join(path).is_file()).map(str::to_owned).collect()
        }
        // An exported archive.
        _ => {
            let mut found = BTreeSet::new();
            walk(&root(), &mut found);
            found
        }
    }
}

fn walk(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") && !path.ends_with(".git") {
            walk(&path, found);
        } else if path.is_file() {
            found.insert(path.strip_prefix(root()).unwrap().display().to_string());
        }
    }
}

fn with_extension(extension: &str) -> impl Iterator<Item = (String, String)> {
    let wanted = files().into_iter().filter(move |path| path.ends_with(extension));
    wanted.map(|path| {
        let content = read(&path);
        (path, content)
    })
}

/// Fails if there are any violations of the rule, and lists them.
fn report(rule: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{rule}:\n{}\n", broken.join("\n"));
}

#[on(shm)]
fn rust_files_are_short_narrow_and_ascii() {
    let mut broken = Vec::new();
    for (path, content) in with_extension(".rs") {
        let lines = content.lines().count();
        if lines > LINES_MAX {
            broken.push(format!("{path}: {lines} lines"));
        }
        for (number, line) in content.lines().enumerate() {
            let (columns, number) = (line.chars().count(), number + 1);
            if columns > COLUMNS_MAX {
                broken.push(format!("{path}:{number}: {columns} columns"));
            }
            if !line.is_ascii() {
                broken.push(format!("{path}:{number}: not ASCII"));
            }
        }
    }
    report("at most 800 lines of at most 100 columns, in ASCII", &broken);
}

/// Split, so that this file is checked too.
const TRACES: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/tmp/", "target"),
    concat!("anthro", "pic"),
    concat!("clau", "de"),
    concat!("chat", "gpt"),
    concat!("open", "ai"),
    concat!("ji", "ra/"),
    concat!("FIX", "ME"),
];

#[on(shm)]
fn no_file_names_a_machine_or_workplace() {
    let mut broken = Vec::new();
    for path in files() {
        let content = std::fs::read(root().join(&path)).unwrap();
        let content = String::from_utf8_lossy(&content).to_lowercase();
        for (number, line) in content.lines().enumerate() {
            for trace in TRACES.iter().filter(|trace| line.contains(&trace.to_lowercase())) {
                broken.push(format!("{path}:{}: {trace}", number + 1));
            }
        }
    }
    report("no file names a machine or a workplace", &broken);
}

/// The texts between backticks, outside of fenced blocks.
fn quoted(content: &str) -> Vec<&str> {
    let prose = content.split("```").step_by(2);
    prose.flat_map(|text| text.split('`').skip(1).step_by(2)).collect()
}

/// The targets of links.
fn links(content: &str) -> Vec<&str> {
    let prose = content.split("```").step_by(2);
    let after = prose.flat_map(|text| text.split("](").skip(1));
    after.filter_map(|rest| rest.split([')', ' ', '\n']).next()).collect()
}

/// Items that are said to be in a file, and the file: "`A` in `b/c.rs`".
fn placed(content: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for text in content.split("```").step_by(2) {
        let parts: Vec<&str> = text.split('`').collect();
        let pairs = parts.windows(3).skip(1).step_by(2);
        let placed = pairs.filter(|part| part[1].trim() == "in" && part[2].ends_with(".rs"));
        found.extend(placed.map(|part| (part[0], part[2])));
    }
    found
}

/// Whether this Rust defines the item, by its name or the last part of its path.
fn defines(content: &str, item: &str) -> bool {
    let name = item.rsplit("::").next().unwrap_or(item);
    ["struct", "enum", "trait", "type", "fn", "const", "mod", "pub"].iter().any(|kind| {
        content
            .split(&format!("{kind} {name}"))
            .skip(1)
            .any(|behind| !behind.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
    })
}

/// Whether this is a path from the top of the repository: it starts with one of its folders.
fn is_path(text: &str, files: &BTreeSet<String>) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let Some((first, _)) = text.split_once('/') else { return false };
    let is_folder = || files.iter().any(|path| path.starts_with(&format!("{first}/")));
    text.chars().all(plain) && !first.is_empty() && is_folder()
}

fn exists(path: &str, files: &BTreeSet<String>) -> bool {
    let folder = format!("{}/", path.trim_end_matches('/'));
    files.contains(path) || files.iter().any(|file| file.starts_with(&folder))
}

/// Returns a link of a file, which is relative to it, as a path from the top of the repository.
fn resolve(from: &str, link: &str) -> String {
    let mut parts = Vec::new();
    let joined = Path::new(from).parent().unwrap().join(link);
    for component in joined.components() {
        match component {
            Component::ParentDir => drop(parts.pop()),
            Component::Normal(part) => parts.push(part.to_str().unwrap().to_owned()),
            _ => {}
        }
    }
    parts.join("/")
}

#[on(shm)]
fn documents_name_only_what_is_there() {
    let files = files();
    let mut broken = Vec::new();
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];
    let documents = with_extension(".md")
        .filter(|(path, _)| path.starts_with("docs/") || top.contains(&path.as_str()));
    for (path, content) in documents {
        for text in quoted(&content) {
            // `path:line` names a line.
            let named = text.split(':').next().unwrap_or_default();
            if is_path(named, &files) && !exists(named, &files) {
                broken.push(format!("{path}: `{text}`"));
            }
        }
        for (item, named) in
            placed(&content).into_iter().filter(|(_, named)| files.contains(*named))
        {
            if !defines(&read(named), item) {
                broken.push(format!("{path}: `{item}` is not in `{named}`"));
            }
        }
    }
    report("paths lead somewhere", &broken);
}

/// Whether this Rust has code that the compiler does not check.
fn is_unsafe(content: &str) -> bool {
    [concat!("unsafe", " {"), concat!("unsafe", " impl"), concat!("#[", "unsafe(")]
        .iter()
        .any(|mark| content.contains(mark))
}

#[on(shm)]
fn every_file_with_unsafe_code_is_listed() {
    let page = read("docs/testing.md");
    let (_, list) = page.split_once("## Where `unsafe` is").expect("the heading is there");
    let listed = quoted(list);
    let broken: Vec<_> = with_extension(".rs")
        .filter(|(path, content)| {
            is_unsafe(content) && !listed.iter().any(|place| path.starts_with(place))
        })
        .map(|(path, _)| path)
        .collect();
    report("docs/testing.md lists each file with unsafe code", &broken);
}

/// The layers of crates, the lowest first: a crate uses only crates of lower layers.
const LAYERS: [&[&str]; 7] = [
    &["layout", "fabric", "snapshot", "metrics", "linearizability", "test-fabrics"],
    &["protocol", "control"],
    &["config", "cluster"],
    &["client", "server"],
    &["cli", "resp", "bench", "python"],
    &["simulator", "fuzz", "tests"],
    // Their tests start servers.
    &["bench-compare", "c"],
];

/// The layer of a crate by the name of its package; `farside` is the client.
fn layer(package: &str) -> Option<usize> {
    let name = package.strip_prefix("farside").map(|name| name.trim_start_matches('-'))?;
    let name = if name.is_empty() { "client" } else { name };
    LAYERS.iter().position(|layer| layer.contains(&name))
}

/// A manifest's own package, and those of our packages it depends on, including optional and
/// dev-dependencies.
fn packages(manifest: &str) -> (Option<&str>, Vec<&str>) {
    let own = manifest.lines().find_map(|line| line.strip_prefix("name = \""));
    let own = own.and_then(|rest| rest.strip_suffix('"'));
    let name = |line: &'_ str| line.split(['.', ' ', '=']).next().unwrap_or_default().len();
    let used = manifest.lines().filter(|line| line.starts_with("farside"));
    (own, used.map(|line| &line[..name(line)]).collect())
}

/// A manifest's dependencies that are not in a lower layer, one message each.
fn arrows_upwards(manifest: &str) -> Vec<String> {
    let (Some(own), used) = packages(manifest) else { return Vec::new() };
    let Some(place) = layer(own) else { return vec![format!("{own} is in no layer")] };
    let is_below = |used: &&str| layer(used).is_some_and(|below| below < place);
    let upwards = used.into_iter().filter(|used| !is_below(used));
    upwards.map(|used| format!("{own} uses {used}, which is not below it")).collect()
}

/// Then there is no cycle, and neither client nor server imports the other, not even in tests.
#[on(shm)]
fn crates_use_only_what_is_below_them() {
    let manifests: Vec<_> =
        with_extension(".toml").filter(|(path, _)| path.ends_with("/Cargo.toml")).collect();
    assert!(manifests.len() >= 14, "only {} manifests were found", manifests.len());
    let broken: Vec<_> =
        manifests.iter().flat_map(|(_, manifest)| arrows_upwards(manifest)).collect();
    report("each crate uses only what is below it", &broken);
}

/// Cargo builds no tests of such a program or library, which saves a link.
#[on(shm)]
fn what_is_built_without_tests_has_none() {
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .current_dir(root())
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter();
    let targets = packages.flat_map(|package| package["targets"].as_array().unwrap());
    let untested: Vec<PathBuf> = targets
        .filter(|target| target["test"] == false && target["kind"][0] != "custom-build")
        .map(|target| {
            let path = PathBuf::from(target["src_path"].as_str().unwrap());
            // The folder with the modules of a library, or of a program with a folder of its own.
            let is_alone = path.ends_with("src/main.rs") || path.parent().unwrap().ends_with("bin");
            if is_alone { path } else { path.parent().unwrap().to_owned() }
        })
        .collect();
    assert!(untested.len() > 10, "{untested:?}");
    let has_tests = |(path, content): &(String, String)| {
        untested.iter().any(|untested| root().join(path).starts_with(untested))
            && content.lines().any(|line| line.trim() == "#[test]")
    };
    let broken: Vec<_> = with_extension(".rs").filter(has_tests).map(|(path, _)| path).collect();
    report("what has `test = false` in its Cargo.toml has no tests", &broken);
}

/// The fabrics, and the memory beneath them.
const SIBLINGS: [&str; 4] = ["memory", "shm", "tcp", "verbs"];

/// The fabrics that a file of the crate of fabrics imports and must not.
fn imported_fabrics(below_src: &str, content: &str) -> Vec<&'static str> {
    let own = below_src.split(['/', '.']).next().unwrap_or_default();
    let others = SIBLINGS.iter().filter(|other| **other != own && **other != "memory");
    let is_imported = |other: &&&str| content.contains(&format!("crate::{other}::"));
    if SIBLINGS.contains(&own) { others.filter(is_imported).copied().collect() } else { Vec::new() }
}

/// What several of them need is beneath them.
#[on(shm)]
fn fabrics_do_not_import_each_other() {
    let mut broken = Vec::new();
    for (path, content) in with_extension(".rs") {
        if let Some(below_src) = path.strip_prefix("common/fabric/src/") {
            let imported = imported_fabrics(below_src, &content);
            broken.extend(imported.iter().map(|other| format!("{path} imports {other}")));
        }
    }
    report("no fabric imports another one", &broken);
}

/// In words: the longest sentence, the length that one in ten may reach, and the longest median.
const SENTENCE: (usize, usize, usize) = (40, 28, 15);

/// The paragraphs and list items of a text in Markdown, without headings, tables and code blocks.
fn paragraphs(text: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for line in text.split("```").step_by(2).flat_map(str::lines) {
        let is_open = found.last().is_some_and(|paragraph| !paragraph.is_empty());
        let (is_code, line) = (line.starts_with("    ") && !is_open, line.trim());
        let is_apart = line.starts_with(['|', '#']);
        let marked = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let item = marked.strip_prefix(if marked == line { "- " } else { ". " });
        if is_apart || line.is_empty() || item.is_some() {
            found.push(String::new());
        }
        if !is_apart && !is_code && !line.is_empty() {
            found.last_mut().unwrap().extend([item.unwrap_or(line), " "]);
        }
    }
    found
}

/// The sentences of a text, each with its number of words. Code is one word; one word is none.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut sentence) = (Vec::new(), Vec::new());
    for paragraph in paragraphs(text) {
        let parts = paragraph.split('`').enumerate();
        let parts =
            parts.map(|(at, part)| if at % 2 == 1 { part.replace(' ', "_") } else { part.into() });
        let paragraph = parts.collect::<Vec<_>>().join("`");
        let mut words = paragraph.split_whitespace().peekable();
        while let Some(word) = words.next() {
            sentence.push(word.to_owned());
            let is_end = word.trim_end_matches(['"', '\'', ')', '*']).ends_with(['.', '!', '?']);
            let begins = |next: &&str| {
                next.starts_with(|c: char| {
                    c.is_ascii_uppercase() || c.is_ascii_digit() || "`\"(*[".contains(c)
                })
            };
            if words.peek().is_none_or(|next| is_end && begins(next)) {
                let is_word = |word: &&String| word.contains(|c: char| c.is_alphanumeric());
                found.push((sentence.iter().filter(is_word).count(), sentence.join(" ")));
                sentence.clear();
            }
        }
    }
    found.retain(|(words, _)| *words > 1);
    found
}

/// The violations of [`SENTENCE`] in these texts, each of which has the path of its file.
fn long_sentences(texts: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let (longest, most, median_max) = SENTENCE;
    let (mut broken, mut lengths) = (Vec::new(), Vec::new());
    for (path, text) in texts {
        for (words, sentence) in sentences(&text) {
            lengths.push(words);
            if words > longest {
                broken.push(format!("{path}: {words} words: {sentence}"));
            }
        }
    }
    lengths.sort_unstable();
    let under = lengths.iter().filter(|words| **words < most).count();
    let median = lengths.get(lengths.len() / 2).copied().unwrap_or_default();
    if median > median_max || under * 10 < lengths.len() * 9 {
        broken.push(format!("of {} sentences {under} are short; median {median}", lengths.len()));
    }
    broken
}

/// The documentation of the module in a file of Rust.
fn module_docs(content: &str) -> String {
    let text = |line: &str| {
        line.strip_prefix("//!").map_or(String::new(), |text| text.replacen(' ', "", 1))
    };
    content.lines().map(|line| text(line) + "\n").collect()
}

#[on(shm)]
fn sentences_are_short() {
    let is_page =
        |path: &str| path.starts_with("docs/") || ["README.md", "ARCHITECTURE.md"].contains(&path);
    let mut broken = long_sentences(with_extension(".md").filter(|(path, _)| is_page(path)));
    let of_module = |(path, content): (String, String)| (path, module_docs(&content));
    broken.extend(long_sentences(with_extension(".rs").map(of_module)));
    report("sentences: half up to 15 words, nine of ten under 28, none over 40", &broken);
}

/// Words that have plainer replacements. "But for", and "who" for a thing, are refused, too.
const REFUSED: [&str; 5] = ["whoever", "whomever", "nobody", "somebody", "everybody"];
/// The words that may precede "who", without an s.
const PERSONS: &str = "user operator reader people person engineer researcher attacker contributor \
    administrator anyone those one developer newcomer maintainer stranger author reviewer";

/// The refused words of a text, each with its line and the word before it.
fn refused_words(content: &str) -> Vec<String> {
    let (mut found, mut before, mut is_cut) = (Vec::new(), String::new(), false);
    for (number, line) in content.lines().enumerate() {
        for token in line.split_whitespace() {
            let words = token.split(|c: char| !c.is_alphanumeric() && c != '_');
            for word in words.filter(|word| !word.is_empty()).map(str::to_lowercase) {
                // `self.who` and `|who|` are names.
                let is_who = word == "who" && token.to_lowercase().starts_with("who");
                let singular = before.trim_end_matches('s');
                let is_thing = is_who && !PERSONS.split(' ').any(|person| person == singular);
                let is_except = (&*before, &*word, is_cut) == ("but", "for", false);
                if is_thing || is_except || REFUSED.contains(&&*word) {
                    found.push(format!("{}: {before} {word}", number + 1));
                }
                before = word;
            }
            is_cut = token.ends_with([',', ';', ':', '.']);
        }
    }
    found
}

#[on(shm)]
fn words_are_plain() {
    let files = [".rs", ".md", ".sh", ".toml"].into_iter().flat_map(with_extension);
    let is_own = |path: &str| path.ends_with("/tidy.rs") || path.starts_with("bench/results/");
    let mut broken = Vec::new();
    for (path, content) in files.filter(|(path, _)| !is_own(path)) {
        broken.extend(refused_words(&content).iter().map(|found| format!("{path}:{found}")));
    }
    report("plain words", &broken);
}

/// Whether a commit may have this subject.
fn is_subject(subject: &&str) -> bool {
    subject.chars().count() <= 72 && !subject.ends_with('.')
}

/// Checks the commits since the rule began: a shallow checkout has some of them, an archive none.
#[on(shm)]
fn commit_subjects_are_short() {
    let arguments = ["log", "--no-merges", "--since=2026-11-24T14:00:00Z", "--format=%s"];
    match Command::new("git").args(arguments).current_dir(root()).output() {
        Ok(output) if output.status.success() => {
            let subjects = String::from_utf8_lossy(&output.stdout);
            let broken = subjects.lines().filter(|subject| !is_subject(subject));
            let broken: Vec<_> = broken.map(str::to_owned).collect();
            report("subjects have up to 72 characters and no period", &broken);
        }
        _ => left_out("without git", "there is no history"),
    }
}

#[on(shm)]
fn prose_can_be_refused() {
    let text = "# Heading of four words\nOne `a b c` here. Two words (see\n[b](c))! 3 words.\n\n\
        - An item\n2. Another, e.g. this.\n\n    code is none\n| nor | a table |\n\
        ```\nnor this\n```\n";
    let counted: Vec<_> = sentences(text).into_iter().map(|(words, _)| words).collect();
    assert_eq!(counted, [3, 4, 2, 2, 3]);
    let lengths = |lengths: &[usize]| {
        let text: String = lengths.iter().map(|words| "a ".repeat(*words) + "\n\n").collect();
        long_sentences([(String::new(), text)].into_iter()).len()
    };
    assert_eq!(lengths(&[15, 15, 15]) + lengths(&[2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 40]), 0);
    assert_eq!(
        (lengths(&[16, 16]), lengths(&[2, 2, 29]), lengths(&[2; 20]), lengths(&[41])),
        (1, 1, 0, 2)
    );
    assert_eq!(module_docs("//! A.\n//!\nfn b() {}\n//!     c"), "A.\n\n\n    c\n");
    let bad =
        ["Nobody waits", "so (somebody's) b", "Whoever\nis", "all but\n/// for b", "a lane who"];
    for bad in bad {
        assert_eq!(refused_words(bad).len(), 1, "{bad}");
    }
    for good in ["readers\n/// who write", "but, for now", "nobody_waits", "anyone who", "a.who"] {
        assert_eq!(refused_words(good), [""; 0], "{good}");
    }
    assert!(is_subject(&&*"a".repeat(72)) && !is_subject(&&*"a".repeat(73)) && !is_subject(&"A."));
}

#[on(shm)]
fn the_helpers_find_what_breaks_a_rule() {
    assert_eq!(links("a [b](c.md#d), [e](http://f) `g`"), ["c.md#d", "http://f"]);
    assert_eq!(quoted("a `b/c.rs` d `e`\n```\nf `g`\n```\n`h`"), ["b/c.rs", "e", "h"]);
    assert_eq!(placed("a `B` in\n`c/d.rs`, `e` of `f.rs` in `g`"), [("B", "c/d.rs")]);
    let rust = "mod door;\npub(super) enum Door {}\nfn opened() {}";
    assert!(defines(rust, "Door") && defines(rust, "a::door"));
    assert!(!defines(rust, "open") && !defines("use door::Door;", "Door"));
    assert_eq!(resolve("docs/decisions/a.md", "../b.md#c"), "docs/b.md#c");
    assert!(is_unsafe(concat!("let a = uns", "afe { b() };")) && !is_unsafe("// SAFETY: unsafe"));
    let files: BTreeSet<String> = ["client/src/lib.rs".to_owned()].into();
    assert!(is_path("client/src/gone.rs", &files) && !exists("client/src/gone.rs", &files));
    assert!(exists("client/src", &files) && exists("client/src/", &files));
    assert!(!is_path("client", &files) && !is_path("either/or", &files));
    let manifest = |used| format!("name = \"farside-server\"\n[dev-dependencies]\n{used}\n");
    assert_eq!(arrows_upwards(&manifest("farside-protocol.workspace = true")), [""; 0]);
    for used in ["farside.workspace = true", "farside-cli = { path = \"t\" }", "farside-new = 1"] {
        assert_eq!(arrows_upwards(&manifest(used)).len(), 1, "{used}");
    }
    assert_eq!(arrows_upwards("name = \"farside-new\"\n").len(), 1);
    let both = "use crate::memory::Region;\nuse crate::tcp::TcpFabric;\n";
    assert_eq!(imported_fabrics("shm/connect.rs", both), ["tcp"]);
    assert_eq!(imported_fabrics("memory.rs", both), ["tcp"]);
    assert_eq!(imported_fabrics("tcp.rs", both), [""; 0]);
    assert_eq!(imported_fabrics("any.rs", both), [""; 0]);
}

#[on(shm)]
fn each_test_says_on_which_fabrics_it_runs() {
    farside_tests::fabric::assert_each_test_says_where_it_runs(6);
}

#[on(shm)]
fn a_test_that_is_left_out_is_named_with_the_reason() {
    let test = "region_memory::the_welcome_names_the_slices::rdma";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--include-ignored"]).env_remove("FARSIDE_TEST_DEVICE");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let line = format!("left out without RDMA: {test}: it takes an RDMA device");
    assert!(output.status.success() && said.contains(&line), "{said}");
}

/// Finds tests that return early because of `device`, which prints nothing. All other ways to ask
/// for a device print that the test is left out.
#[on(shm)]
fn no_test_is_left_out_silently() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration");
    let mut folders = vec![std::path::PathBuf::from(folder)];
    let mut silent = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            // `let ... else` and `if`, however their lines are broken.
            let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
            let asks = words.match_indices(concat!("device", "()")).map(|(at, _)| &words[at..]);
            let ends = |rest: &str| {
                let condition = rest.split_once('{').map_or("", |(condition, _)| condition);
                let body = rest.split_once('{').map_or("", |(_, body)| body.trim_start());
                !condition.contains(';') && body.starts_with("return")
            };
            silent.extend(asks.filter(|rest| ends(rest)).map(|_| path.display().to_string()));
        }
    }
    assert!(silent.is_empty(), "these have tests that are left out silently: {silent:?}");
}
