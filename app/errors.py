"""What a user did wrong: reported in one line, with exit code 2."""


class UserError(Exception):
    """Names the thing that is wrong, where it is, and the remedy, in one line."""
