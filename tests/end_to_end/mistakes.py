"""Invalid requests, JSON and binary tensors, each with the beginning of its error."""

import json
import struct
from dataclasses import dataclass, field
from typing import Any

from .wire import SMALL, Document, post, request, tensor

X = tensor("x", "FP32", [1, 2], [1, 2])
A, B = tensor("a", "INT32", [1], [1]), tensor("b", "INT32", [1], [1])
FLOATS = struct.pack("<2f", 1, 2)
BINARY = tensor("x", "FP32", [1, 2], binary_data_size=8)
LONG = "z" * 100_000
DEEP = "[" * 100 + "]" * 100
NO_TEXT = "inputs[0] ('words'), BYTES [1]: element 0"


@dataclass(frozen=True)
class Case:
    """A request, its status, and the beginning of its error; `tensors` are sent after the JSON of `document`."""

    text: str
    document: Any
    model: str = "identity"
    tensors: tuple[bytes, ...] = ()
    headers: tuple[str, ...] = ()
    status: int = 400
    path: str = field(default="/v2/models/{}/infer", kw_only=True)

    @property
    def bytes(self) -> bytes:
        head = self.document if isinstance(self.document, bytes) else json.dumps(self.document).encode()
        length = (f"Inference-Header-Content-Length: {len(head)}",) if self.tensors else ()
        return post(self.path.format(self.model), b"".join([head, *self.tensors]), *length, *self.headers)


def changed(**fields: Any) -> Document:
    """A request whose input has these fields."""
    return request(X | fields)


def of(**parameters: Any) -> Document:
    """A request with these parameters."""
    return request(X, parameters=parameters)


def asking(**parameters: Any) -> Document:
    """A request whose output has these parameters."""
    return request(X, outputs=[{"name": "y", "parameters": parameters}])


def literal(text: str) -> bytes:
    """A request with this in the place of an element."""
    return json.dumps(changed(data=[1, "HERE"])).replace('"HERE"', text).encode()


def words(data: Any, count: int = 1) -> Document:
    return request(tensor("words", "BYTES", [count], data))


def packed(size: int) -> Document:
    return request(tensor("words", "BYTES", [1], binary_data_size=size))


NO_JSON = {
    "no body": Case("the request body is empty; expected an object", b""),
    "only white space": Case("the request body is empty; expected an object", b" \r\n"),
    "an array": Case("the request body is an array; expected an object", b"[]"),
    "null": Case("the request body is null; expected an object", b"null"),
    "half of it": Case("the request body is not JSON: ", json.dumps(SMALL).encode()[:-1]),
    "something behind it": Case("the request body is not JSON: ", json.dumps(SMALL).encode() + b"{}"),
    "no UTF-8": Case("the request body is not JSON: ", b'{"id": "\xff", "inputs": []}'),
    "half of a surrogate pair": Case("the request body is not JSON: ", b'{"id": "\\ud800", "inputs": []}'),
    "NaN": Case("the request body is not JSON: NaN at byte 75, element 1 in the data of input 'x'; ", literal("NaN")),
    "a key twice": Case('the request body has the key "inputs" twice in one object', b'{"inputs": [], "inputs": []}'),
    "a key twice, spelled differently": Case(
        'the request body has the key "name" twice in one object', b'{"inputs": [{"name": "x", "n\\u0061me": "x"}]}'
    ),
    "a key twice in data": Case('the request body has the key "a" twice in one object', literal('{"a": 1, "a": 2}')),
    "100 levels elsewhere": Case("inputs: missing; expected an array", f'{{"other": {DEEP}}}'.encode()),
    "100 levels in inputs": Case(f"inputs[0]: {'[' * 40}... is an array; expected an object", f'{{"inputs": {DEEP}}}'.encode()),
    "100 levels in data": Case(f"inputs[0].data[1]: {'[' * 40}... is an array; expected a number", literal(DEEP)),
    "100,000 levels": Case("the request body is not JSON: ", b'{"inputs": ' + b"[" * 100_000),
    "100,000 levels of objects": Case("the request body is not JSON: ", b'{"inputs": ' + b'{"a":' * 100_000),
}

