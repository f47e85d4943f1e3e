#!/usr/bin/env bash
# Fetches the distribution's kernel and unpacks the parts that a guest needs. Installs nothing: no
# boot loader, no initramfs of the machine's own. Called by tests/vm/build.sh.
#
#   tests/vm/kernel.sh FOLDER
#
# Leaves in FOLDER: vmlinux (ELF, not compressed: unpacking it under emulation would take longer
# than the rest of the boot), modules/*.ko, modules/list (the order to load them in) and version.
set -euo pipefail

# The modules that the guest needs; a kernel may have any of these built in.
modules=(virtio_pci 9pnet_virtio 9p overlay virtio_net veth sch_tbf sch_netem rdma_rxe rdma_ucm ib_uverbs)
# Modules that rdma_rxe requests by name at run time. The guest has no modprobe that would find them.
modules_if_any=(crc32_generic crc32_pclmul)

out=$1
mkdir -p "$out"
work=$(mktemp -d "$out/unpack.XXXXXX")
trap 'rm -rf "$work"' EXIT
fail() { echo "tests/vm/kernel.sh: $*" >&2; exit 1; }

# The package behind linux-image-amd64 (Debian) or linux-image-generic (Ubuntu).
image() {
    apt-cache depends linux-image-amd64 linux-image-generic 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1
}
update() {
    local as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo)
    echo "\$ ${as_root[*]:+sudo }apt-get update -qq" >&2
    "${as_root[@]}" apt-get update -qq >&2
}
fetch() {
    local image version packages
    image=$(image)
    [ -n "$image" ] || return 1
    version=${image#linux-image-}
    packages=("$image")
    # Ubuntu splits modules from the image, and those of RDMA from the others.
    for part in "linux-modules-$version" "linux-modules-extra-$version"; do
        ! apt-cache show "$part" >/dev/null 2>&1 || packages+=("$part")
    done
    echo "fetching ${packages[*]} for the guests" >&2
    (cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "${packages[@]}" >&2)
}

command -v apt-get >/dev/null || fail "no apt-get here; this script knows no other source of a kernel"
fetch || { update && fetch; } || fail "apt-get knows no linux-image-amd64 and no linux-image-generic"
for package in "$work"/*.deb; do
    dpkg-deb --fsys-tarfile "$package" |
        tar -x -C "$work" --wildcards --exclude='*/sound/*' --exclude='*/drivers/gpu/*' \
            '*/vmlinuz-*' '*/lib/modules/*' 2>/dev/null ||
        [ -d "$work/lib" ] || [ -d "$work/usr/lib" ] || [ -d "$work/boot" ]
done
[ -d "$work/lib" ] || ln -s usr/lib "$work/lib"
bzimage=$(find "$work" -name 'vmlinuz-*' | head -n 1)
[ -n "$bzimage" ] || fail "no kernel in $(cd "$work" && echo ./*.deb)"
version=${bzimage##*/vmlinuz-}

# The ELF file inside, by the header that all x86 kernels have (Documentation/arch/x86/boot.rst):
# after (1 + setup_sects) sectors, payload_offset bytes on, payload_length bytes, the last four of
# which hold the length of the unpacked file.
number() { od -An -v -t "u$3" -j "$2" -N "$3" "$1" | tr -d ' '; }
start=$((512 * (1 + $(number "$bzimage" 497 1)) + $(number "$bzimage" 584 4)))
length=$(number "$bzimage" 588 4)
tail -c +$((start + 1)) "$bzimage" | head -c $((length - 4)) >"$work/payload" || true
unpacked_bytes=$(number "$bzimage" $((start + length - 4)) 4)
case $(od -An -t x1 -N 4 "$work/payload" | tr -d ' ') in
fd377a58) unpack=(xz -dc) ;;
28b52ffd) unpack=(zstd -dcq) ;;
1f8b*) unpack=(gzip -dc) ;;
02214c18) unpack=(lz4 -dcq) ;;
*) fail "$version is packed in a way unknown to this script" ;;
esac
"${unpack[@]}" <"$work/payload" >"$work/vmlinux"
[ "$(stat -c %s "$work/vmlinux")" -eq "$unpacked_bytes" ] || fail "$version did not unpack whole"

depmod -b "$work" "$version"
mkdir "$work/modules"
needed() { modprobe -d "$work" -S "$version" --show-depends "$1"; }
{
    for name in "${modules_if_any[@]}"; do needed "$name" 2>/dev/null || true; done
    for name in "${modules[@]}"; do needed "$name" || fail "$version has no module $name"; done
} | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' >"$work/paths"
while read -r path; do
    name=${path##*/}
    name=${name%.xz}
    name=${name%.zst}
    case $path in
    *.xz) xz -dc "$path" ;;
    *.zst) zstd -dcq "$path" ;;
    *) cat "$path" ;;
    esac >"$work/modules/$name"
    echo "$name" >>"$work/modules/list"
done <"$work/paths"

rm -rf "$out/modules"
mv "$work/vmlinux" "$work/modules" "$out/"
# Last: this file shows that the others are complete.
echo "$version" >"$out/version"
