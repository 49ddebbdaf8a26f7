# SPDX-License-Identifier: Apache-2.0
"""The HTTP service: takes chunks, answers questions. docs/design/store.md"""
