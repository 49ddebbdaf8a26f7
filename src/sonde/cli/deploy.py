# SPDX-License-Identifier: Apache-2.0
"""`sonde deploy`: prints the manifests or scripts that install Sonde on a cluster."""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from urllib.parse import urlsplit

from sonde.errors import UsageError

EXAMPLE = """\
examples:
  sonde deploy k8s | kubectl apply -f -                                  metrics for Prometheus
  sonde deploy k8s --overlay may-attach --node-image REGISTRY/sonde-node:0.1.0
  sonde deploy slurm > /usr/local/bin/sonde-healthcheck

Prints to stdout, changes nothing. What else each needs: docs/guide/deployment.md.
"""
OVERLAYS = ("metrics-only", "may-attach")
"""Variants for Kubernetes: agents that export metrics; a server and agents that may attach."""
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_IMAGE = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_URL = re.compile(r"https://[A-Za-z0-9.:\[\]_/-]+")
_SERVER = re.compile(r"value: https://sonde-server\.[a-z0-9-]+\.svc:7373")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `deploy` to the commands."""
    parser = subparsers.add_parser(
        "deploy",
        help="print what installs Sonde on a cluster: Kubernetes, Slurm",
        description="Print manifests for Kubernetes, or the health check for Slurm.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", choices=("k8s", "slurm"))
    add("--overlay", metavar="NAME", help=f"k8s: {' or '.join(OVERLAYS)} (default: {OVERLAYS[0]})")
    add("--namespace", metavar="NAME", help="k8s: default sonde")
    add("--node-image", metavar="IMAGE", help="k8s: of the agent")
    add("--server-image", metavar="IMAGE", help="k8s: of the server")
    add("--server", metavar="URL",
        help="k8s, may-attach: where agents send; default the namespace's")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the manifests or the script. Raises UsageError."""
    given = ("overlay", "namespace", "node_image", "server_image", "server")
    if args.target == "slurm":
        for name in given:
            if getattr(args, name) is not None:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is for k8s alone", f"leave --{flag} out")
        print(_file("sonde-healthcheck"), end="")
        return 0
    print(_manifests(args), end="")
    return 0


def _manifests(args: argparse.Namespace) -> str:
    overlay = OVERLAYS[0] if args.overlay is None else args.overlay
    if overlay not in OVERLAYS:
        raise UsageError(
            f"no overlay is called {overlay!r}", f"choose one of {', '.join(OVERLAYS)}"
        )
    text = _file(f"{overlay}.yaml")
    for flag, value in (("--node-image", args.node_image), ("--server-image", args.server_image)):
        if value is not None:
            if not _IMAGE.fullmatch(value):
                raise UsageError(f"{flag} {value!r} is no image", "write REGISTRY/NAME:TAG")
            name = "sonde-node" if flag == "--node-image" else "sonde-server"
            if f"image: {name}:" not in text:
                raise UsageError(f"{overlay} has no {name}", "use --overlay may-attach")
            text = re.sub(rf"(?m)(image: ){name}:\S+$", rf"\g<1>{value}", text)
    if args.namespace is not None:
        text = _with_namespace(text, args.namespace)
    if args.server is not None:  # after it: a URL that was given stays as it is
        text = _with_server(text, args.server, overlay)
    return text


def _with_server(text: str, url: str, overlay: str) -> str:
    try:
        is_url = bool(_URL.fullmatch(url)) and bool(urlsplit(url).hostname)
        _ = urlsplit(url).port
    except ValueError:
        is_url = False
    if not is_url:
        raise UsageError(
            f"{url!r} is no server's URL", "write https://HOST:PORT; a token needs TLS"
        )
    if not _SERVER.search(text):
        raise UsageError(f"an agent of {overlay} sends nothing", "use --overlay may-attach")
    return _SERVER.sub(lambda _: f"value: {url}", text)


def _with_namespace(text: str, namespace: str) -> str:
    if not _NAMESPACE.fullmatch(namespace):
        raise UsageError(
            f"{namespace!r} cannot be a namespace",
            "use at most 63 small letters, digits and dashes",
        )
    text = text.replace("sonde-server.sonde.svc", f"sonde-server.{namespace}.svc")
    quoted = f'"{namespace}"'
    text = re.sub(r"(?m)^(\s*namespace: )sonde$", lambda it: it[1] + quoted, text)
    # The object Namespace itself, the only one that is called "sonde".
    return re.sub(r"(?m)^(  name: )sonde$", lambda it: it[1] + quoted, text)


def _file(name: str) -> str:
    return files("sonde.cli").joinpath("deploy_files", name).read_text(encoding="utf-8")
