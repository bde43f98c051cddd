"Whole files: the old one or the new one, whatever ends the write; and Ctrl-C that waits"
import os,pytest,random,resource,signal,subprocess,sys,threading
from fastsparse.files import check_seal,older_file,seal,uninterrupted,whole_file

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

def test_what_a_kill_left_is_taken_over(tmp_path):
    "A killed writer leaves one new file; the next write of that file ends it"
    path = tmp_path/'a.txt'
    path.write_text('old')
    code = f"import os,signal\nfrom fastsparse.files import whole_file\nwith whole_file({str(path)!r}) as new:\n  new.write_text('x'*1000)\n  os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, '-c', code]).returncode==-signal.SIGKILL
    assert path.read_text()=='old' and sorted(os.listdir(tmp_path))==['.a.part.txt','a.txt']
    with whole_file(path) as new: new.write_text('new')
    assert path.read_text()=='new' and os.listdir(tmp_path)==['a.txt']

@pytest.mark.parametrize('missing,message', [('no/a.txt',"is not there: make it first"), ('.','a folder')])
def test_nowhere_to_write(missing, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        with whole_file(tmp_path/missing): pass

def test_full_disk(tmp_path):
    "A write beyond what the disk holds raises, and leaves the old file and nothing else"
    path,(soft,hard) = tmp_path/'a.txt',resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text('old')
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000,hard))
    try:
        with pytest.raises(OSError):
            with whole_file(path) as new: new.write_text('x'*5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft,hard))
        signal.signal(signal.SIGXFSZ, old)
    assert path.read_text()=='old' and os.listdir(tmp_path)==['a.txt']

@pytest.mark.skipif(os.geteuid()==0, reason='root may write everywhere')
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
