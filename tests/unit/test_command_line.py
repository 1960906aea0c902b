"""The `specahead` command by itself: what it says to what it cannot use."""

import pytest

from specahead.cli.main import main, make_parser


@pytest.mark.parametrize("arguments", [["nonsense"], ["bench", "nonsense"], ["evaluate", "copy", "--nonsense"], ["key"],
                                       ["serve", "--nonsense"], ["generate", "--max-tokens", "x"]])  # fmt: skip
def test_an_error_follows_one_line_of_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and usage.startswith("usage: specahead") and ": error: " in error


@pytest.mark.parametrize(
    ("arguments", "program", "words"),
    [
        (["serve", "--http-port", "1"], "serve", "unrecognized arguments: --http-port (did you mean --port?)"),
        (["serve", "--max-context=9"], "serve", "--max-context=9 (did you mean --max-model-len?)"),
        (["serve", "--max-modl-len", "9"], "serve", "--max-modl-len (did you mean --max-model-len?)"),
        (["generate", "--prt", "8000", "--prompt", "x"], "generate", "unrecognized arguments: --prt (did you mean --"),
        (["sevre"], "COMMAND", "(did you mean serve?)"),
        (["bench", "stak"], "bench", "(did you mean stack?)"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(
    arguments: list[str], program: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usage is that of the command which does not know the word."""
    with pytest.raises(SystemExit):
        main(arguments)
    usage, error = capsys.readouterr().err.splitlines()
    assert program in usage and words in error


def test_flags_for_a_service_are_a_value() -> None:
    of_services = '--logging={"level": "debug"}'
    assert make_parser().parse_args(["bench", "serve", "--flags", of_services]).flags == of_services


@pytest.mark.parametrize("command", [["chat"], ["status"], ["generate", "--prompt", "x"]])
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer: .*refused; check that a server runs there"),
        ("127.0.0.1:8000", r"--url '127.0.0.1:8000': expected http://HOST:PORT"),
    ],
)
def test_a_server_that_is_not_there(command: list[str], url: str, words: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: {words}"):
        main([*command, "--url", url])
