"""Each rule accepts what torch writes, and nothing that could execute code."""

import json

import pytest
import sympy
import torch
from torch.utils import _pytree as pytree

from mezzo import CheckpointError
from mezzo.conversion import validate_strings

SYMBOL = "Symbol('s0', positive=True, integer=True)"


@pytest.mark.parametrize(
    "text",
    [
        SYMBOL,
        f"Add(Mul(Integer(-2), {SYMBOL}), Integer(1))",
        f"Pow({SYMBOL}, Integer(2))",
        f"Pow({SYMBOL}, Integer(-1))",
        f"Mul(Rational(1, 2), {SYMBOL})",
        f"FloorDiv({SYMBOL}, Integer(2))",
        f"GreaterThan({SYMBOL}, Integer(4))",
        "Float('0.5', precision=53)",
        "Float('1.0e-5', precision=53)",
        "true",
        f"Max(Integer(1), {SYMBOL})",
    ],
)
def test_expressions_of_sizes_are_accepted(text):
    validate_strings.expression(text)


def test_expressions_that_sympy_writes_are_accepted():
    s0, s1 = sympy.symbols("s0 s1", positive=True, integer=True)
    for expression in (
        s0 * s1 - 3,
        (s0 + 1) ** 2 // 1,
        sympy.Max(s0, 2 * s1),
        sympy.Eq(s0, s1),
        sympy.And(s0 > 2, s1 <= 4),
        s0 / 2,
        sympy.true,
    ):
        validate_strings.expression(sympy.srepr(expression))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "__import__('os')",
        "Symbol('s0').__class__",
        "Symbol('s0')[0]",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "Symbol('s0') if True else 1",
        "Symbol(__import__('os'))",
        "Symbol('s0', integer=__import__('os'))",
        "Symbol('Integer')",
        "Symbol('a b')",
        "Symbol('s' * 9)",
        "Symbol('s0', x=True)",
        "Lambda(Integer(1))",
        "eval('1')",
        "Integer('1')",
        "Integer(1.5)",
        "Float('1e99999')",
        "Float('0.5', precision=1000000)",
        "s0",
        "Add(*Integer(1))",
        "Integer(1) # x",
        "Integer(1)\n",
        'Symbol("s0")',
        "Pow(Integer(2), Integer(8))",
        f"Pow({SYMBOL}, Integer(17))",
        f"Pow({SYMBOL}, {SYMBOL})",
        f"Pow({SYMBOL}, __import__('os'))",
        "Integer(99999999999999999999)",
        "Integer(True)",
    ],
)
def test_other_expressions_are_rejected(text):
    with pytest.raises(CheckpointError, match="expression"):
        validate_strings.expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].size()[0] == L['mask'].size()[1]",
        "(L['x'].size()[0] % 2) == 0",
        "((1 + L['y'].size()[0]) // 4) != 1 and not L['x'].size()[0] < 3",
        "L['args'][0]['k'].stride()[1] >= -1",
        "L['n'] == 3",
        "Max(1, L['x'].size()[0]) <= 2.5",
        "L['x'].storage_offset() == 0",
    ],
)
def test_guards_are_accepted(text):
    validate_strings.guard(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "L['x'].__class__",
        "L['x'].size.__globals__",
        "L['x'].tolist()",
        "L['x'].size(0)",
        "L['x' + 'y']",
        "L[x]",
        "x == 1",
        "'a' == 'a'",
        "L['a\"b'] == 1",
        "2 ** 10000000000 == 1",
        "1 << 10000000000 == 1",
        "(lambda: 1)() == 1",
        "[1][0] == 1",
        "eval('1')",
        "Max(*L)",
        "Max(1, key=eval)",
        "L['x'].size()[0] == 1\n",
        "(y := 1) == 1",
        "f'{1}' == 1",
        "(" * 70 + "1" + ")" * 70 + "*(2*(" * 70 + "1" + "))" * 70,
    ],
)
def test_other_guards_are_rejected(text):
    with pytest.raises(CheckpointError):
        validate_strings.guard(text)


class Options(dict):
    """A class of a user, registered as transformers registers its outputs."""


