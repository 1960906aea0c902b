"""Where a setting's value comes from, and what is refused."""

from pathlib import Path

import pytest

import models
from orchestrator.settings import Settings, SettingsError, resolve_settings


def resolve(*flags: str, **environment: str) -> Settings:
    return resolve_settings(flags, environment)[0]


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    assert resolve() == Settings()
    assert resolve_settings(["--dry-run"], {}) == (Settings(), True)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = config(tmp_path, "gamma: 2\ngrpc_port: 1002\nhttp_port: 2002\n")
    settings = resolve(
        "--config", file, "--gamma", "8", SPECAHEAD_GAMMA="6", SPECAHEAD_GRPC_PORT="1006", PATH="/bin"
    )
    assert (settings.gamma, settings.grpc_port, settings.http_port) == (8, 1006, 2002)
    assert settings.max_sessions == Settings.max_sessions


def test_a_source_wins_even_with_the_default_value(tmp_path: Path) -> None:
    file = config(tmp_path, "gamma: 2\nahead: false\n")
    assert resolve("--config", file, "--gamma", "4").gamma == 4
    assert resolve("--config", file, "--ahead").ahead is True
    assert resolve("--config", file, SPECAHEAD_AHEAD="true").ahead is True
    assert resolve("--no-ahead", SPECAHEAD_AHEAD="true").ahead is False


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert resolve("--config", config(tmp_path, text)) == Settings()


def test_values_have_their_types(tmp_path: Path) -> None:
    file = config(tmp_path, "budget: 1\ndraft_timeout: 0.5\nserved_model_name: 7\n")
    settings = resolve("--config", file, SPECAHEAD_MAX_QUEUED="0", SPECAHEAD_AHEAD="no")
    assert (settings.budget, settings.draft_timeout, settings.max_queued) == (1.0, 0.5, 0)
    assert isinstance(settings.budget, float)
    assert settings.served_model_name == "7"
    assert settings.ahead is False


@pytest.mark.parametrize(
    ("name", "value"),
    [("gamma", "four"), ("gamma", "4.5"), ("draft_timeout", "soon"), ("grpc_port", "")],
)
def test_a_flag_of_the_wrong_type_is_refused(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"flag: {name} is '{value}'"):
        resolve(f"--{name.replace('_', '-')}", value)
    with pytest.raises(SettingsError, match=rf"environment: {name} is '{value}'"):
        resolve(**{f"SPECAHEAD_{name.upper()}": value})


def test_an_environment_switch_must_be_true_or_false() -> None:
    with pytest.raises(SettingsError, match="environment: ahead is 'maybe', expected bool"):
        resolve(SPECAHEAD_AHEAD="maybe")


@pytest.mark.parametrize(
    "line",
    ["gamma: 4.5", "gamma: true", "gamma: null", "gamma: [4]", "ahead: 2", "plan: null", "host: [a, b]"],
)
def test_a_files_value_of_the_wrong_type_is_refused(tmp_path: Path, line: str) -> None:
    """It is not rounded or spelled out; the message names the file and the setting."""
    file = config(tmp_path, line)
    with pytest.raises(SettingsError, match=rf"{file}: {line.split(':')[0]} is "):
        resolve("--config", file)


def test_unknown_names_are_refused_and_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="SPECAHEAD_GAMA"):
        resolve(SPECAHEAD_GAMA="4")
    with pytest.raises(SettingsError, match="gama"):
        resolve("--config", config(tmp_path, "gama: 4\ngamma: 4\n"))
    with pytest.raises(SettingsError, match="gama"):
        resolve("--config", config(tmp_path, "gama: 4\n1: 2\n"))


def test_an_unknown_flag_ends_with_a_usage_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resolve("--gama", "4")
    assert "--gama" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["just words", "- a\n- list\n", "gamma: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = config(tmp_path, text)
    with pytest.raises(SettingsError, match=file):
        resolve("--config", file)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"host: \xff\xfe\n")
    with pytest.raises(SettingsError, match="cannot be read"):
        resolve("--config", str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml"):
        resolve("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--gamma", "0"),
        ("--gamma", "65"),
        ("--budget", "-0.1"),
        ("--budget", "1.5"),
        ("--budget", "nan"),
        ("--grpc-port", "65536"),
        ("--http-port", "-1"),
        ("--target-port", "70000"),
        ("--max-sessions", "0"),
        ("--max-queued", "-1"),
        ("--prefill-chunk", "1"),
        ("--draft-timeout", "0"),
        ("--draft-timeout", "nan"),
        ("--resume-timeout", "-1"),
        ("--host-kv-memory", "-0.5"),
        ("--host-kv-memory", "nan"),
    ],
)
def test_values_out_of_range_are_refused(flag: str, value: str) -> None:
    with pytest.raises(SettingsError):
        resolve(flag, value)


def test_how_the_draft_reads_reaches_it_from_every_source(tmp_path: Path) -> None:
    from orchestrator.cluster import drafter_settings  # imports Ray

    flags = ("--draft-read-share", "0.1")
    file = config(tmp_path, "draft_read_share: 0.1\n")
    environment = {"SPECAHEAD_DRAFT_READ_SHARE": "0.1"}
    for settings in (resolve(*flags), resolve("--config", file), resolve(**environment)):
        assert drafter_settings(settings).read_share == 0.1
    assert drafter_settings(resolve()).read_share == 1


@pytest.mark.parametrize(("flag", "value"), [("--gamma", "64"), ("--budget", "1"), ("--max-queued", "0")])
def test_the_ends_of_the_ranges_are_allowed(flag: str, value: str) -> None:
    assert resolve(flag, value) != Settings()


def test_host_memory_is_the_targets() -> None:
    assert resolve().host_kv_memory == 0
    assert resolve("--host-kv-memory", "1.5").host_kv_memory == 1.5


def test_services_get_a_gpu_each_where_there_are_two() -> None:
    from orchestrator.cluster import gpus_of  # imports Ray

    assert [gpus_of(resolve(), there) for there in (0, 1, 2)] == [(0, 0), (0, 0), (1, 1)]
    assert gpus_of(resolve("--device", "cuda"), 0) == (1, 1)
    assert gpus_of(resolve("--device", "cpu"), 2) == (0, 0)


@pytest.mark.parametrize(
    "flags", [("--target", "other"), ("--draft", "other"), ("--target", "a", "--draft", "b")]
)
def test_the_bundled_plan_with_another_pair_is_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="bundled plan"):
        resolve(*flags)
    assert resolve(*flags, "--plan", "mine.json").plan == "mine.json"


def test_a_budget_of_its_own_for_the_bundled_pair_is_allowed() -> None:
    assert resolve("--budget", "0.3").plan == str(models.PLAN)


def test_a_method_of_its_own_for_the_bundled_pair_is_allowed() -> None:
    settings = resolve("--sparsity", "sts", SPECAHEAD_SPARSITY="quest")
    assert (settings.plan, settings.sparsity) == (str(models.PLAN), "sts")


def test_model_name() -> None:
    assert Settings().model_name == models.TARGET.name
    assert Settings(target="org/name").model_name == "name"
    assert Settings(served_model_name="mine").model_name == "mine"
