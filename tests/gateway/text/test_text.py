"""Detokenization, stop strings and chat templates, without a gateway."""

import itertools
import json
import random
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from gateway.api.requests.native import NativeBody
from gateway.api.requests.schemas import CompletionBody
from gateway.api.routes.completions import prompt_texts
from gateway.api.routes.conversations import Conversations
from gateway.api.routes.tokens import install as install_tokens
from gateway.orchestration.generator import Generator
from gateway.sessions.request import GenerationRequest
from gateway.text import encoding
from gateway.text.stop import MAX_STOP_CHARACTERS, StopMatcher
from gateway.text.tokenizer import ModelTokenizer
from outrider.config import GatewayOptions
from outrider.errors import ConfigError, ContextTooLong, InvalidRequest
from outrider.speculation.sampling import SamplingParams
from outrider.text.tokenizer import LONG_TEXT
from tests.support.gateway.engines import CONTEXT, SPECIAL, VOCAB, tokenizer, tokenizer_files

CHAT = [{"role": "user", "content": "hi"}]


def byte_fallback() -> Tokenizer:
    """A tokenizer like those of Llama 2 and Gemma: words with a lower bar for the space, and 256 byte tokens."""
    words = ["▁", "▁a", "a", "b", "▁wörld", "!", "世", "▁▁", "e\u0301"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken("<tool>", special=False)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "▁a": 1, "a": 2, "▁": 3, "ö": 4, "</s>": 5, "▁▁b": 6}
    made = Tokenizer(models.Unigram([(word, -1.0) for word in vocab], unk_id=0))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    return made


def byte_level() -> Tokenizer:
    made = tokenizer()
    made.add_tokens([AddedToken("<tool>", special=False), AddedToken("äußer", special=False)])
    return made


TOKENIZERS = {made.__name__: made() for made in (byte_level, byte_fallback, metaspace)}
MODELS = {name: ModelTokenizer({"tokenizer.json": made.to_str().encode()}) for name, made in TOKENIZERS.items()}


def pieces(name, tokens, cuts, before=()):
    """Text of tokens that arrive in groups, piece by piece."""
    detokenizer = MODELS[name].detokenizer(before)
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    texts = [detokenizer.add(tokens[a:b]) for a, b in itertools.pairwise(edges)]
    return [*texts, detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_add_up_to_the_whole(name, data):
    made = TOKENIZERS[name]
    ids = st.integers(0, made.get_vocab_size() - 1)
    bytes_only = st.integers(3, 258) if name == "byte_fallback" else ids
    tokens = data.draw(st.lists(st.one_of(ids, bytes_only), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=40))
    assert "".join(pieces(name, tokens, cuts)) == made.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=12), cuts=st.lists(st.integers(0, 60), max_size=60))
def test_text_is_restored_without_half_characters(name, text, cuts):
    made = TOKENIZERS[name]
    tokens = made.encode(text, add_special_tokens=False).ids
    parts = pieces(name, tokens, cuts)
    assert "".join(parts) == made.decode(tokens, skip_special_tokens=True)
    if "\ufffd" not in text and "<unk>" not in [made.id_to_token(t) for t in tokens]:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_a_continued_text_equals_decoding_with_the_tokens_before(name, data):
    made = TOKENIZERS[name]
    ids = st.integers(0, made.get_vocab_size() - 1)
    word = made.encode("a a", add_special_tokens=False).ids[-1]  # no byte of a character
    before = [*data.draw(st.lists(ids, max_size=20)), word]
    tokens = data.draw(st.lists(ids, max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 20), max_size=20))
    whole = made.decode(before + tokens, skip_special_tokens=True)
    assert "".join(pieces(name, tokens, cuts, before)) == whole[len(made.decode(before, skip_special_tokens=True)) :]


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_a_continued_text_keeps_its_space(name):
    word, special = map(TOKENIZERS[name].token_to_id, ("▁a", "</s>"))
    assert "".join(pieces(name, [word, word], [1], [word])) == " a a"
    assert "".join(pieces(name, [word, word], [1], [word, special])) == " a a"
    assert "".join(pieces(name, [word, word], [1], [special])) == "a a"
    assert "".join(pieces(name, [word, word], [1])) == "a a"


def test_complete_text_is_returned_at_once():
    detokenizer = MODELS["byte_level"].detokenizer()
    tokens = TOKENIZERS["byte_level"].encode("aé世b").ids
    assert [detokenizer.add([t]) for t in tokens] == ["a", "", "é", "", "", "世", "b"]


def test_invalid_bytes_are_not_held_back_for_long():
    """Bytes that never become a character must not be decoded repeatedly."""
    detokenizer = MODELS["byte_level"].detokenizer()
    token = TOKENIZERS["byte_level"].encode("é").ids[1]  # a continuation byte
    given_out = [detokenizer.add([token]) for _ in range(2000)]
    assert "".join(given_out[:10])
    assert len("".join(given_out) + detokenizer.finish()) == 2000