pytree.register_pytree_node(
    Options,
    lambda one: (list(one.values()), list(one)),
    lambda values, keys: Options(zip(keys, values, strict=True)),
    serialized_type_name="tests.graph.Options",
)


@pytest.mark.parametrize(
    "value",
    [
        1,
        (1, [2, None]),
        {"a": 1, "b c": {3: 2}},
        Options(a=1),
        pytree.OrderedDict(a=1),
        pytree.defaultdict(list, a=1),
        pytree.deque([1], maxlen=3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structures_are_accepted(value):
    validate_strings.tree(pytree.treespec_dumps(pytree.tree_structure(value)))


def spec(kind, context, *children):
    return {"type": kind, "context": context, "children_spec": list(children)}


@pytest.mark.parametrize(
    "tree",
    [
        spec("tests.graph.Unregistered", "null"),
        spec("NO_SERIALIZED_TYPE_NAME_FOUND", "null"),
        spec(None, "null"),
        spec("builtins.dict", json.dumps([{"__enum__": True, "fqn": "os:x", "name": "y"}])),
        spec("builtins.dict", json.dumps(['a"b'])),
        spec("builtins.dict", ["a"]),
        spec(
            "collections.defaultdict",
            {"default_factory_module": "os", "default_factory_name": "list", "dict_context": []},
        ),
        spec(
            "collections.defaultdict",
            {
                "default_factory_module": "builtins",
                "default_factory_name": "eval",
                "dict_context": [],
            },
        ),
        spec("collections.namedtuple", "builtins.list"),
        {"type": "builtins.list", "context": "null"},
        {**spec("builtins.list", "null"), "more": 1},
        7,
    ],
)
def test_other_structures_are_rejected(tree):
    with pytest.raises(CheckpointError):
        validate_strings.tree(json.dumps([1, tree]))


def test_keyword_arguments_must_be_identifiers():
    leaf = spec(None, None)
    tree = spec(
        "builtins.tuple",
        "null",
        spec("builtins.tuple", "null"),
        spec("builtins.dict", '["a b"]', leaf),
    )
    validate_strings.tree(json.dumps([1, tree]))
    with pytest.raises(CheckpointError, match="not an identifier: 'a b'"):
        validate_strings.signature_tree(json.dumps([1, tree]))


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (
            validate_strings.identifier,
            ["x", "p_a_weight", "input", "größe"],
            ["", "x=1", "a b", "1x", "a.b", "def", "x\n"],
        ),
        (validate_strings.argument_name, ["", "self", "from"], ["a b", "x=1", "*x"]),
        (
            validate_strings.path,
            ["", "a.0.weight", "d.layer-1.weight"],
            ['a"b', "a'b", "a\\b", "a\nb", "__class__.x", "a.__dict__"],
        ),
        (validate_strings.text, ["cuda", "2.13.0+cpu", "it is"], ["it's", 'a"', "a\n", "\\"]),
        (
            validate_strings.trace,
            ['File "a.py", line 3, in forward', "L__self__,,M;L__self__a,a,N"],
            ['"""', "a\nb", "\\n"],
        ),
        (
            validate_strings.symbol_range,
            ["s0", "u12", "2*_dx", "s0 + 1"],
            ["", "u999999", "u0; x", "a.b"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rules_for_names_accept_and_reject(rule, good, bad):
    for text in good:
        rule(text)
    for text in bad:
        with pytest.raises(CheckpointError):
            rule(text)


def test_an_error_message_shortens_a_long_string():
    with pytest.raises(CheckpointError) as refusal:
        validate_strings.identifier("-" * 10_000)
    assert len(str(refusal.value)) < 400


def test_torch_would_import_what_a_structure_names(monkeypatch):
    """This is why enums are rejected; if it fails, the rule can be removed."""
    imported = []
    monkeypatch.setattr(
        pytree.importlib, "import_module", lambda name: imported.append(name) or torch
    )
    text = json.dumps(
        [
            1,
            spec(
                "builtins.dict",
                json.dumps([{"__enum__": True, "fqn": "anything:Tensor", "name": "y"}]),
                spec(None, None),
            ),
        ]
    )
    with pytest.raises(TypeError):
        pytree.treespec_loads(text)
    assert imported == ["anything"]
