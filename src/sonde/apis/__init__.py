# SPDX-License-Identifier: Apache-2.0
"""Device APIs as data: which functions of which libraries do what, and how to read a call.

One TOML file for each API. To add a call, add a table to a file:

```toml
[[call]]
function = "cuMemcpyHtoD"                  # the name in tables, graphs and rows
suffixes = ["_v2", "_v2_ptds"]             # symbols: function + suffix; [""] if left out
arguments = "dstDevice srcHost ByteCount"  # as in the header; NAME:N: a struct by value, of N words
                                           # (8 bytes each), 3 or more: smaller ones are in
                                           # registers
op = "copy"                                # one of OPS
bytes = "ByteCount"                        # an argument, or NAME.WORD of a struct; a list of up to
                                           # three to multiply; or
                                           # { of = POINTER, at = OFFSET, words = N }: the product
                                           # of N numbers in memory, 1 to 3
scale = 4                                  # bytes per unit of that
direction = "h2d"                          # fixed; or { of = ARGUMENT, by = TABLE, mask = M }; or
                                           # { of = POINTER, at = [OFFSET, …], by = TABLE }, with a
                                           # [directions.TABLE] that has the API's numbers
blocking = "blocking_read"                 # the call waits: an argument that decides it, or true
result = "handle"                          # "status" if left out; or "none"
status = "errcode_ret"                     # pointer through which a handle's status comes back
calls_back = true                          # may call functions of its caller: counted at the entry
```

Size arguments are 64 bits wide (size_t) in all these APIs.

Terms:
- api: the functions of one library (cuda, hip, opencl, …)
- op: what a call does, the same for all apis (launch, copy, alloc, …)
- handle: what a call returns where it returns no status: an object, or a pointer to memory
- reading: how the BPF programs read a call: in which argument the size, the handle, … are
"""

from sonde.apis.model import DIRECTIONS, OPS, Api, Call
from sonde.apis.parse import load, parse

__all__ = ["DIRECTIONS", "OPS", "Api", "Call", "load", "parse"]
