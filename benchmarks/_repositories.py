"""Small repositories that specs differ by."""

import subprocess
from pathlib import Path

import untax


def made(place: Path, count: int, files: int) -> list[untax.Repo]:
    repos = []
    for number in range(count):
        tree = place / f"repo{number}"
        tree.mkdir()
        git = ["git", "-C", str(tree), "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "init.defaultBranch=main"]
        subprocess.run([*git, "init", "--quiet"], check=True)
        for i in range(files):
            (tree / f"module{i}.py").write_text(f"x = {number * i}\n" * 20)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", "all"], check=True)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        repos.append(untax.Repo(str(tree), commit))
    return repos
