"""The processes' configurations from the flags of `serve`, and flags that it refuses at once."""

import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import tyro

from outrider.config import DraftConfig, GatewayConfig, ServeConfig, TargetConfig, TrainConfig, parse_flags, to_argv
from outrider.errors import ConfigError
from outrider.placement.cores import CorePlan
from outrider.service_token import make_token_file
from outrider.speculation.shape import TreeShape
from outrider.supervisor.app import base_url, check_flags, configure, make_children, summary
from outrider.supervisor.display import Display, first_curl
from outrider.supervisor.resolution import resolve_config
from services.draft.process.flags import tree_shape
from tests.support.outrider.children import free_port

CORES = CorePlan((0, 1), (2,), (3,))


def parse(*flags):
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    return parse_flags(ServeConfig, [*ports, *flags], "outrider serve")


def test_shared_flags_reach_both_services_and_others_their_own(tmp_path):
    config = parse(
        "--model", "m", "--speculative-algorithm", "STANDALONE", "--speculative-draft-model", "d",
        "--log-level", "debug", "--max-running-requests", "7", "--page-size", "32",
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "9",
    )  # fmt: skip
    made = configure(config, CORES, tmp_path)
    shared = {"max_running_requests": 7, "speculative_num_steps": 3, "speculative_eagle_topk": 1}
    target = TargetConfig(  # a chain has no more rows than it needs
        model_path="m", listen=f"unix:{tmp_path}/target.sock", page_size=32, cores="0,1", log_level="debug",
        speculative_num_draft_tokens=4, service_token_file=f"{tmp_path}/token", **shared,
    )  # fmt: skip
    draft = DraftConfig(
        speculative_algorithm="STANDALONE", speculative_draft_model_path="d", listen=f"unix:{tmp_path}/draft.sock",
        cores="2", log_level="debug", speculative_num_draft_tokens=9,
        service_token_file=f"{tmp_path}/token", **shared,
    )  # fmt: skip
    assert (made.target, made.draft) == (target, draft)
    assert (made.gateway.target, made.gateway.draft) == ((target.listen,), (draft.listen,))
    assert (made.gateway.port, made.gateway.cores) == (config.gateway.port, "3")
    assert made.gateway.service_token_file == f"{tmp_path}/token"


def test_the_token_of_the_services_is_the_given_one_or_one_in_the_private_folder(tmp_path, monkeypatch):
    given = tmp_path / "given"
    make_token_file(given)

    def files(*flags):
        made = configure(parse(*flags), CORES, tmp_path / "run")
        shown = dict(summary(made)).get("token")
        return {config.service_token_file for config in (made.target, made.draft, made.gateway)}, shown

    assert files() == ({f"{tmp_path}/run/token"}, None)
    assert files("--service-token-file", str(given)) == ({str(given)}, None)
    (made,), shown = files("--listen-target", "127.0.0.1:4")
    assert made in shown, "another gateway needs it"
    monkeypatch.setenv("OUTRIDER_SERVICE_TOKEN", "t" * 20)  # which the processes inherit
    assert files() == ({None}, None)
    with pytest.raises(ConfigError, match=r"--service-token-file: .*nowhere cannot be read"):
        check_flags(parse("--service-token-file", str(tmp_path / "nowhere")))


def test_children_read_the_same_configuration_back(tmp_path):
    made = configure(parse("--listen-draft", "127.0.0.1:4", "--no-speculative-ngram-insert-prompts"), CORES, tmp_path)
    children = make_children(made, Display())
    assert [child.name for child in children] == ["target", "draft", "gateway"]
    for child, config in zip(children, (made.target, made.draft, made.gateway), strict=True):
        place = child.command.index("-um")
        assert child.command[place : place + 3] == ["-um", "outrider", child.name]
        assert tyro.cli(type(config), args=list(child.command[place + 3 :])) == config
    assert [child.address for child in children[:2]] == [made.target.listen, "127.0.0.1:4"]
    assert children[2].address == made.gateway.health_listen == f"unix:{tmp_path}/gateway.sock"


