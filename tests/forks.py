"""Processes that don't load torch and fastai again: a server, started once by each worker of pytest, has loaded them, and forks

The server has run no backward, since a fork of a process that has may not run one. What is about the loading itself takes a new interpreter"""
import multiprocessing,os,subprocess,sys,torch,weakref
from pathlib import Path
from tempfile import TemporaryDirectory

here = Path(__file__).parent
loaded = 'fastsparse.all','fastai.basics','torch._dynamo','torch.distributed.fsdp','helpers'

def server():
    "The context of the server's processes, which find the tests and the checkout's library"
    context,path = multiprocessing.get_context('forkserver'),os.environ.get('PYTHONPATH')
    context.set_forkserver_preload([*loaded])
    os.environ['PYTHONPATH'] = os.pathsep.join([str(here), str(here.parent), *filter(None, [path])])
    try: multiprocessing.forkserver.ensure_running()
    finally:
        if path is None: del os.environ['PYTHONPATH']
        else: os.environ['PYTHONPATH'] = path
    return context

def on_processes(f, *args, n=2):
    "Run `f(rank, *args)` in `n` processes at once"
    server()
    torch.multiprocessing.start_processes(f, args, nprocs=n, start_method='forkserver')

def _run(code, args, env, folder):
    for name,number in (('out',1), ('err',2)): os.dup2(os.open(f'{folder}/{name}', os.O_WRONLY|os.O_CREAT), number)
    os.environ.update(env)
    sys.argv[:] = ['-c', *map(str, args)]
    exec(compile(code, '<string>', 'exec'), {'__name__':'__main__'})
    weakref.finalize._exitfunc()  # what the end of an interpreter calls

def run_code(code, *args, seconds=3600, **env):
    "What `python -c code *args` with these variables of the environment returned, printed and wrote as errors"
    with TemporaryDirectory() as folder:
        process = server().Process(target=_run, args=(code, args, env, folder))
        process.start()
        process.join(seconds)
        if process.exitcode is None: process.kill()
        said = [Path(folder, name).read_text() for name in ('out','err')]
        return subprocess.CompletedProcess(code, process.exitcode, *said)
