//! Checks that pages for users stay true. Links lead to headings that exist, and the index leads to
//! every page. The headings of docs/faq.md are messages of the programs. Versions in
//! docs/upgrading.md are those of the code, and figures in docs/comparison.md those of their
//! sources. Guards against pages that rot when code, messages or results change.

use std::collections::{BTreeMap, BTreeSet};

use super::{exists, files, links, quoted, read, report, resolve, with_extension};

/// The headings of a page in Markdown, without their marks.
fn headings(content: &str) -> Vec<&str> {
    let prose = content.split("```").step_by(2).flat_map(str::lines);
    let marked = prose.filter(|line| line.starts_with('#'));
    marked.map(|line| line.trim_start_matches('#').trim()).collect()
}

/// The anchors of a page, as code hosts and mdBook make them of its headings.
fn anchors(content: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for heading in headings(content) {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor: String = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let before = seen.entry(anchor.clone()).or_default();
        found.insert(if *before == 0 { anchor } else { format!("{anchor}-{before}") });
        *before += 1;
    }
    found
}

#[on(shm)]
fn links_of_all_pages_lead_to_files_and_headings() {
    let files = files();
    let pages: BTreeMap<String, String> = with_extension(".md").collect();
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        pages.iter().map(|(path, content)| (&**path, anchors(content))).collect();
    let mut broken = Vec::new();
    for (path, content) in &pages {
        for link in links(content) {
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            if target.contains(':') {
                continue;
            }
            let target = if target.is_empty() { path.clone() } else { resolve(path, target) };
            if !exists(&target, &files) {
                broken.push(format!("{path}: {link}: there is no {target}"));
            } else if !anchor.is_empty()
                && !anchors.get(&*target).is_some_and(|known| known.contains(anchor))
            {
                broken.push(format!("{path}: {link}: {target} has no such heading"));
            }
        }
    }
    report("links lead to files and headings", &broken);
}

/// The pages in a folder to which a page has no link. With `pages`, those of this name below it.
fn unlinked(index: &str, folder: &str, pages: Option<&str>) -> Vec<String> {
    let content = read(index);
    let targets = links(&content).into_iter().map(|link| link.split('#').next().unwrap());
    let linked: BTreeSet<String> = targets.map(|target| resolve(index, target)).collect();
    let is_page = |below: &str| match pages {
        Some(name) => below.ends_with(name),
        None => below.ends_with(".md") && !below.contains('/'),
    };
    let found = files().into_iter().filter(|path| path.strip_prefix(folder).is_some_and(is_page));
    let missing = found.filter(|path| path != index && !linked.contains(path));
    missing.map(|path| format!("{index} does not lead to {path}")).collect()
}

/// `make site` makes the book's table of contents of these pages, in their order.
#[on(shm)]
fn the_indexes_lead_to_every_page() {
    let mut broken = unlinked("docs/README.md", "docs/", None);
    broken.extend(unlinked("docs/decisions/README.md", "docs/decisions/", None));
    broken.extend(unlinked("docs/benchmarks.md", "bench/results/", Some("/README.md")));
    report("the indexes lead to every page", &broken);
}

/// Text without line breaks in string literals, and with `...` for each value that a message
/// contains.
fn messages(rust: &str) -> String {
    let mut text = String::new();
    let mut rest = rust;
    // A backslash at the end of a line continues a literal behind the indentation.
    while let Some((before, behind)) = rest.split_once("\\\n") {
        text.push_str(before);
        rest = behind.trim_start();
    }
    text.push_str(rest);
    let text = text.replace("\\\"", "\"");
    let mut message = String::new();
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => {
                depth -= 1;
                message.push_str("...");
            }
            // A brace of code: what followed it was no value.
            '\n' => {
                depth = 0;
                message.push(c);
            }
            c if depth == 0 => message.push(c),
            _ => {}
        }
    }
    message
}

/// The texts of a heading between values, which are written `...`, if they say enough to be found.
/// A colon can end a message that contains another one.
fn fixed_parts(heading: &str) -> Vec<&str> {
    let parts = heading.split("...").flat_map(|part| part.split(": "));
    let parts = parts.map(|part| part.trim_matches([' ', ':', '(', ')']));
    parts.filter(|part| part.len() >= 5).collect()
}

#[on(shm)]
fn headings_of_the_faq_are_messages_of_the_programs() {
    let is_test = |path: &str| path.starts_with("tests/") || path.ends_with("tests.rs");
    let sources = with_extension(".rs").filter(|(path, _)| !is_test(path));
    let sources: String = sources.map(|(_, content)| messages(&content)).collect();
    let page = read("docs/faq.md");
    let (mut count, mut broken) = (0, Vec::new());
    for heading in headings(&page).into_iter().filter(|heading| heading.contains('`')) {
        for message in quoted(heading) {
            count += 1;
            let parts = fixed_parts(message);
            let longest = parts.iter().map(|part| part.split(' ').count()).max();
            if longest.is_none_or(|words| words < 3) {
                broken.push(format!("`{message}` says too little to be found"));
            }
            let missing = parts.iter().filter(|part| !sources.contains(**part));
            broken.extend(missing.map(|part| format!("no program says `{part}`: {message}")));
        }
    }
    assert!(count >= 25, "only {count} messages were found in docs/faq.md");
    report("the headings of docs/faq.md are messages of the programs", &broken);
}