INPUTS = {
    "no inputs": Case("inputs: missing; expected an array", {}),
    "inputs null": Case("inputs: missing; expected an array", {"inputs": None}),
    "inputs an object": Case("inputs: {} is an object; expected an array", {"inputs": {}}),
    "none of them": Case("inputs: 'a', 'b' missing; the model takes 'a', 'b'", request(), "add"),
    "one of two": Case("inputs: 'b' missing; the model takes 'a', 'b'", request(A), "add"),
    "more than the model has": Case(
        "inputs[2].name: the model has no input 'c'; it has 'a', 'b'", request(A, B, B | {"name": "c"}), "add"
    ),
    "one twice": Case("inputs[1].name: 'x' given twice; expected each input once", request(X, X)),
    "null for an input": Case("inputs[0]: null; expected an object", {"inputs": [None]}),
    "no name": Case("inputs[0].name: missing; expected a string", changed(name=None)),
    "a number for a name": Case("inputs[0].name: 1 is an integer; expected a string", changed(name=1)),
    "a long name": Case(f"inputs[0].name: the model has no input '{LONG[:40]}...'; it has 'x'", changed(name=LONG)),
    "no datatype": Case("inputs[0].datatype: missing; expected a string", changed(datatype=None)),
    "no such datatype": Case("inputs[0].datatype: \"FP33\"; expected FP32, as input 'x' is", changed(datatype="FP33")),
    "a datatype in the other spelling": Case('inputs[0].datatype: "TYPE_FP32"; expected FP32', changed(datatype="TYPE_FP32")),
    "another datatype": Case('inputs[0].datatype: "FP64"; expected FP32', changed(datatype="FP64")),
    "a number for a datatype": Case("inputs[0].datatype: 32 is an integer; expected a string", changed(datatype=32)),
    "parameters that are no object": Case("inputs[0].parameters: [] is an array; expected an object", changed(parameters=[])),
    "a parameter that is an array": Case(
        "inputs[0].parameters.a: [] is an array; expected a string", changed(parameters={"a": []})
    ),
    "shared memory": Case(
        "inputs[0].parameters.shared_memory_region: shared", changed(parameters={"shared_memory_region": "r"})
    ),
}

SHAPES = {
    "no shape": Case("inputs[0].shape: missing; expected an array", changed(shape=None)),
    "a number for a shape": Case("inputs[0].shape: 2 is an integer; expected an array", changed(shape=2)),
    "a negative size": Case("inputs[0].shape[0]: -1; expected an integer of at least 0", changed(shape=[-1, 2])),
    "a float for a size": Case("inputs[0].shape[1]: 2.0 is a number; expected an integer", changed(shape=[1, 2.0])),
    "true for a size": Case("inputs[0].shape[0]: true is a boolean; expected an integer", changed(shape=[True, 2])),
    "a string for a size": Case('inputs[0].shape[0]: "1" is a string; expected an integer', changed(shape=["1", 2])),
    "2^40 with one datum": Case("inputs[0].shape: [1, 1099511627776] is more than the ", changed(shape=[1, 2**40], data=[1])),
    "2^40 in binary": Case(
        "inputs[0].shape: [1, 1099511627776] is more than", request(BINARY | {"shape": [1, 2**40]}), tensors=(FLOATS,)
    ),
    "2^40 beside a zero": Case("inputs[0].shape: [0, 1099511627776] is more than the ", changed(shape=[0, 2**40], data=[])),
    "2^64 and a size that wraps to one": Case(
        "inputs[0].shape: [4294967296, 4294967296] is more", changed(shape=[2**32, 2**32])
    ),
    "more than 64 bits": Case(
        f"inputs[0].shape[0]: {10**23} has more than 64 bits; expected an integer of at least 0", changed(shape=[10**23, 2])
    ),
    "64 sizes of 2^64 - 1": Case(
        "inputs[0].shape: [18446744073709551615, 18446744073709551... is more than", changed(shape=[2**64 - 1] * 64)
    ),
    "65 dimensions": Case("inputs[0].shape: 65 dimensions; a tensor has at most 64", changed(shape=[1] * 65)),
    "a dimension too few": Case("input 'x': shape [2] has 1 dimension", changed(shape=[2])),
    "a dimension too many": Case("input 'x': shape [1, 1, 2] has 3 dimensions; expected 2", changed(shape=[1, 1, 2])),
    "another size than the model's": Case(
        "input 'x': dimension 1 of shape [1, 4] is 4; expected 3", request(tensor("x", "FP32", [1, 4], [1] * 4)), "rows"
    ),
    "sizes that differ between inputs": Case(
        "input 'b': dimension 0 of shape [3] is 3; dimension 'n' is 2 elsewhere in the request, and the model raised: ",
        request(tensor("a", "INT32", [2], [1, 2]), tensor("b", "INT32", [3], [1, 2, 3])),
        "add",
    ),
    "a batch over the maximum": Case(
        "input 'x': batch of 5 in shape [5, 3]; expected 1 to 4, the model's max_batch_size",
        request(tensor("x", "FP32", [5, 3], [1] * 15)),
        "rows",
    ),
    "a batch of none": Case(
        "input 'x': batch of 0 in shape [0, 3]; expected 1 to 4, the model's max_batch_size",
        request(tensor("x", "FP32", [0, 3], [])),
        "rows",
    ),
}

