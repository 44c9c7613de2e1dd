"""Hidden states for drafters: what the engine sends is what `transformers` computes, whatever batch, chunk and tree."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save

from outrider.errors import ConfigError
from outrider.serving.features import FeatureBlock, FeatureFormat, FeatureSpec, cut, decode
from outrider.speculation.sampling import SamplingParams
from tests.support.target.driving import chain, engine_of, load_model, opening, preparing_engine, random_tree
from tests.support.target.features import F32, WIDTH, Reader, configured, prompts, proposals_of
from tests.support.tiny import VOCAB


@pytest.mark.parametrize("make", [engine_of, preparing_engine])
@pytest.mark.parametrize(("chunk", "page_size"), [(7, 4), (512, 16), (1, 1)])
@pytest.mark.parametrize("count", [1, 8])
def test_rows_are_those_of_transformers(model, truth, count, chunk, page_size, make):
    spec = FeatureSpec((1, 3, 8), final=True, format=F32)
    flags = {"page_size": page_size, "chunked_prefill_size": chunk, "max_running_requests": min(count, 5)}
    params = SamplingParams(temperature=0.8, seed=3)
    requests = [opening(i, text, params, max_tokens=20) for i, text in enumerate(prompts(count), start=1)]
    plain = Reader(engine_of(model, **flags))
    for request in requests:
        plain.open(request)
    plain.run()
    assert not any(plain.rows.values()), "no session asked for features"

    engine = make(model, **flags)
    wanted = configured(engine, spec)
    reader = Reader(engine)
    for request in requests:
        reader.open(replace(request, feature_spec=wanted))
    accepted = 0
    proposals = proposals_of(plain.tokens, 6 if make is engine_of else 14)
    while not engine.idle:
        accepted += sum(commit.accepted for commit in reader.step(proposals).commits)
    assert reader.tokens == plain.tokens
    assert accepted > 5 * count
    assert make is engine_of or engine.prepared > 2
    for request in requests:
        tokens = reader.tokens[request.session_id]
        states, rows = truth(tokens), reader.states(request.session_id)
        assert reader.first[request.session_id] == 0
        assert len(rows) >= len(tokens) - 1 - 15  # the last step's rows are of no use
        assert rows.shape[1] == 4 * WIDTH
        for column, layer in ((0, 1), (1, 3), (3, 8)):
            expected = states[layer][: len(rows)]
            np.testing.assert_allclose(rows[:, column * WIDTH : (column + 1) * WIDTH], expected, rtol=2e-3, atol=2e-3)


def served(model, spec, fusion=b"", layout=F32, text=tuple(range(30, 75)), **flags):
    """The rows of one session, and its tokens."""
    engine = engine_of(model, **flags)
    reader = Reader(engine, layout)
    reader.open(replace(opening(1, text), feature_spec=configured(engine, spec, fusion)))
    reader.run()
    return reader.states(1), reader.tokens[1]


def test_layers_by_default_are_those_of_eagle3(model, truth):
    rows, tokens = served(model, FeatureSpec(format=F32))
    states = truth(tokens)
    expected = np.concatenate([states[2], states[4], states[5]], -1)[: len(rows)]
    np.testing.assert_allclose(rows, expected, rtol=2e-3, atol=2e-3)


def test_the_fusion_is_the_plain_product(model, truth):
    rng = torch.Generator().manual_seed(0)
    fc, bias = torch.randn(20, 3 * WIDTH, generator=rng), torch.randn(20, generator=rng)
    norms = [torch.rand(WIDTH, generator=rng) + 0.5 for _ in range(3)]
    whole = torch.rand(3 * WIDTH, generator=rng) + 0.5

    def rms(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight.numpy()

    fusions = {
        "alone": {"fc.weight": fc},
        "with a bias": {"fc.weight": fc, "fc.bias": bias},
        "each state normed": {"fc.weight": fc} | {f"fc_norm.{i}.weight": w for i, w in enumerate(norms)},
        "all normed": {"fc.weight": fc, "norm_before_fc.weight": whole},
    }
    for name, tensors in fusions.items():
        rows, tokens = served(model, FeatureSpec((2, 4, 5), format=F32, norm_epsilon=1e-5), save(tensors))
        x = [truth(tokens)[layer][: len(rows)] for layer in (2, 4, 5)]
        if "fc_norm.0.weight" in tensors:
            x = [rms(state, weight) for state, weight in zip(x, norms, strict=True)]
        x = np.concatenate(x, -1)
        x = rms(x, whole) if "norm_before_fc.weight" in tensors else x
        expected = x @ fc.numpy().T + (bias.numpy() if "fc.bias" in tensors else 0)
        np.testing.assert_allclose(rows, expected, rtol=5e-3, atol=5e-2, err_msg=name)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", [FeatureFormat.FLOAT32, FeatureFormat.BFLOAT16])
def test_a_program_fuses_as_the_layer_does(folder, layout, biased):
    """Few rows and many, of several sessions, with nodes that are not accepted: the same bits."""
    model = load_model(folder, dtype="float32" if layout is F32 else "bfloat16")
    generator = torch.Generator().manual_seed(0)
    tensors = {"fc.weight": torch.randn(50, 3 * WIDTH, generator=generator)}
    tensors |= {"fc.bias": torch.randn(50, generator=generator)} if biased else {}
    spec, content = FeatureSpec((2, 4, 5), format=layout), save(tensors)
    texts = [*prompts(3), list(range(30, 190))]

    def results(by_program):
        engine = engine_of(model, page_size=4)
        wanted = configured(engine, spec, content)
        fusion = engine.features.registry.fusions[wanted]
        if fusion.layer is None:
            pytest.skip("there are no compiled programs")
        fusion.layer = fusion.layer if by_program else None
        reader = Reader(engine, layout)
        for i, text in enumerate(texts, start=1):
            reader.open(replace(opening(i, text, max_tokens=30), feature_spec=wanted))
        rng = np.random.default_rng(3)
        reader.run(lambda i, path: [random_tree(rng, i, path, VOCAB, 6)])
        return reader

    mine, plain = results(True), results(False)
    assert mine.tokens == plain.tokens
    for i in plain.rows:
        np.testing.assert_array_equal(mine.states(i), plain.states(i))


@pytest.mark.parametrize(("layout", "error"), [(FeatureFormat.BFLOAT16, 2**-8), (FeatureFormat.FLOAT8_E4M3, 2**-4)])
def test_formats_lose_no_more_than_they_must(model, layout, error):
    exact, _ = served(model, FeatureSpec((3,), format=F32))
    rows, _ = served(model, FeatureSpec((3,), format=layout), layout=layout)
    largest = np.abs(exact).max(-1, keepdims=True)
    # e4m3 has no numbers below 2^-9 of the scale, which is the largest over 448.
    assert np.all(np.abs(rows - exact) <= error * np.abs(exact) + largest / 448 * 2**-9)
    assert not np.array_equal(rows, exact)


def test_float8_bytes_mean_what_torch_says():
    every = torch.arange(256, dtype=torch.uint8)
    rows = torch.cat([torch.tensor([3.0]).view(torch.uint8), every])[None].numpy()
    expected = every.view(torch.float8_e4m3fn).float().numpy() * 3
    np.testing.assert_array_equal(decode(rows, FeatureFormat.FLOAT8_E4M3)[0], expected)


@pytest.mark.parametrize(("spec", "tensors", "words"), [
    (FeatureSpec((4, 2)), {}, "ascend"),
    (FeatureSpec((9,)), {}, "beyond"),
    (FeatureSpec((2, 4)), {"fc.weight": torch.zeros(8, 3 * WIDTH)}, "fc.weight"),
    (FeatureSpec((2,)), {"fc.bias": torch.zeros(WIDTH)}, "no fc.weight"),
    (FeatureSpec((2, 4)), {"fc_norm.0.weight": torch.zeros(WIDTH)}, "fc_norm"),
    (FeatureSpec((2,)), {"midlayer.weight": torch.zeros(1)}, "midlayer.weight"),
])  # fmt: skip
def test_specifications_that_do_not_fit_are_rejected(model, spec, tensors, words):
    with pytest.raises(ConfigError, match=words):
        engine_of(model).features.configure(1, spec, save(tensors))


def test_a_file_that_is_none_is_refused(model):
    with pytest.raises(ConfigError, match="safetensors"):
        engine_of(model).features.configure(1, FeatureSpec(final=True), b"nonsense")


# --- each position once, whatever happens to the pages ---


def test_preempted_sessions_are_sent_rows_once(model, truth):
    engine = engine_of(model, page_size=4, max_total_tokens=160, disable_radix_cache=True)
    wanted = configured(engine, FeatureSpec((4,), format=F32))
    reader = Reader(engine)
    for i, text in enumerate(prompts(6, longest=30), start=1):
        reader.open(replace(opening(i, text, max_tokens=40), feature_spec=wanted))
    reader.run()
    assert engine.scheduler.preemptions > 0
    for i, tokens in reader.tokens.items():
        rows = reader.states(i)
        assert (reader.first[i], len(rows)) == (0, len(tokens) - 2)
        np.testing.assert_allclose(rows, truth(tokens)[4][: len(rows)], rtol=2e-3, atol=2e-3)


def test_a_reopened_session_states_its_first_position(model):
    whole, tokens = served(model, spec := FeatureSpec((4,), format=F32))
    engine = engine_of(model)
    request = opening(1, tokens[:45], committed=tokens[45:55])
    engine.open(replace(request, feature_spec=configured(engine, spec), features_from=50))
    blocks = []
    while not engine.idle:
        blocks += engine.step().features
    assert blocks[0].first == 50
    assert np.allclose(np.concatenate([decode(b.rows, F32) for b in blocks]), whole[50:], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("cached", [True, False])
def test_a_session_with_all_rows_is_sent_new_ones(model, truth, ahead, cached):
    """Of the first step that is what is accepted behind the session's tokens."""
    spec, prompt = FeatureSpec((4,), format=F32), prompts(1)[0]
    plain = Reader(engine_of(model))
    plain.open(opening(1, prompt))
    tokens = plain.run().tokens
    reader = Reader(engine := engine_of(model, disable_radix_cache=not cached))
    first = len(prompt) + ahead
    reader.open(replace(opening(1, prompt), feature_spec=configured(engine, spec), features_from=first))
    reader.run(lambda session_id, path: [chain(session_id, path, tokens[session_id][len(path) :][:4])])
    assert reader.tokens == tokens
    assert reader.first[1] == first
    sent = reader.states(1)
    np.testing.assert_allclose(sent, truth(tokens[1])[4][first:][: len(sent)], rtol=2e-3, atol=2e-3)


