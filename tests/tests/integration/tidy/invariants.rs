//! Traces each invariant of docs/protocol.md to the code that keeps it, and to the tests and
//! mutants that guard it. Prints the table of docs/invariants.md, and fails if an invariant has no
//! keeper, no citation in code, or no test. Guards against rules that are stated and not kept, and
//! against pages that name functions which are gone.
//!
//! A comment cites an invariant by its number. Functions that the protocol's table names as keepers
//! have to be in a file that cites the invariant.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::{defines, quoted, read, report, root, with_extension};

const PAGE: &str = "docs/invariants.md";
/// What precedes the table in the page.
const BEGIN: &str = "<!-- printed by the test in tests/tests/integration/tidy/invariants.rs -->\n";
/// The head of the table.
const HEAD: &str =
    "\n| proof | kept by | also cited in | tests | mutants |\n|---|---|---|---|---|\n";
const MUTANTS: &str = "tests/simulator/src/mutant.rs";

/// An invariant, as the table of docs/protocol.md has it.
struct Invariant {
    number: u32,
    keepers: Vec<String>,
    /// The link of the first proof.
    proof: String,
}

/// Files by their path.
type Sources = BTreeMap<String, String>;
/// Paths by the number of the invariant that they cite.
type Citations = BTreeMap<u32, BTreeSet<String>>;

/// The number of `I7` at the start of this text, and the rest of the text.
fn number(text: &str) -> Option<(u32, &str)> {
    let digits = text.strip_prefix('I')?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    Some((digits[..end].parse().ok()?, &digits[end..]))
}

fn invariants(protocol: &str) -> Vec<Invariant> {
    let rows = protocol.lines().filter_map(|line| {
        let (number, _) = number(line.strip_prefix("| ")?)?;
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        let [_, _, keepers, proof] = cells[..] else { return None };
        // Crates and paths are no items.
        let items = quoted(keepers).into_iter().filter(|item| !item.contains(['-', '/']));
        let keepers = items.map(str::to_owned).collect();
        Some(Invariant { number, keepers, proof: proof.trim().to_owned() })
    });
    rows.collect()
}

/// The numbers that the comments of this Rust cite. `I5 to I7` is a range.
fn cited(rust: &str) -> BTreeSet<u32> {
    let comments = rust.lines().filter_map(|line| line.split_once("//"));
    let text: String =
        comments.map(|(_, comment)| comment.trim_start_matches(['/', '!'])).collect();
    let mut found = BTreeSet::new();
    let mut range = None;
    let mut before = "";
    for word in text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()) {
        if let Some((cited, "")) = number(word) {
            found.extend(range.filter(|_| before == "to").unwrap_or(cited)..=cited);
            range = Some(cited);
        }
        before = word;
    }
    found
}

fn citations<'a>(sources: impl Iterator<Item = (&'a String, &'a String)>) -> Citations {
    let mut found = Citations::new();
    for (path, content) in sources {
        for number in cited(content) {
            found.entry(number).or_default().insert(path.clone());
        }
    }
    found
}

/// The files of Rust: first those of programs, without their unit tests, then those of tests.
fn sources() -> (Sources, Sources) {
    let (mut code, mut tests) = (Sources::new(), Sources::new());
    for (path, content) in with_extension(".rs") {
        let is_own = path.ends_with("/tidy.rs") || path.ends_with("/invariants.rs");
        let is_test = path.contains("tests/") || path.ends_with("tests.rs");
        if is_own || path == MUTANTS {
            continue;
        }
        if is_test {
            tests.insert(path, content);
            continue;
        }
        let (programs, unit_tests) = match content.split_once("#[cfg(test)]\nmod tests {") {
            Some((before, behind)) => (before.to_owned(), behind.to_owned()),
            None => (content, String::new()),
        };
        tests.insert(path.clone(), unit_tests);
        code.insert(path, programs);
    }
    (code, tests)
}

