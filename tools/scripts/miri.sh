#!/usr/bin/env bash
# Runs the tests of decoders and computations under Miri, which detects undefined behaviour.
set -euo pipefail

toolchain=${MIRI_TOOLCHAIN:-nightly}
cargo "+$toolchain" miri --version >/dev/null 2>&1 || {
    echo "Miri is missing: rustup toolchain install $toolchain --component miri,rust-src" >&2
    exit 1
}
# Few cases, because Miri is a thousand times slower. Without isolation, because proptest reads the
# clock and the current folder.
export PROPTEST_CASES=${PROPTEST_CASES:-8} MIRIFLAGS="${MIRIFLAGS:-} -Zmiri-disable-isolation"
# Two slow tests, which encode thousands of blocks.
large=(--skip messages_round_trip --skip a_report_of_any_length_is_divided_into_messages)
small=(address:: size:: command_line:: message:: connect:: counters)
cargo "+$toolchain" miri test --locked -p farside-layout --lib
cargo "+$toolchain" miri test --locked --no-default-features --lib \
    -p farside-control -p farside-config -p farside-fabric -- "${small[@]}" "${large[@]}"
