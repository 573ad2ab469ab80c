"""`Policy`: construct, compare, print, save and explain."""

import copy
import dataclasses
import inspect
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from support.devices import NATIVE, NONE, device
from support.policies import FULLEST, policies
from torch import nn

import mezzo
from mezzo import NORMS, Policy, PolicyError
from mezzo._events import listen
from mezzo.policy import policy as module
from mezzo.policy.types import Cache, Level, Master, OnUnsupported, Rule, Selector

FIELDS = [field.name for field in dataclasses.fields(Policy)]


def policy_error(message):
    return pytest.raises(PolicyError, match=message)


@pytest.fixture
def on(monkeypatch):
    """Replace the hardware of this machine."""
    return lambda hardware: monkeypatch.setattr(module, "hardware", lambda _device=None: hardware)


def test_the_default_policy_is_torchs_lists_with_dtype_auto():
    policy = Policy()
    assert (policy.level, policy.dtype, policy.preset, policy.default_rule) == (
        Level.O1,
        None,
        "torch",
        None,
    )
    assert (policy.half, policy.full, policy.promote, policy.keep, policy.refuse) == (
        frozenset(),
    ) * 5
    assert (policy.exempt_args, policy.conditional, policy.modules) == ((), (), ())
    assert policy.keep_full == tuple(sorted(Selector.parse(norm) for norm in NORMS))
    assert (policy.master, policy.grad_dtype, policy.cache, policy.on_unsupported) == (
        Master.AUTO,
        None,
        Cache.AUTO,
        OnUnsupported.WARN,
    )


def test_the_fullest_policy_leaves_no_field_at_its_default():
    default, fullest = Policy(), Policy(**FULLEST)
    assert [name for name in FIELDS if getattr(default, name) == getattr(fullest, name)] == []
    assert FULLEST.keys() == set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_round_trips_by_itself_and_with_all_others(name, tmp_path):
    fields = {
        key: value
        for key, value in FULLEST.items()
        if key == name or (name == "preset" and key == "level")
    }
    for policy in (Policy(**fields), Policy(**FULLEST)):
        policy.save(tmp_path / "policy.toml")
        assert Policy.load(tmp_path / "policy.toml") == policy
        assert eval(repr(policy)) == policy
        assert dataclasses.replace(policy) == policy
        assert Policy(**policy.to_dict()) == policy
        assert pickle.loads(pickle.dumps(policy)) == policy


@settings(max_examples=50)
@given(policies())
def test_any_policy_round_trips_with_equal_hash_and_repr(policy):
    for again in (
        eval(repr(policy)),
        Policy(**policy.to_dict()),
        dataclasses.replace(policy),
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
    ):
        assert again == policy
        assert hash(again) == hash(policy)
        assert repr(again) == repr(policy)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"half": ["mul", "add"]}, {"half": {"add", "mul"}}),
        ({"half": {"add_", "__radd__"}}, {"half": ("add",)}),
        ({"half": {"torch.nn.functional.softmax"}}, {"half": {"aten::_softmax"}}),
        ({"dtype": "bf16"}, {"dtype": torch.bfloat16}),
        ({"dtype": "torch.float16"}, {"dtype": "half"}),
        ({"dtype": None}, {"dtype": "auto"}),
        ({"level": "O2"}, {"level": Level.O2}),
        ({"default_rule": "half"}, {"default_rule": Rule.HALF}),
        ({"master": None}, {"master": "none"}),
        ({"grad_dtype": "fp32"}, {"grad_dtype": torch.float32}),
        ({"keep_full": NORMS}, {"keep_full": tuple(reversed(NORMS))}),
        ({"keep_full": nn.Linear}, {"keep_full": ["type:torch.nn.modules.linear.Linear"]}),
        (
            {"modules": {nn.Linear: "half"}},
            {"modules": {"type:torch.nn.modules.linear.Linear": Rule.HALF}},
        ),
        ({"modules": OrderedDict(head="half")}, {"modules": (("head", "half"),)}),
        (
            {"conditional": [("softmax", "dim", {-1, 0})]},
            {"conditional": (["softmax", "dim", [0, -1, 0]],)},
        ),
        ({"exempt_args": {"batch_norm": {"weight"}}}, {"exempt_args": {"batch_norm": "weight"}}),
    ],
)
def test_equivalent_policies_are_equal_dictionary_keys(one, other):
    assert {Policy(**one): "found"}[Policy(**other)] == "found"
    assert repr(Policy(**one)) == repr(Policy(**other))


