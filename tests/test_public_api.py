"""The public API is the one that is stored, and every name of it is documented."""

import difflib
import re

from support import public_api


def test_the_public_api_is_the_one_that_is_stored():
    stored = public_api.STORED.read_text().splitlines()
    difference = list(
        difflib.unified_diff(stored, public_api.lines(), "stored", "this code", lineterm="", n=0)
    )
    assert not difference, "\n".join(
        [
            "The public API changed. Names that users have must stay, with their arguments.",
            f"If the change is intended, run: {public_api.COMMAND}",
            *difference,
        ]
    )


def test_every_public_function_class_and_method_is_documented():
    undocumented = [
        one.name
        for one in public_api.public_names()
        if one.needs_docstring and not says_more_than_its_name(one)
    ]
    assert undocumented == []


def says_more_than_its_name(one):
    name = one.name.rpartition(".")[2].lower().replace("_", " ").split()
    first = (one.docstring or "").split("\n")[0].lower()
    return len(set(re.findall(r"\w+", first)) - {*name, "the", "a", "an", "return"}) >= 2


def test_the_stored_names_are_those_that_can_be_imported():
    import mezzo

    stored = public_api.STORED.read_text().splitlines()
    names = {re.match(r"mezzo\.(\w+)", line)[1] for line in stored}
    assert set(mezzo.__all__) == names - {"compat", "integrations"}


def test_the_description_has_methods_properties_fields_and_attributes():
    described = public_api.lines()
    for line in (
        "mezzo.GradScaler.unscale_(self, optimizer)",
        "mezzo.Converted.plan: property",
        "mezzo.Hardware.name: field",
        "mezzo.Run.every: field",
        "mezzo.integrations.lightning.MezzoPrecision.scaler: property",
        "mezzo.compat.paddle.amp.auto_cast",
    ):
        assert line in described, line
