"""Compiling grammars: in turns, only what is wanted, and never more than a grammar may take."""

import threading
import time

import pytest

from outrider.errors import InvalidRequest, Overloaded
from outrider.serving.messages import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from services.target.grammar import compile_queue
from services.target.grammar.compile_queue import CompileQueue, Job
from services.target.grammar.gbnf import readable
from services.target.grammar.sandbox import Abandoned, Sandbox


def grammar(text, kind=GrammarKind.REGEX):
    return Grammar(kind, text)


class Compiler:
    """Compiles when a test allows it. order: the grammars that it was given."""

    def __init__(self):
        self.order, self.allowed, self.change = [], set(), threading.Condition()
        self.queue = CompileQueue(self.compile)

    def compile(self, wanted, still_wanted):
        self.order.append(wanted.text)
        with self.change:
            while wanted.text not in self.allowed:
                if not still_wanted():
                    raise Abandoned
                self.change.wait(0.01)
        return wanted.text

    def add(self, text, namespace="", session=0):
        job = Job(grammar(text), {session})
        self.queue.add(job, namespace)
        return job

    def settled(self, *jobs):
        """The results of jobs, once all are done."""
        with self.change:
            self.allowed.update(job.grammar.text for job in jobs)
            self.change.notify_all()
        return [job.future.result(10) for job in jobs]

    def wait_for(self, texts):
        """Until these grammars were given to the threads, by whichever thread first."""
        for _ in range(500):
            if sorted(self.order) == sorted(texts):
                return
            time.sleep(0.01)
        raise AssertionError(f"{self.order} instead of {texts}")


def test_a_caller_with_many_grammars_does_not_delay_the_others():
    compiler = Compiler()
    many = [compiler.add(f"m{i}", "greedy") for i in range(compile_queue.MAX_WAITING)]
    compiler.wait_for(["m0", "m1"])  # both threads
    few = [compiler.add(f"f{i}", "modest") for i in range(2)]
    compiler.wait_for(["m0", "m1", "f0"])
    other = compiler.add("o", "third")
    compiler.wait_for(["m0", "m1", "f0", "o"])
    compiler.settled(*few, other)  # while the first two are still compiled
    assert sorted(compiler.order[:2]) == ["m0", "m1"]  # two threads begin, either may be first
    assert compiler.order[2:] == ["f0", "o", "f1"]
    assert len(compiler.settled(*many)) == len(many)


def test_grammars_that_no_session_waits_for_are_not_compiled():
    compiler = Compiler()
    first, _, second, third = (compiler.add(text, "one") for text in "abcd")
    compiler.wait_for(["a", "b"])
    for job in (first, second):  # one is being compiled, one waits
        compiler.queue.leave(job, 0)
    compiler.wait_for(["a", "b", "d"])
    assert compiler.settled(third) == ["d"]
    assert first.future.cancelled()
    assert second.future.cancelled()
    assert not compiler.queue.join(first, 1), "a later session needs a job of its own"


def test_the_grammars_of_a_caller_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(compile_queue, "MAX_WAITING", 3)
    compiler = Compiler()
    running = [compiler.add("r", "one"), compiler.add("s", "one")]
    compiler.wait_for(["r", "s"])
    jobs = [compiler.add(text, "one") for text in "abc"]
    with pytest.raises(Overloaded, match="3 grammars of this caller"):
        compiler.add("d", "one")
    other = compiler.add("o", "two")
    compiler.queue.leave(jobs[0], 0)  # its client has left
    jobs[0] = compiler.add("d", "one")
    assert sorted(compiler.settled(*running, other, *jobs)) == ["b", "c", "d", "o", "r", "s"]


# --- the process ---


@pytest.fixture(scope="module")
def sandbox():
    sandbox = Sandbox(seconds=0.5)
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (grammar('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', GrammarKind.JSON_SCHEMA), r"\$ref"),
        (grammar("false", GrammarKind.JSON_SCHEMA), "no text"),
        (grammar("root ::= root", GrammarKind.EBNF), "leads back to itself"),
        (grammar(r"[^\s\S]"), "no text"),
        (grammar('{"type": "integer", "multipleOf": 1000003}', GrammarKind.JSON_SCHEMA), r"more than 0\.5 s"),
        (grammar('{"items":' * 9000 + "{}" + "}" * 9000, GrammarKind.JSON_SCHEMA), "recursion|nested"),
    ],
    ids=["cycle", "false", "rule", "regex", "slow", "deep"],
)
def test_the_sandbox_refuses_what_cannot_be_served(sandbox, wrong, why):
    with pytest.raises(InvalidRequest, match=why) as error:
        sandbox.translate(wrong)
    assert error.value.param == wrong.kind.param
    for fine in (
        grammar("a+"),
        grammar("true", GrammarKind.JSON_SCHEMA),
        grammar("start: <|x|> A\nA: /a/", GrammarKind.EBNF),
    ):
        assert sandbox.translate(fine)


def test_a_sandbox_ends_once_no_session_waits_for_it():
    sandbox = Sandbox(seconds=1000.0)
    sandbox.start()
    looks = iter([True, True, False])
    with pytest.raises(Abandoned):
        sandbox.translate(
            grammar('{"type": "integer", "multipleOf": 1000003}', GrammarKind.JSON_SCHEMA), lambda: next(looks)
        )
    assert sandbox.translate(grammar("a"))
    sandbox.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("part", ["[", '\\"', "{", '"a" (', "[\\]", "a-", "# \n", "  \t"])
def test_the_longest_gbnf_is_read_once(part):
    """Read from every bracket to the end, it would take minutes."""
    text = "root ::= " + part * ((MAX_GRAMMAR_LENGTH - 9) // len(part))
    assert len(readable(text)) >= len(text)
