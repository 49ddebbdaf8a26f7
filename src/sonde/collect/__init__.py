# SPDX-License-Identifier: Apache-2.0
"""Collectors: each watches one concern of the node and hands over rows, tick by tick.

A collector knows what to attach and what its rows mean. It does not resolve addresses, does not
know processes by name and does not write: rows carry pids, stack ids and names of reasons or calls,
and `sonde.agent` joins them with what `sonde.resolve` knows.
"""
