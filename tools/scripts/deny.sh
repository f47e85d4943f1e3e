#!/usr/bin/env bash
# Checks licences, sources and known vulnerabilities of all dependencies (deny.toml). If there is no
# database of advisories and none can be fetched, says so and checks only the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

cargo deny check bans licenses sources
# A separate step, so that a failed fetch does not count as a finding. A failed fetch leaves a lock
# file, but no folder.
if cargo deny fetch db >/dev/null 2>&1; then
    cargo deny --offline check advisories
elif compgen -G "${CARGO_HOME:-$HOME/.cargo}/advisory-dbs/*/" >/dev/null; then
    echo "deny: no newer database of advisories can be fetched: checking with the local one" >&2
    cargo deny --offline check advisories
else
    echo "deny: advisories were not checked: no database is here, and none can be fetched" >&2
fi
