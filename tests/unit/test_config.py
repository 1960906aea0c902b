"""Where a setting's value comes from, what is refused, and that each is declared once."""

import argparse
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specahead import models
from specahead.config import (
    Config,
    DraftSettings,
    SettingsError,
    Speculation,
    TargetSettings,
    resolve_service,
    speculation,
)
from specahead.config.resolve import SETTINGS, describe
from specahead.config.setting import Section, declared_in
from specahead.config.speculation import Circumstances
from specahead.wire.errors import ClusterError
from tests.launch_settings import launch_settings
from tests.settings import target_settings

SECTIONS = ("target", "draft", "clients", "cluster")


def resolve(*flags: str, **environment: str) -> Config:
    return launch_settings(flags, environment)


def alone(default: TargetSettings | DraftSettings, *flags: str, **environment: str) -> Any:
    return resolve_service(argparse.ArgumentParser(), default, flags, environment)[0]


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = config(tmp_path, "max_queued: 2\ngrpc_port: 1002\nport: 2002\n")
    flags = ("--config", file, "--max-queued", "8")
    settings = resolve(*flags, SPECAHEAD_MAX_QUEUED="6", SPECAHEAD_GRPC_PORT="1006", PATH="/bin")
    assert settings.target.max_queued == 8
    assert (settings.clients.grpc_port, settings.clients.port) == (1006, 2002)
    assert settings.target.max_sessions == TargetSettings().max_sessions


def test_a_source_wins_even_with_the_default_value(tmp_path: Path) -> None:
    file = config(tmp_path, "max_queued: 2\ninsecure: true\n")
    assert resolve("--config", file, "--max-queued", "1024").target.max_queued == 1024
    assert resolve("--config", file, "--no-insecure").target.insecure is False
    assert resolve("--config", file, SPECAHEAD_INSECURE="false").target.insecure is False
    assert resolve("--insecure", SPECAHEAD_INSECURE="false").target.insecure is True


def test_speculation_is_one_setting_whose_keys_are_merged(tmp_path: Path) -> None:
    """Each source gives the keys that it names; target and draft have the same."""
    file = config(tmp_path, "speculation: {gamma: 2, hold: 0, branches: 3}\n")
    environment = {"SPECAHEAD_SPECULATION": '{"gamma": 3}'}
    config_ = resolve("--config", file, "--speculation", '{"gamma": 8, "lookup": false}', **environment)
    assert config_.target.speculation == config_.draft.speculation
    assert config_.target.speculation == Speculation(gamma=8, hold=0, branches=3, lookup=False)
    assert resolve("--speculation", '{"gamma": null}').target.speculation == Speculation()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"gama": 1}', "no such key: gama; expected a mapping with keys among gamma, max_gamma, hold"),
        ('{"gamma": 65}', "gamma is 65, expected a whole number at least 1 and at most 64, or null"),
        ('{"gamma": "four"}', "gamma is 'four', expected a whole number"),
        ('{"gamma": true}', "gamma is True, expected a whole number"),
        ('{"gamma": 4.5}', "gamma is 4.5, expected a whole number"),
        ('{"draft_read_share": 0}', "draft_read_share is 0.0, expected a number more than 0 and at most 1, or null"),
        ('{"lookup": 2}', "lookup is 2, expected true or false, or null"),
        ('{"draft_quantization": "int4"}', "draft_quantization is 'int4', expected none, fp8"),
        ("{gamma: 4}", "is not JSON, expected a mapping"),
        ("[4]", "is no mapping, expected a mapping"),
    ],
)
def test_speculation_with_a_wrong_key_or_value_is_refused(given: str, words: str) -> None:
    with pytest.raises(SettingsError, match=rf"^flag: speculation: .*{words}"):
        resolve("--speculation", given)


