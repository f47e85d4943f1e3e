# Sourced by the scripts that run a part of the integration tests.

# leave_out WHERE WHY NAME...: leaves out the tests whose names contain a NAME, and prints WHY. Adds
# to the arguments in `tests`. Other tests that need another machine or fabric leave themselves out.
leave_out() {
    local where=$1 why=$2 name
    shift 2
    for name in "$@"; do
        echo "left out $where: $name: $why"
        tests+=(--skip "$name")
    done
}
