# SPDX-License-Identifier: Apache-2.0
"""Each package's face is described: with units of numbers, shapes of arrays, and the errors raised.

A package's face: the names in `__all__` of its `__init__`, and the functions and classes of its
modules that another package imports; of classes their public methods and fields.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGES = sorted(path.parent.name for path in (SRC / "sonde").glob("*/__init__.py"))

UNITS = (
    "s|ns|us|ms|hours?|seconds|minutes|days|bytes|kb|mb|gb|hz|mhz|percent"
    "|share|weight|ratio|epsilon|delta"
)
_HAS_UNIT = re.compile(rf"(^|_)({UNITS}|per_\w+)$")
_TEXT_HAS_UNIT = re.compile(
    rf"\b({UNITS}|nanoseconds|shares?|of 1|probability|factor|times|deviation|error|quantile|unit"
    r"|second)\b|%|GB/s"
)
"""Of what a function returns: its docstring has it where its name does not."""
_NUMBER = re.compile(r"float( \| None)?")
_ARRAY = re.compile(r"\b(NDArray|I64|I32|U8|U64s?|F64|Mask|Ints|Floats|Times|Windows)\b")
_TEXT_HAS_SHAPE = re.compile(
    r"\b(each|per|every|one for|row|rows|lengths?|by|ascending|sorted|in order|index|indices|pairs)"
    r"\b"
)
_NO_ERRORS = {"NotImplementedError", "AssertionError", "StopIteration"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


@cache
def definitions(module: str) -> dict[str, Definition]:
    return {it.name: it for it in modules()[module].body if isinstance(it, Definition)}


@cache
def imports(module: str) -> list[tuple[str, str, str]]:
    """(local name, module, name in it) of what is imported of ours."""
    return [
        (alias.asname or alias.name, node.module or "", alias.name)
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sonde")
        for alias in node.names
    ]


def home_of(module: str, name: str) -> tuple[str, str] | None:
    """Where a name that a module has is defined; None: it is no function or class of ours."""
    if module not in modules():
        return None
    if name in definitions(module):
        return module, name
    for local, other, theirs in imports(module):
        if local == name and other != module:
            return home_of(other, theirs)
    return None


def offered(module: str) -> list[str]:
    """`__all__`"""
    for node in modules()[module].body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def used_elsewhere(module: str) -> Iterator[tuple[str, str]]:
    """(module, name) of what a module uses of other packages."""
    whole = {}
    for local, other, name in imports(module):
        if f"{other}.{name}" in modules():
            whole[local] = f"{other}.{name}"
        elif package_of(other) != package_of(module):
            yield other, name
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            other = whole.get(node.value.id, module)
            if package_of(other) != package_of(module):
                yield other, node.attr


@cache
def faces() -> frozenset[tuple[str, str]]:
    found = set()
    for module in modules():
        names = [(module, name) for name in offered(module)]
        found |= {home_of(*it) for it in [*names, *used_elsewhere(module)]}
    return frozenset(it for it in found if it is not None and not it[1].startswith("_"))


@dataclass(frozen=True)
class Part:
    """A function, class, method or field of a face."""

    where: str
    node: ast.AST
    doc: str
    around: str
    """The docstring of its class."""


def parts(package: str) -> Iterator[Part]:
    for module, name in sorted(faces()):
        if package_of(module) != package:
            continue
        node = definitions(module)[name]
        where, doc = f"{module}.{name}", ast.get_docstring(node) or ""
        yield Part(where, node, doc, "")
        if isinstance(node, ast.ClassDef):
            yield from members(where, node, doc)


def members(where: str, node: ast.ClassDef, around: str) -> Iterator[Part]:
    for it, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(it, Function) and (not it.name.startswith("_") or it.name == "__init__"):
            yield Part(f"{where}.{it.name}", it, ast.get_docstring(it) or "", around)
        if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            doc = text.value if isinstance(text, ast.Constant) else ""
            if not it.target.id.startswith("_"):
                yield Part(f"{where}.{it.target.id}", it, str(doc), around)


def numbers_and_arrays(part: Part) -> Iterator[tuple[str, str]]:
    """(name, annotation) of a function's parameters and result, or of a field."""
    node = part.node
    if isinstance(node, Function):
        for it in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            yield it.arg, ast.unparse(it.annotation) if it.annotation else ""
        yield node.name, ast.unparse(node.returns) if node.returns else ""
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, ast.unparse(node.annotation)


