"Whole files: the old one or the new one, whatever ends the write; and Ctrl-C that waits"
import errno,hostile,json,os,pytest,random,signal,subprocess,sys,threading,torch,zlib
from adversary import agree,binary,changes,formats
from contextlib import nullcontext
from fastsparse.save import disk as files
from fastsparse.save.disk import older_file,whole_file
from fastsparse.train.engine import uninterrupted
from fastsparse.save.files import check_seal,checksum,seal
from helpers import full_disk
from pathlib import Path

def test_old_or_new(tmp_path):
    "An exception leaves the old file and nothing else; a success the new one and nothing else"
    path = tmp_path/'a.txt'
    for i in range(3):
        with whole_file(path) as new: new.write_text(str(i))
        with pytest.raises(KeyboardInterrupt):
            with whole_file(path) as new:
                new.write_text('half')
                raise KeyboardInterrupt
        assert path.read_text()==str(i) and os.listdir(tmp_path)==['a.txt']

@pytest.mark.skipif(not os.path.isdir('/proc/self/fd'), reason='needs a list of open files')
def test_nothing_stays_open_or_may_be_run(tmp_path):
    n,mask = len(os.listdir('/proc/self/fd')),os.umask(0o022)
    try:
        with whole_file(tmp_path/'a.txt') as new: new.write_text('a')
    finally: os.umask(mask)
    assert len(os.listdir('/proc/self/fd'))==n and (tmp_path/'a.txt').stat().st_mode&0o777==0o644

def test_what_a_kill_left_is_taken_over(tmp_path):
    "A killed writer leaves one new file; the next write of that file ends it"
    path = tmp_path/'a.txt'
    path.write_text('old')
    code = f"import os,signal\nfrom fastsparse.save.disk import whole_file\nwith whole_file({str(path)!r}) as new:\n  new.write_text('x'*1000)\n  os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, '-c', code]).returncode==-signal.SIGKILL
    assert path.read_text()=='old' and sorted(os.listdir(tmp_path))==['.a.part.txt','a.txt']
    with whole_file(path) as new: new.write_text('new')
    assert path.read_text()=='new' and os.listdir(tmp_path)==['a.txt']

@pytest.mark.parametrize('missing', ['no/a.txt','.'])
def test_nowhere_to_write(missing, tmp_path):
    with pytest.raises(ValueError, match='must be a file in an existing folder'):
        with whole_file(tmp_path/missing): pass

@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='needs named pipes and links')
def test_only_a_file_is_replaced_and_no_planted_link_is_followed(tmp_path):
    "A pipe at the path or at an older file's, a link, a second name and a pipe at the new file's: refused, and what was there is as it was"
    victim = tmp_path/'victim.txt'
    victim.write_text('mine')
    os.mkfifo(tmp_path/'pipe.txt')
    os.symlink(tmp_path/'pipe.txt', tmp_path/'to_pipe.txt')
    os.mkfifo(tmp_path/'old.1.txt')
    os.symlink(victim, tmp_path/'.soft.part.txt')
    os.link(victim, tmp_path/'.hard.part.txt')
    os.mkfifo(tmp_path/'.odd.part.txt')
    before = {o:os.lstat(o) for o in sorted(tmp_path.iterdir())}
    for name,what in dict(pipe='device, pipe', to_pipe='device, pipe', old='device, pipe', soft='part.txt.*remove it', hard='part.txt.*remove it', odd='part.txt.*remove it').items():
        with pytest.raises(ValueError, match=what), whole_file(tmp_path/f'{name}.txt', keep=2) as new: new.write_text('theirs')
    after = {o:os.lstat(o) for o in sorted(tmp_path.iterdir())}
    assert victim.read_text()=='mine' and [(o,s.st_ino,s.st_mode) for o,s in before.items()]==[(o,s.st_ino,s.st_mode) for o,s in after.items()]
    os.symlink(victim, tmp_path/'a.txt')
    with whole_file(tmp_path/'a.txt') as new: new.write_text('new')
    assert victim.read_text()=='mine' and (tmp_path/'a.txt').read_text()=='new' and not (tmp_path/'a.txt').is_symlink()

def safe(o, path): pytest.importorskip('safetensors.torch').save_file(o, path)

