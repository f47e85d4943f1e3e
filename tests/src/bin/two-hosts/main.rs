//! Tests on three hosts, which tests/vm/two-hosts describes: kv-server runs on one, clients on the
//! two others. This program runs on one of the clients' hosts.
//!
//! `two-hosts test [NAME...]`, or `two-hosts load ...` for the part on the other client's host.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod load;
mod scenarios;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((mode, rest)) if mode == "load" => load::run_elsewhere(rest),
        Some((mode, names)) if mode == "test" => test(names),
        _ => {
            eprintln!("two-hosts is run by tests/vm/two-hosts");
            std::process::exit(2);
        }
    }
}

/// Runs all scenarios, or those whose names contain one of `names`. Prints one line for each, and
/// how many passed.
fn test(names: &[String]) {
    let mut world = scenarios::World::new();
    let (mut passed, mut failed) = (0, 0);
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part));
    for (name, scenario) in scenarios::ALL {
        if !wanted(name) {
            println!("left out: {name}");
            continue;
        }
        let logged = world.log().len();
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| scenario(&mut world)));
        let seconds = started.elapsed().as_secs_f64();
        match outcome {
            Ok(summary) => {
                passed += 1;
                println!("ok     {name} ({seconds:.1} s): {summary}");
            }
            Err(panic) => {
                failed += 1;
                println!("FAILED {name} ({seconds:.1} s): {}", load::reason(&*panic));
                println!("the server's log:\n{}", &world.log()[logged..]);
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed > 0 {
        std::process::exit(1);
    }
}
