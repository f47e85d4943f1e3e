# shellcheck shell=bash
# Sourced in a guest, before its command: a soft-RoCE device, rxe0, that has its first GID and is
# active when this returns.
#
#   . tests/vm/network.sh loopback        on 10.9.0.1, for a server and clients in one guest
#   . tests/vm/network.sh ADDRESS NAME=ADDRESS...    on the guest's network card; the hosts' names

# RoCE needs a network card with a carrier. lo is none, so this makes a veth pair.
_network_loopback() {
    ip -batch - <<-END
		link add veth0 type veth peer name veth1
		addr add 10.9.0.1/24 dev veth0
		link set veth1 up
		link set veth0 up
	END
    rdma link add rxe0 type rxe netdev veth0
}

_network_host() {
    local address=$1 host
    shift
    for host in "$@"; do
        printf '%s %s\n' "${host#*=}" "${host%%=*}" >>/etc/hosts
    done
    ip -batch - <<-END
		addr add $address/24 dev eth0
		link set eth0 up
	END
    rdma link add rxe0 type rxe netdev eth0
}

# Waits until the device is active and has its GIDs, which come from the addresses.
_network_ready() {
    local port=/sys/class/infiniband/rxe0/ports/1 state gid tries
    for tries in $(seq 200); do
        read -r state 2>/dev/null <$port/state || state=
        for gid in "$port"/gids/[0-3]; do
            read -r gid 2>/dev/null <"$gid" || continue
            # An IPv4 address in a GID.
            [[ $state != *ACTIVE* || $gid != 0000:0000:0000:0000:0000:ffff:* ]] || return 0
        done
        sleep 0.02
    done
    echo "network.sh: rxe0 is not ready after $tries checks" >&2
    return 1
}

case $1 in
loopback) _network_loopback ;;
*) _network_host "$@" ;;
esac && _network_ready
