# shellcheck shell=sh
# Sourced from the top of the repository before `cargo build` with verbs, by any POSIX shell: sets
# LIBCLANG_PATH and BINDGEN_EXTRA_CLANG_ARGS to what rdma-sys takes.
#
#   . tools/scripts/verbs-env.sh && cargo build --features verbs
#
# rdma-sys reads the C headers with bindgen 0.59, which LLVM 16 and later makes panic ("is not a
# valid Ident"). So: the newest libclang up to 15 that is installed, else PyPI's in target/libclang.
# What the caller has set stays. False, and one line of why, if there is no way.

_verbs_env() {
    if [ -z "${LIBCLANG_PATH:-}" ]; then
        for _version in 15 14 13 12 11 10; do
            for _file in "/usr/lib/llvm-$_version/lib"/libclang.so* \
                "/usr/lib/llvm-$_version/lib/libclang-$_version"*.so*; do
                # A dangling link is no file.
                [ ! -f "$_file" ] || { LIBCLANG_PATH=${_file%/*}; break 2; }
            done
        done
    fi
    if [ -z "${LIBCLANG_PATH:-}" ]; then
        _folder=$PWD/target/libclang
        if ! [ -f "$_folder/clang/native/libclang.so" ]; then
            python3 -m pip --version >/dev/null 2>&1 || {
                echo "verbs need libclang 10 to 15, and there is neither one nor pip to bring it:" \
                    "apt-get install python3-pip, or set LIBCLANG_PATH" >&2
                return 1
            }
            echo "no libclang up to 15 here: taking PyPI's, into target/libclang" >&2
            PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m pip install -q \
                --no-deps --only-binary :all: --upgrade --target "$_folder" 'libclang==15.*' >&2 ||
                return 1
        fi
        LIBCLANG_PATH=$_folder/clang/native
    fi
    # A libclang without its own stddef.h and the like makes do with the compiler's.
    : "${BINDGEN_EXTRA_CLANG_ARGS=-idirafter $(cc -print-file-name=include)}"
    export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS
}
_verbs_env
