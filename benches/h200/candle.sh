#!/usr/bin/env bash
# Starts the candle example from disk (cold, and in the page cache) and from weightd's cache, each in processes of its
# own, and compares times, device memory and ids:
#
#   benches/h200/candle.sh FOLDER
#
# FOLDER has the binaries weightd and candle-llama (weightd-example-candle, also as candle-llama.xz). Needs python3 with
# torch.
#
#   DEVICE=cuda|cpu   (default cuda)
#   MODEL=DIR         a checkpoint that is there   (default: an 8B Llama is made in the first of /root /var/tmp /tmp .
#                     that is on a disk with room)
#   LAYERS=32         of the model that is made
#   RUNS=3  TOKENS=16
#   COLD=drop|fadvise how the page cache is emptied (default: drop_caches where allowed)
#   TINY=DIR          a small checkpoint that brings libraries, but not the weights, back after drop_caches
#   BUDGET=330        seconds; cold runs beyond the first are left out where they would not fit
set -euo pipefail
[ -d "${1:-}" ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
folder=$(realpath "$1")
cd "$(dirname "$0")/../.."
PYTHONUNBUFFERED=1 exec python3 - "$folder" <<'PY'
import ctypes, json, os, re, shutil, signal, statistics, subprocess, sys, tempfile, time
from pathlib import Path

BEGAN = time.monotonic()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # which is this script, and nobody else's to read
env = os.environ
DEVICE, RUNS, TOKENS = env.get("DEVICE", "cuda"), int(env.get("RUNS", 3)), env.get("TOKENS", "16")
LAYERS, BUDGET = env.get("LAYERS", "32"), float(env.get("BUDGET", 330))
TINY = Path(env.get("TINY", "tests/data/llama"))
FOLDER, CUDA = Path(sys.argv[1]), DEVICE == "cuda"
WORK = Path(tempfile.mkdtemp(prefix="candle-bench-"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))


def say(text):
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}")


