"""The `specahead` command by itself: what it says to what it cannot use, and that a shell completes it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specahead.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [["nonsense"], ["bench", "nonsense"], ["evaluate", "copy", "--nonsense"], ["key"],
                                       ["serve", "--nonsense"], ["generate", "--max-tokens", "x"]])  # fmt: skip
def test_an_error_follows_one_line_of_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and usage.startswith("usage: specahead") and ": error: " in error


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


def complete(script: Path, line: str) -> list[str]:
    """Return what bash offers for the last word of a line."""
    words = line.split(" ")
    program = (
        f"source {script}; COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; "
        '_shtab_specahead; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_flags_and_choices(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    with script.open("w") as file:
        subprocess.run([sys.executable, "-m", "specahead.cli", "completion", "bash"], cwd=ROOT, stdout=file, check=True)
    assert set(complete(script, "specahead ")) >= {name.split()[0] for name in COMMANDS}
    assert complete(script, "specahead bench st") == ["stack", "step"]
    assert complete(script, "specahead serve --target-ad") == ["--target-address"]
    assert complete(script, "specahead chat --exactness a") == ["approximate"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    script = capsys.readouterr().out
    assert all(name.split()[-1] in script for name in COMMANDS)
