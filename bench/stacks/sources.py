# SPDX-License-Identifier: Apache-2.0
"""The source texts of programs with known call trees (`trees`)."""

from __future__ import annotations

from bench.stacks.trees import THREADS, Node, Tree, nodes

_CPP = """\
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <pthread.h>

#define KEPT extern "C" __attribute__((noinline, noclone))

static volatile long sink;

KEPT long spin(long n)
{
	long s = 0;
	for (long i = 0; i < n; i++)
		s += i ^ (s << 1), sink = s;
	return s;
}
"""
_CPP_MAIN = """
KEPT void *thread_entry(void *)
{
	for (;;)
		%s(%d);
}

int main()
{
	pthread_t thread;
	pthread_create(&thread, nullptr, thread_entry, nullptr);
	puts("ready");
	fflush(stdout);
	for (;;)
		%s(%d);
}
"""
_PYTHON = """\
import functools
import sys
import threading


def spin(n):
    total = 0
    for i in range(n):
        total += i * i
    return total

"""
_PYTHON_MAIN = """
def thread_entry():
    while True:
        {}({})


def main():
    threading.Thread(target=thread_entry, daemon=True).start()
    print("ready", flush=True)
    while True:
        {}({})


main()
"""
_CTYPES = """\
import ctypes

LIB = ctypes.CDLL(sys.argv[1])
CALLBACK = ctypes.CFUNCTYPE(None)

"""
NATIVE_SPIN = 3000
PYTHON_SPIN = 150


def native(tree: Tree) -> str:
    """A program in C++."""
    text = _CPP
    for node in nodes(tree):
        text += f"KEPT long {node.name}(long depth);\n"
    for thread, root in enumerate(tree.roots):
        waiting = [root]
        while waiting:
            node = waiting.pop()
            text += _native_function(node, "SIGUSR1" if thread == 0 else "SIGUSR2")
            waiting += node.children
    first, second = tree.roots[:THREADS]
    return text + _CPP_MAIN % (second.name, second.depth, first.name, first.depth)


def _native_calls(node: Node) -> str:
    calls = "".join(f"\tsink = sink + {it.name}({it.depth});\n" for it in node.children)
    return calls + f"\tspin({200 if node.children else NATIVE_SPIN});\n"


def _native_function(node: Node, signal: str) -> str:
    calls, before, body = _native_calls(node), "", ""
    if node.kind == "wide":
        body = "\tvolatile char *room = (char *)__builtin_alloca(100 + (sink & 1023));\n"
        body += "\troom[99] = 1;\n" + calls + "\tsink = sink + room[99];\n"
    elif node.kind == "aligned":
        body = "\talignas(128) volatile char room[128];\n\troom[sink & 127] = 1;\n"
        body += calls + "\tsink = sink + room[sink & 127];\n"
    elif node.kind == "large":
        body = "\tvolatile char room[9000];\n\troom[sink & 8191] = 1;\n"
        body += calls + "\tsink = sink + room[sink & 8191];\n"
    elif node.kind == "catches":
        body = "\ttry {\n" + calls + "\t\tif (sink != 1)\n\t\t\tthrow 1;\n"
        body += "\t} catch (int) {\n\t\tspin(200);\n\t}\n"
    elif node.kind == "sorts":
        before = f"KEPT int {node.name}_by(const void *a, const void *b)\n{{\n{calls}"
        before += "\treturn *(const int *)a - *(const int *)b;\n}\n"
        body = f"\tint values[2] = {{2, 1}};\n\tqsort(values, 2, sizeof(int), {node.name}_by);\n"
        body += "\tsink = sink + values[0];\n"
    elif node.kind == "signals":
        before = f"KEPT void {node.name}_on(int)\n{{\n{calls}\tsink = 1;\n}}\n"
        body = f"\tsignal({signal}, {node.name}_on);\n\traise({signal});\n"
    else:
        body = calls
    recursion = f"\tif (depth) {{\n\t\tlong below = {node.name}(depth - 1);\n"
    recursion += "\t\tsink = below;\n\t\treturn below + 1;\n\t}\n" if node.depth else ""
    return (
        f"\n{before}KEPT long {node.name}(long depth)\n{{\n"
        f"{recursion if node.depth else ''}{body}\treturn sink;\n}}\n"
    )


def python(tree: Tree) -> str:
    """A program in Python; where it calls native code, the path of `library` is its argument."""
    mixed = any(node.kind == "calls" for node in nodes(tree))
    text = _PYTHON + (_CTYPES if mixed else "")
    text += "".join(_python_function(node) for node in nodes(tree))
    first, second = tree.roots[:THREADS]
    return text + _PYTHON_MAIN.format(second.name, second.depth, first.name, first.depth)


def library(tree: Tree) -> str:
    """What it calls, in C++."""
    text = _CPP
    for node in nodes(tree):
        if node.kind == "calls":
            text += f"""
KEPT long {node.name}_c(long depth, void (*back)())
{{
	if (depth) {{
		long below = {node.name}_c(depth - 1, back);
		sink = below;
		return below + 1;
	}}
	back();
	sink = 1;
	return 1;
}}
"""
    return text


def _python_function(node: Node) -> str:
    calls = [f"{it.name}({it.depth})" for it in node.children]
    calls.append(f"spin({10 if node.children else PYTHON_SPIN})")
    body = "".join(f"    {call}\n" for call in calls)
    head = f"\ndef {node.name}(depth):\n"
    if node.depth:
        head += f"    if depth:\n        return {node.name}(depth - 1)\n"
    between = node.between[-1] if node.between else ""
    if node.kind == "sorts":
        more = f"\ndef {between}(x):\n{body}    return x\n\n"
        return more + head + f"    return sorted(range(2), key={between})\n"
    if node.kind == "generates":
        more = f"\ndef {between}():\n{body}    yield 1\n\n"
        return more + head + f"    return sum({between}())\n"
    if node.kind == "constructs":
        thing = f"{node.name}_thing"
        more = f"\ndef {between}(self):\n{body}\n\n"
        more += f"class {thing}:\n    __init__ = {between}\n\n"
        return more + head + f"    return {thing}()\n"
    if node.kind == "reduces":
        more = f"\ndef {between}(a, b):\n{body}    return a\n\n"
        return more + head + f"    return functools.reduce({between}, range(2))\n"
    if node.kind == "awaits":
        more = f"\nasync def {between}():\n{body}    return 1\n\n"
        head += f"    try:\n        {between}().send(None)\n"
        return more + head + "    except StopIteration as end:\n        return end.value\n"
    if node.kind == "calls":
        more = f"\n@CALLBACK\ndef {between}():\n{body}\n"
        return more + head + f"    return LIB.{node.name}_c({node.native_depth}, {between})\n"
    return head + body
