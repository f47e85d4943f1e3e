#!/usr/bin/env bash
# Installs the client library for C: farside.h, libfarside.so, libfarside.a and farside.pc.
#
#   client/c/install.sh [--prefix /usr/local] [--built target/release]
#
# DESTDIR is put before the prefix, as packages need it.
set -euo pipefail
source=$(dirname "$(realpath "${BASH_SOURCE[0]}")")

prefix=/usr/local built=$source/../../target/release
while [ $# -gt 0 ]; do
    case $1 in
    --prefix) prefix=$(realpath -m "${2:?a folder}") ;;
    --built) built=${2:?a folder} ;;
    *) echo "install.sh: unknown argument $1; see the beginning of the file" >&2; exit 2 ;;
    esac
    shift 2
done
for file in libfarside.so libfarside.a; do
    [ -f "$built/$file" ] || {
        echo "install.sh: no $built/$file; build it: cargo build --release -p farside-c" >&2
        exit 1
    }
done
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$source/../../Cargo.toml")
header=$source/include/farside.h
root=${DESTDIR:-}$prefix
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT

install -d "$root/include" "$root/lib/pkgconfig"
install -m 644 "$header" "$root/include"
install --strip -m 755 "$built/libfarside.so" "$root/lib/libfarside.so.$version"
ln -sf "libfarside.so.$version" "$root/lib/libfarside.so.${version%.*}"
ln -sf "libfarside.so.${version%.*}" "$root/lib/libfarside.so"

# The archive in one object, in which only the functions of the header are visible. So a program can
# link it with other libraries in Rust.
functions=$(sed -n 's/^[a-z].*\b\(farside_[a-z_]*\)(.*/\1/p' "$header")
# shellcheck disable=SC2086 # words are meant to split
"${LD:-ld}" -r -o "$objects/farside.o" $(printf -- '-u %s ' $functions) "$built/libfarside.a"
# Without the bitcode of Rust's standard library, on which the linker plugin of an older LLVM fails.
"${OBJCOPY:-objcopy}" --wildcard --keep-global-symbol='farside_*' --remove-section=.llvmbc \
    --remove-section=.llvmcmd --strip-debug "$objects/farside.o"
"${AR:-ar}" rcs "$objects/libfarside.a" "$objects/farside.o"
install -m 644 "$objects/libfarside.a" "$root/lib"

# RDMA's libraries, if it was built with them.
rdma=
if nm -u "$objects/farside.o" | grep ' ibv_' >/dev/null; then rdma="-libverbs -lrdmacm "; fi
cat >"$objects/farside.pc" <<EOF
prefix=$prefix
includedir=\${prefix}/include
libdir=\${prefix}/lib

Name: farside
Description: Client library of Farside, a one-sided RDMA key-value store on far memory
Version: $version
Cflags: -I"\${includedir}"
Libs: -L"\${libdir}" -lfarside
Libs.private: $rdma-lgcc_s -lutil -lrt -lpthread -lm -ldl
EOF
install -m 644 "$objects/farside.pc" "$root/lib/pkgconfig"
