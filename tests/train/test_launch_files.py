"""The launch files of configs/launch, as far as they can be tried without a cluster."""

import os
import pathlib
import re
import shlex
import subprocess

import yaml

from mpjax.train import load_config

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "configs" / "launch"


def jobset():
  return yaml.safe_load((LAUNCH / "kubernetes_jobset.yaml").read_text())


def commands(name):
  """The commands of a launch file that train, as words, its variables filled in."""
  text = (LAUNCH / name).read_text()
  variables = dict(re.findall(r"^([A-Z_]+)=\$\{\1:-([^}]*)\}", text, re.MULTILINE))
  if name.endswith(".yaml"):
    container = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    text = "\n".join(container["args"])
  text = re.sub(r"\\\n", " ", text)
  text = re.sub(r"\$(\w+)", lambda match: variables.get(match[1], match[0]), text)
  if name == "tpu_pod.sh":
    text = "scripts/train.py " + re.search(r"printf ' %q' (.*)\)$", text, re.MULTILINE)[1]
  lines = [line for line in text.splitlines() if "scripts/train.py" in line and not line.startswith("#")]
  return [shlex.split(line.split("`")[1] if "`" in line else line) for line in lines]


def test_launch_files_train_with_configs_and_keys_that_exist():
  for name in ("slurm.sbatch", "kubernetes_jobset.yaml", "tpu_pod.sh"):
    (words,) = commands(name)
    config, *rest = words[words.index("scripts/train.py") + 1 :]
    overrides = [word for word in rest if "=" in word]
    assert {word.partition("=")[0] for word in overrides} >= {"out", "mesh.data"}, name
    assert load_config(ROOT / config, overrides).mesh.data == -1, name
    if not name.endswith(".yaml"):
      assert subprocess.run(["bash", "-n", LAUNCH / name], check=False).returncode == 0, name
  assert (ROOT / "scripts" / "train.py").exists()


def stand_in(file, text):
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(f"#!/bin/bash\n{text}\n")
  file.chmod(0o755)


def test_the_slurm_job_goes_back_into_the_queue_for_what_a_restart_mends(tmp_path):
  """Also when SIGTERM reaches the script itself, before its processes have ended."""
  stand_in(tmp_path / "scontrol", 'echo "$@" > requeued')
  environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
  requeued = tmp_path / "requeued"
  for status, restarts, again in [
    (0, 0, 0),
    (2, 0, 0),
    (3, 0, 0),
    (4, 0, 0),
    (143, 0, 1),
    (137, 19, 1),
    (5, 20, 0),
  ]:
    requeued.unlink(missing_ok=True)
    stand_in(tmp_path / "srun", f"kill -TERM $PPID; sleep 0.1; exit {status}")
    env = environment | {"SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", LAUNCH / "slurm.sbatch"], cwd=tmp_path, env=env, check=False)
    assert done.returncode == status
    assert (requeued.read_text() if requeued.exists() else "") == "requeue 7\n" * again, status


def test_the_tpu_script_quotes_what_it_hands_on(tmp_path):
  """A stand-in for gcloud runs the command in a shell, as the hosts do."""
  stand_in(
    tmp_path / "gcloud", 'for word; do case $word in --command=*) bash -c "${word#--command=}";; esac; done'
  )
  stand_in(tmp_path / "mpjax/.venv/bin/python", 'printf "%s\\n" "$@"')
  environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": "/mnt/a b"}
  words = ["train", "policy={base: fp16}", "data.path=$(touch trap); 'x'"]
  done = subprocess.run(
    [LAUNCH / "tpu_pod.sh", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert done.stdout.splitlines() == [
    "scripts/train.py",
    "configs/gpt_stdlib.yaml",
    "mesh.data=-1",
    "out=/mnt/a b",
    *words[1:],
  ]
  assert not list(tmp_path.rglob("trap"))
