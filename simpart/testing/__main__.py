"""`python -m simpart.testing FILE…` runs golden cases.

Exit status 0 if none failed, 1 if some did, 2 for a file that cannot be used.
"""

from __future__ import annotations

import sys
from pathlib import Path

from simpart.errors import UserError
from simpart.testing.golden import read_cases, run_case, summary


def main(arguments: list[str]) -> int:
    """Run every case of every file, one line each; the last line counts them."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m simpart.testing FILE…", file=sys.stderr if not arguments else sys.stdout)
        return 0 if arguments else 2
    try:
        files = [read_cases(Path(argument)) for argument in arguments]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    outcomes = []
    for cases in files:
        for case in cases:
            outcome = run_case(case)
            print(outcome.line(), flush=True)
            outcomes.append(outcome)
    print(summary(outcomes))
    return 1 if any(outcome.status == "FAILED" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
