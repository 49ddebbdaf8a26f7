# SPDX-License-Identifier: Apache-2.0
"""Traces of torch.profiler: what is read of them, and what is reported of those that cannot be."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import tracemalloc

import pytest

from sonde.cli import main as cli
from sonde.errors import CaptureError, NotACapture
from sonde.model.causes import Bound
from sonde.model.collectives import is_collective
from sonde.model.timeline import CallKind, CopyDirection, DeviceKind, HostKind, Memory
from sonde.readers import kineto, kineto_head
from sonde.readers.calls import call_kind

KERNEL = {
    "ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 100.5, "dur": 2.25,
    "args": {"device": 0, "stream": 7, "correlation": 5, "grid": [4, 3, 2]},
}  # fmt: skip
LAUNCH = {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 10,
    "ts": 90.0, "dur": 4.0, "args": {"correlation": 5},
}  # fmt: skip
COPY = {
    "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0,
    "tid": 7, "ts": 120, "dur": 3, "args": {"device": 0, "stream": 7, "bytes": 4096},
}  # fmt: skip
PYTHON = {
    "ph": "X", "cat": "python_function", "name": "/home/me/src/train.py(8): step", "pid": 9,
    "tid": 10, "ts": 80, "dur": 50, "args": {},
}  # fmt: skip
NAME = {"ph": "M", "name": "thread_name", "pid": 9, "tid": 10, "args": {"name": "thread 10 (pt)"}}

PIECES_BYTES = 24 << 20
"""Memory of pieces of a text while it is read."""


def document(*events: dict) -> dict:
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
        "baseTimeNanoseconds": 1_790_000_000_000_000_000,
        "traceEvents": list(events),
    }


def written(tmp_path, content, name: str = "trace.json"):
    path = tmp_path / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "no_suffix"])
def test_a_trace_is_read(tmp_path, name):
    path = written(tmp_path, document(KERNEL, LAUNCH, COPY, PYTHON, NAME), name)
    timeline = kineto.read(path)

    kernel, copy = timeline.device.take(slice(0, 1)), timeline.device.take(slice(1, 2))
    assert (kernel.start_ns[0], kernel.end_ns[0]) == (100_500, 102_750)
    assert kernel.kind[0] == DeviceKind.KERNEL
    assert kernel.blocks[0] == 24
    assert timeline.names[kernel.name[0]] == "gemm"
    assert (copy.direction[0], copy.memory[0], copy.bytes[0]) == (
        CopyDirection.H2D,
        Memory.PAGEABLE,
        4096,
    )
    assert timeline.calls.kind[0] == CallKind.LAUNCH
    assert timeline.calls.correlation[0] == kernel.correlation[0] == 5
    assert timeline.host.kind[0] == HostKind.PYTHON
    assert timeline.tracks[timeline.calls.track[0]].label == "pt (10)"
    assert timeline.wall_offset_ns == 1_790_000_000_000_000_000
    assert timeline.devices == {0: "NVIDIA H200"}
    assert timeline.multiprocessors == {0: 132}


def test_a_device_is_known_by_its_uuid_and_address_where_the_trace_has_them(tmp_path):
    trace = document(KERNEL)
    trace["deviceProperties"][0] |= {"uuid": "GPU-0a1b", "pciBusID": 27, "pciDeviceID": 0}

    assert kineto.read(written(tmp_path, trace)).device_ids == {0: ["GPU-0a1b", "0000:1b:00.0"]}
    assert not kineto.read(written(tmp_path, document(KERNEL))).device_ids


@pytest.mark.parametrize("filling", ['{"a": [{}, 1.5, "é\\n"]}', "[[[[]]]]", '"\U0001f600"'])
def test_a_head_of_megabytes_is_skipped_but_for_devices_and_clock(tmp_path, filling):
    text = json.dumps(document(KERNEL))
    listed = ",".join([filling] * (3_000_000 // len(filling)))
    path = written(tmp_path, f'{{"distributedInfo": [{listed}], {text[1:]}')
    tracemalloc.start()
    timeline = kineto.read(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert timeline.devices == {0: "NVIDIA H200"}
    assert timeline.multiprocessors == {0: 132}
    assert timeline.wall_offset_ns == 1_790_000_000_000_000_000
    assert peak_bytes < kineto_head.CHAR_BYTES * 3_000_000 + PIECES_BYTES


@pytest.mark.parametrize("count", [100_000, 400_000])
def test_a_list_of_devices_is_read_up_to_a_length_and_a_number(tmp_path, count):
    trace = document(KERNEL)
    trace["deviceProperties"] = [{"id": n % 1000, "name": {}} for n in range(count // 20)]
    trace["deviceProperties"] += trace["deviceProperties"][:1000] + [{}] * count
    timeline = kineto.read(written(tmp_path, trace))
    assert len(timeline.device) == 1
    assert len(timeline.devices) == (kineto_head.MAX_DEVICES if count == 100_000 else 0)


@pytest.mark.parametrize(
    "head", ['"a": NaN', '"a": 1e999', '"a": "\\ud800"', '"a": 1, "a": 2', '"a": {"id": [null]}']
)
def test_a_head_is_read_that_has_what_json_may_have(tmp_path, head):
    path = written(tmp_path, f"{{{head}, {json.dumps(document(KERNEL))[1:]}")
    assert kineto.read(path).devices == {0: "NVIDIA H200"}


@pytest.mark.parametrize("head", ['"a": tru', '"a" 1', "7", '"deviceProperties": 5'])
@pytest.mark.parametrize("size", [0, 2_000_000])
def test_events_behind_a_malformed_head_are_read(tmp_path, head, size):
    path = written(
        tmp_path, f'{{"b": "{"x" * size}", {head}, "traceEvents": [{json.dumps(KERNEL)}]}}'
    )
    timeline = kineto.read(path)
    assert len(timeline.device) == 1
    assert timeline.devices == {}


def test_where_a_file_lies_is_not_kept(tmp_path):
    timeline = kineto.read(written(tmp_path, document(KERNEL, PYTHON)))
    assert timeline.names[timeline.host.name[0]] == "train.py(8): step"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("/a/site-packages/torch/nn/functional.py(3): relu", "torch/nn/functional.py(3): relu"),
        ("/usr/lib/python3.12/threading.py(7): wait", "threading.py(7): wait"),
        ("<built-in method item of X at 0x7f00>", "<built-in method item of X>"),
        ("torch/a.py(1): b", "torch/a.py(1): b"),
    ],
)  # fmt: skip
def test_names_of_python_frames(name, kept):
    assert kineto.without_path(name) == kept


def test_a_bare_list_of_events_is_read_too(tmp_path):
    assert len(kineto.read(written(tmp_path, json.dumps([KERNEL, LAUNCH]))).device) == 1


def test_a_cut_file_is_read_up_to_there(tmp_path):
    whole = json.dumps(document(KERNEL, LAUNCH, *[COPY] * 50))
    timeline = kineto.read(written(tmp_path, whole[: len(whole) - 300]))

    assert 40 < len(timeline.device) < 51
    assert "truncated" in timeline.notes[0]


def test_events_without_a_time_are_counted(tmp_path):
    lost = {**KERNEL, "ts": 0.0, "dur": 0.0}
    timeline = kineto.read(written(tmp_path, document(KERNEL, lost, lost)))

    assert len(timeline.device) == 1
    assert timeline.notes == ["2 events without a time"]


def test_events_that_make_no_sense_are_counted(tmp_path):
    odd = [{**KERNEL, "ts": "soon"}, {**KERNEL, "args": 3}, {"ph": "X", "cat": "kernel"}]
    timeline = kineto.read(written(tmp_path, document(KERNEL, *odd)))

    assert len(timeline.device) == 1
    assert timeline.notes == ["3 events not understood"]


@pytest.mark.parametrize(
    "content",
    ["", "hello", "{}", "[]", '{"traceEvents": []}', '{"traceEvents": 5}', '{"a": [1, 2]}'],
)
def test_other_files_are_refused(tmp_path, content):
    with pytest.raises(NotACapture):
        kineto.read(written(tmp_path, content))


def test_a_damaged_archive_is_refused(tmp_path):
    path = written(tmp_path, document(*[COPY] * 500), "trace.json.gz")
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(CaptureError, match="damaged"):
        kineto.read(path)


def test_bytes_at_random_never_get_through_as_anything_but_an_error(tmp_path):
    rng = random.Random(5)
    whole = json.dumps(document(KERNEL, LAUNCH, COPY, PYTHON, NAME)).encode()
    path = tmp_path / "t.json"
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(CaptureError):
            kineto.read(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaLaunchKernel", CallKind.LAUNCH),
        ("cuLaunchKernelEx", CallKind.LAUNCH),
        ("cudaGraphLaunch", CallKind.GRAPH_LAUNCH),
        ("cudaMemcpyAsync", CallKind.COPY),
        ("cudaMemsetAsync", CallKind.SET),
        ("cudaStreamSynchronize", CallKind.SYNC),
        ("cudaDeviceSynchronize", CallKind.SYNC),
        ("cudaStreamWaitEvent", CallKind.EVENT),
        ("cudaMalloc", CallKind.ALLOC),
        ("cudaFree", CallKind.FREE),
        ("cudaHostRegister", CallKind.PIN),
        ("hipLaunchKernel", CallKind.LAUNCH),
        ("cudaStreamIsCapturing", CallKind.OTHER),
    ],
)
def test_calls_are_known_by_name(name, kind):
    assert call_kind(name) == kind


def test_collectives_are_known_by_name():
    assert is_collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    assert is_collective("ncclDevKernel_AllGather_TREE_LL128(ncclDevKernelArgsStorage<4096ul>)")
    assert is_collective("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>")
    assert is_collective("nvshmemi_transfer_rma_p")
    assert is_collective("void deep_ep::intranode::dispatch<8, 768, 8192>")
    assert not is_collective("void at::native::vectorized_gather_kernel<16, long>")
    assert not is_collective("barrier_free_gemm")
    assert not is_collective("void at::native::reduce_kernel<512, 1>")


class TestCommand:
    def test_a_verdict_as_text_and_as_json(self, tmp_path, capsys):
        events = []
        for step in range(20):
            at = 1000.0 * step + 100
            events.append(
                {
                    **KERNEL,
                    "ts": at,
                    "dur": 100,
                    "args": {**KERNEL["args"], "correlation": step + 1},
                }
            )
            events.append({**LAUNCH, "ts": at - 5, "args": {"correlation": step + 1}})
            events.append({**PYTHON, "ts": at + 10, "dur": 900})
        path = str(written(tmp_path, document(*events)))

        assert cli.main(["explain", path]) == 0
        output = capsys.readouterr().out
        assert "host-bound: Python/C++ code between launches" in output
        assert "step train.py:8" in output
        assert cli.main(["explain", path, "--json"]) == 0
        (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
        assert verdict["bound"] == Bound.HOST
        assert verdict["steps"]["median_ns"] == 1_000_000
        assert cli.main(["explain", path, "--steps", "3"]) == 0
        assert "…" in capsys.readouterr().out  # fmt: skip

    @pytest.mark.parametrize("content", ["hello", "{}"])
    def test_a_foreign_file_is_one_clear_line(self, tmp_path, content, capsys):
        assert cli.main(["explain", str(written(tmp_path, content))]) == 1
        output = capsys.readouterr().err
        assert output.startswith("sonde: ")
        assert "remedy: " in output
        assert "Traceback" not in output

    def test_no_file(self, tmp_path, capsys):
        assert cli.main(["explain", str(tmp_path / "none")]) == 1
        assert "does not exist" in capsys.readouterr().err