DATA = {
    "no data": Case("inputs[0].data: missing; expected an array, or parameters.binary_data_size", changed(data=None)),
    "a number for data": Case("inputs[0].data: 1 is an integer; expected an array", changed(data=1)),
    "a string for data": Case('inputs[0].data: "AAAA" is a string; expected an array', changed(data="AAAA")),
    "an element too few": Case("inputs[0] ('x'), FP32 [1, 2]: 1 element in data; the shape asks for 2", changed(data=[1])),
    "an element too many": Case(
        "inputs[0] ('x'), FP32 [1, 2]: 3 elements in data; the shape asks for 2", changed(data=[1, 2, 3])
    ),
    "rows of another length": Case("inputs[0] ('x'), FP32 [1, 2]: data is a row of 2; the shape", changed(data=[[1], [2]])),
    "ragged rows": Case("inputs[0] ('x'), FP32 [2, 2]: data[1] is a row of 1; the", changed(shape=[2, 2], data=[[1, 2], [3]])),
    "null among numbers": Case("inputs[0].data[1]: null; expected a number for FP32", changed(data=[1, None])),
    "true among numbers": Case("inputs[0].data[1]: true is a boolean; expected a number for FP32", changed(data=[1, True])),
    "a string among numbers": Case('inputs[0].data[0]: "1" is a string; expected a number for FP32', changed(data=["1", 2])),
    "a long string": Case(f'inputs[0].data[0]: "{LONG[:39]}... is a string; expected', changed(data=[LONG, 2])),
    "an object among numbers": Case('inputs[0].data[0]: {"a": 1} is an object; expected a number', changed(data=[{"a": 1}, 2])),
    "a number that FP32 has not": Case("inputs[0].data[0][1]: 1e+39 is out of range for FP32 (-3.4", changed(data=[[1, 1e39]])),
    "an integer that INT32 has not": Case(
        "inputs[0].data[0]: 1099511627776 is out of range for INT32 (-2147483648 to 2147483647)",
        request(A | {"data": [2**40]}, B),
        "add",
    ),
    "an integer of 64 bits": Case(
        "inputs[0].data[0]: 9223372036854775808 is out of range", request(A | {"data": [2**63]}, B), "add"
    ),
    "an integer of 65 bits": Case(
        "inputs[0].data[0]: 18446744073709552000 is out of range", request(A | {"data": [2**64]}, B), "add"
    ),
    "a float for an integer": Case(
        "inputs[1].data[0]: 1.0 is a number; expected an integer for INT32", request(A, B | {"data": [1.0]}), "add"
    ),
    "a number for a text": Case("inputs[0].data[0]: 1 is an integer; expected a string for BYTES", words([1]), "text"),
    "half precision in JSON": Case("inputs[0].data: FP16 has no JSON form", request(tensor("x", "FP16", [1], [1.5])), "half"),
}

PARAMETERS = {
    "an id that is a number": Case("id: 7 is an integer; expected a string", request(X, id=7)),
    "an id that is an object": Case("id: {} is an object; expected a string", request(X, id={})),
    "parameters that are no object": Case('parameters: "a" is a string; expected an object', request(X, parameters="a")),
    "null for a parameter": Case("parameters.a: null; expected a string, a number or true or false", of(a=None)),
    "a long name": Case(f"parameters.{LONG[:40]}...: [] is an array; expected", of(**{LONG: []})),
    "a negative timeout": Case("parameters.timeout: -1; expected an integer of at least 0", of(timeout=-1)),
    "a timeout of 24 digits": Case(
        f"parameters.timeout: {10**23} has more than 64 bits; expected an integer of at least 0", of(timeout=10**23)
    ),
    "a float for a timeout": Case("parameters.timeout: 0.5 is a number; expected an integer of at least 0", of(timeout=0.5)),
    "a string for a priority": Case('parameters.priority: "high" is a string; expected an integer', of(priority="high")),
    "true for a priority": Case("parameters.priority: true is a boolean; expected an integer", of(priority=True)),
    "a number for binary_data_output": Case(
        "parameters.binary_data_output: 1 is an integer; expected true", of(binary_data_output=1)
    ),
    "a reserved name": Case("parameters.triton_enable_empty: names that begin with triton_", of(triton_enable_empty=True)),
    "a long reserved name": Case(f"parameters.triton_{LONG[:33]}...: names", of(**{f"triton_{LONG}": 1})),
    "a sequence": Case("parameters.sequence_id: sequences are not served here", of(sequence_id=1)),
    "the start of a sequence": Case("parameters.sequence_start: sequences are not served here", of(sequence_start=True)),
    "the end of a sequence": Case("parameters.sequence_end: sequences are not served here", of(sequence_end=True)),
}

