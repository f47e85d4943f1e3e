//! `farside_fuzz::TARGETS` says what this does.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farside_fuzz::run("request", data));
