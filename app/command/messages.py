"""One-line messages for jsonargparse's errors, which have many lines."""

import re
from collections.abc import Collection, Mapping

from app.errors import nearest, one_line
from app.system.trust import distrust

TYPES = {"int": "a number", "float": "a number", "tuple": "list"}
REASONS = {  # patterns of jsonargparse's messages, and what follows the flag in ours
    r"Not of type \w+: [^']*'([^']*)'": r" \1: expected a number",
    r"following arguments are required: (\w+)": r": its \1 is required",
    r"Refused '([^']+)'": r" \1: a library's code runs only if it is a torch.nn.Module: "
    "call it in your own module",
    r"Expected '([^']+)' to be a [\w ]+ (?:<class '|Union\[)(?:\w+\.)*(\w+)": (
        r" \1: expected a subclass of \2"
    ),
    r"Unable to load config ['\"](.*?)['\"]": r" \1: neither a file nor settings",
}
NESTED = re.compile(
    r"- --([\w.]+)(.*?)"
    r"(?: - (?:Expected a <class 'NoneType'>|Option|Not a valid)| Given value type|$)"
)
LIMITS = {  # parts of jsonargparse's restrictions, in our words
    r"v>=(\S+)": r"\1 or more",
    r"v>(\S+)": r"more than \1",
    r" and v<=(\S+)": r", \1 at most",
    r" and v<(\S+)": r", less than \1",
}


def rejection(
    message: str, flags: Collection[str], classes: Mapping[str, Collection[str]] | None = None
) -> str:
    """Return one line: the rejected flag, its value, the first reason, the nearest known name.

    Args:
        message: jsonargparse's message.
        flags: Known flags, with dashes.
        classes: Names of the classes that a flag accepts, by the flag.
    """
    text = one_line(message)
    text = re.sub(
        "^Group '(.+)' does not accept option '(.+)'", r"unrecognized arguments: --\1.\2", text
    )
    match = re.match(r"unrecognized arguments: ([^\s=]+)", text)
    if match and match[1].endswith((".yaml", ".yml")):
        return f"{match[1]}: a value without a flag: did you mean --config {match[1]}?"
    if match:
        return f"{match[1]}: there is no such flag{nearest(match[1], flags)}"
    key = re.search(r'Parser key "([^"]+)"', text)
    if key is None:
        return text.removeprefix("argument ")
    flag = f"--{key[1]}"
    value = ""
    got = re.search(r"(?:Got|Given) value: (.+?)(?: - |$)", text)
    if got:
        value = got[1]
    nested = re.search(r"NestedArg\(key='([^']+)', val=(?:'([^']*)'|(.*?))\)", text)
    if nested:
        flag = f"{flag}.{nested[1]}".removesuffix(".class_path")
        value = nested[2] or nested[3]
    inner = NESTED.search(text)
    if inner:  # message of a nested parser
        end = f".{inner[1]}"
        if not flag.endswith(end):
            within = re.compile(rf"{flag}\b.*{re.escape(end)}")
            flag = min(filter(within.fullmatch, flags), key=len, default=flag + end)
        return flag + inner[2]
    match = re.search(r": (?:(\S+) )?does not conform to restriction (v\S+(?: and v\S+)?)", text)
    if match:
        limits = match[2]
        for pattern, words in LIMITS.items():
            limits = re.sub(pattern, words, limits)
        return f"{flag} {match[1] or value}: give {limits}"
    match = re.search(r"Option '([^']+)' is not accepted", text)
    if match:
        if not nested:
            flag = f"{flag}.{match[1]}"
        near = ""
        if flag not in flags:
            near = nearest(flag, flags)
        return f"{flag}: the chosen class has no such setting{near}"
    match = re.search(r"Importing '([^']+)' is not allowed", text)
    if match:
        return f"{flag} {match[1]}: {distrust(match[1])}"
    for pattern, template in REASONS.items():
        match = re.search(pattern, text)
        if match:
            return flag + match.expand(template)
    match = re.search(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)", text)
    if match:
        return f"{flag} {match[1] or value}: expected a subclass of {match[2]}"
    return _unexpected(text, flag, value, classes or {})


def _unexpected(text: str, flag: str, value: str, classes: Mapping[str, Collection[str]]) -> str:
    """Return the line for a value that has not the flag's type."""
    names = re.findall(r"Expected (?:an? )?<class '(?:\w+\.)*(\w+)'>", text)
    expected = [TYPES.get(name, name) for name in names if name != "NoneType"]
    match = re.search(r"dot import path string: (\S+)", text)
    if match and "a number" not in expected:
        known: list[str] = []
        for accepting, accepted in classes.items():
            if accepting.endswith(flag.lstrip("-")):  # a nested parser's flag lacks its section
                known += accepted
        near = nearest(match[1], known)
        near = near or ": give its import path, package.module.Class"
        return f"{flag} {match[1]}: there is no such class{near}"
    literals = re.findall(r"Expected (?:an? )?typing\.Literal\[([^\]]*)\]", text)
    choices = re.findall(r"'([^']*)'", " ".join(literals))
    if choices:
        expected.append(f"one of {', '.join(dict.fromkeys(choices))}")
    errors = text.partition("Errors:")[2]
    if expected and "a path" not in errors:
        near = nearest(value, choices)
        if "list" in expected and "," in value:
            near = f": give [{value}]"
        return f"{flag} {value}: expected {' or '.join(dict.fromkeys(expected))}{near}"
    reason = ""
    for clause in re.split(r"Errors:| - ", errors.partition("Given value type")[0] or text):
        if not reason and "NoneType" not in clause:
            reason = clause.strip(" -")
    reason = re.sub("Problem with given class_path '[^']+': ", "", reason)
    return f"{flag} {value}: {reason[:200]}"