OUTPUTS = {
    "outputs an object": Case("outputs: {} is an object; expected an array", request(X, outputs={})),
    "a name alone": Case('outputs[0]: "y" is a string; expected an object', request(X, outputs=["y"])),
    "no name": Case("outputs[0].name: missing; expected a string", request(X, outputs=[{}])),
    "no such output": Case("outputs[0].name: the model has no output 'z'; it has 'y'", request(X, outputs=[{"name": "z"}])),
    "a long name": Case(f"outputs[0].name: the model has no output '{LONG[:40]}...'", request(X, outputs=[{"name": LONG}])),
    "one twice": Case("outputs[1].name: 'y' given twice; expected each output once", request(X, outputs=[{"name": "y"}] * 2)),
    "parameters that are no object": Case(
        "outputs[0].parameters: [] is an array; expected an object", request(X, outputs=[{"name": "y", "parameters": []}])
    ),
    "shared memory": Case("outputs[0].parameters.shared_memory_region: not served here", asking(shared_memory_region="r")),
    "a classification out of range": Case("outputs[0].parameters.classification: -1; expected an", asking(classification=-1)),
    "a string for a classification": Case('outputs[0].parameters.classification: "a" is', asking(classification="a")),
    "a string for binary_data": Case(
        'outputs[0].parameters.binary_data: "yes" is a string; expected true', asking(binary_data="yes")
    ),
    "null for binary_data": Case("outputs[0].parameters.binary_data: null; expected", asking(binary_data=None)),
    "half precision in JSON": Case(
        "outputs: output 'y' is FP16, which has no JSON form",
        request(tensor("x", "FP16", [1], binary_data_size=2)),
        "half",
        (b"ab",),
    ),
}

SIZE = "inputs[0].parameters.binary_data_size: "
BYTES = {
    "a negative size": Case(
        f"{SIZE}-8; expected an integer of at least 0", changed(data=None, parameters={"binary_data_size": -8})
    ),
    "a float for a size": Case(
        f"{SIZE}8.0 is a number", changed(data=None, parameters={"binary_data_size": 8.0}), tensors=(FLOATS,)
    ),
    "a string for a size": Case(
        f'{SIZE}"8" is a string', changed(data=None, parameters={"binary_data_size": "8"}), tensors=(FLOATS,)
    ),
    "no size": Case("inputs[0].data: missing; expected an array, or", request(tensor("x", "FP32", [1, 2])), tensors=(FLOATS,)),
    "a size and data": Case(
        "inputs[0].data: given; expected either this or",
        request(BINARY | X | {"parameters": {"binary_data_size": 8}}),
        tensors=(FLOATS,),
    ),
    "a size that is not the shape's": Case(
        "inputs[0] ('x'), FP32 [1, 2]: parameters.binary_data_size is 4; the shape asks for 8",
        request(tensor("x", "FP32", [1, 2], binary_data_size=4)),
        tensors=(b"1234",),
    ),
    "a size of 2^63": Case(
        "inputs[0] ('x'), FP32 [1, 2]: parameters.binary_data_size is 9223372036854775808; the shape asks for 8",
        request(tensor("x", "FP32", [1, 2], binary_data_size=2**63)),
        tensors=(FLOATS,),
    ),
    "a byte too few": Case(f"{SIZE}8, but 7 bytes of the body remain", request(BINARY), tensors=(FLOATS[:-1],)),
    "a byte too many": Case(
        "the body has 1 byte more than its JSON and parameters.binary_data_size", request(BINARY), tensors=(FLOATS, b"\0")
    ),
    "no header that says where the JSON ends": Case(
        f"{SIZE}8, but 0 bytes of the body remain, which without the header Inference", request(BINARY)
    ),
    "half of a length": Case(f"{NO_TEXT} of 1 has no length: the data ends at byte 2", packed(2), "text", (b"\1\0",)),
    "a text past the end": Case(f"{NO_TEXT} claims 4294967295 bytes, but 1", packed(5), "text", (b"\xff\xff\xff\xffa",)),
    "bytes that are no text, asked for in JSON": Case(
        "output 'same': element 0 is not UTF-8 (invalid start byte at byte 0), which JSON cannot carry; ask for",
        packed(5),
        "text",
        (b"\1\0\0\0\xff",),
    ),
    "more than one text": Case("inputs[0] ('words'), BYTES [1]: 4 bytes left", packed(8), "text", (bytes(8),)),
    "2^26 texts in four bytes": Case(
        "inputs[0].shape: 67108864 elements of BYTES in one request; the limit is 262144 (server.max_string_elements)",
        request(tensor("words", "BYTES", [2**26], binary_data_size=4)),
        "text",
        (bytes(4),),
        status=413,
    ),
    "2^18 texts in four bytes": Case(
        "inputs[0] ('words'), BYTES [262144]: element 1 of 262144 has no length",
        request(tensor("words", "BYTES", [2**18], binary_data_size=4)),
        "text",
        (bytes(4),),
    ),
}
