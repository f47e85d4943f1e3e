#!/usr/bin/env bash
# Tests the packages in target/deb: lintian reports no error; a clean Debian installs them, runs them
# and removes them without a trace. If systemd-nspawn can boot that Debian, the services run there
# with all the protection of their units. The root of the image (tools/scripts/image-root.sh) is
# tested in the same way. As root. What this machine lacks is left out, with the reason.
#
#   tools/scripts/test-deb.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "test-deb: $*" >&2; exit 1; }
left_out() { echo "test-deb: left out: $*" >&2; }
say() { printf '\n== %s\n' "$*"; }

compgen -G 'target/deb/*.deb' >/dev/null || fail "no packages; make them: make deb"
packages=(target/deb/*.deb)

say "lintian"
if command -v lintian >/dev/null; then
    lintian --fail-on error "${packages[@]}"
    echo "no errors"
else
    left_out "lintian is not installed"
fi

say "completions"
for shell in bash zsh fish; do
    command -v $shell >/dev/null || { left_out "$shell is not installed"; continue; }
    mapfile -t files < <(find target/deb/staged/usr/share -path "*$shell*" -type f)
    [ ${#files[@]} -eq 4 ] || fail "${#files[@]} completions for $shell"
    for file in "${files[@]}"; do
        "$shell" -n "$file" || fail "$shell cannot read $file"
    done
    echo "$shell reads its completions"
done

if [ "$(id -u)" -ne 0 ]; then
    left_out "a clean root needs root"
    exit
fi
if ! command -v debootstrap >/dev/null; then
    left_out "a clean root needs debootstrap"
    exit
fi
work=$PWD/target/deb-root
# shellcheck disable=SC1091
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
# With what the packages depend on, so that they are installed without a network.
included=systemd,systemd-sysv,dbus,libibverbs1,librdmacm1,ibverbs-providers
included=$included,libibverbs-dev,librdmacm-dev,gcc,libc6-dev,pkg-config
if [ ! -f "$work/$suite-complete" ]; then
    say "a clean $suite"
    rm -rf "${work:?}/$suite"
    mkdir -p "$work"
    if ! debootstrap --variant=minbase --include="$included" "$suite" "$work/$suite" \
        >"$work/log" 2>&1; then
        tail -n 3 "$work/log" >&2
        left_out "a clean root: debootstrap cannot install $suite"
        exit
    fi
    rm -rf "$work/$suite"/var/cache/apt/archives/*.deb
    touch "$work/$suite-complete"
fi
root=$work/root
rm -rf "$root"
cp -a "$work/$suite" "$root"
# With a /proc of its own, and without the machine's network.
inside() {
    unshare --mount --pid --net --fork --mount-proc="$root/proc" chroot "$root" \
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C "$@"
}
# All files, without those that record what dpkg did.
listing() {
    (cd "$root" && find . -xdev -mindepth 1 \( -path ./var/lib/dpkg -o -path ./var/log \
        -o -path ./proc -o -path ./dev -o -path ./run -o -path ./tmp \) -prune -o -print) | sort
}

say "install"
before=$(listing)
mkdir "$root/packages"
cp "${packages[@]}" "$root/packages"
inside sh -c 'dpkg --install /packages/*.deb' 2>&1 | grep -v '^(Reading'
rm -r "$root/packages"
for name in kv-server kv-cli kv-resp kv-bench; do
    inside "$name" --version
    [ -s "$root/usr/share/man/man1/$name.1.gz" ] || fail "no manual page of $name"
done
[ "$(inside stat -c '%U:%G %a' /etc/farside/server.toml)" = 'farside:farside 600' ] ||
    fail "the server's config is not for the server alone"
# Not in /tmp, which a booted system empties.
mkdir "$root/test"
cp client/c/examples/quickstart.c "$root/test"
# shellcheck disable=SC2016 # the other shell expands it
inside sh -c 'cc /test/quickstart.c $(pkg-config --cflags --libs farside) -o /test/quickstart'
# shellcheck disable=SC2016
inside sh -c 'cc /test/quickstart.c $(pkg-config --cflags farside) -l:libfarside.a \
    $(pkg-config --static --libs farside | sed s/-lfarside//) -o /test/quickstart-static'

# What both of the following parts run.
cat >"$root/test/use" <<'EOF'
set -e
export FARSIDE_SERVER=shm:///run/farside/kv.sock
kv-cli put greeting hello
[ "$(kv-cli get greeting)" = hello ]
/test/quickstart "$FARSIDE_SERVER"
/test/quickstart-static "$FARSIDE_SERVER"
kv-cli verify
EOF

say "kv-server as its user"
# shellcheck disable=SC2016
inside sh -c 'set -e
    systemd-tmpfiles --create farside.conf
    umask 0007
    setpriv --reuid=farside --regid=farside --clear-groups \
        kv-server --config /etc/farside/server.toml --memory 64MiB 2>/test/log &
    server=$!
    for n in $(seq 100); do [ -S /run/farside/kv.sock ] && break; sleep 0.1; done
    setpriv --reuid=farside-resp --regid=farside-resp --groups=farside sh /test/use
    kill $server; wait $server' || { cat "$root/test/log"; fail "the installed server does not serve"; }

say "services in a booted Debian"
# Ends by a poweroff, whatever fails.
cat >"$root/test/boot-test" <<'EOF'
set -ex
sed -i 's/^memory = .*/memory = "64MiB"/' /etc/farside/server.toml
if systemctl is-enabled farside; then exit 1; fi
systemctl start farside farside-resp
sh /test/use
[ "$(stat -c '%U:%G %a' /run/farside)" = 'farside:farside 750' ]
# The gateway answers a client of redis.
exec 3<>/dev/tcp/127.0.0.1/6379
printf '*2\r\n$3\r\nGET\r\n$8\r\ngreeting\r\n' >&3
read -r line <&3
read -r line <&3
[ "${line%?}" = hi ]
# A region file survives a restart of the service, also one by a crash.
printf 'region_file = "/dev/shm/farside.region"\nindex = "64KiB"\n' >/test/config
cat /etc/farside/server.toml >>/test/config
cat /test/config >/etc/farside/server.toml
systemctl restart farside
FARSIDE_SERVER=shm:///run/farside/kv.sock kv-cli put kept yes
systemctl restart farside
[ "$(FARSIDE_SERVER=shm:///run/farside/kv.sock kv-cli get kept)" = yes ]
# A warning has its priority in the journal.
journalctl --no-pager -o cat -u farside -p warning..warning --grep '^ *WARN FS-004 index = '
systemctl kill --signal=KILL farside
sleep 2
[ "$(FARSIDE_SERVER=shm:///run/farside/kv.sock kv-cli get kept)" = yes ]
systemctl stop farside farside-resp
[ -d /run/farside ]
EOF
cat >"$root/etc/systemd/system/boot-test.service" <<'EOF'
[Unit]
After=multi-user.target
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
PrivateTmp=no
ExecStart=/bin/bash -c 'bash /test/boot-test >/test/boot-log 2>&1 && touch /test/boot-passed'
ExecStopPost=/bin/sh -c 'journalctl --no-pager -u farside -u farside-resp >>/test/boot-log'
EOF
wants=$root/etc/systemd/system/multi-user.target.wants
ln -s ../boot-test.service "$wants/boot-test.service"
if ! command -v systemd-nspawn >/dev/null; then
    left_out "the services: systemd-nspawn is not installed"
elif ! timeout 20 systemd-nspawn --quiet --register=no --keep-unit --directory="$root" true \
    >/dev/null 2>&1; then
    left_out "the services: systemd-nspawn runs nothing here"
else
    timeout 120 systemd-nspawn --quiet --register=no --keep-unit --private-network \
        --directory="$root" --boot >"$work/boot" 2>&1 </dev/null || true
    if [ ! -f "$root/test/boot-log" ]; then
        tail -n 5 "$work/boot" >&2
        left_out "the services: systemd does not boot here"
    else
        [ -f "$root/test/boot-passed" ] || { cat "$root/test/boot-log"; fail "a service fails"; }
        grep -E 'serving|redis' "$root/test/boot-log" || true
        echo "farside and farside-resp serve with the protection of their units"
    fi
fi
rm -rf "$root/test" "$root/etc/systemd/system/boot-test.service" "$wants/boot-test.service"

say "remove and purge"
inside dpkg --remove farside libfarside-dev libfarside0.1 2>&1 | grep -v '^(Reading'
[ ! -e "$root/usr/bin/kv-server" ] || fail "the command is still there"
[ -f "$root/etc/farside/server.toml" ] || fail "a config file is gone before the purge"
inside dpkg --purge farside libfarside-dev libfarside0.1 2>&1 | grep -v '^(Reading'
left=$(comm -13 <(echo "$before") <(listing))
# shellcheck disable=SC2086 # in one line
echo "left:" ${left:-nothing}
# What systemd writes at its boot, and the backups of the lists of users, are no files of ours.
! grep -iE 'farside|kv-' <<<"$left" || fail "files are left"

say "the root of an image"
image=$work/image
rm -rf "$image"
tools/scripts/image-root.sh "$image" "${CARGO_TARGET_DIR:-target}/release"
bytes=$(du -sh "$image" | cut -f 1)
install -d -m 2777 "$image/region"
install -d "$image/dev" "$image/proc" && mknod -m 666 "$image/dev/null" c 1 3
# As in a pod: any user, a folder with all permissions, and no other file system than /proc.
export image
# shellcheck disable=SC2016 # the other shell expands it
unshare --mount --pid --net --fork --mount-proc="$image/proc" bash -c 'set -e
    ip link set lo up
    in_image=(chroot --userspec=65532:65532 --groups= "$image")
    export PATH=/usr/bin:$PATH FARSIDE_SERVER=tcp://127.0.0.1:7499
    "${in_image[@]}" /usr/bin/kv-server --listen tcp://127.0.0.1:7499 --memory 64MiB \
        --region-file /region/farside.region 2>"$image/log" &
    server=$!
    for n in $(seq 100); do grep -q serving "$image/log" && break; sleep 0.1; done
    "${in_image[@]}" /usr/bin/kv-cli put greeting hello
    [ "$("${in_image[@]}" /usr/bin/kv-cli get greeting)" = hello ]
    kill $server; wait $server' || { cat "$image/log"; fail "the commands do not run in the image"; }
echo "$bytes of files; the commands run in it as user 65532"
rm -rf "$image" "$root"
echo
echo "test-deb: passed"
