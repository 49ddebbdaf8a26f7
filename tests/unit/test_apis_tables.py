# SPDX-License-Identifier: Apache-2.0
"""The tables of device APIs against the vendors' public headers and against the kernel side."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
from pathlib import Path

import pytest

from sonde import apis
from sonde.apis.model import Reading
from sonde.apis.parse import parse
from sonde.errors import UsageError

ROOT = Path(__file__).parents[2]


def cuda_headers() -> Path | None:
    for packages in site.getsitepackages():
        found = Path(packages) / "nvidia/cu13/include"
        if found.exists():
            return found
    return None


def prototypes(header: Path) -> dict[str, list[str]]:
    """Names of the parameters of every function that a header declares."""
    text = header.read_text(errors="replace")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    # A callback parameter is known by its name; defaults are C++.
    text = re.sub(r"\(\s*(?:CL_CALLBACK)?\s*\*\s*(\w+)\s*\)\s*\([^()]*\)", r" \1", text)
    text = re.sub(r"__dv\([^()]*\)", "", text)
    found = {}
    declared = r"\b((?:cuda|cu|cl|nvrtc)[A-Z]\w*)\s*\(([^()]*)\)\s*(?:CL_\w+\s*)*;"
    for match in re.finditer(declared, text):
        parameters = [part.partition("=")[0].strip() for part in match[2].split(",")]
        names = [re.sub(r"\[.*\]$", "", part).split()[-1].strip("*") for part in parameters if part]
        found.setdefault(match[1], [name for name in names if name != "void"])
    return found


def calls(name: str):
    [api] = [api for api in apis.load() if api.name == name]
    return api.calls


def test_every_opencl_call_has_the_arguments_of_the_header():
    header = Path("/usr/include/CL/cl.h")
    if not header.exists():
        pytest.skip("needs opencl-headers")
    declared = prototypes(header)
    for call in calls("opencl"):
        assert list(call.arguments) == declared[call.function], call.function


@pytest.mark.parametrize(
    ("api", "header"), [("cuda-runtime", "cuda_runtime_api.h"), ("cuda-driver", "cuda.h")]
)
def test_every_cuda_call_has_the_arguments_of_the_header(api, header):
    """As many as are described: what follows the last one that is read may differ by version."""
    headers = cuda_headers()
    if headers is None:
        pytest.skip("needs the wheel nvidia-cuda-runtime")
    declared = prototypes(headers / header)
    missing = set()
    for call in calls(api):
        names = list(call.arguments)
        if call.function not in declared:
            missing.add(call.function)
            continue
        assert declared[call.function][: len(names)] == names, call.function
    # Still in the libraries, no longer in the headers of CUDA 13.
    assert missing <= {"cuGraphInstantiateWithFlags"}, missing


STRUCTS = """
#include <stddef.h>
#include <stdio.h>
#include <cuda.h>
#include <driver_types.h>
#define AT(type, field) printf("%s.%s %zu\\n", #type, #field, offsetof(type, field))
typedef struct cudaMemcpy3DParms runtime3d;
typedef struct cudaMemcpy3DPeerParms peer3d;
int main(void)
{
	AT(runtime3d, extent); AT(runtime3d, kind); AT(peer3d, extent);
	AT(CUDA_MEMCPY2D, srcMemoryType); AT(CUDA_MEMCPY2D, dstMemoryType);
	AT(CUDA_MEMCPY2D, WidthInBytes); AT(CUDA_MEMCPY3D, WidthInBytes);
	AT(CUDA_MEMCPY3D, srcMemoryType); AT(CUDA_MEMCPY3D, dstMemoryType);
	AT(CUDA_MEMCPY3D_PEER, WidthInBytes);
	printf("kinds %d %d %d %d %d\\n", cudaMemcpyHostToHost, cudaMemcpyHostToDevice,
		cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault);
	printf("types %d %d %d\\n", CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_ARRAY);
	return 0;
}
"""


def test_offsets_and_numbers_are_those_of_cudas_headers(tmp_path):
    headers = cuda_headers()
    if headers is None or not (headers / "crt/host_defines.h").exists() or not shutil.which("cc"):
        pytest.skip("needs the wheels nvidia-cuda-runtime and nvidia-cuda-crt, and a C compiler")
    (tmp_path / "structs.c").write_text(STRUCTS)
    built = ["cc", f"-I{headers}", str(tmp_path / "structs.c"), "-o", str(tmp_path / "structs")]
    subprocess.run(built, check=True)
    lines = subprocess.check_output([str(tmp_path / "structs")], text=True).splitlines()
    at = {name: [int(value) for value in values] for name, *values in map(str.split, lines)}
    described = {call.function: call for api in apis.load() for call in api.calls}

    def vector(function):
        return described[function].reading.vector_at

    def ends(function):
        return list(described[function].reading.direction_at)

    assert [vector("cudaMemcpy3D")] == at["runtime3d.extent"]
    assert ends("cudaMemcpy3D") == at["runtime3d.kind"]
    assert [vector("cudaMemcpy3DPeer")] == at["peer3d.extent"]
    for rank, function in (("2D", "cuMemcpy2D"), ("3D", "cuMemcpy3D")):
        struct = f"CUDA_MEMCPY{rank}"
        assert [vector(function)] == at[f"{struct}.WidthInBytes"]
        assert ends(function) == at[f"{struct}.srcMemoryType"] + at[f"{struct}.dstMemoryType"]
    assert [vector("cuMemcpy3DPeer")] == at["CUDA_MEMCPY3D_PEER.WidthInBytes"]
    names = [described["cudaMemcpy"].direction_of(number) for number in at["kinds"]]
    assert names == ["h2h", "h2d", "d2h", "d2d", "unknown"]
    host, device, array = at["types"]
    between = described["cuMemcpy2D"].direction_of
    assert between(host << 8 | device) == "h2d"
    assert between(array << 8 | host) == "d2h"
    assert between(device << 8 | array) == "d2d"


def test_the_packed_reading_is_the_struct_of_the_kernel_side(tmp_path):
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    reading = Reading(
        size_args=(1, 2, 3),
        vector_arg=4,
        vector_at=515,
        vector_len=3,
        scale=70000,
        direction_arg=5,
        direction_at=(600, 700),
        direction_mask=0x12345678,
        blocking_arg=6,
        status_arg=7,
        result="handle",
    )
    (tmp_path / "spec.bin").write_bytes(reading.packed())
    initial = """.size_arg = {1, 2, 3}, .vector_arg = 4, .vector_at = 515, .vector_len = 3,
		.scale = 70000, .direction_arg = 5, .direction_len = 2, .direction_at = {600, 700},
		.direction_mask = 0x12345678, .blocking_arg = 6, .status_arg = 7,
		.result = RESULT_HANDLE"""
    (tmp_path / "spec.c").write_text(
        f"""
