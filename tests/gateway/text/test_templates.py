"""Chat templates: as those of transformers, in files of their own, and with failures."""

import json

import pytest

from gateway.text.tokenizer import ModelTokenizer
from outrider.errors import ConfigError, InvalidRequest
from tests.support.gateway.engines import tokenizer, tokenizer_files

CHAT = [{"role": "user", "content": "hi"}]


def rendered(template, messages=CHAT, **options):
    model = ModelTokenizer(tokenizer_files(template))
    return tokenizer().decode(model.encode_chat(messages, **options), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<|begin|>hi<|end|>"),
        ("{%- for m in messages %}\n    {%- if loop.first %}x{%- continue %}{% endif %}\n{%- endfor %}y", "xy"),
        ("{% if true %}\na\n{% endif %}\n", "a\n"),  # trim_blocks, lstrip_blocks
        ('{{ {"a": "ü<"} | tojson }}', '{"a": "ü<"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools is defined and tools %}t{% endif %}{% if add_generation_prompt %}g{% endif %}", "g"),
        ("{% generation %}z{% endgeneration %}", "z"),
    ],
)
def test_features_of_published_templates(template, text):
    assert rendered(template) == text


def test_of_several_templates_the_one_for_tools_is_used():
    """As Hermes and Command R publish theirs."""
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ tools | length }}"}]
    assert rendered(named) == "d"
    assert rendered(named, tools=TOOLS) == "t1"
    assert rendered(named[:1], tools=TOOLS) == "d"
    assert rendered(named[1:], tools=TOOLS) == "t1"
    with pytest.raises(InvalidRequest, match="no chat template"):
        rendered(named[1:])


def test_templates_in_files_of_their_own_are_chosen_as_transformers_does(tmp_path):
    """Its tokenizers write several so; what stands in their settings beside a default template is of no account."""
    from transformers import PreTrainedTokenizerFast

    settings = tokenizer_files([{"name": "default", "template": "no"}, {"name": "tool_use", "template": "no"}])
    (tmp_path / "tokenizer.json").write_bytes(settings["tokenizer.json"])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = {"default": "d", "tool_use": "t{{ tools | length }}", "rag": "{{"}
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(settings["tokenizer_config.json"])
    files = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*.j*")}
    assert "additional_chat_templates/tool_use.jinja" in files
    ours, theirs = ModelTokenizer(files), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools, expected in ((None, "d"), (TOOLS, "t1")):
        assert ours.template.render(CHAT, tools=tools) == expected
        assert theirs.apply_chat_template(CHAT, tools=tools, tokenize=False) == expected
    del files["chat_template.jinja"]
    assert ModelTokenizer(files).template.render(CHAT) == "no"


@pytest.mark.parametrize("listed", [False, True])
def test_templates_have_the_special_tokens_of_transformers(listed, tmp_path):
    """All names, those that one model alone has too; older checkpoints have them in a file of their own."""
    from transformers import PreTrainedTokenizerFast

    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token")
    files = tokenizer_files("|".join(f"{{{{ {name} }}}}" for name in names))
    settings = json.loads(files["tokenizer_config.json"])
    settings |= {"sep_token": "<s>", "cls_token": {"__type": "AddedToken", "content": "<c>"}}
    settings |= {"extra_special_tokens": {"image_token": "<i>"}} | ({"added_tokens_decoder": {}} if listed else {})
    beside = {"bos_token": "<b>", "mask_token": {"content": "<m>"}, "additional_special_tokens": ["<a>"]}
    files |= {"tokenizer_config.json": json.dumps(settings).encode()}
    files |= {"special_tokens_map.json": json.dumps(beside).encode()}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(CHAT, tokenize=False)
    assert ModelTokenizer(files).template.render(CHAT) == theirs
    assert ("<m>" in theirs, "<i>" in theirs) == (not listed, True)


@pytest.mark.parametrize(("own", "beside", "text"), [(None, "b", "b"), ("a", "b", "a"), (None, None, None)])
def test_a_template_in_a_json_file_of_its_own(own, beside, text):
    """As models that see images too publish theirs, beside the processor's settings."""
    files = tokenizer_files(own) | {"chat_template.json": json.dumps({"chat_template": beside}).encode()}
    assert ModelTokenizer(files).template.source == text


TOOLS = [{"type": "function", "function": {"name": "f", "description": "ü<", "parameters": {"b": [1, 2], "a": {}}}}]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "ensure_ascii=true",
        "indent=2",
        "separators=(',', ':')",
        "sort_keys=true",
        "true, none, (',', ':'), true",
        "indent=4, separators=(',', ': '), sort_keys=true",
    ],
)
def test_json_in_templates_equals_that_of_transformers(options):
    from transformers.utils.chat_template_utils import render_jinja_template

    template = f"{{{{ tools | tojson({options}) }}}}"
    (theirs,), _ = render_jinja_template([CHAT], tools=TOOLS, chat_template=template)
    assert rendered(template, tools=TOOLS) == theirs


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only text') }}",
        "{{ messages[0].content | tojson(colour=1) }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_failing_and_escaping_templates_are_invalid_requests(template):
    with pytest.raises(InvalidRequest) as error:
        rendered(template)
    assert error.value.param == "messages"


def test_a_template_that_cannot_be_read_is_refused_at_start_up():
    with pytest.raises(ConfigError, match="template"):
        ModelTokenizer(tokenizer_files("{% for %}"))