/// Whether a file has this item: `a::b` is `b` of the type or of the module `a`.
fn has_item(path: &str, content: &str, item: &str) -> bool {
    let (owner, name) = item.rsplit_once("::").unwrap_or(("", item));
    let is_variant = || {
        content.lines().any(|line| line.trim() == format!("{name},"))
            || content.contains(&format!("    {name} {{"))
    };
    let is_owned = owner.is_empty() || content.contains(owner) || path.contains(owner);
    is_owned && (defines(content, name) || is_variant())
}

/// The mutants, each with the invariants that its documentation cites, and the files of the tests
/// that use it.
fn mutants(tests: &Sources) -> Vec<(String, BTreeSet<u32>, BTreeSet<String>)> {
    let content = read(MUTANTS);
    let (mut found, mut comment) = (Vec::new(), String::new());
    for line in content.lines() {
        let line = line.trim();
        if line.starts_with("//") {
            comment.extend([line, "\n"]);
            continue;
        }
        let end = line.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(line.len());
        let name = &line[..end];
        if matches!(&line[end..], "," | "(Key),") {
            let variant = format!("Mutant::{name}");
            let is_used = |content: &str| {
                let mut behind = content.split(&variant).skip(1);
                behind.any(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
            };
            let used = tests.iter().filter(|(path, content)| {
                path.starts_with("tests/simulator/tests/") && is_used(content)
            });
            let used = used.map(|(path, _)| path.clone()).collect();
            // Some show that a net below an invariant may have holes.
            let is_breach = !comment.contains("breaks no rule");
            let broken = if is_breach { cited(&comment) } else { BTreeSet::new() };
            found.push((name.to_owned(), broken, used));
        }
        comment.clear();
    }
    found
}

/// Links to files, by their names without the folders that all of them have.
fn file_links(paths: &BTreeSet<String>) -> String {
    let link = |path: &String| {
        let name = path.replace("/src/", "/");
        let name = ["common/", "tests/simulator/tests/", "tests/tests/", "tests/"]
            .iter()
            .find_map(|folder| name.strip_prefix(folder))
            .unwrap_or(&name);
        format!("[{name}](../{path})")
    };
    paths.iter().map(link).collect::<Vec<_>>().join(", ")
}

/// Items and the files in which they are, those of the same files together.
fn placed(items: Vec<(&str, BTreeSet<String>)>) -> String {
    let mut groups: Vec<(BTreeSet<String>, Vec<String>)> = Vec::new();
    for (item, paths) in items {
        let item = format!("`{item}`");
        match groups.iter_mut().find(|(of, _)| *of == paths) {
            Some((_, group)) => group.push(item),
            None => groups.push((paths, vec![item])),
        }
    }
    let text = |(paths, items): &(BTreeSet<String>, Vec<String>)| {
        format!("{} in {}", items.join(", "), file_links(paths))
    };
    groups.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// The table, and what it lacks.
fn table() -> (String, Vec<String>) {
    let protocol = read("docs/protocol.md");
    let (code, tests) = sources();
    let (in_code, in_tests) = (citations(code.iter()), citations(tests.iter()));
    let mutants = mutants(&tests);
    let (mut rows, mut lacks) = (HEAD.to_owned(), Vec::new());
    for (name, cited, used) in &mutants {
        if !cited.is_empty() && used.is_empty() {
            lacks.push(format!("no test uses the mutant {name}"));
        }
    }
    let invariants = invariants(&protocol);
    assert!(invariants.len() >= 12, "the table in docs/protocol.md was not found");
    let of_mutants = mutants.iter().flat_map(|(_, cited, _)| cited);
    let all_cited: BTreeSet<_> = in_code.keys().chain(in_tests.keys()).chain(of_mutants).collect();
    for cited in all_cited {
        if !invariants.iter().any(|known| known.number == *cited) {
            lacks.push(format!("I{cited} is cited, and is not in docs/protocol.md"));
        }
    }
    for Invariant { number, keepers, proof } in invariants {
        let none = BTreeSet::new();
        let citing = in_code.get(&number).unwrap_or(&none);
        let mut kept = Vec::new();
        for keeper in &keepers {
            let has = |path: &&String| has_item(path, &code[*path], keeper);
            let of: BTreeSet<String> = citing.iter().filter(has).cloned().collect();
            if of.is_empty() {
                lacks.push(format!("no file that cites I{number} has its keeper `{keeper}`"));
            }
            kept.push((keeper.as_str(), of));
        }
        let of_keepers: BTreeSet<String> = kept.iter().flat_map(|(_, of)| of).cloned().collect();
        let others: BTreeSet<String> = citing.difference(&of_keepers).cloned().collect();
        let tests = in_tests.get(&number).unwrap_or(&none);
        let breaking = mutants.iter().filter(|(_, cited, _)| cited.contains(&number));
        let breaking: Vec<_> =
            breaking.map(|(name, _, used)| (name.as_str(), used.clone())).collect();
        if citing.is_empty() {
            lacks.push(format!("no code cites I{number}"));
        }
        if tests.is_empty() && breaking.is_empty() {
            lacks.push(format!("no test and no mutant cites I{number}"));
        }
        let proof = proof.replace("](#", "](protocol.md#");
        let cells = [placed(kept), file_links(&others), file_links(tests), placed(breaking)];
        writeln!(rows, "| **I{number}** {proof} | {} |", cells.join(" | ")).unwrap();
    }
    (rows, lacks)
}

/// With `FARSIDE_UPDATE_DOCS=1` this writes the table into the page instead of comparing it.
#[on(shm)]
fn every_invariant_is_traced_to_code_and_tests() {
    let (table, lacks) = table();
    println!("{table}");
    report("each invariant has code that keeps it and a test that guards it", &lacks);
    let path = root().join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, printed) = page.split_once(BEGIN).expect("the page has the marker line");
    if std::env::var_os("FARSIDE_UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{table}")).unwrap();
    } else {
        let is_same = printed == table;
        assert!(is_same, "{PAGE} is out of date: run this test with FARSIDE_UPDATE_DOCS=1");
    }
}

