"""Chakra's bytes: length-delimited messages, and the fields of each as facts. It does not interpret a node.

An .et file is `varint length, message` repeated; the first message describes the file, each further one is a node.
Text fields are declared as bytes, which look the same on the wire, so that one name that is no UTF-8 cannot make
a whole node unreadable. Messages are built from a descriptor made here at run time; nothing is generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from prismtrace import TraceFormatError, TraceTruncatedError

MAX_MESSAGE_BYTES: Final = 1 << 28

SCALARS: Final = (
    ("double", 3, "double"),
    ("float", 5, "float"),
    ("int32", 7, "int32"),
    ("int64", 9, "int64"),
    ("uint32", 11, "uint32"),
    ("uint64", 13, "uint64"),
    ("sint32", 15, "sint32"),
    ("sint64", 17, "sint64"),
    ("fixed32", 19, "fixed32"),
    ("fixed64", 21, "fixed64"),
    ("sfixed32", 23, "sfixed32"),
    ("sfixed64", 25, "sfixed64"),
    ("bool", 27, "bool"),
    ("string", 29, "bytes"),
    ("bytes", 31, "bytes"),
)
"""Kinds of attribute values: name, field number of one value (a list of them has the next number), wire type."""

NODE_TYPES: Final = ("INVALID", "METADATA", "MEM_LOAD", "MEM_STORE", "COMP", "COMM_SEND", "COMM_RECV", "COMM_COLL")
METADATA, COMP, COMM_SEND, COMM_RECV, COMM_COLL = 1, 4, 5, 6, 7

_NODE_FIELDS: Final = (
    ("id", 1, "uint64", ""),
    ("name", 2, "bytes", ""),
    ("type", 3, "int32", ""),
    ("ctrl_deps", 4, "uint64", "repeated"),
    ("data_deps", 5, "uint64", "repeated"),
    ("start_time_micros", 6, "uint64", ""),
    ("duration_micros", 7, "uint64", ""),
    ("inputs", 8, "IoInfo", ""),
    ("outputs", 9, "IoInfo", ""),
    ("attr", 10, "Attribute", "repeated"),
)


@cache
def classes() -> tuple[Any, Any]:
    """The message classes of the file's description and of a node."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="prismtrace_chakra.proto", package="prismtrace_chakra")
    file.syntax = "proto3"

    def add(message: Any, name: str, number: int, kind: str, label: str = "") -> Any:
        field = message.field.add(name=name, number=number)
        field.label = field_type.LABEL_REPEATED if label == "repeated" else field_type.LABEL_OPTIONAL
        if kind[0].isupper():
            field.type, field.type_name = field_type.TYPE_MESSAGE, f".prismtrace_chakra.{kind}"
        else:
            field.type = getattr(field_type, f"TYPE_{kind.upper()}")
        return field

    attribute = file.message_type.add(name="Attribute")
    add(attribute, "name", 1, "bytes")
    add(attribute, "doc_string", 2, "bytes")
    attribute.oneof_decl.add(name="value")
    for name, number, kind in SCALARS:
        title = f"{name.capitalize()}List"
        add(file.message_type.add(name=title), "values", 1, kind, "repeated")
        add(attribute, f"{name}_val", number, kind).oneof_index = 0
        add(attribute, f"{name}_list", number + 1, title).oneof_index = 0
    described = file.message_type.add(name="Description")
    add(described, "version", 1, "bytes")
    add(described, "attr", 2, "Attribute", "repeated")
    shapes = file.message_type.add(name="IoInfo")
    for number, name in enumerate(("values", "shapes", "types"), 1):
        add(shapes, name, number, "bytes")
    node = file.message_type.add(name="Node")
    for name, number, kind, label in _NODE_FIELDS:
        add(node, name, number, kind, label)

    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = [pool.FindMessageTypeByName(f"prismtrace_chakra.{name}") for name in ("Description", "Node")]
    description, nodes = (message_factory.GetMessageClass(each) for each in found)
    return description, nodes


