"""One staged Rietveld refinement with ObjCryst++: a request as JSON on stdin, the result as JSON on stdout.

    /usr/bin/python3 -I rietveld

Standalone on purpose: this folder runs under the system's Python (Debian package python3-pyobjcryst, numpy) and knows
nothing of the rest of the package. One process per refinement, because results of ObjCryst++ depend on what the
process did before.
"""

# pyright: reportMissingImports=false

import json
import os
import resource
import sys
import time
from typing import Any

from crystals import BadRequest, check
from stages import Refinement

MEMORY_BYTES = 2 * 2**30


def main() -> None:
    """Reads the request, refines, writes the result; a request that breaks a cap is answered by its error."""
    request = json.load(sys.stdin)
    # ObjCryst++ prints to stdout: keep the real one for the answer
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    seconds = int(request["cpu_seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # a sandbox may allow less
    memory = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        check(request)
        refinement = Refinement(request)
        refinement.stages(request["effort"] == "fast")
        result = refinement.result()
    except BadRequest as error:
        result: dict[str, Any] = {"error": str(error)}
    result["cpu_seconds"] = time.process_time()
    json.dump(result, answer)
    answer.flush()


if __name__ == "__main__":
    main()
