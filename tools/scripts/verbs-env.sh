# shellcheck shell=sh
# Source this at the top of the repository before `cargo build` with verbs, in any POSIX shell. Sets
# LIBCLANG_PATH and BINDGEN_EXTRA_CLANG_ARGS so that rdma-sys builds.
#
#   . tools/scripts/verbs-env.sh && cargo build --features verbs
#
# rdma-sys reads the C headers with bindgen 0.59, which panics with LLVM 16 and later ("is not a
# valid Ident"). So this takes the newest installed libclang up to 15, otherwise PyPI's, in
# target/libclang. Variables that are set already stay. On failure prints why and returns false.

_verbs_env() {
    if [ -z "${LIBCLANG_PATH:-}" ]; then
        for _version in 15 14 13 12 11 10; do
            for _file in "/usr/lib/llvm-$_version/lib"/libclang.so* \
                "/usr/lib/llvm-$_version/lib/libclang-$_version"*.so*; do
                # Skips dangling links.
                [ ! -f "$_file" ] || { LIBCLANG_PATH=${_file%/*}; break 2; }
            done
        done
    fi
    if [ -z "${LIBCLANG_PATH:-}" ]; then
        _folder=$PWD/target/libclang
        if ! [ -f "$_folder/clang/native/libclang.so" ]; then
            python3 -m pip --version >/dev/null 2>&1 || {
                echo "verbs need libclang 10 to 15, and neither libclang nor pip is installed:" \
                    "apt-get install python3-pip, or set LIBCLANG_PATH" >&2
                return 1
            }
            echo "no libclang up to 15 is installed: installing PyPI's in target/libclang" >&2
            PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m pip install -q \
                --no-deps --only-binary :all: --upgrade --target "$_folder" 'libclang==15.*' >&2 ||
                return 1
        fi
        LIBCLANG_PATH=$_folder/clang/native
    fi
    # A libclang without headers of its own, such as stddef.h, uses the compiler's.
    : "${BINDGEN_EXTRA_CLANG_ARGS=-idirafter $(cc -print-file-name=include)}"
    export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS
}
_verbs_env
