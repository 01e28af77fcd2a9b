"""Compares src/vllm_flags/table.rs with the flags of an installed vLLM.

    python vllm_flags.py            # with vLLM importable; no GPU is needed

Prints a row for each flag that the table lacks or has otherwise, with `?` where a person has to judge what
the flag does to weights, and a line for each flag that vLLM does not have any more. Silence means that the
table is right.
"""

import argparse
import pathlib
import re
import sys

import vllm
from vllm.entrypoints.cli.preload import PreloadSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

TABLE = pathlib.Path(__file__).parent / "src/vllm_flags/table.rs"
ROW = re.compile(r'\b(?:free|ours|spec|refused)\(\s*"([a-z0-9-]+)",\s*(\w+)')
SHORT = re.compile(r'\("(\w+)", "([a-z0-9-]+)"\)')


def takes(action):
    if isinstance(action, argparse.BooleanOptionalAction):
        return "Switch"
    return {0: "Nothing", None: "One", "?": "AtMostOne", "+": "Many", "*": "Many"}[action.nargs]


def flags():
    """Of `vllm preload`: {name: what it takes} and {short form: name}."""
    parser = FlexibleArgumentParser()
    PreloadSubcommand.add_cli_args(parser)
    names, shorts = {}, {}
    for action in parser._actions:
        long = [option[2:] for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse.BooleanOptionalAction):
            long = [name for name in long if not name.startswith("no-")]
        if "help" in long:
            continue
        for name in long:
            names[name] = takes(action)
        for option in action.option_strings:
            if not option.startswith("--"):
                shorts[option[1:]] = long[0]
    return names, shorts


def main():
    text = TABLE.read_text()
    known_names, known_shorts = dict(ROW.findall(text)), dict(SHORT.findall(text))
    names, shorts = flags()
    differences = 0
    for known, there, row in (
        (known_names, names, '?("{}", {}),'),
        (known_shorts, shorts, '("{}", "{}"),'),
    ):
        for name, what in there.items():
            if known.get(name) != what:
                print(row.format(name, what))
                differences += 1
        for name in known.keys() - there.keys():
            print(f"vLLM {vllm.__version__} has no {name}")
            differences += 1
    return min(differences, 1)


if __name__ == "__main__":
    sys.exit(main())