def out(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# ---- binaries and libraries

def binary(name):
    plain, packed, here = FOLDER / name, FOLDER / f"{name}.xz", WORK / name
    if plain.exists():
        shutil.copyfile(plain, here)
    elif packed.exists():
        import lzma
        with lzma.open(packed) as source, open(here, "wb") as target:
            shutil.copyfileobj(source, target)
    else:
        sys.exit(f"there is neither {plain} nor {packed}")
    here.chmod(0o755)
    return here


def missing(program):
    listed = subprocess.run(["ldd", program], capture_output=True, text=True)
    text = listed.stdout + listed.stderr
    wrong = [line for line in text.splitlines() if "version `" in line or "not a dynamic" in line]
    if wrong:
        sys.exit(f"{program} does not run on this system:\n" + "\n".join(wrong))
    return re.findall(r"(\S+) => not found", text)


def find_libraries(program):
    names = missing(program)
    if not names:
        return
    wanted = sum((["-o", "-name", name] for name in names), [])[1:]
    pruned = ["(", "-path", "/proc", "-o", "-path", "/sys", "-o", "-path", "/dev", ")", "-prune"]
    find = subprocess.run(["find", "/", *pruned, "-o", "(", *wanted, ")", "-print"], capture_output=True, text=True)
    folders = {}
    for path in map(Path, find.stdout.splitlines()):
        # A driver for other machines is none for this one.
        if "compat" not in path.parts and "stubs" not in path.parts:
            folders.setdefault(str(path.parent), set()).add(path.name)
    chosen, left = [], set(names)
    while left and folders:
        # Libraries of one release: the folder that has most of them, and rather PyTorch's.
        folder = max(sorted(folders), key=lambda name: (len(folders[name] & left), "/nvidia/cu13" in name))
        if not folders[folder] & left:
            break
        chosen.append(folder)
        left -= folders.pop(folder)
    env["LD_LIBRARY_PATH"] = ":".join([*chosen, *filter(None, [env.get("LD_LIBRARY_PATH")])])
    still = missing(program)
    if still:
        sys.exit(f"libraries of CUDA 13 are missing: {', '.join(still)}; found nowhere below /, or only in part: {chosen}")
    say(f"libraries: {env['LD_LIBRARY_PATH']}")


# ---- the checkpoint

def model():
    if "MODEL" in env:
        return Path(env["MODEL"])
    for place in map(Path, ["/root", "/var/tmp", "/tmp", "."]):
        kind = out("stat", "-f", "-c", "%T", str(place))
        folder = place.resolve() / f"candle-llama-{LAYERS}"
        room = shutil.disk_usage(place).free if place.is_dir() else 0
        if kind and kind not in ("tmpfs", "ramfs") and os.access(place, os.W_OK):
            if (folder / "config.json").exists():
                return folder
            if room > 3e9 + 0.44e9 * int(LAYERS):
                say(f"making {folder} on {kind}, {room / 1e9:.0f} GB free")
                subprocess.run([sys.executable, "examples/candle/make_model.py", folder, LAYERS], check=True)
                say("made")
                return folder
    sys.exit("no disk has room for the model: give MODEL=DIR")


def weights_of(folder):
    return sorted(folder.glob("*.safetensors"))


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident(folder):
    """Which part of the weights is in the page cache, in percent."""
    there = pages = 0
    for path in weights_of(folder):
        with open(path, "rb") as file:
            size = path.stat().st_size
            count = -(-size // os.sysconf("SC_PAGESIZE"))
            address = LIBC.mmap(None, size, 1, 1, file.fileno(), 0)
            vector = ctypes.create_string_buffer(count)
            if LIBC.mincore(address, size, vector) != 0:
                sys.exit("mincore failed")
            LIBC.munmap(address, size)
            there, pages = there + vector.raw[:count].count(1), pages + count
    return 100 * there / pages


def make_cold(folder):
    how = "fadvise"
    if env.get("COLD", "drop") == "drop":
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
            how = "drop_caches"
        except OSError as error:
            say(f"drop_caches: {error}; posix_fadvise instead")
    if how == "fadvise":
        for path in weights_of(folder):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    elif TINY.is_dir() and TINY.resolve() != folder.resolve():
        # Weights are to be cold, not the engine and CUDA.
        try:
            engine(TINY, "--disk")
        except SystemExit as error:
            say(f"libraries are cold too, since the small model fails: {error}")
    return f"{how}, {resident(folder):.1f} % of the weights left in the page cache"


def make_warm(folder):
    for path in weights_of(folder):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    return f"{resident(folder):.1f} % of the weights are in the page cache"


# ---- engine and daemon

TIMES = re.compile(r"since the process started: device (\S+) s, model (\S+) s, first token (\S+) s, all tokens (\S+) s")
COLUMNS = ["device", "model", "first token", "all tokens"]


def start(folder, *more):
    command = [ENGINE, "--model", folder, "--device", DEVICE, "--tokens", TOKENS, "--prompt-ids", "1,17,230,999,4"]
    log = tempfile.TemporaryFile("w+", dir=WORK)
    began = time.monotonic()
    process = subprocess.Popen([*map(str, command), *more], stdout=subprocess.PIPE, stderr=log, text=True)
    process.log, process.began = log, began
    return process


def report(process, ids, code):
    process.log.seek(0)
    log = process.log.read()
    times = TIMES.search(log)
    if code or not times:
        sys.exit(f"the engine failed ({code}):\n{log}")
    path = next(line for line in log.splitlines() if line.startswith("weights "))
    return {**dict(zip(COLUMNS, map(float, times.groups()))), "ids": ids.strip(), "path": path}


def engine(folder, *more):
    process = start(folder, *more)
    try:
        ids, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.kill()
        process.log.seek(0)
        sys.exit(f"the engine took more than 150 s:\n{process.log.read()}")
    ended = time.monotonic() - process.began
    return {**report(process, ids, process.returncode), "process end": ended}


def measure(name, folder, prepare, path, *more, spare=0.0):
    """Runs it several times; as long as there is time, where `spare` says what the rest needs."""
    results = []
    for run in range(RUNS):
        took = results[-1]["process end"] if results else 0
        if spare and results and time.monotonic() - BEGAN + 2 * took + spare > BUDGET:
            say(f"{name}: only {run} runs, for want of time")
            break
        state = prepare(folder)
        result = engine(folder, *more)
        if not result["path"].startswith(path):
            sys.exit(f"{name}: not the path that was meant: {result['path']}")
        results.append(result)
        times = ", ".join(f"{column} {result[column]:.3f}" for column in [*COLUMNS, "process end"])
        say(f"{name} {run + 1}: {times}; {result['path']}{'; ' + state if state else ''}")
    return results


def memory():
    """MiB in use on the device, once that changes no more."""
    if not CUDA:
        return None
    last = None
    for _ in range(24):
        now = int(out("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0") or -1)
        if now == last:
            break
        last = now
        time.sleep(0.7)
    return last


def memory_with_engine(folder, path, *more):
    process = start(folder, "--hold", "60", *more)
    ids = process.stdout.readline()
    used = memory()
    result = report(process, ids, process.poll())
    process.terminate()
    process.wait()
    if not result["path"].startswith(path):
        sys.exit(f"not the path that was meant: {result['path']}")
    return used, result


SOCKETS = WORK / "sockets"
LOADER = json.dumps({"socket_dir": str(SOCKETS), "fallback": False, "state_timeout_s": 60})


def serve(folder):
    log = open(WORK / "daemon.log", "w+")
    command = [DAEMON, "preload", "--model", folder, "--device", DEVICE, "--socket-dir", SOCKETS]
    began = time.monotonic()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=log, text=True)
    signal.signal(signal.SIGALRM, lambda *_: process.kill())
    signal.alarm(120)
    ready = process.stdout.readline()
    signal.alarm(0)
    log.seek(0)
    if not ready.startswith("READY"):
        sys.exit("no READY from weightd preload")
    loaded = re.findall(r"loaded .*", log.read())
    say(f"daemon: READY after {time.monotonic() - began:.3f} s; {loaded[-1] if loaded else ''}")
    return process


def stop(process):
    subprocess.run([DAEMON, "stop", "--device", DEVICE, "--socket-dir", SOCKETS], capture_output=True)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


# ---- all of it

ENGINE, DAEMON = binary("candle-llama"), binary("weightd")
daemon = None
try:
    SOCKETS.mkdir(mode=0o700)
    env["CUDA_CACHE_PATH"] = str(WORK / "compiled")  # what the driver makes of candle's PTX
    env["CUDA_CACHE_MAXSIZE"] = str(2**32 - 1)
    find_libraries(ENGINE)
    print(time.strftime("%F"), out("uname", "-r"), f"{os.cpu_count()} cores")
    if CUDA:
        print(out("nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_mode", "--format=csv,noheader"))
    print(out(str(DAEMON), "--version"))

    folder = model()
    size = sum(path.stat().st_size for path in weights_of(folder))
    os.sync()
    say(f"{folder}: {size / 1e9:.3f} GB in {len(weights_of(folder))} files, on {out('stat', '-f', '-c', '%T', str(folder))}")
    before = memory()

    warm_up = engine(folder, "--disk")
    say(f"first run ever, which compiles candle's PTX: {warm_up['process end']:.3f} s")
    disk = "weights loaded from disk"
    # What comes after the cold runs takes a minute, and more the slower the warm-up was.
    spare = 60 + 6 * warm_up["process end"] if CUDA else 10
    # In this order, since a cold run fills the page cache.
    cold = measure("disk, cold", folder, make_cold, disk, "--disk", spare=spare)
    paged = measure("disk, page cache", folder, make_warm, disk, "--disk")
    alone, with_disk = memory_with_engine(folder, disk, "--disk")

    daemon = serve(folder)
    with_daemon = memory()
    cached = ["--cache", "--loader-config", LOADER]
    mapped = "weights mapped from the cache"
    first = engine(folder, *cached)
    say(f"weightd, warm-up: model {first['model']:.3f}, first token {first['first token']:.3f}; {first['path']}")
    cache = measure("weightd", folder, lambda _: "", mapped, *cached)
    both, with_cache = memory_with_engine(folder, mapped, *cached)
    after_engine = memory()
    stop(daemon)
    daemon = None
    after = memory()

    print(f"\nSeconds since the process started, median (least to most); {TOKENS} tokens")
    head = ["device", "model", "load", "first token", "all tokens", "process end"]
    print(f"{'weights':<18}" + "".join(f"{column:>28}" for column in head))
    for name, results in [("disk, cold", cold), ("disk, page cache", paged), ("weightd", cache)]:
        for result in results:
            result["load"] = result["model"] - result["device"]
        cells = []
        for column in head:
            values = sorted(result[column] for result in results)
            cells.append(f"{statistics.median(values):.3f} ({values[0]:.3f} to {values[-1]:.3f})")
        print(f"{name:<18}" + "".join(f"{cell:>28}" for cell in cells) + f"  of {len(results)}")
    print("load: device ready to model ready. All but 'process end' are up to 10 ms too long: a process's start is known no better.")

    if CUDA:
        print(f"\nDevice memory in MiB; weights {size / 2**20:.0f}")
        for name, used in [
            ("before", before), ("engine from disk", alone), ("daemon alone", with_daemon),
            ("daemon and engine", both), ("daemon, engine gone", after_engine), ("after weightd stop", after),
        ]:
            print(f"{name:<22}{used:>8}{used - before:>+8}")

    runs = [warm_up, *cold, *paged, with_disk, first, *cache, with_cache]
    all_ids = {run["ids"] for run in runs}
    if len(all_ids) > 1:
        print("\nIDS DIFFER:")
        for run in runs:
            print(run["ids"], run["path"])
        sys.exit(1)
    print(f"\nids: equal in all {len(runs)} runs: {all_ids.pop()}")
    say("done")
except SystemExit as error:
    if error.code not in (0, None, 1) and (WORK / "daemon.log").exists():
        print("daemon:", (WORK / "daemon.log").read_text()[-3000:], file=sys.stderr)
    raise
finally:
    if daemon:
        stop(daemon)
    shutil.rmtree(WORK, ignore_errors=True)
PY
