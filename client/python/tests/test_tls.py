"""TLS: a client trusts only its CA's server, and a server with a CA only that CA's clients."""

import farside
import pytest
import trustme
from conftest import LIMIT, free_port, start_server, stop
from farside import lmcache


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The paths of PEM files: a CA, the server's and a client's certificate and key, another CA."""
    folder = tmp_path_factory.mktemp("tls")
    ca, other = trustme.CA(), trustme.CA()
    pems = {"ca": ca.cert_pem, "other": other.cert_pem}
    for name in ("server", "client"):
        issued = ca.issue_cert("127.0.0.1")
        pems[name], pems[f"{name}_key"] = issued.cert_chain_pems[0], issued.private_key_pem
    paths = {name: folder / f"{name}.pem" for name in pems}
    for name, pem in pems.items():
        pem.write_to_path(str(paths[name]))
    return paths


@pytest.fixture(scope="module", params=["server", "both"])
def encrypted(request, files, tmp_path_factory):
    """The address of a server, and the settings of a client that it lets in."""
    settings = {"tls_ca": files["ca"]}
    lines = ["[tls]", f'certificate = "{files["server"]}"', f'key = "{files["server_key"]}"']
    if request.param == "both":
        lines.append(f'ca = "{files["ca"]}"')
        settings |= {"tls_certificate": str(files["client"]), "tls_key": files["client_key"]}
    config = tmp_path_factory.mktemp("server") / "server.toml"
    config.write_text("\n".join(lines) + "\n")
    config.chmod(0o600)
    address = f"tcp://127.0.0.1:{free_port()}"
    process = start_server(address, "--config", str(config), settings=settings)
    yield address, settings
    stop(process)


def test_values_are_encrypted(encrypted):
    address, settings = encrypted
    value = bytes(range(256)) * 5000
    with farside.Client(address, **settings) as client:
        client.put("short", "value")
        client.put("long", value)
        target = bytearray(len(value))
        assert client.get("short") == b"value"
        assert client.get_into("long", target) == len(value) and target == value
    lmcache.Connector(address, **settings).close()


def test_who_is_not_trusted_is_refused(encrypted, files):
    address, settings = encrypted
    with pytest.raises(farside.ConnectError, match="(?i)tls|certificate"):
        farside.Client(address, connect_timeout=LIMIT)
    with pytest.raises(farside.ConnectError, match="(?i)certificate"):
        farside.Client(address, **{**settings, "tls_ca": files["other"]}, connect_timeout=LIMIT)
    if "tls_key" in settings:
        with pytest.raises(farside.ConnectError, match="(?i)certificate"):
            farside.Client(address, tls_ca=files["ca"], connect_timeout=LIMIT)


def test_files_that_are_missing_or_incomplete(encrypted, files, tmp_path):
    address, settings = encrypted
    absent = tmp_path / "absent.pem"
    with pytest.raises(farside.ConnectError, match="absent.pem"):
        farside.Client(address, **{**settings, "tls_ca": absent})
    with pytest.raises(farside.ConnectError, match="tls.key need each other"):
        farside.Client(address, tls_ca=files["ca"], tls_certificate=files["client"])
