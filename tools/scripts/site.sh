#!/usr/bin/env bash
# Builds a site of all pages: target/site/book. mdBook makes the pages and their search, rustdoc the
# documentation of the API, and site.py checks every link. Installs mdBook into target/tools, from
# crates.io, unless it is there.
#
#   tools/scripts/site.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=0.5.4
target=${CARGO_TARGET_DIR:-target}
mdbook=target/tools/bin/mdbook
command -v python3 >/dev/null || { echo "site: python3 is missing: install it" >&2; exit 1; }
if [ "$("$mdbook" --version 2>/dev/null)" != "mdbook v$version" ]; then
    echo "\$ cargo install mdbook --version $version" >&2
    cargo install mdbook --version "=$version" --locked --quiet --root target/tools \
        --no-default-features --features search
fi
python3 tools/scripts/site.py prepare target/site
rm -rf target/site/book
MDBOOK_LOG=warn "$mdbook" build target/site
# Without the documentation of other crates, which would be listed beside this one.
rm -rf "$target/doc"
cargo doc --quiet --no-deps --locked -p farside
cp -r "$target/doc" target/site/book/api
python3 tools/scripts/site.py check target/site/book
echo "open target/site/book/index.html" >&2
