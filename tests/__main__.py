"""`python3 tests [pytest's arguments]`: prepare the environment, then run the tests in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".ci"))

import environment

if __name__ == "__main__":
    environment.run(["-m", "pytest", *sys.argv[1:]], dev=True)
