#!/usr/bin/env bash
# Runs the tests of what decodes and computes under Miri, which notices undefined behaviour.
set -euo pipefail

toolchain=${MIRI_TOOLCHAIN:-nightly}
cargo "+$toolchain" miri --version >/dev/null 2>&1 || {
    echo "Miri is missing: rustup toolchain install $toolchain --component miri,rust-src" >&2
    exit 1
}
# Miri takes a thousand times as long; its isolation would keep proptest from the clock and the
# current folder.
export PROPTEST_CASES=${PROPTEST_CASES:-8} MIRIFLAGS="${MIRIFLAGS:-} -Zmiri-disable-isolation"
# These two encode thousands of blocks, for their number and not for what becomes of each.
large=(--skip messages_come_back --skip what_a_client_holds_fits_in_messages)
small=(address:: size:: command_line:: message:: connect:: counters waits)
cargo "+$toolchain" miri test --locked -p farside-layout --lib
cargo "+$toolchain" miri test --locked --no-default-features --lib \
    -p farside-control -p farside-config -p farside-fabric -- "${small[@]}" "${large[@]}"
