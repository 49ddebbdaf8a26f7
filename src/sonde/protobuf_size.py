# SPDX-License-Identifier: Apache-2.0
"""The memory that a message of protobuf takes, found before it is decoded.

A few bytes decode to a hundred times as much: an empty message has two bytes on the wire, and 50 to
200 in memory. protobuf's package has no limit for that, so who decodes what others sent asks here
first. It is an upper bound (native/protobuf); what is decoded in earnest takes half of it or more.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2

from sonde._native import MessageSizes

_Type = descriptor_pb2.FieldDescriptorProto
_KINDS: Final[dict[int, tuple[str, int]]] = {
    **dict.fromkeys((_Type.TYPE_INT64, _Type.TYPE_UINT64, _Type.TYPE_SINT64), ("varint", 8)),
    **dict.fromkeys(
        (_Type.TYPE_INT32, _Type.TYPE_UINT32, _Type.TYPE_SINT32, _Type.TYPE_ENUM), ("varint", 4)
    ),
    _Type.TYPE_BOOL: ("varint", 1),
    **dict.fromkeys((_Type.TYPE_DOUBLE, _Type.TYPE_FIXED64, _Type.TYPE_SFIXED64), ("fixed64", 8)),
    **dict.fromkeys((_Type.TYPE_FLOAT, _Type.TYPE_FIXED32, _Type.TYPE_SFIXED32), ("fixed32", 4)),
    **dict.fromkeys((_Type.TYPE_STRING, _Type.TYPE_BYTES), ("text", 16)),
    _Type.TYPE_MESSAGE: ("message", 8),
}
"""By type of a field: its kind, and the bytes that it takes in its message (of a text or message:
what refers to it)."""
_POINTER_BYTES: Final = 8
"""What a repeated field takes in its message."""
_HEAD_BYTES: Final = 16
"""Of a message: which fields it has, and where what is unknown is kept."""
_ALIGNED_BYTES: Final = 16


def sizes_of(outermost: Any) -> MessageSizes:
    """Sizes of the messages of a type, by its descriptor. Raises ValueError where they have groups
    or maps."""
    types = [outermost]
    numbers = {outermost.full_name: 0}
    messages = []
    for one in types:  # which grows meanwhile
        repeated = _repeated(one)
        fields = []
        for field in one.fields:
            inner = field.message_type
            if inner is not None and inner.GetOptions().map_entry:
                raise ValueError("maps have no known size")
            if inner is not None and inner.full_name not in numbers:
                numbers[inner.full_name] = len(types)
                types.append(inner)
            kind, size = _kind_of(field.type)
            element_bytes = size if field.name in repeated else 0
            message = numbers[inner.full_name] if inner is not None else 0
            fields.append((int(field.number), kind, element_bytes, message))
        messages.append((_empty_bytes(one, repeated), fields))
    return MessageSizes(messages)


def _kind_of(kind: int) -> tuple[str, int]:
    if kind not in _KINDS:
        raise ValueError(f"fields of type {kind} have no known size")
    return _KINDS[kind]


def _repeated(described: Any) -> set[str]:
    """Names of the repeated fields of a message. Descriptors of some releases of protobuf have no
    attribute for that."""
    found = descriptor_pb2.DescriptorProto()
    described.CopyToProto(found)
    return {it.name for it in found.field if it.label == _Type.LABEL_REPEATED}


def _empty_bytes(described: Any, repeated: set[str]) -> int:
    """Memory of a message without content, at most; of what excludes one another (oneof), the
    largest is counted."""
    sizes = {
        field.name: _POINTER_BYTES if field.name in repeated else max(4, _kind_of(field.type)[1])
        for field in described.fields
    }
    size = _HEAD_BYTES
    for choice in described.oneofs:
        size += 4 + max(sizes.pop(field.name) for field in choice.fields)
    size += sum(sizes.values())
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
