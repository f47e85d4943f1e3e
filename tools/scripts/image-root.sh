#!/usr/bin/env bash
# Copies the four commands, and the libraries that they load, into a folder: the root of a container
# image. The providers of RDMA devices are among them if the package ibverbs-providers is installed.
#
#   tools/scripts/image-root.sh FOLDER [target/release]
set -euo pipefail
root=${1:?a folder} built=${2:-target/release}

install -d "$root/usr/bin" "$root/etc"
commands=()
for name in kv-server kv-cli kv-resp kv-bench; do
    install -m 755 "$built/$name" "$root/usr/bin"
    strip "$root/usr/bin/$name"
    commands+=("$root/usr/bin/$name")
done
# libibverbs loads its providers by the names in /etc/libibverbs.d.
providers=()
while IFS= read -r file; do providers+=("$file"); done \
    < <(find /usr/lib/*/libibverbs /etc/libibverbs.d -type f 2>/dev/null)
loaded=$(for file in "${commands[@]}" "${providers[@]}"; do ldd "$file" 2>/dev/null || true; done |
    sed -n -e 's/.*=> \(\/[^ ]*\) .*/\1/p' -e 's/^\t\(\/[^ ]*\) .*/\1/p' | sort -u)
# Links become files, under the names by which the loader finds them.
for file in $loaded "${providers[@]}"; do
    install -D -m "$(stat -L -c %a "$file")" "$file" "$root$file"
done
echo 'farside:x:65532:65532::/:/nonexistent' >"$root/etc/passwd"
echo 'farside:x:65532:' >"$root/etc/group"
