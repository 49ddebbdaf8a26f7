# SPDX-License-Identifier: Apache-2.0
"""Many simulated agents against one server, with a recount at the end."""