def test_a_head_receives_the_path_of_its_target(tmp_path):
    flags = ["--model", "m", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model", "d"]
    draft = configure(parse(*flags), CORES, tmp_path).draft
    assert draft is not None
    assert (draft.model_path, draft.speculative_draft_model_path) == ("m", "d")
    assert configure(parse("--model", "m"), CORES, tmp_path).draft.model_path is None
    with pytest.raises(ConfigError, match="EAGLE3 needs a draft model"):
        check_flags(parse("--speculative-algorithm", "EAGLE3"))


@pytest.mark.parametrize(
    ("flags", "draft"),
    [
        ([], None),
        (["--quantization", "int8"], "int8"),
        (["--quantization", "fp8", "--device", "cuda"], "fp8"),
        (["--quantization", "fp8", "--device", "cpu"], "int8"),
        (["--quantization", "int4"], "int8"),
        (["--quantization", "int8", "--speculative-draft-model-quantization", "unquant"], "unquant"),
        (["--quantization", "int8", "--speculative-draft-model-quantization", "fp8"], "fp8"),
        (["--quantization", "int8", "--speculative-algorithm", "NGRAM"], None),
    ],
)
def test_a_draft_model_has_its_targets_quantization_unless_a_flag_sets_it(tmp_path, flags, draft):
    model = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model", "d"]
    made = configure(parse(*model, *flags), CORES, tmp_path)
    assert made.draft.speculative_draft_model_quantization == draft


def test_a_draft_model_on_the_targets_cores_drafts_when_the_target_waits(tmp_path):
    shared = CorePlan((0, 1), (0, 1), (0, 1), niceness=15)
    model = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model", "d", "--device", "cpu"]

    def made(cores, *flags):
        draft = configure(parse(*model, *flags), cores, tmp_path).draft
        return draft.draft_ahead, draft.speculative_draft_model_quantization, draft.niceness

    assert made(shared) == made(shared, "--quantization", "int8") == ("off", None, 2)
    assert made(shared, "--draft-ahead", "on", "--quantization", "int8") == ("on", "int8", 15)
    assert made(shared, "--draft-device", "cuda") == ("auto", None, 15)
    assert made(CORES) == ("auto", None, 0)


def test_a_head_on_the_targets_cores_grows_whole_trees_unless_flags_say_more(tmp_path):
    shared = CorePlan((0, 1), (1,), (0, 1), niceness=15)
    head = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model", "d"]
    chain = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"]

    def made(flags, cores):
        target, draft = (
            configure(parse(*flags), cores, tmp_path).target,
            configure(parse(*flags), cores, tmp_path).draft,
        )
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        return *(tuple(getattr(one, name) for name in names) for one in (draft, target)), draft.niceness

    nothing = (None, None, None)
    tree, verified, niceness = made(head, shared)
    assert None not in tree
    assert verified == nothing  # how much of it is verified is measured
    assert 0 <= niceness < 5  # or it would hardly ever read a prompt
    assert made([*head, *chain], shared) == ((2, 1, 3), (2, 1, 3), niceness)
    assert made(head, CORES) == (nothing, nothing, 0)
    for algorithm in ("NEXTN", "NGRAM"):
        assert made(["--speculative-algorithm", algorithm], shared) == (nothing, nothing, 15)


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ("", (None, None, None)), ("--speculative-num-steps 1 --speculative-eagle-topk 1", (None, None, None)),
        ("--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 16", (15, 1, 16)),
        ("--speculative-dflash-block-size 8 --speculative-dflash-draft-window-size 512", (7, 1, 8)),
        ("--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 12", (5, 4, 12)),
    ],
)  # fmt: skip
def test_sglangs_flags_of_a_block_drafter(tmp_path, flags, shape):
    """One of its steps is a pass over a block, which the target's tree limits must not take for a depth of 1."""
    shared = CorePlan((0, 1), (1,), (0, 1), niceness=15)
    given = parse("--speculative-algorithm", "dflash", "--speculative-draft-model", "d", *flags.split())
    made = configure(resolve_config(given), shared, tmp_path)
    for one in (made.target, made.draft):
        found = one.speculative_num_steps, one.speculative_eagle_topk, one.speculative_num_draft_tokens
        assert found == shape
    assert made.draft.niceness == 2, "it computes while the target waits"
    assert tree_shape(made.draft) == (None if shape == (None, None, None) else TreeShape(*shape))


def test_without_a_drafter_there_is_no_draft(tmp_path):
    made = configure(parse("--speculative-algorithm", "NONE"), CORES, tmp_path)
    assert made.draft is None
    assert made.gateway.draft == ()
    assert [child.name for child in make_children(made, Display())] == ["target", "gateway"]
    assert dict(summary(made))["drafter"].startswith("none; self-speculation")
    made = configure(parse("--speculative-algorithm", "NONE", "--self-speculation", "off"), CORES, tmp_path)
    assert dict(summary(made))["drafter"] == "none"


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_in_use_is_refused(flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=f"in use; choose another with {flag}$"):
            check_flags(parse(flag, str(taken.getsockname()[1])))


def test_free_ports_are_free_afterwards():
    config = parse()
    check_flags(config)
    check_flags(config)


def test_other_refusals():
    with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
        check_flags(parse("--speculative-algorithm", "STANDALONE"))
    with pytest.raises(ConfigError, match="both 5"):
        check_flags(parse("--port", "5", "--grpc-port", "5"))
    with pytest.raises(ConfigError, match="no address"):
        check_flags(parse("--host", "no.such.host.invalid"))


@pytest.mark.parametrize("flags", [
    ["--api-key", ""], ["--api-key", "secret", " "], ["--api-key", "secret", "--admin-api-key", ""],
    ["--admin-api-key", ""], ["--api-key", " secret"],
])  # fmt: skip
def test_empty_keys_are_refused(flags):
    """An unset variable of the shell gives an empty key."""
    with pytest.raises(ConfigError, match=r"--(admin-)?api-key is empty"):
        check_flags(parse(*flags))


