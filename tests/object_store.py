# SPDX-License-Identifier: Apache-2.0
"""An object store on loopback: moto's S3, which can be stopped, and can keep uploads waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import pyarrow.fs as pafs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

BUCKET = "sonde"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIDOFTHETESTS",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests-alone",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "us-east-1",
}
"""What the environment must hold."""


class ObjectStore:
    """A server of the S3 protocol with one bucket, which outlives `stop` and `start`."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self.port = 0
        self.held = threading.Event()
        """Set once an upload waits."""
        self._lets_pass = threading.Event()
        self._lets_pass.set()
        self.start()
        self.files = pafs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            allow_bucket_creation=True,
            access_key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region=CREDENTIALS["AWS_REGION"],
        )
        self.files.create_dir(BUCKET)

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.let_pass()
        self.stop()

    def start(self) -> None:
        """Serve, where it did before."""
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self._server.port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def hold(self) -> None:
        """Keep every upload of a file of rows waiting."""
        self.held.clear()
        self._lets_pass.clear()

    def let_pass(self) -> None:
        """No longer."""
        self._lets_pass.set()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        is_upload = environ["REQUEST_METHOD"] == "PUT" and ".parquet" in environ["PATH_INFO"]
        if is_upload and not self._lets_pass.is_set():
            self.held.set()
            self._lets_pass.wait(60)
        found: Iterable[bytes] = self._app(environ, start)
        return found

    def uri(self, prefix: str) -> str:
        """What `sonde serve --bucket` takes."""
        return f"s3://{BUCKET}/{prefix}?endpoint_override=127.0.0.1:{self.port}&scheme=http"

    def names(self, prefix: str) -> list[str]:
        """The objects below a prefix, without it."""
        top = f"{BUCKET}/{prefix}"
        selector = pafs.FileSelector(top, recursive=True, allow_not_found=True)
        found = self.files.get_file_info(selector)
        return [one.path.removeprefix(f"{top}/") for one in found if one.is_file]
