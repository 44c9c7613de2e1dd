"""The file of --models: flags of each model, and its mistakes."""

import pytest

from gateway.process.models_file import model_configs
from outrider.config import GatewayConfig
from outrider.errors import ConfigError


def configs(tmp_path, content, **flags):
    file = tmp_path / "models.toml"
    file.write_text(content)
    return model_configs(GatewayConfig(models=str(file), **flags))


def test_flags_of_the_command_line_hold_where_a_table_has_none(tmp_path):
    first, second = configs(
        tmp_path,
        '[b]\ntarget = ["x:1", "y:1"]\ndraft = "z:1"\nreasoning-parser = "qwen3"\ncache-threshold = 1\n[a]\n'
        'served_model_name = ["a", "c"]\nmodel-path = "org/a"\n',
        reasoning_parser="none", balance_abs_threshold=3,
    )  # fmt: skip
    assert (first.served_model_name, first.target, first.draft) == (("b",), ("x:1", "y:1"), ("z:1",))
    assert (first.reasoning_parser, first.cache_threshold, first.balance_abs_threshold) == ("qwen3", 1, 3)
    assert (second.served_model_name, second.target, second.draft) == (("a", "c"), (), ())
    assert (second.reasoning_parser, second.model_path) == ("none", "org/a")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no model"),
        ("[a", "cannot be read"),
        ("a = 1\n", "stands before the first table"),
        ("[a]\nport = 1\n", "no flag of a model"),
        ("[qwen2.5-7b]\n", '["qwen2.5-7b"]'),
        ("[a]\ntarget = 5\n", "no value of this flag"),
        ('[a]\nreasoning-parser = "best"\n', "choose one of auto, none, deepseek-r1, qwen3"),
        ('[a]\ncache-threshold = "much"\n', "no value of this flag"),
        ('[a]\n[b]\nserved-model-name = "a"\n', "is the name of two models"),
        ("[default]\n", "what requests write"),
        ("[[a]]\n", "write [a]"),
        ('[a]\nmodel-path = "x"\nmodel_path = "y"\n', "an entry twice"),
        ("[a]\nmodel-path = 3\n", "3 is no value of this flag ("),
        ('[a]\nservice-token = "secret"\n', "'service-token', which is no flag of a model"),
        ('[a]\ntarget = ""\n', "[a]: '' is no address"),
        ('[a]\ntarget = "grpc://gpu1"\n', "is no address; write HOST:PORT"),
        ("[a]\nrequest-timeout = -1\n", "[a]: --request-timeout must be more than 0"),
        ('[a]\nserved-model-name = " "\n', "--served-model-name is empty"),
    ],
)
def test_mistakes_in_the_file(tmp_path, content, words):
    with pytest.raises(ConfigError) as caught:
        configs(tmp_path, content)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"draft": ("x:1",)}, "--draft is for one model"), ({"require_draft": True}, "--require-draft would end")],
)
def test_flags_that_do_not_go_with_a_file(tmp_path, flags, words):
    with pytest.raises(ConfigError, match=words):
        configs(tmp_path, "[a]\n", **flags)