def raised(node: ast.AST, caught: tuple[str, ...] = ()) -> Iterator[str]:
    """Classes of what the code itself raises and does not catch."""
    if isinstance(node, ast.Try):
        names = [it for handler in node.handlers for it in handler_names(handler)]
        for it in node.body:
            yield from raised(it, (*caught, *names))
        for it in [*node.handlers, *node.orelse, *node.finalbody]:
            yield from raised(it, caught)
        return
    if isinstance(node, ast.Raise) and node.exc is not None:
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = getattr(error, "id", getattr(error, "attr", ""))
        if name[:1].isupper() and not set(caught) & set(ancestors(name)):
            yield name
    for it in ast.iter_child_nodes(node):
        if not isinstance(it, Function | ast.Lambda | ast.ClassDef):
            yield from raised(it, caught)


def handler_names(handler: ast.ExceptHandler) -> list[str]:
    if handler.type is None:
        return ["BaseException"]
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [getattr(it, "id", getattr(it, "attr", "")) for it in kinds]


@cache
def ancestors(name: str) -> tuple[str, ...]:
    """An error's class and its bases, by name: ours and Python's."""
    known = getattr(builtins, name, None)
    if isinstance(known, type):
        return tuple(it.__name__ for it in known.__mro__)
    for module in modules():
        if isinstance(it := definitions(module).get(name), ast.ClassDef):
            bases = [getattr(base, "id", getattr(base, "attr", "")) for base in it.bases]
            return (name, *(above for base in bases if base for above in ancestors(base)))
    return (name,)


def is_overload(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any("overload" in ast.unparse(it) for it in decorators)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_packages_face_is_described(package: str) -> None:
    undescribed = [
        it.where
        for it in parts(package)
        if isinstance(it.node, Definition) and not it.doc and not is_overload(it.node)
        and not it.where.endswith(".__init__")
    ]  # fmt: skip
    assert undescribed == []


@pytest.mark.parametrize("package", PACKAGES)
def test_errors_that_a_face_raises_are_in_its_docstring(package: str) -> None:
    missing = []
    for it in parts(package):
        if not isinstance(it.node, Function):
            continue
        text = f"{it.doc} {it.around}"
        for name in sorted({name for step in it.node.body for name in raised(step)} - _NO_ERRORS):
            if not any(above in text for above in ancestors(name) if above != "object"):
                missing.append(f"{it.where}: {name}")
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_numbers_of_a_face_have_units(package: str) -> None:
    """In their names, or in the docstring, which then names them."""
    without = []
    for it in parts(package):
        for name, kind in numbers_and_arrays(it):
            text = f"{it.doc} {it.around}"
            is_field = isinstance(it.node, ast.AnnAssign)
            is_result = not is_field and name == getattr(it.node, "name", "")
            if not _NUMBER.fullmatch(kind) or _HAS_UNIT.search(name):
                continue
            has_unit = (is_field and it.doc) or (is_result and _TEXT_HAS_UNIT.search(text))
            if not has_unit and (is_result or not re.search(rf"\b{name}\b", text)):
                without.append(f"{it.where}: {name}")
    assert without == []


@pytest.mark.parametrize("package", PACKAGES)
def test_arrays_of_a_face_have_shapes(package: str) -> None:
    """The docstring has what an element stands for, or names the array."""
    without = []
    for it in parts(package):
        for name, kind in numbers_and_arrays(it):
            text = f"{it.doc} {it.around}"
            if _ARRAY.search(kind) and not (
                _TEXT_HAS_SHAPE.search(text) or re.search(rf"\b{name}\b", text)
            ):
                without.append(f"{it.where}: {name}")
    assert without == []


def test_there_is_much_to_describe() -> None:
    assert len(faces()) > 500
    assert sum(1 for package in PACKAGES for _ in parts(package)) > 2_000
