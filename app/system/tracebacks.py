"""Who raised an exception: an object that a flag made, or the user's own code."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

from app.errors import UserError, one_line

OURS = str(Path(__file__).parents[1]) + os.sep
LIBRARY = re.compile(rf"<|{re.escape(sysconfig.get_path('stdlib'))}|.*[/\\](site|dist)-packages[/\\]")
# where an optimizer's step computes the loss, and a strategy or a precision the gradients
STEP = re.compile(r".*[/\\](lightning[/\\]pytorch[/\\]loops|torch[/\\]autograd)[/\\]")
HEAD = "Traceback (most recent call last):\n"
BEGIN = re.compile(rf"(?:\n[TD].* exception.*:\n\n)?^(?:Original )?{re.escape(HEAD)}", re.MULTILINE)  # or of a chain
FRAME = re.compile(r'^  File "(.+?)", line \d+.*\n(?:    .*\n)*', re.MULTILINE)

MADE_BY: dict[type, str] = {}  # class that a flag names: the flag


def _is_users(file: str) -> bool:
    return not file.startswith(OURS) and not LIBRARY.match(file)


def users_part(text: str) -> str | None:
    """Cut tracebacks to the user's frames and the line that called them; None where they have none of theirs.

    Of a chain of exceptions, and of a worker process's within another, those without such frames are left out.
    """
    cut = ""
    for block in BEGIN.split(text):
        kept = [_is_users(file) for file in FRAME.findall(block)]
        if any(kept):
            kept[max(kept.index(True) - 1, 0)] = True
            frames = iter(kept)
            cut += HEAD + FRAME.sub(lambda frame, frames=frames: frame[0] * next(frames), block).strip("\n") + "\n"
    return cut or None


def maker(error: BaseException) -> str | None:
    """The flag and the class of the object that raised, such as `--data.augment RandomCrop`; None for any other."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, cls = frame.f_code.co_filename, type(frame.f_locals.get("self"))
        if file.startswith(OURS) or STEP.match(file) or _is_users(file):
            return None
        if cls in MADE_BY:
            return f"{MADE_BY[cls]} {cls.__name__}"
    return None


def blamed(error: Exception, message: str | None = None) -> UserError | None:
    """Name the flag whose object raised, with a message, by default the error's; None where no flag made it."""
    flag = maker(error)
    if flag is None:
        return UserError(message) if message else None
    text = one_line(str(error))
    message = message or (text if " " in text else f"{type(error).__name__}: {text}")
    return UserError(message if message.startswith("--") else f"{flag}: {message}")
