"""Create or refresh a virtual environment with Headrace in it: ``python make_venv.py DIR [EXTRA]``.

Runs on the bare interpreter before anything is installed, so it uses the standard library alone and the syntax of
Python 3.6: an interpreter that is too old gets a sentence, not a SyntaxError.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys

MINIMUM = (3, 11)
NEWER = ("python3.11", "python3.12", "python3.13", "python3.14")


def fail(message):
    sys.stderr.write("headrace: " + message + "\n")
    raise SystemExit(2)


def runs(command):
    return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def check_interpreter():
    """End with a remedy when this interpreter cannot carry Headrace."""
    if sys.version_info < MINIMUM:
        found = [name for name in NEWER if shutil.which(name) and runs([name, "-c", ""])]
        remedy = "for example: make serve PYTHON=" + found[-1] if found else "install Python 3.11 or newer"
        fail(f"{sys.executable} is Python {platform.python_version()}; 3.11 or newer is needed ({remedy})")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail(
            "{} has no venv module. On Debian and Ubuntu: apt install python{}.{}-venv; elsewhere install a complete "
            "Python and name it with PYTHON=…".format(sys.executable, *sys.version_info[:2])
        )


def environment_key():
    """What the environment itself depends on: a change of interpreter makes a new one."""
    return " ".join((platform.python_version(), platform.machine(), os.path.realpath(sys.executable)))


def install_key(root):
    """What the installed packages depend on: a change of pyproject.toml installs again."""
    with open(os.path.join(root, "pyproject.toml"), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest() + " " + root


def read(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def write(path, text):
    with open(path, "w") as file:
        file.write(text + "\n")


def create(directory):
    """A fresh environment, unless the one that is there was made by this interpreter and still runs."""
    stamp = os.path.join(directory, "headrace-python")
    python = os.path.join(directory, "bin", "python")
    if read(stamp) == environment_key() and runs([python, "-c", ""]):
        return
    if os.path.exists(directory) and not os.path.exists(os.path.join(directory, "pyvenv.cfg")):
        fail(directory + " exists and is not a virtual environment; move it away or name another with VENV=…")
    print(f"Creating {directory} with Python {platform.python_version()}", flush=True)
    if subprocess.call([sys.executable, "-m", "venv", "--clear", directory]) != 0:
        fail("could not create " + directory + " (see above)")
    write(stamp, environment_key())


def install(directory, root, extra):
    """Install the checkout, editable, with its dependencies; every extra includes what serving alone needs."""
    stamps = {name: os.path.join(directory, "headrace-installed-" + name) for name in ("run", "dev", extra) if name}
    key = install_key(root)
    if read(stamps[extra or "run"]) == key or (not extra and read(stamps["dev"]) == key):
        return
    print(f"Installing Headrace into {directory} (downloads a few hundred MB the first time)", flush=True)
    target = root + ("[" + extra + "]" if extra else "")
    pip = [os.path.join(directory, "bin", "python"), "-m", "pip", "--disable-pip-version-check"]
    if subprocess.call([*pip, "install", "--editable", target]) != 0:
        fail(
            "pip could not install the dependencies (see above). Behind a proxy or a mirror set pip's own options, for "
            "example PIP_INDEX_URL, PIP_PROXY or PIP_CERT, and run make again"
        )
    write(stamps[extra or "run"], key)


def main(arguments):
    check_interpreter()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    directory = os.path.abspath(arguments[0])
    with open(os.path.join(root, "pyproject.toml")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once in one checkout: the second waits and finds it done
        create(directory)
        install(directory, root, arguments[1] if len(arguments) > 1 else "")


if __name__ == "__main__":
    main(sys.argv[1:])
