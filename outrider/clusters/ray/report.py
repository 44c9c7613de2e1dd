"""A pool's state as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_HEAD = ("unit", "state", "machine", "address", "sessions", "restarts", "reason")


def state_table(pool: Mapping[str, Any]) -> str:
    """The replicas, a line each, and the loads that decide on their number."""
    rows = [_HEAD]
    for one in pool["units"]:
        unit = f"{one['unit']}.{one['process']}" if one["process"] else one["unit"]
        serves = one["kind"] != "gateway" and one["address"]
        sessions = str(one["sessions"]) if serves else ""
        rows.append((
            unit, one["state"], one["node"], one["address"], sessions, str(one["restarts"] or ""), one["reason"]
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [_load_line(kind, pool) for kind in pool["load"]]
    state = "serves" if pool["serves"] else "does not serve"
    return "\n".join([f"the pool {pool['name']} {state}", *lines])


def _load_line(kind: str, pool: Mapping[str, Any]) -> str:
    load = pool["load"][kind]
    count = len({one["unit"] for one in pool["units"] if one["kind"] == kind and one["state"] != "leaving"})
    words = [
        f"{kind}s: {count} of {pool['replicas'][kind]}",
        f"{load['sessions']} sessions for {load['capacity']}, {load['waiting']} waiting",
    ]
    if load["late"] is not None:
        words.append(f"draft tokens late in {load['late']:.0%} of steps, {load['gain']:.2f} accepted per step")
    if load["lag_steps"] is not None:
        words.append(f"proposals {load['lag_steps']:.2f} steps behind")
    return ", ".join(words)


def addresses(pool: Mapping[str, Any]) -> str:
    """Where the pool serves."""
    found = [one["address"] for one in pool["units"] if one["kind"] == "gateway" and one["state"] == "ready"]
    return f"the pool {pool['name']} serves at {', '.join(f'{address}/v1' for address in found)}"


def changes(seen: dict[str, str], pool: Mapping[str, Any]) -> Iterator[str]:
    """A line for each process whose state has changed since the last call. seen: the states then; updated."""
    for one in pool["units"]:
        name = f"{one['unit']}.{one['process']}" if one["process"] else one["unit"]
        text = one["state"] + (f": {one['reason']}" if one["reason"] else "")
        if one["address"] and one["state"] == "ready":
            text += f" at {one['address']}"
        if seen.get(name) != text:
            seen[name] = text
            yield f"{name} {text}"
