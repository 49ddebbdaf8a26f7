# SPDX-License-Identifier: Apache-2.0
"""`python -m sonde`."""

import sys

from sonde.cli.main import main

sys.exit(main())