/// The number of a constant in a file of Rust.
fn constant(path: &str, name: &str) -> u32 {
    let content = read(path);
    let (_, behind) = content.split_once(&format!("const {name}: ")).expect("it is there");
    let (_, value) = behind.split_once("= ").expect("it has a value");
    value.split(';').next().unwrap().parse().expect("it is a number")
}

#[on(shm)]
fn the_page_on_upgrades_has_the_present_versions() {
    let page = read("docs/upgrading.md");
    let mut broken = Vec::new();
    for (what, path, name) in [
        ("region", "common/layout/src/superblock.rs", "FORMAT_VERSION"),
        ("control protocol", "common/control/src/lib.rs", "PROTOCOL_VERSION"),
        ("snapshot, written", "common/snapshot/src/lib.rs", "VERSION"),
        ("snapshot, oldest read", "common/snapshot/src/lib.rs", "VERSION_MIN"),
        ("records of a cluster", "common/cluster/src/records.rs", "RECORD_VERSION"),
        ("records.json", "common/cluster/src/file.rs", "VERSION"),
    ] {
        let row = format!("| {what} | {} |", constant(path, name));
        if !page.contains(&row) {
            broken.push(format!("docs/upgrading.md lacks this row: {row}"));
        }
    }
    report("docs/upgrading.md has the versions of the code", &broken);
}

/// The numbers of a text, such as `1,024` and `0.5`.
fn numbers(text: &str) -> Vec<&str> {
    let is_part = |c: char| c.is_ascii_digit() || c == ',' || c == '.';
    let parts = text.split(|c| !is_part(c)).map(|part| part.trim_matches([',', '.']));
    parts.filter(|part| !part.is_empty()).collect()
}

/// Compares tables whose last column is `source` with the pages to which this column links.
#[on(shm)]
fn figures_of_the_comparison_are_in_their_sources() {
    let path = "docs/comparison.md";
    let (mut count, mut broken) = (0, Vec::new());
    let page = read(path);
    let rows = page.lines().filter(|line| line.starts_with('|') && line.contains("README.md) |"));
    for row in rows {
        let mut cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let source = cells.pop().unwrap();
        let target = resolve(path, links(source)[0]);
        let content = read(&target);
        let known: BTreeSet<&str> = numbers(&content).into_iter().collect();
        for figure in cells[1..].iter().flat_map(|cell| numbers(cell)) {
            count += 1;
            if !known.contains(figure) {
                broken.push(format!("{figure} is not in {target}: {row}"));
            }
        }
    }
    assert!(count >= 40, "only {count} figures were found in {path}");
    report("figures are those of their sources", &broken);
}

#[on(shm)]
fn the_helpers_find_what_rots() {
    let page = "# A `b`, c (I1, I2)\n```\n# code\n```\n## Two\ntext\n## Two\n";
    assert_eq!(headings(page), ["A `b`, c (I1, I2)", "Two", "Two"]);
    let known: Vec<_> = anchors(page).into_iter().collect();
    assert_eq!(known, ["a-b-c-i1-i2", "two", "two-1"]);
    let rust = "#[error(\n    \"no {size} of pages, \\\n     try {} or \\\"auto\\\"\"\n)]";
    assert!(messages(rust).contains("no ... of pages, try ... or \"auto\""), "{}", messages(rust));
    assert!(messages("fn a() {\n    \"b c\"\n}").contains("b c"));
    assert_eq!(fixed_parts("no server answers at ... (tried for ... ms)").len(), 2);
    assert_eq!(numbers("1,024 to 0.5, and 3."), ["1,024", "0.5", "3"]);
    assert_eq!(constant("common/snapshot/src/lib.rs", "VERSION_MIN").min(1), 1);
}

/// The ids of log lines in this text, each as often as it is there.
fn log_ids(text: &str) -> impl Iterator<Item = &str> {
    let ids = text.match_indices("FS-").filter_map(|(at, _)| text.get(at..at + 6));
    ids.filter(|id| id[3..].bytes().all(|digit| digit.is_ascii_digit()))
}

/// Operators search for the ids, and alert on them. So each warning of a server has one, and the
/// page says what it means.
#[on(shm)]
fn warnings_have_ids_that_the_page_on_operations_explains() {
    let is_logged = |path: &str| {
        [
            "server/src/",
            "common/cluster/src/",
            "common/config/src/",
            "common/metrics/src/",
            "tools/resp/src/",
        ]
        .iter()
        .any(|folder| path.starts_with(folder))
    };
    let page = read("docs/operations.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| FS-"));
    let explained: BTreeSet<String> = rows.map(|row| format!("FS-{}", &row[..3])).collect();
    let (mut broken, mut used) = (Vec::new(), BTreeSet::new());
    for (path, content) in with_extension(".rs").filter(|(path, _)| is_logged(path)) {
        used.extend(log_ids(&content).map(str::to_owned));
        for call in ["tracing::warn!(", "tracing::error!(", "warn_rarely!("] {
            for (at, _) in content.match_indices(call) {
                let message = content[at..].split_once(';').map_or("", |(message, _)| message);
                if log_ids(message).next().is_none() && !message.contains("$($message)+") {
                    broken.push(format!("{path}: {message} has no id"));
                }
            }
        }
    }
    broken.extend(used.difference(&explained).map(|id| format!("no row explains {id}")));
    broken.extend(explained.difference(&used).map(|id| format!("no line has the id {id}")));
    report("warnings have ids that docs/operations.md explains", &broken);
}
