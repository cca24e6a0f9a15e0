"""The ``--crux-*`` flags: one for each setting, which sets a variable for the workers."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping

from crux_torch.errors import SettingsError
from crux_torch.settings import SETTINGS, Setting, Settings

_FLAGS: tuple[tuple[Setting, str], ...] = tuple((s, s.flag) for s in SETTINGS if s.flag)


def add_flags(parser: ArgumentParser) -> None:
    """Add the group "crux": one flag for each setting, with dashes or underscores.

    The value of a flag is the text for its variable. It is checked here, so that a bad value stops
    the launcher before anything starts.
    """
    group = parser.add_argument_group(
        "crux",
        "Each flag sets the environment variable in brackets for every process of the job. It wins "
        "over a variable that is set already.",
    )
    for setting, flag in _FLAGS:
        names = (flag, "--" + flag[2:].replace("-", "_"))
        switch = isinstance(setting.default, bool)
        default = f"; default {setting.default_text}" if setting.default_text and not switch else ""
        meaning = f"do not {setting.meaning}" if setting.default is True else setting.meaning
        text = f"{meaning} [{setting.env}{default}]".replace("%", "%%")
        text = text[0].upper() + text[1:]
        dest = _dest(setting)
        if switch:
            group.add_argument(
                *names,
                dest=dest,
                action="store_const",
                const=f"{not setting.default:d}",
                default=None,
                help=text,
            )
        else:
            metavar = setting.field.upper()
            group.add_argument(
                *names, dest=dest, type=_checked(setting), default=None, metavar=metavar, help=text
            )


def is_disabled(args: Namespace, env: Mapping[str, str]) -> bool:
    """Whether the flag or the variable asks for plain torchrun.

    Raises:
        SettingsError: the variable is neither true nor false.
    """
    if args.crux_disable is not None:
        return True
    return Settings.from_env({"CRUX_DISABLE": env.get("CRUX_DISABLE", "")}).disable


def environment(args: Namespace, env: Mapping[str, str]) -> tuple[dict[str, str], Settings]:
    """The variables that the given flags set, and the settings that they give with ``env``.

    Raises:
        SettingsError: a value or a combination can't be used.
    """
    given = {s.env: getattr(args, _dest(s)) for s, _ in _FLAGS}
    exports = {name: text for name, text in given.items() if text is not None}
    settings = Settings.from_env({**env, **exports})
    if settings.dispatch not in ("", "auto") and not os.path.isfile(settings.dispatch):
        raise SettingsError(f"CRUX_DISPATCH={settings.dispatch!r}: expected auto, or a file")
    return exports, settings


def with_flags(message: str) -> str:
    """``message`` with each variable preceded by the flag that sets it."""
    flags = {setting.env: flag for setting, flag in _FLAGS}
    return re.sub(
        r"\bCRUX_[A-Z_]+\b",
        lambda match: f"{flags[match[0]]} ({match[0]})" if match[0] in flags else match[0],
        message,
    )


def _dest(setting: Setting) -> str:
    return f"crux_{setting.field}"


def _checked(setting: Setting) -> Callable[[str], str]:
    def check(text: str) -> str:
        # An empty value means the default, as an empty variable does.
        if text:
            try:
                setting.parse(text)
            except ValueError as error:
                raise ArgumentTypeError(f"{text!r}: {error}") from None
        return text

    return check