def test_keys_can_come_from_files(tmp_path, monkeypatch):
    """Only their paths are on the command line of the gateway."""
    (tmp_path / "admin").write_text("first\nsecond\n")
    (tmp_path / "clients").write_text("one\n")
    monkeypatch.setenv("OUTRIDER_ADMIN_API_KEY", "third")
    config = parse("--admin-api-key-file", str(tmp_path / "admin"), "--api-key-file", str(tmp_path / "clients"))
    check_flags(config)
    gateway = configure(config, CORES, tmp_path).gateway
    assert (gateway.admin_keys(), gateway.client_keys({})) == (["third", "first", "second"], ["one"])
    assert not {"first", "second", "third", "one"} & set(to_argv(gateway))
    (tmp_path / "clients").write_text("\n")
    for path, reason in ((tmp_path / "clients", "has no key"), (tmp_path / "none", "cannot be read: No such file")):
        with pytest.raises(ConfigError, match=f"--api-key-file: .* {reason}"):
            check_flags(parse("--api-key-file", str(path)))


def test_the_control_socket_is_private_and_shown(tmp_path):
    made = configure(parse(), CORES, tmp_path)
    assert made.gateway.control_socket == f"{tmp_path}/control.sock"
    assert f"{tmp_path}/control.sock" in dict(summary(made))["control"]
    assert configure(parse("--control-socket", "/run/c.sock"), CORES, tmp_path).gateway.control_socket == "/run/c.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / "taken"))
        taken.listen()
        for path, reason in ((tmp_path / "taken", "another process listens"), (tmp_path / "no" / "s", "no folder")):
            with pytest.raises(ConfigError, match=reason):
                check_flags(parse("--control-socket", str(path)))


def test_files_where_the_user_is_are_no_modules(tmp_path):
    """Unless the process itself was started from a checkout in the working directory."""
    (tmp_path / "colorsys.py").write_text("raise SystemExit('not this one')")
    code = (
        "import subprocess\n"
        "from outrider.process.python_command import python_command\n"
        "subprocess.run(python_command('-m', 'colorsys'), check=True)"
    )
    (tmp_path / "ask.py").write_text(code)
    elsewhere = tmp_path / "bin"
    elsewhere.mkdir()
    (elsewhere / "script.py").write_text(code)
    assert subprocess.run([sys.executable, elsewhere / "script.py"], cwd=tmp_path).returncode == 0
    assert subprocess.run([sys.executable, "-m", "ask"], cwd=tmp_path, capture_output=True).returncode != 0


def test_urls_are_reachable_from_here():
    gateway = GatewayConfig(host="0.0.0.0", port=5)
    assert base_url(gateway) == "http://127.0.0.1:5"
    assert base_url(replace(gateway, host="::")) == "http://[::1]:5"
    assert base_url(replace(gateway, host="::1")) == "http://[::1]:5"
    assert base_url(replace(gateway, host="example.org")) == "http://example.org:5"
    assert first_curl("http://h:5").startswith("curl http://h:5/v1/chat/completions -H 'Content-Type")


def test_flags_that_are_off_by_choice_are_written_so():
    assert to_argv(DraftConfig(speculative_ngram_insert_prompts=False)) == ["--no-speculative-ngram-insert-prompts"]
    assert to_argv(TargetConfig(trust_remote_code=True)) == ["--trust-remote-code"]
    key = GatewayConfig(admin_api_key="-xyz")  # as a random key may begin
    assert to_argv(key)[-1] == "--admin-api-key=-xyz"
    assert tyro.cli(GatewayConfig, args=to_argv(key)) == key


@pytest.mark.parametrize("keys", [("-abc",), ("-abc", "def"), ("a", "b"), ("-a=b",)])
def test_keys_are_passed_on_however_they_begin(keys):
    read = tyro.cli(GatewayConfig, args=[f"--api-key={keys[0]}", *keys[1:]])
    assert read.api_key == keys
    assert tyro.cli(GatewayConfig, args=to_argv(read)) == read


def test_numbers_are_passed_on_whatever_their_sign():
    config = TrainConfig(model_path="x", output="y", temperature=(-1.0, -0.5, 1.0))
    assert tyro.cli(TrainConfig, args=to_argv(config)) == config


def test_output_without_a_terminal(capsys):
    display = Display()
    for progress in ("", "compiling 3/9", "compiling 3/9", None):
        display.starting({"target": None, "draft": progress})
    display.ready([("REST", "http://h:5/v1")], "curl http://h:5")
    shown = capsys.readouterr().err
    lines = [line for line in shown.splitlines() if line.startswith("starting: ")]
    states = ["…", "compiling 3/9", "ready"]
    assert lines == [f"starting: target ready, draft {state}" for state in states]
    assert "http://h:5/v1" in shown
    assert "curl http://h:5\n" in shown