# What is asked, where, and what follows: gamma, max_gamma, hold, lookup, draft_read_share, branches.
RESOLVED = [
    ({}, ("m", False), (None, 4, 0, False, 1.0, 1)),
    ({}, ("m", True), (None, 4, None, True, 0.1, 8)),
    ({"gamma": 3}, ("m", True), (3, 3, None, True, 0.1, 8)),
    ({"gamma": 14}, ("m", True), (14, 14, 0, True, 0.1, 8)),
    ({"gamma": 14}, ("m", True, True), (14, 14, None, True, 0.1, 8)),
    ({"gamma": 16}, ("m", True, True), (16, 16, 0, True, 0.1, 8)),
    ({"max_gamma": 2, "hold": 0, "lookup": True}, ("m", True), (None, 2, 0, True, 0.1, 8)),
    ({"gamma": 4, "hold": 8, "branches": 3}, ("m", False), (4, 4, 8, False, 1.0, 3)),
    ({"branches": 0, "draft_read_share": 0.5}, ("m", True), (None, 4, None, True, 0.5, 0)),
    ({}, ("self", True), (None, 8, 0, False, 1.0, 8)),
    ({}, ("auto", True), (None, 8, 0, False, 1.0, 8)),
    ({}, ("lookup", True), (None, 4, None, False, 1.0, 8)),
    ({}, ("none", True), (None, 4, 0, False, 1.0, 8)),
]


@pytest.mark.parametrize(("asked", "where", "follows"), RESOLVED)
def test_what_a_speculation_leaves_open_follows_from_draft_and_device(
    asked: dict, where: tuple, follows: tuple
) -> None:
    found = speculation.resolve(Speculation(**asked), Circumstances(*where))
    names = ("gamma", "max_gamma", "hold", "lookup", "draft_read_share", "branches")
    assert tuple(getattr(found, name) for name in names) == follows


@pytest.mark.parametrize(
    "line", ["targets: 4.5", "targets: true", "targets: null", "targets: [4]", "join: 2", "plan: null", "host: [a, b]"]
)
def test_a_files_value_of_the_wrong_type_is_refused(tmp_path: Path, line: str) -> None:
    """It is not rounded or spelled out; the message names the file and the setting."""
    file = config(tmp_path, line)
    with pytest.raises(SettingsError, match=rf"{file}: {line.split(':')[0]} is "):
        resolve("--config", file)


def test_an_unknown_variable_is_a_warning_that_names_it(caplog: pytest.LogCaptureFixture) -> None:
    """Others may set variables of this prefix; what is a setting counts all the same."""
    with caplog.at_level(logging.WARNING):
        assert resolve(SPECAHEAD_GAMA="4", SPECAHEAD_MAX_QUEUED="6").target.max_queued == 6
    (record,) = caplog.records
    assert record.getMessage() == "environment: no such setting, ignored: SPECAHEAD_GAMA"


KUBERNETES = {  # as it sets them for a Service called specahead, and one called specahead-grpc
    "SPECAHEAD_SERVICE_HOST": "10.0.0.1",
    "SPECAHEAD_SERVICE_PORT": "80",
    "SPECAHEAD_SERVICE_PORT_HTTP": "80",
    "SPECAHEAD_PORT": "tcp://10.0.0.1:80",
    "SPECAHEAD_PORT_80_TCP": "tcp://10.0.0.1:80",
    "SPECAHEAD_PORT_80_TCP_PORT": "80",
    "SPECAHEAD_GRPC_SERVICE_HOST": "10.0.0.2",
    "SPECAHEAD_GRPC_SERVICE_PORT": "50051",
    "SPECAHEAD_GRPC_PORT": "tcp://10.0.0.2:50051",
}