# --- stop strings ---


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=30),
)
def test_text_ends_before_the_first_stop_string_for_all_cuts(text, stops, cuts):
    matcher, out = StopMatcher(stops), ""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for a, b in itertools.pairwise(edges):
        if not matcher.stopped:
            out += matcher.push(text[a:b])
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert matcher.stopped == bool(ends)
    if not ends:
        assert out + matcher.finish() == text
    elif len(edges) > len(text):  # character by character: the first to be complete, the longest of those
        assert out == text[: min(ends)[1]]


def test_a_stop_string_costs_as_much_a_character_however_long_it_is():
    """Counted in steps of the automaton: a text that almost matches again and again, and one held back for long."""
    stop = "a" * (MAX_STOP_CHARACTERS - 1) + "b"
    for text in ("a" * 20_000, ("a" * 999 + "c") * 20):
        matcher, steps = StopMatcher([stop]), 0
        automaton = matcher._automaton

        class Counted(list):
            def __getitem__(self, state):
                nonlocal steps
                steps += 1
                return super().__getitem__(state)

        transitions, automaton.transitions = automaton.transitions, Counted(automaton.transitions)
        try:
            out = "".join(matcher.push(text[i : i + 4]) for i in range(0, len(text), 4))
        finally:
            automaton.transitions = transitions
        assert steps <= 2 * len(text)
        assert out + matcher.finish() == text


# --- tokenizer ---


def test_raw_prompts_get_the_begin_token_that_the_tokenizer_adds():
    assert MODELS["byte_fallback"].encode("a")[0] == 1
    assert MODELS["byte_level"].encode("A") == TOKENIZERS["byte_level"].encode("A").ids


@pytest.mark.parametrize(("add", "first"), [(True, 0), (False, 38), (None, 38)])
def test_add_bos_token_of_the_settings(add, first):
    files = tokenizer_files()
    settings = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = json.dumps(settings | {"add_bos_token": add}).encode()
    model = ModelTokenizer(files)
    expected = tokenizer().encode("A").ids
    assert model.encode("A") == ([0, *expected] if add else expected)
    assert model.encode(SPECIAL[0] + "A") == [0, *expected]  # never twice


def test_a_missing_tokenizer_is_reported():
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ModelTokenizer({"config.json": b"{}"})


# --- chat templates ---


def test_the_test_vocabulary_is_as_expected():
    assert len(tokenizer().get_vocab()) == VOCAB


# --- prompts ---


class Watched:
    """A tokenizer that notes in which threads it works."""

    def __init__(self):
        self.threads = []

    def encode(self, text, *, special=True):
        self.threads.append(threading.get_ident())
        return MODELS["byte_level"].encode(text, special=special)

    def encode_chat(self, messages, **options):
        self.threads.append(threading.get_ident())
        return []


