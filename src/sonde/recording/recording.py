# SPDX-License-Identifier: Apache-2.0
"""A capture file, open for questions."""

from __future__ import annotations

import html
import importlib
import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.errors import MissingDependency, UsageError
from sonde.model.profile import ProfileKind
from sonde.model.verdict import Explained

if TYPE_CHECKING:
    import pyarrow as pa

    from sonde.model.answers import DeviceCalls, FunctionUse, Loss, ProcessUse, Usage, Wait
    from sonde.model.profile import Profile
    from sonde.model.verdict import Explanation
    from sonde.query.capture import Capture, CaptureInfo
    from sonde.query.queries import Where
    from sonde.query.session import Session

FORMATS = ("html", "pprof", "folded", "speedscope", "json", "table", "summary")
"""What `Recording.save` writes."""
_FRAME_PX = 640
"""Height of the page in a notebook."""


class Recording:
    """A capture file that was read into memory.

    Tables are those of docs/reference (abi/tables.json): `sample`, `activity`, `span`,
    `device_run`, `process`, `thread`, `usage`, `metric`, `event` and the dictionaries `stack` and
    `frame`. Times are nanoseconds of CLOCK_MONOTONIC. In Jupyter a recording shows its verdict and
    its flame graph.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Read a file. Raises CaptureError, MissingDependency."""
        try:
            from sonde.query.capture import read
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        self.capture: Capture = read(Path(path))

    @property
    def info(self) -> CaptureInfo:
        """When, where and how it was recorded, and how much of the file could be read."""
        return self.capture.info

    @property
    def tables(self) -> Mapping[str, pa.Table]:
        """Every table by its name, as Arrow."""
        return self.capture.tables

    def arrow(self, table: str) -> pa.Table:
        """One table as Arrow. Raises UsageError where there is none of that name."""
        if table not in self.tables:
            raise UsageError(f"there is no table {table}", f"choose of {', '.join(self.tables)}")
        return self.tables[table]

    def pandas(self, table: str) -> Any:
        """One table as a pandas.DataFrame. Raises UsageError, MissingDependency."""
        try:
            return self.arrow(table).to_pandas()
        except ModuleNotFoundError as error:
            raise _missing(error) from error

    def polars(self, table: str) -> Any:
        """One table as a polars.DataFrame. Raises UsageError, MissingDependency."""
        try:
            polars = importlib.import_module("polars")
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        return polars.from_arrow(self.arrow(table))

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """The answer of a query in DuckDB's SQL over the tables. Raises CaptureError."""
        return self._session.arrow(query, parameters)

    def profile(
        self, kind: ProfileKind | str = ProfileKind.ON_CPU, where: Where | None = None
    ) -> Profile:
        """Weighted stacks of one kind, heaviest first. Raises UsageError for an unknown kind."""
        from sonde.query import queries

        return queries.profile(self._session, _kind(kind), where or queries.EVERYTHING)

    def functions(
        self,
        kind: ProfileKind | str = ProfileKind.ON_CPU,
        limit: int = 20,
        where: Where | None = None,
    ) -> list[FunctionUse]:
        """The functions with the largest self time; `limit` 0 returns all."""
        from sonde.query import queries

        everything = where or queries.EVERYTHING
        return [*queries.top_functions(self._session, _kind(kind), everything, limit)]

    def processes(self) -> list[ProcessUse]:
        """What each process did, most time on a CPU first."""
        from sonde.query import queries

        return [*queries.processes(self._session)]

    def usage(self) -> list[Usage]:
        """What each process used by the kernel's own counters."""
        from sonde.query import queries

        return [*queries.usage(self._session)]

    def waits(self) -> list[Wait]:
        """Every thread's waits by reason, the longest total first."""
        from sonde.query import queries

        return [*queries.waits(self._session)]

    def device_calls(self) -> list[DeviceCalls]:
        """Calls of device APIs by process and function."""
        from sonde.query import queries

        return queries.device_calls(self._session)

    def losses(self) -> list[Loss]:
        """What could not be recorded."""
        from sonde.query import queries

        return queries.losses(self._session)

    @cached_property
    def explanation(self) -> Explanation:
        """What limited the work, with shares of the time and evidence."""
        from sonde.analyze.bound import explain
        from sonde.recording.timelines import timeline_of

        return explain(timeline_of(self.capture))

    @property
    def verdict(self) -> str:
        """The explanation in some lines of text; '' where there is nothing to explain."""
        from sonde.export import verdict

        return verdict.headline(self.explanation)

    def summary(self) -> str:
        """One screen, as `sonde record` prints it."""
        from sonde.export import summary

        return summary.render(self._session)

    def save(self, path: str | PathLike[str], format: str = "html") -> Path:
        """Write it in another format, one of `FORMATS`; the file is private to its owner.

        Raises UsageError for an unknown format, SinkError where the file cannot be written.
        """
        from sonde.private_files import replacing

        if format not in FORMATS:
            raise UsageError(f"there is no format {format}", f"choose of {', '.join(FORMATS)}")
        more = {"explained": Explained(self.explanation)} if format == "html" else {}
        with replacing(Path(path)) as out:
            _exporter(format).write(self._session, out=out, **more)
        return Path(path)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        rows = self.tables["sample"].num_rows
        return f"<Recording {self.info.path}: {self.info.duration_ns / 1e9:.3g} s, {rows:,} rows>"

    def _repr_html_(self) -> str:
        """For Jupyter: the verdict above the page of `sonde report`, which is in an iframe."""
        page = io.BytesIO()
        _exporter("html").write(self._session, out=page)
        text = f"<pre>{html.escape(self.verdict)}</pre>" if self.verdict else ""
        source = html.escape(page.getvalue().decode())
        # The frame has a separate origin: the page's code cannot reach the notebook.
        return (
            f'{text}<iframe sandbox="allow-scripts" srcdoc="{source}" '
            f'style="width: 100%; height: {_FRAME_PX}px; border: 0"></iframe>'
        )

    @cached_property
    def _session(self) -> Session:
        from sonde.query.session import Session

        return Session(self.capture)


def _exporter(name: str) -> Any:
    from sonde.export import folded, html, json_report, pprof, speedscope, summary, table

    return {
        "html": html,
        "pprof": pprof,
        "folded": folded,
        "speedscope": speedscope,
        "json": json_report,
        "table": table,
        "summary": summary,
    }[name]


def _kind(kind: ProfileKind | str) -> ProfileKind:
    try:
        return ProfileKind(kind)
    except ValueError:
        raise UsageError(
            f"there is no profile {kind}", f"choose of {', '.join(ProfileKind)}"
        ) from None


def _missing(error: ModuleNotFoundError) -> MissingDependency:
    return MissingDependency(
        f"the Python package {error.name} is not installed", f"run: pip install {error.name}"
    )