def test_policies_with_another_order_of_module_rules_differ():
    assert Policy(modules={"a*": "half", "*b": "full"}) != Policy(
        modules={"*b": "full", "a*": "half"}
    )


def test_a_policy_is_not_equal_to_its_level():
    assert Policy("O1") != "O1"


def test_repr_pickle_and_hash_agree_across_processes():
    policy = Policy(
        "O1", half={"add", "mul", "exp", "cat"}, conditional=[("softmax", "dim", {"a", "b", "c"})]
    )
    hash(policy)
    code = (
        "import pickle, sys\nfrom mezzo import Policy\npolicy ="
        " pickle.loads(bytes.fromhex(sys.argv[1]))\nassert {policy: 1}[eval(repr(policy))] =="
        " 1\nprint(repr(policy))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(policy).hex()],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert ran.stdout.strip() == repr(policy)


@pytest.mark.parametrize("name", ["level", "half", "hlaf", "anything"])
def test_neither_fields_nor_misspelt_names_can_be_assigned(name):
    policy = Policy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, name, "O2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(policy, name)


def test_a_policy_does_not_share_its_arguments():
    half, modules = {"add"}, {"head": "half"}
    policy = Policy(half=half, modules=modules)
    half.add("exp")
    modules["body"] = "full"
    assert policy == Policy(half={"add"}, modules={"head": "half"})


def test_the_repr_shows_only_fields_that_differ_from_the_default():
    assert repr(Policy("O2")) == "Policy('O2')"
    assert (
        repr(Policy("O1", keep_full=[], grad_dtype="float32", master=None))
        == "Policy('O1', keep_full=[], master='none', grad_dtype='float32')"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"level": "01"},
            (
                r"^Unknown level '01'\. Choose one of: O0, O1, O2, O3, OD\. The first character is"
                r" the letter O, not a zero\.$"
            ),
        ),
        ({"level": "O4"}, r"^Unknown level 'O4'\. Choose one of: O0, O1, O2, O3, OD\.$"),
        ({"level": None}, "^Unknown level None"),
        (
            {"dtype": "int8"},
            (
                r"^dtype='int8' is not a dtype that can be used here\. Choose one of: auto,"
                r" float16, bfloat16\.$"
            ),
        ),
        (
            {"dtype": "Auto"},
            r"^dtype='Auto' .*Choose one of: auto, float16, bfloat16\. Did you mean 'auto'\?$",
        ),
        ({"dtype": "bfloat61"}, r"^dtype='bfloat61' .* Did you mean 'bfloat16'"),
        (
            {"dtype": torch.float32},
            (
                r"^dtype=torch.float32 is not a dtype that can be used here\. Choose one of: auto,"
                r" float16, bfloat16\.$"
            ),
        ),
        (
            {"dtype": "float32"},
            (
                r"^dtype='float32' is not a dtype that can be used here\. Choose one of: auto,"
                r" float16, bfloat16\.$"
            ),
        ),
        (
            {"preset": "padle"},
            (
                r"^Unknown preset 'padle'\. Choose one of: torch, torch-cuda, torch-cpu, paddle, .*"
                r" Did you mean 'paddle'\?$"
            ),
        ),
        ({"preset": None}, "^Unknown preset None"),
        (
            {"preset": "apex", "level": "OD"},
            r"^The preset 'apex' has no level OD\. Choose one of: O1, O2, O3\.$",
        ),
        ({"half": {"sofmax"}}, r"^Unknown op 'sofmax'\. Did you mean 'softmax'"),
        (
            {"half": "softmax"},
            r"^half='softmax' should be a set of op names\. Pass half=\{'softmax'\}\.$",
        ),
        ({"half": {"add"}, "refuse": {"add_"}}, r"^half= and refuse= both list 'add'\."),
        (
            {"default_rule": "ful"},
            (
                r"^Unknown rule 'ful'\. Choose one of: half, full, promote, keep, refuse,"
                r" float32_inside\. Did you"
                r" mean 'full'\?$"
            ),
        ),
        ({"master": "splt"}, r"^Unknown master 'splt'\. .* Did you mean 'split'"),
        (
            {"grad_dtype": "auto"},
            (
                r"^grad_dtype='auto' is not a dtype that can be used here\. Choose one of: float16,"
                r" bfloat16, float32\.$"
            ),
        ),
        (
            {"cache": "versoined"},
            (
                r"^Unknown cache 'versoined'\. Choose one of: auto, versioned, torch, off\. Did you"
                r" mean 'versioned'\?$"
            ),
        ),
        (
            {"on_unsupported": "warning"},
            (
                r"^Unknown on_unsupported 'warning'\. Choose one of: error, warn, ignore\. Did you"
                r" mean 'warn'\?$"
            ),
        ),
        (
            {"modules": {"head": "promote"}},
            (
                r"^'promote' is not a rule for whole modules \('head'\)\. Choose one of: half,"
                r" full, keep\.$"
            ),
        ),
    ],
)
def test_an_invalid_field_raises_with_the_value_the_choices_and_close_matches(fields, message):
    for make in (Policy, Policy.parse, mezzo.ops):
        with policy_error(message) as error:
            make(**fields)
        assert error.value.__cause__ is None


