"""`python -m app …`. Processes that the program spawns import this module, too."""

import sys

from app.cli import main, set_up

set_up()

if __name__ == "__main__":
    sys.exit(main())
