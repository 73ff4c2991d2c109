"""Write down what this rank sees: arguments, environment, working directory, mounts."""

import json
import os
import sys
from pathlib import Path

mounts = {}
for line in Path("/proc/self/mountinfo").read_text().splitlines():
    fields = line.split()
    mounts[fields[4]] = {"source": fields[3], "options": fields[5]}
seen = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": str(Path.cwd()), "mounts": mounts}
Path(f"/workspace/scratch/rank-{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(seen))
