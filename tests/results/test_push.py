"""Model cards in a folder and on the hub, against a hub of our own that speaks its protocol."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from rlplug import compose, load
from rlplug.cli import main
from rlplug.results.export import export
from rlplug.run.launch import train

WORDS = ("hardware=cpu", "logger=[]", "eval.every=0", "eval.episodes=2", "tuned=none", "log.every=64")
PPO = (*WORDS, "algo=ppo", "env=cartpole", "num_envs=2", "total_steps=512", "rollout_fragment_length=64")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ppo"
    train(compose([*PPO, "algo.sgd_minibatch_size=64"]), folder)
    export(folder, "torch", steps=20)
    return folder


def test_a_card_in_a_folder(run, tmp_path, capfd):
    to = tmp_path / "card"
    for _ in range(2):  # it is replaced
        assert main(["push", str(run), "--to", str(to)]) == 0
    assert f"{to}: " in capfd.readouterr().out
    _, metadata, text = (to / "README.md").read_text().split("---\n", 2)
    about, summary = yaml.safe_load(metadata), json.loads((run / "summary.json").read_text())
    assert about["library_name"] == "rlplug"
    assert {"reinforcement-learning", "ppo", "CartPole-v1"} <= {*about["tags"]}
    (result,) = about["model-index"][0]["results"]
    expected = f"{summary['eval/return_mean']:.2f} +/- {summary['eval/return_std']:.2f}"
    assert result["metrics"][0]["value"] == expected
    assert f"| `eval/return_mean` | {summary['eval/return_mean']:,.2f} |" in text
    (exported,) = (to / "exports").iterdir()
    assert f"`exports/{exported.name}/policy.pt2` runs without rlplug" in text
    assert "sgd_minibatch_size: 64" in text
    assert (to / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "curve.png" in text
    (weights,) = (to / "checkpoints").iterdir()
    assert f"rlplug.load('checkpoints/{weights.name}')" in text
    assert sorted(file.name for file in weights.iterdir()) == ["manifest.json", "weights.pt"]
    assert load(to).act([0.0] * 4) == load(run).act([0.0] * 4)
    assert main(["evaluate", str(to), "eval.episodes=1"]) == 0


def test_without_matplotlib_there_is_no_curve(run, tmp_path, monkeypatch):
    monkeypatch.setattr("rlplug.results.card.find_spec", lambda name: None)
    assert main(["push", str(run), "--to", str(tmp_path / "card")]) == 0
    assert not (tmp_path / "card" / "curve.png").exists()
    assert "curve.png" not in (tmp_path / "card" / "README.md").read_text()


def test_bad_input(run, tmp_path, monkeypatch, capfd):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for words, says in (
        ([str(run), "more"], "push takes one run folder, and not more too; see rlplug push --help"),
        ([str(run), "--to", str(tmp_path)], f"--to {tmp_path}: it is there, and holds no model card"),
        ([str(run / "checkpoints" / "best")], "holds no run; push takes a run folder"),
        ([str(run), "--to", "hf://name"], "--to hf://name: user/name is right"),
        ([str(run), "--to", "hf://a/b c"], "--to hf://a/b c: "),
        ([str(run), "--to", "hf://a/b"], "push to hf:// needs a token: run `hf auth login`, or set HF_TOKEN"),
    ):
        assert main(["push", *words]) == 2
        printed = capfd.readouterr().err
        assert says in printed
        assert len(printed.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert not (run / "card").exists()


class Hub(BaseHTTPRequestHandler):
    """Creates models, and takes files that come inside of a commit."""

    created: list
    committed: dict
    refuses = False

    def do_GET(self):
        self._answer({"type": "user", "name": "ada", "siblings": [], "sha": "0" * 40})

    def do_HEAD(self):
        self._answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.headers["authorization"] == "Bearer hf_secret"
        if type(self).refuses:
            return self._answer({"error": "this token may not write"}, 403)
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body)["name"])
            return self._answer({"url": f"http://{self.headers['host']}/ada/balance", "name": "ada/balance"})
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if "/commit/" in self.path:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    self.committed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._answer(
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"http://{self.headers['host']}/ada/balance/commit/1",
                }
            )
        return self._answer({"errors": [], "warnings": []})

    def _answer(self, found, status=200):
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    Hub.created, Hub.committed, Hub.refuses = [], {}, False
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_hub_gets_the_folder(run, hub, tmp_path):
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_TOKEN": "hf_secret", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "rlplug", "push", str(run), "--to", "hf://ada/balance"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ada/balance" in done.stdout
    assert Hub.created == ["balance"]
    card = run / "card"
    files = {str(file.relative_to(card)): file.read_bytes() for file in card.rglob("*") if file.is_file()}
    assert Hub.committed == files
    assert "README.md" in files

    Hub.refuses = True
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "rlplug: hf://ada/balance: " in done.stderr
    assert f"{card} holds what was to be pushed" in done.stderr
    assert "Traceback" not in done.stderr
