"""Lists the mutants of the core that neither a test nor the type checker has caught.

``make mutants`` runs mutmut on the modules that ``pyproject.toml`` lists, then this. It prints the
share of caught mutants by module, and the names of the others. ``mutmut show NAME`` shows one.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

TARGET = 0.9
CAUGHT = frozenset({"killed", "timeout", "suspicious", "segfault", "caught by type check"})


def main() -> int:
    """Print the shares; return 1 if less than the target was caught."""
    mutmut = Path(sys.executable).with_name("mutmut")
    listing = subprocess.run(
        [mutmut, "results", "--all", "true"], capture_output=True, text=True, check=True
    )
    missed, caught, all_ = [], Counter(), Counter()
    for line in filter(None, map(str.strip, listing.stdout.splitlines())):
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
