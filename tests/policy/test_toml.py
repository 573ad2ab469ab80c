"""Policy files: readable, read back equal, and refused with the place that is wrong."""

import re

import pytest
from hypothesis import given, settings
from support.policies import FULLEST, policies

from mezzo import Policy, PolicyError
from mezzo.policy import parse


@settings(max_examples=50)
@given(policy=policies())
def test_any_policy_is_read_back_equal(policy, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    policy.save(path)
    assert Policy.load(path) == policy
    assert hash(Policy.load(path)) == hash(policy)


def test_a_file_reads_like_the_constructor(tmp_path):
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


def test_an_empty_file_is_a_plain_policy(tmp_path):
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
def test_a_file_that_an_editor_wrote_is_read(content, tmp_path):
    (tmp_path / "policy.toml").write_bytes(content)
    assert Policy.load(tmp_path / "policy.toml") == Policy("O2", half={"exp"})


@pytest.mark.parametrize(
    "name",
    ["größe.*", "😀", 'quo"te', "back\\slash", "line\nbreak", "\x7f\x00", "a.b.c", "[0]", "#"],
)
def test_a_module_name_of_any_kind_is_read_back(name, tmp_path):
    policy = Policy(modules={name: "half"}, keep_full=[name])
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -1, 2**70, 0.1, 1e-300, 1e22, float("inf"), float("-inf"), "", "{}"],
)
def test_a_value_of_any_kind_is_read_back(value, tmp_path):
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
def test_malformed_toml_is_refused_with_the_place_and_what_it_should_look_like(
    content, place, tmp_path
):
    path = tmp_path / "policy.toml"
    path.write_text(content)
    with pytest.raises(PolicyError) as error:
        Policy.load(path)
    assert str(error.value).startswith(f"{str(path)!r} is not valid TOML: ")
    assert place in str(error.value)
    assert 'A policy file holds lines such as level = "O1" and full = ["softmax"].' in str(
        error.value
    )


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "policy.toml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PolicyError, match="is not valid TOML"):
        Policy.load(tmp_path / "policy.toml")


def test_a_missing_file_is_named_with_how_to_write_one(tmp_path):
    path = tmp_path / "none.toml"
    with pytest.raises(
        PolicyError,
        match=(
            rf"^There is no policy file at {re.escape(repr(str(path)))}\. Write one with"
            r" `policy.save\(path\)`\.$"
        ),
    ):
        Policy.load(path)


def test_a_directory_is_no_policy_file(tmp_path):
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
        ('half = "exp"', r"half='exp' should be a set of op names\. Write half=\{'exp'\}"),
        ("half = {}", r"half=\{\} should be a set of op names"),
        ("half = [1]", "An op is named by a string such as 'softmax', got 1"),
        ('dtype = "float"', r"dtype='float' .*Choose one of: auto, float16, bfloat16"),
        ("dtype = 2026-01-01", "dtype=2026-01-01 is not a dtype"),
        ('conditional = ["softmax", "dim", [-1]]', "A conditional entry is"),
        ('conditional = [["softmax", "dimm", [-1]]]', "softmax has no argument 'dimm'"),
        (
            '[modules]\nencoder.norm = "full"',
            'A name with dots is quoted in TOML: "encoder.norm" = "full"',
        ),
        ('modules = ["head"]', r"modules=\['head'\] should be a table"),
        (
            '[exempt_args]\nbatchnorm = ["weight"]',
            "Unknown op 'batchnorm'. Did you mean 'batch_norm'",
        ),
    ],
)
def test_words_that_make_no_sense_are_refused_with_the_file_they_stand_in(
    content, message, tmp_path
):
    path = tmp_path / "policy.toml"
    path.write_text(content)
    with pytest.raises(PolicyError, match=message) as error:
        Policy.load(path)
    assert str(error.value).startswith(f"In {str(path)!r}: ")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "policy.toml"
    Policy("O2").save(path)

    def fail(value):
        raise RuntimeError(value)

    monkeypatch.setattr(parse, "_value", fail)
    with pytest.raises(RuntimeError):
        Policy("O3").save(path)
    assert Policy.load(path) == Policy("O2")
    assert [found.name for found in tmp_path.iterdir()] == ["policy.toml"]


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "policy.toml").write_text("full = " + "[" * 100_000)
    with pytest.raises(PolicyError, match="nested too deeply"):
        Policy.load(tmp_path / "policy.toml")