def test_an_unknown_field_raises_with_the_closest_one():
    with policy_error(
        r"^Unknown policy field 'hlaf'\. Choose one of: level, dtype, .*on_unsupported\. Did you"
        r" mean 'half'\?$"
    ):
        Policy.parse("O1", hlaf={"add"})
    with pytest.raises(TypeError, match="hlaf"):
        Policy(hlaf={"add"})


def test_parse_accepts_a_level_a_policy_a_file_or_nothing(tmp_path):
    policy = Policy("O2", half={"exp"})
    policy.save(tmp_path / "policy.toml")
    assert (
        Policy.parse()
        == Policy.parse(None)
        == Policy.parse("O1")
        == Policy.parse(Level.O1)
        == Policy()
    )
    assert Policy.parse(policy) is policy
    assert (
        Policy.parse(tmp_path / "policy.toml")
        == Policy.parse(str(tmp_path / "policy.toml"))
        == policy
    )


def test_a_path_needs_no_suffix_and_a_string_needs_toml(tmp_path):
    Policy("O2").save(tmp_path / "policy")
    assert Policy.parse(tmp_path / "policy") == Policy("O2")
    with policy_error("^Unknown level "):
        Policy.parse(str(tmp_path / "policy"))


def test_overrides_change_only_their_fields(tmp_path):
    policy = Policy("O2", "float16", half={"exp"}, full={"add"})
    policy.save(tmp_path / "policy.toml")
    expected = Policy("O2", "bfloat16", half={"mul"}, full={"add"})
    assert Policy.parse(policy, dtype="bfloat16", half={"mul"}) == expected
    assert Policy.parse(tmp_path / "policy.toml", dtype="bfloat16", half={"mul"}) == expected
    assert Policy.parse("O2", dtype="bfloat16", half={"mul"}, full={"add"}) == expected
    assert policy == Policy("O2", "float16", half={"exp"}, full={"add"})


def test_the_level_can_be_overridden_but_not_passed_twice():
    assert Policy.parse(Policy("O1", half={"add"}), level="O2") == Policy("O2", half={"add"})
    assert Policy.parse(level="O2") == Policy("O2")
    with policy_error(r"^The level is passed twice: 'O1' and level='O2'\. Pass it once\.$"):
        Policy.parse("O1", level="O2")


def test_an_override_that_overlaps_raises():
    with policy_error("^half= and full= both list 'add'"):
        Policy.parse(Policy(half={"add"}), full={"add"})


def test_a_preset_instead_of_a_level_raises_with_the_fix():
    with policy_error(r"^'paddle' is a preset, not a level\. Pass preset='paddle'"):
        Policy.parse("paddle")


@pytest.mark.parametrize("value", [3, {"level": "O1"}, torch.float16, ["O1"], nn.Linear])
def test_other_types_raise_with_the_accepted_ones(value):
    with policy_error(
        rf"^{re.escape(repr(value))} is not a policy\. Pass a level such as 'O1', a mezzo.Policy,"
        r" or the path of a \.toml file\.$"
    ):
        Policy.parse(value)