@pytest.mark.parametrize('n', [1000,50_000])
@pytest.mark.parametrize('write', [torch.save,safe,lambda o, path: path.write_bytes(bytes(200_000))], ids=['torch','safetensors','bytes'])
def test_full_disk(n, write, tmp_path):
    "Whatever writes, one `OSError` names the file, and the old file and nothing else is left"
    path = tmp_path/'a.txt'
    path.write_text('old')
    with pytest.raises(OSError, match='File too large; nothing was written.*a.txt') as e, full_disk(n), whole_file(path) as new: write(dict(a=torch.ones(200,200)), new)
    assert (e.value.errno,e.value.filename)==(errno.EFBIG,str(path))
    assert path.read_text()=='old' and os.listdir(tmp_path)==['a.txt']

def test_other_errors_are_left(tmp_path):
    for error in (ValueError('a'), FileNotFoundError(2, 'no such file', 'b.txt'), OSError('c')):
        with pytest.raises(type(error)) as e, whole_file(tmp_path/'a.txt') as new: raise error
        assert e.value is error and not os.listdir(tmp_path)

@pytest.mark.skipif(os.name=='nt' or os.geteuid()==0, reason='root may write everywhere, and Windows knows no such folder')
def test_read_only_folder(tmp_path):
    path = tmp_path/'a.txt'
    path.write_text('old')
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            with whole_file(path) as new: new.write_text('new')
        assert path.read_text()=='old'
    finally: tmp_path.chmod(0o700)

@pytest.mark.parametrize('keep', [1,2,4])
def test_the_last_are_kept(keep, tmp_path):
    "`keep` files hold the last `keep` contents, newest first"
    path = tmp_path/'a.txt'
    for i in range(6):
        with whole_file(path, keep) as new: new.write_text(str(i))
        n = min(keep, i+1)
        assert [o.read_text() for o in (path, *[older_file(path, k) for k in range(1, n)])]==[str(i-k) for k in range(n)]
        assert len(os.listdir(tmp_path))==n

