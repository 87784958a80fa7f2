"""Print the code reports of kernels as `bench.codegen` does: of some variants, by their names, or of all.

    python some_variants.py TARGET DTYPE [NAME ...]

A separate script, since an interpreted kernel cannot be compiled.
"""

import json
import sys

from bench import codegen

target, dtype, *names = sys.argv[1:]
every = codegen.variants
codegen.variants = lambda of: [variant for variant in every(of) if not names or variant.name in names]
for found in codegen.facts([(target, dtype)]):
    print(json.dumps(found))
