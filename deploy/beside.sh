#!/usr/bin/env bash
# A virtual environment that also sees what .venv has: deploy/beside.sh VENV, in the repository root. What is installed into it comes first.
set -euo pipefail
venv=$1
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site .venv >"$(site "$venv")/beside.pth"
