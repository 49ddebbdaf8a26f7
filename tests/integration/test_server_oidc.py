# SPDX-License-Identifier: Apache-2.0
"""Tokens of an OpenID Connect issuer: a real issuer over HTTP, real keys, a real server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from served import Server
from sonde.server import oidc_keys


class Issuer:
    """Serves discovery and keys, and signs what it is given."""

    def __init__(self) -> None:
        self.keys = {"rsa": self.new_rsa(), "ec": ec.generate_private_key(ec.SECP256R1())}
        self.requests: list[str] = []
        self.redirects_to = ""
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.requests.append(self.path)
                if issuer.redirects_to:
                    self.send_response(302)
                    self.send_header("Location", issuer.redirects_to)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                body = json.dumps(issuer.document(self.path)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @staticmethod
    def new_rsa() -> rsa.RSAPrivateKey:
        return rsa.generate_private_key(65537, 2048)

    def document(self, path: str) -> dict[str, Any]:
        if path.endswith("openid-configuration"):
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        found = []
        for kid, key in self.keys.items():
            kind = (
                jwt.algorithms.RSAAlgorithm if kid.startswith("rsa") else jwt.algorithms.ECAlgorithm
            )
            found.append(json.loads(kind.to_jwk(key.public_key())) | {"kid": kid, "use": "sig"})
        return {"keys": found}

    def token(self, kid: str = "rsa", key: Any = None, alg: str = "", **claims: Any) -> str:
        now = time.time()
        every = {
            "iss": self.url, "aud": "sonde", "sub": "ada", "exp": now + 300,
            "tenant": "lab", "scope": "openid sonde:read",
        } | claims  # fmt: skip
        kept = {name: value for name, value in every.items() if value is not None}
        alg = alg or ("ES256" if kid == "ec" else "RS256")
        return jwt.encode(kept, key or self.keys[kid], alg, headers={"kid": kid})


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    one = Issuer()
    yield one
    one.server.shutdown()


def config(folder: Path, text: str) -> Path:
    path = folder / "oidc.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("oidc")
    path = config(folder, f'issuer = "{issuer.url}"\naudience = "sonde"\n')
    with Server(folder / "store", "--oidc", str(path)) as one:
        yield one


def status(server: Server, token: str, path: str = "/v1/nodes") -> int:
    server.token = token
    return server.get(path)[0]


def last_audit(server: Server) -> str:
    lines = (server.store.parent / "serve.log").read_text().splitlines()
    return next(line for line in reversed(lines) if '"path"' in line or "path" in line)


@pytest.mark.parametrize("kid", ["rsa", "ec"])
def test_a_token_of_the_issuer_reads_for_its_tenant_and_does_no_more(
    server: Server, issuer: Issuer, kid: str
) -> None:
    token = issuer.token(kid)

    assert status(server, token) == 200
    assert "oidc:ada" in last_audit(server) and "lab" in last_audit(server)
    assert status(server, token, "/v1/tokens") == 403
    assert status(server, token, "/v1/collection") == 403


@pytest.mark.parametrize(("scope", "path"), [("admin", "/v1/tokens"), ("ingest", "/v1/collection")])
def test_each_scope_allows_its_operations(
    server: Server, issuer: Issuer, scope: str, path: str
) -> None:
    assert status(server, issuer.token(scope=[f"sonde:{scope}"]), path) == 200
    assert status(server, issuer.token(scope=[f"sonde:{scope}"])) == 403


def forged_hs256(issuer: Issuer) -> str:
    """Signed by HMAC with the bytes of the public key, as a confused server would check it."""
    public = (
        issuer.keys["rsa"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    head, body, _ = issuer.token().split(".")
    head = encoded(json.dumps({"alg": "HS256", "kid": "rsa"}).encode())
    mac = hmac.new(public, f"{head}.{body}".encode(), hashlib.sha256).digest()
    return f"{head}.{body}.{encoded(mac)}"


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def unsigned(issuer: Issuer) -> str:
    head = encoded(json.dumps({"alg": "none"}).encode())
    return f"{head}.{issuer.token().split('.')[1]}."


REFUSED: dict[str, tuple[int, Any]] = {
    "alg none": (401, unsigned),
    "HS256 with the public key": (401, forged_hs256),
    "an algorithm that is not allowed": (401, lambda i: i.token(alg="PS256")),
    "a stranger's key": (401, lambda i: i.token(key=Issuer.new_rsa())),
    "another audience": (401, lambda i: i.token(aud="other")),
    "no audience": (401, lambda i: i.token(aud=None)),
    "another issuer": (401, lambda i: i.token(iss="https://elsewhere")),
    "expired": (401, lambda i: i.token(exp=time.time() - 60)),
    "no expiry": (401, lambda i: i.token(exp=None)),
    "valid for months": (401, lambda i: i.token(exp=time.time() + 32 * 86400)),
    "valid for ever": (401, lambda i: i.token(exp=10**400)),
    "expiry as text": (401, lambda i: i.token(exp=str(int(time.time()) + 300))),
    "endless": (401, lambda i: i.token(exp=float("inf"))),
    "not valid yet": (401, lambda i: i.token(nbf=time.time() + 90)),
    "no subject": (401, lambda i: i.token(sub=None)),
    "no tenant": (403, lambda i: i.token(tenant=None)),
    "two tenants": (403, lambda i: i.token(tenant=["lab", "other"])),
    "an unlawful tenant": (403, lambda i: i.token(tenant="../lab")),
    "no scope": (403, lambda i: i.token(scope=None)),
    "scopes of other services": (403, lambda i: i.token(scope="openid admin")),
    "nested head": (401, lambda i: f"{encoded(b'[' * 5000)}.e30.e30"),
    "too long": (401, lambda i: i.token(more="x" * 9000)),
    "no JWT": (401, lambda i: "a.b.c"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_count_is_refused_and_audited(
    server: Server, issuer: Issuer, what: str
) -> None:
    expected, make = REFUSED[what]
    time.sleep(0.6)  # the log takes two refusals a second

    assert status(server, make(issuer)) == expected
    assert "why" in last_audit(server) and str(expected) in last_audit(server)


def test_leeway_covers_small_differences_of_clocks(server: Server, issuer: Issuer) -> None:
    assert status(server, issuer.token(exp=time.time() - 5, nbf=time.time() + 5)) == 200


def test_other_tokens_count_as_before(server: Server) -> None:
    made = subprocess.run(
        [*(sys.executable, "-m", "sonde", "token", "make", "--store", str(server.store)),
         *("--tenant", "lab", "--scope", "read")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert status(server, made.stdout.split()[1]) == 200
    assert status(server, "") == 401


def test_a_new_key_is_found_and_unknown_ones_cause_no_storm(server: Server, issuer: Issuer) -> None:
    assert status(server, issuer.token()) == 200
    time.sleep(oidc_keys.COOLDOWN_S + 0.5)
    issuer.keys["rsa2"] = Issuer.new_rsa()
    assert status(server, issuer.token("rsa2")) == 200
    before = len(issuer.requests)

    for number in range(50):
        unknown = issuer.token(f"rsa{number + 10}", key=issuer.keys["rsa"])
        assert status(server, unknown) == 401
    assert len(issuer.requests) <= before + 2
    assert status(server, issuer.token()) == 200


def test_keys_behind_a_redirect_are_not_fetched(issuer: Issuer, tmp_path: Path) -> None:
    other = Issuer()
    other.redirects_to = f"{issuer.url}/keys"
    before = len(issuer.requests)
    path = config(
        tmp_path, f'issuer = "{issuer.url}"\naudience = "sonde"\njwks = "{other.url}/keys"\n'
    )
    with Server(tmp_path / "store", "--oidc", str(path)) as server:
        assert status(server, issuer.token()) == 503
    assert len(issuer.requests) == before
    other.server.shutdown()


WRONG = {
    'issuer = "https://i"': "audience",
    'issuer = "http://example.org"\naudience = "s"': "use https",
    'issuer = "i"\naudience = "s"': "issuer is no URL",
    'issuer = "https://i"\naudience = "s"\nalgorithms = ["HS256"]': "HS256",
    'issuer = "https://i"\naudience = "s"\nalgorithms = ["none"]': "none",
    'issuer = "https://i"\naudience = "s"\nleeway_s = 9000.0': "leeway_s",
    'issuer = "https://i"\naudience = "s"\n[tenants]\na = "../b"': "no tenant",
    'issuer = "https://i"\naudience = "s"\n[scopes]\na = "root"': "root",
    'issuer = "https://i"\naudience = "s"\ncolour = 1': "colour",
    "=": "cannot be used",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_ends_the_start_with_cause_and_remedy(tmp_path: Path, text: str) -> None:
    path = config(tmp_path, text + "\n")
    done = subprocess.run(
        [*(sys.executable, "-m", "sonde", "serve", "--store", str(tmp_path / "store")),
         *("--listen", "127.0.0.1:0", "--oidc", str(path))],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 2
    assert WRONG[text] in done.stderr and "Traceback" not in done.stderr
