# SPDX-License-Identifier: Apache-2.0
"""Typed questions to stored observations, asked as SQL that an embedded engine answers.

`capture` reads a `.sonde` file into columnar tables, `questions` asks them.
"""
