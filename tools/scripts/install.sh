#!/usr/bin/env bash
# Installs the four commands, their manual pages and completions, and systemd's files.
#
#   tools/scripts/install.sh [--prefix /usr/local] [--built target/release]
#
# The commands are installed without debug information, which stays in target/release.
# DESTDIR is put before the prefix, as packages need it. Nothing is written to /etc: the config files
# are in PREFIX/share/doc/farside/examples. client/c/install.sh installs the library for C.
set -euo pipefail
# All users may read what is installed.
umask 022
top=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")

prefix=/usr/local built=$top/target/release
while [ $# -gt 0 ]; do
    case $1 in
    --prefix) prefix=$(realpath -m "${2:?a folder}"); shift ;;
    --built) built=${2:?a folder}; shift ;;
    *) echo "install.sh: unknown argument $1; see the beginning of the file" >&2; exit 2 ;;
    esac
    shift
done
root=${DESTDIR:-}$prefix
bash=$root/share/bash-completion/completions
zsh=$root/share/zsh/site-functions
fish=$root/share/fish/vendor_completions.d
man=$root/share/man/man1

install -d "$root/bin" "$man" "$bash" "$zsh" "$fish"
for name in kv-server kv-cli kv-resp kv-bench; do
    command=$built/$name
    [ -x "$command" ] || {
        echo "install.sh: no $command; build it: make build" >&2
        exit 1
    }
    install --strip -m 755 "$command" "$root/bin"
    "$command" --generate man >"$man/$name.1"
    "$command" --generate complete-bash >"$bash/$name"
    "$command" --generate complete-zsh >"$zsh/_$name"
    "$command" --generate complete-fish >"$fish/$name.fish"
done

units=$root/lib/systemd/system
install -d "$units"
for unit in "$top"/config/systemd/*.service; do
    sed "s|^ExecStart=/usr/bin/|ExecStart=$prefix/bin/|" "$unit" >"$units/${unit##*/}"
done
install -D -m 644 "$top/config/systemd/farside.sysusers" "$root/lib/sysusers.d/farside.conf"
install -D -m 644 "$top/config/systemd/farside.tmpfiles" "$root/lib/tmpfiles.d/farside.conf"
install -D -m 644 -t "$root/share/doc/farside/examples" "$top/config/server.toml" \
    "$top/config/client.toml"
