"""What docs/models.md and the README claim of models is what the loaders do, family by family, on small checkpoints."""

import re
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from services.draft.formats.decoders import _READERS
from services.draft.formats.mtp import read_mtp
from services.draft.formats.target import read_target
from services.target.model.decoder import MODEL_TYPES
from services.target.model.loading.support import read_settings
from tests.support.checkpoints.families import DRAFTING, FAMILIES, write_family
from tests.support.checkpoints.mtp import PREFIXES, write_mtp

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*)\|$", MODELS.partition("## GGUF")[0], re.MULTILINE)[1:]
CLAIMS = {name: (served, drafts.strip()) for name, served, drafts in ROWS}


def family_of(name):
    """The family of tests/support/checkpoints/families.py that a row of the table names."""
    key = name.removesuffix(" (text)").replace(" with experts", "-moe").replace(" ", "-").lower()
    return {"mimo-7b": "mimo"}.get(key, key)


def test_the_table_has_a_row_for_every_family_that_is_tested():
    assert sorted(map(family_of, CLAIMS)) == sorted([*FAMILIES, *DRAFTING])
    claimed = {family_of(name) for name, (_, drafts) in CLAIMS.items() if drafts}
    assert claimed == set(PREFIXES) - set(DRAFTING)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_family_is_served_or_refused_as_the_table_says(tmp_path, name):
    served, _ = CLAIMS[name]
    folder = write_family(tmp_path / "model", family_of(name))
    if served == "yes":
        read_settings(folder, trust_remote_code=False)
    elif "--trust-remote-code" in served:
        with pytest.raises(ConfigError, match="--trust-remote-code"):
            read_settings(folder, trust_remote_code=False)
        read_settings(folder, trust_remote_code=True)
    else:
        with pytest.raises(ConfigError, match=served.removeprefix("no: ").replace(" ", "_")):
            read_settings(folder, trust_remote_code=True)


@pytest.mark.parametrize("name", [name for name, (_, drafts) in CLAIMS.items() if drafts])
def test_mtp_layers_draft_as_the_table_says(tmp_path, name):
    several = {"yes": False, "several layers": True}[CLAIMS[name][1]]
    folder = write_mtp(tmp_path / "model", family_of(name), layers=3 if several else 1)
    config = read_mtp(folder, read_target(folder)).config
    assert (config.stacked, len(config.layers)) == (several, 3 if several else 1)


def words(text, pattern):
    """The names in the sentence that a pattern finds, without what stands in parentheses."""
    [sentence] = re.findall(pattern, " ".join(text.split()))
    return [name.strip() for name in re.split(r",| and ", re.sub(r" \([^)]*\)", "", sentence)) if name.strip()]


def test_the_readme_names_no_other_families():
    named = words(README, r"or GGUF files: ([^.]*(?:\.\d[^.]*)*)\. FP8")
    assert len(named) > 10
    served = [name for name, (how, _) in CLAIMS.items() if not how.startswith("no")]
    assert [name for name in named if not any(family.startswith(name) for family in served)] == []


def test_small_models_that_draft_are_those_with_a_reader():
    readers = {name.partition("For")[0].lower() for name in _READERS}
    named = {
        re.sub(
            r"^(smollm2|qwen2\.5)$", lambda m: {"smollm2": "llama"}.get(m[0], "qwen2"), name.replace(" ", "").lower()
        )
        for name in words(MODELS, r"\*\*STANDALONE\*\* reads (.*?), each compared")
    }
    assert named == readers


def test_whole_programs_are_those_of_the_table_of_decoders():
    named = {
        name.replace(" ", "").lower() for name in words(MODELS, r"first start\. (.*?) run as whole compiled programs")
    }
    assert named == {kind.removesuffix("_text") for kind in MODEL_TYPES}
