"""The device side of ragged paged attention with a tree mask, in Triton; attention.py is the host side.

A program computes one item (ragged.py) after another: a tile of rows, with the query heads that share a key head
stacked as further rows, against some splits of the session's keys. It reads the page table in place.

    M  rows of a tile times heads        m  largest score, times log2(e)
    N  keys a block                      z  sum of exp2(score - m)

The tree mask: a row sees committed keys up to its limit and draft nodes by its bits, both within its window.
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

import triton
import triton.language as tl

from services.target.kernels.cuda.dependent_launch import launch_dependents, wait

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold(m, z, acc, m_next, z_next, acc_next):
    """Merge the softmax over further keys into the softmax over the keys before. m: [M]; z: [M]; acc: [M, DV].

    Written with explicit fused multiply-adds, so that every kernel that inlines it gives the same bits.
    """
    m_all = tl.maximum(m, m_next)
    safe = tl.where(m_all == float("-inf"), 0.0, m_all)
    old, new = tl.exp2(m - safe), tl.exp2(m_next - safe)
    return m_all, tl.fma(z, old, z_next * new), tl.fma(acc, old[:, None], acc_next * new[:, None])


@triton.jit
def _finish(m, z, acc, sink, v_scale, HAS_SINKS: tl.constexpr):
    """Attention of folded splits. sink: [M], times log2(e). Returns [M, DV]."""
    if HAS_SINKS:
        m_all = tl.maximum(m, sink)
        share = tl.exp2(m - m_all)
        z = tl.fma(z, share, tl.exp2(sink - m_all))
        acc = acc * share[:, None]
    scale = v_scale / tl.where(z > 0.0, z, 1.0)  # a row of padding sees nothing
    return acc * scale[:, None]


@triton.jit
def _blocks(  # noqa: C901 - its branches are chosen when it is compiled
    m, z, acc, begin, end, stop, q1, q2, k_pool, v_pool, pages, words, path, path_key, limit, node, own, start,
    low_position, position_of, scale, softcap, k_page, k_slot, v_page, v_slot,
    D1: tl.constexpr, D2: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr,
    N: tl.constexpr, WORDS, TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Attend over the keys begin .. end - 1, in blocks that start at multiples of N. stop: end of the keys."""
    d1, dv = tl.arange(0, D1), tl.arange(0, DV_PAD)
    for block in tl.range(begin, end, N):
        key = block + tl.arange(0, N)
        inside = key < stop
        at = key
        if ORDERED:
            on_path = inside & (key >= path_key)
            at = tl.where(on_path, tl.load(path + (key - path_key), mask=on_path, other=0), key)
        page = tl.load(pages + at // PAGE, mask=inside, other=0).to(tl.int64)
        slot = at % PAGE
        k_row = k_pool + page * k_page + slot * k_slot
        k1 = tl.load(k_row[None, :] + d1[:, None], mask=inside[None, :] & (d1 < D)[:, None], other=0.0)
        if WIDE:
            s = tl.dot(q1.to(tl.float32), k1.to(q1.dtype).to(tl.float32), input_precision="ieee")
        else:
            s = tl.dot(q1, k1.to(q1.dtype), input_precision="ieee")
        if D2 > 0:
            d2 = D1 + tl.arange(0, D2)
            k2 = tl.load(k_row[None, :] + d2[:, None], mask=inside[None, :] & (d2 < D)[:, None], other=0.0)
            if WIDE:
                s = tl.dot(q2.to(tl.float32), k2.to(q1.dtype).to(tl.float32), s, input_precision="ieee")
            else:
                s = tl.dot(q2, k2.to(q1.dtype), s, input_precision="ieee")
        s = s * scale
        if SOFTCAP:  # tanh by exp2; `scale` and `softcap` hold the factors
            s = softcap * (1.0 - 2.0 / (tl.exp2(s) + 1.0))
        seen = (key[None, :] <= limit[:, None]) & inside[None, :]
        if TREE:
            bit = tl.maximum(key - own, 0)
            is_node = inside & (key >= own)
            first_word = tl.maximum(block - own, 0) // 32
            for nth in tl.static_range((N + 30) // 32 + 1):  # word after word, as one for each key takes registers
                at_word = first_word + nth
                word = tl.load(words + node * WORDS + tl.minimum(at_word, WORDS - 1), mask=node >= 0, other=0)
                within = is_node & (bit // 32 == at_word)
                seen = seen | (within[None, :] & (((word[:, None] >> (bit % 32)[None, :]) & 1) != 0))
        if WINDOW:
            position = key.to(tl.int64)
            if TREE:
                position = tl.where(is_node, tl.load(position_of + key - start, mask=is_node, other=0), position)
            seen = seen & (position[None, :] >= low_position[:, None])
        s = tl.where(seen, s, float("-inf"))
        m_all = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_all == float("-inf"), 0.0, m_all)
        p = tl.exp2(s - safe[:, None])
        old = tl.exp2(m - safe)
        z = tl.fma(z, old, tl.sum(p, 1))
        v_row = v_pool + page * v_page + slot * v_slot
        v = tl.load(v_row[:, None] + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        acc = acc * old[:, None]
        if WIDE:
            acc = tl.dot(p.to(q1.dtype).to(tl.float32), v.to(q1.dtype).to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(q1.dtype), v.to(q1.dtype), acc, input_precision="ieee")
        m = m_all
    return m, z, acc


@triton.jit
def _range(
    begin, end, stop, q1, q2, k_pool, v_pool, pages, words, path, path_key, limit, node, own, start,
    low_position, position_of, scale, softcap, k_page, k_slot, v_page, v_slot,
    M: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, N: tl.constexpr, WORDS, TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Attend over the keys begin .. end - 1. Blocks with draft nodes come last; only these read the mask's bits."""
    plain_end = end
    if TREE:
        plain_end = tl.maximum(tl.minimum(own // N * N, end), begin)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DV_PAD], tl.float32)
    m, z, acc = _blocks(
        m, z, acc, begin, plain_end, stop, q1, q2, k_pool, v_pool, pages, words, path, path_key, limit, node, own,
        start, low_position, position_of, scale, softcap, k_page, k_slot, v_page, v_slot,
        D1, D2, D, DV, DV_PAD, PAGE, N, WORDS, False, WINDOW, SOFTCAP, WIDE, ORDERED,
    )  # fmt: skip
    if TREE:
        m, z, acc = _blocks(
            m, z, acc, plain_end, end, stop, q1, q2, k_pool, v_pool, pages, words, path, path_key, limit, node, own,
            start, low_position, position_of, scale, softcap, k_page, k_slot, v_page, v_slot,
            D1, D2, D, DV, DV_PAD, PAGE, N, WORDS, True, WINDOW, SOFTCAP, WIDE, ORDERED,
        )  # fmt: skip
    return m, z, acc


@triton.jit(do_not_specialize=["words_a_node"])
def attend(
    q, k_pool, v_pool, out, partial_acc, partial_ml, positions, tiles, items, item_count, pages, words, paths,
    sinks, scale, softcap, v_scale, window, words_a_node,
    q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
    ORDERED: tl.constexpr, EACH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """q: [T, KV_HEADS * GROUP, D]; pools: [pages, PAGE, KV_HEADS, D or DV]; out: [T, KV_HEADS * GROUP, DV].

    partial_acc: [partial rows, heads, DV], partial_ml: [partial rows, heads, 2] float32. A group's heads are cut into
    BLOCKS of HEADS. scale: of scores, times log2(e). D1 + D2 >= D is the width of keys in powers of two.
    ORDERED: tiles may look up the places of some keys in `paths`. EACH: an item's splits are computed one by one and
    folded, as by separate programs; otherwise they are one range of keys.
    """
    launch_dependents(CHAINED)
    total = tl.load(item_count) * (KV_HEADS * BLOCKS)
    for work in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        item = items + (work // (KV_HEADS * BLOCKS)) * 4
        kv_head = (work // BLOCKS) % KV_HEADS
        tile = tiles + tl.load(item) * 11
        first_split, last_split, partial = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        row0, rows, place = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        start, own = tl.load(tile + 3), tl.load(tile + 4)
        page_row, word_row = pages + tl.load(tile + 5), words + tl.load(tile + 6)
        low, split_keys = tl.load(tile + 7), tl.load(tile + 10)
        path_key, path = 0, paths
        if ORDERED:
            path_key, path = tl.load(tile + 8), paths + tl.load(tile + 9)

        lane = tl.arange(0, M)
        row = lane // HEADS  # of the tile
        in_group = (work % BLOCKS) * HEADS + lane % HEADS
        live = (row < rows) & (in_group < GROUP)
        head = kv_head * GROUP + in_group
        stop = start + place + rows  # end of the keys that the tile's last row may see
        limit = tl.minimum(start + place + row, own - 1)
        node = tl.where(row < rows, place + row - (own - start), -1)  # there are no bits after the last node
        low_position = tl.load(positions + row0 + row, mask=live, other=0) - window + 1
        wait(CHAINED)

        d1, d2, dv = tl.arange(0, D1), D1 + tl.arange(0, D2 if D2 > 0 else 1), tl.arange(0, DV_PAD)
        q_rows = q + (row0 + row).to(tl.int64) * q_row + head * q_head
        q1 = tl.load(q_rows[:, None] + d1[None, :], mask=live[:, None] & (d1 < D)[None, :], other=0.0)
        q2 = q1
        if D2 > 0:
            q2 = tl.load(q_rows[:, None] + d2[None, :], mask=live[:, None] & (d2 < D)[None, :], other=0.0)

        k_own, v_own, position_of = k_pool + kv_head * k_head, v_pool + kv_head * v_head, positions + row0 - place
        first_key = low // N * N
        if EACH:
            m_all = tl.full([M], float("-inf"), tl.float32)
            z_all = tl.zeros([M], tl.float32)
            acc_all = tl.zeros([M, DV_PAD], tl.float32)
            for split in tl.range(first_split, last_split):
                m, z, acc = _range(
                    tl.maximum(split * split_keys, first_key), tl.minimum((split + 1) * split_keys, stop), stop, q1, q2,
                    k_own, v_own, page_row, word_row, path, path_key, limit, node, own, start, low_position,
                    position_of, scale, softcap, k_page, k_slot, v_page, v_slot,
                    M, D1, D2, D, DV, DV_PAD, PAGE, N, words_a_node, TREE, WINDOW, SOFTCAP, WIDE, ORDERED,
                )  # fmt: skip
                m_all, z_all, acc_all = _fold(m_all, z_all, acc_all, m, z, acc)
        else:
            m_all, z_all, acc_all = _range(
                tl.maximum(first_split * split_keys, first_key), tl.minimum(last_split * split_keys, stop), stop, q1,
                q2, k_own, v_own, page_row, word_row, path, path_key, limit, node, own, start, low_position,
                position_of, scale, softcap, k_page, k_slot, v_page, v_slot,
                M, D1, D2, D, DV, DV_PAD, PAGE, N, words_a_node, TREE, WINDOW, SOFTCAP, WIDE, ORDERED,
            )  # fmt: skip

        if partial < 0:
            sink = tl.zeros([M], tl.float32)
            if SINKS:
                sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * _LOG2E
            result = _finish(m_all, z_all, acc_all, sink, v_scale, SINKS)
            out_rows = out + (row0 + row).to(tl.int64) * out_row + head * out_head
            tl.store(
                out_rows[:, None] + dv[None, :],
                result.to(out.dtype.element_ty),
                mask=live[:, None] & (dv < DV)[None, :],
            )
        else:
            at = (partial + row).to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(partial_acc + at[:, None] * DV + dv[None, :], acc_all, mask=live[:, None] & (dv < DV)[None, :])
            tl.store(partial_ml + at * 2, m_all, mask=live)
            tl.store(partial_ml + at * 2 + 1, z_all, mask=live)
    wait(CHAINED)  # programs without work must wait, too


@triton.jit
def fold(
    out, partial_acc, partial_ml, folds, sinks, v_scale, out_row, out_head,
    HEAD_COUNT: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, SINKS: tl.constexpr, AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Fold partial results in the order of their splits. One program a row and head; M is 1."""
    launch_dependents(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    base, step, count = tl.load(folds + row * 3), tl.load(folds + row * 3 + 1), tl.load(folds + row * 3 + 2)
    wait(CHAINED)
    if count > 0:
        dv = tl.arange(0, DV_PAD)
        one = tl.arange(0, 1)
        m_all = tl.full([1], float("-inf"), tl.float32)
        z_all = tl.zeros([1], tl.float32)
        acc_all = tl.zeros([1, DV_PAD], tl.float32)
        for group in tl.range(0, count, AT_ONCE):
            for nth in tl.static_range(AT_ONCE):  # unrolled, so that loads of several splits overlap
                split = group + nth + one
                there = split < count
                at = (base + split * step).to(tl.int64) * HEAD_COUNT + head
                m = tl.load(partial_ml + at * 2, mask=there, other=float("-inf"))
                z = tl.load(partial_ml + at * 2 + 1, mask=there, other=0.0)
                acc = tl.load(
                    partial_acc + at[:, None] * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0
                )
                m_all, z_all, acc_all = _fold(m_all, z_all, acc_all, m, z, acc)
        sink = tl.zeros([1], tl.float32)
        if SINKS:
            sink = tl.load(sinks + head + one).to(tl.float32) * _LOG2E
        result = _finish(m_all, z_all, acc_all, sink, v_scale, SINKS)
        at_out = out + row.to(tl.int64) * out_row + head * out_head + dv
        tl.store(at_out[None, :], result.to(out.dtype.element_ty), mask=(dv < DV)[None, :])
