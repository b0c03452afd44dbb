"""Commands that train many runs, or examine a run or this machine."""