def test_ops_with_rule_returns_the_ops_of_the_policy():
    assert Policy(**FULLEST).ops_with_rule(Rule.PROMOTE) == {"cat", "stack"}


def test_to_dict_returns_json_values():
    import json

    fields = Policy(**FULLEST | {"conditional": []}).to_dict()
    assert json.loads(json.dumps(fields)) == fields


@pytest.mark.parametrize("how", [Path, str], ids=["path", "str"])
def test_save_and_load_accept_a_path_or_a_string(how, tmp_path):
    Policy("O3").save(how(tmp_path / "policy.toml"))
    assert Policy.load(how(tmp_path / "policy.toml")) == Policy("O3")


def test_an_error_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('level = "O1"\nhalf = ["sofmax"]\n')
    with policy_error(
        rf"^In {re.escape(repr(str(path)))}: Unknown op 'sofmax'\. Did you mean 'softmax'"
    ):
        Policy.parse(path)
    path.write_text('levle = "O1"\n')
    with policy_error(
        r"Unknown policy field 'levle'\. Choose one of: level, .* Did you mean 'level'\?$"
    ):
        Policy.parse(path)


@pytest.mark.parametrize(
    ("fields", "op", "inputs", "expected"),
    [
        (
            {"half": {"add"}},
            "add",
            [torch.float32],
            "add runs in bfloat16: listed half by the user.",
        ),
        (
            {"full": {"add"}},
            "+".replace("+", "__add__"),
            [torch.bfloat16],
            "add runs in float32: listed full by the user.",
        ),
        (
            {"promote": {"add"}},
            "add",
            [torch.bfloat16, torch.float32],
            "add runs in float32: listed promote by the user.",
        ),
        (
            {"keep": {"linear"}},
            "linear",
            [torch.bfloat16],
            "linear runs in bfloat16: listed keep by the user.",
        ),
        ({"refuse": {"exp"}}, "exp", [torch.float32], "exp is refused: listed refuse by the user."),
        (
            {},
            "F.linear",
            [torch.float32],
            (
                "linear runs in bfloat16: a matrix product: tensor cores are fast in 16 bits and"
                " accumulate in float32."
            ),
        ),
        (
            {"preset": "torch-cuda"},
            "softmax",
            ["float16"],
            "softmax runs in float32: sums exponentials: float16 overflows past 65504.",
        ),
        (
            {},
            "relu",
            ["torch.float32"],
            (
                "relu runs in float32: in no list: runs in the dtype of its inputs; torch promotes"
                " mixed dtypes."
            ),
        ),
        (
            {"default_rule": "half"},
            "relu",
            [torch.float32],
            "relu runs in bfloat16: in no list: the policy's default_rule is half.",
        ),
        ({}, "linear", [torch.float64], "linear runs in float64: float64 inputs are never cast."),
        (
            {"level": "O0", "half": {"add"}},
            "add",
            [torch.float32],
            "add runs in float32: nothing is cast: level O0 runs everything in float32.",
        ),
        (
            {"level": "OD"},
            "relu",
            [torch.bfloat16],
            "relu runs in float32: level OD: ops that are not listed half run in float32.",
        ),
        (
            {"level": "O3"},
            "relu",
            [torch.float32],
            "relu runs in bfloat16: level O3: every op is 16-bit.",
        ),
    ],
)
def test_explain_prints_a_sentence(fields, op, inputs, expected):
    assert (
        str(
            Policy(**{"level": "O1", "dtype": "bfloat16"} | fields).explain(
                op, *inputs, device="cpu"
            )
        )
        == expected
    )


def test_explain_applies_conditional_entries_to_arguments():
    policy = Policy(
        "O1",
        "bfloat16",
        half={"softmax"},
        conditional=[("softmax", "dim", [-1], "the last dimension is long")],
    )
    assert (
        str(policy.explain("softmax", torch.float32, device="cpu", dim=-1))
        == "softmax runs in float32: dim=-1: the last dimension is long."
    )
    assert (
        str(policy.explain("softmax", torch.float32, device="cpu", dim=1))
        == "softmax runs in bfloat16: listed half by the user."
    )
    assert (
        str(policy.explain("softmax", torch.float32, device="cpu"))
        == "softmax runs in bfloat16: listed half by the user."
    )


