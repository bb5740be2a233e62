"""Tell which changed lines of the core neither a test nor the type checker noticed.

``make mutants`` runs mutmut over the modules that ``pyproject.toml`` names, then this: per module
the share that was caught, and the names of those that were not. ``mutmut show NAME`` shows one.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

TARGET = 0.9
CAUGHT = frozenset({"killed", "timeout", "suspicious", "segfault", "caught by type check"})


def main() -> int:
    """Print it; return 1 where less than the target was caught."""
    mutmut = Path(sys.executable).with_name("mutmut")
    told = subprocess.run(
        [mutmut, "results", "--all", "true"], capture_output=True, text=True, check=True
    )
    missed, caught, all_ = [], Counter(), Counter()
    for line in filter(None, map(str.strip, told.stdout.splitlines())):
        name, end = line.split(": ")
        module = name.rsplit(".", 1)[0]
        all_[module] += 1
        if end in CAUGHT:
            caught[module] += 1
        else:
            missed.append(f"{name}: {end}")
    print("\n".join(missed))
    for module, number in sorted(all_.items()):
        print(f"{module:36} {caught[module]:5} of {number:5}  {caught[module] / number:.1%}")
    share = caught.total() / max(1, all_.total())
    print(f"{'all':36} {caught.total():5} of {all_.total():5}  {share:.1%}")
    return int(share < TARGET)


if __name__ == "__main__":
    sys.exit(main())