def test_two_writers_wait_for_each_other(tmp_path):
    "Threads that write one file at once leave one of their contents, whole"
    path,size = tmp_path/'a.txt',10000
    def write(c):
        for _ in range(5):
            with whole_file(path) as new:
                with open(new, 'w') as f:
                    for _ in range(10): f.write(c*(size//10))
    threads = [threading.Thread(target=write, args=(c,)) for c in 'abc']
    for t in threads: t.start()
    for t in threads: t.join()
    text = path.read_text()
    assert len(text)==size and len(set(text))==1 and os.listdir(tmp_path)==['a.txt']

@pytest.mark.skipif(not os.path.isdir('/proc/self/fd'), reason='open files are listed by Linux')
@pytest.mark.parametrize('fails', [False,True])
def test_without_locks_no_open_file_is_moved_or_removed(fails, tmp_path, monkeypatch):
    "Windows, which has no `flock`, refuses to rename and to remove files that are open"
    path,was_open = tmp_path/'a.txt',[]
    def closed(f):
        def inner(part, *args, **kwargs):
            was_open.append(str(part) in [os.path.realpath(f'/proc/self/fd/{o}') for o in os.listdir('/proc/self/fd')])
            return f(part, *args, **kwargs)
        return inner
    monkeypatch.setattr(files, 'flock', None)
    monkeypatch.setattr(os, 'replace', closed(os.replace))
    monkeypatch.setattr(Path, 'unlink', closed(Path.unlink))
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), whole_file(path) as new:
        new.write_text('a')
        if fails: 1/0
    assert was_open==[False] and os.listdir(tmp_path)==([] if fails else ['a.txt'])

def test_seals_find_changes(tmp_path):
    "Cut files, added bytes and empty ones are refused by name"
    path = tmp_path/'a'
    path.write_bytes(b'x'*3000)
    seal(path, b'word')
    check_seal(path, b'word', 'list')
    whole = path.read_bytes()
    for bad in (b'', whole[:10], whole[:-1], whole+b'0', whole[1:], whole[:50]+b'y'+whole[51:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="a' is (damaged|no whole list)"): check_seal(path, b'word', 'list')

def test_a_checksum_folds_each_whole_megabyte(tmp_path):
    "Each column and each row of its 256 x 4096 words added up without carry; the rest as it is"
    a,path,crc = random.Random(0).randbytes(2**21+77),tmp_path/'a',0
    path.write_bytes(a)
    for i in (0, 2**20):
        words = [[int.from_bytes(a[k:k+8], 'little') for k in range(j, j+2**12, 8)] for j in range(i, i+2**20, 2**12)]
        for lines in (list(zip(*words)), words):
            sums = []
            for line in lines:
                sums.append(0)
                for w in line: sums[-1] ^= w
            crc = zlib.crc32(b''.join(o.to_bytes(8, 'little') for o in sums), crc)
    with path.open('rb') as f: assert checksum(f, len(a))==zlib.crc32(a[2**21:], crc)

def test_seals_of_large_files(tmp_path):
    "Every turned bit, exchanged words and rows, cleared, moved and doubled pieces of files that are folded"
    path,rng = tmp_path/'a',random.Random(0)
    whole = random.Random(1).randbytes(2*2**20+12345)
    path.write_bytes(whole)
    seal(path, b'word')
    sealed = path.read_bytes()
    def moved(a, b, n): return sealed[:a]+sealed[b:b+n]+sealed[a+n:b]+sealed[a:a+n]+sealed[b+n:]
    bad = [moved(a, a+d, n) for n in (8,64,4096,2**19) for d in (n,8*4096) if d>=n for a in (0,4096,2**20-2**19)]
    bad += [sealed[:a]+bytes(n)+sealed[a+n:] for n in (1,8,4096,2**20) for a in (0,999,2**20)]
    bad += [sealed[:-20-2**20]+sealed[-20:], sealed[:2**20]+sealed]
    for k in (*range(64), *[rng.randrange(8*len(sealed)) for _ in range(60)], *range(8*len(sealed)-160, 8*len(sealed))):
        one = bytearray(sealed)
        one[k//8] ^= 1<<k%8
        bad.append(bytes(one))
    for o in bad:
        assert o!=sealed
        path.write_bytes(o)
        with pytest.raises(ValueError, match="a' is (damaged|no whole list)"): check_seal(path, b'word', 'list')

@pytest.fixture
def ctrl_c():
    "Python's own handler, which a process that was started in the background has not"
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, was)

def test_interrupts_wait(ctrl_c):
    "In the main thread, Ctrl-C is raised after the block; the old handler is back; elsewhere nothing changes"
    handler,done = signal.getsignal(signal.SIGINT),[]
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
    assert done==[1] and signal.getsignal(signal.SIGINT) is handler
    def f():
        with uninterrupted(): done.append(signal.getsignal(signal.SIGINT) is handler)
    t = threading.Thread(target=f)
    t.start(), t.join()
    assert done==[1,True]

def test_interrupts_of_a_block_inside_another(ctrl_c):
    "The outer block ends as well"
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted(): signal.raise_signal(signal.SIGINT)
            done.append(1)
    assert done==[1]

# Files that others wrote: `adversary` holds the formats and the changes

def others_files(kind, n, folder, seed=0):
    "Read `n` changed files of a format: each is refused by an error that names it, or was read; bytes that changed in a file with a checksum change nothing unseen"
    f,rng,read = formats[kind](folder),random.Random(seed),0
    want = f.read()
    for data,way in changes(f, n, rng):
        f.path.write_bytes(data)
        signal.setitimer(signal.ITIMER_REAL, 20)
        try: got = f.read()
        except ValueError as e: assert f.name in str(e), f'{way} {e!r}'
        else:
            read += 1
            assert way is not None or kind not in binary or agree(got, want), 'a turned byte has changed what was read'
        finally: signal.setitimer(signal.ITIMER_REAL, 0)
    return read

@pytest.fixture
def no_hang():
    def stop(*args): raise RuntimeError('it hangs')
    was = signal.signal(signal.SIGALRM, stop)
    yield
    signal.signal(signal.SIGALRM, was)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('kind', formats)
def test_files_of_others_are_refused_by_name_or_read(kind, no_hang, tmp_path):
    "Law 10: no raw error and no hang, whatever stands in a file: bytes turned and moved, other values in a file whose checksum is right"
    others_files(kind, 60, tmp_path)

@pytest.mark.full
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('kind', formats)
def test_ten_thousand_files_of_others(kind, no_hang, tmp_path):
    "The same at length"
    others_files(kind, 10000, tmp_path, seed=1)

class _Touch:
    "Makes a file when it is unpickled"
    def __init__(self, path): self.path = path
    def __reduce__(self): return open,(self.path, 'w')

@pytest.mark.parametrize('kind', ['Run','History','Delta'])
def test_no_file_runs_code(kind, tmp_path):
    "An archive whose pickle calls `open` is refused by name, with a right checksum too, and nothing is called"
    f = formats[kind](tmp_path)
    f.put({**f.get(), 'position':_Touch(str(tmp_path/'touched'))})
    with pytest.raises(ValueError, match=f.name): f.read()
    assert not (tmp_path/'touched').exists()

@pytest.mark.skipif(not hasattr(os, 'fork') or not os.path.exists('/proc/self/statm'), reason='needs Linux')
def test_hostile_files_are_refused_in_little_memory(tmp_path):
    "As SECURITY.md promises: by an error that names the file, before anything has changed, without code, in two gigabytes and twenty seconds"
    told = tmp_path/'told'
    (folder := tmp_path/'files').mkdir()
    pid = os.fork()
    if not pid:
        try: told.write_text(json.dumps(list(hostile.open_all(folder))))
        finally: os._exit(0)
    assert not os.waitpid(pid, 0)[1]
    *files,code,same,good = json.loads(told.read_text())
    bad = [o for o in files if not o[1].startswith('refused') or o[0] not in o[1] or o[2] not in ('','read') and not o[2].startswith('refused')]
    assert not bad and len(files)>40
    assert [code[1],same[1],good[1:]]==[False,True,['read','read']]

# --- whoever writes a file, whatever fails on the way

def writers():
    "Functions of a path that write it"
    from fastsparse.all import prune_magnitude,save_delta,save_run,save_sparse,SparseHistory
    from fastsparse.cli import write_weights
    from helpers import mlp
    prune_magnitude(m := mlp((8,16,4)), .5)
    base = {k:v.clone() for k,v in m.state_dict().items()}
    return dict(save_sparse=lambda p: save_sparse(m, p), save_run=lambda p: save_run(p, m, torch.optim.Adam(m.parameters())),
        history=lambda p: SparseHistory().save(p), save_delta=lambda p: save_delta(m, base, p), weights=lambda p: write_weights(base, p),
        safetensors=lambda p: write_weights(base, p.with_suffix('.safetensors')))

def failing(monkeypatch, n, error):
    "The `n`-th of the calls that write fails; returns a list of those that came"
    import safetensors.torch
    from fastsparse.save import load,run_file
    calls = []
    def wrap(f):
        def g(*args, **kwargs):
            calls.append(f.__name__)
            if len(calls)==n: raise error
            return f(*args, **kwargs)
        return g
    for where,name in ((torch,'save'), (safetensors.torch,'save_file'), (os,'replace'), (os,'fsync'), (run_file,'seal'), (load,'_sum_of')):
        monkeypatch.setattr(where, name, wrap(getattr(where, name)))
    return calls

@pytest.mark.parametrize('error', [MemoryError(), OSError(errno.ENOSPC, 'No space left on device'), KeyboardInterrupt()])
@pytest.mark.parametrize('name', ['save_sparse','save_run','history','save_delta','weights','safetensors'])
def test_whatever_fails_leaves_the_old_file(name, error, tmp_path, monkeypatch):
    "At each place of a save: up to the moment at which the new file is there whole"
    pytest.importorskip('safetensors.torch')
    write,path = writers()[name],tmp_path/('a.safetensors' if name=='safetensors' else 'a.pt')
    with monkeypatch.context() as c:
        places = failing(c, 0, error)
        write(path)
    for n in range(1, len(places)+1):
        path.write_bytes(b'old')
        with monkeypatch.context() as c:
            calls = failing(c, n, error)
            with pytest.raises(type(error)): write(path)
        replaced = 'replace' in calls[:n-1]
        assert (path.read_bytes()==b'old')!=replaced and os.listdir(tmp_path)==[path.name], calls
    assert len(places)>3
