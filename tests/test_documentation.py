"""Every code block and command of the documentation runs; every relative link leads somewhere.

A page's blocks run in order in one folder, and its Python blocks share one namespace. A comment
directly above a block changes what happens to it:

- ``<!-- file: NAME -->``   the block is written to NAME, for later commands to use; a Python block
  is then imported as that module instead of being run in the page's namespace;
- ``<!-- run: ARGUMENTS -->``  appended to each command, to make it small;
- ``<!-- skip: REASON -->``  parsed but not run.
"""

import dataclasses
import importlib
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from rlightning.utils.registry import BUFFERS, ENGINE, ENVS, POLICIES, WEIGHTS

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md")
    for path in ROOT.glob(pattern)
)
PROSE = {"text", "mermaid"}
"""Blocks that show output or pictures, and are not run."""
MENTIONED = {"cd", "git", "pip", "tensorboard"}
"""Programs whose commands are only read: they change the machine or never end."""
COMMAND_LIMIT_S = 60


class PageError(AssertionError):
    """A page breaks a rule; the message says where."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, its language, its text and the comment above it."""

    line: int
    language: str
    text: str
    directive: str = ""
    argument: str = ""


def blocks_of(text):
    """Return the fenced blocks of a page."""
    found, start, body = [], None, []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        fence = re.match(r"\s*```(.*)$", line)
        if fence is None:
            body.append(line)
        elif start is None:
            start, body = (number, fence[1].strip()), []
        else:
            above = lines[start[0] - 2] if start[0] > 1 else ""
            comment = re.fullmatch(r"<!-- (file|run|skip): (.+) -->", above.strip())
            directive = comment.groups() if comment else ()
            found.append(Block(*start, "\n".join(body) + "\n", *directive))
            start = None
    if start is not None:
        raise PageError(f"line {start[0]}: the block is not closed")
    return found


def commands_of(block):
    """Return a shell block's commands as word lists, continuation lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
        if not lines:
            raise PageError("a console block has no line that starts with '$ '")
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def make_targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def run_command(words, extra, folder):
    """Run one command of a page, or check that what it mentions exists."""
    program, *arguments = words
    arguments = [str(ROOT / word) if (ROOT / word).is_file() else word for word in arguments]
    if program in MENTIONED:
        return
    if program == "make":
        unknown = {word for word in arguments if "=" not in word} - make_targets()
        if unknown:
            raise PageError(f"the Makefile has no target {sorted(unknown)}")
        return
    if program == "python":
        command = [sys.executable, *arguments, *extra]
    elif (pathlib.Path(sys.executable).parent / program).is_file() and program.startswith(
        ("rlightning", "plugrl-")
    ):
        command = [str(pathlib.Path(sys.executable).parent / program), *arguments, *extra]
    else:
        raise PageError(f"{program!r} is no command that a page may show")
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise PageError(f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}")


def check_yaml(text):
    """Parse YAML, and validate what is a whole run's configuration."""
    parsed = yaml.safe_load(text)
    if isinstance(parsed, dict) and {"policy", "env"} <= parsed.keys() and "defaults" not in parsed:
        from rlightning.config import MainConfig

        MainConfig.from_dict(parsed)


def run_block(block, namespace, folder, name):
    """Run one block of the page called `name` in `folder`."""
    if block.directive == "file":
        (folder / block.argument).write_text(block.text)
    if block.language in PROSE:
        return
    if block.language == "python":
        code = compile(block.text, f"{name}:{block.line}", "exec")
        if block.directive == "file":  # a module: imported under its own name, as later blocks do
            stem = pathlib.Path(block.argument).stem
            sys.modules.pop(stem, None)
            importlib.invalidate_caches()
            namespace.update(vars(importlib.import_module(stem)), __name__="page")
        elif block.directive != "skip":
            exec(code, namespace)
    elif block.language in ("console", "bash"):
        extra = shlex.split(block.argument) if block.directive == "run" else []
        for words in commands_of(block):
            if block.directive != "skip":
                run_command(words, extra, folder)
    elif block.language == "yaml":
        check_yaml(block.text)
    elif not block.language:
        raise PageError("the block has no language; output is `text`")
    else:
        raise PageError(f"nothing is known about blocks of {block.language!r}")


@pytest.mark.timeout(400)  # a tutorial is several commands, each of which imports torch
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (BUFFERS, ENGINE, ENVS, POLICIES, WEIGHTS):  # other tests register names too
        monkeypatch.setattr(registry, "module_dict", {})
    name = page.relative_to(ROOT).as_posix()
    namespace = {"__name__": "page"}
    for block in blocks_of(page.read_text(encoding="utf-8")):
        try:
            run_block(block, namespace, tmp_path, name)
        except Exception as error:
            raise PageError(f"{name}:{block.line}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_of_the_page_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_no_page_names_this_machine():
    here = str(ROOT.parent) + "/"
    assert not [page.name for page in PAGES if here in page.read_text(encoding="utf-8")]


# --- the rules themselves -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nx = 1\n```\n", "no language"),
        ("```fortran\nx\n```\n", "nothing is known"),
        ("```bash\nmake coffee\n```\n", "no target"),
        ("```bash\nrm -rf /tmp/x\n```\n", "no command that a page may show"),
        ("```console\nmake test\n```\n", "no line that starts"),
        ("```bash\npython -c 'raise SystemExit(3)'\n```\n", "SystemExit"),
        ("```yaml\na: [\n```\n", "while parsing"),
        ("```yaml\npolicy: {typo: x}\nenv: {}\n```\n", "typ"),
        ("```python\nx = undefined_name\n```\n", "undefined_name"),
        ("<!-- skip: needs a robot -->\n```python\ndef :\n```\n", "invalid syntax"),
    ],
)
def test_a_block_that_does_not_hold_is_an_error(text, message, tmp_path):
    (block,) = blocks_of(text)
    with pytest.raises(Exception, match=message):
        run_block(block, {}, tmp_path, "page")


def test_an_open_block_is_an_error():
    with pytest.raises(PageError, match="line 2: the block is not closed"):
        blocks_of("text\n```python\n")


def test_a_block_knows_the_comment_above_it_and_can_become_a_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "<!-- file: mine.py -->\n```python\nx = 1\n```\n\n```bash\npython mine.py\n```\n"
    first, second = blocks_of(text)
    assert (first.directive, first.argument, second.directive) == ("file", "mine.py", "")
    for block in (first, second):
        run_block(block, {}, tmp_path, "page")


def test_arguments_of_the_comment_make_a_command_small(tmp_path):
    command = "python -c 'import sys; assert sys.argv[1:]'"
    text = f"<!-- run: a.b=1 -->\n```console\n$ {command}\noutput\n```\n"
    (block,) = blocks_of(text)
    run_block(block, {}, tmp_path, "page")
