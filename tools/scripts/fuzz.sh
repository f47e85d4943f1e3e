#!/usr/bin/env bash
# Fuzzes Farside's decoders with libFuzzer and its address sanitizer, one target after the other:
#
#   tools/scripts/fuzz.sh SECONDS [TARGET...]
#
# Starts with new seeds and the inputs in tests/fuzz/kept. The corpus that libFuzzer collects stays
# in target/fuzz for the next run. An input that fails stays in target/fuzz/found.
set -euo pipefail

usage="usage: tools/scripts/fuzz.sh SECONDS [TARGET...]"
seconds=${1:?"$usage"}
shift
toolchain=${FUZZ_TOOLCHAIN:-nightly}

missing() {
    echo "fuzzing lacks $1: $2" >&2
    exit 1
}
command -v cargo >/dev/null || missing cargo "install Rust with rustup (https://rustup.rs)"
cargo "+$toolchain" --version >/dev/null 2>&1 ||
    missing "a nightly toolchain" "rustup toolchain install $toolchain --profile minimal"
cargo fuzz --version >/dev/null 2>&1 || missing cargo-fuzz "cargo install --locked cargo-fuzz"
command -v c++ >/dev/null || missing "a C++ compiler" "apt-get install g++"

build=${CARGO_TARGET_DIR:-$PWD/target}/fuzz
mkdir -p "$build/found"
# Link-time optimization would take minutes, and the fuzzer does not need it.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
options=(--fuzz-dir tests/fuzz --features libfuzzer --target-dir "$build")
cargo "+$toolchain" fuzz build --codegen-units 16 "${options[@]}"
rm -rf "$build/seeds"
"$build"/*/release/farside-fuzz "$build/seeds"

# Each target has its folder of seeds.
[ $# -gt 0 ] || mapfile -t targets < <(ls "$build/seeds")
[ $# -eq 0 ] || targets=("$@")
for target in "${targets[@]}"; do
    [ -d "$build/seeds/$target" ] || missing "the target $target" "take one of $(ls -m "$build/seeds")"
done
found=()
for target in "${targets[@]}"; do
    kept=tests/fuzz/kept/$target
    corpora=("$build/corpus/$target" "$build/seeds/$target")
    [ ! -d "$kept" ] || corpora+=("$kept")
    mkdir -p "${corpora[@]}"
    log=$build/$target.log
    if FARSIDE_FUZZ_TARGET=$target "$build"/*/release/decoders "${corpora[@]}" -max_total_time="$seconds" -max_len=4096 \
        -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$build/found/$target-" >"$log" 2>&1; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
        covered=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' "$log" | tail -n 1)
        echo "$target: $runs executions, $covered edges covered"
    else
        found+=("$target")
        echo "$target: FAILED on an input, see $log"
        grep -m 1 -A 1 -e 'panicked at' -e '^SUMMARY' "$log" || true
    fi
done
if [ ${#found[@]} -gt 0 ]; then
    echo "these targets failed: ${found[*]}; the inputs are in $build/found" >&2
    exit 1
fi
echo "no target failed: ${#targets[@]} targets, $seconds seconds each"
