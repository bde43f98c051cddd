"Try a wheel and an sdist: `python tests/try_dist.py dist` installs the wheel in an empty environment and runs README's lines there, then a few tests from the unpacked sdist"
import os,re,subprocess,sys,tarfile,zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

root = Path(__file__).parent.parent
few = [f'tests/test_{o}.py' for o in ('selection','distributions','site')]

def run(*cmd, cwd=None):
    "The output of a command"
    env = {k:v for k,v in os.environ.items() if k not in ('VIRTUAL_ENV','PYTHONPATH')}
    return subprocess.run([*map(str, cmd)], cwd=cwd, env=env, check=True, text=True, stdout=subprocess.PIPE).stdout

def readme_lines():
    "The ten lines of README.md"
    text = (root/'README.md').read_text(encoding='utf-8')
    blocks = re.findall(r'```python\n(.*?)```', text.split('## Ten lines that work')[1].split('\n## ')[0], re.DOTALL)
    return '\n'.join(blocks)

def check_wheel(wheel):
    "The package alone is in it, whole"
    names = {o for o in zipfile.ZipFile(wheel).namelist() if '.dist-info/' not in o}
    package = {p.relative_to(root).as_posix() for p in (root/'fastsparse').rglob('*') if p.suffix in ('.py','.typed')}
    assert names==package, names^package

def main(folder):
    wheel,sdist = [next(Path(folder).resolve().glob(o)) for o in ('*.whl','*.tar.gz')]
    check_wheel(wheel)
    with TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        run('uv', 'venv', '-q', '--python', sys.executable, tmp/'env')
        python = tmp/'env'/('Scripts' if os.name=='nt' else 'bin')/'python'
        install = ['uv', 'pip', 'install', '-q', '--python', python]
        run(*install, f'{wheel}[fast]')
        print(run(python.with_name('fastsparse'), '--version', cwd=tmp).strip())
        print(run(python, '-c', f'{readme_lines()}\nprint(learn.final_record)', cwd=tmp).strip().splitlines()[-1])
        with tarfile.open(sdist) as f: f.extractall(tmp, **(dict(filter='data') if hasattr(tarfile, 'data_filter') else {}))  # Python 3.11.4 has it
        source = next(o for o in tmp.iterdir() if (o/'PKG-INFO').is_file())
        run(*install, 'pytest', 'hypothesis', 'nbdev')
        print(run(python, '-m', 'pytest', '-q', '-k', 'not example_that_runs', *few, cwd=source).strip().splitlines()[-1])

if __name__=='__main__': main(sys.argv[1])
