"""Parse the arguments and TOML files of policies."""

import re

import pytest
import torch
from hypothesis import given, settings
from support.policies import FULLEST, policies
from torch import nn

from mezzo import Policy, PolicyError
from mezzo.policy import parse
from mezzo.policy.types import BY_USER, Conditional, Rule, Selector


def policy_error(message):
    return pytest.raises(PolicyError, match=message)


@pytest.mark.parametrize(
    "names",
    [
        ["add", "mul"],
        ("mul", "add"),
        {"add", "mul"},
        frozenset({"add", "mul"}),
        {"add": 1, "mul": 2}.keys(),
        ["add", "add_", "mul"],
    ],
)
def test_op_names_accept_any_collection_and_any_spelling(names):
    assert parse.op_names("half", names) == {"add", "mul"}


def test_a_single_string_of_op_names_raises_with_the_fix():
    with policy_error(r"^half='softmax' should be a set of op names\. Pass half=\{'softmax'\}\.$"):
        parse.op_names("half", "softmax")


@pytest.mark.parametrize("names", [None, 3, {"add": "half"}, (name for name in ["add"]), torch.add])
def test_op_names_that_are_not_a_collection_raise(names):
    with policy_error(
        rf"^full={re.escape(repr(names))} should be a set of op names such as \{{'softmax'\}}\.$"
    ):
        parse.op_names("full", names)


def test_an_op_under_two_rules_raises_with_both_rules():
    with policy_error(
        r"^half= and keep= both list 'add', 'mul'\. An op has one rule: remove it from one"
        r" of the lists\.$"
    ):
        parse.refuse_overlaps(
            {
                "half": frozenset({"add", "mul", "exp"}),
                "full": frozenset(),
                "keep": frozenset({"mul", "add"}),
            }
        )


@pytest.mark.parametrize(
    "table",
    [
        {"batch_norm": ["weight", "bias"]},
        {"batch_norm": {"bias", "weight"}},
        {"batch_norm": ("bias", "weight", "bias")},
        {"native_batch_norm": "bias", "batch_norm": "weight"},
        (("batch_norm", ("bias", "weight")),),
        [["batch_norm", ["weight", "bias"]]],
    ],
)
def test_equivalent_spellings_of_exemptions_are_equal(table):
    assert parse.exemptions(table) == (("batch_norm", ("bias", "weight")),)


def test_an_empty_exemption_removes_the_presets_exemption():
    assert parse.exemptions({"batch_norm": []}) == (("batch_norm", ()),)


@pytest.mark.parametrize(
    "table", ["batch_norm", 3, None, {"batch_norm"}, (("batch_norm",),), ["batch_norm"]]
)
def test_exemptions_that_are_not_a_mapping_raise_with_an_example(table):
    with policy_error(
        rf"^exempt_args={re.escape(repr(table))} should be a table from an op to its arguments,"
        r" such as "
    ):
        parse.exemptions(table)


def test_an_exemption_of_an_unknown_argument_raises_with_the_known_ones():
    with policy_error(
        r"^batch_norm has no argument 'wieght'\. Did you mean 'weight'\? Choose one of: bias,"
        r" .*running_mean.*weight\.$"
    ):
        parse.exemptions({"batch_norm": "wieght"})


@pytest.mark.parametrize("names", [3, [3], ["weight", None], {"weight": 1}])
def test_an_exemption_that_is_not_a_string_raises(names):
    with policy_error("^batch_norm has no argument "):
        parse.exemptions({"batch_norm": names})


def test_an_exemption_of_an_unknown_op_raises():
    with policy_error("^Unknown op 'batchnorm'. Did you mean 'batch_norm'"):
        parse.exemptions({"batchnorm": "weight"})


@pytest.mark.parametrize(
    "entry",
    [
        ("softmax", "dim", [-1, 1]),
        ["softmax", "dim", (1, -1)],
        ("_softmax", "dim", {1, -1}),
        ("softmax", "dim", [1, -1, -1]),
        Conditional("softmax", "dim", (1, -1)),
        ("softmax", "dim", [-1, 1], BY_USER),
    ],
)
def test_equivalent_spellings_of_conditional_entries_are_equal(entry):
    assert parse.conditionals([entry]) == (Conditional("softmax", "dim", (-1, 1)),)


def test_a_conditional_entry_accepts_a_single_value():
    assert parse.conditionals([("softmax", "dim", -1)]) == parse.conditionals(
        [("softmax", "dim", [-1])]
    )


def test_conditional_entries_are_unordered():
    one, other = ("softmax", "dim", [-1]), ("log_softmax", "dim", [0])
    assert parse.conditionals([one, other]) == parse.conditionals([other, one, other])


