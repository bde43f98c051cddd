"Scripts beside the library: what they import is there"
import ast,pytest
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

root = Path(__file__).parents[1]
scripts = [path for folder in ('benchmarks','examples','docs') for path in sorted((root/folder).rglob('*.py'))]

def has(module, name):
    "Does `module` have `name`, which may be a module, too?"
    return hasattr(import_module(module), name) or find_spec(f'{module}.{name}') is not None

@pytest.mark.parametrize('path', scripts, ids=lambda path: path.name)
def test_a_script_imports_what_the_library_has(path):
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and (n.module or '').startswith('fastsparse')]
    names = [(n.module, alias.name) for n in imports for alias in n.names if alias.name!='*']
    assert not [f'{module}.{name}' for module,name in names if not has(module, name)]
