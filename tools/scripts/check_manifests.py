"""Checks Kubernetes objects in the YAML on stdin against the schemas of the API.

    python check_manifests.py 1.27 1.37 < objects.yaml

The arguments are the versions of Kubernetes. Unknown keys are errors. ServiceMonitor is checked
against the model of the Prometheus operator.
"""

import sys

import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor


def unknown(given, known, path):
    """Yields the paths of the keys that the model did not take over."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key not in known:
                yield f"{path}.{key}"
            else:
                yield from unknown(value, known[key], f"{path}.{key}")
    elif isinstance(given, list):
        for at, (value, other) in enumerate(zip(given, known)):
            yield from unknown(value, other, f"{path}[{at}]")


def check(document, versions):
    if document["kind"] == "ServiceMonitor":
        model = ServiceMonitor.model_validate(document)
        known = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if lost := list(unknown(document, known, "ServiceMonitor")):
            raise ValueError(f"unknown keys: {', '.join(lost)}")
        return
    for version in versions:
        kubernetes_validate.validate(document, version, strict=True)


def main(versions):
    documents = [document for document in yaml.safe_load_all(sys.stdin) if document]
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        try:
            check(document, versions)
        except Exception as error:  # of three libraries
            sys.exit(f"{name}: {str(error).splitlines()[0]}")
    print(f"{len(documents)} objects:", *(document["kind"] for document in documents))


main(sys.argv[1:])
