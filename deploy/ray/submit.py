"""Starts, shows or stops reflux on a Ray cluster through Ray's Jobs API; needs only `pip install ray` where it runs.

    python deploy/ray/submit.py --dashboard http://HEAD:8265 start --env-file /etc/reflux/env -- reflux-scheduler
    python deploy/ray/submit.py --dashboard http://HEAD:8265 status
    python deploy/ray/submit.py --dashboard http://HEAD:8265 stop

The command runs as a Ray job on the head node. The settings are a file on the head that its shell reads, because what
the Jobs API is told (runtime environments, metadata, command lines) can be read by everybody on the dashboard.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from ray.job_submission import JobStatus, JobSubmissionClient

STARTS = (JobStatus.PENDING,)
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


def entrypoint(command: Sequence[str], env_file: str) -> str:
    """The shell line of the job: the settings of the file, then the command in the shell's place."""
    line = f"exec {shlex.join(command)}"
    return f"set -a; . {shlex.quote(env_file)}; set +a; {line}" if env_file else line


def start(client: JobSubmissionClient, name: str, line: str, wait_seconds: float) -> str:
    """Starts the job under its name unless it runs; an ended one makes room first. Returns its state."""
    known = {job.submission_id: job for job in client.list_jobs()}
    if name in known and known[name].status not in ENDED:
        return f"{name} is {known[name].status} already"
    if name in known:
        client.delete_job(name)
    client.submit_job(entrypoint=f"sh -c {shlex.quote(line)}", submission_id=name)
    end = time.monotonic() + wait_seconds
    while (state := client.get_job_status(name)) in STARTS and time.monotonic() < end:
        time.sleep(0.2)
    return f"{name} is {state}"


def main() -> int:
    """Exit status 1 when the job does not run, or has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dashboard", default="http://127.0.0.1:8265", help="address of Ray's dashboard")
    parser.add_argument("--name", default="reflux", help="submission id; one stack on the cluster has one name")
    verbs = parser.add_subparsers(dest="verb", required=True)
    starting = verbs.add_parser("start")
    starting.add_argument("--env-file", default="", help="file on the head node with NAME=value lines")
    starting.add_argument("--wait-seconds", type=float, default=60.0)
    starting.add_argument("command", nargs="+")
    verbs.add_parser("status")
    verbs.add_parser("stop")
    arguments = parser.parse_args()
    client = JobSubmissionClient(arguments.dashboard)
    if arguments.verb == "start":
        line = entrypoint(arguments.command, arguments.env_file)
        print(start(client, arguments.name, line, arguments.wait_seconds))
    elif arguments.verb == "stop":
        client.stop_job(arguments.name)
    info = client.get_job_info(arguments.name)
    print(f"{info.submission_id}: {info.status}; {info.message or ''}")
    return 1 if info.status == JobStatus.FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
