#!/usr/bin/env bash
# Builds what the guests boot into target/vm, or $FARSIDE_VM_BUILD: the kernel, once
# (tests/vm/kernel.sh; remove the folder for a newer one), and an initramfs of busybox,
# tests/vm/init and the modules. Does nothing when all that is up to date.
#
#   tests/vm/build.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
out=${FARSIDE_VM_BUILD:-$here/../../target/vm}
mkdir -p "$out"
# Two test runs may start at once.
exec {lock}>"$out/lock"
flock "$lock"

stamp() {
    cat "$out/version" 2>/dev/null || echo "no kernel"
    cd "$here" && cksum build.sh kernel.sh init
}
if [ "$(stamp)" = "$(cat "$out/stamp" 2>/dev/null)" ]; then
    exit 0
fi
rm -f "$out/stamp"
"$here/needs.sh"
# Another list of modules takes another look at the kernel's package.
kernel=$(cd "$here" && cksum kernel.sh)
if [ ! -s "$out/version" ] || [ "$kernel" != "$(cat "$out/kernel" 2>/dev/null)" ]; then
    "$here/kernel.sh" "$out"
    echo "$kernel" >"$out/kernel"
fi

root=$(mktemp -d "$out/initramfs.XXXXXX")
trap 'rm -rf "$root"' EXIT
mkdir "$root"/{bin,dev,proc,sys}
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$here/init" "$root/init"
chmod 755 "$root/init"
cp -r "$out/modules" "$root/modules"
(cd "$root" && find . | cpio --quiet -o -H newc) >"$out/initramfs"
stamp >"$out/stamp"
echo "built the test guest (Linux $(cat "$out/version")) in $out" >&2