/// The table of docs/simulator.md names a test by its mutant, which `_is_caught` follows.
#[on(shm)]
fn the_mutants_of_the_simulators_page_have_tests() {
    let page = read("docs/simulator.md");
    let (_, table) = page.split_once("## Mutants").expect("the heading is there");
    let tests: Vec<String> = with_extension(".rs")
        .filter(|(path, _)| path.starts_with("tests/simulator/tests/"))
        .map(|(_, content)| content)
        .collect();
    // The first row is the head.
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let (mut count, mut missing) = (0, Vec::new());
    for name in rows.flat_map(quoted) {
        let function = name.rsplit("::").next().unwrap();
        let caught = format!("{function}_is_caught");
        let is_test = |test: &String| defines(test, function) || defines(test, &caught);
        count += 1;
        if !tests.iter().any(is_test) {
            missing.push(format!("docs/simulator.md: `{name}` is no test"));
        }
    }
    assert!(count >= 60, "only {count} mutants were found");
    report("the mutants of docs/simulator.md have tests", &missing);
}

#[on(shm)]
fn citations_and_items_are_found() {
    let rust = "let I9 = 1; // (invariants I2, I10\n    /// and I4) in the I5 to I7, I12x\n";
    assert_eq!(cited(rust).into_iter().collect::<Vec<_>>(), [2, 4, 5, 6, 7, 10]);
    assert!(has_item("a/door.rs", "pub fn open() {}", "door::open"));
    assert!(!has_item("a/b.rs", "pub fn open() {}", "door::open"));
    assert!(has_item("a/b.rs", "enum Verb {\n    Swap { a: u32 },\n}", "Swap"));
    let table = "| I3 | text | `a`, `b-c` | [x](#y) |\n";
    let found = invariants(table);
    assert_eq!((found[0].number, &*found[0].keepers[0], found[0].keepers.len()), (3, "a", 1));
}
