import io, json, os, shutil, sqlite3, subprocess, sys, tarfile, tempfile, time

place = sys.argv[1]
shutil.rmtree(place, ignore_errors=True)
os.makedirs(place)
# What is cloned lies elsewhere: only the writing of the clone is compared.
source = tempfile.mkdtemp()
quiet = dict(check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
times = {}


def timed(name, work):
    begun = time.monotonic()
    work()
    times[name] = time.monotonic() - begun


def creates():
    os.mkdir(place + "/many")
    for n in range(1000):
        with open(f"{place}/many/{n}", "wb") as file:
            file.write(b"x" * 2048)


def reads():
    for n in range(1000):
        with open(f"{place}/many/{n}", "rb") as file:
            file.read()


def write_much():
    chunk = os.urandom(1 << 20)
    with open(place + "/much", "wb") as file:
        for _ in range(100):
            file.write(chunk)


def read_much():
    with open(place + "/much", "rb") as file:
        while file.read(1 << 20):
            pass


def repository():
    for n in range(997):
        os.makedirs(f"{source}/{n % 40}", exist_ok=True)
        with open(f"{source}/{n % 40}/{n}.txt", "w") as file:
            file.write(f"line {n}\n" * 40)
    git = ["git", "-C", source, "-c", "user.name=x", "-c", "user.email=x@y"]
    for step in [["init", "-q"], ["add", "."], ["commit", "-qm", "x"]]:
        subprocess.run(git + step, **quiet)


def packages():
    """Archives as a registry has them: 20 packages of 50 files."""
    names = []
    for n in range(20):
        manifest = json.dumps({"name": f"package-{n}", "version": "1.0.0"})
        files = {"package.json": manifest} | {f"lib/{k}.js": f"// {k}\n" * 60 for k in range(50)}
        names.append(f"{source}/package-{n}.tgz")
        with tarfile.open(names[-1], "w:gz") as archive:
            for path, text in files.items():
                entry = tarfile.TarInfo("package/" + path)
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
    return names


def install(archives):
    os.mkdir(place + "/app")
    with open(place + "/app/package.json", "w") as file:
        file.write('{"name": "app", "version": "1.0.0"}')
    quietly = ["--offline", "--no-audit", "--no-fund", "--cache", source + "/cache"]
    subprocess.run(["npm", "install", *quietly, *archives], cwd=place + "/app", **quiet)


def database():
    db = sqlite3.connect(place + "/db", isolation_level=None)
    db.execute("CREATE TABLE t (n INTEGER, text TEXT)")
    db.execute("BEGIN")
    db.executemany("INSERT INTO t VALUES (?, ?)", ((n, "x" * 100) for n in range(1000)))
    db.execute("COMMIT")
    for n in range(50):
        db.execute("INSERT INTO t VALUES (?, 'y')", (n,))


timed("1,000 creates", creates)
timed("1,000 reads", reads)
timed("100 MB written", write_much)
timed("100 MB read", read_much)
if shutil.which("git"):
    repository()
    timed("git clone", lambda: subprocess.run(["git", "clone", "-q", source, place + "/clone"], **quiet))
    timed("git status", lambda: subprocess.run(["git", "-C", place + "/clone", "status"], **quiet))
if shutil.which("npm"):
    archives = packages()
    timed("npm install", lambda: install(archives))
timed("sqlite, 1,000 rows and 50 commits", database)
shutil.rmtree(place)
shutil.rmtree(source)
print(json.dumps(times))