@pytest.mark.parametrize("entries", ["softmax", None, 3, {"softmax": ("dim", [-1])}])
def test_conditional_that_is_not_a_list_raises_with_an_example(entries):
    with policy_error(
        rf"^conditional={re.escape(repr(entries))} should be a list of \(op, argument, values\),"
        r" such as \[\('softmax', 'dim', \[-1\]\)\]\.$"
    ):
        parse.conditionals(entries)


@pytest.mark.parametrize(
    "entry", ["softmax", ("softmax", "dim"), (1, 2, 3, 4, 5), None, {"op": "softmax"}]
)
def test_a_malformed_conditional_entry_raises_with_an_example(entry):
    with policy_error(
        rf"^{re.escape(repr(entry))} is not a conditional entry\. Pass \(op, argument, values\),"
        r" such as \('softmax', 'dim', \[-1\]\)\.$"
    ):
        parse.conditionals([entry])


@pytest.mark.parametrize(
    ("argument", "hint"), [("dimm", r" Did you mean 'dim'\?"), (3, ""), ([], ""), (None, "")]
)
def test_a_conditional_entry_with_an_unknown_argument_raises_with_the_known_ones(argument, hint):
    with policy_error(
        rf"^softmax has no argument {re.escape(repr(argument))}\.{hint} Choose one of: .*dim.*input"
    ):
        parse.conditionals([("softmax", argument, [-1])])


@pytest.mark.parametrize(
    "value", [torch.float16, torch.ones(1), [1], float("nan"), object, range(2)]
)
def test_a_conditional_entry_with_a_value_that_is_not_plain_raises(value):
    with policy_error(
        r"^The values of a conditional entry for 'softmax' are strings, numbers, booleans or None,"
        r" got "
    ):
        parse.conditionals([("softmax", "dim", [value])])


def test_the_reason_of_a_conditional_entry_is_a_string():
    with policy_error(r"^The reason of a conditional entry for 'softmax' is a string, got 3\.$"):
        parse.conditionals([("softmax", "dim", [-1], 3)])


def test_a_conditional_entry_for_an_unknown_op_raises():
    with policy_error("^Unknown op 'sofmax'"):
        parse.conditionals([("sofmax", "dim", [-1])])


def test_module_rules_accept_globs_classes_and_pairs():
    expected = (
        (Selector("head"), Rule.HALF),
        (Selector("type:torch.nn.modules.linear.Linear"), Rule.KEEP),
    )
    assert parse.module_rules({"head": "half", nn.Linear: Rule.KEEP}) == expected
    assert parse.module_rules(expected) == expected


def test_module_rules_keep_their_order():
    assert [selector.text for selector, _ in parse.module_rules({"b*": "half", "a*": "full"})] == [
        "b*",
        "a*",
    ]


def test_a_repeated_module_rule_counts_once():
    text = Selector.parse(nn.Linear).text
    assert parse.module_rules({nn.Linear: "half", "b*": "full", text: "half"}) == (
        (Selector("b*"), Rule.FULL),
        (Selector(text), Rule.HALF),
    )


def test_two_rules_for_one_module_raise():
    with policy_error(
        "^modules= has two rules for 'type:torch.nn.modules.linear.Linear'. A module has one rule:"
        " remove one of them.$"
    ):
        parse.module_rules({nn.Linear: "half", "type:torch.nn.modules.linear.Linear": "full"})


@pytest.mark.parametrize("table", ["head", None, 3, {"head"}, ["head"], (("head",),)])
def test_module_rules_that_are_not_a_mapping_raise_with_an_example(table):
    with policy_error(
        rf"^modules={re.escape(repr(table))} should be a table from a glob or a class to a rule,"
        r" such as \{'head': 'half'\}\.$"
    ):
        parse.module_rules(table)


@pytest.mark.parametrize("rule", ["promote", "refuse"])
def test_promote_and_refuse_raise_as_module_rules(rule):
    with policy_error(
        rf"^'{rule}' is not a rule for whole modules \('head'\)\. Choose one of: half, full,"
        r" keep\.$"
    ):
        parse.module_rules({"head": rule})


def test_an_unknown_module_rule_raises():
    with policy_error("^Unknown rule 'hlf'.*Did you mean 'half'"):
        parse.module_rules({"head": "hlf"})


def test_an_unquoted_dotted_name_in_toml_raises_with_the_fix():
    with policy_error(
        r"^The rule of module 'encoder' is a table: \{'norm': 'full'\}\. Quote names with dots in"
        r" TOML: \"encoder.norm\" = \"full\"\.$"
    ):
        parse.module_rules({"encoder": {"norm": "full"}})


