"""Completion of ``cruxrun`` in a shell: a script with all flags, so that no key waits for torch."""

from __future__ import annotations

from argparse import ArgumentParser

from crux_torch.settings import LIVE_POLICIES

#: As click names the variable of a command.
VARIABLE = "_CRUXRUN_COMPLETE"
_SCRIPT = """\
_cruxrun() {{
  local words='' typed=${{COMP_WORDS[COMP_CWORD]}}
  case ${{COMP_WORDS[COMP_CWORD-1]}} in
{choices}
    *) [[ $typed == -* ]] && words='{flags}' ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$typed"))
}}
complete -o default -F _cruxrun cruxrun
"""
_HEADS = {
    "bash_source": "",
    "zsh_source": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"
    "autoload -Uz bashcompinit && bashcompinit\n",
}


def script(parser: ArgumentParser, instruction: str) -> str:
    """Returns what the shell evaluates: flags, their choices, and names of files elsewhere.

    Args:
        instruction: ``bash_source`` or ``zsh_source``.

    Raises:
        ValueError: it is another one.
    """
    if instruction not in _HEADS:
        raise ValueError(f"{VARIABLE}={instruction}: expected {' or '.join(_HEADS)}")
    flags: list[str] = []
    choices: dict[str, tuple[str, ...]] = {"--crux-policy": LIVE_POLICIES}
    for action in parser._actions:
        # Of the two forms, that with dashes.
        names = [name for name in action.option_strings if name[:2] == "--" and "_" not in name]
        flags += names
        if action.choices:
            choices |= dict.fromkeys(names, tuple(map(str, action.choices)))
    cases = "\n".join(
        f"    {name}) words='{' '.join(words)}' ;;" for name, words in choices.items()
    )
    return _HEADS[instruction] + _SCRIPT.format(choices=cases, flags=" ".join(sorted(flags)))