async def test_long_texts_are_tokenized_in_one_thread():
    here = threading.get_ident()
    for prompts, long in [
        (["a"], False),
        (["a", [5, 6], "b" * 4000], False),
        (["a" * 5000], True),
        (["a" * 1000] * 5, True),
        ([*["a"] * 500, [5, 6]], True),
        ([[5]] * 500, False),
    ]:
        watched = Watched()
        found = await encoding.encode_all(watched, prompts)
        assert found == [MODELS["byte_level"].encode(one) if isinstance(one, str) else one for one in prompts]
        assert len(set(watched.threads)) <= 1
        assert (here not in watched.threads) == long or not watched.threads
    for messages, options, long in [
        (CHAT, {}, False),
        (CHAT * 200, {}, True),
        ([{"role": "user", "content": "a" * 5000}], {}, True),
        ([*CHAT, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a" * 5000}}]}], {}, True),
        (CHAT, {"tools": [{"function": {"name": "f"}}]}, False),
        (CHAT, {"tools": [{"function": {"name": "f", "description": "a" * 5000}}]}, True),
    ]:
        watched = Watched()
        await encoding.encode_chat(watched, messages, options)
        assert (here not in watched.threads) == long


class Unread(list):
    """Tokens, or parts of a message, that must not be read."""

    def __iter__(self):
        raise AssertionError("it was read")

    __repr__ = __iter__


async def test_measuring_a_long_conversation_stops_early():
    watched = Watched()
    await encoding.encode_chat(watched, [{"content": Unread("a")}, {"content": "a" * LONG_TEXT}], {})
    assert threading.get_ident() not in watched.threads


def test_tokens_of_a_prompt_that_does_not_fit_are_not_read():
    orchestrator = SimpleNamespace(sessions=SimpleNamespace(max_session_tokens=CONTEXT))
    generator = Generator(orchestrator, MODELS["byte_level"], None, name="m", vocab_size=VOCAB, max_session_tokens=1)
    with pytest.raises(ContextTooLong, match=f"prompt of {CONTEXT} tokens"):
        generator.start(GenerationRequest(Unread([5] * CONTEXT), SamplingParams()))


class WatchedModel(ModelTokenizer):
    """A tokenizer that records the threads in which it decodes."""

    def __init__(self):
        super().__init__(tokenizer_files())
        self.threads = set()

    def decode(self, tokens, *, verbatim=False):
        self.threads.add(threading.get_ident())
        return super().decode(tokens, verbatim=verbatim)


@pytest.fixture
def watched():
    """A generator without services, and its tokenizer."""
    model = WatchedModel()
    return Generator(None, model, None, name="model", vocab_size=VOCAB, max_session_tokens=CONTEXT), model


@pytest.mark.parametrize(
    ("lists", "long"), [([[65]], False), ([[65] * 4000], False), ([[65] * 5000], True), ([[65]] * 500, True)]
)
@pytest.mark.parametrize("several", [False, True])
async def test_long_token_lists_are_decoded_in_a_thread(watched, lists, long, several):
    generator, model = watched
    app = FastAPI()
    models = SimpleNamespace(choose=lambda _: SimpleNamespace(generator=generator))
    install_tokens(app, models, Conversations(model, GatewayOptions()))
    if not several and len(lists) > 1:
        lists = [[token for one in lists for token in one] * 10]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        answer = await client.post("/detokenize", json={"tokens": lists if several else lists[0]})
    texts = [TOKENIZERS["byte_level"].decode(one) for one in lists]
    assert answer.json() == dict.fromkeys(("prompt", "text"), texts if several else texts[0])
    assert (threading.get_ident() not in model.threads) == long


async def test_an_echo_is_the_given_text_or_decoded(watched):
    generator, model = watched
    prompts = ["ab", "abc", [65, 66]]
    whole = await encoding.encode_all(model, prompts)
    cut = [whole[0], whole[1][1:], whole[2]]
    decode = TOKENIZERS["byte_level"].decode
    assert await prompt_texts(generator, prompts, whole, cut) == ["ab", decode(cut[1]), decode([65, 66])]
    assert model.threads == {threading.get_ident()}
    model.threads.clear()
    long = [[65] * 5000]
    assert await prompt_texts(generator, [prompts[0], *long], [whole[0], *long], [cut[0], *long]) == [
        "ab",
        decode(long[0]),
    ]
    assert threading.get_ident() not in model.threads
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        await prompt_texts(generator, [[VOCAB]], [[VOCAB]], [[VOCAB]])


@pytest.mark.parametrize("verbatim", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_token_lists_decode_like_short_ones(name, verbatim):
    ids = TOKENIZERS[name].encode("<tool>a aé 世</s> b " * 2000).ids
    assert len(ids) > LONG_TEXT
    text = TOKENIZERS[name].decode(ids, skip_special_tokens=not verbatim)
    assert MODELS[name].decode(ids, verbatim=verbatim) == text


def test_other_threads_run_while_a_long_text_is_tokenized():
    """Compares the longest pause of another thread with the time of tokenization."""
    rng = random.Random(0)
    text = " ".join("".join(rng.choices("abcdefghij ", k=6)) for _ in range(100_000))
    steps: list[float] = []
    done = threading.Event()

    def go():
        while not done.wait(0.001):
            steps.append(time.perf_counter())

    other = threading.Thread(target=go)
    other.start()
    begin = time.perf_counter()
    tokens = MODELS["byte_level"].encode(text)
    end = time.perf_counter()
    done.set()
    other.join()
    times = [begin, *(step for step in steps if begin < step < end), end]
    assert max(b - a for a, b in itertools.pairwise(times)) < (end - begin) / 2
    assert tokens == TOKENIZERS["byte_level"].encode(text).ids


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_texts_encode_like_short_ones(name, special):
    text = "<tool>a aé 世</s> b " * 500
    ids = TOKENIZERS[name].encode(text, add_special_tokens=special).ids
    assert MODELS[name].encode(text, special=special) == ids


@pytest.mark.parametrize(
    "body",
    [
        CompletionBody(prompt=["a"] * 129),
        CompletionBody(prompt=["a"] * 65, n=2),
        NativeBody(text=["a"] * 1025),
        NativeBody(text=["a"] * 600, sampling_params={"n": 2}),
    ],
)
def test_too_many_prompts_are_refused_before_they_are_tokenized(body):
    with pytest.raises(InvalidRequest, match="at most"):
        body.prompts()
