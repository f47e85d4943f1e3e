#!/usr/bin/env bash
# Licences and sources of all dependencies, and what is known against them (deny.toml). Where no
# database of advisories can be had, says so and is content with the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

cargo deny check bans licenses sources
# A step of its own, so that a database that cannot be fetched is no finding. A fetch that fails
# leaves a lock file, and no folder.
if cargo deny fetch db >/dev/null 2>&1; then
    cargo deny --offline check advisories
elif compgen -G "${CARGO_HOME:-$HOME/.cargo}/advisory-dbs/*/" >/dev/null; then
    echo "deny: no newer database of advisories can be fetched: checking with the one at hand" >&2
    cargo deny --offline check advisories
else
    echo "deny: advisories were not checked: no database is here, and none can be fetched" >&2
fi
