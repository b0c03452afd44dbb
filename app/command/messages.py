"""One-line messages for jsonargparse's errors, which have many lines."""

import importlib.util
import re
from collections.abc import Collection, Mapping

from app.errors import nearest, one_line

NAMES = {"float": "a number", "tuple": "list", "Sequence": "list", "Iterable": "list"}
PLAIN = {  # patterns of jsonargparse's messages, and what follows the flag in ours
    r"Not of type \w+: [^']*'([^']*)'": r" \1: expected a number",
    r"following arguments are required: (\w+)": r": its \1 is required",
    r"Refused '([^']+)'": r" \1: a library's code runs only if it is a torch.nn.Module: call it in your own module",
    r"Expected '([^']+)' to be a [\w ]+ (?:<class '|Union\[)(?:\w+\.)*(\w+)": r" \1: expected a subclass of \2",
    r"Unable to load config ['\"](.*?)['\"]": r" \1: neither a file nor settings",
}
EXPECTED = re.compile(
    r"Expected (?:an? )?(?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[([^\]]*)\])"
)
NESTED = re.compile(
    r"- --([\w.]+)(.*?)(?: - (?:Expected a <class 'NoneType'>|Option|Not a valid)| Given value type|$)"
)


def rejection(
    message: str, flags: Collection[str], classes: Mapping[str, Collection[str]] | None = None
) -> str:
    """Return one line with the rejected flag, its value, the first reason, and the nearest known name.

    Args:
        message: jsonargparse's message.
        flags: Known flags, with dashes.
        classes: Names of the classes that a flag accepts, by the flag's last part.
    """
    text = one_line(message)
    match = re.match(r"unrecognized arguments: ([^\s=]+)", text)
    if match:
        if match[1].endswith((".yaml", ".yml")):
            return f"{match[1]}: a value without a flag: did you mean --config {match[1]}?"
        return f"{match[1]}: there is no such flag{nearest(match[1], flags)}"
    match = re.match(r"Subcommand '(\w+)' does not accept option '([^']+)'", text)
    if match:
        return f"{match[2]} in the config: {match[1]} has no such setting{nearest('--' + match[2], flags)}"
    key = re.search(r'Parser key "([^"]+)"', text)
    if key is None:
        return text.removeprefix("argument ")
    nested = re.search(r"NestedArg\(key='([^']+)', val=(?:'([^']*)'|(.*?))\)", text)
    flag = f"--{key[1]}.{nested[1]}".removesuffix(".class_path") if nested else f"--{key[1]}"
    inner = NESTED.search(text)
    if inner:  # message of a nested parser
        within = [
            known
            for known in flags
            if known.startswith(f"{flag}.") and known.endswith(f".{inner[1]}")
        ]
        is_typed = nested is not None and f".{nested[1]}".endswith(f".{inner[1]}")
        return (flag if is_typed else min(within, key=len, default=f"{flag}.{inner[1]}")) + inner[2]
    got = re.search(r"(?:Got|Given) value: (.+?)(?: - |$)", text)
    value = (nested[2] or nested[3]) if nested else got[1] if got else ""
    restriction = r"(?:(\S+) )?does not conform to restriction v>(=?)(\S+)(?: and v<(=?)(\S+))?"
    match = re.search(rf"Not of type \w+: {restriction}", text)
    if match:
        least = f"{match[3]} or more" if match[2] else f"more than {match[3]}"
        most = (
            f", {match[5]} at most" if match[4] else f", less than {match[5]}" if match[5] else ""
        )
        return f"{flag} {match[1] or value}: give {least}{most}"
    match = re.search(r"Option '([^']+)' is not accepted", text)
    if match:
        flag = flag if nested else f"{flag}.{match[1]}"
        return f"{flag}: the chosen class has no such setting{'' if flag in flags else nearest(flag, flags)}"
    match = re.search(r"Importing '((\w+)[^']*)' is not allowed", text)
    if match:
        remedy = f"its code is not trusted: give --trust {match[2]} to run it"
        if importlib.util.find_spec(match[2]) is None:
            remedy = f"No module named '{match[2]}'"
        return f"{flag} {match[1]}: {remedy}"
    for pattern, template in PLAIN.items():
        match = re.search(pattern, text)
        if match:
            return flag + match.expand(template)
    match = re.search(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)", text)
    if match:
        return f"{flag} {match[1] or value}: expected a subclass of {match[2]}"
    names = [
        NAMES.get(name, name)
        for name, _ in EXPECTED.findall(text)
        if name not in ("", "NoneType", "int")
    ]
    names = names or ["int"] * ("<class 'int'>" in text)
    choices = [
        choice.strip("' ")
        for _, literal in EXPECTED.findall(text)
        for choice in literal.split(",")
        if literal
    ]
    match = re.search(r"dot import path string: (\S+)", text)
    if match and "a number" not in names:
        near = nearest(match[1], (classes or {}).get(flag.rpartition(".")[2].lstrip("-"), ()))
        return f"{flag} {match[1]}: there is no such class{near or ': give its import path, package.module.Class'}"
    names += [f"one of {', '.join(dict.fromkeys(choices))}"] * bool(choices)
    if names and "a path" not in text.partition("Errors:")[2]:
        near = f": give [{value}]" if "list" in names and "," in value else nearest(value, choices)
        return f"{flag} {value}: expected {' or '.join(dict.fromkeys(names))}{near}"
    reasons = re.split(
        r"Errors:| - ", text.partition("Errors:")[2].partition("Given value type")[0] or text
    )
    reason = next(
        (
            clause.strip(" -")
            for clause in reasons
            if clause.strip(" -") and "NoneType" not in clause
        ),
        "",
    )
    reason = re.sub("Problem with given class_path '[^']+': ", "", reason)
    return f"{flag} {value}: {reason[:200]}"
