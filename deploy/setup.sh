#!/usr/bin/env bash
# Sets the environment up once: deploy/setup.sh VENV. A second call compares hashes and returns at once; it never needs the network then.
set -euo pipefail
venv=$1
stamp="$venv/.ready"
wanted=$(cat constraints.txt deploy/setup.sh deploy/requirements-dev.txt libs/*/pyproject.toml services/*/pyproject.toml | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

apt_install() { # installs system packages ("a b c") when we may, otherwise says what will be skipped
  if [ "${REFLUX_NO_APT:-}" = 1 ]; then
    echo "setup: $1 is missing and REFLUX_NO_APT=1: $2" >&2
  elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing $1 with apt-get ($2)" >&2
    if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $1; } >"$venv.apt.log" 2>&1; then
      echo "setup: apt-get could not install $1 (see $venv.apt.log): $2" >&2
    fi
  else
    echo "setup: $1 is missing and cannot be installed here (not root or no apt): $2" >&2
  fi
}

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: python3 must be 3.11 or newer" >&2; exit 2; }
python3 -c 'import venv, ensurepip' 2>/dev/null || apt_install python3-venv "no virtual environment without it"
/usr/bin/python3 -c 'import pyobjcryst' 2>/dev/null || apt_install python3-pyobjcryst "the full-fidelity verifier (Rietveld) is skipped without it"
command -v pw.x >/dev/null || apt_install "quantum-espresso quantum-espresso-data" "the DFT verifier is skipped without it"
if ! command -v slurmctld >/dev/null && ! [ -x /usr/sbin/slurmctld ]; then
  running=" $({ cat /proc/[0-9]*/comm 2>/dev/null || true; } | tr '\n' ' ')"
  apt_install "slurmctld slurmd slurm-client slurmrestd munge slurm-wlm-basic-plugins slurm-wlm-jwt-plugin" \
    "the tests of the scheduler on a real Slurm are skipped without it"
  for unit in slurmrestd slurmctld slurmd munge; do # Tests start their own; what ran before stays as it was.
    case $running in *" $unit"*) continue ;; esac
    if [ -d /run/systemd/system ]; then
      systemctl disable --now "$unit" >/dev/null 2>&1 || true
    elif [ -x "/etc/init.d/$unit" ]; then
      service "$unit" stop >/dev/null 2>&1 || true
    fi
  done
fi
for pair in bwrap:bubblewrap runsc:runsc; do
  command -v "${pair%:*}" >/dev/null || apt_install "${pair#*:}" "the sandbox lacks the tier of ${pair%:*} without it"
done

echo "setup: creating $venv and installing the packages of constraints.txt (some minutes, once)" >&2
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v '^WARNING: Location' >&2); }
pip install -c constraints.txt torch==2.13.0
pip install -c constraints.txt hatchling editables
pip install -c constraints.txt chgnet==0.4.2 # apart: some packages that it asks for are built from source
packages=()
for folder in libs/*/ services/*/; do
  case $folder in
    libs/tasks/) packages+=(-e "./${folder%/}[chemistry]") ;;
    services/trainer/) packages+=(-e "./${folder%/}[learner]") ;;
    services/inference-gateway/) packages+=(-e "./${folder%/}[engine]") ;;
    *) packages+=(-e "./${folder%/}") ;;
  esac
done
pip install -c constraints.txt --no-build-isolation "${packages[@]}"
# By itself: others need the scheduler without its extras, and pip takes one editable package for one set of extras only.
pip install -c constraints.txt --no-build-isolation -e "./services/scheduler[kubernetes,ray]"
pip install -c constraints.txt -r deploy/requirements-dev.txt
echo "$wanted" >"$stamp"
echo "setup: done" >&2
