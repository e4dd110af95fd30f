#!/usr/bin/env bash
# An environment for the loops of tinker-cookbook beside ours: deploy/tinker.sh VENV. A second call returns at once.
# It sees what .venv has (torch, transformers, the SDK) and adds what only the cookbook needs. Its own metadata asks for a newer
# tml-renderers than the registries have; the version below works, so that nothing is resolved here.
set -euo pipefail
venv=$1
packages=(
  tinker-cookbook==0.6.1 blobfile==3.3.0 chz==0.4.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pyarrow==26.0.1
  pycryptodomex==3.24.2 termcolor==3.3.0 tiktoken==0.14.0 tml-renderers==0.2.1
)
stamp="$venv/.ready"
wanted=$(cat "$0" .venv/.ready | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0
echo "tinker: installing the cookbook into $venv (once)" >&2
bash deploy/beside.sh "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps --ignore-installed "${packages[@]}" \
  2> >(grep -v '^WARNING: Location' >&2)
"$venv/bin/python" -c 'import tinker_cookbook.rl.train, tinker_cookbook.supervised.train'
echo "$wanted" >"$stamp"
