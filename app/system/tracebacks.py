"""Origin of an exception: an object that a flag created, or the user's code."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

from app.errors import UserError, one_line

OURS = str(Path(__file__).parents[1]) + os.sep
LIBRARY = re.compile(
    rf"<|{re.escape(sysconfig.get_path('stdlib'))}|.*[/\\](site|dist)-packages[/\\]|.*\.p(yx|xi)$"
)
# `maker` stops its search at frames of Lightning's loops and of autograd, because the callers of
# these frames (an optimizer, strategy or precision plugin) do not cause the error
STEP = re.compile(r".*[/\\](lightning[/\\]pytorch[/\\]loops|torch[/\\]autograd)[/\\]")
HEAD = "Traceback (most recent call last):\n"
# beginning of a traceback, with the sentence that links it to the previous one in a chain
BEGIN = re.compile(rf"(?:\n[TD].* exception.*:\n\n)?^(?:Original )?{re.escape(HEAD)}", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+?)", line \d+.*\n(?:    .*\n)*', re.MULTILINE)

MADE_BY: dict[type, str] = {}  # flag that chose each class, such as `--data.augment` for RandomCrop


def _is_users(file: str) -> bool:
    return not file.startswith(OURS) and not LIBRARY.match(file)


def users_part(text: str) -> str | None:
    """Shorten tracebacks to the user's frames and their caller; None if there are no user frames.

    The text may contain several tracebacks: a chain of exceptions, or another process's traceback.
    Tracebacks without user frames are omitted.
    """
    return "".join(map(_cut, BEGIN.split(text))) or None


def _cut(block: str) -> str:
    """Shorten one traceback; return an empty string if it has no user frame."""
    is_kept = [_is_users(file) for file in FRAME.findall(block)]
    if True not in is_kept:
        return ""
    caller = max(is_kept.index(True) - 1, 0)
    is_kept[caller] = True
    frames = iter(is_kept)

    def keep(frame: re.Match[str]) -> str:
        return frame[0] if next(frames) else ""

    return HEAD + FRAME.sub(keep, block).strip("\n") + "\n"


def maker(error: BaseException) -> str | None:
    """Return flag and class of the object that raised, such as `--data.augment RandomCrop`."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        cls = type(frame.f_locals.get("self"))
        if file.startswith(OURS) or STEP.match(file) or _is_users(file):
            return None
        if cls in MADE_BY:
            return f"{MADE_BY[cls]} {cls.__name__}"
    return None


def blamed(error: Exception, message: str | None = None) -> UserError | None:
    """Return a UserError that names the error's `maker`; None if maker and message are missing.

    Args:
        error: The exception.
        message: Message to use instead of the exception's; a message that starts with a flag is
            returned unchanged.
    """
    flag = maker(error)
    if message is None and flag is None:
        return None
    if message is None:
        message = one_line(str(error))
        if " " not in message:
            message = f"{type(error).__name__}: {message}"
    if flag is not None and not message.startswith("--"):
        message = f"{flag}: {message}"
    return UserError(message)
