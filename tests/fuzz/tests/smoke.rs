//! Proves that no target of `make fuzz` fails on its seeds, on the inputs in `tests/fuzz/kept`, or
//! on thousands of mutations of both. Every run has the same mutations. Guards against outdated
//! targets and seeds, and against decoders that panic.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use farside_fuzz::{Mutator, TARGETS, Target};

/// The number of mutations of each target. A region gets fewer, because its check takes a hundred
/// times longer than decoding.
const MUTATIONS: u32 = 20_000;
const MUTATIONS_OF_A_REGION: u32 = 300;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Returns the target's seeds and kept inputs.
fn inputs(target: &Target) -> Vec<Vec<u8>> {
    let mut inputs = (target.seeds)();
    if let Ok(entries) = fs::read_dir(folder("kept").join(target.name)) {
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        inputs.extend(paths.iter().map(|path| fs::read(path).unwrap()));
    }
    inputs
}

/// Runs a target on the inputs and their mutations. Returns the numbers of accepted and refused
/// inputs, or the input that failed.
fn explore(target: &Target, inputs: &[Vec<u8>], mutations: u32) -> Result<[u32; 2], String> {
    let mut mutator = Mutator::new(1);
    let mut counts = [0; 2];
    let mutated = (0..mutations).map(|_| mutator.next(inputs));
    for bytes in inputs.iter().cloned().chain(mutated) {
        match catch_unwind(AssertUnwindSafe(|| (target.accepts)(&bytes))) {
            Ok(accepted) => counts[usize::from(!accepted)] += 1,
            Err(_) => return Err(format!("{}: b\"{}\"", target.name, bytes.escape_ascii())),
        }
    }
    Ok(counts)
}

#[test]
fn seeds_are_accepted() {
    for target in TARGETS {
        let seeds = (target.seeds)();
        assert!(seeds.len() >= 2, "{}", target.name);
        for (n, seed) in seeds.iter().enumerate() {
            assert!((target.accepts)(seed), "seed {n} of {} is refused", target.name);
        }
    }
}

#[test]
fn mutations_find_nothing() {
    for target in TARGETS {
        let accepts_all = ["region", "text"].contains(&target.name);
        let mutations = if target.name == "region" { MUTATIONS_OF_A_REGION } else { MUTATIONS };
        let [accepted, refused] = explore(target, &inputs(target), mutations).unwrap();
        println!("{}: {accepted} accepted, {refused} refused", target.name);
        assert!(accepted > mutations / 100, "{}: only {accepted} accepted", target.name);
        assert!(accepts_all || refused > mutations / 100, "{}: {refused} refused", target.name);
    }
}

/// Checks this test: it must find a decoder that trusts a length, and one that ignores bytes.
#[test]
fn broken_decoders_are_found() {
    let seeds = || vec![vec![3, 0, 0, 0, 1, 2, 3], vec![0; 4]];
    let trusts_length = |bytes: &[u8]| {
        let Some((length, rest)) = bytes.split_first_chunk() else { return false };
        rest[..u32::from_le_bytes(*length) as usize].len() == rest.len()
    };
    let ignores_bytes = |bytes: &[u8]| {
        let [kind, _, _, _, ..] = *bytes else { return false };
        assert_eq!([kind, 0, 0, 0], bytes[..4]);
        true
    };
    for accepts in [trusts_length, ignores_bytes] as [fn(&[u8]) -> bool; 2] {
        let target = Target { name: "broken", accepts, seeds };
        assert!(explore(&target, &seeds(), MUTATIONS).is_err());
    }
}

#[test]
fn kept_inputs_have_a_target() {
    for entry in fs::read_dir(folder("kept")).unwrap() {
        let name = entry.unwrap().file_name();
        assert!(TARGETS.iter().any(|target| name == target.name), "kept/{}", name.display());
    }
}
