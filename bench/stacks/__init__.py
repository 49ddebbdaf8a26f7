# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.stacks`: which share of user stacks reaches the thread's entry, tool by tool.

All tools watch the same process over the same seconds. A stack counts as whole where its outermost
user frame lies in code that threads begin in, recognized by address, by one rule for every tool
(`entries`). py-spy sees Python frames alone: there the outermost one is the module's, or the
thread's bootstrap.
"""
