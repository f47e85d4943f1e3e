//! Tells kv-bench and kv-compare the commit they are built from, for their results:
//! FARSIDE_COMMIT, unset without git.

use std::process::Command;

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn main() {
    // The sources of both programs. A change of them makes the commit's name end in `-dirty`;
    // committing the change removes that.
    for path in ["src", "compare/src", "../client/src", "../common", "../Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    let describe = ["describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"];
    if let Some(commit) = git(&describe) {
        println!("cargo::rustc-env=FARSIDE_COMMIT={commit}");
    }
}