def test_explain_rejects_unknown_arguments():
    with policy_error(r"^softmax has no argument 'dmi'\. Did you mean 'dim'"):
        Policy().explain("softmax", torch.float32, device="cpu", dmi=-1)


def test_explain_on_a_device_without_16_bit_dtypes_neither_warns_nor_emits(on):
    on(device(NONE, NONE))
    with warnings.catch_warnings(), listen() as events:
        warnings.simplefilter("error")
        decision = Policy("O1", half={"add"}).explain("add", torch.float32)
    assert str(decision) == "add runs in float32: nothing is cast: it has no kernels for it."
    assert events == []


@pytest.mark.parametrize("on_unsupported", ["warn", "error"])
def test_explain_describes_a_device_that_is_not_there(on, on_unsupported):
    on(dataclasses.replace(device(NONE, NONE), absent="no such device is visible"))
    policy = Policy("O1", half={"add"}, on_unsupported=on_unsupported)
    assert policy.explain("add", torch.float32).dtype is torch.float16
    assert dataclasses.replace(policy, dtype="bfloat16").explain("add").dtype is torch.bfloat16
    assert Policy("O0").explain("add", torch.float32).dtype is torch.float32


def test_explain_reports_refused_where_on_unsupported_is_error(on):
    on(device(NATIVE, NONE))
    decision = Policy("O1", "bfloat16", on_unsupported="error").explain("linear", torch.float32)
    assert (
        str(decision) == "linear is refused: on_unsupported='error', and it has no kernels for it."
    )
    assert (
        Policy("O1", "float16", on_unsupported="error").explain("linear", torch.float32).dtype
        is torch.float16
    )
    assert (
        Policy("O0", on_unsupported="error").explain("linear", torch.float32).dtype is torch.float32
    )


def test_explain_uses_the_dtype_that_the_hardware_prefers(on):
    on(device(NATIVE, NONE))
    assert Policy("O1").explain("linear", torch.float32).dtype is torch.float16


def test_explain_rejects_unknown_ops_and_devices():
    with policy_error("^Unknown op 'lnear'. Did you mean 'linear'"):
        Policy("O0").explain("lnear", torch.float32)
    with policy_error("^Unknown device 'gpu'"):
        Policy().explain("linear", torch.float32, device="gpu")


def test_an_optimizer_in_the_place_of_a_policy_is_named_by_its_type():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with policy_error(r"^SGD is not a policy\. Pass a level such as 'O1'"):
        Policy.parse(optimizer)


def test_diff_accepts_whatever_parse_accepts(tmp_path):
    Policy("O1", half={"exp"}).save(tmp_path / "other.toml")
    assert Policy("O1").diff("O1", device="cpu").ops == ()
    assert Policy("O1").diff(tmp_path / "other.toml", device="cpu").ops == (
        ("exp", "keep", "half"),
    )
    with policy_error("^3 is not a policy. Pass a level such as 'O1'"):
        Policy("O1").diff(3)


def test_the_docstring_shows_every_field_with_its_default():
    shown = Policy.__doc__.partition("default = Policy(")[2].partition("... )")[0]
    arguments = [line.partition("=")[0].split()[-1] for line in shown.splitlines() if "=" in line]
    assert [name for name in FIELDS if name not in ("level", "dtype", *arguments)] == []


def test_the_signature_has_the_fields_with_level_and_dtype_positional():
    parameters = inspect.signature(Policy).parameters
    assert list(parameters) == FIELDS
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == ["level", "dtype"]
    assert repr(parameters["dtype"].default) == "'auto'"


# -- float32_inside --------------------------------------------------------------------------------


def test_float32_inside_is_explained_and_restricted():
    policy = Policy("O1", "bfloat16", preset="torch-cuda", float32_inside={"softmax"})
    decision = policy.explain("softmax", torch.bfloat16, device="cpu")
    assert decision.dtype is torch.bfloat16
    assert "sums in float32 and returns the input's dtype" in decision.reason
    assert policy.explain("softmax", torch.float32, device="cpu").dtype is torch.float32
    with pytest.raises(PolicyError, match=r"kernel of exp does not compute in float32 inside"):
        Policy(float32_inside={"exp"})
    with pytest.raises(PolicyError, match="default_rule='float32_inside' is not possible"):
        Policy(default_rule="float32_inside")
