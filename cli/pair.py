"""The flags that name a pair of models."""

import argparse

import models


def add_pair(parser: argparse.ArgumentParser, required: bool) -> None:
    """Both models; the bundled pair where they may be left out."""
    for name, default in (("--target", models.TARGET), ("--draft", models.DRAFT)):
        text = "Hugging Face id or folder" + ("" if required else " (default: the bundled model)")
        parser.add_argument(name, required=required, default=str(default), help=text)