def test_an_unknown_specification_gets_no_features(model):
    reader = Reader(engine := engine_of(model))
    reader.open(replace(opening(1, [5, 6, 7]), feature_spec=77))
    assert reader.run().rows[1] == []
    assert not engine.features.asked


def test_specifications_in_use_are_not_evicted(model):
    engine = engine_of(model)
    wanted = configured(engine, FeatureSpec((1,), format=F32))
    for i in range(1, 12):
        reader = Reader(engine)
        reader.open(replace(opening(i, [5, 6, 7]), feature_spec=wanted))
        assert reader.run().rows[i]
        configured(engine, FeatureSpec((2,), format=F32, norm_epsilon=i * 1e-6))  # the next version of another head
    assert len(engine.features.registry.fusions) == 8


# --- prompts that repeat ---


def test_cached_rows_come_with_their_features(model, truth):
    engine = engine_of(model, page_size=4)
    wanted = configured(engine, FeatureSpec((2, 4), format=F32))
    text = list(range(30, 75))
    reader = Reader(engine)
    for i, tail in enumerate(([], [9, 9, 9], [8] * 7), start=1):
        reader.open(replace(opening(i, [*text, *tail]), feature_spec=wanted))
        reader.run()
        states = truth(reader.tokens[i])
        rows = reader.states(i)
        assert (reader.first[i], len(rows)) == (0, len(reader.tokens[i]) - 2)
        expected = np.concatenate([states[2], states[4]], -1)[: len(rows)]
        np.testing.assert_allclose(rows, expected, rtol=2e-3, atol=2e-3)
    assert engine.features.store.bytes == len(engine.features.store.pages) * 4 * 2 * WIDTH * 4
    assert set(engine.features.store.pages) == set(engine.scheduler.prefix.pages)
    engine.scheduler.prefix.flush()
    assert engine.features.store.bytes == 0


