# SPDX-License-Identifier: Apache-2.0
"""The status that rows of device calls have where the API's is not known."""

from __future__ import annotations

from typing import Final

STATUS_UNKNOWN: Final = -(2**31) + 1
"""CALL_STATUS_UNKNOWN of abi/events.h: the call was counted at its entry, since its return cannot
be seen without harm. It has no duration."""