#include <linux/types.h>
#include <stdio.h>
#include <string.h>
#include "{ROOT}/abi/events.h"
int main(void)
{{
	struct call_spec want, got;
	FILE *f = fopen("{tmp_path}/spec.bin", "rb");
	memset(&want, 0, sizeof(want));
	want = (struct call_spec){{{initial}}};
	if (fread(&got, 1, sizeof(got), f) != sizeof(got) || fgetc(f) != EOF)
		return 1;
	return memcmp(&want, &got, sizeof(got)) != 0;
}}
"""
    )
    subprocess.run(["cc", str(tmp_path / "spec.c"), "-o", str(tmp_path / "spec")], check=True)
    assert subprocess.run([str(tmp_path / "spec")]).returncode == 0


TABLE = """
api = "test"
libraries = ["libtest.so*"]
[directions.kind]
1 = "h2d"
"2,1" = "d2h"
[[call]]
function = "copy"
suffixes = ["_v2", "_v3"]
arguments = "a b c d e f g cube:3 h"
op = "copy"
"""


@pytest.mark.parametrize(
    ("machine", "line", "expected"),
    [
        ("x86_64", 'bytes = "f"', (5,)),
        ("x86_64", 'bytes = "g"', (6,)),
        ("x86_64", 'bytes = ["cube.0", "cube.2", "h"]', (7, 9, 10)),
        ("aarch64", 'bytes = "h"', (8,)),
        ("aarch64", 'bytes = ["cube.0", "cube.2"]', ()),
    ],
)
def test_numbers_arguments_as_the_machine_passes_them(machine, line, expected):
    [call] = parse(TABLE + line, "test.toml", machine).calls
    assert call.reading.size_args == expected
    assert call.symbols == ("copy_v2", "copy_v3")


def test_reads_directions_by_number_and_by_both_ends():
    [call] = parse(
        TABLE + 'direction = { of = "a", by = "kind", at = [8, 16] }', "t", "x86_64"
    ).calls
    assert call.direction_of(1) == "h2d"
    assert call.direction_of(2 << 8 | 1) == "d2h"
    assert call.direction_of(77) == "unknown"
    assert call.reading.direction_at == (8, 16)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("not toml [", "no TOML"),
        ('api = "x"', "libraries is a list"),
        ('api = "x"\nlibraries = ["a"]', "no [[call]]"),
        (TABLE + "colour = 3", "unknown key 'colour'"),
        (TABLE + 'bytes = "nothing"', "'nothing' is none of its arguments"),
        (TABLE + 'bytes = ["a", "b", "c", "d"]', "up to three"),
        (TABLE + 'bytes = { of = "a", words = 4 }', "bytes.words is 1, 2 or 3"),
        (TABLE + 'bytes = { of = "a", words = 3, at = -1 }', "no offset"),
        (TABLE + 'bytes = { of = "a", words = 3, stride = 2 }', "unknown key 'stride'"),
        (TABLE + "scale = 4", "scale goes with bytes"),
        (TABLE + 'bytes = "a"\nscale = 0', "scale is a positive number"),
        (TABLE + 'direction = "up"', "direction is one of"),
        (TABLE + 'direction = { of = "a", by = "kinds" }', "no [directions.kinds]"),
        (TABLE + 'direction = { of = "z", by = "kind" }', "'z' is none of its arguments"),
        (TABLE + 'direction = { of = "a", by = "kind", at = [1, 2, 3] }', "one or two offsets"),
        (TABLE + 'direction = { of = "a", by = "kind", mask = 0 }', "mask"),
        (TABLE + "blocking = 3", "blocking is an argument or true"),
        (TABLE + 'result = "number"', "result is one of"),
        (TABLE + 'status = "a"', "status goes with"),
        (TABLE.replace('op = "copy"', 'op = "move"'), "op is one of"),
        (TABLE.replace('1 = "h2d"', 'one = "h2d"'), "no number"),
        (TABLE.replace('1 = "h2d"', '1 = "up"'), "no direction 'up'"),
        (TABLE.replace("a b c", "a a c"), "no new argument"),
        (TABLE.replace("cube:3", "cube:2"), "three or more"),
        (TABLE.replace('suffixes = ["_v2", "_v3"]', 'suffixes = "_v2"'), "list of texts"),
        (TABLE.replace('api = "test"', 'api = "test"\nverified = 1'), "verified is true or false"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(text, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)) as refused:
        parse(text, "wrong.toml", "x86_64")
    assert "wrong.toml" in str(refused.value)


def test_tables_of_the_operator_are_added_and_may_not_repeat_a_symbol(tmp_path):
    (tmp_path / "own.toml").write_text(TABLE)
    assert "test" in {api.name for api in apis.load(tmp_path)}
    (tmp_path / "own.toml").write_text(
        TABLE.replace('"copy"\nsuff', '"cudaMalloc"\nsuff').replace("_v2", "")
    )
    with pytest.raises(UsageError, match="cudaMalloc is described twice"):
        apis.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "api"),
    [
        ("libOpenCL.so.1.0.0", "opencl"),
        ("libOpenCL-5519dec5.so.1.0.0", "opencl"),
        ("libcudart.so.13.0.96", "cuda-runtime"),
        ("libcudart-d0da41ae.so.11.0", "cuda-runtime"),
        ("libcuda.so.580.159.03", "cuda-driver"),
        ("libnvrtc.so.13", "nvrtc"),
    ],
)
def test_knows_libraries_by_the_names_they_are_shipped_under(file, api):
    assert [one.name for one in apis.load() if one.is_library(file)] == [api]