def test_what_kubernetes_sets_for_a_service_of_our_name_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Three of its variables have the names of settings; those beside them tell whose they are."""
    with caplog.at_level(logging.WARNING):
        assert resolve(**KUBERNETES, SPECAHEAD_MAX_QUEUED="81") == resolve("--max-queued", "81")
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in KUBERNETES)
    assert "SPECAHEAD_MAX_QUEUED" not in record.getMessage()
    assert resolve(SPECAHEAD_SERVICE_HOST="0.0.0.0", SPECAHEAD_GRPC_PORT="1").target.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"just words", "expected a mapping of settings, got str"),
        (b"- a\n- list\n", "expected a mapping of settings, got list"),
        (b"targets: [", "cannot be read"),
        (b"\x00", "cannot be read"),
        (b"host: \xff\xfe\n", "cannot be read"),
        (None, "cannot be read: No such file"),
        (b"gama: 4\nmax_queued: 4\n", "no such setting: gama"),
        (b"gama: 4\n1: 2\n", "no such setting: gama.*, 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "settings.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"{path}: {words}"):
        resolve("--config", str(path))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--budget", "-0.1"), ("--budget", "1.5"), ("--budget", "nan"), ("--base-port", "70000"), ("--port", "-1")),
        *(("--grpc-port", "65536"), ("--max-sessions", "0"), ("--max-queued", "-1"), ("--prefill-chunk", "-1")),
        *(("--timeouts", '{"resume": -1}'), ("--timeouts", '{"resume": NaN}')),
        *(("--host-kv-memory", "-0.5"), ("--host-kv-memory", "nan")),
    ],
)
def test_values_out_of_range_are_refused(flag: str, value: str) -> None:
    with pytest.raises(SettingsError):
        resolve(flag, value)


def test_several_targets_and_drafts() -> None:
    """Each has a name, and a port of its own where one is given; the first target and the first draft are a pair."""
    from orchestrator.cluster.fleet import pairs_of, placed_settings  # imports Ray

    placed = placed_settings(resolve("--targets", "3", "--drafts", "2", "--base-port", "7000"))
    assert [each.name for each in placed] == ["target-1", "target-2", "target-3", "draft-1", "draft-2"]
    assert [each.port for each in placed] == [7000, 7001, 7002, 7003, 7004]
    pairs = [[each.name for each in pair] for pair in pairs_of(placed)]
    assert pairs == [["target-1", "draft-1"], ["target-2", "draft-2"], ["target-3"]]
    for flags, value in (("--targets", "-1"), ("--drafts", "-1")):
        with pytest.raises(SettingsError, match="at least 0"):
            resolve(flags, value)


def test_gpus_of_the_services(caplog: pytest.LogCaptureFixture) -> None:
    from orchestrator.cluster.room import gpus_of

    assert [gpus_of("auto", there, 2) for there in (0, 1, 2, 3)] == [0, 0, 1, 1]
    assert [gpus_of("auto", there, 3) for there in (2, 3)] == [0, 1]
    assert [gpus_of("auto", there, 1) for there in (0, 1)] == [0, 1]
    assert (gpus_of("cuda", 0, 2), gpus_of("cpu", 2, 2)) == (1, 0)
    assert [message[:22] for message in caplog.messages] == ["Ray has 1 of the 2 GPU", "Ray has 2 of the 3 GPU"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, expected 1, 2, 4 or 8"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size is 16, expected a whole number at least 1 and at most 8"),
    ],
)
def test_numbers_of_gpus_that_no_target_is_split_over(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        target_settings(**given)


def test_a_draft_in_the_target_is_on_one_gpu() -> None:
    assert target_settings(tensor_parallel_size=4, placement="together").own_draft.tensor_parallel_size == 1


def test_what_a_ray_that_gets_no_more_nodes_can_run() -> None:
    """A GPU for each service, what nodes are given names for, and the sum of small parts."""
    from orchestrator.cluster.room import check_room

    target, draft = {"CPU": 0.1, "GPU": 1, "big": 0.001}, {"CPU": 0.1, "GPU": 1}
    check_room([target, draft], {"CPU": 1.0, "GPU": 2.0, "big": 1.0})
    check_room([{"CPU": 0.1, "GPU": 0}] * 30, {"CPU": 3.0})
    with pytest.raises(ClusterError, match=r"2 services need 2 GPU, .* has 1 and gets no more: give --device auto"):
        check_room([target, draft], {"CPU": 1.0, "GPU": 1.0, "big": 1.0})
    with pytest.raises(ClusterError, match=r"2 services need 0.001 big, .* has 0 .*: check --node-resources"):
        check_room([target, draft], {"CPU": 1.0, "GPU": 2.0})
    with pytest.raises(ClusterError, match=r"31 services need 3.1 CPU, .* has 3 and .*: place fewer services"):
        check_room([{"CPU": 0.1, "GPU": 0}] * 31, {"CPU": 3.0})


@pytest.mark.parametrize("flags", [("--target", "other", "--draft", str(models.DRAFT)), ("--draft", "other")])
def test_half_of_the_bundled_pair_is_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"one of the bundled pair with another model.*--target-model"):
        resolve(*flags)
    assert resolve(*flags, "--plan", "mine.json").target.plan_file == "mine.json"


def test_a_model_needs_no_flag_and_without_a_draft_drafts_for_itself(tmp_path: Path) -> None:
    assert resolve("org/a") == resolve("--target", "org/a", "--draft", "auto")
    assert resolve("org/a", "--draft", "org/b").target.pair == ("org/a", "org/b")
    assert resolve("org/a", "--config", config(tmp_path, "draft: org/b")).target.draft == "org/b"
    assert resolve(str(models.TARGET)) == resolve()
    assert (resolve().draft_name, resolve("org/a", "--draft", "org/b").draft_name) == ("tiny-draft", "org/b")
    with pytest.raises(SettingsError, match="the model is 'org/a' and --target 'org/b': give one of them"):
        resolve("org/a", "--target", "org/b")


def test_another_pair_needs_no_plan_and_both_sides_know_both_models() -> None:
    config = resolve("--target", "org/a", "--draft", "org/b")
    assert config.target.pair == config.draft.pair == ("org/a", "org/b")
    assert config.target.plan_file == config.draft.plan_file == ""
    bundled = resolve()
    assert bundled.target.plan_file == bundled.draft.plan_file == str(models.PLAN)
    by_itself = alone(DraftSettings(), "--model", "org/b", "--target-model", "org/a", "--target", "h:1")
    assert (by_itself.pair, by_itself.targets) == (config.draft.pair, ("h:1",))
    assert alone(TargetSettings(), "--model", "org/a", "--draft", "org/b").pair == config.target.pair
    with pytest.raises(SettingsError, match="--target-model"):
        alone(DraftSettings(), "--model", "org/b", "--target", "h:1")


@pytest.mark.parametrize("choice", ["none", "lookup", "self", "auto"])
def test_without_a_draft_model_there_is_one_service_and_any_target_has_a_plan(choice: str, tmp_path: Path) -> None:
    from orchestrator.cluster.fleet import placed_settings  # imports Ray

    flags = ("--draft", choice, "--target", "org/name", "--drafts", "3")
    for settings in (resolve(*flags), resolve("--config", config(tmp_path, f"draft: {choice}\ntarget: org/name\n"))):
        (placed,) = placed_settings(settings)
        assert isinstance(placed, TargetSettings)
        assert (placed.draft, placed.model, settings.has_draft) == (choice, "org/name", False)
    assert alone(TargetSettings(), "--model", "org/name", SPECAHEAD_DRAFT=choice).draft == choice
    draft = [sys.executable, "-m", "draft_service", "--model", choice, "--target", "a:1"]
    done = subprocess.run(draft, capture_output=True, text=True, timeout=120)
    assert done.returncode and f"with '{choice}' there is none" in done.stderr


def test_a_folder_that_is_not_there_is_refused_before_anything_else() -> None:
    with pytest.raises(SettingsError, match="the target model is '/nope', and there is no such folder"):
        resolve("--target", "/nope")
    with pytest.raises(SettingsError, match=r"the draft model is '\./nope'"):
        alone(DraftSettings(), "--model", "./nope")


def test_secrets_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resolve("--api-key", "secret-b", "--dry-run")
    assert "secret" not in capsys.readouterr().out
    assert "secret" not in repr(resolve("--api-key", "secret-b"))


# Services by themselves


def test_a_service_takes_environment_and_file_by_the_names_of_a_launch(tmp_path: Path) -> None:
    """What is another's is left to it: SPECAHEAD_TARGET is a model, and the draft's --target an address."""
    environment = {"SPECAHEAD_TARGET": "t", "SPECAHEAD_PLAN": "p", "SPECAHEAD_GRPC_PORT": "5", "SPECAHEAD_HOST": "h"}
    target = alone(TargetSettings(), **environment)
    assert (target.model, target.plan, target.host) == ("t", "p", "127.0.0.1")
    draft = alone(DraftSettings(), **environment, SPECAHEAD_DRAFT="d")
    assert (draft.model, draft.targets) == ("d", ())
    file = config(tmp_path, "kv_tokens: 3\nport: 5\n")
    assert alone(TargetSettings(), "--config", file).kv_tokens == 3
    assert alone(DraftSettings(), "--config", file).kv_tokens == 3


# Declarations


def test_what_is_printed_is_a_file_that_gives_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speculation", '{"gamma": 7, "lookup": true}', "--kv-tokens", "999", "--budget", "0.5"]
    flags += ["--namespace", "mine"]
    with pytest.raises(SystemExit) as ended:
        resolve(*flags, "--dry-run")
    assert ended.value.code == 0
    file = config(tmp_path, capsys.readouterr().out)
    assert resolve("--config", file) == resolve(*flags) != Config()


def sections(settings: Config) -> list[Section]:
    return [getattr(settings, name) for name in SECTIONS]


def test_a_name_is_declared_once() -> None:
    """What several sections need is one declaration; a model's name alone is the target's, or the draft's, own."""
    declared: dict[str, set[Any]] = {}
    for section in sections(Config()):
        for item in declared_in(type(section)):
            declared.setdefault(item.name, set()).add(item.section)
    declared.pop("")  # what only a service by itself has
    assert {name for name, owners in declared.items() if len(owners) > 1} == {"target", "draft"}
    secret = {item.name for item in SETTINGS.values() if item.secret}
    assert set(describe(sections(Config()))) == set(declared) - secret
    assert len(declared) <= 51


