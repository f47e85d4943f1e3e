#!/usr/bin/env bash
# Packages what target/release has for Debian: farside, libfarside0.1 and libfarside-dev, in
# target/deb. The metadata is in server/Cargo.toml and client/c/Cargo.toml. Installs cargo-deb into
# target/tools if it is not there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

cargo_deb_version=3.8.0
export PATH=$PWD/target/tools/bin:$PATH
command -v cargo-deb >/dev/null ||
    cargo install --quiet --locked --root target/tools cargo-deb --version "$cargo_deb_version"

built=${CARGO_TARGET_DIR:-target}/release
staged=target/deb/staged
rm -rf target/deb
mkdir -p "$staged"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
maintainer=$(sed -n 's/^maintainer = "\(.*\)"/\1/p' server/Cargo.toml)
# The same commit gives the same packages.
seconds=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH=$seconds
cat >target/deb/changelog <<EOF
farside ($version-1) unstable; urgency=medium

  * CHANGELOG.md of the source lists the changes.

 -- $maintainer  $(date --utc --date="@$seconds" --rfc-email)
EOF
DESTDIR=$staged tools/scripts/install.sh --prefix /usr --built "$built"
DESTDIR=$staged client/c/install.sh --prefix /usr --built "$built"
strip --strip-debug --enable-deterministic-archives "$staged/usr/lib/libfarside.a"
# pkg-config searches the folder of the architecture.
architecture=$(cc -print-multiarch)
sed -i "s|^libdir=.*|libdir=\${prefix}/lib/$architecture|" "$staged/usr/lib/pkgconfig/farside.pc"

package() { cargo deb --quiet --no-build --locked --output target/deb/ "$@" >/dev/null; }
package --package farside-server
package --package farside-c --multiarch same
package --package farside-c --multiarch same --variant library

# Adds to the library's package what cargo-deb does not: the packages that it needs, and the file by
# which other packages find that they need it.
library=$(echo target/deb/libfarside0*.deb)
unpacked=target/deb/library
dpkg-deb --raw-extract "$library" "$unpacked"
mkdir -p target/deb/shlibdeps/debian
echo 'Source: farside' >target/deb/shlibdeps/debian/control
needed=$(cd target/deb/shlibdeps &&
    dpkg-shlibdeps -O -e"$(realpath "../staged/usr/lib/libfarside.so.$version")" 2>/dev/null)
sed -i "s/^Depends:.*/Depends: ${needed#*=}/" "$unpacked/DEBIAN/control"
soname=${version%.*}
echo "libfarside $soname libfarside$soname (>= $version)" >"$unpacked/DEBIAN/shlibs"
dpkg-deb --root-owner-group --build "$unpacked" "$library" >/dev/null
rm -r "$unpacked" target/deb/shlibdeps
ls target/deb/*.deb
