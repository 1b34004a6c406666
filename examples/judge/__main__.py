"""`python3 examples/judge [options]`: prepare the environment, then run the demo, `spanflow demo judge`, in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".ci"))

import environment

if __name__ == "__main__":
    environment.run([str(environment.VENV / "bin" / "spanflow"), "demo", "judge", *sys.argv[1:]])
