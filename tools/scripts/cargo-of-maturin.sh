#!/usr/bin/env bash
# What test-python.sh has maturin call as cargo: cargo without the variables of maturin that name
# the interpreter. A wheel for all versions of Python does not depend on them, but pyo3's build
# script does: with them pyo3 and all that uses it are compiled for the wheel, and again by the next
# `cargo build`, `cargo clippy` and `cargo doc` of the workspace.
set -euo pipefail
unset PYO3_BUILD_EXTENSION_MODULE PYO3_CONFIG_FILE PYO3_ENVIRONMENT_SIGNATURE PYO3_PYTHON \
    PYTHON_SYS_EXECUTABLE
exec cargo "$@"
