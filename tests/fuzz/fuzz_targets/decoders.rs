//! Runs the target that `FARSIDE_FUZZ_TARGET` names; `farside_fuzz::TARGETS` has their names.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farside_fuzz::run(data));