def frames(data: bytes, *, path: str) -> Iterator[tuple[int, bytes]]:
    """Each message with the offset at which it starts.

    Raises:
        TraceTruncatedError: the file ends inside a message; the messages before it were given out.
        TraceFormatError: what stands where a length should is none.
    """
    position, size = 0, len(data)
    while position < size:
        start, length, shift = position, 0, 0
        while True:
            if position >= size:
                raise TraceTruncatedError("the file ends inside the length of a message", path=path, offset=start)
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise TraceFormatError("a length of more than 10 bytes: this is no .et file", path=path, offset=start)
        if length > MAX_MESSAGE_BYTES:
            raise TraceFormatError(f"a message of {length} bytes: this is no .et file", path=path, offset=start)
        if position + length > size:
            message = f"a message of {length} bytes, {size - position} are left"
            raise TraceTruncatedError(message, path=path, offset=start)
        yield start, data[position : position + length]
        position += length


def parse(kind: Any, raw: bytes, *, path: str, offset: int) -> Any:
    """One message of a class of `classes()`."""
    from google.protobuf.message import DecodeError

    message = kind()
    try:
        message.ParseFromString(raw)
    except (DecodeError, ValueError, MemoryError) as error:
        raise TraceFormatError(f"a message of {len(raw)} bytes that is no node", path=path, offset=offset) from error
    return message


def attributes(message: Any) -> dict[str, tuple[str, Any]]:
    """The attributes of a node or file: name -> (kind, value); lists of values are tuples, text is str."""
    found: dict[str, tuple[str, Any]] = {}
    for attribute in message.attr:
        field = attribute.WhichOneof("value")
        if field is None:
            found[text(attribute.name)] = ("none", None)
            continue
        value = getattr(attribute, field)
        kind, _, form = field.rpartition("_")
        if form == "list":
            values = tuple(value.values)
            found[text(attribute.name)] = (f"{kind}_list", tuple(map(text, values)) if kind == "string" else values)
        else:
            found[text(attribute.name)] = (kind, text(value) if kind == "string" else value)
    return found


def text(raw: bytes) -> str:
    """Bytes as text; what is no UTF-8 becomes visible escapes."""
    return raw.decode("utf-8", "backslashreplace")


# --- writing -------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """An unsigned number; a negative one as its two's complement of 64 bits."""
    if 0 <= value < 0x80:
        return bytes((value,))
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def block(number: int, raw: bytes) -> bytes:
    """A length-delimited field: text, bytes, a message, or packed numbers."""
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def packed(number: int, values: list[int]) -> bytes:
    """A repeated field of numbers; nothing when there are none."""
    return block(number, b"".join(map(varint, values))) if values else b""


class AttributeName:
    """Writes attributes of one name and kind; what does not change is encoded once."""

    def __init__(self, name: str, kind: str, *, field: int = 10) -> None:
        number = next(number for scalar, number, _ in SCALARS if scalar == kind)
        self._is_block = kind in ("string", "bytes")
        self._name = block(1, name.encode())
        self._outer = varint(field << 3 | 2)
        self._one = self._name + varint(number << 3 | (2 if self._is_block else 0))
        self._list = self._name + varint(number + 1 << 3 | 2)

    def one(self, value: int | bool | str | bytes) -> bytes:
        """The attribute with one value."""
        if isinstance(value, int):
            inner = self._one + varint(value)
        else:
            raw = value.encode() if isinstance(value, str) else value
            inner = self._one + varint(len(raw)) + raw
        return self._outer + varint(len(inner)) + inner

    def many(self, values: list[int] | list[str]) -> bytes:
        """The attribute with a list of values."""
        if self._is_block:
            raw = b"".join(block(1, str(value).encode()) for value in values)
        else:
            raw = packed(1, [int(value) for value in values])
        inner = self._list + varint(len(raw)) + raw
        return self._outer + varint(len(inner)) + inner