@pytest.mark.parametrize(
    "entries", [["head", nn.Linear], (nn.Linear, "head"), {nn.Linear, "head", Selector("head")}]
)
def test_selectors_are_unordered(entries):
    assert parse.selectors(entries) == (
        Selector("head"),
        Selector("type:torch.nn.modules.linear.Linear"),
    )


@pytest.mark.parametrize("entry", ["head", nn.Linear, Selector("head")])
def test_a_single_selector_is_accepted(entry):
    assert parse.selectors(entry) == parse.selectors([entry])


@pytest.mark.parametrize("entries", [None, 3, {"head": "half"}, nn.Linear(1, 1)])
def test_selectors_that_are_not_a_collection_raise(entries):
    with policy_error("^keep_full=.* should be a set of globs and classes such as "):
        parse.selectors(entries)


@pytest.mark.parametrize(
    ("field", "value", "formatted"),
    [
        ("half", ["add", "mul"], "{'add', 'mul'}"),
        ("half", [], "[]"),
        ("keep_full", ["head"], "['head']"),
        ("conditional", [["softmax", "dim", [-1]]], "[('softmax', 'dim', [-1])]"),
        (
            "conditional",
            [["norm", "p", [float("-inf"), 2], "why"]],
            "[('norm', 'p', [float('-inf'), 2], 'why')]",
        ),
        ("modules", {"head": "half"}, "{'head': 'half'}"),
    ],
)
def test_a_field_is_formatted_as_python_that_the_constructor_accepts(field, value, formatted):
    assert parse.format_value(field, value) == formatted
    assert eval(formatted) is not None


def test_arguments_of_any_function_of_the_op_are_accepted():
    assert {
        parse.check_argument("softmax", name) for name in ("input", "self", "dim", "dtype")
    } == {"input", "self", "dim", "dtype"}


@pytest.mark.parametrize(
    "overrides",
    [
        {"half": "softmax"},
        {"half": {"sofmax"}},
        {"half": {"add"}, "full": {"__add__"}},
        {"exempt_args": {"batch_norm": "wieght"}},
        {"conditional": [("softmax", "dimm", [-1])]},
        {"modules": {"head": "promote"}},
        {"keep_full": 3},
    ],
)
def test_an_invalid_replace_raises_and_leaves_the_policy_unchanged(overrides):
    policy = Policy("O2", half={"exp"})
    with pytest.raises(PolicyError) as error:
        Policy.parse(policy, **overrides)
    assert error.value.__cause__ is None
    assert policy == Policy("O2", half={"exp"})