@pytest.mark.parametrize("room", [0, 1 << 20])
@pytest.mark.parametrize("order", ["on off on", "off on", "off other on other", "other on off on"])
def test_sessions_share_pages_whatever_features_they_want(model, truth, order, room):
    """As with speculation, without it, and with the head of another draft service, in any order."""
    engine = engine_of(model, page_size=4, feature_cache_bytes=room)
    # The second specification is the one configured last, whose rows sessions without a drafter leave behind.
    specs = {"other": ((3,), configured(engine, FeatureSpec((3,), format=F32)))}
    specs |= {"on": ((2, 4), configured(engine, FeatureSpec((2, 4), format=F32))), "off": ((), 0)}
    text, seen, taken, texts = list(range(30, 75)), set(), {}, []
    for i, kind in enumerate(order.split(), start=1):
        layers, wanted = specs[kind]
        reader = Reader(engine)
        reader.open(replace(opening(i, text, max_tokens=30), feature_spec=wanted))
        while not engine.idle:
            assert kind != "off" or len(engine.features.store.pending) <= len(text) // 4
            for commit in reader.step().commits:
                taken[i] = max(taken.get(i, 0), commit.cached_tokens)
        has_rows = room and (kind in seen or (kind == "on" and "off" in seen))
        assert taken[i] == (44 if seen and (kind == "off" or has_rows) else 0), kind
        if layers:
            states, rows = truth(reader.tokens[i]), reader.states(i)
            assert (reader.first[i], len(rows)) == (0, len(reader.tokens[i]) - 2)
            expected = np.concatenate([states[layer] for layer in layers], -1)[: len(rows)]
            np.testing.assert_allclose(rows, expected, rtol=2e-3, atol=2e-3)
        else:
            assert not reader.rows[i]
        seen.add(kind)
        texts.append(reader.tokens[i])
        assert not engine.features.store.pending
        engine.check()
    assert texts == texts[:1] * len(texts)
    assert not engine.features.captures
    assert not engine.features.subscriptions


