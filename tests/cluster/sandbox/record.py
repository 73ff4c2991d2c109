"""Write down what this rank sees: arguments, environment, working directory, mounts."""

import json
import os
import sys

mounts = {}
with open("/proc/self/mountinfo") as file:
    for line in file:
        fields = line.split()
        mounts[fields[4]] = {"source": fields[3], "options": fields[5]}
seen = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "mounts": mounts}
with open(f"/workspace/scratch/rank-{os.environ['SLURM_PROCID']}.json", "w") as file:
    json.dump(seen, file)