def test_every_setting_and_every_key_has_a_sentence() -> None:
    for item in SETTINGS.values():
        for each in (item, *item.keys.values()):
            assert re.fullmatch(r"[^\n]+\.", each.help), each.name


def test_one_message_names_source_setting_value_and_range() -> None:
    with pytest.raises(SettingsError, match=r"^flag: grpc_port is 65536, expected a whole number .* at most 65535$"):
        resolve("--grpc-port", "65536")
    with pytest.raises(SettingsError, match=r"^environment: gpu_memory_utilization is 0.0, expected a number more"):
        resolve(SPECAHEAD_GPU_MEMORY_UTILIZATION="0")
    with pytest.raises(SettingsError, match="load_format is 'gguf', expected auto, dummy"):
        resolve("--load-format", "gguf")
    with pytest.raises(SettingsError, match="environment: join is 'maybe', expected true or false"):
        resolve(SPECAHEAD_JOIN="maybe")


SCALES_TO_4 = ("--autoscaling", '{"max_targets": 4}')


def test_who_places_the_services_is_told_once() -> None:
    assert resolve("--targets", "2", *SCALES_TO_4).cluster.autoscaling.max_targets == 4
    for flags, reason in (
        (("--targets", "5", *SCALES_TO_4), "max_targets 4 is less than targets 5"),
        ((*SCALES_TO_4, "--target-address", "a:1"), "with target_address this launch places no services"),
        ((*SCALES_TO_4, "--join"), "with join this launch places no services"),
        (("--join", "--target-address", "a:1"), "by the one or by the other"),
    ):
        with pytest.raises(SettingsError, match=reason):
            resolve(*flags)


def test_a_launch_that_scales_numbers_its_services_and_keeps_drafts_in_proportion() -> None:
    from orchestrator.cluster.fleet import placed_settings  # imports Ray

    config = resolve("--targets", "2", "--autoscaling", '{"max_targets": 5}')
    names = [[each.name for each in placed_settings(config, targets)] for targets in (2, 3, 5)]
    assert names[0] == ["target-1", "target-2", "draft-1"]
    assert names[1] == ["target-1", "target-2", "target-3", "draft-1", "draft-2"]
    assert names[2][5:] == ["draft-1", "draft-2", "draft-3"]
    alone = placed_settings(resolve("--autoscaling", '{"max_targets": 2}'))
    assert [each.name for each in alone] == ["target-1", "draft-1"]
