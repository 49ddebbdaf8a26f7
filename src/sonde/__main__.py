# SPDX-License-Identifier: Apache-2.0
"""`python -m sonde`.

With -m the interpreter looks for modules in the working directory first, which may be another
user's. That directory is removed from the search path here, before anything else is imported. A
package `sonde` in it would already have been run instead of this one; `python -P -m sonde` and the
program `sonde` do not search there at all.
"""

import sys

if not sys.flags.safe_path and sys.path and not __file__.startswith(f"{sys.path[0]}/sonde/"):
    del sys.path[0]

from sonde.cli.main import run

run()
