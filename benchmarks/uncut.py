"""`python -m benchmarks.uncut`: the server, where no batch is cut so that it can borrow, to show what cutting brings.

Every process imports this module, so it changes all of them. Not for serving.
"""

import sys
from typing import Any

from greenlane.prove import child
from server import __main__ as command
from server.workers import cutting


def _cut_nothing(module: Any) -> None:
    module.cut = lambda *_: 0
    module.untried = lambda *_: []


_cut_nothing(cutting)

if __name__ == "__main__":
    sys.exit(child.main() if sys.argv[1:] == ["child"] else command.main())
