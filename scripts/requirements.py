# SPDX-License-Identifier: Apache-2.0
"""Print the project's dependencies and those of the named extras, one a line, for pip."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    print(requirement)
for extra in sys.argv[1:]:
    for requirement in project["optional-dependencies"][extra]:
        print(requirement)