@settings(max_examples=50)
@given(policy=policies())
def test_any_policy_round_trips_through_toml(policy, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    policy.save(path)
    assert Policy.load(path) == policy
    assert hash(Policy.load(path)) == hash(policy)


def test_a_file_has_the_fields_of_the_constructor(tmp_path):
    Policy(**FULLEST).save(tmp_path / "policy.toml")
    assert (tmp_path / "policy.toml").read_text().splitlines() == [
        "# A mezzo policy: mezzo.Policy.load reads it.",
        'level = "O2"',
        'dtype = "bfloat16"',
        'preset = "apex"',
        'half = ["add", "linear"]',
        'full = ["softmax"]',
        'promote = ["cat", "stack"]',
        'keep = ["relu"]',
        'refuse = ["binary_cross_entropy"]',
        'float32_inside = ["log_softmax"]',
        'default_rule = "promote"',
        (
            'conditional = [["linalg_vector_norm", "ord", [inf], "a maximum needs no sum"],'
            ' ["softmax", "dim", ["last", -1, 0.5, {}, true]]]'
        ),
        'keep_full = ["head", "type:torch.nn.modules.normalization.LayerNorm"]',
        'master = "kahan"',
        'grad_dtype = "float32"',
        'cache = "versioned"',
        'on_unsupported = "error"',
        "",
        "[exempt_args]",
        '"batch_norm" = ["bias", "weight"]',
        '"layer_norm" = ["weight"]',
        "",
        "[modules]",
        '"encoder.*.norm" = "full"',
        '"type:torch.nn.modules.linear.Linear" = "half"',
        '"odd \\"name\\"" = "keep"',
    ]


def test_an_empty_file_is_the_default_policy(tmp_path):
    (tmp_path / "policy.toml").write_text("# nothing\n")
    assert Policy.load(tmp_path / "policy.toml") == Policy()


@pytest.mark.parametrize(
    "content",
    [
        b'level = "O2"\r\nhalf = ["exp"]\r\n',
        b'\xef\xbb\xbflevel = "O2"\nhalf = ["exp"]\n',
        b"level = 'O2'\nhalf = [\n  'exp', # overflows\n]",
        'half = ["exp"]\nlevel = "O2" # größer\n'.encode(),
    ],
    ids=["windows line ends", "byte order mark", "written by hand", "unicode"],
)
def test_a_file_with_comments_and_a_byte_order_mark_loads(content, tmp_path):
    (tmp_path / "policy.toml").write_bytes(content)
    assert Policy.load(tmp_path / "policy.toml") == Policy("O2", half={"exp"})


@pytest.mark.parametrize(
    "name",
    ["größe.*", "😀", 'quo"te', "back\\slash", "line\nbreak", "\x7f\x00", "a.b.c", "[0]", "#"],
)
def test_any_module_name_round_trips(name, tmp_path):
    policy = Policy(modules={name: "half"}, keep_full=[name])
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -1, 2**70, 0.1, 1e-300, 1e22, float("inf"), float("-inf"), "", "{}"],
)
def test_any_conditional_value_round_trips(value, tmp_path):
    policy = Policy(conditional=[("softmax", "dim", [value])])
    policy.save(tmp_path / "policy.toml")
    (read,) = Policy.load(tmp_path / "policy.toml").conditional[0].values
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("level = O1", "line 1"),
        ('level = "O1"\nhalf = ["exp"', "end of document"),
        ('level = "O1"\nlevel = "O2"', "Cannot overwrite a value"),
        ("{}", "line 1"),
    ],
)
def test_malformed_toml_raises_with_the_position_and_an_example(content, place, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(content)
    with pytest.raises(PolicyError) as error:
        Policy.load(path)
    assert str(error.value).startswith(f"{str(path)!r} is not valid TOML: ")
    assert place in str(error.value)
    assert 'A policy file holds lines such as level = "O1" and full = ["softmax"].' in str(
        error.value
    )


def test_a_binary_file_raises(tmp_path):
    (tmp_path / "policy.toml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PolicyError, match="is not valid TOML"):
        Policy.load(tmp_path / "policy.toml")


def test_a_missing_file_raises_with_how_to_write_one(tmp_path):
    path = tmp_path / "none.toml"
    with pytest.raises(
        PolicyError,
        match=(
            rf"^There is no policy file at {re.escape(repr(str(path)))}\. Write one with"
            r" `policy.save\(path\)`\.$"
        ),
    ):
        Policy.load(path)


def test_a_directory_raises(tmp_path):
    with pytest.raises(
        PolicyError,
        match=rf"^The policy file {re.escape(repr(str(tmp_path)))} cannot be read: .*directory\.$",
    ):
        Policy.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("level = 1", r"Unknown level 1\. .*Did you mean 'O1'"),
        ('levle = "O1"', r"Unknown policy field 'levle'\. .*Did you mean 'level'"),
        ('half = "exp"', r"half='exp' should be a set of op names\. Pass half=\{'exp'\}"),
        ("half = {}", r"half=\{\} should be a set of op names"),
        ("half = [1]", "An op is named by a string such as 'softmax', got 1"),
        ('dtype = "float"', r"dtype='float' .*Choose one of: auto, float16, bfloat16"),
        ("dtype = 2026-01-01", "dtype=2026-01-01 is not a dtype"),
        ('conditional = ["softmax", "dim", [-1]]', "is not a conditional entry"),
        ('conditional = [["softmax", "dimm", [-1]]]', "softmax has no argument 'dimm'"),
        (
            '[modules]\nencoder.norm = "full"',
            'Quote names with dots in TOML: "encoder.norm" = "full"',
        ),
        ('modules = ["head"]', r"modules=\['head'\] should be a table"),
        (
            '[exempt_args]\nbatchnorm = ["weight"]',
            "Unknown op 'batchnorm'. Did you mean 'batch_norm'",
        ),
    ],
)
def test_an_invalid_field_in_a_file_raises_with_the_file(content, message, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(content)
    with pytest.raises(PolicyError, match=message) as error:
        Policy.load(path)
    assert str(error.value).startswith(f"In {str(path)!r}: ")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "policy.toml"
    Policy("O2").save(path)

    def fail(value):
        raise RuntimeError(value)

    monkeypatch.setattr(parse, "_to_toml", fail)
    with pytest.raises(RuntimeError):
        Policy("O3").save(path)
    assert Policy.load(path) == Policy("O2")
    assert [found.name for found in tmp_path.iterdir()] == ["policy.toml"]


def test_a_file_that_is_nested_too_deeply_raises(tmp_path):
    (tmp_path / "policy.toml").write_text("full = " + "[" * 100_000)
    with pytest.raises(PolicyError, match="nested too deeply"):
        Policy.load(tmp_path / "policy.toml")
