# shellcheck shell=bash
# Functions of tests/vm/run and tests/vm/hosts, which source this file. They make a temporary folder,
# and boot guests whose files are in that folder.
#
# Each guest has a folder of its own:
#   job/main      the bash script that its init runs      job/share   the shared folder's path
#   job/stdout    job/stderr    job/exit                  filled by the guest, as it goes
#   console       output of kernel and init               qemu        output of QEMU

vm_here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
vm_build=${FARSIDE_VM_BUILD:-$vm_here/../../target/vm}
vm_name=tests/vm/${0##*/}
vm_pids=()

vm_fail() { echo "$vm_name: $*" >&2; exit 125; }

# Makes $vm_folder. However the script ends, it first ends all guests and removes the folder.
vm_open() {
    "$vm_here/build.sh" || vm_fail "the guest could not be built"
    vm_folder=$(mktemp -d "${TMPDIR:-/tmp}/farside-vm.XXXXXX")
    trap vm_close EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

vm_close() {
    trap - EXIT
    trap '' HUP INT TERM
    vm_kill "${vm_pids[@]}"
    # No QEMU runs any more that could write into the folder meanwhile.
    rm -rf "$vm_folder"
}

# vm_kill PID...: kills processes, and hides bash's message that they were killed.
vm_kill() { { kill -KILL "$@"; wait "$@"; } 2>/dev/null || true; }
vm_alive() { kill -0 "$1" 2>/dev/null; }

# vm_background COMMAND...: starts a process that ends with this script, even after kill -9.
vm_background() {
    setpriv --pdeathsig KILL -- "$@" &
    vm_pid=$!
    vm_pids+=("$vm_pid")
}

# Prints the beginning of job/main. It enters the caller's folder, and sets the variables that tests
# read. FARSIDE_VM tells tests that they run in a guest, FARSIDE_BUILT that they cannot build there.
vm_surroundings() {
    local name
    printf 'cd -- %q || exit 125\nexport FARSIDE_VM=1 FARSIDE_BUILT=1\n' "$PWD"
    for name in $(compgen -e); do
        case $name in
        FARSIDE_* | RUST* | CARGO | CARGO_* | LD_LIBRARY_PATH | PATH | HOME | LANG | LC_*)
            printf 'export %s=%q\n' "$name" "${!name}"
            ;;
        esac
    done
}

# vm_boot FOLDER MEMORY CPUS SHARE ARGUMENT...: boots a guest, with more arguments for QEMU. SHARE
# may be empty. Sets $vm_pid.
vm_boot() {
    local folder=$1 memory=$2 cpus=$3 share=$4 arguments
    shift 4
    touch "$folder/job/stdout" "$folder/job/stderr"
    # shellcheck disable=SC2054 # QEMU's commas
    arguments=(
        # PVH, hence a bare ELF kernel. thread=multi: one thread of the machine per processor.
        -machine q35,usb=off,vmport=off,smm=off -nodefaults -no-user-config -no-reboot
        -accel tcg,thread=multi,tb-size=256 -smp "$cpus" -m "$memory"
        # Without the instructions that are slow in emulation, which moves strings byte by byte and
        # computes checksums bit by bit. With these instructions, 48 more bytes made a READ 2 us
        # longer, and 4 KiB made it 60 us longer. No hardware is like that.
        -cpu max,-erms,-fsrm,-sse4.2,-pclmulqdq
        -kernel "$vm_build/vmlinux" -initrd "$vm_build/initramfs"
        # Less to do at boot, and QEMU ends when the kernel panics. A kernel that hangs says where.
        -append "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0 apparmor=0 selinux=0 \
tsc=reliable no_timer_check random.trust_cpu=on rcupdate.rcu_expedited=1 cryptomgr.notests \
net.ifnames=0 sysctl.kernel.hung_task_timeout_secs=10"
        -display none -serial "file:$folder/console"
        -fsdev "local,id=machine,path=/,security_model=none,readonly=on,multidevs=remap"
        -device "virtio-9p-pci,fsdev=machine,mount_tag=machine"
        -fsdev "local,id=job,path=$folder/job,security_model=none"
        -device "virtio-9p-pci,fsdev=job,mount_tag=job"
    )
    if [ -n "$share" ]; then
        printf '%s' "$share" >"$folder/job/share"
        arguments+=(
            -fsdev "local,id=share,path=$share,security_model=none,multidevs=remap"
            -device "virtio-9p-pci,fsdev=share,mount_tag=share"
        )
    fi
    vm_background qemu-system-x86_64 "${arguments[@]}" "$@" </dev/null >"$folder/qemu" 2>&1
}

# vm_follow FILE PID: prints the file, and what is appended to it until that process ends.
vm_follow() { tail -c +1 -s 0.05 -f --pid="$2" "$1" 2>/dev/null; }

# vm_code FOLDER: prints the guest's exit code; returns 1 if there is none.
vm_code() { grep -x '[0-9]\+' "$1/job/exit" 2>/dev/null; }

# vm_hangs FOLDER: whether a task of the guest's kernel is blocked for good. That happens to Linux 6.1
# when soft-RoCE destroys a queue pair, rarely and on a busy machine.
vm_hangs() { grep -q 'INFO: task .* blocked for more than' "$1/console"; }

# vm_explain FOLDER WHAT: prints WHAT and the end of the console, which may show why there is no exit
# code.
vm_explain() {
    echo "$vm_name: $2; the end of its console:" >&2
    tail -n 60 "$1/console" "$1/qemu" 2>/dev/null | tr -d '\r' >&2 || true
}