@pytest.mark.parametrize("pages", [0, 5, 100])
def test_pages_without_rows_are_computed_again(model, truth, pages):
    """A drafter could not begin behind a gap."""
    page = 4 * WIDTH * 4
    engine = engine_of(model, page_size=4, feature_cache_bytes=pages * page)
    wanted = configured(engine, FeatureSpec((2,), format=F32))
    reader, cached = Reader(engine), {}
    for i in (1, 2, 3):
        reader.open(replace(opening(i, [*range(30, 75), i]), feature_spec=wanted))
        reader.run()
        rows = reader.states(i)
        assert (reader.first[i], len(rows)) == (0, len(reader.tokens[i]) - 2)
        np.testing.assert_allclose(rows, truth(reader.tokens[i])[2][: len(rows)], rtol=2e-3, atol=2e-3)
        cached[i] = engine.scheduler.prefix.allocator.cached_pages
        engine.check()
    if pages:
        assert engine.features.store.bytes <= pages * page
        assert cached[3] < 2 * cached[1], "they share what they compute anew"


def test_rows_that_were_used_last_are_kept_longest(model):
    page = 4 * WIDTH * 4
    engine = engine_of(model, page_size=4, feature_cache_bytes=30 * page)
    wanted = configured(engine, FeatureSpec((2,), format=F32))
    took = []
    for i in range(1, 6):
        engine.open(replace(opening(i, [*range(30, 70), *[i] * 21], max_tokens=2), feature_spec=wanted))
        while not engine.idle:
            took += [commit.cached_tokens for commit in engine.step().commits if commit.cached_tokens]
    assert took == [40] * 4, "what all begin with is there as long as anything"


# --- frames ---


def test_blocks_are_cut_between_rows():
    blocks = [FeatureBlock(i, 10 * i, np.full((7, 3), i, np.uint8), 5 + i) for i in range(3)]
    for limit in (1, 3, 10, 21, 40, 1000):
        rest, pieces = list(blocks), []
        while rest:
            head, rest = cut(rest, limit)
            assert head
            assert sum(b.rows.nbytes for b in head) <= max(limit, 3)
            pieces += head
        for i in range(3):
            own = [b for b in pieces if b.session_id == i]
            assert [b.first for b in own] == [10 * i + sum(len(p.rows) for p in own[:j]) for j in range(len(own))]
            assert sum(len(b.rows) for b in own) == 7
            assert {b.spec_id for b in own} == {5 + i}
