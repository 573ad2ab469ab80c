"""What a user writes becomes the parts of a policy, or one clear error."""

import re

import pytest
import torch
from torch import nn

from mezzo import Policy, PolicyError
from mezzo.policy import parse
from mezzo.policy.types import BY_USER, Conditional, Rule, Selector


def says(message):
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
def test_op_names_are_read_from_any_collection_in_any_spelling(names):
    assert parse.op_names("half", names) == {"add", "mul"}


def test_op_names_as_a_bare_string_are_refused_with_what_to_write():
    with says(r"^half='softmax' should be a set of op names\. Write half=\{'softmax'\}\.$"):
        parse.op_names("half", "softmax")


@pytest.mark.parametrize("names", [None, 3, {"add": "half"}, (name for name in ["add"]), torch.add])
def test_op_names_that_are_no_set_are_refused(names):
    with says(
        rf"^full={re.escape(repr(names))} should be a set of op names such as \{{'softmax'\}}\.$"
    ):
        parse.op_names("full", names)


def test_an_op_under_two_rules_is_named_with_both():
    with says(
        r"^half= and keep= both list 'add', 'mul'\. An op has one rule: take it out of one of"
        r" them\.$"
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
def test_exemptions_are_equal_however_they_are_written(table):
    assert parse.exemptions(table) == (("batch_norm", ("bias", "weight")),)


def test_an_op_may_be_exempt_from_the_presets_exemptions():
    assert parse.exemptions({"batch_norm": []}) == (("batch_norm", ()),)


@pytest.mark.parametrize(
    "table", ["batch_norm", 3, None, {"batch_norm"}, (("batch_norm",),), ["batch_norm"]]
)
def test_exemptions_that_are_no_table_are_refused_with_an_example(table):
    with says(
        rf"^exempt_args={re.escape(repr(table))} should be a table from an op to its arguments,"
        r" such as "
    ):
        parse.exemptions(table)


def test_an_exemption_of_an_argument_that_the_op_lacks_names_those_it_has():
    with says(
        r"^batch_norm has no argument 'wieght'\. Did you mean 'weight'\? Choose one of: bias,"
        r" .*running_mean.*weight\.$"
    ):
        parse.exemptions({"batch_norm": "wieght"})


@pytest.mark.parametrize("names", [3, [3], ["weight", None], {"weight": 1}])
def test_an_exemption_that_is_no_name_is_refused(names):
    with says("^batch_norm has no argument "):
        parse.exemptions({"batch_norm": names})


def test_an_exemption_of_an_unknown_op_is_refused():
    with says("^Unknown op 'batchnorm'. Did you mean 'batch_norm'"):
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
def test_conditions_are_equal_however_they_are_written(entry):
    assert parse.conditionals([entry]) == (Conditional("softmax", "dim", (-1, 1)),)


def test_a_condition_on_one_value_needs_no_list():
    assert parse.conditionals([("softmax", "dim", -1)]) == parse.conditionals(
        [("softmax", "dim", [-1])]
    )


def test_conditions_have_no_order():
    one, other = ("softmax", "dim", [-1]), ("log_softmax", "dim", [0])
    assert parse.conditionals([one, other]) == parse.conditionals([other, one, other])


@pytest.mark.parametrize("entries", ["softmax", None, 3, {"softmax": ("dim", [-1])}])
def test_conditions_that_are_no_list_are_refused_with_an_example(entries):
    with says(
        rf"^conditional={re.escape(repr(entries))} should be a list of \(op, argument, values\),"
        r" such as \[\('softmax', 'dim', \[-1\]\)\]\.$"
    ):
        parse.conditionals(entries)


@pytest.mark.parametrize(
    "entry", ["softmax", ("softmax", "dim"), (1, 2, 3, 4, 5), None, {"op": "softmax"}]
)
def test_a_condition_of_another_shape_is_refused_with_an_example(entry):
    with says(
        r"^A conditional entry is \(op, argument, values\), such as \('softmax', 'dim', \[-1\]\),"
        rf" got {re.escape(repr(entry))}\.$"
    ):
        parse.conditionals([entry])


@pytest.mark.parametrize(
    ("argument", "hint"), [("dimm", r" Did you mean 'dim'\?"), (3, ""), ([], ""), (None, "")]
)
def test_a_condition_on_an_argument_that_the_op_lacks_names_those_it_has(argument, hint):
    with says(
        rf"^softmax has no argument {re.escape(repr(argument))}\.{hint} Choose one of: .*dim.*input"
    ):
        parse.conditionals([("softmax", argument, [-1])])


@pytest.mark.parametrize(
    "value", [torch.float16, torch.ones(1), [1], float("nan"), object, range(2)]
)
def test_a_condition_on_a_value_that_is_not_plain_is_refused(value):
    with says(
        r"^The values of a conditional entry for 'softmax' are strings, numbers, booleans or None,"
        r" got "
    ):
        parse.conditionals([("softmax", "dim", [value])])


def test_the_reason_of_a_condition_is_a_sentence():
    with says(r"^The reason of a conditional entry for 'softmax' is a sentence, got 3\.$"):
        parse.conditionals([("softmax", "dim", [-1], 3)])


def test_a_condition_on_an_unknown_op_is_refused():
    with says("^Unknown op 'sofmax'"):
        parse.conditionals([("sofmax", "dim", [-1])])


def test_module_rules_are_read_from_globs_classes_and_pairs():
    expected = (
        (Selector("head"), Rule.HALF),
        (Selector("type:torch.nn.modules.linear.Linear"), Rule.KEEP),
    )
    assert parse.module_rules({"head": "half", nn.Linear: Rule.KEEP}) == expected
    assert parse.module_rules(expected) == expected


def test_module_rules_keep_their_order_since_a_later_glob_beats_an_earlier_one():
    assert [selector.text for selector, _ in parse.module_rules({"b*": "half", "a*": "full"})] == [
        "b*",
        "a*",
    ]


def test_a_module_rule_said_twice_counts_once():
    text = Selector.parse(nn.Linear).text
    assert parse.module_rules({nn.Linear: "half", "b*": "full", text: "half"}) == (
        (Selector("b*"), Rule.FULL),
        (Selector(text), Rule.HALF),
    )


def test_two_rules_for_one_module_are_refused():
    with says(
        "^modules= has two rules for 'type:torch.nn.modules.linear.Linear'. A module has one: take"
        " the other out.$"
    ):
        parse.module_rules({nn.Linear: "half", "type:torch.nn.modules.linear.Linear": "full"})


@pytest.mark.parametrize("table", ["head", None, 3, {"head"}, ["head"], (("head",),)])
def test_module_rules_that_are_no_table_are_refused_with_an_example(table):
    with says(
        rf"^modules={re.escape(repr(table))} should be a table from a glob or a class to a rule,"
        r" such as \{'head': 'half'\}\.$"
    ):
        parse.module_rules(table)


@pytest.mark.parametrize("rule", ["promote", "refuse"])
def test_a_rule_that_makes_no_sense_for_a_module_is_refused(rule):
    with says(
        rf"^A module cannot be '{rule}' as a whole \('head'\)\. Choose one of: half, full, keep\.$"
    ):
        parse.module_rules({"head": rule})


def test_an_unknown_rule_for_a_module_is_refused():
    with says("^Unknown rule 'hlf'.*Did you mean 'half'"):
        parse.module_rules({"head": "hlf"})


def test_a_dotted_name_that_toml_made_a_table_of_is_refused_with_the_remedy():
    with says(
        r"^The module 'encoder' has \{'norm': 'full'\} where a rule belongs\. A name with dots is"
        r" quoted in TOML: \"encoder.norm\" = \"full\"\.$"
    ):
        parse.module_rules({"encoder": {"norm": "full"}})


@pytest.mark.parametrize(
    "entries", [["head", nn.Linear], (nn.Linear, "head"), {nn.Linear, "head", Selector("head")}]
)
def test_a_set_of_modules_has_no_order(entries):
    assert parse.selectors(entries) == (
        Selector("head"),
        Selector("type:torch.nn.modules.linear.Linear"),
    )


@pytest.mark.parametrize("entry", ["head", nn.Linear, Selector("head")])
def test_one_module_needs_no_set(entry):
    assert parse.selectors(entry) == parse.selectors([entry])


@pytest.mark.parametrize("entries", [None, 3, {"head": "half"}, nn.Linear(1, 1)])
def test_a_set_of_modules_that_is_none_is_refused(entries):
    with says("^keep_full=.* should be a set of globs and classes such as "):
        parse.selectors(entries)


@pytest.mark.parametrize(
    ("field", "value", "spelled"),
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
def test_a_field_is_spelled_as_python_that_the_constructor_reads(field, value, spelled):
    assert parse.format_value(field, value) == spelled
    assert eval(spelled) is not None


def test_an_argument_is_any_that_one_of_the_ops_functions_has():
    assert {
        parse.check_argument("softmax", name) for name in ("input", "self", "dim", "dtype")
    } == {"input", "self", "dim", "dtype"}


@pytest.mark.parametrize(
    "bad",
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
def test_a_policy_that_makes_no_sense_is_never_made_nor_changed_halfway(bad):
    policy = Policy("O2", half={"exp"})
    with pytest.raises(PolicyError) as error:
        Policy.parse(policy, **bad)
    assert error.value.__cause__ is None
    assert policy == Policy("O2", half={"exp"})
