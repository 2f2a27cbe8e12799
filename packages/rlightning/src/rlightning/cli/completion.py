"""Completion scripts for shells, generated from the command line's own grammar."""

from __future__ import annotations

import argparse

__all__ = ["SHELLS", "completion_script"]

SHELLS = ("bash", "zsh")

_BASH = """\
_rlightning() {{
    local words
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="{commands}" ;;
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -f -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o filenames -F _rlightning rlightning
"""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script that completes commands, options, choices, configurations and file names.

    Args:
        parser: the whole command line.
        shell: one of `SHELLS`; zsh runs the bash script through its own compatibility layer.
    """
    from rlightning.config.compose import CONFIGS

    commands = _subparsers(parser)
    shipped = {"train": sorted(path.stem for path in CONFIGS.glob("*.yaml"))}
    cases = "\n".join(
        f'        {name}) words="{" ".join(_words(command) + shipped.get(name, []))}" ;;'
        for name, command in commands.items()
    )
    script = _BASH.format(cases=cases, commands=" ".join(commands))
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _words(command: argparse.ArgumentParser) -> list[str]:
    words: list[str] = []
    for action in command._actions:
        words += action.option_strings
        words += [str(choice) for choice in action.choices or ()]
    return words
